"""The ratios of a benchmark, each with the bar it must reach and an aim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Bar(NamedTuple):
    what: str
    bar: float | None  # None: shown, without a requirement
    aim: float | None
    more: bool = False  # is more better?


BARS: dict[str, Bar] = {
    "lenet_speedup_over_plain": Bar("our LeNet step, times faster than the plain one", 2.4, 3.0, more=True),
    "fedweit_task10_over_lenet": Bar("FedWeIT step, 10th task, 5 foreign A's, over our LeNet step", 1.35, 1.15),
    "fedweit_task50_over_task2": Bar("FedWeIT step, 50th task over 2nd, 5 foreign A's", 1.10, 1.02),
    "two_workers_speedup": Bar("engine with 2 workers, times faster than with 1", 1.7, 1.9, more=True),
    "training_share_of_round": Bar("share of a round that is training, with validation", 0.85, 0.95, more=True),
    "c2s_bytes_over_dense": Bar("bytes uploaded, over dense float32", 0.17, 0.10),
    "s2c_bytes_over_dense": Bar("bytes downloaded, over dense float32", 0.45, 0.30),
    "bits_per_adaptive_value": Bar("sparse A: bits per value, index included", 24, 18),
    "peak_memory_gb_1000_clients": Bar("peak memory in GB, 1,000 clients, 5 per round", 2.0, 1.0),
    "seconds_to_first_step": Bar("seconds from command to first step, glyphs", 6.0, 3.0),
    "share_of_peak": Bar("share of the machine's peak, FedWeIT step at the 10th task", None, None, more=True),
}
BYTES = ("c2s_bytes_over_dense", "s2c_bytes_over_dense")
POINTS_ALLOWED = 0.5  # accuracy that may be lost to all rows of B as float32; otherwise saved bytes do not count


def ratios_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The measured value of each bar."""
    steps, engine = results["steps"], results["engine"]
    return {
        **{name: one["median"] for name, one in steps["ratios"].items()},
        "two_workers_speedup": results["workers"]["speedup"],
        "training_share_of_round": engine["shares"]["training"],
        "c2s_bytes_over_dense": engine["traffic"]["c2s"]["over_dense"],
        "s2c_bytes_over_dense": engine["traffic"]["s2c"]["over_dense"],
        "bits_per_adaptive_value": engine["bits_per_adaptive_value"],
        "peak_memory_gb_1000_clients": results["memory"]["clients"]["1000"]["peak_bytes"] / 1e9,
        "seconds_to_first_step": results["start"]["seconds"]["median"],
        "share_of_peak": steps["contenders"]["fedweit task 10 foreign 5"]["share_of_peak"],
    }


def judge(ratios: Mapping[str, float], points_lost: float | None = None) -> list[dict[str, Any]]:
    """Compare each ratio with its bar and aim; `points_lost` is None if accuracies were not compared."""
    too_inaccurate = points_lost is not None and points_lost > POINTS_ALLOWED

    def met(name: str, target: float | None) -> bool | None:
        return False if name in BYTES and too_inaccurate else reaches(ratios[name], target, BARS[name].more)

    return [
        {"ratio": name, "what": what, "value": ratios[name], "bar": bar, "aim": aim}
        | {"met": met(name, bar), "aim_met": met(name, aim)}
        for name, (what, bar, aim, _) in BARS.items()
    ]


def reaches(value: float, target: float | None, more: bool) -> bool | None:
    """
    >>> reaches(2.5, 2.4, more=True), reaches(1.2, 1.15, more=False), reaches(0.5, None, more=True)
    (True, False, None)
    """
    if target is None:
        return None
    return value >= target if more else value <= target
