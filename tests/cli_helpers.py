"""Helpers for tests of plans, run folders and commands: tiny plans, and `weft` processes that start at once.

A fresh `weft run` spends seconds on importing torch. `Weft` keeps one process that has imported everything and computed
nothing; each command is a fork of it with a separate session, argv and files. It can be stopped, killed and waited for
like any other process. Tests about startup itself use real processes.

Used as a plugin (`pytest_plugins = ["cli_helpers"]`), so that its session fixtures are created once for all files.
Tests import it before pytest could rewrite its assertions (PYTEST_DONT_REWRITE), so they have messages.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import weft
from weft.plan import Plan

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Ctrl-C is tested

COMMAND = Path(sys.executable).parent / "weft"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
TIMES = ("seconds", "images_per_second")  # the only fields of a summary that may differ
TINY: dict[str, Any] = {
    "scenario": "glyphs",
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
    "scenario.classes_per_task": 2,
    "clients": 3,
    "tasks": 2,
    "network": "mlp",
    "network.hidden": 16,
    "network.features": 16,
    "rounds_per_task": 2,
    "batch_size": 10,
}
ANSWERS = TINY["clients"] * TINY["tasks"] * TINY["rounds_per_task"]  # replies of training in the tiny plan

SERVER = """
import json, os, signal, sys, time, traceback
import weft.cli.app, weft.runs.session
import torch
with_gradient = torch.zeros(1, requires_grad=True)
with_gradient.grad = torch.zeros(1)
torch.optim.Adam([with_gradient]).step()  # an optimizer imports more of torch when it is first used


