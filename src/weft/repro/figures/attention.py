"""fig-attention: how much of which foreign A a task uses, by the dataset that the A was learnt on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from weft import scenarios
from weft.plan import Plan
from weft.repro import Figure, Row
from weft.repro.describing import grid
from weft.repro.figures import style
from weft.repro.figures.points import Curve, Panels, Point
from weft.runs.folder import read_manifest, read_plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

SHOWN = {"mnist": "mnist-0", "cifar100": "cifar100-10"}  # the paper's two tasks: split 0 of MNIST, 10 of CIFAR-100


def figure() -> Figure:
    return Figure(
        name="fig-attention",
        title="Inter-client transfer: attention at the first fully connected layer, NonIID without faces",
        plan="noniid-35",
        rows=(Row("fedweit", "fedweit"),),
        note="Attention alpha weighs A's of other clients (Eq. 1) and starts at 1/n for n of them: the dotted line. "
        "It is read from the clients' saved states. The first picture has one MNIST task and one of CIFAR-100, the "
        "paper's where it was given foreign A's; the second has all tasks, as a multiple of 1/n by dataset, with the "
        "number of pairs. The paper's figure is of NonIID-50; this one is of noniid-35, without the faces.",
        scale="paper",
        columns=("task", "foreign_task", "foreign_count", "attention"),
        read=read,
        draw=draw,
        tell=tell,
    )


def read(row: Row, folder: Path) -> list[Point]:
    """Every pair of a task and a foreign A that it was given."""
    from weft.core.storage import State  # loads torch
    from weft.wire.tensors import dense

    plan = read_plan(folder)
    sequences, layer = scenarios.of(plan).sequences, first_connected(plan)
    manifest = read_manifest(folder / "checkpoints") or {"clients": {}}
    found = []
    for client, reference in sorted(manifest["clients"].items(), key=lambda item: int(item[0])):
        state = State.load(folder / "checkpoints", reference)
        for step, task in enumerate(sequences[int(client)]):
            foreign = state.numbers.get(f"foreign/{step}", [])
            if not foreign:
                continue
            attention = dense(state.archive[f"attention/{step}"]).view(-1, len(foreign))[layer]  # (foreign,)
            for key, value in zip(foreign, attention.tolist(), strict=True):
                giver, learnt = map(int, key.split("."))
                found.append(Point(task.name, sequences[giver][learnt].name, len(foreign), value))
    return found


def first_connected(plan: Plan) -> int:
    """The place of the first fully connected layer; the last layer where the body has none, as in a ResNet."""
    from weft import networks

    layers = networks.build(plan.network, plan.network_options, heads=(2,)).layout.layers
    flat = [place for place, layer in enumerate(layers) if len(layer.shape) == 2]
    return flat[0] if flat else len(layers) - 1


def dataset_of(task: str) -> str:
    """
    >>> dataset_of("traffic_signs-3")
    'traffic_signs'
    """
    return task.rpartition("-")[0]


def chosen(panels: Panels) -> list[str]:
    """The paper's two tasks; where one was given no foreign A, the one of its dataset that was given the most."""
    found = []
    for dataset, wanted in SHOWN.items():
        mine = sorted((task for task in panels if dataset_of(task) == dataset), key=lambda task: -len(panels[task]))
        if mine:
            found.append(wanted if wanted in mine else mine[0])
    return found or list(panels)[:2]


def draw(panels: Panels) -> Mapping[str, Picture]:
    tasks = chosen(panels)
    picture, (places,) = style.new(1, len(tasks), 3.3 * len(tasks), 2.9)
    for axes, task in zip(places, tasks, strict=True):
        _stems(axes, task, panels[task])
    limits = [axes.get_xlim() for axes in places]
    for axes in places:  # one scale: what is twice as far from even is twice as long
        axes.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
    return {"": picture, "-datasets": _map(panels)}


