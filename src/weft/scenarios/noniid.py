"""noniid-50 and noniid-35: tasks of five classes each out of many datasets, every task at one client only.

The paper and the released code differ in how many tasks of which set there are (FIDELITY.md row 14): `lists` chooses.
noniid-35 does without faces, which have no public home. Which classes make a task is fixed, as is each task's cut into
parts; the seed decides who gets which tasks in which order.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.data import cache
from weft.data.cache import Dataset
from weft.errors import WeftError
from weft.randomness import generator
from weft.scenarios import PARTS, Scenario, Task
from weft.scenarios.parts import SEED, parts_of, task_of

CLASSES = 5  # of a task; what is left over at the end of a set may be fewer
OTHERS = {"cifar10": 2, "mnist": 2, "fashion_mnist": 2, "notmnist": 2, "svhn": 2}


def deal(name: str, counts: Mapping[str, int], of_each: int, clients: int, tasks: int, seed: int) -> Scenario:
    """All tasks of a list, dealt by seed to as many clients as get `of_each` of them; the first so many are taken."""
    most = sum(counts.values()) // of_each
    if clients > most or tasks > of_each:
        raise WeftError(f"{name} has 1 to {most} clients and 1 to {of_each} tasks for each, not {clients} and {tasks}")
    all_tasks = [(dataset, place) for dataset, count in counts.items() for place in range(count)]
    order = generator(seed, "deal").permutation(len(all_tasks)).reshape(most, of_each)[:clients, :tasks]
    datasets = {dataset: cache.load(dataset) for dataset in counts}  # all of them: none goes missing with another seed
    return Scenario(
        name,
        tuple(tuple(_task(datasets, counts, *all_tasks[place]) for place in places) for places in order),
        datasets=tuple(datasets),
    )


def _task(datasets: Mapping[str, Dataset], counts: Mapping[str, int], name: str, place: int) -> Task:
    dataset = datasets[name]
    order = generator(SEED, "classes", name).permutation(dataset.classes)
    classes = tuple(sorted(map(int, order[place * CLASSES : (place + 1) * CLASSES])))
    if len(classes) < 2:
        raise WeftError(f"{name} has {dataset.classes} classes, too few for {counts[name]} tasks of {CLASSES}")
    of_class = [parts_of(dataset, index) for index in classes]
    return task_of(dataset, f"{name}-{place}", classes, {part: [each[part] for each in of_class] for part in PARTS})
