"""The journal of a run: its events and local trainings, read while the run is in progress, killed or finished."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

USUAL = ("created", "finished")
ROUTINE = ("reply", "tested")  # events of every round or task
SITE_EVENTS = ("waiting", "left", "removed", "back", "retry")  # normal events of a site


class Event(NamedTuple):
    """A line of journal.jsonl."""

    at: float  # seconds since 1970
    kind: str
    facts: dict[str, Any]

    @property
    def is_incident(self) -> bool:
        return self.kind not in (*USUAL, *ROUTINE, *SITE_EVENTS)

    @property
    def when(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.at))

    @property
    def text(self) -> str:
        return " ".join([self.kind, *(f"{key}={plain(value)}" for key, value in self.facts.items())])


class Journal:
    """Reads journal.jsonl from where the last call stopped; an incomplete last line is left for the next call."""

    def __init__(self, folder: Path):
        self.path = folder / "journal.jsonl"
        self.notes: list[str] = []  # damaged lines
        self._position = 0

    def new_events(self) -> list[Event]:
        """Events added since the last call; none if the file does not exist."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                blob = file.read()
        except OSError:
            return []
        blob = blob[: blob.rfind(b"\n") + 1]
        self._position += len(blob)
        events = []
        for line in blob.decode("utf-8", errors="replace").splitlines():
            try:
                facts = json.loads(line)
                events.append(Event(float(facts.pop("at")), str(facts.pop("event")), facts))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                self.note(line)
        return events

    def note(self, line: str) -> None:
        self.notes.append(f"a line of {self.path} is damaged and left out: {line[:80]!r}")


def read_journal(folder: Path) -> list[Event]:
    """All events of a run so far, without damaged lines; a resumed run may have written equal replies twice."""
    return Journal(folder).new_events()


class Round(NamedTuple):
    """A client's local training in one round."""

    client: int
    task: int
    round: int
    at: float
    valid_accuracy: float | None
    valid_loss: float | None
    train_loss: float | None


def read_rounds(events: Iterable[Event], journal: Journal) -> tuple[Round, ...]:
    """The rounds that count, each once.

    A resumed run repeats what came after its checkpoint: a client's first reply after `resumed` replaces everything of
    that client from that round on.
    """
    rounds: dict[tuple[int, int, int], Round] = {}
    repeating: set[int] = set()  # clients without a reply since the run was resumed
    for event in events:
        if event.kind == "resumed":
            repeating |= {client for _, _, client in rounds}
        if event.kind != "reply":
            continue
        try:
            client, task, number = (int(event.facts[key]) for key in ("client", "task", "round"))
            if client in repeating:
                rounds = {key: value for key, value in rounds.items() if key[2] != client or key[:2] < (task, number)}
                repeating.discard(client)
            if "images" in event.facts:  # local training, not only a test
                values = (_finite(event.facts.get(key)) for key in Round._fields[4:])
                rounds[task, number, client] = Round(client, task, number, event.at, *values)
        except (ValueError, KeyError, TypeError, OverflowError):
            journal.note(event.text)
    return tuple(rounds[key] for key in sorted(rounds))


def read_kept(events: Iterable[Event], journal: Journal) -> dict[int, tuple[str, ...]]:
    """By client: whose result each of its tasks was last tested with, own or shared; for methods with a choice."""
    kept: dict[int, tuple[str, ...]] = {}
    for event in events:
        try:
            if event.kind == "reply" and (found := event.facts.get("kept")):
                kept[int(event.facts["client"])] = tuple("shared" if each == "shared" else "own" for each in found)
        except (ValueError, KeyError, TypeError):
            journal.note(event.text)
    return kept


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def plain(value: Any) -> str:
    """A value of a plan or of an event as text: strings without quotes."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
