"""The plotted numbers: read from run folders, kept in NAME.csv, and drawn from there, as means over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.metrics import Spread, spread
from weft.repro import Figure, Row
from weft.repro.store import Key, csv_of, images_of, key_of, plan_text, read_cells, short_hash


@dataclass(frozen=True)
class Point:
    panel: str
    series: str
    x: float
    y: float


@dataclass(frozen=True)
class Plotted:
    """The points of one finished run."""

    row: str
    method: str
    seed: int
    points: tuple[Point, ...]
    plan_hash: str
    images: str


Curve = list[tuple[float, Spread]]  # by x, over seeds
Panels = Mapping[str, Mapping[str, Curve]]  # panel -> series -> curve


def read_run(figure: Figure, row: Row, seed: int, folder: Path) -> Plotted:
    points = tuple(figure.read(row, folder))
    return Plotted(row.label, row.method, seed, points, short_hash(plan_text(folder)), images_of(folder))


def columns_of(figure: Figure) -> tuple[str, ...]:
    return ("row", "method", "seed", *figure.columns, "plan_hash", "images")


def csv_text(figure: Figure, runs: Iterable[Plotted]) -> str:
    """A line for each point, sorted by run, the points of a run in the order in which they were read."""
    return csv_of(
        columns_of(figure),
        (
            (
                *(run.row, run.method, run.seed),
                *(point.panel, point.series, _plain(point.x), point.y),
                *(run.plan_hash, run.images),
            )
            for run in sorted(runs, key=key_of)
            for point in run.points
        ),
    )


def _plain(x: float) -> float:
    """A round or a task is no fraction."""
    return int(x) if float(x).is_integer() else x


def read_csv(figure: Figure, path: Path) -> dict[Key, Plotted]:
    runs: dict[Key, Plotted] = {}
    columns = columns_of(figure)

    def take(cells: dict[str, str]) -> None:
        row, method, seed, panel, series, x, y, plan_hash, images = (cells[column] for column in columns)
        run = runs.setdefault((row, int(seed)), Plotted(row, method, int(seed), (), plan_hash, images))
        if (plan_hash, images) != (run.plan_hash, run.images):
            raise ValueError("two runs under one name")
        point = Point(panel, series, float(x), float(y))
        runs[key_of(run)] = replace(run, points=(*run.points, point))

    read_cells(path, columns, take)
    return runs


def panels_of(rows: Sequence[Row], runs: Iterable[Plotted]) -> dict[str, dict[str, Curve]]:
    """Means over seeds, in the order of the figure's rows."""
    place = {row.label: number for number, row in enumerate(rows)}
    values: dict[str, dict[str, dict[float, list[float]]]] = {}
    for run in sorted(runs, key=lambda run: (place[run.row], run.seed)):
        for point in run.points:
            values.setdefault(point.panel, {}).setdefault(point.series, {}).setdefault(point.x, []).append(point.y)
    return {
        panel: {series: [(x, _mean(ys[x])) for x in sorted(ys)] for series, ys in of_panel.items()}
        for panel, of_panel in values.items()
    }


def _mean(values: list[float]) -> Spread:
    found = spread(values)
    assert found is not None
    return found


def at(curve: Curve, x: float) -> float:
    """The mean at one place.

    >>> at([(1.0, Spread(0.5, None)), (2.0, Spread(0.75, 0.1))], 2)
    0.75
    """
    return next(found.mean for place, found in curve if place == x)
