"""The page of a run in progress, served on this machine only; the page polls it about once a second.

The folder may not exist yet, its last line may be incomplete, the run may be killed or finish meanwhile: the page says
so and continues. Nothing is written and no lock is taken.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from weft.errors import WeftError
from weft.report.facts import Group, group
from weft.report.page import contents, page
from weft.report.reading import Reader, Run, find_runs, is_run
from weft.report.text import duration
from weft.runs.folder import resume_command

HOST = "127.0.0.1"
QUIET = 30.0  # seconds without a new line after which a run may have stopped ...
PATIENCE = 5  # ... or this many times its longest pause so far
REST = 3  # reading takes at most one part in REST of the time
WATCHED = ("journal.jsonl", "accuracy.csv", "ledger.csv", "summary.json", "contents.json", "checkpoints/manifest.json")


class Watcher:
    """Reads a folder again when a file has changed, but not more often than reading costs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._readers: dict[Path, Reader] = {}
        self._lock = Lock()
        self._signature: list[Any] = []
        self._content: dict[str, Any] = {}
        self._cost, self._read_at = 0.0, 0.0
        contents([])  # compile the templates now: it is not a cost of reading

    def content(self) -> dict[str, Any]:
        """What the page polls, with a version."""
        with self._lock:
            if self._content and time.monotonic() - self._read_at < REST * self._cost:
                return self._content
            signature = self._look()
            if signature != self._signature:
                start, self._signature = time.monotonic(), signature
                content = contents(*self._read())
                version = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
                self._content = {**content, "version": version}
                self._read_at = time.monotonic()
                self._cost = self._read_at - start
            return self._content

    def page(self) -> str:
        with self._lock:
            return page(*self._read())

    def _look(self) -> list[Any]:
        """Changes with sizes and times of files, and every five seconds: texts such as "for 40 s" get old."""
        found: list[Any] = [int(time.time() // 5)]
        for folder in _run_folders(self.folder):
            for name in WATCHED:
                try:
                    status = (folder / name).stat()
                    found.append((name, status.st_size, status.st_mtime_ns))
                except OSError:
                    found.append((name, None))
        return found

    def _read(self) -> tuple[list[Group], dict[str, Any]]:
        try:
            runs = [self._readers.setdefault(folder, Reader(folder)).read() for folder in _run_folders(self.folder)]
            return group(runs), status(self.folder, runs, time.time())
        except (WeftError, OSError) as error:
            return [], {"kind": "stopped", "text": f"{self.folder} cannot be read at the moment: {error}", "total": 0}


def _run_folders(folder: Path) -> list[Path]:
    return find_runs([folder]) if is_run(folder) or any(folder.glob("*/run.json")) else []


# ---- progress --------------------------------------------------------------------------------------------------------


def status(folder: Path, runs: Sequence[Run], now: float) -> dict[str, Any]:
    """Progress, time left, and a sentence; the kind is waiting, running, finished or stopped."""
    if not runs:
        state = "holds no run yet" if folder.exists() else "does not exist yet"
        text = f"Waiting: {folder} {state}. The page shows a run when it starts."
        return {"kind": "waiting", "text": text, "total": 0}
    done, total = sum(map(rounds_done, runs)), sum(map(rounds_planned, runs))
    shown = {"done": done, "total": total}
    unfinished = [run for run in runs if run.summary is None]
    if not unfinished:
        return {**shown, "kind": "finished", "over": True, "text": "The run is finished; this is its result."}
    run = unfinished[-1]
    progress = f"{done} of {total} client rounds done"
    if run.rounds:
        last = run.rounds[-1]
        progress = f"task {last.task} of {run.tasks}, round {last.round} of {run.rounds_of(last.task)}; {progress}"
    quiet = now - max([item.at for item in run.rounds] + [event.at for event in run.events], default=now)
    if is_working(run, quiet):
        left = time_left(run)
        estimate = "time left is known after the first rounds" if left is None else f"about {duration(left)} left"
        return {**shown, "kind": "running", "text": f"Running: {progress}, {estimate}."}
    text = f"Nothing has been written for {duration(quiet)} ({progress})."
    return {**shown, "kind": "stopped", "text": f"{text} If the run was stopped: {resume_command(run.folder)}"}


def rounds_done(run: Run) -> int:
    return rounds_planned(run) if run.summary is not None else min(len(run.rounds), rounds_planned(run))


def rounds_planned(run: Run) -> int:
    """Rounds of all clients in the whole plan; clients that are not selected rest, unless nothing is sent."""
    selected = run.plan.get("clients_per_round", "all")
    resting = isinstance(selected, int) and not run.plan.get("train_unchosen") and run.sent
    return (selected if resting else run.clients) * run.tasks * run.rounds_per_task


def is_working(run: Run, quiet: float) -> bool:
    """Is a process working on the run? By its lock where that is known, else by how long nothing was written."""
    if run.held:
        return True
    if run.held is False and quiet > QUIET / PATIENCE:  # no process of this machine holds it
        return False
    times = sorted(item.at for item in run.rounds)
    longest = max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)
    return quiet < max(QUIET, PATIENCE * longest)


def time_left(run: Run) -> float | None:
    """At the pace since the run was started or resumed; its first reply is left out, as it includes the start."""
    start = max((event.at for event in run.events if event.kind in ("created", "resumed")), default=0.0)
    times = sorted(item.at for item in run.rounds if item.at >= start)
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    pace = (times[-1] - times[0]) / (len(times) - 1)
    return pace * max(0, rounds_planned(run) - rounds_done(run))


# ---- the server ------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, port: int):
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "not in 0 to 65535"
            raise WeftError(f"port {port} cannot be used ({reason}); choose another --port, or 0 for any") from None
        self.watcher = Watcher(folder)
        self.url = f"http://{HOST}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "weft", ""

    def do_GET(self) -> None:
        names = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        if self.headers.get("Host", "") not in names:  # a name of another page that leads here
            self._reply(HTTPStatus.FORBIDDEN, "text/plain", b"weft watch accepts requests to its own address only\n")
            return
        path = urlsplit(self.path)
        if path.path == "/":
            self._reply(HTTPStatus.OK, "text/html", self.server.watcher.page().encode("utf-8"))
        elif path.path == "/updates":
            content = self.server.watcher.content()
            if parse_qs(path.query).get("since") == [content["version"]]:
                self._reply(HTTPStatus.NO_CONTENT, "application/json", b"")
            else:
                self._reply(HTTPStatus.OK, "application/json", json.dumps(content).encode("utf-8"))
        else:
            self._reply(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def _reply(self, code: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        try:
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page was closed

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - name in the base class
        """Log nothing: there is a request every second."""
