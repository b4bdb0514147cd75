"""Whole runs as `weft run` processes: time to the first step, one and two workers, memory by number of clients."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.plan import Plan

from .processes import check_memory_info, journal, memory_of, watch, weft_run
from .timing import Progress, quartiles, ratio

EQUAL_CLIENTS = 6
SELECTED = 5  # clients per round in runs with many clients


@contextmanager
def plan_folder(plan: Plan) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
        Path(name, "plan.toml").write_text(plan.toml(), encoding="utf-8")
        yield Path(name)


def complete_run(folder: Path, workers: int) -> list[dict[str, Any]]:
    """The journal of a run of the folder's plan."""
    with weft_run(["plan.toml", "--out", "run", "--workers", str(workers)], folder) as process:
        watch(process, folder, lambda: False)
    return journal(folder / "run")


def round_seconds(events: list[dict[str, Any]], rounds: range) -> list[float]:
    """From the last reply of the previous round to the last of each round, in a run of one task."""
    ends: dict[int, float] = {}
    for event in replies(events):
        ends[event["round"]] = max(event["at"], ends.get(event["round"], 0.0))
    return [ends[after] - ends[before] for before, after in pairwise(sorted(ends)) if after in rounds]


def replies(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "reply"]


def has_reply(folder: Path) -> bool:
    return bool(replies(journal(folder)))


def measure_workers(plan: dict[str, Any], turns: int, rounds: int, progress: Progress) -> dict[str, Any]:
    """Seconds of a round with one and two workers, in turns; the first and last round include other work."""
    chosen = Plan(name="workers", clients=EQUAL_CLIENTS, tasks=1, rounds_per_task=rounds, **plan)
    times: dict[int, list[list[float]]] = {1: [], 2: []}  # by turn
    for turn in range(turns):
        for index, workers in enumerate((1, 2) if turn % 2 == 0 else (2, 1)):
            with plan_folder(chosen) as folder:
                times[workers].append(round_seconds(complete_run(folder, workers), range(1, rounds - 1)))
            progress(2 * turn + index + 1, 2 * turns)
    seconds = {str(workers): quartiles([one for turn in by_turn for one in turn]) for workers, by_turn in times.items()}
    medians = {workers: [quartiles(turn)["median"] for turn in by_turn] for workers, by_turn in times.items()}
    return {
        "clients": EQUAL_CLIENTS,
        "rounds_per_second": {workers: 1 / each["median"] for workers, each in seconds.items()},
        "round_seconds": seconds,
        "speedup": ratio(medians[1], medians[2])["median"],
    }


def measure_start(plan: dict[str, Any], turns: int, progress: Progress) -> dict[str, Any]:
    """Seconds from starting `weft run` on glyphs until the first reply of a client.

    The plan has images for one step per round, so the first reply includes that step, its validation and the encoding.
    """
    batch = plan.get("batch_size", Plan.model_fields["batch_size"].default)
    short = Plan(**{**plan, "name": "start", "tasks": 1, "scenario.train": batch})
    seconds: list[float] = []
    for turn in range(turns):
        with plan_folder(short) as folder:
            start = time.time()
            with weft_run(["plan.toml", "--out", "run"], folder) as process:
                watch(process, folder, partial(has_reply, folder / "run"))
            seconds.append(replies(journal(folder / "run"))[0]["at"] - start)
        progress(turn + 1, turns)
    return {"seconds": quartiles(seconds)}


def measure_memory(
    plan: dict[str, Any], clients: Sequence[int], rounds: int, limit: float, progress: Progress
) -> dict[str, Any]:
    """Peak memory and seconds of a round for each number of clients.

    A run is stopped after `limit` seconds, but not before its rounds are done: then only clients remain that no round
    selected.
    """
    check_memory_info()
    results = {}
    for count in clients:
        results[str(count)] = memory_of_run(plan, count, rounds, limit)
        progress(len(results), len(clients))
    return {"asked_per_round": SELECTED, "rounds": rounds, "limit_seconds": limit, "clients": results}


def memory_of_run(changes: dict[str, Any], clients: int, rounds: int, limit: float) -> dict[str, Any]:
    """With as many workers as `weft run` chooses. Shared memory counts once."""
    selected = min(SELECTED, clients)
    plan = Plan(name="memory", clients=clients, clients_per_round=selected, tasks=1, rounds_per_task=rounds, **changes)
    peak, end = 0, time.monotonic() + limit
    with plan_folder(plan) as folder:
        with weft_run(["plan.toml", "--out", "run"], folder) as process:

            def done() -> bool:
                nonlocal peak
                peak = max(peak, memory_of(process.pid))
                return time.monotonic() > end and len(replies(journal(folder / "run"))) >= rounds * selected

            watch(process, folder, done)
            complete = process.poll() is not None
        seconds = quartiles(round_seconds(journal(folder / "run"), range(1, rounds)))
    return {
        "peak_bytes": peak,
        "complete": complete,  # otherwise it was stopped after its rounds, and the peak leaves out the rest
        "round_seconds": seconds,
        "rounds_per_second": 1 / seconds["median"],
    }
