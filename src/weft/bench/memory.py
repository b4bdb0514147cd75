"""Memory and speed by the number of clients: real `weft run` processes, five clients asked a round."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from weft.bench.children import journal, resident, running, watch
from weft.bench.rounds import round_seconds, write_plan
from weft.bench.timing import Tell, spread
from weft.errors import Problem
from weft.plan import Plan

ASKED = 5  # clients a round


def measure(clients: list[int], rounds: int, limit: float, tell: Tell) -> dict[str, Any]:
    """Peak memory and seconds of a round for each number of clients; a run is stopped after `limit` seconds."""
    if not Path("/proc/self/statm").exists():
        raise Problem("weft bench reads the memory of processes in /proc, which this system does not have; use Linux")
    found = {}
    for place, count in enumerate(clients):
        found[str(count)] = watched_run(count, rounds, limit)
        tell(place + 1, len(clients))
    return {"asked_per_round": ASKED, "rounds": rounds, "limit_seconds": limit, "clients": found}


def watched_run(clients: int, rounds: int, limit: float) -> dict[str, Any]:
    """The workers are as many as `weft run` takes by itself. What processes share counts for each of them."""
    plan = Plan(name="memory", clients=clients, clients_per_round=min(ASKED, clients), tasks=1, rounds_per_task=rounds)
    peak = 0
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        write_plan(plan, folder)
        with running(["plan.toml", "--out", "run"], folder) as process:

            def look() -> bool:
                nonlocal peak
                peak = max(peak, resident(process.pid))
                return False

            over = watch(process, folder, limit, look)
        seconds = round_seconds(journal(folder / "run"), range(1, rounds))
    if not seconds:
        raise Problem(f"{clients} clients did not finish two rounds in {limit:.0f} s; weft bench gave up")
    return {
        "peak_bytes": peak,
        "complete": over,  # if not, it was stopped at the limit, and what came after is not in the peak
        "round_seconds": spread(seconds),
        "rounds_per_second": 1 / spread(seconds)["median"],
    }
