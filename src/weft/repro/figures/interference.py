"""fig-interference: MNIST while receiving from a client that has learnt SVHN, from one with CIFAR-10, from nobody."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weft.repro import Figure, Row
from weft.repro.describing import grid
from weft.repro.figures import style
from weft.repro.figures.points import Panels, Point, at
from weft.repro.figures.reading import by_round
from weft.runs.folder import read_plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

RECEIVER, LEARNING = 0, 1  # the client that learns MNIST, and the task in which it does
PANEL = "MNIST"


def figure() -> Figure:
    return Figure(
        name="fig-interference",
        title="Interference: MNIST while receiving from another client",
        plan="interference",
        rows=(
            Row("svhn", "fedavg", {"scenario.sender": "svhn"}, small={"clients": 2}),
            Row("cifar10", "fedavg", {"scenario.sender": "cifar10"}, small={"clients": 2}),
            Row("nobody", "fedavg", {"scenario.sender": "nobody", "clients": 1}),
        ),
        note="The paper's figure 2 does not say which method, how many images or how many rounds. Here two clients "
        "average their weights after each round (FedAvg, both count the same). The sender has learnt for as many "
        "rounds before the receiver begins, and goes on learning; the receiver has 200 images of MNIST. Accuracy is "
        "that of the receiver's own model after its epoch, on validation images.",
        scale="paper",
        columns=("panel", "sender", "round", "validation_accuracy"),
        read=read,
        draw=draw,
        tell=tell,
    )


def read(row: Row, folder: Path) -> list[Point]:
    rounds = by_round(folder, read_plan(folder), {RECEIVER})[LEARNING]
    return [Point(PANEL, row.label, place, value) for place, value in enumerate(rounds, start=1)]


def draw(panels: Panels) -> Mapping[str, Picture]:
    picture, ((axes,),) = style.new(1, 1, 3.5, 2.6)
    for series, curve in panels[PANEL].items():
        style.plot(axes, series, curve, scale=100)
    axes.set_xlabel("round")
    axes.set_ylabel("validation accuracy on MNIST (%)")
    style.whole_numbers(axes)
    axes.legend(loc="lower right")
    return {"": picture}


def tell(panels: Panels) -> list[str]:
    curves = panels[PANEL]
    places = sorted({x for curve in curves.values() for x, _ in curve})
    chosen = [x for x in (1.0, 2.0, 5.0, 10.0, 20.0) if x in places]
    chosen += [] if chosen[-1] == places[-1] else [places[-1]]
    lines = [
        [style.name_of(series), *(f"{100 * at(curve, x):.1f}" for x in chosen)] for series, curve in curves.items()
    ]
    table = "\n".join(grid(["accuracy (%) after round", *(f"{x:g}" for x in chosen)], lines))
    return [table, *_compared(panels, places)]


def _compared(panels: Panels, places: list[float]) -> list[str]:
    curves = panels[PANEL]
    if "nobody" not in curves:
        return []
    alone = curves["nobody"]
    said = []
    for series, name, paper in (("svhn", "SVHN", "above"), ("cifar10", "CIFAR-10", "below")):
        if series in curves:
            gaps = [100 * (at(curves[series], x) - at(alone, x)) for x in places]
            above = sum(gap > 0 for gap in gaps)
            said.append(
                f"{name}: {gaps[0]:+.1f} points against nobody after the first round, {gaps[-1]:+.1f} after the last, "
                f"above it after {above} of {len(gaps)} rounds, {min(gaps):+.1f} at the worst; in the paper's figure "
                f"it stays {paper} that line."
            )
    return [" ".join(said)] if said else []
