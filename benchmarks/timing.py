"""Comparable times: contenders take turns, so that noise affects all of them alike, and the median counts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Progress = Callable[[int, int], None]  # how much of a part is done, and its total
Contenders = Mapping[str, Callable[[], float]]  # by name: measure once, return seconds


def interleave(groups: Sequence[Contenders], passes: int, progress: Progress) -> dict[str, list[float]]:
    """Measure every contender `passes` times. Those of a group run one after another, in a new order in every pass."""
    times: dict[str, list[float]] = {name: [] for group in groups for name in group}
    for index in range(passes):
        order = random.Random(index)
        for group in groups:
            for name in order.sample(list(group), len(group)):
                times[name].append(group[name]())
        progress(index + 1, passes)
    return times


def seconds_of(function: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """
    >>> quartiles([4.0, 1.0, 2.0, 3.0, 100.0])
    {'median': 3.0, 'low': 2.0, 'high': 4.0, 'count': 5}
    >>> quartiles([5.0])["high"]
    5.0
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "low": low, "high": high, "count": len(values)}


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Divide two contenders pass by pass: what slows down a whole pass cancels out.

    >>> ratio([2.0, 20.0, 2.0, 3.0], [1.0, 10.0, 1.0, 1.5])["median"]
    2.0
    """
    return quartiles([one / other for one, other in zip(above, below, strict=True)])
