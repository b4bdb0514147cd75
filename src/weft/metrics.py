"""The measures of continual learning: pure functions of one client's accuracy matrix; and means over clients and seeds.

A matrix is a list of rows: `matrix[t][i]` is the test accuracy of task i after learning task t, so row t has the t + 1
entries i = 0 .. t. All are fractions; a row of NaN is a test that a far-away site never answered, and is left out. A
measure that is undefined for a matrix is None. Below, T is the last task.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, Protocol, TypeVar

Matrix = Sequence[Sequence[float]]


def average_accuracy(matrix: Matrix) -> float | None:
    """A_T = mean over i <= T of a[T][i] (appendix A, Metrics 1).

    >>> average_accuracy([[0.9], [0.7, 0.8]])
    0.75
    >>> average_accuracy([]) is None
    True
    """
    return fmean(matrix[-1]) if matrix and not math.isnan(matrix[-1][0]) else None


def forgetting(matrix: Matrix) -> float | None:
    """F = mean over i < T of max over i <= t < T of (a[t][i] - a[T][i]) (appendix A, Metrics 2).

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
    """BWT = mean over i < T of a[T][i] - a[i][i]: negative where later tasks cost earlier ones something.

    >>> round(backward_transfer([[0.9], [0.7, 0.8], [0.8, 0.9, 0.5]]), 6)
    0.0
    >>> round(backward_transfer([[0.9], [0.7, 0.8]]), 6)
    -0.2
    """
    last = len(matrix) - 1
    changes = [matrix[last][i] - matrix[i][i] for i in range(last) if not math.isnan(matrix[i][i] + matrix[last][i])]
    return fmean(changes) if changes else None


def over_clients(measure: Callable[[Matrix], float | None], matrices: Iterable[Matrix]) -> float | None:
    """A measure for each client, then the mean over the clients for which it is defined.

    >>> over_clients(average_accuracy, [[[0.5]], [[1.0]], []])
    0.75
    """
    values = [value for value in map(measure, matrices) if value is not None]
    return fmean(values) if values else None


class Measure(Protocol):
    """A line about one task of one client: a measure beside accuracy, of a class or of all (`label` empty)."""

    @property
    def client(self) -> int: ...
    @property
    def after_task(self) -> int: ...
    @property
    def task(self) -> int: ...
    @property
    def metric(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def value(self) -> float | None: ...


Line = TypeVar("Line", bound=Measure)


def at_the_end(lines: Iterable[Line]) -> list[Line]:
    """Of each client what was measured after its last task."""
    every, last = list(lines), dict[int, int]()
    for line in every:
        last[line.client] = max(line.after_task, last.get(line.client, 0))
    return [line for line in every if line.after_task == last[line.client]]


def by_name(lines: Iterable[Measure]) -> dict[str, float | None]:
    """Each measure at the end: the mean over a client's classes and tasks, then over clients, as accuracy is."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in at_the_end(lines):
        values = found.setdefault(line.metric, {}).setdefault(line.client, [])
        values += [] if line.value is None else [line.value]
    means = {name: [fmean(own) for own in of_client.values() if own] for name, of_client in found.items()}
    return {name: fmean(values) if values else None for name, values in means.items()}


class Spread(NamedTuple):
    """What several seeds gave."""

    mean: float
    deviation: float | None  # of the sample, with n - 1; None for one value


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample deviation of the values that are there; None if there is none.

    >>> spread([1.0, 2.0, 3.0, None])
    Spread(mean=2.0, deviation=1.0)
    >>> spread([0.5])
    Spread(mean=0.5, deviation=None)
    """
    there = [value for value in values if value is not None]
    if not there:
        return None
    return Spread(fmean(there), stdev(there) if len(there) > 1 else None)
