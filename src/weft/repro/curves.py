"""What the figures share: points of runs, curves over seeds, names and colors, text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from weft.errors import WeftError
from weft.metrics import Spread, spread
from weft.report.reading import Run, read_run
from weft.repro import Row
from weft.repro.drawing import Chart, Line, Lines

Point = tuple[str, str, float, float]  # panel, series, x, y
Curve = list[tuple[float, Spread]]  # by x, over seeds
Panels = Mapping[str, Mapping[str, Curve]]  # panel -> series -> curve, in the order of the experiment's rows

# Okabe and Ito's palette, which color-blind readers can tell apart, without the yellow that is lost on white
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"


class Style(NamedTuple):
    name: str
    color: str = GREY
    marker: str = "o"
    dash: str = "-"


STYLES = {
    "fedweit": Style("FedWeIT", RED),
    "apd": Style("APD (local)", SKY, "s"),
    "fedprox+apd": Style("FedProx-APD", BLUE, "^"),
    "fedavg+apd": Style("FedAvg-APD", GREEN, "v"),
    "ewc": Style("EWC (local)", GREY, "s", "--"),
    "fedprox+ewc": Style("FedProx-EWC", ORANGE, "X", "--"),
    "fedavg+ewc": Style("FedAvg-EWC", PINK, "v", "--"),
    "fedprox": Style("FedProx", BLACK, "D", ":"),
    "fedavg": Style("FedAvg", BLACK, "x", ":"),
    "fedcurv": Style("FedCurv", PINK, "P", "-."),
    "svhn": Style("receiving from SVHN", GREEN),
    "cifar10": Style("receiving from CIFAR-10", RED, "s"),
    "nobody": Style("receiving from nobody", BLACK, "D", ":"),
    "none": Style("synchronous", BLACK, "D", ":"),
    "task_clocks": Style("task clocks", BLUE, "^"),
    "updates": Style("asynchronous", RED),
    "with": Style("with foreign A's", RED),
    "without": Style("without", BLACK, "D", ":"),
}


class Figure:
    """One kind of figure."""

    columns: ClassVar[tuple[str, str, str, str]]  # names of panel, series, x and y in the csv

    def points(self, row: Row, folder: Path) -> list[Point]:
        """Read the points of a finished run."""
        raise NotImplementedError

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        """Charts by the suffix of their file names."""
        raise NotImplementedError

    def text(self, panels: Panels) -> list[str]:
        """The numbers in paragraphs of Markdown."""
        raise NotImplementedError


def whole_run(folder: Path) -> Run:
    run = read_run(folder)
    if run.notes:
        raise WeftError(f"{run.notes[0]}; run again in a new folder")
    return run


def by_round(run: Run, clients: Collection[int] | None = None) -> dict[int, list[float]]:
    """For each task, the validation accuracy of the local models after each round, as the mean over clients.

    A client that has stopped early, or that was not selected, counts with its last value.
    """
    values: dict[int, dict[int, dict[int, float]]] = {}  # task -> round -> client
    for item in run.rounds:
        if item.valid_accuracy is not None and (clients is None or item.client in clients):
            values.setdefault(item.task, {}).setdefault(item.round, {})[item.client] = item.valid_accuracy
    means: dict[int, list[float]] = {}
    for task, rounds in sorted(values.items()):
        last: dict[int, float] = {}
        for number in range(run.rounds_per_task):
            last |= rounds.get(number, {})
            if last:
                means.setdefault(task, []).append(fmean(last.values()))
    return means


def mean_at(curve: Curve, x: float) -> float:
    """
    >>> mean_at([(1.0, Spread(0.5, None)), (2.0, Spread(0.75, 0.1))], 2)
    0.75
    """
    return dict(curve)[x].mean


def series_of(panels: Iterable[Mapping[str, Curve]]) -> list[str]:
    """Every series of some panels once."""
    return list(dict.fromkeys(series for curves in panels for series in curves))


def name_of(series: str) -> str:
    return STYLES.get(series, Style(series)).name


def lines_of(curves: Mapping[str, Curve], title: str, x: str, y: str, **options: bool | Sequence[float]) -> Lines:
    lines = [
        Line(*STYLES.get(series, Style(series)), curve=curve, bold=series == "fedweit")
        for series, curve in curves.items()
    ]
    return Lines(title, x, y, lines, **options)  # type: ignore[arg-type]


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first hold numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    rows = [[cell.replace("|", r"\|") for cell in line] for line in (head, rule, *lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def panels_of(rows: Sequence[Row], columns: Sequence[str], records: Iterable[Any]) -> dict[str, dict[str, Curve]]:
    """Means over seeds, in the order of the experiment's rows."""
    order = {row.label: index for index, row in enumerate(rows)}
    values: dict[str, dict[str, dict[float, list[float]]]] = {}
    for record in sorted(records, key=lambda record: (order[record.row], record.seed)):
        for line in record.lines:
            panel, series, x, y = (line[column] for column in columns)
            values.setdefault(panel, {}).setdefault(series, {}).setdefault(x, []).append(y)
    return {
        panel: {series: [(x, found) for x in sorted(ys) if (found := spread(ys[x]))] for series, ys in curves.items()}
        for panel, curves in values.items()
    }
