"""Processes that are kept alive: real ones, killed by their ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from weft.errors import WeftError
from weft.flower.hub import supervisor as supervision

KEEPER = """
import sys
import threading
from pathlib import Path
from weft.flower.hub.supervisor import Supervisor
command = lambda: [sys.executable, "-c", "import time; time.sleep(60)"]
Supervisor(Path(sys.argv[1]), {"sleeper": command}, {}, lambda line: print(line, flush=True)).run()
"""


@pytest.fixture
def keeper(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KEEPER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def pid_of(folder, other_than=0):
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            pid = json.loads((folder / supervision.FILE).read_text())["processes"]["sleeper"]["pid"]
            if pid != other_than:
                return pid
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("no process")


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
def test_what_is_killed_is_started_again_and_stopped_with_its_supervisor(tmp_path, keeper):
    first = pid_of(tmp_path)
    os.kill(first, signal.SIGKILL)
    second = pid_of(tmp_path, other_than=first)
    assert "sleeper ended with -9" in keeper.stdout.readline()
    with pytest.raises(WeftError, match="started already"), supervision.hold(tmp_path):
        pass
    assert supervision.stop(tmp_path)
    assert keeper.wait(10) == 0
    assert not is_alive(second)
    assert not supervision.stop(tmp_path)


def test_what_a_killed_supervisor_leaves_is_ended_by_the_next(tmp_path, keeper):
    orphan = pid_of(tmp_path)
    keeper.kill()
    keeper.wait()
    assert is_alive(orphan)
    supervision.end_leftovers(tmp_path)
    end = time.monotonic() + 10
    while is_alive(orphan) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(orphan)


def test_nobody_elses_process_is_ended(tmp_path):
    """Its id may belong to another process by now."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as somebody_elses:
        words = {"supervisor": 0, "processes": {"sleeper": {"pid": somebody_elses.pid, "starts": 1}}}
        (tmp_path / supervision.FILE).write_text(json.dumps(words))
        supervision.end_leftovers(tmp_path)
        time.sleep(0.2)
        assert somebody_elses.poll() is None
        somebody_elses.kill()


def test_whoever_looks_does_not_keep_another_from_starting(tmp_path):
    """`weft hub status` again and again, while `weft hub start` begins."""
    ended = threading.Event()

    def look():
        while not ended.is_set():
            supervision.running(tmp_path)

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for _ in range(300):
            with supervision.hold(tmp_path):
                assert supervision.running(tmp_path) is not None
    finally:
        ended.set()
        looker.join()
    assert supervision.running(tmp_path) is None


def test_it_is_written_down_since_when_a_process_does_not_stay(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    keeper = supervision.Supervisor(tmp_path, {"sleeper": lambda: command}, {}, lambda line: None)

    def failing() -> float:
        keeper._turn()
        return json.loads((tmp_path / supervision.FILE).read_text())["processes"]["sleeper"]["failing"]

    try:
        assert failing() == 0
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        keeper._kept["sleeper"].process.wait()
        since = failing()
        assert abs(since - time.time()) < 10
        keeper._kept["sleeper"].due = 0.0  # there is a pause before it is started again
        assert failing() == since
        monkeypatch.setattr(supervision, "LIVED", 0.0)  # from now on it has lived for long
        assert failing() == 0
    finally:
        keeper._end_all()
