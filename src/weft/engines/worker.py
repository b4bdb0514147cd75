"""A worker process: a host behind two pipes. A crew starts `python -m weft.engines.worker PARENT READ:WRITE...`.

For each pair of pipe ends there is a worker; all but the first are forks of it, made when torch is loaded. A frame is a
JSON object and some bytes, each with its length before it; nothing is pickled. A worker ends when its parent does,
whatever it is doing: an orphan would write into a folder that a resumed run owns.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from weft.engines.frames import read_frame, write_frame


def _end_with_parent(parent: int, enough: threading.Event) -> None:
    while not enough.wait(0.1):
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def _ending_with_parent(parent: int) -> Iterator[None]:
    enough = threading.Event()
    watcher = threading.Thread(target=_end_with_parent, args=(parent, enough), daemon=True)
    watcher.start()
    yield
    enough.set()
    watcher.join()


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    from weft.engines.host import Host
    from weft.errors import WeftError
    from weft.plan import Plan

    host: Host | None = None
    while True:
        try:
            words, blob = read_frame(requests)
        except EOFError:
            return
        try:
            if words["do"] == "start":
                host = Host(Plan(**words["plan"]), Path(words["folder"]), words["memory"])
                saved = {int(client): reference for client, reference in words["saved"].items()}
                host.restore(saved, {int(client): count for client, count in words["answers"].items()})
                write_frame(replies, {"ready": True})
                continue
            assert host is not None
            if words["do"] == "answer":
                began = time.perf_counter()
                reply = host.answer(words["client"], blob)
                write_frame(replies, {"client": words["client"], "seconds": time.perf_counter() - began}, reply)
            elif words["do"] == "save":
                write_frame(replies, {"saved": host.save(), "answers": host.answers})
        except WeftError as problem:
            write_frame(replies, {"problem": str(problem)})
        except Exception as error:  # a fault in somebody's own method: the parent says one line, the rest stands here
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            write_frame(replies, {"problem": f"a worker failed with {said}; its traceback stands above"})


def main() -> None:
    # Ctrl-C reaches the whole process group; the parent decides what happens and the pipes tell the workers
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # whatever a library prints is for the terminal's eyes
    parent, ends = int(sys.argv[1]), [tuple(map(int, pair.split(":"))) for pair in sys.argv[2:]]
    if len(ends) > 1:
        parent, mine = _become_one_of(parent, ends)
    else:
        (mine,) = ends
    with _ending_with_parent(parent), os.fdopen(mine[0], "rb") as requests, os.fdopen(mine[1], "wb") as replies:
        serve(requests, replies)
    os._exit(0)  # at once: to take torch apart first would take seconds


def _become_one_of(parent: int, ends: list[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
    """The parent and the pipe ends of the worker that this process is: the first, or a fork of it."""
    with _ending_with_parent(parent):
        import weft.engines.host  # noqa: F401 - what takes seconds to load, torch above all

    first, mine = os.getpid(), ends[0]
    for others in ends[1:]:  # now that no thread is left: a fork would not have it, nor what it holds
        if os.fork() == 0:
            parent, mine = first, others
            break
    for pair in ends:
        if pair != mine:  # or nobody would notice the end of the worker that they belong to
            for end in pair:
                os.close(end)
    return parent, mine


if __name__ == "__main__":
    main()
