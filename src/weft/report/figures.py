"""What a figure is, as data: Plotly's traces and layout, and the sentence that says what is to be seen.

Colours are words, which the page replaces by those of its theme: "@0" is the first group's, "@0~" the same as a veil,
"@ink" the text's, "@sequential" and "@diverging" are scales. What can be switched on and off says so in `meta`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.metrics import Spread
from weft.report.facts import MEAN, Curve, Group

Trace = dict[str, Any]

DASHES = ("solid", "dot", "dash", "longdash", "dashdot", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x", "triangle-down", "pentagon", "hexagon")
COLOURS = 8  # of series, in each theme; further ones begin again, with another mark
MOST_LABELLED = 12  # columns of a heatmap: with more the numbers in its cells cannot be read


@dataclass(frozen=True)
class Figure:
    name: str  # of its element in the page
    title: str
    words: str  # for those who do not see it
    traces: list[Trace]
    layout: dict[str, Any]
    height: int = 360
    group: int | None = None  # shown while this group is on ...
    client: str | None = None  # ... and this client


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    words: str  # what is to be seen, computed from the data
    about: str = ""  # what it is
    figures: Sequence[Figure] = ()
    caveats: Sequence[str] = ()
    small: bool = field(default=False)  # many small figures side by side


def tidy(value: float | None) -> float | None:
    """Seven digits are more than any screen shows, and half of the page's size."""
    return None if value is None else float(f"{value:.7g}")


def percents(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else tidy(100 * value) for value in values]


def curve_traces(
    place: int, group: Group, client: int | None, xs: Sequence[float], curve: Curve, hover: Sequence[str]
) -> list[Trace]:
    """A line in percent, with a veil of one deviation where there are several seeds. A gap where there is nothing."""
    meta = {"group": place, "client": MEAN if client is None else str(client)}
    who = group.label if client is None else f"{group.label}, client {client}"
    line = {"color": f"@{place % COLOURS}", "width": 2.5 if client is None else 1.2}
    if client is not None:
        line["dash"] = DASHES[1 + client % (len(DASHES) - 1)]
    elif place >= COLOURS:
        line["dash"] = "dash"  # its colour is that of another one
    traces: list[Trace] = []
    if client is None:
        traces += [veil(part, place, meta) for part in stretches(xs, curve)]
    deviations = [
        "" if point is None or point.deviation is None else f" ± {100 * point.deviation:.1f}" for point in curve
    ]
    traces.append(
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": who,
            "x": list(xs),
            "y": percents(None if point is None else point.mean for point in curve),
            "customdata": [list(pair) for pair in zip(hover, deviations, strict=True)],
            "hovertemplate": "%{customdata[0]}: %{y:.1f} %%{customdata[1]}<extra>" + plain(who) + "</extra>",
            "line": line,
            "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8 if client is None else 5},
            "connectgaps": False,
            "meta": meta,
        }
    )
    return traces


def stretches(xs: Sequence[float], curve: Curve) -> list[list[tuple[float, Spread]]]:
    """The parts of a curve that have a deviation, cut where a point is missing."""
    found: list[list[tuple[float, Spread]]] = [[]]
    for x, point in zip(xs, curve, strict=True):
        if point is None or point.deviation is None:
            found.append([])
        else:
            found[-1].append((x, point))
    return [part for part in found if part]


def veil(part: Sequence[tuple[float, Spread]], place: int, meta: dict[str, Any]) -> Trace:
    upper = [(x, point.mean + (point.deviation or 0.0)) for x, point in part]
    lower = [(x, point.mean - (point.deviation or 0.0)) for x, point in part]
    around = [*upper, *reversed(lower)]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _ in around],
        "y": percents(y for _, y in around),
        "fill": "toself",
        "fillcolor": f"@{place % COLOURS}~",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {**meta, "veil": True},
    }


def heatmap(
    xs: Sequence[str],
    ys: Sequence[str],
    cells: Sequence[Sequence[float | None]],
    hover: str | Sequence[Sequence[str]],  # a template, or words for each cell
    **more: Any,
) -> Trace:
    """A template tells of x, y and z; words for each cell of many heatmaps would make up most of a page."""
    words = (
        {"hovertemplate": hover}
        if isinstance(hover, str)
        else {"text": hover, "hovertemplate": "%{text}<extra></extra>"}
    )
    return {
        "type": "heatmap",
        "x": list(xs),
        "y": list(ys),
        "z": [[tidy(value) for value in row] for row in cells],
        **words,
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "colorscale": "@sequential",
        "showscale": False,
        **({"texttemplate": "%{z:.0f}"} if len(xs) <= MOST_LABELLED else {}),
        **more,
    }


def grid_layout(x_title: str, y_title: str) -> dict[str, Any]:
    """Of a heatmap: the first row on top, every row and column named."""
    return {
        "xaxis": {"title": {"text": x_title}, "type": "category", "showgrid": False, "ticks": ""},
        "yaxis": {
            "title": {"text": y_title},
            "type": "category",
            "autorange": "reversed",
            "showgrid": False,
            "ticks": "",
            "automargin": True,
        },
    }


def task_axis(steps: int) -> dict[str, Any]:
    every = 1 if steps <= 12 else -(-steps // 10)
    places = list(range(0, steps, every))
    return {"tickvals": places, "ticktext": [f"task {place}" for place in places], "range": [-0.15, steps - 0.85]}


def round_axis(steps: int) -> dict[str, Any]:
    """Rounds as parts of a task: task t reaches from t to t + 1, and its name stands in the middle."""
    every = 1 if steps <= 12 else -(-steps // 10)
    places = range(0, steps, every)
    return {
        "tickvals": [place + 0.5 for place in places],
        "ticktext": [f"task {place}" for place in places],
        "range": [-0.02 * steps, 1.02 * max(steps, 1)],
        "showgrid": False,
    }


def when(key: tuple[int, int], group: Group, part: float = 0.5) -> float:
    """The place of a round on an axis of tasks, in its middle; what comes after the last round is the task's end."""
    step, number = key
    return tidy(min(step + (number + part) / group.rounds_of(step), step + 1)) or 0.0


def task_borders(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "type": "line",
            "x0": place,
            "x1": place,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "layer": "below",
            "line": {"color": "@grid", "width": 1},
        }
        for place in range(1, steps)
    ]


def plain(text: str) -> str:
    """For a template of Plotly's, which reads some markup and %{...}: neither may come out of a file."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "%\u200b{")
