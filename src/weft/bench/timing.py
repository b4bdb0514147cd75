"""Times that can be compared: contenders take turns, so that noise hits all alike, and the middle one counts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Tell = Callable[[int, int], None]  # how much of a part is done, out of how much


Contenders = Mapping[str, Callable[[], float]]


def interleave(groups: Sequence[Contenders], passes: int, tell: Tell) -> dict[str, list[float]]:
    """`passes` measures of each. Those of a group follow each other closely, in another order in every pass."""
    found: dict[str, list[float]] = {name: [] for group in groups for name in group}
    for turn in range(passes):
        orders = random.Random(turn)
        for group in groups:
            for name in orders.sample(list(group), len(group)):
                found[name].append(group[name]())
        tell(turn + 1, passes)
    return found


def seconds_of(act: Callable[..., object], *arguments: Any) -> float:
    began = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - began


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The middle value and the quartiles.

    >>> spread([4.0, 1.0, 2.0, 3.0, 100.0])
    {'median': 3.0, 'low': 2.0, 'high': 4.0, 'count': 5}
    """
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "low": low, "high": high, "count": len(values)}


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Of two contenders, pass by pass: what slowed a whole pass down cancels out.

    >>> ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])["median"]
    2.0
    """
    return spread([one / other for one, other in zip(above, below, strict=True)])
