"""fig-cost: accuracy over what clients send, for several shares of the weights that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weft import metrics
from weft.report.text import share_of_dense
from weft.repro import Figure, Row
from weft.repro.describing import grid
from weft.repro.figures import style
from weft.repro.figures.points import Panels, Point, at
from weft.runs.folder import accuracy_matrices, read_plan, read_rows
from weft.wire.ledger import Entry, by

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

METHODS = ("fedweit", "fedprox+apd", "fedprox+ewc", "fedavg")
KEPT = (0.03, 0.1, 0.3, 1.0)
ACCURACY, SENT = "accuracy", "sent_of_dense"


def figure() -> Figure:
    return Figure(
        name="fig-cost",
        title="Accuracy over client-to-server cost, Overlapped-CIFAR-100, 5 clients",
        plan="overlapped-cifar100",
        rows=tuple(Row(f"{name}-{kept:g}", name, {"method.keep": kept}) for name in METHODS for kept in KEPT),
        note="Cost is measured: the values that clients sent, FedWeIT's A's included, as a share of what the same "
        "messages would hold with the whole body in them; in bytes FedWeIT sends a quarter of that, since its values "
        "travel as a byte each. FedWeIT sends whole rows of B, the others single values; the "
        "paper does not say which dataset its figure is of, nor how its baselines choose what they send.",
        scale="paper",
        columns=("measure", "curve", "keep", "value"),
        read=read,
        draw=draw,
        tell=tell,
    )


def read(row: Row, folder: Path) -> list[Point]:
    kept = read_plan(folder).method_options["keep"]
    accuracy = metrics.over_clients(metrics.average_accuracy, accuracy_matrices(folder).values())
    sums = by(map(Entry.from_row, read_rows(folder, "ledger.csv")), "direction")
    sent = share_of_dense(sums["c2s",]._asdict())
    assert accuracy is not None
    assert sent is not None
    return [Point(ACCURACY, row.method, kept, accuracy), Point(SENT, row.method, kept, sent)]


def draw(panels: Panels) -> Mapping[str, Picture]:
    picture, ((axes,),) = style.new(1, 1, 3.8, 2.9)
    for series in METHODS:
        if series in panels[ACCURACY]:
            curve = [(at(panels[SENT][series], kept), found) for kept, found in panels[ACCURACY][series]]
            style.plot(axes, series, sorted(curve), scale=100)
    axes.set_xscale("log")
    ticks = [0.03, 0.1, 0.3, 1.0]
    axes.set_xticks(ticks, [f"{100 * tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("sent by clients, of dense (%)")
    axes.set_ylabel("accuracy (%)")
    axes.legend(loc="best")
    return {"": picture}


def tell(panels: Panels) -> list[str]:
    kept = sorted({x for curve in panels[ACCURACY].values() for x, _ in curve})
    lines = []
    for series in METHODS:
        if series in panels[ACCURACY]:
            there = {x for x, _ in panels[ACCURACY][series]}
            cells = [_cell(panels, series, x) if x in there else "-" for x in kept]
            lines.append([style.name_of(series), *cells])
    head = ["accuracy (%), and in brackets what was sent, of dense", *(f"keep={x:g}" for x in kept)]
    return ["\n".join(grid(head, lines))]


def _cell(panels: Panels, series: str, kept: float) -> str:
    return f"{100 * at(panels[ACCURACY][series], kept):.1f} ({at(panels[SENT][series], kept):.3f})"
