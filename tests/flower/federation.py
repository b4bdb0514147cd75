"""A real federation on loopback: the commands of weft, each in a separate process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from weft.runs.folder import read_manifest

WEFT = [sys.executable, "-m", "weft"]


class Federation:
    def __init__(self, folder: Path, sites: tuple[str, ...]):
        self.folder, self.sites = folder, sites
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        self.port, self.public = free_port(), free_port()
        self.calls: Calls | None = None

    def weft(self, *words: str, code: int = 0, timeout: float = 300) -> str:
        done = subprocess.run(
            [*WEFT, *words], cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == code, (words, done.stdout, done.stderr)
        return done.stdout if code == 0 else done.stdout + done.stderr

    def start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        return self.processes[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def begin(self) -> None:
        """Hub and sites up; through nginx if there is one, else straight to the SuperLink."""
        address = ["--address", f"127.0.0.1:{self.public}"] if self.nginx else []
        self.weft("hub", "init", "--port", str(self.port), *address)
        self.start("hub", [*WEFT, "hub", "start"])
        for name in self.sites:
            self.weft("hub", "invite", name)
            self.weft("site", "join", f"{name}.json", "--folder", name)
        wait_until(lambda: "the hub is running" in self.log("hub"), 60)
        if self.nginx:
            hub = str(self.folder / "hub")
            self.start("nginx", [self.nginx, "-p", hub, "-c", "nginx.conf", "-g", "daemon off;"])
        for name in self.sites:
            self.start(name, [*WEFT, "site", "start", "--folder", name])

    def end(self) -> None:
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(40)

    def pid(self, folder: str, name: str) -> int:
        words = json.loads((self.folder / folder / "processes.json").read_text(encoding="utf-8"))
        pid: int = words["processes"][name]["pid"]
        return pid


class Calls(threading.Thread):
    """Poll the remote addresses of some processes until `end`."""

    def __init__(self, pids: Callable[[], list[int]]):
        super().__init__(daemon=True)
        self._pids, self._enough = pids, threading.Event()
        self.seen: set[str] = set()
        self.looks = 0

    def run(self) -> None:
        while not self._enough.wait(0.1):
            self.seen |= called(self._pids())
            self.looks += 1

    def end(self) -> set[str]:
        self._enough.set()
        self.join()
        return self.seen


def called(pids: list[int]) -> set[str]:
    """The remote addresses of all sockets of some processes: TCP and UDP, connected or trying to."""
    own = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(str(path.readlink()))
    found = set()
    for table, family in (
        ("tcp", socket.AF_INET),
        ("udp", socket.AF_INET),
        ("tcp6", socket.AF_INET6),
        ("udp6", socket.AF_INET6),
    ):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            remote, inode = words[2].split(":")[0], words[9]
            if f"socket:[{inode}]" in own and int(remote, 16):
                raw = bytes.fromhex(remote)
                turned = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.add(socket.inet_ntop(family, turned))
    return found


def descendants(pids: Iterable[int]) -> list[int]:
    """Some processes and their descendants."""
    above = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                above[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    found = list(pids)
    for one in found:  # the list grows meanwhile
        found += [pid for pid, parent in above.items() if parent == one]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(true: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not after {seconds} s"
        time.sleep(0.1)


def child(parent: int, word: str) -> int | None:
    """The descendant of a process whose command contains `word`."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                above = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            found[int(path.name)] = (above, line)
    for pid, (above, line) in found.items():
        while above in found and above != parent:
            above = found[above][0]
        if above == parent and word in line:
            return pid
    return None


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()]


def outcome(run: Path) -> dict[str, Any]:
    """The result of a run to the bit: global weights, each A of the knowledge base, the tables."""
    manifest = read_manifest(run / "checkpoints")
    assert manifest is not None
    server = manifest["server"]  # the checksum of each file is next to its name
    found = {
        "server": server["file"][1],
        **{f"A {key}": mark[1] for key, mark in sorted(server["tables"]["knowledge"].items())},
    }
    for table in ("accuracy.csv", "ledger.csv"):
        found[table] = hashlib.sha256((run / table).read_bytes()).hexdigest()
    return found


def is_busy(site: Path) -> bool:
    """Is a client app working at this site? It holds the lock of the run's folder."""
    import filelock

    for path in site.glob("state/*/.lock"):
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
            lock.release()
        except filelock.Timeout:
            return True
    return False


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
