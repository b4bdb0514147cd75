"""fig-adaptation: how fast the last tasks are learnt, round by round, with few clients and with many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weft.repro import Figure, Row
from weft.repro.describing import grid
from weft.repro.figures import style
from weft.repro.figures.points import Panels, Point
from weft.repro.figures.reading import by_round
from weft.runs.folder import read_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

ALL = ("fedweit", "fedprox+apd", "apd", "fedcurv", "fedprox")
TWO = ("fedweit", "apd")
LAST = 5  # tasks that are read


def figure() -> Figure:
    return Figure(
        name="fig-adaptation",
        title="Adaptation: the last tasks, round by round, Overlapped-CIFAR-100",
        plan="overlapped-cifar100",
        rows=(
            *(Row(f"{name}-c5", name) for name in ALL),
            *(Row(f"{name}-c20", name, plan="clients-20", small={"clients": 20}) for name in TWO),
            *(Row(f"{name}-c100", name, plan="clients-100", small={"clients": 40}) for name in ALL),
        ),
        note="Accuracy is that of each client's own model after its epoch of the round, as the mean over clients, on "
        "validation images: they are tested in every round, test images at a task's end alone. The paper "
        "plots test accuracy. It has 5 and 100 clients, and 20 and 100 in the appendix; at the small scale there "
        "are 40 in place of 100, and 5 tasks of 8 rounds.",
        seeds=1,
        scale="paper",
        columns=("clients_and_task", "method", "round", "validation_accuracy"),
        read=read,
        draw=draw,
        tell=tell,
    )


def read(row: Row, folder: Path) -> list[Point]:
    plan = read_plan(folder)
    steps = by_round(folder, plan)
    return [
        Point(f"{plan.clients} clients, task {step + 1}", row.method, place, value)
        for step in sorted(steps)[-LAST:]
        for place, value in enumerate(steps[step], start=1)
    ]


def client_counts(panels: Panels) -> list[int]:
    return sorted({int(panel.split()[0]) for panel in panels})


def of_clients(panels: Panels, count: int) -> list[str]:
    """The panels of so many clients, by task."""
    mine = [panel for panel in panels if panel.split()[0] == str(count)]
    return sorted(mine, key=lambda panel: int(panel.split()[-1]))


def draw(panels: Panels) -> Mapping[str, Picture]:
    counts = client_counts(panels)
    few_and_many = dict.fromkeys((counts[0], counts[-1]))
    chosen = [panel for count in few_and_many for panel in of_clients(panels, count)[-2:]]
    found = {"": _row_by_row([chosen], panels, ALL)}
    many = [of_clients(panels, count)[-LAST:] for count in counts if count > counts[0]]
    if many:
        found["-clients"] = _row_by_row(many, panels, TWO)
    return found


def _row_by_row(rows: Sequence[Sequence[str]], panels: Panels, methods: Sequence[str]) -> Picture:
    columns = max(map(len, rows))
    picture, axes = style.new(len(rows), columns, 1.75 * columns, 1.75 * len(rows) + 0.5, sharey="row", sharex=True)
    for places, names in zip(axes, rows, strict=True):
        for one, name in zip(places, names, strict=False):
            for series in methods:
                if series in panels[name]:
                    style.plot(one, series, panels[name][series], scale=100)
            one.set_title(name)
            style.whole_numbers(one)
            if places is axes[-1]:
                one.set_xlabel("round")
        for one in places[len(names) :]:
            one.set_axis_off()
        places[0].set_ylabel("validation accuracy (%)")
    style.legend_below(picture, axes, min(len(methods), columns + 1))
    return picture


def tell(panels: Panels) -> list[str]:
    lines = []
    for count in client_counts(panels):
        names = of_clients(panels, count)
        for series in ALL:
            curves = [panels[name][series] for name in names if series in panels[name]]
            if curves:
                first, last = (sum(curve[place][1].mean for curve in curves) / len(curves) for place in (0, -1))
                cells = [f"{100 * first:.1f}", f"{100 * last:.1f}", str(len(curves))]
                lines.append([f"{count} clients, {style.name_of(series)}", *cells])
    head = ["accuracy (%), mean of the last tasks", "after the first round", "after the last", "tasks"]
    return ["\n".join(grid(head, lines))]
