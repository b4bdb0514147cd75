"""Measures beside accuracy, of one task's test images: pure functions of the labels and the scores.

`labels` (count,) are classes from 0; `scores` (count, classes) are the probabilities that the model gives. A measure is
a number, or one for each class; what is undefined is NaN. Somebody's own is `file.py:name`, a function of the same two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from weft import registry
from weft.errors import WeftError, nearest
from weft.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Labels: TypeAlias = "NDArray[np.int64]"
Scores: TypeAlias = "NDArray[np.float64]"


def recall(labels: Labels, scores: Scores) -> list[float]:
    """Of each class the share of its images that is told right.

    >>> recall(np.array([0, 0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.3, 0.7]]))
    [0.5, 1.0]
    """
    right = scores.argmax(1) == labels
    of_class = [right[labels == label] for label in range(scores.shape[1])]
    return [float(found.mean()) if len(found) else math.nan for found in of_class]


def balanced(labels: Labels, scores: Scores) -> float:
    """The mean recall of the classes that are there: always choosing the commonest gives 1 / classes.

    >>> balanced(np.array([0, 0, 0, 1]), np.array([[0.9, 0.1]] * 4))
    0.5
    """
    return _mean(recall(labels, scores))


def auroc(labels: Labels, scores: Scores) -> float:
    """How often an image of a class scores higher for it than one of another class; ties count half.

    With two classes that of class 1; with more the mean of each against the rest.

    >>> auroc(np.array([0, 0, 1, 1]), np.array([[0.9, 0.1], [0.6, 0.4], [0.65, 0.35], [0.2, 0.8]]))
    0.75
    """
    classes = scores.shape[1]
    return _mean([_area(labels == label, scores[:, label]) for label in ([1] if classes == 2 else range(classes))])


def _area(positive: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """The rank-sum formula of Mann and Whitney: a positive's rank counts the negatives below it."""
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return math.nan
    _, place, times = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[place]  # equal scores share the mean of their ranks
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def _mean(values: Iterable[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else math.nan


METRICS: dict[str, Callable[[Any, Any], Any]] = {"balanced": balanced, "auroc": auroc, "recall": recall}


def find(names: Sequence[str]) -> dict[str, Callable[[Any, Any], Any]]:
    """The measures by the names under which they are shown."""
    found: dict[str, Callable[[Any, Any], Any]] = {}
    for name in names:
        if ":" not in name and name not in METRICS:
            raise WeftError(f"there is no metric {name!r}; {nearest(name, METRICS)}, or your own as file.py:name")
        measure = registry.find(name) if ":" in name else METRICS[name]
        if not callable(measure):
            raise WeftError(f"{name} is no function of labels and scores")
        if (short := registry.short(name)) in found:
            raise WeftError(f"metrics names {short} twice")
        found[short] = measure
    return found


def measure_all(names: Sequence[str], labels: Labels, scores: Scores) -> dict[str, list[float | None]]:
    """Every measure as a list: one number, or one for each class; None where it is undefined."""
    found = {}
    for name, measure in find(names).items():
        try:
            values = np.atleast_1d(np.asarray(measure(labels, scores), dtype=np.float64))
        except Exception as error:
            raise WeftError(f"the metric {name} fails: {registry.told(error)}") from error
        if values.ndim != 1 or len(values) not in (1, scores.shape[1]):
            raise WeftError(f"the metric {name} gave shape {values.shape}; wanted is a number, or one for each class")
        found[name] = [float(value) if math.isfinite(value) else None for value in values]
    return found
