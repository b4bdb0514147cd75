"""Run the commands of docs/many-machines.md: one machine, three terminals, a finished run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from federation import WEFT, free_port
from test_many_machines_page import PAGE, ROOT, blocks, commands

import weft
from weft.flower.hub import supervisor

TERMINAL = 2.0  # seconds after which a command that has not ended is serving


@pytest.fixture
def place(tmp_path):
    """The folder of the page inside a clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    folder = tmp_path / "federation"
    folder.mkdir()
    yield folder
    for name in ("ada", "ben", "hub"):
        if (folder / name).is_dir():
            supervisor.stop(folder / name)


def test_the_commands_of_the_page_work(place: Path) -> None:
    serving = []
    (plan,) = blocks("toml")
    (place / "own.toml").write_text(plan.replace("rounds_per_task = 5", "rounds_per_task = 1"), encoding="utf-8")
    for words in commands():
        if words[0] in ("python3", ".", "pip", "mkdir", "cd"):  # environment and folder are those of this test
            continue
        if words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], cwd=place, check=True)
            continue
        assert words[0] == "weft", words
        if words[1:3] == ["site", "start"] and "--detach" not in words:
            serving.append(subprocess.Popen([sys.executable, "-m", *words], cwd=place, stdout=subprocess.DEVNULL))
            time.sleep(TERMINAL)
            assert serving[-1].poll() is None, words
            continue
        if words[1:] == ["hub", "init"]:  # the default port may be taken on this machine
            words += ["--port", str(free_port())]
        done = subprocess.run([*WEFT, *words[1:]], cwd=place, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        assert done.stdout.strip(), words
    assert [process.wait(20) for process in serving] == [0, 0]  # the page stops them at the end
    result = weft.Result(place / "first")
    assert result.summary["clients"] == 2
    assert len(result.accuracy_matrix) == 2
    assert weft.Result(place / "own").summary["scenario"] == "sites"


def test_the_page_names_every_command() -> None:
    named = "hub init|hub start|hub status|hub invite|hub run|hub stop|site join|site check|site task add|site start"
    for command in [*named.split("|"), "site status", "site leave", "site audit", "site task list", "site export"]:
        assert f"weft {command}" in PAGE, command
