"""fig-transfer: do the A's of others help? FedWeIT with and without them, where tasks overlap and where they do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from weft.repro import Figure, Row
from weft.repro.describing import grid
from weft.repro.figures import style
from weft.repro.figures.points import Panels, Point
from weft.repro.figures.reading import by_round
from weft.runs.folder import read_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

WAYS: dict[str, dict[str, str]] = {"with": {}, "without": {"method.ablate": "a_comm"}}
TASKS: dict[str, tuple[str, dict[str, str]]] = {  # where: plan, and what is changed in it
    "cifar": ("overlapped-cifar100", {}),
    "overlapping": ("methods", {"scenario.sharing": "overlapping"}),
    "disjoint": ("methods", {"scenario.sharing": "disjoint"}),
}
PANELS = {
    "cifar": "Overlapped-CIFAR-100",
    "overlapping": "glyphs, overlapping tasks",
    "disjoint": "glyphs, disjoint tasks",
}


def figure() -> Figure:
    return Figure(
        name="fig-transfer",
        title="What foreign A's are worth: FedWeIT with and without them, round by round",
        plan="overlapped-cifar100",
        rows=tuple(
            Row(f"{where}-{way}", "fedweit", {**keys, **WAYS[way]}, plan=plan)
            for where, (plan, keys) in TASKS.items()
            for way in WAYS
        ),
        note="The paper has no such figure. Accuracy is that of each client's own model after its epoch of the round, "
        "on validation images, as the mean over clients and over all tasks but the first, for which there is nothing "
        "in the knowledge base yet. Where tasks overlap, others have learnt the same classes from other images. At the "
        "small scale there are 5 tasks of Overlapped-CIFAR-100, of 20 rounds all the same.",
        scale="paper",
        keys={"rounds_per_task": 20},
        small={"rounds_per_task": 20},
        columns=("tasks", "foreign", "round", "validation_accuracy"),
        read=read,
        draw=draw,
        tell=tell,
    )


def read(row: Row, folder: Path) -> list[Point]:
    where, _, way = row.label.partition("-")
    steps = by_round(folder, read_plan(folder))
    later = [rounds for step, rounds in steps.items() if step > 0]
    return [
        Point(PANELS[where], way, place, fmean(values))
        for place, values in enumerate(zip(*later, strict=True), start=1)
    ]


def draw(panels: Panels) -> Mapping[str, Picture]:
    picture, (axes,) = style.new(1, len(panels), 2.4 * len(panels), 2.5)
    for one, (title, series) in zip(axes, panels.items(), strict=True):
        for way in WAYS:
            if way in series:
                style.plot(one, way, series[way], scale=100)
        one.set_title(title)
        one.set_xlabel("round")
        style.whole_numbers(one)
    axes[0].set_ylabel("validation accuracy (%)")
    style.legend_below(picture, [axes], len(WAYS) if len(panels) > 1 else 1)
    return {"": picture}


def tell(panels: Panels) -> list[str]:
    lines = []
    for title, series in panels.items():
        for words, place in (("first", 0), ("last", -1)):
            reached = {way: 100 * series[way][place][1].mean for way in WAYS if way in series}
            cells = [f"{reached[way]:.1f}" if way in reached else "-" for way in WAYS]
            gained = f"{reached['with'] - reached['without']:+.1f}" if len(reached) == len(WAYS) else "-"
            lines.append([f"{title}, after the {words} round", *cells, gained])
    head = ["accuracy (%)", *(style.name_of(way) for way in WAYS), "gained"]
    return ["\n".join(grid(head, lines))]
