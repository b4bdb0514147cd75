"""The measures of continual learning: pure functions of one client's accuracy matrix.

A matrix is a list of rows: `matrix[t][i]` is the test accuracy of task i after learning task t, so row t has the t + 1
entries i = 0 .. t. All are fractions. A measure that is undefined for a matrix is None. Below, T is the last task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

Matrix = Sequence[Sequence[float]]


def average_accuracy(matrix: Matrix) -> float | None:
    """A_T = mean over i <= T of a[T][i] (appendix A, Metrics 1).

    >>> average_accuracy([[0.9], [0.7, 0.8]])
    0.75
    >>> average_accuracy([]) is None
    True
    """
    return fmean(matrix[-1]) if matrix else None


def forgetting(matrix: Matrix) -> float | None:
    """F = mean over i < T of max over i <= t < T of (a[t][i] - a[T][i]) (appendix A, Metrics 2).

    >>> round(forgetting([[0.9], [0.7, 0.8], [0.8, 0.9, 0.5]]), 6)   # task 0: 0.9 - 0.8; task 1: 0.8 - 0.9
    0.0
    >>> forgetting([[0.9]]) is None
    True
    """
    if len(matrix) < 2:
        return None
    last = len(matrix) - 1
    return fmean(max(matrix[t][i] for t in range(i, last)) - matrix[last][i] for i in range(last))


def backward_transfer(matrix: Matrix) -> float | None:
    """BWT = mean over i < T of a[T][i] - a[i][i]: negative where later tasks cost earlier ones something.

    >>> round(backward_transfer([[0.9], [0.7, 0.8], [0.8, 0.9, 0.5]]), 6)
    0.0
    >>> round(backward_transfer([[0.9], [0.7, 0.8]]), 6)
    -0.2
    """
    if len(matrix) < 2:
        return None
    last = len(matrix) - 1
    return fmean(matrix[last][i] - matrix[i][i] for i in range(last))


def over_clients(measure: Callable[[Matrix], float | None], matrices: Iterable[Matrix]) -> float | None:
    """A measure for each client, then the mean over the clients for which it is defined.

    >>> over_clients(average_accuracy, [[[0.5]], [[1.0]], []])
    0.75
    """
    values = [value for value in map(measure, matrices) if value is not None]
    return fmean(values) if values else None
