"""Tasks from arrays in Python or from a torch.utils.data.Dataset, for user-defined scenarios.

    def mine(clients: int, tasks: int, seed: int, noise: float = 0.1) -> Scenario:
        return Scenario("mine", tuple(tuple(from_arrays(...) for ...) for ...))

A plan names it `scenario=file.py:mine scenario.noise=0.2`; every process that needs the scenario calls the function.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.cache import mean_and_deviation
from weft.data.images import SIDE, ImageError, channel_sums, digests, from_pillow, from_values, natural
from weft.errors import WeftError
from weft.scenarios import SPLITS, Split, SplitName, Task
from weft.scenarios.splits import check_given, check_task, indices_of, split_groups


class Pairs(Protocol):
    """A map-style torch.utils.data.Dataset: pairs of an image and a label."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


def from_dataset(name: str, dataset: Pairs, *, classes: Sequence[str] | None = None, **options: Any) -> Task:
    """A task of all images of a dataset; class names default to `dataset.classes`. Options are those of from_arrays."""
    if not hasattr(dataset, "__len__"):
        raise WeftError(f"task {name}: the dataset has no length; copy its items into a list")
    pairs = [dataset[index] for index in range(len(dataset))]
    if any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in pairs):
        raise WeftError(f"task {name}: the dataset must return pairs of an image and a label")
    labels = np.stack([np.asarray(label) for _, label in pairs])
    names = classes if classes is not None else getattr(dataset, "classes", None)
    return from_arrays(name, [image for image, _ in pairs], labels, classes=names, **options)


def from_arrays(
    name: str,
    images: Sequence[Any] | NDArray[Any],
    labels: Sequence[Any] | NDArray[Any],
    *,
    classes: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    splits: Sequence[str] | None = None,
    test: float = 0.2,
    valid: float = 0.1,
    bits: int = 16,
) -> Task:
    """A task of images and their labels.

    Images are Pillow images, or arrays or tensors (height, width), (height, width, 3) or (3, height, width) of any
    size, of uint8, of floats from 0 to 1, or of uint16 (2 ** bits - 1 is white). Labels are strings; or integers, named
    by `classes`; or, for a user-defined loss, floats (count, outputs), where `classes` names the outputs. Images with
    the same entry in `groups` stay in one split. `splits` assigns train, valid or test to each image; without it
    `test` and `valid` are the shares of a random split.
    """
    where = f"task {name}"
    values = np.asarray(labels)
    together = list(groups) if groups is not None else [""] * len(values)
    if not len(images) == len(values) == len(together) == len(values if splits is None else splits) or not len(values):
        counts = f"there are {len(images)} images and {len(values)} labels"
        raise WeftError(f"{where}: {counts}; images, labels, groups and splits must have one length, at least 1")
    x = np.stack([_image(where, index, image, bits) for index, image in enumerate(images)])
    targets, names, cells = _targets(where, values, classes)
    if splits is not None:
        check_given(where, splits, together)
    shares: dict[SplitName, float] = {"train": 1 - test - valid, "test": test, "valid": valid}
    found = np.array(split_groups(cells, together, shares, name) if splits is None else list(splits))
    warnings = check_task(where, cells, found.tolist(), needs_classes=targets.ndim == 1)
    indices = {split: indices_of(found, split, name) for split in SPLITS}
    sums, squares = channel_sums(x[indices["train"]])
    mean, deviation = mean_and_deviation(sums.sum(0), squares.sum(0), SIDE * SIDE * len(sums))
    identity = [names, targets.tolist(), found.tolist(), digests(x).tolist()]
    return Task(
        name=name,
        group="own",
        classes=names,
        sizes={split: len(chosen) for split, chosen in indices.items()},
        mean=mean,
        deviation=deviation,
        load=functools.partial(_load, x, targets, indices),
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:16],
        warnings=warnings,
    )


def _image(where: str, index: int, image: Any, bits: int) -> NDArray[np.uint8]:
    try:
        if hasattr(image, "convert"):
            return from_pillow(image, SIDE, bits)[0]
        return from_values(np.asarray(image), SIDE, bits)
    except (ImageError, TypeError) as error:
        raise WeftError(f"{where}: image {index} cannot be used: {error}") from None


def _targets(
    where: str, values: NDArray[Any], classes: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...], list[str]]:
    """Targets of the network, the names of its outputs, and the cells that a split spreads evenly."""
    if values.dtype.kind == "f":
        targets = values.astype(np.float32).reshape(len(values), -1)
        names = tuple(classes) if classes is not None else tuple(map(str, range(targets.shape[1])))
        if len(names) != targets.shape[1]:
            raise WeftError(f"{where}: {len(names)} classes for {targets.shape[1]} outputs; name every output")
        return targets, names, [""] * len(targets)
    if values.ndim != 1 or values.dtype.kind not in "iuU":
        raise WeftError(f"{where}: labels are {values.dtype} {values.shape}; use strings, integers from 0, or floats")
    if values.dtype.kind == "U":
        classes = classes if classes is not None else sorted(set(values.tolist()), key=natural)
        if unknown := sorted(set(values.tolist()) - set(classes)):
            raise WeftError(f"{where}: the label {unknown[0]!r} is not in classes ({', '.join(classes)})")
        values = np.array([list(classes).index(label) for label in values.tolist()])
    names = tuple(classes) if classes is not None else tuple(map(str, range(int(values.max()) + 1)))
    if values.min() < 0 or values.max() >= len(names):
        raise WeftError(f"{where}: labels are from {values.min()} to {values.max()}, for {len(names)} classes")
    return values.astype(np.int64), names, [names[label] for label in values]


def _load(
    x: NDArray[np.uint8], targets: NDArray[Any], indices: dict[SplitName, NDArray[np.int64]], split: SplitName
) -> Split:
    return Split(x[indices[split]], targets[indices[split]])
