"""The runs of a table or figure, one after another: what is over is read, what was stopped goes on, the rest is run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weft import scenarios
from weft.engines.workers import Crew
from weft.errors import RunLockedError, WeftError
from weft.plan import Plan
from weft.repro import Experiment, Row
from weft.repro.desk import Desk
from weft.repro.store import F, Key, Results, changed_images, images_of, key_of, plan_text
from weft.runs.folder import read_summary
from weft.runs.run import check_resources, is_over, resume, run

SPELLED_OUT = 6  # runs in a line; of more only the first and the last are named


class ExperimentProgress(Protocol):
    """What shows the progress of an experiment; a run calls the last two."""

    def experiment_started(self, total: int, waiting: Sequence[str], known: Mapping[str, Sequence[float]]) -> None: ...
    def run_started(self, label: str, seed: int) -> None: ...
    def run_finished(self, label: str, accuracy: float | None, seconds: float) -> None: ...
    def run_failed(self, reason: str) -> None: ...
    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None: ...
    def answered(self, client: int, task: int, round_index: int, numbers: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Job:
    row: Row
    seed: int
    plan: Plan
    folder: Path

    @property
    def key(self) -> Key:
        return self.row.label, self.seed

    def is_begun(self) -> bool:
        """Is there a run of this very plan? Anything else in its place is refused."""
        try:
            found = plan_text(self.folder)
        except OSError:
            if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
                return False
            raise WeftError(f"{self.folder} is no run folder; remove it or choose another --runs") from None
        if found != self.plan.toml():
            raise WeftError(
                f"the run in {self.folder} has another plan than {self.row.label} s{self.seed} has now; "
                "remove it or choose another --runs"
            )
        return True


@dataclass(frozen=True)
class Request:
    """What is to be made: rows and seeds of an experiment, and where its runs go."""

    experiment: Experiment
    rows: tuple[Row, ...]
    seeds: range
    runs: Path
    elsewhere: Path | None = None  # the runs of other tables and figures, some of which may have the same plan

    @functools.cached_property
    def jobs(self) -> list[Job]:
        """Seed by seed: a table that is stopped early has all its rows with fewer seeds, not some rows with all."""
        return [
            Job(row, seed, self.experiment.plan_of(row, seed), self.runs / f"{row.label}-s{seed}")
            for seed in self.seeds
            for row in self.rows
        ]

    def over(self) -> dict[Key, Path]:
        """The folders of the jobs that are over, here or, with the very same plan, as a part of something else."""
        found: dict[Key, Path] = {}
        others = self._others()
        for job in self.jobs:
            if job.is_begun() and not changed_images(images_of(job.folder)):
                if is_over(job.folder):
                    found[job.key] = job.folder
            elif (folder := others.get(job.plan.toml())) is not None:
                found[job.key] = folder
        return found

    def _others(self) -> dict[str, Path]:
        """Finished runs of other tables and figures by their plans; what cannot be read there is not our business."""
        found: dict[str, Path] = {}
        wanted = {job.plan.toml() for job in self.jobs}
        for path in sorted(self.elsewhere.glob("*/*/plan.toml")) if self.elsewhere else ():
            with contextlib.suppress(OSError, UnicodeDecodeError, WeftError):
                folder = path.parent
                if (text := plan_text(folder)) in wanted and is_over(folder) and not changed_images(images_of(folder)):
                    found[text] = folder
        return found


class Workers:
    """One crew for all runs; a new one after a run that failed, with which the old one may still be busy."""

    def __init__(self, count: int):
        check_resources(count)
        self._count = count
        self._crew: Crew | None = None

    def ready(self) -> int | Crew:
        if self._count > 1 and self._crew is None:
            self._crew = Crew(self._count)
        return self._crew or 1

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
        self._crew = None


def reproduce(
    request: Request, desk: Desk[F], workers: int, screen: ExperimentProgress, say: Callable[[str], None]
) -> tuple[Results[F], list[Path]]:
    """Run what is missing, and write the results after each run; what can be refused is refused before the first.

    Gives the results and the files that hold them.
    """
    crew = Workers(workers)
    over = request.over()
    known = desk.known()
    results = Results(request.experiment, request.rows, request.seeds, known)
    for job in request.jobs:
        if job.key in over:
            results.add(desk.read(job.row, job.seed, over[job.key]))
    current = {key_of(line) for line in results.current()}
    waiting = [job for job in request.jobs if job.key not in current]
    _check_images(waiting)
    _tell_stale(results, waiting, desk.csv, say)
    if mixed := results.mixed_images():
        say(f"{desk.csv} has runs with different images of {', '.join(mixed)}: they do not compare")
    files: list[Path] = []
    if not waiting or results.lines != known:
        files = desk.write(results)
    else:  # what stands there is left alone until there is something new
        desk.check()
    screen.experiment_started(len(request.jobs), [job.row.label for job in waiting], _seconds(over.items()))
    try:
        for job in waiting:
            screen.run_started(*job.key)
            try:
                folder = _finish(job, crew, screen)
                results.add(desk.read(job.row, job.seed, folder))
            except WeftError as problem:
                crew.close()
                screen.run_failed(str(problem))
                if isinstance(problem, RunLockedError):
                    results.busy[job.key] = str(problem)
                    if not files:
                        continue  # nothing is new
                else:
                    results.failures[job.key] = str(problem)
            else:
                summary = read_summary(folder) or {}
                screen.run_finished(job.row.label, summary.get("accuracy"), summary["seconds"])
            files = desk.write(results, more_to_come=job is not waiting[-1])
    finally:
        crew.close()
    return results, files


def _check_images(waiting: Sequence[Job]) -> None:
    """A dataset that is not there, or a run of other images that is in the way, is told before anything is run."""
    for job in {(job.plan.scenario, repr(job.plan.scenario_options)): job for job in waiting}.values():
        scenarios.of(job.plan)
    changed = {job.folder: changed_images(images_of(job.folder)) for job in waiting if job.is_begun()}
    if old := [folder for folder, names in changed.items() if names]:
        more = f" (and {len(old) - 1} more)" if len(old) > 1 else ""
        raise WeftError(
            f"the run in {old[0]}{more} is of other images of {', '.join(changed[old[0]])} than are here now, "
            "or of another cut of them; remove it or choose another --runs"
        )


def _finish(job: Job, crew: Workers, screen: ExperimentProgress) -> Path:
    """Whether it is begun is asked now: another process may have been here since we started."""
    if job.is_begun():
        resume(job.folder, workers=crew.ready(), screen=screen)
    else:
        run(job.plan, job.folder, workers=crew.ready(), screen=screen)
    return job.folder


def _seconds(over: Iterable[tuple[Key, Path]]) -> dict[str, list[float]]:
    """How long the runs of each row took, from which the time left is known."""
    found: dict[str, list[float]] = {}
    for (label, _), folder in over:
        found.setdefault(label, []).append((read_summary(folder) or {})["seconds"])
    return found


def _tell_stale(results: Results[F], waiting: Sequence[Job], csv: Path, say: Callable[[str], None]) -> None:
    """What is not of the plan and the images of now: what was asked for is run again, the rest stays where it is."""
    asked = {job.key for job in waiting}
    why: dict[str, list[Key]] = {}
    for key, line in sorted(results.lines.items()):
        if not results.is_of_its_plan(line):
            of = "another plan" if key in asked else "another plan or table"
        elif changed := results.changed_images(line):
            of = f"other images of {', '.join(changed)}, or of another cut of them"
        else:
            continue
        done = "stale, run again (--out keeps yours apart)" if key in asked else "kept there, left out of the means"
        why.setdefault(f"of {of}: {done}", []).append(key)
    for said, keys in why.items():
        say(f"{csv} has {_names(keys)} {said}")


def _names(keys: Sequence[Key]) -> str:
    """
    >>> _names([("stl", 0), ("stl", 1)]), _names([("stl", seed) for seed in range(20)])
    ('stl s0, stl s1', '20 runs (stl s0 to stl s19)')
    """
    names = [f"{label} s{seed}" for label, seed in keys]
    return ", ".join(names) if len(names) <= SPELLED_OUT else f"{len(names)} runs ({names[0]} to {names[-1]})"
