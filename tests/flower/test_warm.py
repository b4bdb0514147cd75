"""The program that Flower finds at a site, and the warm process that does its work: real processes, and no hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from federation import wait_until

from weft.flower import warm

STAND_IN = """
import os, sys, time
import weft.flower.runner as runner

def main():
    print(os.getppid(), os.getcwd(), sys.argv[1:], os.environ.get("MARK"), flush=True)
    if "slow" in sys.argv:
        open(sys.argv[2], "w").write(str(os.getpid()))
        time.sleep(60)
    sys.exit(7)

runner.main = main
from weft.flower import warm
warm.serve()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    found = tmp_path / "flwr-clientapp"
    found.write_text(warm.knock(tmp_path))
    found.chmod(0o700)
    return found


@pytest.fixture
def warm_process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", STAND_IN], cwd=tmp_path)
    wait_until(lambda: (tmp_path / warm.SOCKET).exists(), 60)
    yield process
    process.kill()
    process.wait()


def test_a_fork_does_the_work_as_if_it_were_the_program(program, warm_process, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    began = time.monotonic()
    done = subprocess.run(
        [program, "--token", "x"], cwd=elsewhere, env={**os.environ, "MARK": "here"}, capture_output=True, text=True
    )
    assert done.returncode == 7
    assert done.stdout == f"{warm_process.pid} {elsewhere} ['--token', 'x'] here\n"
    assert time.monotonic() - began < 2  # nothing was loaded
    assert (tmp_path / warm.SOCKET).stat().st_mode & 0o777 == 0o600


def test_when_the_program_is_killed_the_fork_ends(program, warm_process, tmp_path):
    told = tmp_path / "pid"
    asking = subprocess.Popen([program, "slow", told])
    wait_until(lambda: told.exists() and told.read_text(), 20)
    fork = int(told.read_text())
    assert Path(f"/proc/{fork}").exists()
    asking.send_signal(signal.SIGKILL)
    asking.wait()
    wait_until(lambda: not Path(f"/proc/{fork}").exists(), 5)
    assert warm_process.poll() is None


@pytest.mark.parametrize("stale", [False, True])
def test_without_a_warm_process_the_program_works_by_itself(program, stale, tmp_path):
    if stale:  # what a killed one leaves behind
        import socket

        here = Path.cwd()
        os.chdir(tmp_path)
        try:
            with socket.socket(socket.AF_UNIX) as door:
                door.bind(warm.SOCKET)
        finally:
            os.chdir(here)
    done = subprocess.run([program, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--token" in done.stdout
