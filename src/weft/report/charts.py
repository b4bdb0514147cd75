"""What a chart is: lines, bars or a heat map as data; what all charts use; and `spec`, a chart for Plotly.

Values are in the unit of their axis. A chart or series that belongs to one group or client is shown while that one is
selected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from weft.report.facts import Curve, Group

Groups = Sequence[Group]
Values = Sequence[float | None]
Trace = dict[str, Any]
COLORS = 8  # series colors of each theme; further groups repeat them with another symbol and dash
DASHES = ("dot", "dash", "longdash", "dashdot", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x", "triangle-down", "pentagon", "hexagon")
MAX_COLUMNS = 12  # of a heat map with numbers in its cells
FORMATS = {"": ":.2f}", "%": ":.1f} %", "points": ":+.1f} points", "B": ":.3s}B"}


@dataclass(frozen=True)
class Axis:
    title: str = ""
    unit: Literal["", "%", "points", "B"] = ""
    ticks: Sequence[tuple[float, str]] = ()
    range: tuple[float, float] | None = None
    borders: Sequence[float] = ()  # thin lines between tasks
    log: bool = False
    shared: bool = False  # of y: one scale for all charts of a figure


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
    bold: bool = False
    key: str = ""  # bars with the same key share one position and one entry of the legend

    @property
    def has_categories(self) -> bool:
        return bool(self.x) and isinstance(self.x[0], str)


@dataclass(frozen=True)
class HeatMap:
    """Cells by row and column; the first row is at the top."""

    label: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Values]
    limits: tuple[float, float]
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
    figure: str = ""  # file of the figure for a paper; charts of one file are drawn side by side under one legend


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    sentence: str
    charts: Sequence[Chart] = ()
    caveats: Sequence[str] = ()
    small: bool = False  # many small charts side by side
    about: str = ""  # what depends on the runs; the rest is in the template


# ---- used by all charts ----------------------------------------------------------------------------------------------


def curve_line(index: int, group: Group, client: int | None, xs: list[float], curve: Curve, names: list[str]) -> Series:
    """A curve of fractions as a line in percent."""
    label = group.label if client is None else f"{group.label}, client {client}"
    means = percents(point and point.mean for point in curve)
    deviations = percents(point and point.deviation for point in curve)
    return Series(label, xs, means, names, index, client, deviations=deviations)


def key_of(client: int | None) -> str:
    return "mean" if client is None else str(client)


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


# ---- for Plotly ------------------------------------------------------------------------------------------------------


def spec(chart: Chart) -> dict[str, Any]:
    """Plotly's traces and layout, ready for JSON; no text in it can be read as markup.

    Colors are names that the page replaces by those of its theme: "@0" is the first group's, "@0~" the same but
    transparent, "@ink" that of text; "@sequential" and "@diverging" are color scales. `meta` says to which group and
    client a trace belongs, so that the page can switch it on and off.
    """
    if isinstance(chart.body, HeatMap):
        traces, layout = [_heat_map(chart.body)], _grid(chart, chart.body)
    else:
        traces = [trace for series in chart.body for trace in _traces(series, chart.body, chart)]
        layout = _layout(chart, chart.body)
    shown = {"traces": traces, "layout": layout, "height": chart.height, "group": chart.group, "client": chart.client}
    return {key: _clean(value) for key, value in shown.items()}


def _clean(value: Any, key: str = "") -> Any:
    """Text without markup, floats with seven digits: a screen shows no more, and the page is half as large."""
    if isinstance(value, str):
        return value if key in ("hovertemplate", "texttemplate") else _escape(value)
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {name: _clean(item, name) for name, item in value.items()}
    return [_clean(item, key) for item in value] if isinstance(value, Sequence) else value


def _escape(text: str) -> str:
    """Plotly reads some HTML tags in every text."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _in_template(text: str) -> str:
    """In a template, Plotly also reads %{...}."""
    return _escape(text).replace("%{", "%\u200b{")


def _color(series: Series) -> str:
    color = series.group if series.color is None else series.color
    return f"@{color % COLORS}" if isinstance(color, int) else f"@{color}"


def _traces(series: Series, body: Sequence[Series], chart: Chart) -> Iterator[Trace]:
    meta = {"group": series.group, "client": key_of(series.client), "key": series.key}
    trace: Trace = {"name": series.label, "x": series.x, "y": series.y, "text": series.names, "meta": meta}
    value = "%{y" + FORMATS[chart.y.unit]
    if series.kind in ("bar", "dots"):
        meta["client"] = None  # shown for any selection of clients
        first = next(other for other in body if other.key == series.key)
        trace |= {"showlegend": first is series, **_bars(series, chart.stacked)}
    else:
        yield from _bands(series, meta)
        trace |= _line(series)
        if any(series.deviations):
            trace["customdata"] = ["" if each is None else f" ± {each:.1f}" for each in series.deviations]
            value += "%{customdata}"
    names = ["%{x}"] * series.has_categories + ["%{text}"] * bool(series.names)
    trace["hovertemplate"] = f"{', '.join(names)}: {value}<extra>{_in_template(series.label)}</extra>"
    yield trace


