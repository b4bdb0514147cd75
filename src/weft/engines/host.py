"""Host: some clients living in one process, their states in memory up to a budget and on disk beyond it.

The local engine is one host in this process, or one in each of several worker processes. A host always computes with
one thread, so that its results are the same bits wherever and beside whomever it runs.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import OrderedDict
from pathlib import Path

import torch

from weft.core.client import World, answer
from weft.core.storage import Archive, Reference, State, files_of
from weft.plan import Plan

MEGABYTE = 1 << 20
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them


class Host:
    def __init__(self, plan: Plan, folder: Path, memory: int):
        """`folder` is where states go that do not fit into `memory` megabytes, and where checkpoints are made."""
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # weights on their way to 0 would cost a hundred times as much
        keep_memory()
        self._world = World(plan)
        self._folder = folder
        self._budget = memory * MEGABYTE
        self._awake: OrderedDict[int, State] = OrderedDict()  # least recently used first
        self._saved: dict[int, Reference] = {}  # where the last saved state of a client lies
        self._checkpoint: set[str] = set()  # files from which the run would go on after a kill
        self._changed: set[int] = set()  # clients whose state is newer than what is saved
        self._answers: dict[int, int] = {}  # how often a client's state has moved on: part of its file names

    def has_task(self, client: int, step: int) -> bool:
        return step < len(self._world.scenario.sequences[client])

    def answer(self, client: int, wire: bytes) -> bytes:
        state = self._awake.pop(client, None) or self._wake(client)
        reply = answer(self._world, client, state, wire)
        self._awake[client] = state
        self._changed.add(client)
        self._answers[client] = self._answers.get(client, 0) + 1
        self._make_room()
        return reply

    def save(self) -> dict[int, Reference]:
        """Write every state that changed; says for each client that ever answered where its state lies."""
        for client in sorted(self._changed):
            self._save(client)
        self._hold_checkpoint()
        return dict(self._saved)

    def restore(self, saved: dict[int, Reference], answers: dict[int, int]) -> None:
        self._saved, self._answers = dict(saved), dict(answers)
        self._hold_checkpoint()

    def _hold_checkpoint(self) -> None:
        self._checkpoint = set().union(*map(files_of, self._saved.values()))

    @property
    def answers(self) -> dict[int, int]:
        return dict(self._answers)

    def _wake(self, client: int) -> State:
        if client in self._saved:
            return State.load(self._folder, self._saved[client])
        return State(archive=Archive(self._folder))

    def _save(self, client: int) -> None:
        """Write a state. What it takes the place of is removed, if no checkpoint counts on it: a hundred clients that
        are all asked in every round would fill the disk until the next one.
        """
        before = files_of(self._saved[client]) if client in self._saved else set()
        prefix = f"client-{client:04d}@{self._answers[client]}"
        self._saved[client] = self._awake[client].save(self._folder, prefix)
        self._changed.discard(client)
        for name in before - files_of(self._saved[client]) - self._checkpoint:
            (self._folder / name).unlink(missing_ok=True)

    def _make_room(self) -> None:
        used = sum(state.nbytes for state in self._awake.values())
        while used > self._budget and self._awake:
            client, state = next(iter(self._awake.items()))
            used -= state.nbytes
            if client in self._changed:
                self._save(client)
            del self._awake[client], state
            give_back_memory()


def keep_memory() -> None:
    """Let glibc keep blocks of a vector's size, which every step takes and gives back.

    Asking the kernel for them anew took a fifth of a FedWeIT step at batch 20. Larger ones, such as whole states read
    from a file, go back at once.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has its own ways
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, 32 * MEGABYTE)
        library.mallopt(M_TRIM_THRESHOLD, 64 * MEGABYTE)


def give_back_memory() -> None:
    """Ask glibc to return what is free to the system; it would keep gigabytes of holes between many clients' states."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has its own ways
        ctypes.CDLL(None).malloc_trim(0)
