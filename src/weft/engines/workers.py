"""Worker processes: `WorkerPool` starts them, `WorkerEngine` runs clients in them, `main` is what one of them does.

A pool is started before torch is loaded here, so that workers load it at the same time, and can serve several runs one
after another. On Linux only the first worker loads torch and forks the others, which share its memory. Pool and worker
exchange a JSON object and some bytes over pipes; nothing is pickled. A worker ends when its parent does, whatever it is
doing: an orphan would write into a folder that a resumed run owns.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from weft.core.engine import EngineState, Reply, Request
from weft.errors import WeftError
from weft.plan import Plan

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # one thread per client, always
QUEUED = 4  # requests that wait for a busy worker; more would only fill memory
DIED = "a worker process died (out of memory?); what was saved before is kept"

Frame = tuple[dict[str, Any], bytes]


def send(pipe: Connection, fields: dict[str, Any], blob: bytes = b"") -> None:
    pipe.send_bytes(json.dumps(fields).encode())
    pipe.send_bytes(blob)


def receive(pipe: Connection) -> Frame:
    """The next frame; EOFError if the other side has ended."""
    return json.loads(pipe.recv_bytes()), pipe.recv_bytes()


class WorkerPool:
    def __init__(self, workers: int):
        requests, replies = [os.pipe() for _ in range(workers)], [os.pipe() for _ in range(workers)]
        theirs = [(request[0], reply[1]) for request, reply in zip(requests, replies, strict=True)]
        together = [theirs] if sys.platform == "linux" else [[ends] for ends in theirs]
        self._processes = [_start(ends) for ends in together]
        for ends in theirs:
            for end in ends:
                os.close(end)
        self._inbox: queue.Queue[Frame] = queue.Queue()
        self._ended: set[int] = set()
        # a busy worker must not keep the next one waiting for its request, so each has a thread that sends
        self._outboxes: list[queue.Queue[Frame]] = [queue.Queue(QUEUED) for _ in range(workers)]
        self._pipes = [Connection(request[1], readable=False) for request in requests]
        self._listeners = []
        for index, (_, reply) in enumerate(zip(requests, replies, strict=True)):
            pipe = Connection(reply[0], writable=False)
            self._listeners.append(threading.Thread(target=self._listen, args=(index, pipe), daemon=True))
            self._listeners[-1].start()
            outbox = (self._pipes[index], self._outboxes[index])
            threading.Thread(target=self._send, args=outbox, daemon=True).start()

    def __len__(self) -> int:
        return len(self._outboxes)

    def send(self, worker: int, fields: dict[str, Any], blob: bytes = b"") -> None:
        """Queue a frame; blocks while the worker's queue is full."""
        while True:
            try:
                return self._outboxes[worker].put((fields, blob), timeout=0.5)
            except queue.Full:  # busy; or dead, and then nobody will ever make room
                if worker in self._ended:
                    raise WeftError(DIED) from None

    def poll(self) -> Frame | None:
        """A frame that has arrived already."""
        return None if self._inbox.empty() else self.receive()

    def receive(self) -> Frame:
        """The next frame of any worker."""
        fields, blob = self._inbox.get()
        if fields.get("ended"):
            raise WeftError(DIED)
        if "error" in fields:
            raise WeftError(fields["error"])
        return fields, blob

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its forks too
            process.wait()
        for listener in self._listeners:
            listener.join()  # it ends when the last process has closed the pipe
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # what was not sent has no reader
                pipe.close()

    def _listen(self, worker: int, pipe: Connection) -> None:
        with pipe:
            try:
                while True:
                    self._inbox.put(receive(pipe))
            except (EOFError, OSError):
                self._ended.add(worker)
                self._inbox.put(({"ended": True}, b""))

    def _send(self, pipe: Connection, outbox: queue.Queue[Frame]) -> None:
        try:
            while True:
                send(pipe, *outbox.get())
        except (OSError, ValueError):  # ValueError: it was closed meanwhile
            self._inbox.put(({"ended": True}, b""))


