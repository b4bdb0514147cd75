"""The charts as figures for a paper, one file each, drawn with matplotlib (an extra).

A figure is one column wide and readable at 8 points, in grayscale and for color-blind readers. The same runs give the
same bytes: nothing depends on the date, the machine or the user's settings.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
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
from weft.report.facts import Group, collect
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
    charts = [chart for section in sections(groups) for chart in section.charts if chart.figure]
    if not charts:
        raise WeftError("there is nothing to draw: no task of these runs has been learned yet")
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in render(charts, kind):
            files.append(folder / name)
            files[-1].write_bytes(content)
    except OSError as error:
        raise WeftError(f"{folder}: figures cannot be written ({error.strerror}); choose another --out") from None
    return files


def render(charts: Iterable[Chart], *kinds: str) -> Iterator[tuple[str, bytes]]:
    """The name and content of each figure in each format."""
    with style.context(["default", STYLE]):  # without the user's settings
        for name, shown in collect((chart.figure, chart) for chart in charts).items():
            figure = draw(shown)
            for kind in kinds:
                file = io.BytesIO()
                figure.savefig(file, format=kind, metadata=METADATA[kind])
                yield f"{name}.{kind}", file.getvalue()


def draw(charts: Sequence[Chart]) -> Figure:
    """Charts side by side: lines and bars under one legend, at most five in a row, or heat maps, at most four."""
    limits = [limit for chart in charts if isinstance(chart.body, HeatMap) for limit in chart.body.limits]
    rows = -(-len(charts) // (4 if limits else 5))
    columns = -(-len(charts) // rows)
    rounds = bool(charts[0].x.borders) and charts[0].y.unit == "%"  # many points
    width = WIDE if columns > 1 or rounds else COLUMN
    figure = Figure(figsize=(width, rows * (width / columns + 0.3 if limits else 2.3)))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=charts[0].y.shared)
    for at, (axes, chart) in enumerate(zip(grid.flat, charts, strict=False)):
        if isinstance(chart.body, HeatMap):
            _heat_map(axes, chart, chart.body, (min(limits), max(limits)))
        else:
            _plot(axes, chart, [series for series in chart.body if series.client is None])
            # labels once for a row and a column
            axes.set_xlabel("" if at + columns < len(charts) else chart.x.title)
            axes.set_ylabel("" if at % columns else chart.y.title)
            axes.set_title(_literal(chart.title) if len(charts) > 1 else "")
    for axes in grid.flat[len(charts) :]:
        axes.set_visible(False)
    legend = [axes.get_legend_handles_labels() for axes in figure.axes]
    if entries := {label: handle for pairs in legend for handle, label in zip(*pairs, strict=True)}:
        most = max(1, int(width / (0.45 + 0.055 * max(map(len, entries)))))  # inches of a handle and of a letter
        place: dict[str, Any] = {"loc": "outside upper center", "columnspacing": 1.2, "handlelength": 1.8}
        figure.legend(entries.values(), entries.keys(), ncols=min(most, len(entries)), **place)
    return figure


def _plot(axes: Axes, chart: Chart, shown: Sequence[Series]) -> None:
    slots = list(dict.fromkeys(series.key for series in shown))
    categories = list(dict.fromkeys(x for series in shown for x in series.x if isinstance(x, str)))
    for series in shown:
        if series.kind in ("line", "steps"):
            _line(axes, series, chart.y.unit == "%")
            continue
        width = 0.8 / len(slots)
        offset = (slots.index(series.key) - (len(slots) - 1) / 2) * width
        xs = [categories.index(str(x)) + offset for x in series.x]
        if series.kind == "bar":
            axes.bar(xs, _values(series.y), width, color=_color(series), label=_literal(series.label))
        else:
            axes.plot(xs, _values(series.y), "o", mfc="none", mec=_color(series), ms=2.5, mew=0.6)
    if chart.x.log:
        axes.set_xscale("log")
        axes.minorticks_off()
    if categories:
        axes.axhline(0, color="black", linewidth=0.6)
        _name_columns(axes, categories)
    elif chart.x.ticks:
        axes.set_xticks([at for at, _ in chart.x.ticks], [text for _, text in chart.x.ticks])
    else:
        axes.locator_params(axis="x", integer=True, nbins=6)
    if chart.x.borders:
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
    for at in chart.x.borders:
        axes.axvline(at, color="#dddddd", linewidth=0.6, zorder=0)
    if chart.y.unit == "B":
        axes.yaxis.set_major_formatter(EngFormatter("B"))


def _line(axes: Axes, series: Series, in_percent: bool) -> None:
    color, values = _color(series), _values(series.y)
    if series.kind == "steps":
        way = "--" if series.dashed else "-"
        axes.step(series.x, values, where="post", color=color, linestyle=way, label=_literal(series.label))
        return
    look: dict[str, Any] = {"color": color, "linestyle": DASHES[series.group // len(COLORS) % len(DASHES)]}
    look |= {"linewidth": 2.0, "zorder": 3} if series.bold else {}
    # markers that touch each other cannot be read
    look |= {"marker": MARKERS[series.group % len(MARKERS)], "markevery": max(1, len(values) // 10)}
    axes.plot(series.x, values, label=_literal(series.label), **look)
    deviations = _values(series.deviations)
    if np.nan_to_num(deviations).any():
        band = np.array([values - deviations, values + deviations])
        low, high = band.clip(0, 100) if in_percent else band
        axes.fill_between(series.x, low, high, color=color, alpha=0.15, linewidth=0)


def _heat_map(axes: Axes, chart: Chart, body: HeatMap, limits: tuple[float, float]) -> None:
    cells, (low, high) = np.array([_values(row) for row in body.cells]), limits
    axes.grid(visible=False)
    axes.imshow(cells, cmap="PuOr_r" if body.diverging else "Blues", vmin=low, vmax=high, aspect="auto")
    axes.set(title=_literal(chart.title), xlabel=chart.x.title, ylabel=chart.y.title)
    columns, rows = ([name.removeprefix("client ") for name in names] for names in (body.columns, body.rows))
    _name_columns(axes, body.column_ticks or columns)
    axes.set_yticks(range(len(rows)), body.row_ticks or rows)
    if len(body.columns) <= MAX_COLUMNS:
        digits = body.digits if body.diverging else min(body.digits, 1)
        for (row, column), value in np.ndenumerate(cells):
            if not np.isnan(value):
                share = (value - low) / (high - low)
                color = "white" if (abs(share - 0.5) > 0.3 if body.diverging else share > 0.5) else "black"
                axes.text(column, row, f"{value:.{digits}f}", ha="center", va="center", fontsize=6, color=color)


def _name_columns(axes: Axes, names: Sequence[str]) -> None:
    turned: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, **turned if max(map(len, names)) > 9 else {})


def _values(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _color(series: Series) -> str:
    color = series.group if series.color is None else series.color
    return COLORS[color % len(COLORS)] if isinstance(color, int) else NAMED[color]


def _literal(text: str) -> str:
    """A name as it is: matplotlib reads dollars as formulas and hides labels that begin with an underscore."""
    shown = text.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown
