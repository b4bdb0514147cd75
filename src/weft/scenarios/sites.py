"""sites: every client is a site with images of its own, which nobody else can see or list.

At a site (`WEFT_SITE` names its folder) a task is a folder of images with a subfolder for each class, and tasks.json
lists the tasks in the order in which the site announced them. At the hub nothing is known of them but how many the plan
wants.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from weft.errors import Problem
from weft.lazy import lazy
from weft.randomness import generator
from weft.scenarios import Part, Scenario, Split, Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from weft.data import pictures
else:
    np = lazy("numpy")
    pictures = lazy("weft.data.pictures")

DEPTH = 16  # bits of pictures that are deeper than 8
SHARES: dict[Part, float] = {"test": 0.2, "valid": 0.1}  # of each class; train gets the rest
FEWEST = 3  # images of a class: one for each part
PARTS: tuple[Part, ...] = ("train", "valid", "test")


class Options(BaseModel):
    """Each site's own images, announced with `weft site task add`; for `weft hub run`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


@dataclass(frozen=True)
class Found:
    """What a folder would be as a task."""

    classes: dict[str, tuple[Path, ...]]
    faults: tuple[str, ...]  # it is no task while there are any


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    if site := os.environ.get("WEFT_SITE"):
        own = tuple(own_task(str(words["name"]), Path(words["folder"])) for words in listed(Path(site)))
        return Scenario("sites", (own,) * clients)
    return Scenario("sites", (tuple(_unseen(step) for step in range(tasks)),) * clients)


def listed(site: Path) -> list[dict[str, str]]:
    """The tasks that a site has announced, in order."""
    try:
        words: list[dict[str, str]] = json.loads((site / "tasks.json").read_text(encoding="utf-8"))
        return words
    except (OSError, ValueError):
        raise Problem(f"{site / 'tasks.json'} cannot be read; weft site join makes a site's folder") from None


def look(folder: Path) -> Found:
    """Which classes and images a folder has, and what is wrong with it; every image is opened once."""
    if not folder.is_dir():
        return Found({}, (f"{folder} is no folder",))
    classes = {path.name: _images(path) for path in sorted(folder.iterdir()) if path.is_dir() and path.name[0] != "."}
    classes = {name: images for name, images in classes.items() if images}
    faults = []
    if len(classes) < 2:
        faults.append(f"{folder} has {len(classes)} subfolders with images; a task needs a subfolder for each class")
    for name, images in classes.items():
        if len(images) < FEWEST:
            faults.append(f"class {name} has {len(images)} images, at least {FEWEST} are needed")
        faults += [f"{image} is no image that can be read" for image in images if not _is_readable(image)]
    return Found(classes, tuple(faults))


def own_task(name: str, folder: Path) -> Task:
    found = look(folder)
    if found.faults:
        raise Problem(f"task {name}: {found.faults[0]}")
    places = {part: [cut(images)[part] for images in found.classes.values()] for part in PARTS}
    train = _read(image for images in places["train"] for image in images) / 255
    return Task(
        name=name,
        group="own",
        classes=tuple(found.classes),
        sizes={part: sum(map(len, places[part])) for part in PARTS},
        mean=tuple(map(float, train.mean(axis=(0, 1, 2)))),
        deviation=tuple(float(value) or 1.0 for value in train.std(axis=(0, 1, 2))),
        load=functools.partial(_load, places),
    )


def cut(images: tuple[Path, ...]) -> dict[Part, list[Path]]:
    """The parts of a class, in an order that depends on the names of its images alone."""
    order = [images[place] for place in generator(0, "own", *(image.name for image in images)).permutation(len(images))]
    found: dict[Part, list[Path]] = {}
    for part, share in SHARES.items():
        count = max(1, round(share * len(images)))
        found[part], order = order[:count], order[count:]
    return found | {"train": order}


def _load(places: dict[Part, list[list[Path]]], part: Part) -> Split:
    labels = np.repeat(np.arange(len(places[part]), dtype=np.int64), [len(images) for images in places[part]])
    images = _read(image for images in places[part] for image in images)
    order = generator(0, "order", part).permutation(len(labels))  # a plan may ask not to shuffle later
    return Split(images[order], labels[order])


def _read(images: Iterable[Path]) -> NDArray[np.uint8]:
    """uint8 (count, 32, 32, 3), as the images of the `folders` scenario are read."""
    return np.stack([pictures.own_picture(path.read_bytes(), pictures.SIDE, DEPTH)[0] for path in images])


def _is_readable(path: Path) -> bool:
    try:
        _read([path])
    except pictures.BAD_PICTURE:
        return False
    return True


def _images(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(path for path in folder.iterdir() if path.suffix.lower() in pictures.SUFFIXES))


def _unseen(step: int) -> Task:
    """All that a hub knows of a site's task."""
    return Task(f"own-{step}", "own", ("?", "?"), dict.fromkeys(PARTS, 0), (0.5,) * 3, (0.5,) * 3, _nobody)


def _nobody(part: Part) -> Split:
    raise Problem("scenario=sites has no images here; run it with weft hub run, at sites that have some")
