"""glyphs: images that are drawn on the spot, so that a first run needs no download.

Eight families of pictures differ as the eight datasets of the paper's NonIID-50 do. A task is a few classes of one
family. `disjoint` deals every task to one client only, as NonIID-50 does; `overlapping` draws each client's tasks out
of one common pool, so that two clients may learn the same classes from other instances, as Overlapped-CIFAR-100 does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.lazy import lazy, np
from weft.randomness import generator
from weft.scenarios import Part, Scenario, Split, Task

if TYPE_CHECKING:
    from weft.scenarios import drawn
else:
    drawn = lazy("weft.scenarios.drawn")


class Options(BaseModel):
    """Drawn images, 32x32 in colour: eight families, any number of clients, tasks and classes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    classes_per_task: int = Field(5, ge=2)
    train: int = Field(200, ge=1)  # images a task, spread evenly over its classes
    valid: int = Field(50, ge=1)
    test: int = Field(100, ge=1)
    sharing: Literal["disjoint", "overlapping"] = "disjoint"
    pool: int | None = Field(None, ge=1)  # overlapping: how many kinds of tasks there are; unset, twice `tasks`


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    kinds = _deal(options, clients, tasks, seed)
    return Scenario(
        "glyphs",
        tuple(
            tuple(_task(options, kind, client, step, seed) for step, kind in enumerate(kinds[client]))
            for client in range(clients)
        ),
    )


def _deal(options: Options, clients: int, tasks: int, seed: int) -> list[list[int]]:
    """For each client the kinds of its tasks; kind k is the (k // 8)-th handful of classes of family k % 8."""
    rng = generator(seed, "deal")
    if options.sharing == "disjoint":
        return [list(map(int, kinds)) for kinds in rng.permutation(clients * tasks).reshape(clients, tasks)]
    pool = max(options.pool or 2 * tasks, tasks)  # fewer kinds than a client's tasks would repeat a task
    return [list(map(int, rng.permutation(pool)[:tasks])) for _ in range(clients)]


def _task(options: Options, kind: int, client: int, step: int, seed: int) -> Task:
    family, handful = drawn.FAMILIES[kind % len(drawn.FAMILIES)], kind // len(drawn.FAMILIES)
    classes = range(handful * options.classes_per_task, (handful + 1) * options.classes_per_task)
    mean, deviation = drawn.NORMALISATION[family]
    sizes: dict[Part, int] = {"train": options.train, "valid": options.valid, "test": options.test}
    return Task(
        name=f"{family}-{handful}",
        group=family,
        classes=tuple(drawn.class_name(family, index) for index in classes),
        sizes=sizes,
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, family, tuple(classes), sizes, client, step, seed),
    )


def _load(
    family: str, classes: tuple[int, ...], sizes: dict[Part, int], client: int, step: int, seed: int, part: Part
) -> Split:
    """The images of one part; drawn for this client and step alone, so two clients never share an instance."""
    images, labels = [], []
    for label, index in enumerate(classes):
        count = len(range(label, sizes[part], len(classes)))  # as even as the size allows
        images.append(drawn.draw(family, index, count, generator(seed, "draw", part, client, step, index)))
        labels.append(np.full(count, label, dtype=np.int64))
    order = generator(seed, "order", part, client, step).permutation(sizes[part])  # a plan may ask not to shuffle later
    return Split(np.concatenate(images)[order], np.concatenate(labels)[order])