def act(order):
    os.setsid()
    os.chdir(order["cwd"])
    for place, name in ((1, "out"), (2, "err")):
        file = os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, place)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["env"])
    sys.argv = ["weft", *order["argv"]]
    if order["save_always"]:
        weft.runs.session.SAVE_SHARE = 0
    if order["largest_file"]:
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest_file"], resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    code = 1
    try:
        weft.cli.app.main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(json.dumps(wait(order["wait"], order["seconds"])), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        act(order)
    print(json.dumps(pid), flush=True)
"""


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Running:
    """A `weft` process that was started."""

    def __init__(self, pid: int, out: Path, err: Path, wait: Callable[[float], int | None]):
        self.pid, self._out, self._err, self._wait = pid, out, err, wait
        self._code: int | None = None

    def wait(self, seconds: float = 120) -> Outcome:
        if self._code is None:
            self._code = self._wait(seconds)
        if self._code is None:
            self.kill()
            pytest.fail(f"weft did not exit within {seconds} s: {self._err.read_text()}")
        return Outcome(self._code, self._out.read_text(), self._err.read_text())

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> int:
        """kill -9, wait, and return the exit code (that of an earlier exit, if there was one)."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._code = self._wait(30)
        assert self._code is not None
        return self._code


class Weft:
    """The `weft` command: `weft("list", "methods")` waits for its end, `weft.start(...)` does not."""

    def __init__(self, folder: Path):
        self._folder, self._numbers = folder, itertools.count()
        self._started: list[Running] = []
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        assert json.loads(self._server.stdout.readline()) == "ready"

    def _ask(self, order: dict[str, Any]) -> Any:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(
        self, *words: str | Path, cwd: Path | None = None, largest_file: int = 0, save_always: bool = False, **env: str
    ) -> Running:
        """`largest_file` in bytes simulates a full disk; `save_always` saves a checkpoint after each round."""
        number = next(self._numbers)
        out, err = self._folder / f"{number}.out", self._folder / f"{number}.err"
        order = {"argv": [*map(str, words)], "cwd": str(cwd or self._folder), "out": str(out), "err": str(err)}
        pid = self._ask({**order, "env": env, "largest_file": largest_file, "save_always": save_always})
        running = Running(pid, out, err, lambda seconds: self._ask({"wait": pid, "seconds": seconds}))
        self._started.append(running)
        return running

    def __call__(self, *words: str | Path, **options: Any) -> Outcome:
        return self.start(*words, **options).wait()

    def close(self) -> None:
        for running in self._started:
            running.kill()  # a failed test may leave one, even a stopped one
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()


@pytest.fixture(scope="session")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weft]:
    server = Weft(tmp_path_factory.mktemp("weft"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny plan as a file."""
    file = tmp_path_factory.mktemp("plans") / "tiny.toml"
    file.write_text(tiny().toml())
    return file


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny plan in one process. Tests read it and do not change it."""
    return weft.run(tiny(), tmp_path_factory.mktemp("finished") / "run").folder


@pytest.fixture(scope="session")
def finished_fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weft.run(tiny(method="fedavg"), tmp_path_factory.mktemp("finished") / "fedavg").folder


@pytest.fixture(scope="session")
def finished_stl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weft.run(tiny(method="stl", seed=3), tmp_path_factory.mktemp("finished") / "stl").folder


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped in its second task, with a checkpoint after each round. Tests copy it and do not change it."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    stop_after(folder, ANSWERS - 2)
    return folder


def tiny(**keys: Any) -> Plan:
    return Plan(**{"name": "tiny", **TINY, **keys})


class Stop(BaseException):
    """The test stops the run, as a kill does: nothing is cleaned up after it."""


class Stopper:
    """A progress display that raises after so many replies."""

    def __init__(self, after: int):
        self._left = after

    def started(self, *_: Any) -> None: ...

    def warned(self, text: str) -> None: ...

    def answered(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            raise Stop


def stop_after(folder: Path, answers: int, **options: Any) -> None:
    """Run the tiny plan until so many replies have arrived, with a checkpoint after each round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.runs.session.SAVE_SHARE", 0)  # however long saving takes
        with pytest.raises(Stop):
            weft.run(tiny(), folder, display=Stopper(answers), **{"save_every": 0.0, **options})


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path, except the empty lock."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def assert_same_result(folder: Path, expected: Path) -> None:
    """Equal to the bit, except the times."""
    one, other = summary_of(folder), summary_of(expected)
    assert list(one) == list(other), f"{list(one)} are not the fields {list(other)}"
    assert set(TIMES) <= set(one), "the summary has no times"
    different = {key: (one[key], other[key]) for key in other if key not in TIMES and one[key] != other[key]}
    assert not different, f"summaries differ: {different}"
    for table in ("accuracy.csv", "ledger.csv"):
        lines, wanted = ((place / table).read_text().splitlines() for place in (folder, expected))
        changes = list(difflib.unified_diff(wanted, lines, lineterm="", n=0))[:10]
        assert lines == wanted, f"{table} differs: {changes}"
        assert (folder / table).read_bytes() == (expected / table).read_bytes(), f"{table} differs in its bytes"


def assert_one_line(outcome: Outcome, *words: str) -> None:
    """A user error: one line on stderr with these words, exit code 2, nothing on stdout."""
    assert outcome.code == 2, outcome
    assert outcome.out == "", outcome
    assert outcome.err.startswith("weft: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n"), outcome.err
    for word in words:
        assert word in outcome.err, f"{word!r} is not in {outcome.err!r}"


def assert_readable(text: str, width: int = 80) -> None:
    """Plain text that fits the terminal, with nothing cut away."""
    assert not CONTROL.search(text), text
    assert all(len(line) <= width for line in text.splitlines()), text
    assert "…" not in text, text


def until(happened: Callable[[], Any], seconds: float = 60, pause: float = 0.002) -> Any:
    """Wait until a condition is true, and return it."""
    end = time.monotonic() + seconds
    while not (found := happened()):
        if time.monotonic() > end:
            pytest.fail(f"nothing happened within {seconds} s")
        time.sleep(pause)
    return found


def journal_lines(folder: Path) -> int:
    path = folder / "journal.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def alive(pid: int) -> bool:
    """Is there such a process, other than a zombie?"""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def workers_of(pid: int) -> list[int]:
    """The running children of a process, and theirs."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if alive(child.pid)]
