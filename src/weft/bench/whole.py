"""The whole benchmark: every part once, in order, and what comes of them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.bench import memory, paired, peers, places, rounds
from weft.bench.bars import judged, ratios_of
from weft.bench.children import ask_part
from weft.bench.timing import Tell


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
    peer_rounds: int
    paired_seeds: list[int]  # none: whether the accuracy stays is not asked
    plan: dict[str, Any]  # what the plans have of their own; nothing but in tests


WHOLE = Amounts(25, 10, 4, 8, 5, [5, 20, 100, 1000], 6, 90.0, [10, 100, 1000], [10, 1000, 10_000], 10, [0, 1, 2], {})
QUICK = Amounts(3, 2, 2, 4, 2, [1000], 3, 20.0, [10, 100], [10, 1000], 5, [], {})

PAIRED_TASKS = 2  # nine runs of so many

Show = Callable[[str, int, int], None]  # which part, how much of it is done, out of how much
Keep = Callable[[dict[str, Any]], None]  # all that is measured so far


def bench(quick: bool, with_peers: bool, show: Show, keep: Keep) -> dict[str, Any]:
    """All measures, ready for JSON; kept after each part. What is missing is told before anything is measured."""
    places.file_of("plain_lenet.py")
    memory.check()
    if with_peers:
        peers.environment()
    amounts = QUICK if quick else WHOLE
    plan = amounts.plan
    began = time.monotonic()
    found: dict[str, Any] = {"machine": machine(), "quick": quick}
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
        parts["paired"] = lambda tell: paired.measure({**plan, "tasks": PAIRED_TASKS}, amounts.paired_seeds, tell)
    if with_peers:
        parts["peers"] = lambda tell: peers.measure(amounts.peer_rounds, tell)
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
