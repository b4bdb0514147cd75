"""folders: images of a user, from a folder by client, task and class, or from a table (weft/data/images.py).

Clients, tasks and classes are in the order of their names, 2 before 10. Images without given splits are split once per
client, over all its tasks, so that a group that is in two tasks is in the same split of both. Mean and deviation are
those of a task's train images.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from weft.data import images
from weft.data.cache import mean_and_deviation
from weft.data.images import SIDE, UserImages, natural
from weft.errors import WeftError
from weft.lazy import np
from weft.scenarios import SPLITS, Scenario, ScenarioOptions, Split, SplitName, Task
from weft.scenarios.splits import check_given, check_task, indices_of, split_groups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weft.scenarios.splits import Indices

MAX_NAMED = 3  # broken files in a message


def _absolute(path: str) -> str:
    """A plan must work from any folder."""
    return str(Path(path).expanduser().resolve()) if path else ""


class Options(ScenarioOptions):
    """Your images: a folder CLIENT/TASK/CLASS/image.png, or a table of paths, clients, tasks and labels."""

    path: Annotated[str, AfterValidator(_absolute)] = ""
    test: float = Field(0.2, gt=0, lt=0.5)  # shares of the images, where they are not split already
    valid: float = Field(0.1, gt=0, lt=0.5)
    bits: int = Field(16, ge=9, le=32)  # of images with more than 8 bits: 2 ** bits - 1 is white
    broken: Literal["refuse", "skip"] = "refuse"  # files that cannot be read


def default_size(options: Mapping[str, object]) -> dict[str, int]:
    """Clients and tasks of the folder, for a plan that does not set them."""
    try:
        path = Options.model_validate(options).path
    except ValidationError:  # reported when the plan is checked
        return {}
    if not path:  # a ready plan, to which the user adds the folder
        return {}
    tasks = {(row.client, row.task) for row in images.find(Path(path))}
    clients = [client for client, _ in tasks]
    return {"clients": len(set(clients)), "tasks": max(map(clients.count, clients))}


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    if not options.path:
        raise WeftError("scenario folders needs your images: set scenario.path=FOLDER or scenario.path=TABLE.csv")
    path = Path(options.path)
    found = images.load(path, options.bits)
    notes = _notes(options, found)
    names = sorted(set(found.client.tolist()), key=natural)
    if clients > len(names):
        raise WeftError(f"{path} has {len(names)} clients, not {clients}; remove clients from the plan, or lower it")
    sequences = tuple(sequence(options, found, name, tasks) for name in names[:clients])
    if tasks > (most := max(map(len, sequences))):
        raise WeftError(f"{path} has up to {most} tasks per client, not {tasks}; remove tasks from the plan")
    return Scenario("folders", sequences, notes=notes)


def _notes(options: Options, found: UserImages) -> tuple[str, ...]:
    notes = []
    if broken := found.broken.tolist():
        some = ", ".join(broken[:MAX_NAMED]) + (", ..." if len(broken) > MAX_NAMED else "")
        if options.broken == "refuse":
            raise WeftError(f"{len(broken)} files cannot be read: {some}; repair them, or set scenario.broken=skip")
        notes.append(f"{len(broken)} files cannot be read and are skipped: {some}")
    return (*notes, *depth_notes(found, options.bits, "scenario.bits"))


def depth_notes(found: UserImages, bits: int, option: str) -> tuple[str, ...]:
    """Warn if `bits` makes images of more than 8 bits too bright or too dark; `option` is the key that sets it."""
    highest, white = int(found.highest[0]), 2**bits - 1
    if highest > white:
        return (f"images have values up to {highest}, and all above {white} become white; raise {option}",)
    if highest and highest * 4 <= white:
        better = f"{option}={max(9, highest.bit_length())}"
        return (f"the highest value of the images is {highest} of {white}, so they are dark; set {better}",)
    return ()


def sequence(options: Options, found: UserImages, client: str, most: int) -> tuple[Task, ...]:
    """The first `most` tasks of a client."""
    mine = np.flatnonzero(found.client == client)
    tasks, labels, groups = (getattr(found, key)[mine].tolist() for key in ("task", "label", "group"))
    splits: list[str] = found.split[mine].tolist()
    cells = [f"{task}/{label}" for task, label in zip(tasks, labels, strict=True)]
    test, valid = options.test, options.valid
    if not any(splits):
        shares: dict[SplitName, float] = {"train": 1 - test - valid, "test": test, "valid": valid}
        splits = list(split_groups(cells, groups, shares, client))
    else:
        check_given(f"client {client}", splits, groups)
        if "valid" not in splits:  # taken from train, never from test
            train = [index for index, split in enumerate(splits) if split == "train"]
            shares = {"train": 1 - valid, "valid": valid}
            chosen = split_groups([cells[i] for i in train], [groups[i] for i in train], shares, client)
            for index, split in zip(train, chosen, strict=True):
                splits[index] = split
    names = sorted(set(tasks), key=natural)[:most]
    of_task = {name: np.flatnonzero(found.task[mine] == name) for name in names}
    return tuple(_task(found, client, name, mine[at], np.array(splits)[at]) for name, at in of_task.items())


def _task(found: UserImages, client: str, name: str, mine: Indices, splits: NDArray[np.str_]) -> Task:
    texts = found.label[mine].tolist()
    warnings = check_task(f"client {client}, task {name}" if client else f"task {name}", texts, splits.tolist())
    classes = tuple(sorted(set(texts), key=natural))
    labels = np.array([classes.index(text) for text in texts], dtype=np.int64)
    indices = {split: indices_of(splits, split, f"{client}/{name}") for split in SPLITS}
    train = mine[indices["train"]]
    mean, deviation = mean_and_deviation(found.sums[train].sum(0), found.squares[train].sum(0), SIDE**2 * len(train))
    identity = [texts, splits.tolist(), found.digest[mine].tolist()]
    return Task(
        name=name,
        group=client,
        classes=classes,
        sizes={split: len(chosen) for split, chosen in indices.items()},
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, found.x, {split: (mine[at], labels[at]) for split, at in indices.items()}),
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:16],
        warnings=warnings,
    )


def _load(x: NDArray[np.uint8], chosen: dict[SplitName, tuple[Indices, Indices]], split: SplitName) -> Split:
    indices, labels = chosen[split]
    return Split(np.asarray(x[indices]), labels)
