"""How far a run is, and which sites it waits for because they have no task yet, as its journal tells it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Waiting:
    """Read on from where one was: a long run has a long journal."""

    def __init__(self, folder: Path):
        self._journal = folder / "journal.jsonl"
        self._read = 0
        self._reasons: dict[int, str] = {}  # by client, until it answers or has left
        self._tested: dict[int, set[int]] = {}  # by task, the clients that have finished it
        self._told: set[str] = set()

    def now(self) -> list[str]:
        """Each site by name, and why it does not answer yet."""
        for event in self._new_events():
            if event["event"] == "waiting":
                self._reasons[event["client"]] = printable(f"{event['site']}: {event['reason']}")
            elif event["event"] in ("reply", "left", "removed"):
                self._reasons.pop(event["client"], None)
            elif event["event"] == "tested":
                self._tested.setdefault(event["task"], set()).add(event["client"])
        return [self._reasons[client] for client in sorted(self._reasons)]

    def new(self) -> list[str]:
        """What a person has not been told yet: a server app that was started again writes things again."""
        waiting = [f"waiting for {line}" for line in self.now()]
        learned = [
            f"task {step}: learned by {len(who)} site{'s' if len(who) > 1 else ''}"
            for step, who in sorted(self._tested.items())
        ]
        found = [line for line in [*learned, *waiting] if line not in self._told]
        self._told.update(found)
        return found

    def _new_events(self) -> Iterator[dict[str, Any]]:
        """Whole lines alone: one may be on its way."""
        try:
            with self._journal.open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            return
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # damaged: the report says so
                yield json.loads(line)


def printable(text: str) -> str:
    """The reason is a site's own word, and this goes to a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
