"""How the figures are drawn, with matplotlib (an extra): the same numbers give the same bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weft.metrics import Spread

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = list[tuple[float, Spread]]  # by x, over seeds
Panels = Mapping[str, Mapping[str, Curve]]  # panel -> series -> curve, in the order of the experiment's rows

DPI = 200  # of PNG files
LEGEND_WIDTH = 1.7  # inches of an entry


def files(charts: Callable[[Panels], Mapping[str, Figure]], panels: Panels) -> dict[str, bytes]:
    """Each chart as PNG and SVG, by the end of the file name."""
    from matplotlib import style

    from weft.report.matplotlib import METADATA, STYLE

    found = {}
    with style.context(["default", STYLE]):  # without the user's settings
        for suffix, figure in charts(panels).items():
            for kind in ("png", "svg"):
                file = io.BytesIO()
                figure.savefig(file, format=kind, dpi=DPI, metadata=METADATA[kind])
                found[f"{suffix}.{kind}"] = file.getvalue()
    return found


def draw_lines(
    panels: Panels, rows: Sequence[Sequence[str]], x: str, y: str, size: tuple[float, float], **options: Any
) -> Figure:
    """Panels of curves, row by row, over one legend; `size` is that of a panel in inches.

    The values are shares and drawn in percent. Options: share_y, and log_ticks for a logarithmic x with these ticks.
    """
    columns, (width, height) = max(map(len, rows)), size
    figure, grid = _grid(columns * width, len(rows) * height + 0.6, len(rows), columns, sharey=options.get("share_y"))
    legend: dict[str, Artist] = {}
    order = list(dict.fromkeys(series for curves in panels.values() for series in curves))
    for titles, row, below in zip(rows, grid, [*rows[1:], []], strict=True):
        for axes in row[len(titles) :]:
            axes.set_axis_off()
        for column, (title, axes) in enumerate(zip(titles, row, strict=False)):
            for series, curve in panels[title].items():
                legend[series] = _plot(axes, order.index(series), curve, bold=series == "FedWeIT")
            axes.set(title=title, xlabel="" if column < len(below) else x, ylabel="" if column else y)
            if ticks := options.get("log_ticks"):
                axes.set_xscale("log")
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.minorticks_off()
            else:
                axes.locator_params(axis="x", integer=True, nbins=6)
    entries = max(1, min(len(legend), int(columns * width / LEGEND_WIDTH)))
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=entries)
    return figure


def _plot(axes: Axes, index: int, curve: Curve, bold: bool) -> Artist:
    """A line, with the standard deviation as a band."""
    from weft.report.matplotlib import COLORS, MARKERS

    xs, ys, color = [x for x, _ in curve], [y for _, y in curve], COLORS[index % len(COLORS)]
    looks: Any = {"color": color, "marker": MARKERS[index % len(MARKERS)], "zorder": 4 if bold else 3}
    looks |= {"linewidth": 2.0} if bold else {}
    # every tenth marker of a long line: markers that touch each other cannot be read
    (line,) = axes.plot(xs, [100 * y.mean for y in ys], markevery=max(1, len(xs) // 10), **looks)
    if any(y.deviation for y in ys):
        low = [100 * max(y.mean - (y.deviation or 0.0), 0.0) for y in ys]
        high = [100 * min(y.mean + (y.deviation or 0.0), 1.0) for y in ys]
        axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
    return line


def draw_stems(panels: Panels, names: Sequence[str], x: str) -> Figure:
    """In each panel, a line from 1/n, which is dotted, to the mean of each series; its color is that of its name."""
    from weft.report.matplotlib import COLORS

    # one scale: twice as far from the start is twice as long
    figure, (row,) = _grid(3.3 * len(panels), 2.9, 1, len(panels), sharex=True)
    for axes, (task, curves) in zip(row, panels.items(), strict=True):
        for height, (foreign, curve) in enumerate(curves.items()):
            color = COLORS[names.index(foreign.rpartition(" ")[0]) % len(COLORS)]
            for count, found in curve:
                axes.hlines(height, 1 / count, found.mean, color=color, linewidth=2.5)
                axes.plot(found.mean, height, "o", color=color, markersize=5)
        for count in sorted({count for curve in curves.values() for count, _ in curve}):
            axes.axvline(1 / count, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(curves)), list(curves))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.1, y=0.1)
        axes.set(xlabel=x, title=f"learning {task}")
    return figure


def draw_heat_map(
    cells: Mapping[tuple[str, str], tuple[float, str]], names: Sequence[str], x: str, y: str, label: str
) -> Figure:
    """Values by row and column with their texts, in colors that diverge from 1."""
    rows, columns = ([name for name in names if any(pair[side] == name for pair in cells)] for side in (0, 1))
    figure, ((axes,),) = _grid(1.6 + 0.62 * len(columns), 1.2 + 0.36 * len(rows))
    values = [[cells.get((row, column), (math.nan, ""))[0] for column in columns] for row in rows]
    reach = max([0.05, *(abs(value - 1) for value, _ in cells.values())])
    shown = axes.imshow(values, cmap="PuOr_r", vmin=1 - reach, vmax=1 + reach, aspect="auto")
    for (row, column), (value, text) in cells.items():
        color = "white" if abs(value - 1) > 0.6 * reach else "black"
        axes.text(columns.index(column), rows.index(row), text, ha="center", va="center", fontsize=6, color=color)
    axes.set_xticks(range(len(columns)), columns, rotation=35, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set(xlabel=x, ylabel=y)
    figure.colorbar(shown, ax=axes, label=label, shrink=0.9)
    return figure


def _grid(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)
