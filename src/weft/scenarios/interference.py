"""interference: one client learns MNIST while it receives from another that has learnt something else (figure 2).

The sender learns its own digits or things in both tasks, from other images in each. In the first task the receiver
waits: its images are blank and all of one class, so there is nothing to learn and it answers with what it was given. In
the second one it learns MNIST from few images and starts from what the sender knows. With `sender = "nobody"` it is
alone.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from weft.data import cache
from weft.errors import WeftError
from weft.randomness import generator
from weft.scenarios import PARTS, Part, Scenario, Split, Task
from weft.scenarios.parts import Indices, parts_of, task_of

RECEIVER = "mnist"
TASKS = 2
MEASURED = 1000  # valid and test images of a task, all classes together
BLANK = 2  # images of the task in which the receiver waits


class Options(BaseModel):
    """MNIST at one client while it receives from one that learns SVHN or CIFAR-10, or from nobody."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sender: Literal["svhn", "cifar10", "nobody"] = "svhn"
    images: int = Field(200, ge=10)  # at most, to learn MNIST from; with many there is nothing to gain from anybody
    sender_images: int = Field(2000, ge=10)  # at most, in each of the sender's two tasks


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    expected = 1 if options.sender == "nobody" else 2
    if (clients, tasks) != (expected, TASKS):
        raise WeftError(
            f"interference with scenario.sender={options.sender} has {expected} clients and {TASKS} tasks, "
            f"not {clients} and {tasks}"
        )
    (learnt,) = _tasks(RECEIVER, options.images, 1, seed)
    sequences: tuple[tuple[Task, ...], ...] = ((_waiting(), learnt),)
    if options.sender == "nobody":
        return Scenario("interference", sequences, datasets=(RECEIVER,))
    sequences = (*sequences, tuple(_tasks(options.sender, options.sender_images, TASKS, seed)))
    return Scenario("interference", sequences, datasets=(RECEIVER, options.sender))


def _tasks(name: str, images: int, count: int, seed: int) -> list[Task]:
    """So many tasks of all classes of a dataset, with disjoint training images that the seed chooses."""
    dataset = cache.load(name)
    classes = tuple(range(dataset.classes))
    sizes: dict[Part, int] = {"train": images, "valid": MEASURED, "test": MEASURED}
    places: list[dict[Part, list[Indices]]] = [{part: [] for part in PARTS} for _ in range(count)]
    for index in classes:
        mine = parts_of(dataset, index)
        for part in PARTS:
            order = generator(seed, "images", name, part, index).permutation(mine[part])
            size = min(sizes[part] // len(classes), len(order) // count)
            if size == 0:
                raise WeftError(f"class {index} of {name} has {len(order)} {part} images, too few for {count} tasks")
            for place in range(count):
                places[place][part].append(order[place * size : (place + 1) * size])
    return [task_of(dataset, f"{name}-{place}", classes, places[place]) for place in range(count)]


def _waiting() -> Task:
    return Task(
        name="waiting",
        group="blank",
        classes=("blank",),
        sizes=dict.fromkeys(PARTS, BLANK),
        mean=(0.0, 0.0, 0.0),
        deviation=(255.0, 255.0, 255.0),
        load=_blank,
    )


def _blank(part: Part) -> Split:
    return Split(np.zeros((BLANK, 32, 32, 3), dtype=np.uint8), np.zeros(BLANK, dtype=np.int64))