def _bars(series: Series, stacked: bool) -> Trace:
    marker: Trace = {"color": _color(series)}
    if series.kind == "dots":
        marker |= {"size": 6, "symbol": f"{SYMBOLS[series.group % len(SYMBOLS)]}-open"}
        return {"type": "scatter", "mode": "markers", "marker": marker, "offsetgroup": series.key}
    trace: Trace = {"type": "bar", "textposition": "none", "marker": marker}
    trace["legendgroup" if stacked else "offsetgroup"] = series.key
    trace |= {"width": series.widths} if series.widths else {}
    if any(series.deviations):
        trace["error_y"] = {"array": series.deviations, "color": "@ink", "thickness": 1}
    return trace


def _line(series: Series) -> Trace:
    thin = series.client is not None
    line: Trace = {"color": _color(series), "width": 1.2 if thin else 2.5}
    trace = {"type": "scatter", "mode": "lines", "connectgaps": False, "line": line}
    if series.kind == "steps":
        line |= {"shape": "hv", "dash": "dash" if series.dashed else "solid"}
        return trace
    if series.client is not None:
        line["dash"] = DASHES[series.client % len(DASHES)]
    elif series.group >= COLORS:
        line["dash"] = "dash"  # another group has the same color
    marker = {"symbol": SYMBOLS[series.group % len(SYMBOLS)], "size": 5 if thin else 8}
    return trace | {"mode": "lines+markers", "marker": marker}


def _bands(series: Series, meta: Trace) -> Iterator[Trace]:
    """One standard deviation around the mean of clients; a gap in the line is a gap in the band."""
    if series.client is not None or not any(series.deviations):
        return
    look = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    look |= {"fill": "toself", "fillcolor": f"{_color(series)}~", "meta": {**meta, "band": True}}
    points = zip(map(float, series.x), series.y, series.deviations, strict=True)
    for known, stretch in itertools.groupby(points, lambda point: None not in point):
        if known:
            xs, ys, deviations = (list(values) for values in zip(*stretch, strict=True))
            high, low = ([y + sign * each for y, each in zip(ys, deviations, strict=True)] for sign in (1, -1))
            yield look | {"x": xs + xs[::-1], "y": high + low[::-1]}


def _layout(chart: Chart, body: Sequence[Series]) -> dict[str, Any]:
    bars = any(series.kind == "bar" for series in body)
    x: dict[str, Any] = {"type": "category", "showgrid": False}
    if not any(series.has_categories for series in body):
        ticks = {"tickvals": [at for at, _ in chart.x.ticks], "ticktext": [text for _, text in chart.x.ticks]}
        x = {**ticks, "range": chart.x.range, "showgrid": not chart.x.borders}
    y: dict[str, Any] = {"title": {"text": chart.y.title}, "zeroline": chart.y.unit == "points" or chart.stacked}
    if chart.y.unit == "B":
        y |= {"tickformat": "~s", "ticksuffix": "B"}
    if not chart.stacked and (chart.y.unit == "B" or (bars and chart.y.unit == "%")):
        y["rangemode"] = "tozero"
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"color": "@grid", "width": 1}}
    layout = {"xaxis": x, "yaxis": y, "shapes": [{**line, "x0": at, "x1": at} for at in chart.x.borders]}
    layout |= {"barmode": "relative" if chart.stacked else "group", "scattermode": "group"} if bars else {}
    return layout | ({"showlegend": True} if chart.legend else {})


def _heat_map(body: HeatMap) -> Trace:
    number = f":.{body.digits}f}}"
    value = f"%{{z{number} {body.unit}".rstrip() + (", %{customdata}" if body.notes else "")
    trace = {
        **{"type": "heatmap", "x": body.columns, "y": body.rows, "z": body.cells},
        **{"zmin": body.limits[0], "zmax": body.limits[1], "xgap": 2, "ygap": 2},
        "hovertemplate": f"{_in_template(body.label)}: %{{y}}, %{{x}}: {value}<extra></extra>",
        "hoverongaps": False,
        "colorscale": "@diverging" if body.diverging else "@sequential",
        "showscale": False,
    }
    trace |= {"customdata": body.notes} if body.notes else {}
    if len(body.columns) <= MAX_COLUMNS - 2 * body.digits:
        trace["texttemplate"] = "%{z" + number
    return trace


def _grid(chart: Chart, body: HeatMap) -> dict[str, Any]:
    """Of a heat map: the first row at the top, every row and column named."""
    axes = {}
    for key, axis, names, ticks in (
        ("xaxis", chart.x, body.columns, body.column_ticks),
        ("yaxis", chart.y, body.rows, body.row_ticks),
    ):
        axes[key] = {"title": {"text": axis.title}, "type": "category", "showgrid": False, "ticks": ""}
        axes[key] |= {"tickvals": names, "ticktext": ticks} if ticks else {}
    axes["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return axes
