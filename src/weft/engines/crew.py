"""Crew: the worker processes of the local engine and the pipes to them.

A crew is started before torch is loaded here, so that workers load it at the same time, and it can serve several runs
one after another.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from typing import IO, Any

from weft.engines.frames import read_frame, write_frame
from weft.errors import Problem

# One thread a client, always. And glibc is to keep blocks of a vector's size, which every step takes and gives back:
# asking the kernel for them anew took a fifth of a FedWeIT step at batch 20. Larger ones, such as the files of whole
# states, go back at once.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
QUEUED = 4  # requests that wait for a busy worker; more would only fill memory
DIED = "a worker process died (was there enough memory?); what was saved before is kept"

Frame = tuple[dict[str, Any], bytes]


class Crew:
    def __init__(self, workers: int):
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "weft.engines.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **ENVIRONMENT},
                process_group=0,  # Ctrl-C is for the parent alone, which ends them
            )
            for _ in range(workers)
        ]
        self._inbox: queue.Queue[Frame] = queue.Queue()
        # a worker that is busy must not keep the next one waiting for its request, so each has a thread that hands over
        self._outboxes: list[queue.Queue[Frame]] = [queue.Queue(QUEUED) for _ in self._processes]
        for process, outbox in zip(self._processes, self._outboxes, strict=True):
            assert process.stdout is not None
            assert process.stdin is not None
            threading.Thread(target=self._listen, args=(process.stdout,), daemon=True).start()
            threading.Thread(target=self._speak, args=(process.stdin, outbox), daemon=True).start()

    def __len__(self) -> int:
        return len(self._processes)

    def tell(self, place: int, words: dict[str, Any], blob: bytes = b"") -> None:
        while True:
            try:
                return self._outboxes[place].put((words, blob), timeout=0.5)
            except queue.Full:  # busy; or dead, and then nobody will ever make room
                if self._processes[place].poll() is not None:
                    raise Problem(DIED) from None

    def hear(self) -> Frame:
        """The next word of any worker."""
        words, blob = self._inbox.get()
        if words.get("ended"):
            raise Problem(DIED)
        if "problem" in words:
            raise Problem(words["problem"])
        return words, blob

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def _listen(self, pipe: IO[bytes]) -> None:
        try:
            while True:
                self._inbox.put(read_frame(pipe))
        except (EOFError, OSError, ValueError):  # ValueError: closed under our hands
            self._inbox.put(({"ended": True}, b""))

    def _speak(self, pipe: IO[bytes], outbox: queue.Queue[Frame]) -> None:
        try:
            while True:
                write_frame(pipe, *outbox.get())
        except (OSError, ValueError):
            self._inbox.put(({"ended": True}, b""))
