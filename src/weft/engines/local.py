"""The local engine: all clients on this machine, in this process or in a few workers.

An engine carries bytes and knows nothing of learning. It implements `exchange`, and `save` for checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch

from weft.engines.host import Host
from weft.engines.worker import read_frame, write_frame
from weft.errors import Problem
from weft.plan import Plan
from weft.state import Reference

# One thread a client, always. And glibc is to keep the large blocks that every step takes and gives back: asking the
# kernel for them anew took a fifth of a FedWeIT step at batch 20.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
QUEUED = 4  # requests that wait for a busy worker; more would only fill memory


class Request(NamedTuple):
    client: int
    wire: bytes


class Reply(NamedTuple):
    client: int
    wire: bytes
    seconds: float  # that the client worked


class Saved(NamedTuple):
    """Where the clients' states lie, and how often each has moved on."""

    states: dict[int, Reference]
    answers: dict[int, int]


class Engine(Protocol):
    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Hand over the requests, give the replies as they come."""
        ...

    def save(self) -> Saved:
        """Put all clients' states on disk."""
        ...

    def close(self) -> None: ...


def open_engine(plan: Plan, folder: Path, saved: Saved, workers: int, memory: int) -> Engine:
    """`memory` megabytes of client states are kept in memory, in all workers together."""
    if workers == 1:
        return Serial(plan, folder, saved, memory)
    return Pool(plan, folder, saved, workers, memory)


class Serial:
    def __init__(self, plan: Plan, folder: Path, saved: Saved, memory: int):
        self._threads = torch.get_num_threads()
        self._host = Host(plan, folder, memory)
        self._host.restore(saved.states, saved.answers)

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for client, wire in requests:
            began = time.perf_counter()
            reply = self._host.answer(client, wire)
            yield Reply(client, reply, time.perf_counter() - began)

    def save(self) -> Saved:
        return Saved(self._host.save(), self._host.answers)

    def close(self) -> None:
        torch.set_num_threads(self._threads)  # a program that calls weft.run gets its threads back
        torch.set_flush_denormal(False)


class Pool:
    """Each client belongs to one worker, which keeps its state in memory between rounds."""

    def __init__(self, plan: Plan, folder: Path, saved: Saved, workers: int, memory: int):
        environment = {**os.environ, **WORKER_ENVIRONMENT}
        self._workers = [
            subprocess.Popen(
                [sys.executable, "-m", "weft.engines.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for _ in range(workers)
        ]
        self._inbox: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        # a worker that is busy must not keep the next one waiting for its request, so each has a thread that hands over
        self._outboxes: list[queue.Queue[tuple[dict[str, Any], bytes]]] = [queue.Queue(QUEUED) for _ in self._workers]
        for place, worker in enumerate(self._workers):
            assert worker.stdout is not None
            assert worker.stdin is not None
            threading.Thread(target=self._listen, args=(worker.stdout,), daemon=True).start()
            threading.Thread(target=self._speak, args=(worker.stdin, self._outboxes[place]), daemon=True).start()
            mine = [client for client in saved.states if self._home(client) == place]
            self._tell(
                place,
                {
                    "do": "start",
                    "plan": plan.model_dump(),
                    "folder": str(folder),
                    "memory": max(1, memory // workers),
                    "saved": {client: saved.states[client] for client in mine},
                    "answers": {client: saved.answers[client] for client in mine},
                },
            )
        for _ in self._workers:
            self._hear()

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        waiting = 0
        for client, wire in requests:
            self._tell(self._home(client), {"do": "answer", "client": client}, wire)
            waiting += 1
        for _ in range(waiting):
            words, wire = self._hear()
            yield Reply(words["client"], wire, words["seconds"])

    def save(self) -> Saved:
        for place in range(len(self._workers)):
            self._tell(place, {"do": "save"})
        states: dict[int, Reference] = {}
        answers: dict[int, int] = {}
        for _ in self._workers:
            words, _ = self._hear()
            states |= {int(client): reference for client, reference in words["saved"].items()}
            answers |= {int(client): count for client, count in words["answers"].items()}
        return Saved(states, answers)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    _close_quietly(pipe)

    def _home(self, client: int) -> int:
        return client % len(self._workers)

    def _tell(self, place: int, words: dict[str, Any], blob: bytes = b"") -> None:
        self._outboxes[place].put((words, blob))

    def _hear(self) -> tuple[dict[str, Any], bytes]:
        words, blob = self._inbox.get()
        if words.get("ended"):
            raise Problem("a worker process died (was there enough memory?); what was saved before is kept")
        if "problem" in words:
            raise Problem(words["problem"])
        return words, blob

    def _listen(self, pipe: IO[bytes]) -> None:
        try:
            while True:
                self._inbox.put(read_frame(pipe))
        except (EOFError, OSError, ValueError):  # ValueError: closed under our hands
            self._inbox.put(({"ended": True}, b""))

    def _speak(self, pipe: IO[bytes], outbox: queue.Queue[tuple[dict[str, Any], bytes]]) -> None:
        try:
            while True:
                words, blob = outbox.get()
                write_frame(pipe, words, blob)
        except (OSError, ValueError):
            self._inbox.put(({"ended": True}, b""))


def _close_quietly(pipe: IO[bytes]) -> None:
    with contextlib.suppress(OSError):
        pipe.close()
