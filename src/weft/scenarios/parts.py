"""Train, test and valid parts of a public dataset, and tasks made of its classes.

A set's own train and test images are pooled and cut .7 / .2 / .1 within each class, by a fixed seed: the cut is the
same in every run, whatever the plan's seed, which decides only who gets what in which order. What is known to be a copy
stays together: frames of one traffic sign are near copies of each other, so a track is not cut, and notMNIST has
hundreds of images more than once in a class. Whoever changes a cut counts it in marks.py.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from weft.data.cache import Dataset, load
from weft.errors import WeftError
from weft.randomness import generator
from weft.scenarios import PARTS, Part, Split, Task
from weft.scenarios.splits import cut

SEED = 0  # of all cuts; not the plan's
SHARES: dict[Part, float] = {"train": 0.7, "test": 0.2, "valid": 0.1}  # the released code's, FIDELITY.md row 15
HAS_COPIES = ("notmnist",)  # 492 of 18,724; CIFAR-100's 26 of 60,000 are left where they fall

Indices = NDArray[np.int64]


def parts_of(dataset: Dataset, index: int) -> dict[Part, Indices]:
    """For one class the places of its images in each part, in an order of the fixed seed."""
    mine = np.flatnonzero(dataset.y == index)
    if len(mine) < len(PARTS):
        raise WeftError(f"class {index} of {dataset.name} has {len(mine)} images; each of its three parts needs one")
    rng = generator(SEED, "parts", dataset.name, index)
    if "track" in dataset.extra:
        kind, groups = "tracks", [f"track {at}" if at >= 0 else "" for at in dataset.extra["track"][mine]]
        found = _by_track(groups, f"class {index} of {dataset.name}")
    elif dataset.name in HAS_COPIES:
        kind, groups = "images that differ", [hashlib.sha256(image.tobytes()).hexdigest() for image in dataset.x[mine]]
        found = np.array(cut(["class"] * len(mine), groups, SHARES, f"{dataset.name} {index}"))
    else:
        mine = rng.permutation(mine)
        sizes = {part: max(1, round(SHARES[part] * len(mine))) for part in ("test", "valid")}
        ends = np.cumsum([len(mine) - sum(sizes.values()), sizes["test"]])
        return dict(zip(PARTS, np.split(mine, ends), strict=True))
    if absent := [part for part in PARTS if part not in found]:
        count = len(set(groups) - {""})
        raise WeftError(f"class {index} of {dataset.name} has {count} {kind}: too few, there are no {absent[0]} images")
    return {part: rng.permutation(mine[found == part]) for part in PARTS}


def _by_track(tracks: list[str], purpose: str) -> NDArray[np.str_]:
    """For each image of a class its part. GTSRB's own test set has no tracks, so nobody can tell the near copies in it:
    it is the test part as it stands, and whole tracks make the others."""
    known = np.array([track != "" for track in tracks])
    wanted: tuple[Part, ...] = PARTS if known.all() else ("train", "valid")
    groups = [track for track in tracks if track]
    found = np.full(len(tracks), "test", dtype="<U5")
    found[known] = cut(["class"] * len(groups), groups, {part: SHARES[part] for part in wanted}, purpose)
    return found


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
