"""The whole benchmark: every part once, in order, and what comes of them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench import memory, paired, peers, places, rounds
from weft.bench.bars import judged, ratios_of
from weft.bench.children import ask_part
from weft.bench.timing import Tell
from weft.plan import Plan
from weft.repro.store import short_hash


class Amounts(NamedTuple):
    """How much is measured: enough for steady medians, or a first look that is meant to end in four minutes."""

    passes: int  # turns of each contender
    tasks: int  # of the default plan
    worker_turns: int
    worker_rounds: int
    starts: int
    clients: list[int]
    client_rounds: int
    client_limit: float  # seconds
    messages: list[int]
    entries: list[int]
    peer_turns: int
    peer_rounds: int
    paired_seeds: Sequence[int] = ()  # none: whether the accuracy stays is not asked
    paired_tasks: int = 0
    plan: Mapping[str, Any] = {}  # what the plans have of their own; nothing but in tests


WHOLE = Amounts(
    passes=25,
    tasks=10,
    worker_turns=4,
    worker_rounds=8,
    starts=5,
    clients=[5, 20, 100, 1000],
    client_rounds=6,
    client_limit=90.0,
    messages=[10, 100, 1000],
    entries=[10, 1000, 10_000],
    peer_turns=2,
    peer_rounds=10,
    paired_seeds=[0, 1, 2],
    paired_tasks=4,
)
QUICK = Amounts(
    passes=4,
    tasks=2,
    worker_turns=2,
    worker_rounds=4,
    starts=2,
    clients=[1000],
    client_rounds=3,
    client_limit=20.0,
    messages=[10, 100],
    entries=[10, 1000],
    peer_turns=1,
    peer_rounds=5,
)

Show = Callable[[str, int, int], None]  # which part, how much of it is done, out of how much
Keep = Callable[[dict[str, Any]], None]  # all that is measured so far


def bench(quick: bool, with_peers: bool, show: Show, keep: Keep) -> dict[str, Any]:
    """All measures, ready for JSON; kept after each part. What is missing is told before anything is measured."""
    places.file_of("plain_lenet.py")
    memory.check()
    if with_peers:
        peers.environment()
    amounts = QUICK if quick else WHOLE
    plan = dict(amounts.plan)
    began = time.monotonic()
    found: dict[str, Any] = {"machine": machine(), "plan_hash": default_hash(), "quick": quick}
    # what is most easily disturbed comes first, on a machine that is not warm yet from the rest
    parts: dict[str, Callable[[Tell], dict[str, Any]]] = {
        "steps": lambda tell: ask_part("steps", {"plan": plan, "quick": quick, "passes": amounts.passes}, tell),
        "wire": lambda tell: ask_part("wire", {"plan": plan, "passes": 2 * amounts.passes}, tell),
        "server": lambda tell: ask_part(
            "server",
            {"plan": plan, "messages": amounts.messages, "entries": amounts.entries, "repeats": 1 if quick else 3},
            tell,
        ),
        "start": lambda tell: rounds.measure_start(plan, amounts.starts, tell),
        "workers": lambda tell: rounds.measure_workers(plan, amounts.worker_turns, amounts.worker_rounds, tell),
        "memory": lambda tell: memory.measure(plan, amounts.clients, amounts.client_rounds, amounts.client_limit, tell),
        "engine": lambda tell: ask_part("engine", {"plan": {**plan, "tasks": amounts.tasks}}, tell),
    }
    if amounts.paired_seeds:
        pairs = {**plan, "tasks": amounts.paired_tasks}
        parts["paired"] = lambda tell: paired.measure(pairs, list(amounts.paired_seeds), tell)
    if with_peers:
        parts["peers"] = lambda tell: peers.measure(amounts.peer_turns, amounts.peer_rounds, tell)
    found["part_seconds"] = {}
    for name, measure in parts.items():
        show(name, 0, 1)
        since = time.monotonic()
        found[name] = measure(partial(show, name))
        found["part_seconds"][name] = time.monotonic() - since
        keep(found)
    found["seconds"] = time.monotonic() - began
    found["ratios"] = ratios_of(found)
    found["accuracy_compared"] = "paired" in found  # else the bars on bytes are judged by bytes alone
    found["bars"] = judged(found["ratios"], found["paired"]["points_lost"] if "paired" in found else None)
    return found


def default_hash() -> str:
    """Which defaults were measured; as in the csv files of `weft repro`."""
    return short_hash(Plan().toml())


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers; neither a host's name nor a path."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "weft")}
    return {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def processor(table: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = table.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
