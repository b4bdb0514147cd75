"""Processes that are kept alive: started again when they end, with patience, and stopped with their supervisor.

Flower refuses a site that was killed and comes back within a minute, so a process that ends at once is tried again and
again, after a pause that grows; one that had lived for a while is started again at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError
from weft.files import is_taken, write_text

LIVED = 30.0  # seconds after which a process had started well
LONGEST_PAUSE = 10.0
GRACE = 8.0  # seconds between asking a process to end and killing it
POLL = 0.2
FILE, LOCK = "processes.json", ".lock"

Say = Callable[[str], None]


@dataclass
class Kept:
    """One process to keep alive."""

    command: Callable[[], list[str]]  # made anew for each start: a port may be taken by now
    pid: int = 0
    starts: int = 0
    due: float = 0.0
    pause: float = 0.0
    began: float = 0.0
    failing: float = 0.0  # since when, in seconds since 1970, it ends soon after each start; 0: it does not
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)


class Supervisor:
    def __init__(self, folder: Path, commands: Mapping[str, Callable[[], list[str]]], env: dict[str, str], say: Say):
        self._folder, self._env, self._say = folder, env, say
        self._kept = {name: Kept(command) for name, command in commands.items()}
        self._stopping = False

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Until SIGTERM or SIGINT; `ready` is called once, when all processes have been started."""
        with hold(self._folder):
            end_leftovers(self._folder)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._stop)
            (self._folder / "logs").mkdir(exist_ok=True)
            try:
                self._turn()
                if ready is not None and not self._stopping:
                    ready()
                while not self._stopping:
                    self._turn()
                    time.sleep(POLL)
            finally:
                self._end_all()
                (self._folder / FILE).unlink(missing_ok=True)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _turn(self) -> None:
        changed = False
        for name, kept in self._kept.items():
            if kept.process is not None and kept.process.poll() is not None:
                _signal_group(kept.pid, signal.SIGKILL)  # what it had started outlives it and would pile up
                lived = time.monotonic() - kept.began
                kept.pause = 0.0 if lived > LIVED else min(LONGEST_PAUSE, 2 * kept.pause + 1)
                kept.due = time.monotonic() + kept.pause
                kept.failing = kept.failing or time.time()
                log = self._folder / "logs" / f"{name}.log"
                self._say(f"{name} ended with {kept.process.returncode} after {lived:.0f} s; started again ({log})")
                kept.process, changed = None, True
            if kept.failing and kept.process is not None and time.monotonic() - kept.began > LIVED:
                kept.failing, changed = 0.0, True
            if kept.process is None and time.monotonic() >= kept.due:
                self._start(name, kept)
                changed = True
        if changed:
            words = {
                name: {"pid": kept.pid, "starts": kept.starts, "failing": kept.failing}
                for name, kept in self._kept.items()
            }
            write_text(self._folder / FILE, json.dumps({"supervisor": os.getpid(), "processes": words}) + "\n")

    def _start(self, name: str, kept: Kept) -> None:
        with (self._folder / "logs" / f"{name}.log").open("ab") as log:
            kept.process = subprocess.Popen(
                kept.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self._folder,
                start_new_session=True,  # Ctrl-C is the supervisor's, which ends them in order
            )
        kept.pid, kept.began, kept.starts = kept.process.pid, time.monotonic(), kept.starts + 1

    def _end_all(self) -> None:
        alive = [kept.process for kept in self._kept.values() if kept.process is not None]
        for process in alive:
            _signal_group(process.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process in alive:
            _signal_group(process.pid, signal.SIGKILL)  # whatever it had started, too
            process.wait()


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Each process was started as the leader of a group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


@contextlib.contextmanager
def hold(folder: Path) -> Any:
    """One supervisor for a folder; the lock dies with it."""
    lock = filelock.FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise WeftError(f"{folder} is started already") from None
    try:
        yield
    finally:
        lock.release()


def running(folder: Path) -> dict[str, Any] | None:
    """What the supervisor of a folder says of its processes; None if there is none (`left_behind` if it was killed)."""
    if not is_taken(folder / LOCK):
        return None
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return found
    return {"supervisor": 0, "processes": {}}  # it has only just begun


def stop(folder: Path, patience: float = 30.0) -> bool:
    """End the supervisor of a folder and with it its processes; False if there was none."""
    found = running(folder)
    if found is None:
        with hold(folder):
            return end_leftovers(folder)  # of a supervisor that was killed
    end = time.monotonic() + patience
    while found is not None:
        if time.monotonic() > end:
            raise WeftError(f"what runs in {folder} does not end (process {found['supervisor']})")
        if found["supervisor"]:  # 0: it has not said yet who it is
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found["supervisor"]), signal.SIGTERM)
        time.sleep(POLL)
        found = running(folder)
    return True


def detach(folder: Path, kind: str, word: str, patience: float = 120.0) -> None:
    """Start `weft hub start` or `weft site start` as a process of its own; returns when it says `word`."""
    if running(folder) is not None:
        raise WeftError(f"{folder} is started already")
    (folder / "logs").mkdir(exist_ok=True)
    path = folder / "logs" / "supervisor.log"
    command = [sys.executable, "-m", "weft", kind, "start", "--folder", str(folder)]
    before = path.stat().st_size if path.exists() else 0
    with path.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    end = time.monotonic() + patience
    while word not in (said := path.read_bytes()[before:].decode(errors="replace")):
        if process.poll() is not None or time.monotonic() > end:
            raise WeftError(f"it did not start: {' '.join(said.split())[-300:]} (see {path})")
        time.sleep(POLL)


def end_leftovers(folder: Path) -> bool:
    """Processes of a supervisor that was killed go on by themselves and hold their ports: end those, by id and name.

    Says whether there were any.
    """
    found = _alive(folder)
    for words in found.values():
        _signal_group(words["pid"], signal.SIGKILL)
    (folder / FILE).unlink(missing_ok=True)
    return bool(found)


def left_behind(folder: Path) -> dict[str, dict[str, Any]]:
    """Processes that go on though their supervisor was killed, by name; none while there is a supervisor."""
    return {} if is_taken(folder / LOCK) else _alive(folder)


def _alive(folder: Path) -> dict[str, dict[str, Any]]:
    """The processes that a supervisor wrote down and that are still there."""
    try:
        found: dict[str, dict[str, Any]] = json.loads((folder / FILE).read_text(encoding="utf-8"))["processes"]
        return {name: words for name, words in found.items() if _is_ours(words["pid"], folder)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none was started, or it is no list of ours
        return {}


def _is_ours(pid: int, folder: Path) -> bool:
    """Does the process that has this id now work in the folder? Another may have got the id since."""
    with contextlib.suppress(OSError):
        return pid > 0 and Path(f"/proc/{pid}/cwd").resolve() == folder.resolve()
    return False
