"""Charts with several panels as data, and how matplotlib draws them: the same numbers give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import WeftError
from weft.metrics import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200  # of PNG files
LEGEND_WIDTH = 1.7  # inches of an entry


@dataclass(frozen=True)
class Line:
    name: str
    color: str
    marker: str
    dash: str
    curve: Sequence[tuple[float, Spread]]  # shares, drawn in percent
    bold: bool = False


@dataclass(frozen=True)
class Lines:
    """Curves with their standard deviation as a band."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    whole: bool = True  # x has no fractions
    log_ticks: Sequence[float] = ()  # x is logarithmic with these ticks, in percent


@dataclass(frozen=True)
class Stem:
    name: str
    color: str
    spans: Sequence[tuple[float, float]]  # from, to


@dataclass(frozen=True)
class Stems:
    """Horizontal lines from a starting value, which is dotted."""

    title: str
    x: str
    stems: Sequence[Stem]


@dataclass(frozen=True)
class HeatMap:
    x: str
    y: str
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float]]
    texts: Sequence[Sequence[str]]
    label: str
    middle: float  # of the diverging colors


@dataclass(frozen=True)
class Chart:
    panels: Sequence[Sequence[Lines | Stems | HeatMap]]  # row by row
    size: tuple[float, float]  # inches
    legend: Literal["", "best", "lower right"] = (
        ""  # its location inside of each panel; empty: one for all panels, below them
    )
    share_y: Literal["none", "row", "all"] = "none"


def check_available() -> None:
    """Fail before anything is run: figures need matplotlib."""
    if find_spec("matplotlib") is None:
        raise WeftError('figures need matplotlib, which is not installed: pip install "weft[figures]"')


def files(chart: Chart, suffix: str = "") -> Mapping[str, bytes]:
    """The chart as PNG and SVG in the style of `weft figures`, by the ends of the file names."""
    from matplotlib import style

    from weft.report.matplotlib import METADATA, STYLE

    found = {}
    with style.context(["default", STYLE]):  # without the user's settings
        figure = draw(chart)
        for kind in ("png", "svg"):
            file = io.BytesIO()
            figure.savefig(file, format=kind, dpi=DPI, metadata=METADATA[kind])
            found[f"{suffix}.{kind}"] = file.getvalue()
    return found


def draw(chart: Chart) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=chart.size, layout="constrained")
    width = max(map(len, chart.panels))
    grid = figure.subplots(len(chart.panels), width, squeeze=False, sharey=chart.share_y)
    for number, (row, panels) in enumerate(zip(grid, chart.panels, strict=True)):
        for axes in row[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(row, panels, strict=False):
            if isinstance(panel, Lines):
                _draw_lines(axes, panel)
                below = chart.panels[number + 1 :]
                axes.set_xlabel("" if below and len(below[0]) > list(row).index(axes) else panel.x)
                axes.set_ylabel(panel.y if axes is row[0] else "")
            elif isinstance(panel, Stems):
                _draw_stems(axes, panel)
            else:
                _draw_heat_map(figure, axes, panel)
        if isinstance(panels[0], Stems):  # one scale: twice as far from the start is twice as long
            limits = [axes.get_xlim() for axes in row]
            for axes in row:
                axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    _add_legend(figure, chart)
    return figure


def _draw_lines(axes: Axes, panel: Lines) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in panel.lines:
        xs = [x for x, _ in line.curve]
        looks: Any = {"color": line.color, "linestyle": line.dash, "marker": line.marker, "label": line.name}
        looks |= {"linewidth": 2.0, "zorder": 4} if line.bold else {"zorder": 3}
        # every tenth marker of a long line: markers that touch each other cannot be read
        axes.plot(xs, [100 * y.mean for _, y in line.curve], markevery=max(1, len(xs) // 10), **looks)
        if any(y.deviation for _, y in line.curve):
            low, high = (
                [100 * min(max(y.mean + sign * (y.deviation or 0.0), 0.0), 1.0) for _, y in line.curve]
                for sign in (-1, 1)
            )
            axes.fill_between(xs, low, high, color=line.color, alpha=0.15, linewidth=0)
    axes.set_title(panel.title)
    if panel.log_ticks:
        axes.set_xscale("log")
        axes.set_xticks(panel.log_ticks, [f"{100 * tick:g}" for tick in panel.log_ticks])
        axes.minorticks_off()
    elif panel.whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _draw_stems(axes: Axes, panel: Stems) -> None:
    for height, stem in enumerate(panel.stems):
        for start, end in stem.spans:
            axes.hlines(height, start, end, color=stem.color, linewidth=2.5)
            axes.plot(end, height, "o", color=stem.color, markersize=5)
    for start in sorted({start for stem in panel.stems for start, _ in stem.spans}):
        axes.axvline(start, color="#000000", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(panel.stems)), [stem.name for stem in panel.stems])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel(panel.x)
    axes.set_title(panel.title)


def _draw_heat_map(figure: Figure, axes: Axes, panel: HeatMap) -> None:
    distances = [abs(value - panel.middle) for row in panel.values for value in row if value == value]  # not NaN
    reach = max([0.05, *distances])
    shown = axes.imshow(
        panel.values, cmap="PuOr_r", vmin=panel.middle - reach, vmax=panel.middle + reach, aspect="auto"
    )
    for y, (values, texts) in enumerate(zip(panel.values, panel.texts, strict=True)):
        for x, (value, text) in enumerate(zip(values, texts, strict=True)):
            color = "white" if abs(value - panel.middle) > 0.6 * reach else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize=6, color=color)
    axes.set_xticks(range(len(panel.columns)), panel.columns, rotation=35, ha="right")
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    figure.colorbar(shown, ax=axes, label=panel.label, shrink=0.9)


def _add_legend(figure: Figure, chart: Chart) -> None:
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        found |= {name: handle for name, handle in zip(names, handles, strict=True) if name not in found}
        if chart.legend and names:
            axes.legend(loc=chart.legend)
    if found and not chart.legend:
        columns = max(1, min(len(found), int(chart.size[0] / LEGEND_WIDTH)))
        figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=columns)
