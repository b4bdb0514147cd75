"""folders: your own images, from a folder by client, task and class, or from a table (weft/data/own.py says how).

Clients, tasks and classes come in the order of their names, 2 before 10. Images that are not cut already are cut once
for each client, over all its tasks, so that a group that is in two tasks is on one side in both. Mean and deviation
are those of a task's training images.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from weft.data import own
from weft.data.own import Pictures, natural
from weft.errors import WeftError
from weft.scenarios import PARTS, Part, Scenario, Split, Task
from weft.scenarios.splits import check, cut, given, in_parts, normalisation

MOST_NAMED = 3  # broken files in a message


def _absolute(path: str) -> str:
    """A plan is found again from any folder."""
    return str(Path(path).expanduser().resolve()) if path else ""


class Options(BaseModel):
    """Your own images: a folder CLIENT/TASK/CLASS/image.png, or a table of paths, clients, tasks and labels."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: Annotated[str, AfterValidator(_absolute)] = ""
    test: float = Field(0.2, gt=0, lt=0.5)  # shares of the images, where they are not cut already
    valid: float = Field(0.1, gt=0, lt=0.5)
    bits: int = Field(16, ge=9, le=32)  # of pictures deeper than 8 bits: 2 ** bits - 1 is white
    broken: Literal["refuse", "skip"] = "refuse"  # files that are no pictures


def count(options: Mapping[str, object]) -> dict[str, int]:
    """How many clients and tasks the folder has, for a plan that does not say."""
    try:
        chosen = Options.model_validate(options)
    except ValidationError:  # told when the plan is checked
        return {}
    if not chosen.path:  # a plan for anybody's folder
        return {}
    rows = own.find(_place(chosen))
    tasks = {(row.client, row.task) for row in rows}
    clients = {client for client, _ in tasks}
    return {"clients": len(clients), "tasks": max(sum(one == client for one, _ in tasks) for client in clients)}


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    place = _place(options)
    pictures = own.load(place, options.bits)
    notes = _notes(place, options, pictures)
    names = sorted(set(pictures.client.tolist()), key=natural)
    if clients > len(names):
        raise WeftError(f"{place} has {len(names)} clients, not {clients}; leave clients out, or choose fewer")
    sequences = tuple(sequence(options, pictures, name, tasks) for name in names[:clients])
    if tasks > max(map(len, sequences)):
        raise WeftError(f"{place} has up to {max(map(len, sequences))} tasks a client, not {tasks}; leave tasks out")
    return Scenario("folders", sequences, notes=notes)


def _place(options: Options) -> Path:
    if not options.path:
        raise WeftError("the scenario folders needs your images: scenario.path=FOLDER or scenario.path=TABLE.csv")
    return Path(options.path)


def _notes(place: Path, options: Options, pictures: Pictures) -> tuple[str, ...]:
    notes = []
    if broken := pictures.broken.tolist():
        some = ", ".join(broken[:MOST_NAMED]) + (", ..." if len(broken) > MOST_NAMED else "")
        if options.broken == "refuse":
            raise WeftError(f"{len(broken)} files cannot be read: {some}; mend them, or scenario.broken=skip")
        notes.append(f"{len(broken)} files cannot be read and are left out: {some}")
    return (*notes, *depth_notes(pictures, options.bits, "scenario.bits"))


def depth_notes(pictures: Pictures, bits: int, option: str) -> tuple[str, ...]:
    """Whether deep pictures are as bright as they could be; `option` is where their depth is said."""
    highest, white = int(pictures.highest[0]), 2**bits - 1
    if highest > white:
        return (f"deep images have values up to {highest}, and all above {white} is white; raise {option}",)
    if highest and highest * 4 <= white:
        return (
            f"the highest value of the deep images is {highest}, and {white} is white: they are dark; "
            f"{option}={max(9, highest.bit_length())} makes more of them",
        )
    return ()


def sequence(options: Options, pictures: Pictures, client: str, most: int) -> tuple[Task, ...]:
    """A client's first tasks."""
    mine = np.flatnonzero(pictures.client == client)
    tasks, labels, groups = (getattr(pictures, key)[mine].tolist() for key in ("task", "label", "group"))
    parts: list[str] = pictures.part[mine].tolist()
    cells = [f"{task}/{label}" for task, label in zip(tasks, labels, strict=True)]
    shares: dict[Part, float] = {
        "train": 1 - options.test - options.valid,
        "test": options.test,
        "valid": options.valid,
    }
    if not any(parts):
        parts = list(cut(cells, groups, shares, client))
    else:
        given(f"client {client}", parts, groups)
        if "valid" not in parts:  # it comes out of train; nothing may come out of test
            train = [place for place, part in enumerate(parts) if part == "train"]
            rest: dict[Part, float] = {"train": 1 - options.valid, "valid": options.valid}
            found = cut([cells[place] for place in train], [groups[place] for place in train], rest, client)
            for place, part in zip(train, found, strict=True):
                parts[place] = part
    sides = np.array(parts)
    steps = sorted(set(tasks), key=natural)[:most]
    of_task = {name: np.flatnonzero(pictures.task[mine] == name) for name in steps}
    return tuple(_task(pictures, client, name, mine[at], sides[at]) for name, at in of_task.items())


def _task(pictures: Pictures, client: str, name: str, mine: NDArray[np.int64], parts: NDArray[np.str_]) -> Task:
    words = pictures.label[mine].tolist()
    warnings = check(f"client {client}, task {name}" if client else f"task {name}", words, parts.tolist())
    classes = tuple(sorted(set(words), key=natural))
    labels = np.array([classes.index(word) for word in words], dtype=np.int64)
    places = {part: in_parts(parts, part, f"{client}/{name}") for part in PARTS}
    train = mine[places["train"]]
    mean, deviation = normalisation(pictures.sums[train], pictures.squares[train], pictures.x[0, :, :, 0].size)
    marks = [words, parts.tolist(), pictures.digest[mine].tolist()]
    return Task(
        name=name,
        group=client,
        classes=classes,
        sizes={part: len(found) for part, found in places.items()},
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, pictures.x, {part: (mine[at], labels[at]) for part, at in places.items()}),
        fingerprint=hashlib.sha256(repr(marks).encode()).hexdigest()[:16],
        warnings=warnings,
    )


def _load(x: NDArray[np.uint8], places: dict[Part, tuple[NDArray[np.int64], NDArray[np.int64]]], part: Part) -> Split:
    chosen, labels = places[part]
    return Split(np.asarray(x[chosen]), labels)
