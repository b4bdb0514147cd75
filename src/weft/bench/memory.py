"""Memory and speed by the number of clients: real `weft run` processes, five clients asked a round."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from weft.bench.children import journal, resident, running, watch
from weft.bench.rounds import LIMIT, round_seconds, write_plan
from weft.bench.timing import Tell, spread
from weft.errors import WeftError
from weft.plan import Plan

ASKED = 5  # clients a round


def check() -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        raise WeftError("weft bench reads the memory of processes in /proc, which this system does not have; use Linux")


def measure(plan: dict[str, Any], clients: list[int], rounds: int, limit: float, tell: Tell) -> dict[str, Any]:
    """Peak memory and seconds of a round for each number of clients; after `limit` seconds a run is stopped.

    It is stopped no earlier than its rounds are done: what may be left then are clients that no round reached.
    """
    check()
    found = {}
    for place, count in enumerate(clients):
        found[str(count)] = watched_run(plan, count, rounds, limit)
        tell(place + 1, len(clients))
    return {"asked_per_round": ASKED, "rounds": rounds, "limit_seconds": limit, "clients": found}


def watched_run(changes: dict[str, Any], clients: int, rounds: int, limit: float) -> dict[str, Any]:
    """The workers are as many as `weft run` takes by itself. What processes share counts once."""
    asked = min(ASKED, clients)
    plan = Plan(name="memory", clients=clients, clients_per_round=asked, tasks=1, rounds_per_task=rounds, **changes)
    peak, patience = 0, time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        folder = Path(name)
        write_plan(plan, folder)
        with running(["plan.toml", "--out", "run"], folder) as process:

            def look() -> bool:
                nonlocal peak
                peak = max(peak, resident(process.pid))
                return time.monotonic() > patience and answers(journal(folder / "run")) >= rounds * asked

            if not watch(process, folder, LIMIT, look):
                raise WeftError(f"{rounds} rounds with {clients} clients took over {LIMIT:.0f} s; weft bench gave up")
            over = process.poll() is not None
        seconds = round_seconds(journal(folder / "run"), range(1, rounds))
    return {
        "peak_bytes": peak,
        "complete": over,  # if not, it was stopped after its rounds: what would have come is not in the peak
        "round_seconds": spread(seconds),
        "rounds_per_second": 1 / spread(seconds)["median"],
    }


def answers(events: list[dict[str, Any]]) -> int:
    return sum(event["event"] == "reply" for event in events)
