"""Train, test and valid parts of a public dataset, and tasks made of its classes.

A set's own train and test images are pooled and cut .7 / .2 / .1 within each class, by a fixed seed: the cut is the
same in every run, whatever the plan's seed, which decides only who gets what in which order. Frames of one traffic
sign are near copies of each other, so a track is never cut.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from weft.data.cache import Dataset, load
from weft.errors import Problem
from weft.randomness import generator
from weft.scenarios import Part, Split, Task

SEED = 0  # of all cuts; not the plan's
PARTS: tuple[Part, ...] = ("train", "test", "valid")
SHARES = {"test": 0.2, "valid": 0.1}  # train gets the rest; the released code's, FIDELITY.md row 15

Indices = NDArray[np.int64]


def parts_of(dataset: Dataset, index: int) -> dict[Part, Indices]:
    """For one class the places of its images in each part, in an order of the fixed seed."""
    mine = np.flatnonzero(dataset.y == index)
    tracks = dataset.extra.get("track")
    rng = generator(SEED, "parts", dataset.name, index)
    if len(mine) < len(PARTS):
        raise Problem(f"class {index} of {dataset.name} has {len(mine)} images; each of its three parts needs one")
    sizes = {part: max(1, round(share * len(mine))) for part, share in SHARES.items()}
    if tracks is None:
        mine = rng.permutation(mine)
        ends = np.cumsum([len(mine) - sum(sizes.values()), sizes["test"]])
        return dict(zip(PARTS, np.split(mine, ends), strict=True))
    return _by_track(dataset, index, mine, tracks[mine], sizes, rng)


def _by_track(
    dataset: Dataset,
    index: int,
    mine: Indices,
    tracks: NDArray[np.int16],
    sizes: dict[str, int],
    rng: np.random.Generator,
) -> dict[Part, Indices]:
    """Whole tracks go where most is lacking, large ones first; an image of unknown track is one of its own."""
    known = [mine[tracks == track] for track in np.unique(tracks[tracks >= 0])]
    groups = [*known, *mine[tracks < 0].reshape(-1, 1)]
    if len(groups) < len(PARTS):
        raise Problem(f"class {index} of {dataset.name} has {len(groups)} tracks; each of its three parts needs one")
    groups = sorted((groups[place] for place in rng.permutation(len(groups))), key=len, reverse=True)
    # the smallest two make sure that test and valid have one each
    found: dict[Part, list[Indices]] = {"valid": [groups.pop()], "test": [groups.pop()], "train": []}
    lacking: dict[Part, int] = {
        "train": len(mine) - sum(sizes.values()),
        "test": sizes["test"],
        "valid": sizes["valid"],
    }
    for part in ("valid", "test"):
        lacking[part] -= len(found[part][0])
    for group in groups:
        part = max(PARTS, key=lambda part: lacking[part]) if found["train"] else "train"
        found[part].append(group)
        lacking[part] -= len(group)
    return {part: rng.permutation(np.concatenate(found[part])) for part in PARTS}


def task_of(dataset: Dataset, name: str, classes: tuple[int, ...], places: dict[Part, list[Indices]]) -> Task:
    """A task of some classes of a dataset: for each part and class the places of its images."""
    mean, deviation = dataset.normalisation()
    return Task(
        name=name,
        group=dataset.name,
        classes=tuple(dataset.class_name(index) for index in classes),
        sizes={part: sum(map(len, places[part])) for part in PARTS},
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, dataset.name, name, places),
    )


def _load(dataset: str, name: str, places: dict[Part, list[Indices]], part: Part) -> Split:
    chosen = np.concatenate(places[part])
    labels = np.repeat(np.arange(len(places[part]), dtype=np.int64), [len(each) for each in places[part]])
    order = generator(SEED, "order", dataset, name, part).permutation(
        len(chosen)
    )  # a plan may ask not to shuffle later
    return Split(load(dataset).images(chosen[order]), labels[order])
