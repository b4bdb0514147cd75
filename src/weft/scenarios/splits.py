"""Train, test and valid parts of images, with every group of images on one side; what to warn of in somebody's own.

The cut comes from a fixed seed: it is the same in every run, whatever the plan's seed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.data.cache import mean_and_deviation
from weft.data.own import natural
from weft.errors import WeftError
from weft.randomness import generator
from weft.scenarios import PARTS, Part

SEED = 0
IMBALANCE = 10  # times as many training images of one class as of another


def cut(cells: Sequence[str], groups: Sequence[str], shares: Mapping[Part, float], purpose: str) -> list[Part]:
    """For each image its part. `cells` are what has to be spread evenly, such as the classes; `groups` stay together.

    Large groups are dealt first, each to where its cells lack the largest share. An image without a group is one of
    its own. A cell is never without training images.

    >>> found = cut(["cat"] * 10 + ["dog"] * 10, [""] * 20, {"train": 0.7, "test": 0.2, "valid": 0.1}, "doctest")
    >>> [found[:10].count(part) for part in PARTS], [found[10:].count(part) for part in PARTS]
    ([7, 2, 1], [7, 2, 1])
    """
    members: dict[str | int, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        members[group or place].append(place)
    shuffled = list(members.values())
    shuffled = [shuffled[place] for place in generator(SEED, "cut", purpose).permutation(len(shuffled))]
    of_cell = Counter(cells)
    have: Counter[tuple[Part, str]] = Counter()
    found: list[Part] = ["train"] * len(cells)
    for places in sorted(shuffled, key=len, reverse=True):
        counts = Counter(cells[place] for place in places)
        lacks = {
            part: sum(count * (1 - have[part, cell] / (share * of_cell[cell])) for cell, count in counts.items())
            for part, share in shares.items()
        }
        unknown = any(not have["train", cell] for cell in counts) and "train" in shares
        part: Part = "train" if unknown else max(lacks, key=lambda part: lacks[part])
        for place in places:
            found[place] = part
        for cell, count in counts.items():
            have[part, cell] += count
    return found


def given(where: str, parts: Sequence[str], groups: Sequence[str]) -> None:
    """Parts that came with the images: a `WeftError` if they cannot be used as they are."""
    if "" in parts:
        raise WeftError(
            f"{where}: some images say whether they are for train, valid or test, and some do not; all must"
        )
    sides: dict[str, set[str]] = defaultdict(set)
    for group, part in zip(groups, parts, strict=True):
        if group:
            sides[group].add(part)
    for group, several in sides.items():
        if len(several) > 1:
            both = " and ".join(sorted(several))
            raise WeftError(
                f"{where}: the group {group!r} is in {both}; what is tested must not be known from training"
            )


def check(where: str, labels: Sequence[str], parts: Sequence[Part], one_will_do: bool = False) -> tuple[str, ...]:
    """What is wrong with a task of classes is a `WeftError`; what a person should know of is given as lines.

    `one_will_do`: it is no task of classes.
    """
    counts = Counter(zip(parts, labels, strict=True))
    classes = sorted(set(labels), key=natural)
    for part in PARTS:
        if part not in parts:
            raise WeftError(f"{where} has no {part} images; give it some, or more images (or groups of them) to cut")
    learned = {label: counts["train", label] for label in classes if counts["train", label]}
    for label in classes:
        if label not in learned:
            part = next(part for part in PARTS if counts[part, label])
            raise WeftError(f"{where}: the class {label!r} is in {part} and not in train, so nobody can learn it")
    if len(learned) < 2 and not one_will_do:
        raise WeftError(
            f"{where} has one class only, {classes[0]!r}; there is nothing to tell apart with fewer than two"
        )
    lines = [
        f"{where}: the class {label!r} has no test images, so nobody knows how well it is told apart"
        for label in classes
        if not counts["test", label]
    ]
    rarest, commonest = (choose(learned, key=lambda label: learned[label]) for choose in (min, max))
    if learned[commonest] >= IMBALANCE * learned[rarest]:
        lines.append(
            f"{where}: {learned[commonest]} training images of {commonest!r} and {learned[rarest]} of {rarest!r}; "
            "accuracy hides how the rare ones fare, metrics=balanced,recall shows it"
        )
    return tuple(lines)


def in_parts(parts: NDArray[np.str_], part: Part, purpose: str) -> NDArray[np.int64]:
    """Where the images of one part are, in an order of the fixed seed: a plan may ask not to shuffle later."""
    return generator(SEED, "order", purpose, part).permutation(np.flatnonzero(parts == part))


def normalisation(
    sums: NDArray[np.int64], squares: NDArray[np.int64], pixels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation by channel, out of each image's sums; `pixels` are those of one image."""
    return mean_and_deviation(sums.sum(0), squares.sum(0), pixels * len(sums))
