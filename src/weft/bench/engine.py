"""A real run of the default FedWeIT plan: where its time goes, what crosses the wire, and how well it learned."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from weft.bench.probe import Probe
from weft.bench.timing import Tell
from weft.plan import Plan
from weft.runs.folder import read_rows
from weft.runs.run import run
from weft.wire.ledger import Entry, by


class Count:
    """A run's screen that only counts."""

    def __init__(self, tell: Tell):
        self._tell, self._done, self._total = tell, 0, 1

    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None:
        self._done, self._total = done, total

    def answered(self, client: int, step: int, round_index: int, numbers: dict[str, Any]) -> None:
        self._done += 1
        self._tell(min(self._done, self._total), self._total)


def measure(plan: dict[str, Any], tell: Tell) -> dict[str, Any]:
    chosen = Plan(**plan)
    probe = Probe()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, probe.watching():
        result = run(chosen, Path(folder, "run"), workers=1, screen=Count(tell))
        sums = by([Entry.from_row(row) for row in read_rows(result.folder, "ledger.csv")], "direction", "tensor")
        summary = result.summary
    whole = sum(probe.seconds.values())
    rounds = chosen.tasks * chosen.rounds_per_task
    adaptive = sums["c2s", "adaptive"]
    return {
        "clients": chosen.clients,
        "tasks": chosen.tasks,
        "rounds_per_task": chosen.rounds_per_task,
        "seed": chosen.seed,
        "rounds_per_second": rounds / whole,
        "images_per_second": summary["images_per_second"],
        "shares": {part: seconds / whole for part, seconds in probe.seconds.items()},
        "accuracy": summary["accuracy"],
        "forgetting": summary["forgetting"],
        "traffic": {
            direction: {
                "bytes_per_round": sent["bytes"] / rounds,
                "paper_bytes_per_round": 4 * sent["nonzeros"] / rounds,
                "dense_bytes_per_round": sent["dense_bytes"] / rounds,
                "over_dense": sent["bytes"] / sent["dense_bytes"],
            }
            for direction, sent in summary["traffic"].items()
        },
        "bits_per_adaptive_value": 8 * adaptive.bytes / adaptive.nonzeros,
    }
