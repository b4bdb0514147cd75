"""The page while a run goes on: served on this machine alone, and asked for news about once a second.

The folder may not be there yet, its last line may be half written, the run may be killed or end while it is watched:
the page says so in words and goes on. Nothing is written, and no lock is taken.
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
from weft.report.facts import group
from weft.report.page import contents, page
from weft.report.reading import Reader, Run, find_runs, is_run
from weft.report.screens import duration
from weft.runs.folder import way_on

HERE = "127.0.0.1"
QUIET = 30.0  # seconds without a new line after which a run may have been stopped ...
PATIENCE = 5  # ... or so many times the longest wait so far, where rounds take longer
REST = 3  # reading may take one part in so many of the time
WATCHED = ("journal.jsonl", "accuracy.csv", "ledger.csv", "summary.json", "contents.json", "checkpoints/manifest.json")


class Watcher:
    """Knows what a folder last said; reads it again when it changed, and not more often than reading costs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._readers: dict[Path, Reader] = {}
        self._lock = Lock()
        self._signature: tuple[Any, ...] | None = None
        self._content: dict[str, Any] = {}
        self._cost, self._read_at = 0.0, 0.0

    def content(self) -> dict[str, Any]:
        with self._lock:
            if self._content and time.monotonic() - self._read_at < REST * self._cost:
                return self._content
            signature = self._look()
            if signature != self._signature:
                self._signature = signature
                began = time.monotonic()
                self._content = self._read()
                self._read_at = time.monotonic()
                self._cost = self._read_at - began
            return self._content

    def page(self) -> str:
        """The page as it opens; what it then asks for is `content`."""
        with self._lock:
            runs, live = self._runs()
        return page(group(runs), live)

    def _look(self) -> tuple[Any, ...]:
        """What tells whether anything changed: sizes and times of files, and the clock in steps of some seconds."""
        found: list[Any] = [int(time.time() // 5)]  # words such as "for 40 s" grow old
        for folder in _run_folders(self.folder):
            for name in WATCHED:
                try:
                    status = (folder / name).stat()
                    found.append((name, status.st_size, status.st_mtime_ns))
                except OSError:
                    found.append((name, None))
        return tuple(found)

    def _runs(self) -> tuple[list[Run], dict[str, Any]]:
        try:
            folders = _run_folders(self.folder)
            for folder in folders:
                self._readers.setdefault(folder, Reader(folder))
            runs = [self._readers[folder].read() for folder in folders]
            return runs, status(self.folder, runs, time.time())
        except (WeftError, OSError) as problem:
            return [], {"kind": "stopped", "words": f"{self.folder} cannot be read just now: {problem}"}

    def _read(self) -> dict[str, Any]:
        runs, live = self._runs()
        content = contents(group(runs), live)
        version = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        return {**content, "version": version}


def _run_folders(folder: Path) -> list[Path]:
    if is_run(folder):
        return [folder]
    return find_runs([folder]) if any(folder.glob("*/run.json")) else []


# ---- how far it is ---------------------------------------------------------------------------------------------------


def status(folder: Path, runs: Sequence[Run], now: float) -> dict[str, Any]:
    """Progress, time left, and a sentence: waiting, running, over or stopped."""
    if not runs:
        there = "holds no run yet" if folder.exists() else "is not there yet"
        return {"kind": "waiting", "words": f"Waiting: {folder} {there}. It will be shown when a run begins in it."}
    done, total = sum(map(done_of, runs)), sum(map(total_of, runs))
    shown = {"done": done, "total": total}
    going = [run for run in runs if run.summary is None]
    if not going:
        return {**shown, "done": total, "kind": "over", "over": True, "words": "The run is over; this is its result."}
    run = going[-1]
    place = f"{done} of {total} client rounds done"
    if run.rounds:
        at = run.rounds[-1]
        place = f"task {at.step} of {run.steps}, round {at.round} of {run.rounds_of(at.step)}; {place}"
    quiet = now - last_sign(run, now)
    if is_working(run, quiet):
        left = time_left(run)
        told = f"about {duration(left)} left" if left is not None else "time left is known after the first rounds"
        return {**shown, "kind": "running", "words": f"Running: {place}, {told}."}
    words = f"Nothing has been written for {duration(quiet)} ({place}). If it was stopped: {way_on(run.folder)}"
    return {**shown, "kind": "stopped", "words": words}


def done_of(run: Run) -> int:
    return total_of(run) if run.summary is not None else min(len(run.rounds), total_of(run))


def total_of(run: Run) -> int:
    """Rounds of a client in the whole plan; those that are not chosen rest, unless nothing is sent."""
    each = run.clients
    chosen = run.plan.get("clients_per_round", "all")
    if isinstance(chosen, int) and not run.plan.get("train_unchosen") and run.sent:
        each = chosen
    return each * run.steps * run.rounds_per_task


def last_sign(run: Run, otherwise: float) -> float:
    return max([item.at for item in run.rounds] + [event.at for event in run.events], default=otherwise)


def is_working(run: Run, quiet: float) -> bool:
    if run.held:
        return True
    if run.held is False and quiet > QUIET / PATIENCE:  # nobody holds it on this machine
        return False
    return quiet < max(QUIET, PATIENCE * longest_wait(run))


def longest_wait(run: Run) -> float:
    times = sorted(item.at for item in run.rounds)
    return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)


def time_left(run: Run) -> float | None:
    """At the pace of the session that is going on; the first answer stands for the time it took to start."""
    began = max((event.at for event in run.events if event.event in ("created", "resumed")), default=0.0)
    times = sorted(item.at for item in run.rounds if item.at >= began)
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    pace = (times[-1] - times[0]) / (len(times) - 1)
    return pace * max(0, total_of(run) - done_of(run))


# ---- the server ------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path, port: int):
        try:
            super().__init__((HERE, port), Handler)
        except OSError as error:
            raise WeftError(
                f"port {port} cannot be used ({error.strerror}); choose another --port, or 0 for any"
            ) from None
        except OverflowError:
            raise WeftError(f"port {port} cannot be used; choose 0 to 65535") from None
        self.watcher = Watcher(folder)

    @property
    def url(self) -> str:
        return f"http://{HERE}:{self.server_port}/"

    @property
    def names(self) -> set[str]:
        """By which this server may be called: another name that leads here belongs to somebody else's page."""
        return {f"{name}:{self.server_port}" for name in (HERE, "localhost")}


class Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "weft", ""

    def do_GET(self) -> None:
        if self.headers.get("Host", "") not in self.server.names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"weft watch answers to its own address alone\n")
            return
        path = urlsplit(self.path)
        if path.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.watcher.page().encode("utf-8"))
        elif path.path == "/news":
            content = self.server.watcher.content()
            if parse_qs(path.query).get("since") == [content["version"]]:
                self._answer(HTTPStatus.NO_CONTENT, "application/json", b"")
            else:
                self._answer(HTTPStatus.OK, "application/json", json.dumps(content).encode("utf-8"))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is nothing here\n")

    def _answer(self, code: HTTPStatus, kind: str, body: bytes) -> None:
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
            self.close_connection = True  # the reader has closed the page

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's word
        """A request a second is nothing to tell."""
