"""Metrics: of one client's accuracy matrix, of one task's test predictions, and their means over clients and seeds.

In an accuracy matrix `matrix[t][i]` is the test accuracy of task i after training on task t, so row t has the t + 1
entries i = 0 .. t. All are fractions. A row of NaN is a test whose result a remote site never sent; it is left out. A
metric that is undefined for a matrix is None. T is the last task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from weft import registry
from weft.errors import WeftError, nearest
from weft.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Matrix = Sequence[Sequence[float]]
Labels: TypeAlias = "NDArray[np.int64]"  # (count,), classes from 0
Scores: TypeAlias = "NDArray[np.float64]"  # (count, classes), the predicted probabilities


# ---- of an accuracy matrix -------------------------------------------------------------------------------------------


def average_accuracy(matrix: Matrix) -> float | None:
    """`A_T = mean over i <= T of a[T][i]` (appendix A, Metrics 1).

    >>> average_accuracy([[0.9], [0.7, 0.8]])
    0.75
    >>> average_accuracy([]) is None
    True
    """
    return fmean(matrix[-1]) if matrix and not math.isnan(matrix[-1][0]) else None


def forgetting(matrix: Matrix) -> float | None:
    """`F = mean over i < T of max over i <= t < T of (a[t][i] - a[T][i])` (appendix A, Metrics 2).

    >>> round(forgetting([[0.9], [0.7, 0.8], [0.8, 0.9, 0.5]]), 6)   # task 0: 0.9 - 0.8; task 1: 0.8 - 0.9
    0.0
    >>> forgetting([[0.9]]) is None
    True
    >>> round(forgetting([[math.nan], [0.7, 0.8], [0.6, 0.8, 0.5]]), 6)
    0.05
    """
    last, drops = len(matrix) - 1, []
    for i in range(last) if matrix and not math.isnan(matrix[-1][0]) else ():
        known = [matrix[t][i] for t in range(i, last) if not math.isnan(matrix[t][i])]
        drops += [max(known) - matrix[last][i]] if known else []
    return fmean(drops) if drops else None


def backward_transfer(matrix: Matrix) -> float | None:
    """`BWT = mean over i < T of a[T][i] - a[i][i]`: negative where later tasks lower the accuracy of earlier ones.

    >>> round(backward_transfer([[0.9], [0.7, 0.8], [0.8, 0.9, 0.5]]), 6)
    0.0
    >>> round(backward_transfer([[0.9], [0.7, 0.8]]), 6)
    -0.2
    """
    last = len(matrix) - 1
    changes = [matrix[last][i] - matrix[i][i] for i in range(last) if not math.isnan(matrix[i][i] + matrix[last][i])]
    return fmean(changes) if changes else None


def over_clients(metric: Callable[[Matrix], float | None], matrices: Iterable[Matrix]) -> float | None:
    """Mean of a metric over the clients for which it is defined.

    >>> over_clients(average_accuracy, [[[0.5]], [[1.0]], []])
    0.75
    """
    values = [value for value in map(metric, matrices) if value is not None]
    return fmean(values) if values else None


# ---- of the predictions for one task's test examples -----------------------------------------------------------------


def recall(labels: Labels, scores: Scores) -> list[float]:
    """Share of each class's examples that are classified correctly; NaN for a class without examples.

    >>> recall(np.array([0, 0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.3, 0.7]]))
    [0.5, 1.0]
    """
    correct = scores.argmax(1) == labels
    by_class = [correct[labels == label] for label in range(scores.shape[1])]
    return [float(results.mean()) if len(results) else math.nan for results in by_class]


def balanced(labels: Labels, scores: Scores) -> float:
    """Balanced accuracy, the mean recall of the classes with examples: a constant prediction has 1 / classes.

    >>> balanced(np.array([0, 0, 0, 1]), np.array([[0.9, 0.1]] * 4))
    0.5
    """
    return _mean(recall(labels, scores))


def auroc(labels: Labels, scores: Scores) -> float:
    """Area under the ROC curve: of class 1 if there are two classes, else the mean of one class against the rest.

    >>> auroc(np.array([0, 0, 1, 1]), np.array([[0.9, 0.1], [0.6, 0.4], [0.65, 0.35], [0.2, 0.8]]))
    0.75
    """
    classes = scores.shape[1]
    return _mean(_area(labels == label, scores[:, label]) for label in ([1] if classes == 2 else range(classes)))


def _area(positive: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Rank-sum formula of Mann and Whitney: the rank of a positive counts the negatives below it; ties count half."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return math.nan
    _, index, times = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[index]  # equal scores share the mean of their ranks
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def _mean(values: Iterable[float]) -> float:
    defined = [value for value in values if not math.isnan(value)]
    return sum(defined) / len(defined) if defined else math.nan


METRICS: dict[str, Callable[[Any, Any], Any]] = {"balanced": balanced, "auroc": auroc, "recall": recall}


def find(names: Sequence[str]) -> dict[str, Callable[[Any, Any], Any]]:
    """Functions of labels and scores, built in or `file.py:name`, by the names under which they are reported."""
    functions: dict[str, Callable[[Any, Any], Any]] = {}
    for name in names:
        if ":" not in name and name not in METRICS:
            raise WeftError(f"unknown metric {name!r}; {nearest(name, METRICS)}, or name your own as file.py:name")
        function = registry.find(name) if ":" in name else METRICS[name]
        if not callable(function):
            raise WeftError(f"{name} is not a function of labels and scores")
        if (short := registry.short(name)) in functions:
            raise WeftError(f"metrics contains {short} twice; name it once")
        functions[short] = function
    return functions


def measure_all(names: Sequence[str], labels: Labels, scores: Scores) -> dict[str, list[float | None]]:
    """Evaluate metrics: each gives one number, or one per class; None where it is undefined."""
    results = {}
    for name, function in find(names).items():
        try:
            values = np.atleast_1d(np.asarray(function(labels, scores), dtype=np.float64))
        except Exception as error:
            raise WeftError(f"the metric {name} fails: {registry.error_line(error)}") from error
        if values.ndim != 1 or len(values) not in (1, scores.shape[1]):
            raise WeftError(f"the metric {name} returned shape {values.shape}; return a number, or one per class")
        results[name] = [float(value) if math.isfinite(value) else None for value in values]
    return results


# ---- means -----------------------------------------------------------------------------------------------------------


class Measure(NamedTuple):
    """A row of metrics.csv: a metric of one task of one client."""

    client: int
    after_task: int
    task: int
    metric: str
    label: str  # a class; empty if the metric is one number for the task
    value: float | None  # None if undefined, such as the recall of a class without test images


def at_the_end(rows: Iterable[Measure]) -> list[Measure]:
    """Rows measured after the last task of their client."""
    all_rows, last = list(rows), dict[int, int]()
    for row in all_rows:
        last[row.client] = max(row.after_task, last.get(row.client, 0))
    return [row for row in all_rows if row.after_task == last[row.client]]


def by_name(rows: Iterable[Measure]) -> dict[str, float | None]:
    """Final value of each metric: the mean over a client's classes and tasks, then over clients, as for accuracy."""
    values: dict[str, dict[int, list[float]]] = {}
    for row in at_the_end(rows):
        of_client = values.setdefault(row.metric, {}).setdefault(row.client, [])
        of_client += [] if row.value is None else [row.value]
    means = {name: [fmean(own) for own in by_client.values() if own] for name, by_client in values.items()}
    return {name: fmean(own) if own else None for name, own in means.items()}


class Spread(NamedTuple):
    """Mean and sample deviation over seeds."""

    mean: float
    deviation: float | None  # with n - 1; None for one value


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample deviation of the defined values; None if there are none.

    >>> spread([1.0, 2.0, 3.0, None])
    Spread(mean=2.0, deviation=1.0)
    >>> spread([0.5])
    Spread(mean=0.5, deviation=None)
    """
    defined = [value for value in values if value is not None]
    if not defined:
        return None
    return Spread(fmean(defined), stdev(defined) if len(defined) > 1 else None)
