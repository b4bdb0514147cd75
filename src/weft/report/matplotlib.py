"""The figures of the page once more, for a paper: one file each, drawn by matplotlib (an extra)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weft import metrics
from weft.errors import WeftError
from weft.report import style
from weft.report.facts import Curve, Group, Measure, matrix, over_rounds, over_tasks, rounds_sent, sent_by_round
from weft.report.figures import when
from weft.report.helping import helps, mean_contributions

Groups = Sequence[Group]
MOST_LABELLED = 8  # columns of a matrix with numbers in its cells


def write_figures(groups: Groups, folder: Path, kind: str) -> list[Path]:
    """Every figure for which the runs have data; the same bytes each time."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with mpl_style.context(["default", style.STYLE]):  # not on top of the user's own settings
            for name, draw in FIGURES.items():
                figure = draw(groups)
                if figure is not None:
                    written.append(folder / f"{name}.{kind}")
                    figure.savefig(written[-1], metadata=style.METADATA[kind])
    except OSError as error:
        raise WeftError(f"figures cannot be written into {folder} ({error.strerror}); choose another --out") from None
    if not written:
        raise WeftError("there is nothing to draw yet: no task of these runs has been learned")
    return written


def accuracy(groups: Groups) -> Figure | None:
    return _over_tasks(groups, metrics.average_accuracy, "accuracy (%)")


def forgetting(groups: Groups) -> Figure | None:
    return _over_tasks(groups, metrics.forgetting, "forgetting (points)")


def _over_tasks(groups: Groups, measure: Measure, label: str) -> Figure | None:
    curves = [over_tasks(group, measure) for group in groups]
    if not any(point for curve in curves for point in curve):
        return None
    figure, axes = _one(label)
    for place, (group, curve) in enumerate(zip(groups, curves, strict=True)):
        _line(axes, place, group.label, list(range(len(curve))), curve)
    axes.set_xlabel("after task")
    steps = max(map(len, curves))
    axes.set_xticks(range(0, steps, -(-steps // 10)))
    _legend(figure, 3)
    return figure


def adaptation(groups: Groups) -> Figure | None:
    curves = [over_rounds(group) for group in groups]
    if not any(curves):
        return None
    figure, axes = _one("validation accuracy (%)", style.WIDE)
    for place, (group, points) in enumerate(zip(groups, curves, strict=True)):
        for number, step in enumerate(sorted({step for step, _ in points})):
            own = {key: value for key, value in points.items() if key[0] == step}
            label = group.label if number == 0 else None
            _line(axes, place, label, [when(key, group) for key in own], list(own.values()))
    _task_axis(axes, groups)
    _legend(figure, 6)
    return figure


def _line(axes: Axes, place: int, label: str | None, xs: Sequence[float], curve: Curve) -> None:
    points = [(x, point) for x, point in zip(xs, curve, strict=True) if point is not None]
    x = [each for each, _ in points]
    mean = np.array([100 * point.mean for _, point in points])
    deviation = np.array([100 * (point.deviation or 0.0) for _, point in points])
    looks = style.line_of(place)
    axes.plot(x, mean, label=_literal(label), **looks)
    if deviation.any():
        axes.fill_between(x, mean - deviation, mean + deviation, color=looks["color"], alpha=0.15, linewidth=0)


def matrices(groups: Groups) -> Figure | None:
    shown = [group for group in groups if group.steps]
    if not shown:
        return None
    tables = [np.array([[np.nan if v is None else 100 * v for v in row] for row in matrix(one)]) for one in shown]
    lowest = min(float(np.nanmin(table)) for table in tables)
    return _heatmaps(tables, [one.label for one in shown], "task", "after task", (lowest, 100.0), ".0f")


def traffic(groups: Groups) -> Figure | None:
    talking = [(place, group) for place, group in enumerate(groups) if rounds_sent(group)]
    if not talking:
        return None
    figure, axes = _one("megabytes so far")
    for place, group in talking:
        rounds = rounds_sent(group)
        for direction, way, dash in (("c2s", "up", "-"), ("s2c", "down", "--")):
            by_part = sent_by_round(group, direction)
            sums = accumulate(sum(of_part.get(key, 0.0) for of_part in by_part.values()) for key in rounds)
            xs = [when(key, group, 1.0) for key in rounds]
            colour = style.line_of(place)["color"]
            label = _literal(f"{group.label} {way}")
            axes.plot([0, *xs], [0, *(value / 1e6 for value in sums)], label=label, color=colour, linestyle=dash)
    _task_axis(axes, groups)
    _legend(figure, 2)
    return figure


def density(groups: Groups) -> Figure | None:
    shown = [group for group in groups if any(run.densities for run in group.runs)]
    if not shown:
        return None
    tables = []
    for group in shown:
        found = [item for run in group.runs for item in run.densities]
        steps = sorted({item.step for item in found})
        levels = range(len(group.runs[0].layers))
        cells = [
            [100 * fmean(d.adaptive[level] for d in found if d.step == step) for step in steps] for level in levels
        ]
        tables.append(np.array(cells))
    rows = [[layer.name.removesuffix(".weight") for layer in group.runs[0].layers] for group in shown]
    labels = [f"A of {group.label} (%)" for group in shown]
    return _heatmaps(tables, labels, "task", "", (0.0, 100.0), ".0f", rows)


def helping(groups: Groups) -> Figure | None:
    shown = [group for group in groups if any(run.attention for run in group.runs)]
    if not shown:
        return None
    tables = []
    for group in shown:
        found = mean_contributions(group)
        tables.append(np.array([[found.get((g, t), np.nan) for t in group.clients] for g in group.clients]))
    top = max(float(np.nanmax(table)) for table in tables)
    return _heatmaps(tables, [f"attention, {one.label}" for one in shown], "receiver", "giver", (0.0, top), ".1f")


def alone(groups: Groups) -> Figure | None:
    found = helps(groups)
    if not found:
        return None
    figure, axes = _one("gain over alone (points)")
    width = 0.8 / len(found)
    for number, one in enumerate(found):
        xs = np.arange(len(one.gains)) + (number - (len(found) - 1) / 2) * width
        colour = style.line_of(groups.index(one.together))["color"]
        label = _literal(f"{one.together.label} - {one.alone.label}")
        axes.bar(xs, [100 * gain.mean for gain in one.gains], width, color=colour, label=label)
        for x, gain in zip(xs, one.gains, strict=True):
            axes.plot(
                [x] * len(gain.by_task), [100 * v for v in gain.by_task], "o", mfc="none", mec="black", ms=2.5, mew=0.6
            )
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(found[0].gains)), [f"client {gain.client}" for gain in found[0].gains])
    _legend(figure, 2)
    return figure


FIGURES: dict[str, Callable[[Groups], Figure | None]] = {
    "accuracy": accuracy,
    "matrices": matrices,
    "forgetting": forgetting,
    "adaptation": adaptation,
    "alone": alone,
    "helping": helping,
    "traffic": traffic,
    "density": density,
}


# ---- small parts -----------------------------------------------------------------------------------------------------


def _one(label: str, width: float = style.COLUMN) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 2.3))
    axes = figure.subplots()
    axes.set_ylabel(label)
    return figure, axes


