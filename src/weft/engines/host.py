"""ClientHost: the clients of one process, their states in memory up to a budget and on disk beyond it.

The local engine is one host in this process, or one in each of several workers. A host always computes with one thread,
so that its results are the same bits wherever and beside whatever it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path

import torch

from weft.core import storage
from weft.core.client import Runtime, answer
from weft.core.engine import EngineState, Reply, Request
from weft.core.storage import Reference, files_of
from weft.methods.state import ClientState

MEGABYTE = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them


class ClientHost:
    def __init__(self, runtime: Runtime, folder: Path, memory: int, saved: EngineState):
        """`folder` holds the states that do not fit into `memory` megabytes, and checkpoints."""
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # weights close to 0 would cost a hundred times as much
        keep_memory()
        self._runtime, self._folder, self._budget = runtime, folder, memory * MEGABYTE
        self._states: OrderedDict[int, ClientState] = OrderedDict()  # in memory; least recently used first
        self._saved: dict[int, Reference] = dict(saved.clients)  # the files of the last saved state
        self._answered: dict[int, int] = dict(saved.answered)  # requests so far: part of a state's file name
        self._changed: set[int] = set()  # clients whose state is newer than its files
        self._checkpoint: set[str] = set()  # files from which the run would resume after a kill
        self._hold_checkpoint()

    def has_task(self, client: int, task: int) -> bool:
        return task < len(self._runtime.scenario.sequences[client])

    def answer(self, client: int, wire: bytes) -> bytes:
        state = self._states.pop(client, None) or self._load(client)
        reply = answer(self._runtime, client, state, wire)
        self._states[client] = state
        self._changed.add(client)
        self._answered[client] = self._answered.get(client, 0) + 1
        self._free_memory()
        return reply

    def save(self) -> EngineState:
        """Write every state that changed."""
        for client in sorted(self._changed):
            self._save(client)
        self._hold_checkpoint()
        return EngineState(dict(self._saved), dict(self._answered))

    def _hold_checkpoint(self) -> None:
        self._checkpoint = set().union(*map(files_of, self._saved.values()))

    def _load(self, client: int) -> ClientState:
        state = self._runtime.new_client()
        if client in self._saved:
            return storage.load(state, self._folder, self._saved[client])
        storage.attach(state, self._folder)
        return state

    def _save(self, client: int) -> None:
        """Write a state, and remove the files that it replaces unless a checkpoint needs them: a hundred clients that
        all train in every round would fill the disk until the next checkpoint.
        """
        before = files_of(self._saved[client]) if client in self._saved else set()
        prefix = f"client-{client:04d}@{self._answered[client]}"
        self._saved[client] = storage.save(self._states[client], self._folder, prefix)
        self._changed.discard(client)
        for name in before - files_of(self._saved[client]) - self._checkpoint:
            (self._folder / name).unlink(missing_ok=True)

    def _free_memory(self) -> None:
        used = sum(map(storage.state_bytes, self._states.values()))
        while used > self._budget and self._states:
            client, state = next(iter(self._states.items()))
            used -= storage.state_bytes(state)
            if client in self._changed:
                self._save(client)
            del self._states[client], state
            return_memory()


class LocalEngine:
    """One client after another, in this process. `SimulatedEngine` puts a virtual clock around it."""

    def __init__(self, host: ClientHost):
        self._host = host
        self._replies: deque[Reply] = deque()

    def submit(self, request: Request) -> None:
        began = time.perf_counter()
        reply = self._host.answer(request.client, request.wire)
        self._replies.append(Reply(request.client, reply, time.perf_counter() - began, request.request_id))

    def ready(self) -> Reply | None:
        return self._replies.popleft() if self._replies else None

    def replies(self) -> Iterator[Reply]:
        while self._replies:
            yield self._replies.popleft()

    def save(self) -> EngineState:
        return self._host.save()


def keep_memory() -> None:
    """Let glibc keep blocks of a vector's size, which every step takes and returns.

    Requesting them from the kernel again took a fifth of a FedWeIT step at batch 20. Larger blocks, such as whole
    states read from a file, are returned at once.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library works differently
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, 32 * MEGABYTE)
        library.mallopt(M_TRIM_THRESHOLD, 64 * MEGABYTE)


def return_memory() -> None:
    """Ask glibc to return free memory: it would keep gigabytes of holes between many clients' states."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
