"""What the bytes saved cost: the default FedWeIT plan, and the same seeds with all rows of B sent as float32.

And with none of them sent: what B's way through the server is worth at all.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from weft.bench.children import ask_part
from weft.bench.timing import Tell

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "dense": {"method.keep": 1.0, "precision": "float32"},
    "nothing": {"method.without": "b_comm"},
}


def measure(plan: dict[str, Any], seeds: list[int], tell: Tell) -> dict[str, Any]:
    jobs = [(seed, kind) for seed in seeds for kind in KINDS]
    accuracy: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for place, (seed, kind) in enumerate(jobs):
        found = ask_part("engine", {"plan": {**plan, **KINDS[kind], "seed": seed}}, lambda *_: None)
        accuracy[kind].append(found["accuracy"])
        tell(place + 1, len(jobs))
    lost = fmean(accuracy["dense"]) - fmean(accuracy["default"])
    return {"seeds": seeds, "tasks": found["tasks"], "accuracy": accuracy, "points_lost": 100 * lost}
