"""glyphs: images drawn on demand, so that a first run needs no download.

Eight families of images differ as the eight datasets of the paper's NonIID-50 do. A task is a few classes of one
family. `disjoint` assigns every task to one client only, as NonIID-50 does; `overlapping` samples each client's tasks
from one common pool, so that two clients may learn the same classes from different images, as Overlapped-CIFAR-100
does; with `rotating` all clients learn the same tasks but one, at different times, as hospitals meet the same diseases:
one task of each client is its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, Field

from weft.lazy import lazy, np
from weft.randomness import generator
from weft.scenarios import Scenario, ScenarioOptions, Split, SplitName, Task

if TYPE_CHECKING:
    from weft.scenarios import drawn
else:
    drawn = lazy("weft.scenarios.drawn")


class Options(ScenarioOptions):
    """Drawn images, 32x32 in color: eight families, any number of clients, tasks and classes."""

    classes_per_task: int = Field(5, ge=2)
    train: int = Field(200, ge=1)  # images per task, spread evenly over its classes
    valid: int = Field(50, ge=1)
    test: int = Field(100, ge=1)
    sharing: Literal["disjoint", "overlapping", "rotating"] = "disjoint"
    pool: int | None = Field(None, ge=1)  # overlapping: number of kinds of tasks; default: twice `tasks`


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    kinds = _deal(options, clients, tasks, seed)
    sequences = tuple(
        tuple(_task(options, kind, client, task, seed) for task, kind in enumerate(kinds[client]))
        for client in range(clients)
    )
    return Scenario("glyphs", sequences)


def _deal(options: Options, clients: int, tasks: int, seed: int) -> list[list[int]]:
    """The kinds of each client's tasks; kind k has the (k // 8)-th batch of classes of family k % 8."""
    rng = generator(seed, "deal")
    if options.sharing == "disjoint":
        return [list(map(int, kinds)) for kinds in rng.permutation(clients * tasks).reshape(clients, tasks)]
    if options.sharing == "rotating":
        order = list(map(int, rng.permutation(clients + tasks - 1)))  # kinds: first those that all clients learn
        common, own = order[: tasks - 1], order[tasks - 1 :]
        dealt = []
        for client in range(clients):
            turn = client % max(tasks - 1, 1)
            kinds = [*common[turn:], *common[:turn]]
            kinds.insert(client % tasks, own[client])
            dealt.append(kinds)
        return dealt
    pool = max(options.pool or 2 * tasks, tasks)  # with fewer kinds a client would repeat a task
    return [list(map(int, rng.permutation(pool)[:tasks])) for _ in range(clients)]


def _task(options: Options, kind: int, client: int, task: int, seed: int) -> Task:
    family, batch = drawn.FAMILIES[kind % len(drawn.FAMILIES)], kind // len(drawn.FAMILIES)
    classes = range(batch * options.classes_per_task, (batch + 1) * options.classes_per_task)
    mean, deviation = drawn.NORMALIZATION[family]
    sizes: dict[SplitName, int] = {"train": options.train, "valid": options.valid, "test": options.test}
    return Task(
        name=f"{family}-{batch}",
        group=family,
        vocabulary=family,
        classes=tuple(drawn.class_name(family, index) for index in classes),
        sizes=sizes,
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, family, tuple(classes), sizes, client, task, seed),
    )


def _load(
    family: str,
    classes: tuple[int, ...],
    sizes: dict[SplitName, int],
    client: int,
    task: int,
    seed: int,
    split: SplitName,
) -> Split:
    """The images of one split; drawn for this client and task only, so two clients never share an image."""
    images, labels = [], []
    for label, index in enumerate(classes):
        count = len(range(label, sizes[split], len(classes)))  # as even as the size allows
        images.append(drawn.draw(family, index, count, generator(seed, "draw", split, client, task, index)))
        labels.append(np.full(count, label, dtype=np.int64))
    order = generator(seed, "order", split, client, task).permutation(sizes[split])  # a plan may disable shuffling
    return Split(np.concatenate(images)[order], np.concatenate(labels)[order])
