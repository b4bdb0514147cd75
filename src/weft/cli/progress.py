"""One progress display for runs, experiments and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from weft.cli.common import notes, say
from weft.plan import Plan
from weft.report.text import duration, percent

LONG_RUN = 20.0  # seconds: a run that is expected to take longer is announced
QUIET = 60.0  # seconds after which an experiment prints its progress if stderr is not a terminal


def time_left(
    waiting: Sequence[str], known: Mapping[str, Sequence[float]], current: float, guess: float | None
) -> float | None:
    """Seconds until an experiment is done: the rest of the current run and the mean of each waiting row.

    A row without a finished run takes the mean over all rows, or the `guess` for the current run.

    >>> time_left(["a", "b"], {"a": [10.0, 20.0], "c": [30.0]}, 5.0, None)   # 5 + 15 + (10 + 20 + 30) / 3
    40.0
    >>> time_left(["a"], {}, 5.0, 8.0), time_left(["a"], {}, 0.0, None)
    (13.0, None)
    """
    all_known = [seconds for row in known.values() for seconds in row]
    fallback = fmean(all_known) if all_known else guess
    expected = [fmean(known[label]) if known.get(label) else fallback for label in waiting]
    if any(seconds is None for seconds in expected):
        return None
    return current + sum(seconds for seconds in expected if seconds is not None)


class ProgressDisplay:
    """Progress bars on stderr, or plain lines if stderr is not a terminal.

    A run calls `started` and `answered`. An experiment of several runs calls the next four methods as well, and gets a
    bar for all of them. A benchmark calls `part`.
    """

    def __init__(self, console: Console = notes):
        self._console, self._live = console, console.is_terminal
        self._bars = Progress(
            TextColumn("[bold]{task.description:>10}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[position]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._all: TaskID | None = None  # the bar of the experiment
        self._current: TaskID | None = None  # the bar of the run
        self._parts: dict[str, TaskID] = {}  # the bars of a benchmark
        self._waiting: list[str] = []  # rows of the runs to come
        self._known: dict[str, list[float]] = {}  # seconds of finished runs by row
        self._finished = self._total = 0  # runs; no total without an experiment
        self._label, self._plan = "", Plan()
        self._first = self._done = self._units = 0  # replies of the run: when it started, now, at its end
        self._estimate, self._began, self._printed = 0.0, 0.0, time.monotonic()

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bars.stop()

    # ---- a run

    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None:
        self._plan, self._began, self._estimate = plan, time.monotonic(), estimate
        self._first, self._done, self._units = done, done, total
        if not self._total:
            self._label = plan.method
            if estimate > LONG_RUN:
                size = f"{plan.clients} clients x {plan.tasks} tasks x {plan.rounds_per_task} rounds"
                say(f"{plan.method}: {size}, about {duration(estimate)}", self._console)
        if self._live:
            self._current = self._add(self._label, total, done)
        self._refresh()

    def answered(self, client: int, task: int, round_index: int, fields: Mapping[str, Any]) -> None:
        plan = self._plan
        if "images" in fields:  # the reply of a round, not of a test
            self._done += 1
            position = f"client {client}  task {task} of {plan.tasks}  round {round_index} of {plan.rounds_per_task}"
            self._refresh(position)
        if self._live:
            return
        if self._total and time.monotonic() - self._printed > QUIET:
            self._print(f"{self._label}: task {task} of {plan.tasks}")
        elif not self._total and "accuracy" in fields and client == plan.clients - 1:
            passed = duration(time.monotonic() - self._began)
            say(f"{plan.method}: task {task} of {plan.tasks} learned after {passed}", self._console)

    def warned(self, text: str) -> None:
        say(f"{self._label}: warning: {text}", self._console)

    # ---- an experiment

    def experiment_started(self, total: int, waiting: Sequence[str], known: Mapping[str, Sequence[float]]) -> None:
        """Of `total` runs, those `waiting` (by row, in order) are not finished; `known` has the seconds of others."""
        self._total, self._finished, self._waiting = total, total - len(waiting), list(waiting)
        self._known = {label: list(seconds) for label, seconds in known.items()}
        if self._live:
            self._all = self._add("all runs", total, self._finished)
        elif waiting:
            say(f"{len(waiting)} of {total} runs to do", self._console)

    def run_started(self, label: str, seed: int) -> None:
        self._waiting.remove(label)
        self._label, self._began = f"{label} s{seed}", time.monotonic()

    def run_finished(self, label: str, accuracy: float | None, seconds: float) -> None:
        self._known.setdefault(label, []).append(seconds)
        self._end_run(percent(accuracy))

    def run_failed(self, reason: str) -> None:
        if self._live:
            say(f"{self._label} failed: {reason}", self._console)
        self._end_run(f"failed: {reason}")

    def _end_run(self, result: str) -> None:
        self._finished += 1
        self._first = self._done = self._units = 0
        self._estimate = 0.0
        if self._current is not None:
            self._bars.remove_task(self._current)
            self._current = None
        self._print(f"{self._label}: {result}")
        self._refresh()

    # ---- a benchmark

    def part(self, name: str, done: int, total: int) -> None:
        if not self._live:
            if done == 0:
                say(f"bench: {name}", self._console)
            return
        if name not in self._parts:
            self._parts[name] = self._add(name, total)
        self._bars.update(self._parts[name], completed=done, total=total)

    # ---- how it looks

    def _add(self, label: str, total: int, done: int = 0) -> TaskID:
        return self._bars.add_task(label, total=total, completed=done, position="", left="")

    def _refresh(self, position: str = "") -> None:
        share = self._done / self._units if self._units else 0.0
        if self._current is not None:
            left = "" if self._total else self._left()
            self._bars.update(self._current, completed=self._done, position=position, left=left)
        if self._all is not None:
            runs = f"{self._finished} of {self._total} runs"
            self._bars.update(self._all, completed=self._finished + share, position=runs, left=self._left())

    def _print(self, text: str) -> None:
        if not self._live:
            self._printed = time.monotonic()
            parts = [f"{text}; {self._finished} of {self._total} runs finished", self._left()]
            say(", ".join(filter(None, parts)), self._console)

    def _left(self) -> str:
        passed, learned = time.monotonic() - self._began, self._done - self._first
        current = passed * (self._units - self._done) / learned if learned else self._estimate
        left = time_left(self._waiting, self._known, current, passed + current if self._units else None)
        is_over = self._finished == self._total if self._total else self._done == self._units
        return "" if left is None or is_over else f"about {duration(left)} left"
