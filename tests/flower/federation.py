"""A real federation on loopback: the commands of weft, each in a separate process."""

from __future__ import annotations

import contextlib
import hashlib
import json
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

import psutil

from weft.files import is_taken
from weft.runs.folder import read_manifest

TINY = {
    "clients": 2,
    "tasks": 2,
    "network": "mlp",
    "rounds_per_task": 2,
    "batch_size": 5,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}
WEFT = [sys.executable, "-m", "weft"]


class Federation:
    def __init__(self, folder: Path, sites: tuple[str, ...]):
        self.folder, self.sites = folder, sites
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
        self.port, self.public = free_port(), free_port()

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

    def process(self, folder: str, name: str) -> psutil.Process:
        """A process of a supervisor."""
        facts = json.loads((self.folder / folder / "processes.json").read_text(encoding="utf-8"))
        return psutil.Process(facts["processes"][name]["pid"])


class Calls(threading.Thread):
    """Poll the remote addresses of the descendants of some processes until `end`."""

    def __init__(self, *pids: int):
        super().__init__(daemon=True)
        self._pids, self._enough = pids, threading.Event()
        self.seen: set[str] = set()
        self.looks = 0

    def run(self) -> None:
        while not self._enough.wait(0.1):
            self.seen |= called(descendants(*self._pids))
            self.looks += 1

    def end(self) -> None:
        self._enough.set()
        self.join()


def called(processes: Iterable[psutil.Process]) -> set[str]:
    """The remote addresses of all sockets of some processes: TCP and UDP, connected or trying to."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {each.raddr.ip for each in process.net_connections("inet") if each.raddr}
    return found


def descendants(*pids: int) -> list[psutil.Process]:
    """Some processes and their descendants."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found += [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
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


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()]


def outcome(run: Path) -> dict[str, Any]:
    """The result of a run to the bit: global weights, each A (or other entry) of the knowledge base, the tables."""
    manifest = read_manifest(run / "checkpoints")
    assert manifest is not None
    server = manifest["server"]  # the checksum of each file is next to its name
    found = {
        "server": server["file"][1],
        **{f"A {key}": mark[1] for table in server["tables"].values() for key, mark in sorted(table.items())},
    }
    for table in ("accuracy.csv", "ledger.csv"):
        found[table] = hashlib.sha256((run / table).read_bytes()).hexdigest()
    return found


def is_busy(site: Path) -> bool:
    """Is a client app working at this site? It holds the lock of the run's folder."""
    return any(is_taken(path) for path in site.glob("state/*/.lock"))
