"""What figures read from a run folder."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.errors import WeftError
from weft.plan import Plan


def answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Every answer of a client as the journal has it; after a stop some stand there twice, with equal numbers."""
    return _events(folder, "reply")


def tests(folder: Path) -> list[dict[str, Any]]:
    """Every test of a client in the order of the run, each once: what was repeated after a stop is the same again."""
    found = {(event["client"], event["task"]): event for event in _events(folder, "tested")}
    return sorted(found.values(), key=lambda event: (event["images"], event["client"]))


def _events(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    path = folder / "journal.jsonl"
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            event = json.loads(line)
            if event["event"] == kind:
                yield event
    except (OSError, ValueError, KeyError):
        raise WeftError(f"{path} is damaged; run again in a new folder") from None


def by_round(folder: Path, plan: Plan, clients: Collection[int] | None = None) -> dict[int, list[float]]:
    """For each task the validation accuracy of the clients' own models after each round, as the mean over clients.

    A client that has stopped, or that was not asked, stands there with its last value; before it has one it does not
    count.
    """
    found: dict[int, dict[int, dict[int, float]]] = {}  # step -> round -> client
    for event in answers(folder):
        if "valid_accuracy" in event and (clients is None or event["client"] in clients):
            of_step = found.setdefault(event["task"], {})
            of_step.setdefault(event["round"], {})[event["client"]] = event["valid_accuracy"]
    means: dict[int, list[float]] = {}
    for step, rounds in sorted(found.items()):
        last: dict[int, float] = {}
        means[step] = []
        for place in range(plan.rounds_per_task):
            last |= rounds.get(place, {})
            if last:
                means[step].append(fmean(last.values()))
    return means