def _start(ends: list[tuple[int, int]]) -> subprocess.Popen[bytes]:
    """One process that becomes as many workers as it gets pairs of pipe ends."""
    pairs = [f"{request}:{reply}" for request, reply in ends]
    return subprocess.Popen(
        [sys.executable, "-c", "from weft.engines.workers import main; main()", str(os.getpid()), *pairs],
        stdin=subprocess.DEVNULL,
        pass_fds=[end for pair in ends for end in pair],
        env={**os.environ, **ENVIRONMENT},
        process_group=0,  # Ctrl-C is for the parent alone, which ends them
    )


class WorkerEngine:
    """Each client belongs to one worker, which keeps its state in memory between rounds."""

    def __init__(self, plan: Plan, folder: Path, saved: EngineState, memory: int, pool: WorkerPool):
        self._pool, self._unanswered = pool, 0
        for worker in range(len(pool)):
            mine = [client for client in saved.clients if client % len(pool) == worker]
            fields = {
                "do": "start",
                "plan": plan.model_dump(),
                "folder": str(folder),
                "memory": max(1, memory // len(pool)),
                "clients": {client: saved.clients[client] for client in mine},
                "answered": {client: saved.answered[client] for client in mine},
            }
            pool.send(worker, fields)  # they start while this process continues

    def submit(self, request: Request) -> None:
        fields = {"do": "answer", "client": request.client, "request_id": request.request_id}
        self._pool.send(request.client % len(self._pool), fields, request.wire)
        self._unanswered += 1

    def ready(self) -> Reply | None:
        frame = self._pool.poll()
        return None if frame is None else self._reply(*frame)

    def replies(self) -> Iterator[Reply]:
        while self._unanswered:
            yield self._reply(*self._pool.receive())

    def _reply(self, fields: dict[str, Any], wire: bytes) -> Reply:
        self._unanswered -= 1
        return Reply(fields["client"], wire, fields["seconds"], fields["request_id"])

    def save(self) -> EngineState:
        for worker in range(len(self._pool)):
            self._pool.send(worker, {"do": "save"})
        state = EngineState()
        for _ in range(len(self._pool)):
            fields, _ = self._pool.receive()
            part = EngineState.of(fields["clients"], fields["answered"])
            state.clients |= part.clients
            state.answered |= part.answered
        return state


# ---- a worker --------------------------------------------------------------------------------------------------------


def main() -> None:
    """`PARENT REQUESTS:REPLIES...`: for each pair of pipe ends a worker; all but the first are forks of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    os.dup2(2, 1)  # what a library prints goes to the terminal
    parent, ends = int(sys.argv[1]), [tuple(map(int, pair.split(":"))) for pair in sys.argv[2:]]
    mine = ends[0]
    if len(ends) > 1:
        parent, mine = _become_one_of(parent, ends)
    with _ending_with_parent(parent):
        _serve(Connection(mine[0], writable=False), Connection(mine[1], readable=False))
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


@contextlib.contextmanager
def _ending_with_parent(parent: int) -> Iterator[None]:
    enough = threading.Event()

    def watch() -> None:
        while not enough.wait(0.1):
            if os.getppid() != parent:
                os._exit(1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield
    enough.set()
    watcher.join()


def _serve(requests: Connection, replies: Connection) -> None:
    from weft.core.client import Runtime
    from weft.engines.host import ClientHost

    host: ClientHost | None = None
    with contextlib.suppress(EOFError):
        while True:
            fields, blob = receive(requests)
            try:
                if fields["do"] == "start":
                    saved = EngineState.of(fields["clients"], fields["answered"])
                    host = ClientHost(Runtime(Plan(**fields["plan"])), Path(fields["folder"]), fields["memory"], saved)
                    continue
                assert host is not None
                if fields["do"] == "answer":
                    began = time.perf_counter()
                    reply = host.answer(fields["client"], blob)
                    facts = {"client": fields["client"], "request_id": fields["request_id"]}
                    send(replies, {**facts, "seconds": time.perf_counter() - began}, reply)
                elif fields["do"] == "save":
                    state = host.save()
                    send(replies, {"clients": state.clients, "answered": state.answered})
            except WeftError as error:
                send(replies, {"error": str(error)})
            except Exception as error:  # a bug in a user's method: the parent prints one line, the rest is here
                traceback.print_exc()
                line = f"{type(error).__name__}: {error}"
                send(replies, {"error": f"a worker failed with {line}; its traceback is above"})
