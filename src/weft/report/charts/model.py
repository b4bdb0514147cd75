"""What a chart is: lines, bars or a heat map as data, and the helpers that all charts use.

Values are in the unit of their axis. A chart or series that belongs to one group or client is shown while that one is
selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.report.facts import Curve, Group, RoundKey

Groups = Sequence[Group]
Values = Sequence[float | None]


@dataclass(frozen=True)
class Axis:
    title: str = ""
    unit: Literal["", "%", "points", "B"] = ""
    ticks: Sequence[tuple[float, str]] = ()
    range: tuple[float, float] | None = None
    borders: Sequence[float] = ()  # thin lines between tasks


@dataclass(frozen=True)
class Series:
    """A line, a step line, bars, or dots. A text as x is a category; None as y is a gap."""

    label: str
    x: Sequence[float] | Sequence[str]
    y: Values
    names: Sequence[str]  # what each point is, such as "after task 1"
    group: int  # index of the group, which decides color and symbol
    client: int | None = None  # None: the mean over clients
    kind: Literal["line", "steps", "bar", "dots"] = "line"
    deviations: Values = ()
    widths: Sequence[float] = ()  # of bars
    color: int | str | None = None  # instead of the group's: an index, "ink" or "faint"
    dashed: bool = False
    key: str = ""  # bars with the same key share one position and one entry of the legend


@dataclass(frozen=True)
class HeatMap:
    """Cells by row and column; the first row is at the top."""

    label: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Values]
    limits: tuple[float, float] | None = None
    digits: int = 0
    unit: str = ""
    notes: Sequence[Sequence[str]] = ()  # more about each cell
    diverging: bool = False
    row_ticks: Sequence[str] = ()  # shorter names, on the axes
    column_ticks: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    sentence: str
    body: Sequence[Series] | HeatMap
    x: Axis = Axis()
    y: Axis = Axis()
    height: int = 360
    group: int | None = None
    client: str | None = None  # a number, or "mean"
    legend: bool = False
    stacked: bool = False
    figure: str = ""  # file of the figure for a paper; charts of one file are drawn side by side


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    sentence: str
    about: str = ""
    charts: Sequence[Chart] = ()
    caveats: Sequence[str] = ()
    small: bool = False  # many small charts side by side


# ---- shared by the charts --------------------------------------------------------------------------------------------


def curve_line(index: int, group: Group, client: int | None, xs: list[float], curve: Curve, names: list[str]) -> Series:
    """A curve of fractions as a line in percent."""
    label = group.label if client is None else f"{group.label}, client {client}"
    means = percents(None if point is None else point.mean for point in curve)
    deviations = percents(None if point is None else point.deviation for point in curve)
    return Series(label, xs, means, names, index, client, deviations=deviations)


def everybody(group: Group) -> list[int | None]:
    """The mean over clients, then each client."""
    return [None, *group.clients]


def key_of(client: int | None) -> str:
    return "mean" if client is None else str(client)


def title_of(group: Group, client: int | None) -> str:
    return f"{group.label}, {'mean of clients' if client is None else f'client {client}'}"


def percents(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else 100 * value for value in values]


def task_ticks(tasks: int, offset: float = 0.0) -> list[tuple[float, str]]:
    """At most twelve labels on an axis."""
    return [(task + offset, f"task {task}") for task in range(0, tasks, 1 if tasks <= 12 else -(-tasks // 10))]


def round_axis(groups: Groups) -> Axis:
    """Task t reaches from t to t + 1; its name is in the middle."""
    tasks = max((group.tasks for group in groups), default=0)
    limits = (-0.02 * tasks, 1.02 * max(tasks, 1))
    return Axis(ticks=task_ticks(tasks, 0.5), range=limits, borders=range(1, tasks))


def position(key: RoundKey, group: Group, part: float = 0.5) -> float:
    """Where a round is on that axis; messages after the last round are at the end of their task."""
    task, number = key
    return min(task + (number + part) / group.rounds_of(task), task + 1.0)


def shorten(items: list[str]) -> list[str]:
    return [*items[:3], "...", *items[-2:]] if len(items) > 6 else items
