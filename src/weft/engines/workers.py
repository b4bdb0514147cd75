"""Crew: the worker processes of the local engine and the pipes to them.

A crew is started before torch is loaded here, so that workers load it at the same time, and it can serve several runs
one after another. On Linux only the first worker loads it and forks the others, which share what it has in memory.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any

from weft.engines.frames import read_frame, write_frame
from weft.errors import WeftError

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # one thread a client, always
QUEUED = 4  # requests that wait for a busy worker; more would only fill memory
DIED = "a worker process died (was there enough memory?); what was saved before is kept"

Frame = tuple[dict[str, Any], bytes]


class Crew:
    def __init__(self, workers: int):
        requests, replies = [os.pipe() for _ in range(workers)], [os.pipe() for _ in range(workers)]
        theirs = [(request[0], reply[1]) for request, reply in zip(requests, replies, strict=True)]
        together = [theirs] if sys.platform == "linux" else [[ends] for ends in theirs]
        self._processes = [_start(ends) for ends in together]
        for ends in theirs:
            for end in ends:
                os.close(end)
        self._inbox: queue.Queue[Frame] = queue.Queue()
        self._ended: set[int] = set()  # places of workers that are no more
        # a worker that is busy must not keep the next one waiting for its request, so each has a thread that hands over
        self._outboxes: list[queue.Queue[Frame]] = [queue.Queue(QUEUED) for _ in range(workers)]
        self._pipes = [os.fdopen(request[1], "wb") for request in requests]
        self._listeners = []
        for place, (_, reply) in enumerate(zip(requests, replies, strict=True)):
            heard, said = os.fdopen(reply[0], "rb"), (self._pipes[place], self._outboxes[place])
            self._listeners.append(threading.Thread(target=self._listen, args=(place, heard), daemon=True))
            self._listeners[-1].start()
            threading.Thread(target=self._speak, args=said, daemon=True).start()

    def __len__(self) -> int:
        return len(self._outboxes)

    def tell(self, place: int, words: dict[str, Any], blob: bytes = b"") -> None:
        while True:
            try:
                return self._outboxes[place].put((words, blob), timeout=0.5)
            except queue.Full:  # busy; or dead, and then nobody will ever make room
                if place in self._ended:
                    raise WeftError(DIED) from None

    def hear(self) -> Frame:
        """The next word of any worker."""
        words, blob = self._inbox.get()
        if words.get("ended"):
            raise WeftError(DIED)
        if "problem" in words:
            raise WeftError(words["problem"])
        return words, blob

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its forks too
            process.wait()
        for listener in self._listeners:
            listener.join()  # it ends when the last process has let go of the pipe
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # what was not sent has nobody to read it
                pipe.close()

    def _listen(self, place: int, pipe: IO[bytes]) -> None:
        with pipe:
            try:
                while True:
                    self._inbox.put(read_frame(pipe))
            except (EOFError, OSError):
                self._ended.add(place)
                self._inbox.put(({"ended": True}, b""))

    def _speak(self, pipe: IO[bytes], outbox: queue.Queue[Frame]) -> None:
        try:
            while True:
                write_frame(pipe, *outbox.get())
        except (OSError, ValueError):  # ValueError: closed under our hands
            self._inbox.put(({"ended": True}, b""))


def _start(ends: list[tuple[int, int]]) -> subprocess.Popen[bytes]:
    """One process that becomes as many workers as it gets pairs of pipe ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "weft.engines.worker", str(os.getpid()), *(f"{heard}:{said}" for heard, said in ends)],
        stdin=subprocess.DEVNULL,
        pass_fds=[end for pair in ends for end in pair],
        env={**os.environ, **ENVIRONMENT},
        process_group=0,  # Ctrl-C is for the parent alone, which ends them
    )