def _legend(figure: Figure, columns: int) -> None:
    """Above the axes, where it hides nothing."""
    figure.legend(loc="outside upper center", ncols=columns, columnspacing=1.2, handlelength=1.8)


def _heatmaps(
    tables: Sequence[np.ndarray],
    titles: Sequence[str],
    x_label: str,
    y_label: str,
    limits: tuple[float, float],
    digits: str,
    rows: Sequence[Sequence[str]] | None = None,
) -> Figure:
    """Side by side, four to a line, with one scale of colours."""
    columns = min(4, len(tables))
    lines = -(-len(tables) // columns)
    width = style.COLUMN if columns == 1 else style.WIDE
    figure = Figure(figsize=(width, lines * (width / columns + 0.3)))
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(tables) :]:
        axes.set_visible(False)
    for place, (axes, cells, title) in enumerate(zip(grid.flat, tables, titles, strict=False)):
        axes.grid(visible=False)
        axes.imshow(cells, cmap=style.SCALE, vmin=limits[0], vmax=limits[1], aspect="auto")
        axes.set(title=_literal(title), xlabel=x_label, ylabel=y_label, xticks=range(cells.shape[1]))
        axes.set_yticks(range(cells.shape[0]), rows[place] if rows else None)
        middle = (limits[0] + limits[1]) / 2
        if cells.shape[1] <= MOST_LABELLED:
            for (row, column), value in np.ndenumerate(cells):
                if not np.isnan(value):
                    colour = "white" if value > middle else "black"
                    axes.text(column, row, format(value, digits), ha="center", va="center", fontsize=6, color=colour)
    return figure


def _task_axis(axes: Axes, groups: Groups) -> None:
    steps = max(group.runs[0].steps for group in groups)
    axes.set_xticks([step + 0.5 for step in range(steps)], [f"task {step}" for step in range(steps)])
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    for step in range(1, steps):
        axes.axvline(step, color="#dddddd", linewidth=0.6, zorder=0)


def _literal(text: str | None) -> str | None:
    """A name as it is: matplotlib reads dollars as formulas, and hides what begins with an underscore."""
    if text is None:
        return None
    shown = text.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown
