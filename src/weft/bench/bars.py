"""What is to be reached: each ratio with its bar and its aim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bar(NamedTuple):
    what: str
    bar: float | None  # none: it is shown, and nothing is asked of it
    aim: float | None
    more: bool = False  # is more better?


BARS: dict[str, Bar] = {
    "lenet_speedup_over_plain": Bar("our LeNet step, times faster than the plain one", 2.4, 3.0, more=True),
    "fedweit_task10_over_lenet": Bar("FedWeIT step, 10th task, 5 foreign A's, over our LeNet step", 1.35, 1.15),
    "fedweit_task50_over_task2": Bar("FedWeIT step at the 50th task over the 2nd, 5 foreign A's", 1.10, 1.02),
    "two_workers_speedup": Bar("engine with 2 workers, times faster than with 1", 1.7, 1.9, more=True),
    "training_share_of_round": Bar("share of a round that is training, validation included", 0.85, 0.95, more=True),
    "c2s_bytes_over_dense": Bar("bytes sent up, over dense float32", 0.17, 0.10),
    "s2c_bytes_over_dense": Bar("bytes sent down, over dense float32", 0.45, 0.30),
    "bits_per_adaptive_value": Bar("sparse A: bits for each value, index included", 24, 18),
    "peak_memory_gb_1000_clients": Bar("peak memory in GB, 1,000 clients, 5 asked a round", 2.0, 1.0),
    "seconds_to_first_step": Bar("seconds from command to first step, glyphs", 6.0, 3.0),
    "share_of_peak": Bar("share of the machine's peak, FedWeIT step at the 10th task", None, None, more=True),
}


def ratios_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that are held against the bars, out of what was measured."""
    steps, engine = found["steps"], found["engine"]
    return {
        **{name: one["median"] for name, one in steps["ratios"].items()},
        "two_workers_speedup": found["workers"]["speedup"],
        "training_share_of_round": engine["shares"]["training"],
        "c2s_bytes_over_dense": engine["traffic"]["c2s"]["over_dense"],
        "s2c_bytes_over_dense": engine["traffic"]["s2c"]["over_dense"],
        "bits_per_adaptive_value": engine["bits_per_adaptive_value"],
        "peak_memory_gb_1000_clients": found["memory"]["clients"]["1000"]["peak_bytes"] / 1e9,
        "seconds_to_first_step": found["start"]["seconds"]["median"],
        "share_of_peak": steps["contenders"]["fedweit task 10 foreign 5"]["share_of_peak"],
    }


# bytes count as saved only if the accuracy stays: so many points may be lost to all rows of B sent as float32
POINTS_ALLOWED = 0.5
BYTES = ("c2s_bytes_over_dense", "s2c_bytes_over_dense")


def judged(ratios: Mapping[str, float], points_lost: float | None = None) -> list[dict[str, Any]]:
    """Each ratio beside its bar and aim, and whether they are met; `points_lost` is None where nobody compared."""
    too_dear = points_lost is not None and points_lost > POINTS_ALLOWED

    def reached(name: str, wanted: float | None) -> bool | None:
        found = meets(ratios[name], wanted, BARS[name].more)
        return False if name in BYTES and too_dear else found

    return [
        {
            "ratio": name,
            "what": bar.what,
            "value": ratios[name],
            "bar": bar.bar,
            "aim": bar.aim,
            "met": reached(name, bar.bar),
            "aim_met": reached(name, bar.aim),
        }
        for name, bar in BARS.items()
    ]


def meets(value: float, wanted: float | None, more: bool) -> bool | None:
    """
    >>> meets(2.5, 2.4, more=True), meets(1.2, 1.15, more=False), meets(0.5, None, more=True)
    (True, False, None)
    """
    if wanted is None:
        return None
    return value >= wanted if more else value <= wanted
