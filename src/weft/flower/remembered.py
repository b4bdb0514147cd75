"""The runs that a site remembers, and which of them a person means."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError
from weft.plan import flat_keys
from weft.runs.folder import read_manifest


@dataclass(frozen=True)
class Known:
    """A run, as the site knows it; its id is the name of the hub's run folder and twelve letters."""

    id: str
    plan: str  # the name of the hub's plan
    answers: int
    tasks: int  # finished
    last: str  # the request that was answered last: task.round.client
    when: str  # UTC; that it was answered
    damage: str = ""  # what cannot be read, and what to do; nothing else is known of it then

    @property
    def name(self) -> str:
        return self.id.rpartition("-")[0]

    def in_words(self) -> str:
        if self.damage:
            return f"{self.id}: {self.damage}"
        answers = f"{self.answers} answer{'' if self.answers == 1 else 's'}"
        tasks = f"{self.tasks} task{'' if self.tasks == 1 else 's'} learned"
        return f"{self.id}: {tasks}, {answers}, the last on {self.when} UTC"


def known(site: Path) -> list[Known]:
    """The one that was answered last comes last."""
    found = [(path.stat().st_mtime_ns, path.parent) for path in (site / "state").glob("*/manifest.json")]
    return [_known(folder, at) for at, folder in sorted(found)]


@contextlib.contextmanager
def still(site: Path) -> Iterator[None]:
    """No run is worked on meanwhile, nor does a new one begin; a `WeftError` if one is worked on just now."""
    from weft.flower.site_state import DOOR, LOCK  # loads torch

    with contextlib.ExitStack() as held:
        held.enter_context(filelock.FileLock(site / "state" / DOOR))  # first: whoever passes it has a lock of its own
        for folder in filter(Path.is_dir, (site / "state").iterdir()):
            try:
                held.enter_context(filelock.FileLock(folder / LOCK, timeout=0))
            except filelock.Timeout:
                raise WeftError(f"the site is at work on {folder.name}; try again in a moment") from None
        yield


@contextlib.contextmanager
def one_by_one(site: Path) -> Iterator[None]:
    """For whoever reads the list of tasks and writes it again: of two at the same time one would be lost."""
    try:
        with filelock.FileLock(site / ".tasks.lock", timeout=0):
            yield
    except filelock.Timeout:
        raise WeftError("another command changes the site's tasks just now; try again when it is done") from None


def who_began(site: Path, step: int) -> str | None:
    """A run that has begun this task of the site's own, if one has; a `WeftError` if one that is damaged may have."""
    for folder in sorted(path.parent for path in (site / "state").glob("*/manifest.json")):
        try:
            plan = flat_keys((folder / "plan.toml").read_text(encoding="utf-8"))
            begun = [numbers.get("begun", -1) for numbers in _numbers(folder)]
        except (WeftError, OSError, ValueError) as why:
            raise WeftError(f"whether {folder.name} has begun the task is not known: {_damage(folder, why)}") from None
        if plan.get("scenario") == "sites" and max(begun, default=-1) >= step:
            return folder.name
    return None


def _damage(folder: Path, why: object) -> str:
    """In words of a site, which has no checkpoints and begins no runs."""
    said = str(why).partition("; run again")[0]
    return f"its memory is damaged ({said}); put it back from a copy, or move {folder} away once that run is over"


def _numbers(folder: Path) -> list[dict[str, Any]]:
    """Of the state of each client that the site is in a run, which is one."""
    from weft.report.states import read_numbers

    manifest = read_manifest(folder) or {"states": {}}
    return [read_numbers(folder / state["file"][0]) for state in manifest["states"].values()]


def _known(folder: Path, at: int) -> Known:
    when = datetime.datetime.fromtimestamp(at / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    plan = ""
    with contextlib.suppress(OSError, ValueError):
        plan = str(flat_keys((folder / "plan.toml").read_text(encoding="utf-8")).get("name", ""))
    try:
        manifest = read_manifest(folder) or {"answers": {}, "replies": {}}
        finished = [numbers.get("finished", -1) for numbers in _numbers(folder)]
    except (WeftError, OSError) as why:
        return Known(folder.name, plan, 0, 0, "", when, _damage(folder, why))
    tasks, answers = max(finished, default=-1) + 1, sum(manifest["answers"].values())
    return Known(folder.name, plan, answers, tasks, ["", *manifest["replies"]][-1], when)


def run_called(name: str, runs: list[Known]) -> Known:
    """A run by its id or an unambiguous beginning of it; by a name, of the run or of its plan, the latest so called."""
    for fits in (
        [run for run in runs if run.id == name],
        [run for run in runs if run.name == name][-1:],
        [run for run in runs if run.plan == name][-1:],
        [run for run in runs if run.id.startswith(name)],
    ):
        if len(fits) == 1:
            return fits[0]
        if fits:
            raise WeftError(f"several runs begin with {name}; say which: {', '.join(run.id for run in fits)}")
    there = f"there are {', '.join(run.id for run in runs)}" if runs else "the site has answered in none yet"
    raise WeftError(f"there is no run {name} here; {there}")
