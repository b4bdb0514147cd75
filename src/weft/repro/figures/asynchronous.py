"""fig-async: accuracy over all tasks so far against work done, with clients in step and each at its own pace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from weft.repro import Figure, Row
from weft.repro.describing import grid
from weft.repro.figures import style
from weft.repro.figures.points import Panels, Point, at
from weft.repro.figures.reading import tests
from weft.runs.folder import read_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

WAYS = ("none", "task_clocks", "updates")
CLOCK = {"clock.spread": 3.0, "clock.jitter": 0.2}  # the slowest client takes up to three times as long as the fastest
END = 1.0  # all work is done


def figure() -> Figure:
    return Figure(
        name="fig-async",
        title="Asynchronous federated continual learning: FedWeIT, accuracy over work done",
        plan="async",
        rows=(
            *(Row(f"glyphs-{way}", "fedweit", {"async": way}) for way in WAYS),
            Row("noniid-35-none", "fedweit", plan="noniid-35"),  # the run that the tables of noniid-35 have too
            *(Row(f"noniid-35-{way}", "fedweit", {"async": way, **CLOCK}, plan="noniid-35") for way in WAYS[1:]),
        ),
        note="The mean over clients of the accuracy over the tasks that each has finished, as last tested, against the "
        "share of all training images that all clients together have seen by then. In step, everybody changes tasks at "
        "once; with `task_clocks` each client has its own task clock, as in the paper's asynchronous setting; with "
        "`updates` there are no rounds either, and the slowest client takes up to three times as long as the fastest. "
        "Each client works the same number of rounds every way. Early points are the mean of those clients alone that "
        "have finished a task by then. The paper's figure is of NonIID-50, which has faces too.",
        scale="paper",
        keys={"rounds_per_task": 20},
        small={"rounds_per_task": 8},
        columns=("scenario", "async", "work", "accuracy"),
        read=read,
        draw=draw,
        tell=tell,
    )


def read(row: Row, folder: Path) -> list[Point]:
    """At as many moments as a client has tasks, evenly spread over the work.

    In step, tasks end there if all have as many images; else a moment has what was tested last before it.
    """
    plan = read_plan(folder)
    found = tests(folder)
    whole = max(event["images"] for event in found)
    points = []
    for place in range(1, plan.tasks + 1):
        done = [event for event in found if event["images"] <= place / plan.tasks * whole]
        newest = {event["client"]: fmean(event["accuracy"]) for event in done}
        if newest:
            points.append(Point(plan.scenario, plan.asynchronous, place / plan.tasks, fmean(newest.values())))
    return points


def draw(panels: Panels) -> Mapping[str, Picture]:
    picture, (axes,) = style.new(1, len(panels), 2.9 * len(panels), 2.6)
    for one, (scenario, series) in zip(axes, panels.items(), strict=True):
        for way in WAYS:
            if way in series:
                style.plot(one, way, [(100 * x, found) for x, found in series[way]], scale=100)
        one.set_title(scenario)
        one.set_xlabel("work done (%)")
    axes[0].set_ylabel("accuracy of the tasks so far (%)")
    style.legend_below(picture, [axes], len(WAYS) if len(panels) > 1 else 1)
    return {"": picture}


def tell(panels: Panels) -> list[str]:
    lines = []
    for scenario, series in panels.items():
        ends = {way: 100 * at(series[way], END) for way in WAYS if way in series}
        cells = [f"{ends[way]:.1f}" if way in ends else "-" for way in WAYS]
        gained = [f"{ends[way] - ends['none']:+.1f}" if {way, "none"} <= ends.keys() else "-" for way in WAYS[1:]]
        lines.append([scenario, *cells, *gained])
    names = [style.name_of(way) for way in WAYS]
    head = ["accuracy (%) when all work is done", *names, *(f"{name}, gained" for name in names[1:])]
    return ["\n".join(grid(head, lines))]
