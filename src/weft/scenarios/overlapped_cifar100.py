"""overlapped-cifar100: the paper's Overlapped-CIFAR-100.

A task is one of the 20 superclasses with its five classes. Its 3,000 images are cut into as many equal, disjoint parts
as there are clients: at 5 clients each has 420 to train, 120 to test and 60 to validate with; at 20 clients 105, 30
and 15; at 100 clients 21, 6 and 3. Each client gets `tasks` of the superclasses in an order of its own, by seed; two
clients may learn the same superclass, never from the same image.
"""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel, ConfigDict

from weft.data import cache
from weft.data.cache import Dataset
from weft.errors import WeftError
from weft.randomness import generator
from weft.scenarios import PARTS, Part, Scenario, Task
from weft.scenarios.parts import Indices, parts_of, task_of

MOST_CLIENTS = 100  # as in the paper; a few more, and there are fewer test images in a part than classes


class Options(BaseModel):
    """CIFAR-100's 20 superclasses, shared out among all clients: up to 100 clients, up to 20 tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    dataset = cache.load("cifar100")
    superclasses = int(dataset.extra["coarse_of_fine"].max()) + 1
    if clients > MOST_CLIENTS or tasks > superclasses:
        raise WeftError(
            f"overlapped-cifar100 has 1 to {MOST_CLIENTS} clients and 1 to {superclasses} tasks, "
            f"not {clients} and {tasks}"
        )
    pieces = [_pieces(dataset, superclass, clients) for superclass in range(superclasses)]
    rng = generator(seed, "deal")
    dealt = [rng.permutation(superclasses)[:tasks] for _ in range(clients)]
    return Scenario(
        "overlapped-cifar100",
        tuple(tuple(pieces[kind][client] for kind in dealt[client]) for client in range(clients)),
        datasets=(dataset.name,),
    )


def _pieces(dataset: Dataset, superclass: int, clients: int) -> list[Task]:
    """One superclass for every client: equal and disjoint pieces, in which the classes are as even as can be."""
    coarse = dataset.extra["coarse_of_fine"][: dataset.classes]
    classes = tuple(map(int, np.flatnonzero(coarse == superclass)))
    of_class = [parts_of(dataset, index) for index in classes]
    name = str(dataset.extra["coarse_names"][superclass])
    places: dict[Part, list[list[Indices]]] = {part: _cut([each[part] for each in of_class], clients) for part in PARTS}
    if any(len(mine) == 0 for part in ("train", "test") for own in places[part] for mine in own):
        raise WeftError(f"{name} has too few images for {clients} clients: some would have a class with no image")
    return [
        task_of(dataset, name, classes, {part: places[part][client] for part in PARTS}) for client in range(clients)
    ]


def _cut(of_class: list[Indices], clients: int) -> list[list[Indices]]:
    """For each client and class its images. Taken in turn from each class, so a piece of 21 has 4 or 5 of each of five;
    what is left after equal pieces is used by nobody."""
    turns = [(turn, label) for label, mine in enumerate(of_class) for turn in range(len(mine))]
    turns.sort()
    size = len(turns) // clients
    found = []
    for client in range(clients):
        mine = turns[client * size : (client + 1) * size]
        found.append(
            [
                of_class[label][np.array([turn for turn, own in mine if own == label], dtype=np.int64)]
                for label in range(len(of_class))
            ]
        )
    return found
