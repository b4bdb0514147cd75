"""Run an experiment: read what is finished, resume what was stopped, run the rest, and write the results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from weft import scenarios
from weft.engines.workers import WorkerPool
from weft.errors import RunLockedError, WeftError
from weft.plan import Plan
from weft.repro import Experiment, Row
from weft.repro.output import render
from weft.repro.store import Key, Results, Store, changed_images, images_of, record_of
from weft.runs.folder import read_summary
from weft.runs.run import Display, check_resources, is_over, resume, run

MOST_NAMED = 6  # runs in a message; of more, only the first and the last are named


class ExperimentProgress(Display, Protocol):
    """Shows the progress of an experiment and of its runs."""

    def experiment_started(self, total: int, waiting: Sequence[str], known: Mapping[str, Sequence[float]]) -> None: ...
    def run_started(self, label: str, seed: int) -> None: ...
    def run_finished(self, label: str, accuracy: float | None, seconds: float) -> None: ...
    def run_failed(self, reason: str) -> None: ...


@dataclass(frozen=True)
class Job:
    row: Row
    seed: int
    plan: Plan
    folder: Path

    @property
    def key(self) -> Key:
        return self.row.label, self.seed

    def is_started(self) -> bool:
        """Is there a run with this plan? Anything else in its folder is an error."""
        try:
            text = _plan_text(self.folder)
        except OSError:
            if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
                return False
            raise WeftError(f"{self.folder} is not a run folder; remove it or choose another --runs") from None
        if text != self.plan.toml():
            raise WeftError(
                f"the run in {self.folder} has another plan than {self.row.label} s{self.seed} has now; "
                "remove it or choose another --runs"
            )
        return True


@dataclass(frozen=True)
class Request:
    """Rows and seeds of an experiment, and the folder of its runs."""

    experiment: Experiment
    rows: tuple[Row, ...]
    seeds: range
    runs: Path
    elsewhere: Path | None = None  # runs of other experiments, some of which may have the same plan

    @functools.cached_property
    def jobs(self) -> list[Job]:
        """Seed by seed: a table that is stopped early has all rows with fewer seeds."""
        return [
            Job(row, seed, self.experiment.plan_of(row, seed), self.runs / f"{row.label}-s{seed}")
            for seed in self.seeds
            for row in self.rows
        ]

    def finished(self) -> dict[Key, Path]:
        """Folders of finished jobs, here or, with the same plan, in another experiment."""
        found: dict[Key, Path] = {}
        others = self._others()
        for job in self.jobs:
            if job.is_started() and not changed_images(images_of(job.folder)):
                if is_over(job.folder):
                    found[job.key] = job.folder
            elif (folder := others.get(job.plan.toml())) is not None:
                found[job.key] = folder
        return found

    def _others(self) -> dict[str, Path]:
        """Finished runs of other experiments by plan; unreadable ones are ignored."""
        found: dict[str, Path] = {}
        wanted = {job.plan.toml() for job in self.jobs}
        for path in sorted(self.elsewhere.glob("*/*/plan.toml")) if self.elsewhere else ():
            with contextlib.suppress(OSError, UnicodeDecodeError, WeftError):
                folder, text = path.parent, _plan_text(path.parent)
                if text in wanted and is_over(folder) and not changed_images(images_of(folder)):
                    found[text] = folder
        return found


def reproduce(
    request: Request, out: Path, workers: int, progress: ExperimentProgress, say: Callable[[str], None]
) -> tuple[Results, list[Path]]:
    """Run what is missing and write the results into `out` after each run. Return the results and their files.

    Everything that can be checked is checked before the first run.
    """
    experiment = request.experiment
    if experiment.figure and find_spec("matplotlib") is None:
        raise WeftError('figures need matplotlib, which is not installed: pip install "weft[figures]"')
    check_resources(workers)
    store = Store(experiment, out, render)
    finished, known = request.finished(), store.read()
    results = Results(experiment, request.rows, request.seeds, dict(known))
    for job in request.jobs:
        if job.key in finished:
            results.add(record_of(experiment, job.row, job.seed, finished[job.key]))
    current = {record.key for record in results.current()}
    waiting = [job for job in request.jobs if job.key not in current]
    _check_images(waiting)
    _report_stale(results, waiting, store.path(".csv"), say)
    if mixed := results.mixed_images():
        say(f"{store.path('.csv')} has runs with different images of {', '.join(mixed)}: they cannot be compared")
    files: list[Path] = []
    if not waiting or results.records != known:
        files = store.write(results)
    else:  # files stay unchanged until a run is finished
        store.check()
    seconds: dict[str, list[float]] = {}  # of finished runs, from which the time left is estimated
    for (label, _), folder in finished.items():
        seconds.setdefault(label, []).append((read_summary(folder) or {})["seconds"])
    progress.experiment_started(len(request.jobs), [job.row.label for job in waiting], seconds)
    with contextlib.ExitStack() as pools:
        pool: int | WorkerPool | None = None
        for job in waiting:
            progress.run_started(*job.key)
            try:
                if pool is None:
                    pool = pools.enter_context(contextlib.closing(WorkerPool(workers))) if workers > 1 else 1
                if job.is_started():  # perhaps by another process meanwhile
                    resume(job.folder, workers=pool, display=progress)
                else:
                    run(job.plan, job.folder, workers=pool, display=progress)
                results.add(record_of(experiment, job.row, job.seed, job.folder))
            except WeftError as error:
                pools.close()  # workers may still be busy with the failed run
                pool = None
                progress.run_failed(str(error))
                if isinstance(error, RunLockedError):
                    results.locked[job.key] = str(error)
                    if not files:
                        continue  # nothing is new
                else:
                    results.failures[job.key] = str(error)
            else:
                summary = read_summary(job.folder) or {}
                progress.run_finished(job.row.label, summary.get("accuracy"), summary["seconds"])
            files = store.write(results, more_to_come=job is not waiting[-1])
    return results, files


def _plan_text(folder: Path) -> str:
    return (folder / "plan.toml").read_text(encoding="utf-8")


def _check_images(waiting: Sequence[Job]) -> None:
    """Fail before the first run if a dataset is missing, or if a run with other images is in the way."""
    for job in {(job.plan.scenario, repr(job.plan.scenario_options)): job for job in waiting}.values():
        scenarios.of(job.plan)
    changed = {job.folder: changed_images(images_of(job.folder)) for job in waiting if job.is_started()}
    if old := [folder for folder, names in changed.items() if names]:
        more = f" (and {len(old) - 1} more)" if len(old) > 1 else ""
        raise WeftError(
            f"the run in {old[0]}{more} used other images or splits of {', '.join(changed[old[0]])} than the dataset "
            "cache has now; remove it or choose another --runs"
        )


def _report_stale(results: Results, waiting: Sequence[Job], csv: Path, say: Callable[[str], None]) -> None:
    """Report results of another plan or other images: requested ones are run again, the rest is kept."""
    requested = {job.key for job in waiting}
    messages: dict[str, list[Key]] = {}
    for key, record in sorted(results.records.items()):
        if not results.has_current_plan(record):
            reason = "another plan" if key in requested else "another plan or table"
        elif changed := changed_images(record.images):
            reason = f"other images or splits of {', '.join(changed)}"
        else:
            continue
        fate = "stale, run again (--out keeps yours apart)" if key in requested else "kept, not counted in the means"
        messages.setdefault(f"of {reason}: {fate}", []).append(key)
    for message, keys in messages.items():
        names = [f"{label} s{seed}" for label, seed in keys]
        few = len(names) <= MOST_NAMED
        say(f"{csv} has {', '.join(names) if few else f'{len(names)} runs ({names[0]} to {names[-1]})'} {message}")
