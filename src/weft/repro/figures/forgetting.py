"""fig-forgetting: what becomes of a task while later ones are learnt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from weft.repro import Figure, Row
from weft.repro.describing import grid
from weft.repro.figures import style
from weft.repro.figures.points import Curve, Panels, Point
from weft.runs.folder import accuracy_matrices

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

METHODS = ("ewc", "fedavg+ewc", "fedprox+ewc", "apd", "fedavg+apd", "fedprox+apd", "fedweit")
PLACES = (0.3, 0.6, 0.8)  # tasks 3, 6 and 8 of the paper's 10


def figure() -> Figure:
    return Figure(
        name="fig-forgetting",
        title="Forgetting: past tasks while later ones are learnt, NonIID without faces",
        plan="noniid-35",
        rows=tuple(Row(name, name) for name in METHODS),
        note="Test accuracy of a task, as the mean over clients, at the end of that task and of each later one. The "
        "first picture has the tasks that lie where the paper's 3, 6 and 8 of 10 do, the second all but the last. "
        "The paper's figure is of NonIID-50; this one is of noniid-35, without the faces: 7 tasks a client, 5 at the "
        "small scale.",
        scale="paper",
        columns=("task", "method", "after_task", "accuracy"),
        read=read,
        draw=draw,
        tell=tell,
    )


def read(row: Row, folder: Path) -> list[Point]:
    matrices = list(accuracy_matrices(folder).values())
    steps = max(map(len, matrices))
    return [
        Point(f"task {task + 1}", row.method, after + 1, fmean(matrix[after][task] for matrix in matrices))
        for task in range(steps - 1)
        for after in range(task, steps)
    ]


def draw(panels: Panels) -> Mapping[str, Picture]:
    tasks = list(panels)
    numbers = (round(share * (len(tasks) + 1)) for share in PLACES)  # of all tasks, the last one included
    chosen = list(dict.fromkeys(tasks[min(max(number, 1), len(tasks)) - 1] for number in numbers))
    return {"": _grid(panels, chosen, len(chosen)), "-all": _grid(panels, tasks, 3)}


def _grid(panels: Panels, tasks: Sequence[str], columns: int) -> Picture:
    columns = min(columns, len(tasks))
    rows = math.ceil(len(tasks) / columns)
    picture, axes = style.new(rows, columns, 2.3 * columns, 1.8 * rows + 0.6, sharey=True)
    places = [one for row in axes for one in row]
    for one, task in zip(places, tasks, strict=False):
        for series in METHODS:
            if series in panels[task]:
                style.plot(one, series, panels[task][series], scale=100)
        one.set_title(task)
        one.set_xlabel("after learning task")
        style.whole_numbers(one)
    for one in places[len(tasks) :]:
        one.set_axis_off()
    for row in axes:
        row[0].set_ylabel("accuracy (%)")
    style.legend_below(picture, axes, 4 if columns > 2 else 3)
    return picture


def dropped(curve: Curve) -> float:
    """From a task's own end to the end of all, in points."""
    return 100 * (curve[-1][1].mean - curve[0][1].mean)


def tell(panels: Panels) -> list[str]:
    tasks = list(panels)
    lines = []
    for series in METHODS:
        curves = [panels[task][series] for task in tasks if series in panels[task]]
        if curves:
            changes = [dropped(curve) for curve in curves]
            cells = [f"{dropped(panels[task][series]):+.1f}" if series in panels[task] else "-" for task in tasks]
            lines.append([style.name_of(series), *cells, f"{fmean(changes):+.1f}"])
    head = ["points from a task's end to the last task's", *tasks, "mean"]
    return ["\n".join(grid(head, lines))]
