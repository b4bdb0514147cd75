"""What a person sees of a table in the terminal: progress over all its runs with the time left, and its rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from weft.plan import Plan
from weft.report.screens import duration, percent, spread_text
from weft.repro.writing import Entry

QUIET = 60.0  # seconds after which a run without a terminal says where it is


def time_left(
    waiting: Sequence[str], known: Mapping[str, Sequence[float]], current: float, guess: float | None
) -> float | None:
    """Seconds until the table is done: the current run's, and for each waiting row what its runs took so far.

    A row that nothing is known of takes as long as the mean of the others, or the current run's `guess`.

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


class TableBars:
    """Two bars on stderr, one of the whole table and one of the current run. Plain lines where it is no terminal."""

    def __init__(self, console: Console):
        self._console, self._live = console, console.is_terminal
        self._bars = Progress(
            TextColumn("[bold]{task.fields[label]:>10}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[place]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            expand=True,
        )
        self._waiting: list[str] = []
        self._known: dict[str, list[float]] = {}
        self._over = self._total = 0
        self._label, self._plan = "", Plan()
        self._done = self._first = self._units = 0
        self._estimate, self._began, self._said = 0.0, 0.0, time.monotonic()

    def __enter__(self) -> TableBars:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bars.stop()

    def table_started(self, total: int, waiting: Sequence[str], known: Mapping[str, Sequence[float]]) -> None:
        """`total` runs in all, of which the `waiting` ones (by row, in order) are to be run."""
        self._total, self._over, self._waiting = total, total - len(waiting), list(waiting)
        self._known = {label: list(seconds) for label, seconds in known.items()}
        if self._live:
            self._whole = self._bars.add_task("", total=total, completed=self._over, label="table", place="", left="")
            self._one = self._bars.add_task("", total=None, label="", place="", left="")
        elif waiting:
            self._console.print(f"{len(waiting)} of {total} runs to do")

    def run_started(self, label: str) -> None:
        self._waiting.remove(label)
        self._label, self._done, self._first, self._units, self._began = label, 0, 0, 0, time.monotonic()

    def run_over(self, label: str, seed: int, accuracy: float | None, seconds: float) -> None:
        self._known.setdefault(label, []).append(seconds)
        self._finish(f"{label} s{seed}: {percent(accuracy)}")

    def run_failed(self, label: str, seed: int, said: str) -> None:
        self._finish(f"{label} s{seed} failed: {said}", always=True)

    # ---- what a session tells

    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None:
        self._plan, self._estimate, self._began = plan, estimate, time.monotonic()
        self._done = self._first = done
        self._units = total
        if self._live:
            self._bars.reset(self._one, total=total, completed=done, label=self._label, place="", left="")
        self._show()

    def answered(self, client: int, step: int, round_index: int, numbers: Mapping[str, Any]) -> None:
        if "images" in numbers:
            self._done += 1
            self._show(f"s{self._plan.seed}  client {client}  task {step}  round {round_index}")
        if not self._live and time.monotonic() - self._said > QUIET:
            self._say(f"{self._label} s{self._plan.seed}: task {step} of {self._plan.tasks}")

    # ---- how it looks

    def _show(self, place: str = "") -> None:
        if self._live:
            share = self._done / self._units if self._units else 0.0
            self._bars.update(self._one, completed=self._done, place=place)
            runs = f"{self._over} of {self._total} runs"
            self._bars.update(self._whole, completed=self._over + share, place=runs, left=self._left_words())

    def _finish(self, words: str, always: bool = False) -> None:
        self._over += 1
        self._units = self._done = self._first = 0
        self._estimate = 0.0
        if self._live and always:
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)
        elif not self._live:
            self._say(words)
        self._show()

    def _say(self, words: str) -> None:
        self._said = time.monotonic()
        line = f"{words}; {self._over} of {self._total} runs over"
        self._console.print(
            ", ".join(filter(None, [line, self._left_words()])), highlight=False, markup=False, soft_wrap=True
        )

    def _left_words(self) -> str:
        passed = time.monotonic() - self._began
        learned = self._done - self._first
        current = passed * (self._units - self._done) / learned if learned else self._estimate
        whole = (passed + current) if self._units else None
        left = time_left(self._waiting, self._known, current, whole)
        return "" if left is None or self._over == self._total else f"about {duration(left)} left"


def rows(entries: Sequence[Entry], sign: str) -> Grid:
    """The table in eighty columns: the files have it whole."""
    with_paper = any("accuracy" in entry.published for entry in entries)
    grid = Grid(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    grid.add_column("row", overflow="fold")
    headings = [
        "accuracy (%)",
        *(["paper's"] if with_paper else []),
        "forgets",
        "up (MB)",
        "down (MB)",
        "model",
        "seeds",
    ]
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        found = entry.found
        means = {key: None if value is None else (value.mean, None) for key, value in found.items()}
        published = entry.published.get("accuracy")
        grid.add_row(
            entry.row.label,
            spread_text(found["accuracy"], 1, sign),
            *([spread_text(published and (published[0], None), 2, sign)] if with_paper else []),  # as printed
            spread_text(means["forgetting"], 3, sign),
            *(spread_text(means[key], 1, sign) for key in ("up", "down", "model")),
            str(entry.seeds),
        )
    return grid
