"""The runs of a table, one after another: what is over is read, what was stopped goes on, what is missing is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weft.engines.crew import Crew
from weft.errors import Problem
from weft.plan import Plan
from weft.repro import Row, Table
from weft.repro.results import Results, read_csv, read_line
from weft.repro.writing import files_of, write
from weft.running import check_resources, is_over, resume, run


class TableScreen(Protocol):
    """Whoever shows a table while it is made; the last two are what a session tells."""

    def table_started(self, total: int, waiting: Sequence[str], known: Mapping[str, Sequence[float]]) -> None: ...
    def run_started(self, label: str) -> None: ...
    def run_over(self, label: str, seed: int, accuracy: float | None, seconds: float) -> None: ...
    def run_failed(self, label: str, seed: int, said: str) -> None: ...
    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None: ...
    def answered(self, client: int, step: int, round_index: int, numbers: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Job:
    row: Row
    seed: int
    plan: Plan
    folder: Path

    @property
    def key(self) -> tuple[str, int]:
        return self.row.label, self.seed

    def is_begun(self) -> bool:
        """Is there a run of this very plan? Anything else in its place is refused."""
        try:
            found = (self.folder / "plan.toml").read_text(encoding="utf-8")
        except OSError:
            if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
                return False
            raise Problem(f"{self.folder} is no run folder; remove it or choose another --runs") from None
        if found != self.plan.toml():
            raise Problem(
                f"the run in {self.folder} has another plan than {self.row.label} s{self.seed} has now; "
                "remove it or choose another --runs"
            )
        return True


@dataclass(frozen=True)
class Request:
    """What is to be made: rows and seeds of a table, and where runs and results go."""

    table: Table
    rows: tuple[Row, ...]
    seeds: range
    out: Path
    runs: Path

    @functools.cached_property
    def jobs(self) -> list[Job]:
        """Seed by seed: a table that is stopped early has all its rows with fewer seeds, not some rows with all."""
        return [
            Job(row, seed, self.table.plan_of(row, seed), self.runs / f"{row.label}-s{seed}")
            for seed in self.seeds
            for row in self.rows
        ]

    @property
    def files(self) -> list[Path]:
        return files_of(self.table, self.out)


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


def reproduce(request: Request, workers: int, screen: TableScreen, say: Callable[[str], None]) -> Results:
    """Run what is missing, and write the results after each run; what can be refused is refused before the first."""
    crew = Workers(workers)
    jobs, csv = request.jobs, request.files[0]
    begun = {job.key for job in jobs if job.is_begun()}
    results = Results(request.table, request.rows, request.seeds, read_csv(csv))
    for job in jobs:
        if job.key in begun and is_over(job.folder):
            results.add(read_line(job.row, job.seed, job.folder))
    current = {line.key: line.seconds for line in results.current()}
    waiting = [job for job in jobs if job.key not in current]
    _tell_stale(results, waiting, csv, say)
    write(results, request.out)  # now, so that a folder that cannot be written is not found out after hours
    known: dict[str, list[float]] = {}
    for (label, _), seconds in current.items():
        known.setdefault(label, []).append(seconds)
    screen.table_started(len(jobs), [job.row.label for job in waiting], known)
    try:
        for job in waiting:
            screen.run_started(job.row.label)
            try:
                if job.key in begun:
                    resume(job.folder, workers=crew.ready(), screen=screen)
                else:
                    run(job.plan, job.folder, workers=crew.ready(), screen=screen)
            except Problem as problem:
                crew.close()
                results.failures[job.key] = str(problem)
                screen.run_failed(*job.key, str(problem))
            else:
                line = read_line(job.row, job.seed, job.folder)
                results.add(line)
                screen.run_over(*job.key, line.accuracy, line.seconds)
            write(results, request.out)
    finally:
        crew.close()
    return results


def _tell_stale(results: Results, waiting: Sequence[Job], csv: Path, say: Callable[[str], None]) -> None:
    """Lines of another plan than the table has now: those asked for are run again, the others stay where they are."""
    stale = {line.key for line in results.lines.values() if not results.is_current(line)}
    again = [job.key for job in waiting if job.key in stale]
    if again:
        say(f"{csv} has {_names(again)} of another plan: stale, run again")
    if kept := sorted(stale.difference(again)):
        say(f"{csv} has {_names(kept)} of another plan or table: kept there, left out of the means")


def _names(keys: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{label} s{seed}" for label, seed in keys)