def _stems(axes: Axes, task: str, foreign: Mapping[str, Curve]) -> None:
    """From 1/n, where attention starts, to where it came."""
    names = sorted(foreign, key=lambda name: -fmean(found.mean for _, found in foreign[name]))  # as `tell` has them
    for place, name in enumerate(names):
        colour = style.DATASETS.get(dataset_of(name), ("", style.GREY))[1]
        for count, found in foreign[name]:
            axes.hlines(place, 1 / count, found.mean, color=colour, linewidth=2.5)
            axes.plot(found.mean, place, "o", color=colour, markersize=5)
    for even in sorted({1 / count for curve in foreign.values() for count, _ in curve}):
        axes.axvline(even, color=style.BLACK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), [_split(name) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1, y=0.1)
    axes.set_xlabel("attention")
    axes.set_title(f"learning {_split(task)}")


def _split(task: str) -> str:
    dataset, _, number = task.rpartition("-")
    return f"{style.dataset_name(dataset)} ({number})"


def by_dataset(panels: Panels) -> dict[tuple[str, str], tuple[float, int]]:
    """For each dataset of a task and of a foreign A: the mean attention as a multiple of 1/n, and of how many pairs."""
    values: dict[tuple[str, str], list[float]] = {}
    for task, foreign in panels.items():
        for name, curve in foreign.items():
            pair = dataset_of(task), dataset_of(name)
            values.setdefault(pair, []).extend(count * found.mean for count, found in curve)
    return {pair: (fmean(found), len(found)) for pair, found in values.items()}


def _map(panels: Panels) -> Picture:
    pairs = by_dataset(panels)
    known = [*style.DATASETS, *sorted({one for pair in pairs for one in pair} - set(style.DATASETS))]
    own = [one for one in known if any(pair[0] == one for pair in pairs)]
    foreign = [one for one in known if any(pair[1] == one for pair in pairs)]
    picture, ((axes,),) = style.new(1, 1, 1.6 + 0.62 * len(foreign), 1.2 + 0.36 * len(own))
    table = [[pairs.get((mine, theirs), (math.nan, 0))[0] for theirs in foreign] for mine in own]
    reach = max([0.05, *(abs(value - 1) for value, _ in pairs.values())])
    shown = axes.imshow(table, cmap="PuOr_r", vmin=1 - reach, vmax=1 + reach, aspect="auto")
    for (mine, theirs), (value, count) in pairs.items():
        colour = "white" if abs(value - 1) > 0.6 * reach else "black"
        place = foreign.index(theirs), own.index(mine)
        axes.text(*place, f"{value:.2f}\n({count})", ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(foreign)), [style.dataset_name(one) for one in foreign], rotation=35, ha="right")
    axes.set_yticks(range(len(own)), [style.dataset_name(one) for one in own])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("dataset of the foreign A")
    axes.set_ylabel("dataset of the task")
    picture.colorbar(shown, ax=axes, label="attention, times n", shrink=0.9)
    return picture


def tell(panels: Panels) -> list[str]:
    said = []
    for task in chosen(panels):
        means = {name: fmean(found.mean for _, found in curve) for name, curve in panels[task].items()}
        order = sorted(means, key=lambda name: -means[name])
        listed = ", ".join(f"{_split(name)} {means[name]:.4f}" for name in order)
        said.append(f"{_split(task)}, from the largest: {listed}.")
    pairs = by_dataset(panels)
    same = [value for (mine, theirs), (value, _) in pairs.items() if mine == theirs]
    other = [value for (mine, theirs), (value, _) in pairs.items() if mine != theirs]
    if same and other:
        said.append(
            f"Over all tasks, as a multiple of the even start, the mean of the pairs of datasets is {fmean(same):.3f} "
            f"where the foreign A is of the task's own dataset, {fmean(other):.3f} where it is of another."
        )
    lines = [
        [style.dataset_name(mine), style.dataset_name(theirs), f"{value:.3f}", str(count)]
        for (mine, theirs), (value, count) in sorted(pairs.items(), key=lambda item: -item[1][0])
    ]
    return [*said, "\n".join(grid(["task of", "foreign A of", "attention, times n", "pairs"], lines))]
