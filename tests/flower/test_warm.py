"""The launcher that Flower starts at a site, and the fork server: real processes without a hub."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import wait_until

from weft.flower import warm

SERVER = """
import os, sys, time
import weft.flower.client_app as client_app

def main():
    print(os.getppid(), os.getcwd(), sys.argv[1:], os.environ.get("MARK"), flush=True)
    if "slow" in sys.argv:
        open(sys.argv[2], "w").write(str(os.getpid()))
        time.sleep(60)
    sys.exit(7)

client_app.main = main
from weft.flower import warm
warm.serve()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    found = tmp_path / "flwr-clientapp"
    found.write_text(warm.launcher(tmp_path))
    found.chmod(0o700)
    return found


@pytest.fixture
def fork_server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], cwd=tmp_path)
    wait_until(lambda: (tmp_path / warm.SOCKET).exists(), 60)
    yield process
    process.kill()
    process.wait()


def test_a_fork_works_in_place_of_the_launcher(program, fork_server, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    began = time.monotonic()
    done = subprocess.run(
        [program, "--token", "x"], cwd=elsewhere, env={**os.environ, "MARK": "here"}, capture_output=True, text=True
    )
    assert done.returncode == 7
    assert done.stdout == f"{fork_server.pid} {elsewhere} ['--token', 'x'] here\n"
    assert time.monotonic() - began < 2  # nothing is loaded
    assert (tmp_path / warm.SOCKET).stat().st_mode & 0o777 == 0o600


def test_the_fork_ends_when_the_launcher_is_killed(program, fork_server, tmp_path):
    path = tmp_path / "pid"
    asking = subprocess.Popen([program, "slow", path])
    wait_until(lambda: path.exists() and path.read_text(), 20)
    fork = int(path.read_text())
    assert Path(f"/proc/{fork}").exists()
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    wait_until(lambda: not Path(f"/proc/{fork}").exists(), 5)
    assert fork_server.poll() is None


@pytest.mark.parametrize("stale", [False, True])
def test_without_a_fork_server_the_launcher_does_the_work(program, stale, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if stale:  # the socket of a killed server
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(warm.SOCKET)
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--token" in done.stdout
