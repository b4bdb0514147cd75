"""Train, test and valid splits with every group of images in one split; fingerprints of images and splits.

Splits come from a fixed seed: they are the same in every run, whatever the seed of the plan.

A public dataset's train and test images are pooled and split .7 / .2 / .1 within each class. Known copies stay
together: frames of one traffic sign are near copies, so a track is not divided, and notMNIST has hundreds of images
more than once in a class. Count a change of a dataset's split in SPLIT_VERSIONS.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weft.data import cache
from weft.data.images import natural
from weft.data.sources import SOURCES
from weft.errors import WeftError
from weft.lazy import np
from weft.randomness import generator
from weft.scenarios import SPLITS, Split, SplitName, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from weft.data.cache import Dataset

    Indices = NDArray[np.int64]

SEED = 0  # of all splits; not the plan's
SHARES: dict[SplitName, float] = {"train": 0.7, "test": 0.2, "valid": 0.1}  # the released code's, FIDELITY.md row 15
IMBALANCE = 10  # warn if a class has this many times the train images of another
HAS_COPIES = ("notmnist",)  # 492 of 18,724; CIFAR-100's 26 of 60,000 are not kept together
SPLIT_VERSIONS = {"notmnist": 1, "traffic_signs": 1}  # changes of a split: results of two versions do not compare


def split_groups(
    cells: Sequence[str], groups: Sequence[str], shares: Mapping[SplitName, float], purpose: str
) -> list[SplitName]:
    """Choose a split for each image. `cells`, such as classes, are spread evenly; `groups` stay together.

    Large groups are assigned first, each to the split whose share of its cells is filled least. An image without a
    group is a group of one. Every cell gets train images.

    >>> found = split_groups(["cat"] * 10 + ["dog"] * 10, [""] * 20, SHARES, "doctest")
    >>> [found[:10].count(split) for split in SPLITS], [found[10:].count(split) for split in SPLITS]
    ([7, 2, 1], [7, 2, 1])
    """
    members: dict[str | int, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group or index].append(index)
    shuffled = list(members.values())
    shuffled = [shuffled[place] for place in generator(SEED, "cut", purpose).permutation(len(shuffled))]
    of_cell = Counter(cells)
    have: Counter[tuple[SplitName, str]] = Counter()
    found: list[SplitName] = ["train"] * len(cells)
    for indices in sorted(shuffled, key=len, reverse=True):
        counts = Counter(cells[index] for index in indices)
        lacks = {
            split: sum(count * (1 - have[split, cell] / (share * of_cell[cell])) for cell, count in counts.items())
            for split, share in shares.items()
        }
        is_new = any(not have["train", cell] for cell in counts) and "train" in shares
        chosen: SplitName = "train" if is_new else max(lacks, key=lambda split: lacks[split])
        for index in indices:
            found[index] = chosen
        for cell, count in counts.items():
            have[chosen, cell] += count
    return found


def check_given(where: str, splits: Sequence[str], groups: Sequence[str]) -> None:
    """Raise a WeftError if splits that came with the images cannot be used."""
    if "" in splits:
        raise WeftError(f"{where}: only some images have a split; assign train, valid or test to all or to none")
    of_group: dict[str, set[str]] = defaultdict(set)
    for group, split in zip(groups, splits, strict=True):
        of_group[group].add(split)
        if group and len(of_group[group]) > 1:
            both = " and ".join(sorted(of_group[group]))
            raise WeftError(f"{where}: the group {group!r} is in {both}; put all its images into one split")


def check_task(
    where: str, labels: Sequence[str], splits: Sequence[SplitName], needs_classes: bool = True
) -> tuple[str, ...]:
    """Raise a WeftError if a task cannot be learned; returns warnings."""
    counts = Counter(zip(splits, labels, strict=True))
    classes = sorted(set(labels), key=natural)
    for split in SPLITS:
        if split not in splits:
            raise WeftError(f"{where} has no {split} images; add some, or more images or groups to split")
    train = {label: counts["train", label] for label in classes if counts["train", label]}
    for label in classes:
        if label not in train:
            split = next(split for split in SPLITS if counts[split, label])
            raise WeftError(f"{where}: the class {label!r} is in {split} and not in train; add train images of it")
    if len(train) < 2 and needs_classes:
        raise WeftError(f"{where} has only one class, {classes[0]!r}; a task needs at least two")
    untested = [label for label in classes if not counts["test", label]]
    lines = [f"{where}: the class {label!r} has no test images, so its accuracy is not measured" for label in untested]
    rarest, commonest = (choose(train, key=lambda label: train[label]) for choose in (min, max))
    if train[commonest] >= IMBALANCE * train[rarest]:
        sizes = f"{train[commonest]} train images of {commonest!r} and {train[rarest]} of {rarest!r}"
        lines.append(f"{where}: {sizes}; accuracy hides rare classes, metrics=balanced,recall shows them")
    return tuple(lines)


def indices_of(splits: NDArray[np.str_], split: SplitName, purpose: str) -> Indices:
    """Indices of the images of a split in a fixed random order, since a plan may disable shuffling."""
    return generator(SEED, "order", purpose, split).permutation(np.flatnonzero(splits == split))


# ---- public datasets -------------------------------------------------------------------------------------------------


def split_class(dataset: Dataset, label: int) -> dict[SplitName, Indices]:
    """Indices of the images of one class for each split, in a fixed random order."""
    mine = np.flatnonzero(dataset.y == label)
    where = f"class {label} of {dataset.name}"
    if len(mine) < len(SPLITS):
        raise WeftError(f"{where} has {len(mine)} images, fewer than one for each of its three splits")
    rng = generator(SEED, "parts", dataset.name, label)
    if "track" in dataset.extra:
        kind, groups = "tracks", [f"track {track}" if track >= 0 else "" for track in dataset.extra["track"][mine]]
        found = _split_tracks(groups, where)
    elif dataset.name in HAS_COPIES:
        kind, groups = "different images", [hashlib.sha256(image.tobytes()).hexdigest() for image in dataset.x[mine]]
        found = np.array(split_groups(["class"] * len(mine), groups, SHARES, f"{dataset.name} {label}"))
    else:
        mine = rng.permutation(mine)
        test, valid = (max(1, round(SHARES[split] * len(mine))) for split in SPLITS[1:])
        return dict(zip(SPLITS, np.split(mine, np.cumsum([len(mine) - test - valid, test])), strict=True))
    if absent := [split for split in SPLITS if split not in found]:
        raise WeftError(f"{where} has {len(set(groups) - {''})} {kind}, too few to have {absent[0]} images")
    return {split: rng.permutation(mine[found == split]) for split in SPLITS}


def _split_tracks(tracks: list[str], purpose: str) -> NDArray[np.str_]:
    """A split for each image of a class. GTSRB's test images have no track, so their near copies are unknown: all of
    them are test images, and whole tracks are assigned to the other splits."""
    known = np.array([track != "" for track in tracks])
    wanted = SPLITS if known.all() else ("train", "valid")
    groups = [track for track in tracks if track]
    found = np.full(len(tracks), "test", dtype="<U5")
    found[known] = split_groups(["class"] * len(groups), groups, {split: SHARES[split] for split in wanted}, purpose)
    return found


def task_of(dataset: Dataset, name: str, classes: tuple[int, ...], indices: dict[SplitName, list[Indices]]) -> Task:
    """A task of some classes of a dataset, given the indices of its images for each split and class."""
    mean, deviation = dataset.normalization()
    return Task(
        name=name,
        group=dataset.name,
        vocabulary=dataset.name,
        classes=tuple(dataset.class_name(label) for label in classes),
        sizes={split: sum(map(len, indices[split])) for split in SPLITS},
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, dataset.name, name, indices),
    )


def _load(dataset: str, name: str, indices: dict[SplitName, list[Indices]], split: SplitName) -> Split:
    chosen = np.concatenate(indices[split])
    labels = np.repeat(np.arange(len(indices[split]), dtype=np.int64), [len(each) for each in indices[split]])
    order = generator(SEED, "order", dataset, name, split).permutation(len(chosen))  # a plan may disable shuffling
    return Split(cache.load(dataset).images(chosen[order]), labels[order])


# ---- fingerprints ----------------------------------------------------------------------------------------------------


def fingerprint_of(dataset: str) -> str:
    """Fingerprint of a dataset's images and, after a dot, the version of its split unless that is 0."""
    return cache.fingerprint(dataset) + _version_suffix(dataset)


def has_changed(dataset: str, fingerprint: str) -> bool:
    """Whether images or split differ from a recorded fingerprint. Images that are not in the cache are not compared."""
    if dataset not in SOURCES:
        return False
    is_cached = dataset in cache.available()
    return has_other_split(dataset, fingerprint) or (is_cached and images_in(fingerprint) != cache.fingerprint(dataset))


def has_other_split(dataset: str, fingerprint: str) -> bool:
    return fingerprint.removeprefix(images_in(fingerprint)) != _version_suffix(dataset)


def images_in(fingerprint: str) -> str:
    """The part of a fingerprint that identifies the images."""
    return fingerprint.partition(".")[0]


def _version_suffix(dataset: str) -> str:
    return f".{SPLIT_VERSIONS[dataset]}" if dataset in SPLIT_VERSIONS else ""
