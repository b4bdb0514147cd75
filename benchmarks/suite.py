"""The whole benchmark: every part once, in order, and their ratios."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.plan import Plan
from weft.repro.store import plan_hash

from . import engine, peers, processes, runs
from .bars import judge, ratios_of
from .timing import Progress


class Amounts(NamedTuple):
    """How much is measured: by default enough for stable medians."""

    passes: int = 25  # turns of each contender
    tasks: int = 10  # of the default plan
    worker_turns: int = 4
    worker_rounds: int = 8
    starts: int = 5
    clients: Sequence[int] = (5, 20, 100, 1000)
    client_rounds: int = 6
    client_limit: float = 90.0  # seconds
    messages: Sequence[int] = (10, 100, 1000)
    entries: Sequence[int] = (10, 1000, 10_000)
    peer_turns: int = 2
    peer_rounds: int = 10
    paired_seeds: Sequence[int] = (0, 1, 2)  # empty: accuracies are not compared
    paired_tasks: int = 4
    plan: Mapping[str, Any] = {}  # changes of all plans; for tests


FULL = Amounts()
QUICK = Amounts(  # about four minutes
    passes=4,
    tasks=2,
    worker_turns=2,
    worker_rounds=4,
    starts=2,
    clients=(1000,),
    client_rounds=3,
    client_limit=20.0,
    messages=(10, 100),
    entries=(10, 1000),
    peer_turns=1,
    peer_rounds=5,
    paired_seeds=(),
)

Show = Callable[[str, int, int], None]  # the part, how much of it is done, its total
Keep = Callable[[dict[str, Any]], None]  # all results so far
Measure = Callable[[Progress], dict[str, Any]]


def bench(quick: bool, with_peers: bool, show: Show, keep: Keep) -> dict[str, Any]:
    """Measure everything and return it ready for JSON; `keep` is called after each part.

    What is missing on this machine is an error before anything is measured.
    """
    processes.check_memory_info()
    if with_peers:
        peers.environment()
    start = time.monotonic()
    results: dict[str, Any] = {"machine": machine(), "plan_hash": default_hash(), "quick": quick, "part_seconds": {}}
    for name, measure in _parts(quick, with_peers).items():
        show(name, 0, 1)
        since = time.monotonic()
        results[name] = measure(partial(show, name))
        results["part_seconds"][name] = time.monotonic() - since
        keep(results)
    results["seconds"] = time.monotonic() - start
    results["ratios"] = ratios_of(results)
    results["accuracy_compared"] = "paired" in results  # otherwise the bars on bytes ignore accuracy
    results["bars"] = judge(results["ratios"], results["paired"]["points_lost"] if "paired" in results else None)
    return results


def _parts(quick: bool, with_peers: bool) -> dict[str, Measure]:
    """What is most sensitive to noise comes first, before the machine is warm."""
    amounts = QUICK if quick else FULL
    plan = dict(amounts.plan)

    def part(name: str, **settings: Any) -> Measure:
        return lambda progress: processes.measure_part(name, settings, progress)

    parts: dict[str, Measure] = {
        "steps": part("steps", plan=plan, quick=quick, passes=amounts.passes),
        "wire": part("wire", plan=plan, passes=2 * amounts.passes),
        "server": part(
            "server", plan=plan, messages=amounts.messages, entries=amounts.entries, repeats=1 if quick else 3
        ),
        "start": partial(runs.measure_start, plan, amounts.starts),
        "workers": partial(runs.measure_workers, plan, amounts.worker_turns, amounts.worker_rounds),
        "memory": partial(runs.measure_memory, plan, amounts.clients, amounts.client_rounds, amounts.client_limit),
        "engine": part("engine", plan={**plan, "tasks": amounts.tasks}),
    }
    if amounts.paired_seeds:
        paired_plan = {**plan, "tasks": amounts.paired_tasks}
        parts["paired"] = partial(engine.measure_paired, paired_plan, list(amounts.paired_seeds))
    if with_peers:
        parts["peers"] = partial(peers.measure, amounts.peer_turns, amounts.peer_rounds)
    return parts


def default_hash() -> str:
    """Identifies the default plan, as in the csv files of `weft repro`."""
    return plan_hash(Plan().toml())


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers, without host name or path."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "weft")}
    return {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def processor(table: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
