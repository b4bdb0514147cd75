"""A supervisor that restarts processes when they end, and stops them when it is stopped.

Flower rejects a killed site that comes back within a minute, so a process that ends right after its start is restarted
after a pause that grows; one that had run for a while is restarted at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError
from weft.files import is_taken, write_json

STABLE = 30.0  # seconds after which a start has succeeded
MAX_PAUSE = 10.0
GRACE = 8.0  # seconds between SIGTERM and SIGKILL
POLL = 0.2
FILE, LOCK = "processes.json", ".lock"

Say = Callable[[str], None]
Processes = dict[str, dict[str, Any]]  # by name: pid, starts, failing


@dataclass
class Child:
    """One process to keep running."""

    command: Callable[[], list[str]]  # called for each start: a port may be taken by then
    pid: int = 0
    starts: int = 0
    due: float = 0.0
    pause: float = 0.0
    started: float = 0.0
    failing: float = 0.0  # since when (seconds since 1970) it ends right after each start; 0: it does not
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)


class Supervisor:
    def __init__(self, folder: Path, commands: Mapping[str, Callable[[], list[str]]], env: dict[str, str], say: Say):
        self._folder, self._env, self._say = folder, env, say
        self._children = {name: Child(command) for name, command in commands.items()}
        self._stopping = False

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Run until SIGTERM or SIGINT; call `ready` once after all processes have been started."""
        with hold(self._folder):
            kill_orphans(self._folder)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._stop)
            (self._folder / "logs").mkdir(exist_ok=True)
            try:
                self._check()
                if ready is not None and not self._stopping:
                    ready()
                while not self._stopping:
                    self._check()
                    time.sleep(POLL)
            finally:
                self._end_all()
                (self._folder / FILE).unlink(missing_ok=True)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _check(self) -> None:
        changed = False
        for name, child in self._children.items():
            lived, log = time.monotonic() - child.started, self._folder / "logs" / f"{name}.log"
            if child.process is not None and child.process.poll() is not None:
                _signal_group(child.pid, signal.SIGKILL)  # its own children would outlive it and pile up
                child.pause = 0.0 if lived > STABLE else min(MAX_PAUSE, 2 * child.pause + 1)
                child.due = time.monotonic() + child.pause
                child.failing = child.failing or time.time()
                self._say(f"{name} ended with code {child.process.returncode} after {lived:.0f} s; restarting ({log})")
                child.process, changed = None, True
            if child.failing and child.process is not None and lived > STABLE:
                child.failing, changed = 0.0, True
            if child.process is None and time.monotonic() >= child.due:
                child.process = start_process(child.command(), log, self._folder, self._env)
                child.pid, child.started, child.starts = child.process.pid, time.monotonic(), child.starts + 1
                changed = True
        if changed:
            children = self._children.items()
            facts = {
                name: {key: getattr(child, key) for key in ("pid", "starts", "failing")} for name, child in children
            }
            write_json(self._folder / FILE, {"supervisor": os.getpid(), "processes": facts})

    def _end_all(self) -> None:
        alive = [child.process for child in self._children.values() if child.process is not None]
        for process in alive:
            _signal_group(process.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process in alive:
            _signal_group(process.pid, signal.SIGKILL)  # and its children
            process.wait()


def start_process(
    command: list[str], log: Path, folder: Path, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """As the leader of a new group: Ctrl-C reaches only the supervisor, which ends its processes in order."""
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env, cwd=folder, start_new_session=True
        )


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """One supervisor per folder; the lock is released when it dies."""
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            yield
    except filelock.Timeout:
        raise WeftError(f"{folder} is already started") from None


def running(folder: Path) -> dict[str, Any] | None:
    """The supervisor of a folder and its processes; None if there is none (see `orphans` if it was killed)."""
    if not is_taken(folder / LOCK):
        return None
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return found
    return {"supervisor": 0, "processes": {}}  # it is just starting


def stop(folder: Path, patience: float = 30.0) -> bool:
    """Stop the supervisor of a folder and its processes; False if there was none."""
    found = running(folder)
    if found is None:
        with hold(folder):
            return kill_orphans(folder)
    end = time.monotonic() + patience
    while found is not None:
        if time.monotonic() > end:
            raise WeftError(f"process {found['supervisor']} in {folder} does not end; kill {found['supervisor']}")
        if found["supervisor"]:  # 0: it has not written its id yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(found["supervisor"]), signal.SIGTERM)
        time.sleep(POLL)
        found = running(folder)
    return True


def detach(folder: Path, kind: str, ready: str, patience: float = 120.0) -> None:
    """Run `weft hub start` or `weft site start` in the background; return when its output contains `ready`."""
    if running(folder) is not None:
        raise WeftError(f"{folder} is already started")
    (folder / "logs").mkdir(exist_ok=True)
    log = folder / "logs" / "supervisor.log"
    before = log.stat().st_size if log.exists() else 0
    process = start_process([sys.executable, "-m", "weft", kind, "start", "--folder", str(folder)], log, folder)
    end = time.monotonic() + patience
    while ready not in (output := log.read_bytes()[before:].decode(errors="replace")):
        if process.poll() is not None or time.monotonic() > end:
            raise WeftError(f"it did not start: {' '.join(output.split())[-300:]} (see {log})")
        time.sleep(POLL)


def kill_orphans(folder: Path) -> bool:
    """Kill processes of a killed supervisor, which still hold their ports; False if there were none."""
    found = _alive(folder)
    for facts in found.values():
        _signal_group(facts["pid"], signal.SIGKILL)
    (folder / FILE).unlink(missing_ok=True)
    return bool(found)


def orphans(folder: Path) -> Processes:
    """Processes that still run though their supervisor was killed; none while there is a supervisor."""
    return {} if is_taken(folder / LOCK) else _alive(folder)


def _alive(folder: Path) -> Processes:
    """Processes that a supervisor has recorded and that still run in the folder; the system reuses process ids."""
    try:
        found: Processes = json.loads((folder / FILE).read_text(encoding="utf-8"))["processes"]
        home = folder.resolve()
        return {name: facts for name, facts in found.items() if Path(f"/proc/{facts['pid']}/cwd").resolve() == home}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
