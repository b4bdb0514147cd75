"""Tasks from arrays in Python, or from a torch.utils.data.Dataset: the parts of a scenario of your own.

    def mine(clients: int, tasks: int, seed: int, noise: float = 0.1) -> Scenario:
        return Scenario("mine", tuple(tuple(from_arrays(...) for ...) for ...))

In `file.py` it is `scenario=file.py:mine scenario.noise=0.2`, and it is made anew in every process that needs it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.own import digests, natural, sums_of
from weft.data.pictures import SIDE, from_pillow, from_values
from weft.errors import WeftError
from weft.scenarios import PARTS, Part, Split, Task
from weft.scenarios.splits import check, cut, given, in_parts, normalisation

TEST, VALID = 0.2, 0.1


class Pairs(Protocol):
    """What a map-style torch.utils.data.Dataset is: so many pairs of an image and a label."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int) -> Any: ...


def from_dataset(name: str, dataset: Pairs, *, classes: Sequence[str] | None = None, **more: Any) -> Task:
    """A task of all images of a dataset; names of classes are its own (`dataset.classes`) if it has some."""
    if not hasattr(dataset, "__len__"):
        raise WeftError(f"task {name}: the dataset has no length; put what it gives into a list")
    pairs = [dataset[place] for place in range(len(dataset))]
    if any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in pairs):
        raise WeftError(f"task {name}: the dataset gives no pairs of an image and a label")
    labels = [np.asarray(label) for _, label in pairs]
    found = classes if classes is not None else getattr(dataset, "classes", None)
    return from_arrays(name, [image for image, _ in pairs], np.stack(labels), classes=found, **more)


def from_arrays(
    name: str,
    images: Sequence[Any] | NDArray[Any],
    labels: Sequence[Any] | NDArray[Any],
    *,
    classes: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    parts: Sequence[str] | None = None,
    test: float = TEST,
    valid: float = VALID,
    bits: int = 16,
) -> Task:
    """A task of some images and their labels.

    Images are arrays or tensors (height, width), (height, width, 3) or (3, height, width) of any size, of bytes, of
    floats from 0 to 1, or deeper (2 ** bits - 1 is white); Pillow's are taken too. Labels are words; or numbers, which
    `classes` names; or, for a loss of your own, floats (count, outputs), where `classes` names the outputs. `groups`
    are images that stay on one side, `parts` says the side (train, valid or test) where that is decided already.
    """
    where = f"task {name}"
    values = np.asarray(labels)
    sides = list(groups) if groups is not None else [""] * len(values)
    if not len(images) == len(values) == len(sides) == len(values if parts is None else parts) or not len(values):
        raise WeftError(
            f"{where}: there are {len(images)} images and {len(values)} labels; groups and parts have as many"
        )
    x = np.stack([_picture(where, place, image, bits) for place, image in enumerate(images)])
    targets, names, cells = _targets(where, values, classes)
    if parts is not None:
        given(where, parts, sides)
    shares: dict[Part, float] = {"train": 1 - test - valid, "test": test, "valid": valid}
    found = np.array(cut(cells, sides, shares, name) if parts is None else list(parts))
    warnings = check(where, cells, found.tolist(), one_will_do=targets.ndim > 1)
    places = {part: in_parts(found, part, name) for part in PARTS}
    sums, squares = sums_of(x[places["train"]])
    mean, deviation = normalisation(sums, squares, SIDE * SIDE)
    marks = [names, targets.tolist(), found.tolist(), digests(x).tolist()]
    return Task(
        name=name,
        group="own",
        classes=names,
        sizes={part: len(at) for part, at in places.items()},
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, x, targets, places),
        fingerprint=hashlib.sha256(repr(marks).encode()).hexdigest()[:16],
        warnings=warnings,
    )


def _picture(where: str, place: int, image: Any, bits: int) -> NDArray[np.uint8]:
    try:
        if hasattr(image, "convert"):
            return from_pillow(image, SIDE, bits)[0]
        return from_values(np.asarray(image), SIDE, bits)
    except (ValueError, TypeError) as error:
        raise WeftError(f"{where}: image {place} cannot be used: {error}") from None


def _targets(
    where: str, values: NDArray[Any], classes: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...], list[str]]:
    """What the network has to say of each image, the names of its outputs, and what has to be spread evenly."""
    if values.dtype.kind == "f":
        targets = values.astype(np.float32).reshape(len(values), -1)
        names = tuple(classes) if classes is not None else tuple(map(str, range(targets.shape[1])))
        if len(names) != targets.shape[1]:
            raise WeftError(f"{where}: {len(names)} classes name {targets.shape[1]} outputs; give as many")
        return targets, names, [""] * len(targets)
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise WeftError(f"{where}: labels are {values.dtype} {values.shape}; give words, numbers from 0, or floats")
    if values.dtype.kind == "U":
        classes = classes if classes is not None else sorted(set(values.tolist()), key=natural)
        if unknown := sorted(set(values.tolist()) - set(classes)):
            raise WeftError(f"{where}: the label {unknown[0]!r} is none of the classes {', '.join(classes)}")
        values = np.array([list(classes).index(word) for word in values.tolist()])
    names = tuple(classes) if classes is not None else tuple(map(str, range(int(values.max()) + 1)))
    if values.min() < 0 or values.max() >= len(names):
        raise WeftError(f"{where}: labels go from {values.min()} to {values.max()}, and there are {len(names)} classes")
    return values.astype(np.int64), names, [names[label] for label in values]


def _load(x: NDArray[np.uint8], targets: NDArray[Any], places: dict[Part, NDArray[np.int64]], part: Part) -> Split:
    return Split(x[places[part]], targets[places[part]])
