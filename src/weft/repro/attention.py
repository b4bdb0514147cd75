"""The figure of attention: how much a task uses which foreign A, by the dataset that the A was trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from weft.repro import Row, curves
from weft.repro.curves import Curve, Figure, Panels, Point, grid, whole_run
from weft.repro.drawing import Chart, HeatMap, Stem, Stems

PAPER_TASKS = {"mnist": "mnist-0", "cifar100": "cifar100-10"}  # split 0 of MNIST, 10 of CIFAR-100
DATASETS = {
    "cifar100": ("CIFAR-100", curves.RED),
    "cifar10": ("CIFAR-10", curves.ORANGE),
    "traffic_signs": ("Traffic Sign", curves.GREEN),
    "svhn": ("SVHN", curves.SKY),
    "mnist": ("MNIST", curves.BLUE),
    "fashion_mnist": ("Fashion-MNIST", curves.PINK),
    "notmnist": ("notMNIST", curves.GREY),
    "facescrub": ("FaceScrub", curves.BLACK),
}


class Attention(Figure):
    """Attention of each task to each foreign A that it received, at the first fully connected layer."""

    columns = ("task", "foreign_task", "foreign_count", "attention")

    def points(self, row: Row, folder: Path) -> list[Point]:
        run = whole_run(folder)
        layer = first_connected([one.shape for one in run.layers])
        points: list[Point] = []
        for one in run.attention:
            task, foreign = run.task_name(one.client, one.task), run.task_name(one.sender, one.sender_task)
            points.append((task, foreign, one.count, one.alphas[layer]))
        return points

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        stems = []
        for task in shown_tasks(panels):
            foreign = panels[task]
            rows = [
                Stem(split_name(name), _color(name), [(1 / count, found.mean) for count, found in foreign[name]])
                for name in by_attention(foreign)
            ]
            stems.append(Stems(f"learning {split_name(task)}", "attention", rows))
        return {"": Chart([stems], (3.3 * len(stems), 2.9)), "-datasets": self._map(panels)}

    def _map(self, panels: Panels) -> Chart:
        pairs = by_dataset(panels)
        known = [*DATASETS, *sorted({one for pair in pairs for one in pair} - {*DATASETS})]
        rows, columns = ([one for one in known if any(pair[side] == one for pair in pairs)] for side in (0, 1))
        cells = [[pairs.get((row, column), (math.nan, 0)) for column in columns] for row in rows]
        heat = HeatMap(
            x="dataset of the foreign A",
            y="dataset of the task",
            columns=[dataset_name(one) for one in columns],
            rows=[dataset_name(one) for one in rows],
            values=[[value for value, _ in row] for row in cells],
            texts=[[f"{value:.2f}\n({count})" if count else "" for value, count in row] for row in cells],
            label="attention, times n",
            middle=1.0,
        )
        return Chart([[heat]], (1.6 + 0.62 * len(columns), 1.2 + 0.36 * len(rows)))

    def text(self, panels: Panels) -> list[str]:
        paragraphs = []
        for task in shown_tasks(panels):
            means = by_attention(panels[task])
            listed = ", ".join(f"{split_name(name)} {mean:.4f}" for name, mean in means.items())
            paragraphs.append(f"{split_name(task)}, from the largest: {listed}.")
        pairs = by_dataset(panels)
        same = [value for (own, foreign), (value, _) in pairs.items() if own == foreign]
        other = [value for (own, foreign), (value, _) in pairs.items() if own != foreign]
        if same and other:
            paragraphs.append(
                "Over all tasks, as a multiple of the uniform start, the mean of the pairs of datasets is "
                f"{fmean(same):.3f} where the foreign A comes from the dataset of the task, {fmean(other):.3f} where "
                "it comes from another."
            )
        lines = [
            [dataset_name(own), dataset_name(foreign), f"{value:.3f}", str(count)]
            for (own, foreign), (value, count) in sorted(pairs.items(), key=lambda item: -item[1][0])
        ]
        return [*paragraphs, grid(["task of", "foreign A of", "attention, times n", "pairs"], lines)]


def first_connected(shapes: Sequence[Sequence[int]]) -> int:
    """The index of the first fully connected layer; of the last layer where there is none, as in a ResNet.

    >>> first_connected([(20, 3, 5, 5), (50, 20, 5, 5), (800, 3200), (500, 800)])
    2
    """
    return next((index for index, shape in enumerate(shapes) if len(shape) == 2), len(shapes) - 1)


def shown_tasks(panels: Panels) -> list[str]:
    """The paper's two tasks; where one received no foreign A, the task of its dataset that received the most."""
    shown = []
    for dataset, wanted in PAPER_TASKS.items():
        tasks = sorted((task for task in panels if dataset_of(task) == dataset), key=lambda task: -len(panels[task]))
        if tasks:
            shown.append(wanted if wanted in tasks else tasks[0])
    return shown or list(panels)[:2]


def by_attention(foreign: Mapping[str, Curve]) -> dict[str, float]:
    """Mean attention to each foreign A, from the largest."""
    means = {name: fmean(found.mean for _, found in curve) for name, curve in foreign.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def by_dataset(panels: Panels) -> dict[tuple[str, str], tuple[float, int]]:
    """For each dataset of a task and of a foreign A: mean attention as a multiple of 1/n, and the number of pairs."""
    values: dict[tuple[str, str], list[float]] = {}
    for task, foreign in panels.items():
        for name, curve in foreign.items():
            pair = dataset_of(task), dataset_of(name)
            values.setdefault(pair, []).extend(count * found.mean for count, found in curve)
    return {pair: (fmean(found), len(found)) for pair, found in values.items()}


def dataset_of(task: str) -> str:
    """
    >>> dataset_of("traffic_signs-3")
    'traffic_signs'
    """
    return task.rpartition("-")[0]


def dataset_name(dataset: str) -> str:
    return DATASETS.get(dataset, (dataset, curves.GREY))[0]


def _color(task: str) -> str:
    return DATASETS.get(dataset_of(task), ("", curves.GREY))[1]


def split_name(task: str) -> str:
    return f"{dataset_name(dataset_of(task))} ({task.rpartition('-')[2]})"
