"""The supervisor with real processes, killed by their ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from weft.errors import WeftError
from weft.files import read_json
from weft.flower.hub import supervisor

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
SUPERVISOR = f"""
import sys
from pathlib import Path
from weft.flower.hub.supervisor import Supervisor
Supervisor(Path(sys.argv[1]), {{"sleeper": lambda: {SLEEP}}}, {{}}, lambda line: print(line, flush=True)).run()
"""


@pytest.fixture
def process(tmp_path):
    started = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


def wait_until(true):
    end = time.monotonic() + 20
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def pid_of(folder, other_than=0):
    """Of the process that a supervisor has started."""

    def recorded():
        facts = read_json(folder / supervisor.FILE, {})
        pid = facts and facts["processes"]["sleeper"]["pid"]
        return pid if pid != other_than else 0

    return wait_until(recorded)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_killed_process_is_restarted_and_stopped_with_its_supervisor(tmp_path, process):
    first = pid_of(tmp_path)
    os.kill(first, signal.SIGKILL)
    second = pid_of(tmp_path, other_than=first)
    assert "sleeper ended with code -9" in process.stdout.readline()
    with pytest.raises(WeftError, match=str(tmp_path)), supervisor.hold(tmp_path):
        pass
    assert supervisor.stop(tmp_path)
    assert process.wait(10) == 0
    assert not is_alive(second)
    assert not supervisor.stop(tmp_path)


def test_orphans_of_a_killed_supervisor_are_killed(tmp_path, process):
    orphan = pid_of(tmp_path)
    process.kill()
    process.wait()
    assert is_alive(orphan)
    assert supervisor.kill_orphans(tmp_path)
    wait_until(lambda: not is_alive(orphan))


def test_a_process_that_reuses_an_id_is_not_killed(tmp_path):
    with subprocess.Popen(SLEEP) as other:
        facts = {"supervisor": 0, "processes": {"sleeper": {"pid": other.pid, "starts": 1}}}
        (tmp_path / supervisor.FILE).write_text(json.dumps(facts))
        assert not supervisor.kill_orphans(tmp_path)
        time.sleep(0.2)
        assert other.poll() is None
        other.kill()


def test_reading_the_status_does_not_prevent_a_start(tmp_path):
    ended = threading.Event()

    def look():
        while not ended.is_set():
            supervisor.running(tmp_path)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(300):
            with supervisor.hold(tmp_path):
                assert supervisor.running(tmp_path) is not None
    finally:
        ended.set()
        thread.join()
    assert supervisor.running(tmp_path) is None


def test_the_time_since_which_a_process_fails_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    keeper = supervisor.Supervisor(tmp_path, {"sleeper": lambda: SLEEP}, {}, lambda line: None)

    def failing() -> float:
        keeper._check()
        return json.loads((tmp_path / supervisor.FILE).read_text())["processes"]["sleeper"]["failing"]

    try:
        assert failing() == 0
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        keeper._children["sleeper"].process.wait()
        since = failing()
        assert abs(since - time.time()) < 10
        keeper._children["sleeper"].due = 0.0  # skip the pause before the restart
        assert failing() == since
        monkeypatch.setattr(supervisor, "STABLE", 0.0)
        assert failing() == 0
    finally:
        keeper._end_all()
