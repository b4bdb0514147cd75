"""The local engine: all clients on this machine, in this process or in the workers of a crew.

clocked.py puts a virtual clock between these and the loop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from weft.core.engine import Reply, Request, Saved
from weft.core.storage import Reference
from weft.engines.host import Host
from weft.engines.workers import Crew
from weft.plan import Plan


class Serial:
    """One client after another, in this process."""

    def __init__(self, plan: Plan, folder: Path, saved: Saved, memory: int):
        self._host = Host(plan, folder, memory)
        self._host.restore(saved.states, saved.answers)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for client, wire, *_ in requests:
            began = time.perf_counter()
            reply = self._host.answer(client, wire)
            yield Reply(client, reply, time.perf_counter() - began)

    def save(self) -> Saved:
        return Saved(self._host.save(), self._host.answers)

    def close(self) -> None:
        """Nothing outside this process to let go."""


class Pool:
    """Each client belongs to one worker of the crew, which keeps its state in memory between rounds."""

    def __init__(self, plan: Plan, folder: Path, saved: Saved, memory: int, crew: Crew):
        self._crew = crew
        for place in range(len(crew)):
            mine = [client for client in saved.states if self._home(client) == place]
            words = {
                "do": "start",
                "plan": plan.model_dump(),
                "folder": str(folder),
                "memory": max(1, memory // len(crew)),
                "saved": {client: saved.states[client] for client in mine},
                "answers": {client: saved.answers[client] for client in mine},
            }
            crew.tell(place, words)
        self._starting = len(crew)  # workers that have not said yet that they are ready; they start beside us

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        self._await_start()
        waiting = 0
        for client, wire, *_ in requests:
            self._crew.tell(self._home(client), {"do": "answer", "client": client}, wire)
            waiting += 1
        for _ in range(waiting):
            words, wire = self._crew.hear()
            yield Reply(words["client"], wire, words["seconds"])

    def save(self) -> Saved:
        self._await_start()
        for place in range(len(self._crew)):
            self._crew.tell(place, {"do": "save"})
        states: dict[int, Reference] = {}
        answers: dict[int, int] = {}
        for _ in range(len(self._crew)):
            words, _ = self._crew.hear()
            states |= {int(client): reference for client, reference in words["saved"].items()}
            answers |= {int(client): count for client, count in words["answers"].items()}
        return Saved(states, answers)

    def close(self) -> None:
        """The crew is its owner's to close: it may have another run to serve."""

    def _await_start(self) -> None:
        while self._starting:
            self._starting -= 1
            self._crew.hear()

    def _home(self, client: int) -> int:
        return client % len(self._crew)
