"""Whole runs, by real `weft run` processes: one and two workers, and the time until the first training step."""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from weft.bench.children import journal, running, watch
from weft.bench.timing import Tell, ratio, spread
from weft.errors import WeftError
from weft.plan import Plan

EQUAL_CLIENTS = 6
LIMIT = 600.0  # seconds for a run that is expected to take less than a minute


def measure_workers(plan: dict[str, Any], turns: int, rounds: int, tell: Tell) -> dict[str, Any]:
    """Seconds of a round with one worker and with two, taking turns; the first and the last round do other work too."""
    whole = Plan(name="workers", clients=EQUAL_CLIENTS, tasks=1, rounds_per_task=rounds, **plan)
    found: dict[int, list[list[float]]] = {1: [], 2: []}  # by turn
    for turn in range(turns):
        for place, workers in enumerate((1, 2) if turn % 2 == 0 else (2, 1)):
            with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
                found[workers].append(round_seconds(_whole_run(whole, Path(name), workers), range(1, rounds - 1)))
            tell(2 * turn + place + 1, 2 * turns)
    times = {workers: spread([one for turn in of_turns for one in turn]) for workers, of_turns in found.items()}
    middle = {workers: [spread(turn)["median"] for turn in of_turns] for workers, of_turns in found.items()}
    return {
        "clients": EQUAL_CLIENTS,
        "rounds_per_second": {str(workers): 1 / found["median"] for workers, found in times.items()},
        "round_seconds": {str(workers): found for workers, found in times.items()},
        "speedup": ratio(middle[1], middle[2])["median"],
    }


def _whole_run(plan: Plan, folder: Path, workers: int) -> list[dict[str, Any]]:
    write_plan(plan, folder)
    with running(["plan.toml", "--out", "run", "--workers", str(workers)], folder) as process:
        if not watch(process, folder, LIMIT, lambda: False):
            raise WeftError(f"a run of {plan.rounds_per_task} rounds took more than {LIMIT:.0f} s; weft bench gave up")
    return journal(folder / "run")


def write_plan(plan: Plan, folder: Path) -> None:
    (folder / "plan.toml").write_text(plan.toml(), encoding="utf-8")


def round_seconds(events: list[dict[str, Any]], rounds: range) -> list[float]:
    """From the last answer of the round before to the last of its own, for some rounds of a run of one task."""
    ends: dict[int, float] = {}
    for event in events:
        if event["event"] == "reply":
            ends[event["round"]] = max(event["at"], ends.get(event["round"], 0.0))
    return [ends[after] - ends[before] for before, after in pairwise(sorted(ends)) if after in rounds]


def measure_start(plan: dict[str, Any], turns: int, tell: Tell) -> dict[str, Any]:
    """Seconds from starting `weft run` on glyphs until a client has answered after its first training step.

    The plan has images for one step a round, so the first answer holds that step, its validation and the reply: a
    little more than the step alone.
    """
    batch = plan.get("batch_size", Plan.model_fields["batch_size"].default)
    short = Plan(**{**plan, "name": "start", "tasks": 1, "scenario.train": batch})
    found: list[float] = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
            write_plan(short, Path(name))
            began = time.time()
            with running(["plan.toml", "--out", "run"], Path(name)) as process:
                answers: list[float] = []

                def look(folder: Path = Path(name), answers: list[float] = answers) -> bool:
                    answers += [event["at"] for event in journal(folder / "run") if event["event"] == "reply"]
                    return bool(answers)

                if not watch(process, Path(name), LIMIT, look):
                    raise WeftError(f"no training step within {LIMIT:.0f} s; weft bench gave up")
            found.append(answers[0] - began)
        tell(turn + 1, turns)
    return {"seconds": spread(found)}
