"""The charts as figures for a paper, one file each, drawn with matplotlib (an extra).

A figure is one column wide and readable at 8 points, in grayscale and for color-blind readers. The same runs give the
same bytes: nothing depends on the date, the machine or the user's settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from weft.errors import WeftError
from weft.report.charts import Chart, HeatMap, Series
from weft.report.facts import Group
from weft.report.page import sections

COLUMN, WIDE = 3.4, 7.0  # inches: one and two columns of a paper
COLORS = ("#14609a", "#b8480f", "#22743c", "#7b3fa8", "#b02a62", "#6d5a10", "#3d5566", "#0d7377")
NAMED = {"ink": "black", "faint": "#a9a59a"}
MARKERS = ("o", "s", "D", "^", "P", "*", "X", "v")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
MAX_COLUMNS = 8  # of a heat map with numbers in its cells

STYLE = str(resources.files("weft.report").joinpath("assets", "paper.mplstyle"))
METADATA: dict[str, dict[str, Any]] = {  # no date, no version
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}


def write_figures(groups: Sequence[Group], folder: Path, kind: str) -> list[Path]:
    """Write every figure for which the runs have data."""
    by_file: dict[str, list[Chart]] = {}
    for section in sections(groups):
        for chart in section.charts:
            by_file.setdefault(chart.figure, []).append(chart)
    by_file.pop("", None)
    if not by_file:
        raise WeftError("there is nothing to draw: no task of these runs has been learned yet")
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with style.context(["default", STYLE]):  # without the user's settings
            for name, charts in by_file.items():
                files.append(folder / f"{name}.{kind}")
                draw(charts).savefig(files[-1], metadata=METADATA[kind])
    except OSError as error:
        raise WeftError(f"{folder}: figures cannot be written ({error.strerror}); choose another --out") from None
    return files


def draw(charts: Sequence[Chart]) -> Figure:
    """One chart of lines or bars, or several heat maps side by side, four in a row."""
    limits = [limit for chart in charts if isinstance(chart.body, HeatMap) for limit in chart.body.limits]
    columns = min(4, len(charts))
    rows = -(-len(charts) // columns)
    rounds = bool(charts[0].x.borders) and charts[0].y.unit == "%"  # many points
    width = WIDE if columns > 1 or rounds else COLUMN
    figure = Figure(figsize=(width, rows * (width / columns + 0.3) if limits else 2.3))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, chart in zip(grid.flat, charts, strict=False):
        if isinstance(chart.body, HeatMap):
            _heat_map(axes, chart, chart.body, (min(limits), max(limits)))
        else:
            _plot(axes, chart, [series for series in chart.body if series.client is None])
            entries = 6 if rounds else 2 if chart.y.unit == "B" else 3
            # above the axes, where it hides nothing
            figure.legend(loc="outside upper center", ncols=entries, columnspacing=1.2, handlelength=1.8)
    for axes in grid.flat[len(charts) :]:
        axes.set_visible(False)
    return figure


def _plot(axes: Axes, chart: Chart, shown: Sequence[Series]) -> None:
    slots = list(dict.fromkeys(series.key for series in shown))
    categories = list(dict.fromkeys(x for series in shown for x in series.x if isinstance(x, str)))
    for series in shown:
        if series.kind in ("line", "steps"):
            _line(axes, series)
            continue
        width = 0.8 / len(slots)
        offset = (slots.index(series.key) - (len(slots) - 1) / 2) * width
        xs = [categories.index(str(x)) + offset for x in series.x]
        if series.kind == "bar":
            axes.bar(xs, _values(series.y), width, color=_color(series), label=_literal(series.label))
        else:
            axes.plot(xs, _values(series.y), "o", mfc="none", mec=_color(series), ms=2.5, mew=0.6)
    axes.set_ylabel(chart.y.title)
    if categories:
        axes.axhline(0, color="black", linewidth=0.6)
        axes.set_xticks(range(len(categories)), categories)
    else:
        axes.set_xticks([at for at, _ in chart.x.ticks], [text for _, text in chart.x.ticks])
    if chart.x.borders:
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
    for at in chart.x.borders:
        axes.axvline(at, color="#dddddd", linewidth=0.6, zorder=0)
    if chart.y.unit == "B":
        axes.yaxis.set_major_formatter(EngFormatter("B"))


def _line(axes: Axes, series: Series) -> None:
    color, values = _color(series), _values(series.y)
    if series.kind == "steps":
        way = "--" if series.dashed else "-"
        axes.step(series.x, values, where="post", color=color, linestyle=way, label=_literal(series.label))
        return
    dash = DASHES[series.group // len(COLORS) % len(DASHES)]
    marker = MARKERS[series.group % len(MARKERS)]
    axes.plot(series.x, values, color=color, linestyle=dash, marker=marker, label=_literal(series.label))
    deviations = _values(series.deviations)
    if np.nan_to_num(deviations).any():
        axes.fill_between(series.x, values - deviations, values + deviations, color=color, alpha=0.15, linewidth=0)


def _heat_map(axes: Axes, chart: Chart, body: HeatMap, limits: tuple[float, float]) -> None:
    cells = np.array([_values(row) for row in body.cells])
    axes.grid(visible=False)
    axes.imshow(cells, cmap="Blues", vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set(title=_literal(chart.title), xlabel=chart.x.title, ylabel=chart.y.title)
    columns, rows = ([name.removeprefix("client ") for name in names] for names in (body.columns, body.rows))
    axes.set_xticks(range(len(columns)), body.column_ticks or columns)
    axes.set_yticks(range(len(rows)), body.row_ticks or rows)
    if len(body.columns) <= MAX_COLUMNS:
        for (row, column), value in np.ndenumerate(cells):
            if not np.isnan(value):
                color = "white" if value > sum(limits) / 2 else "black"
                text = format(value, f".{min(body.digits, 1)}f")
                axes.text(column, row, text, ha="center", va="center", fontsize=6, color=color)


def _values(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _color(series: Series) -> str:
    color = series.group if series.color is None else series.color
    return COLORS[color % len(COLORS)] if isinstance(color, int) else NAMED[color]


def _literal(text: str) -> str:
    """A name as it is: matplotlib reads dollars as formulas and hides labels that begin with an underscore."""
    shown = text.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown
