"""`weft run`, `resume` and their progress: folders, plan keys, seeds, bars and plain lines."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_helpers import (
    COMMAND,
    CONTROL,
    assert_one_line,
    assert_readable,
    assert_same_result,
    contents,
    copy,
    summary_of,
    tiny,
    until,
)
from rich.console import Console

from weft import Plan
from weft.cli.progress import ProgressDisplay

pytest_plugins = ["cli_helpers"]


@pytest.mark.slow
def test_run_in_the_current_folder(tmp_path, command, plan_file, finished):
    """Folders under runs/, named by plan, method and seed; a second run gets a number; the last line is the folder."""
    for name in ("tiny-fedweit-s0", "tiny-fedweit-s0-2"):
        outcome = command("run", plan_file, "--workers", "1", cwd=tmp_path)
        assert outcome.code == 0, outcome
        assert outcome.out.splitlines()[-1] == f"runs/{name}"
        assert_readable(outcome.out)
        assert_same_result(tmp_path / "runs" / name, finished)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_arguments_change_the_plan_and_progress_without_a_terminal_is_plain_lines(tmp_path, command, plan_file):
    words = ["method=fedavg", "seed=4", "clients=2", "rounds_per_task=1", "method.average=equal"]
    outcome = command("run", plan_file, *words, "--out", tmp_path / "run", "--workers", "1")
    assert outcome.code == 0, outcome
    assert not CONTROL.search(outcome.err)
    for task, line in enumerate(outcome.err.splitlines()[-2:]):  # one line for each task
        assert re.search(rf"fedavg: task {task} .*\d+ s", line)
    summary = summary_of(tmp_path / "run")
    assert [summary[key] for key in ("method", "seed", "clients", "tasks")] == ["fedavg", 4, 2, 2]
    assert Plan.load(tmp_path / "run").method_options["average"] == "equal"
    assert command("show", tmp_path / "run").code == 0


@pytest.mark.slow
def test_a_long_path_is_printed_unbroken(tmp_path, command, plan_file):
    folder = tmp_path / ("a" * 60) / ("b c" * 20) / "[red]run"
    outcome = command("run", plan_file, "tasks=1", "--out", folder, "--workers", "1")
    assert outcome.code == 0, outcome
    assert str(folder) in outcome.out.splitlines()
    resumed = command("resume", folder, "--workers", "1")
    assert resumed.code == 0
    assert any(str(folder) in line for line in resumed.err.splitlines())
    (folder / "summary.json").unlink()
    assert any(f"weft resume {folder}" in line for line in command("show", folder).out.splitlines())


@pytest.mark.slow
def test_several_seeds(tmp_path, command, plan_file, finished):
    outcome = command("run", plan_file, "--seeds", "2", "--workers", "1", cwd=tmp_path)
    assert outcome.code == 0, outcome
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny-fedweit-s0", "tiny-fedweit-s1"}
    assert outcome.out.splitlines()[-2:] == ["runs/tiny-fedweit-s0", "runs/tiny-fedweit-s1"]
    assert_readable(outcome.out)
    assert re.search(r"^ *fedweit[^/]*\bs0\b[^/]*\bs1\b", outcome.out, re.MULTILINE)
    assert re.search(r"^ *mean +\d+\.\d %.*\n *± sd +\d+\.\d % +\d\.\d{3}\s*$", outcome.out, re.MULTILINE)
    assert_same_result(tmp_path / "runs" / "tiny-fedweit-s0", finished)
    assert summary_of(tmp_path / "runs" / "tiny-fedweit-s1")["seed"] == 1


@pytest.mark.slow
def test_several_seeds_in_a_named_folder(tmp_path, command, plan_file):
    words = ("run", plan_file, "seed=5", "tasks=1", "--seeds", "2", "--out", tmp_path / "out", "--workers", "1")
    outcome = command(*words)
    assert outcome.code == 0, outcome
    seeds = [summary_of(Path(line))["seed"] for line in outcome.out.splitlines()[-2:]]
    assert seeds == [5, 6]
    for line in outcome.out.splitlines()[-2:]:
        assert (tmp_path / "out") in Path(line).parents
    before = contents(tmp_path / "out")
    assert_one_line(command(*words), "already holds a run")
    assert contents(tmp_path / "out") == before


def test_resume_shows_the_result(tmp_path, command, stopped, finished):
    folder = copy(stopped, tmp_path / "run")
    outcome = command("resume", folder, "--workers", "1")
    assert outcome.code == 0
    assert f"{100 * summary_of(finished)['accuracy']:.1f} %" in outcome.out
    assert_same_result(folder, finished)


# ---- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_terminal_gets_a_bar(tmp_path, plan_file):
    """On stderr, with client, task, round and time left; only the table is on stdout."""
    screen, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "30"}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [COMMAND, "run", plan_file, "rounds_per_task=6", "--out", tmp_path / "run", "--workers", "1"],
            stdin=end,
            stdout=out,
            stderr=end,
            env=environment,
            start_new_session=True,
        )
        os.close(end)
        shown = read_all(screen, 60)
        os.close(screen)
        assert process.wait(30) == 0, shown
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"client [012]\b.*task \d.*round \d", plain)
    assert re.search(r"\d+ ?%", plain)
    assert re.search(r"about \d+ s left", plain)
    assert "fedweit" in plain
    assert "100 %" in plain
    assert "\x1b" not in (tmp_path / "out").read_text()
    assert str(tmp_path / "run") in (tmp_path / "out").read_text().replace("\n", "")


def read_all(screen: int, seconds: float) -> str:
    """All that is written to a terminal until its last writer closes it."""
    pieces, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        if not select.select([screen], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(screen, 65536)
        except OSError:  # on Linux: the other side is closed
            break
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces).decode(errors="replace")


def progress_display(terminal: bool) -> tuple[ProgressDisplay, io.StringIO]:
    file = io.StringIO()
    return ProgressDisplay(Console(file=file, force_terminal=terminal, width=100)), file


@pytest.mark.parametrize("seconds", [95.0, 2.0])
def test_only_a_long_run_is_announced(seconds):
    shown, file = progress_display(terminal=False)
    with shown:
        shown.started(tiny(), 0, 12, seconds)
    assert ("1 min 35 s" in file.getvalue()) == (seconds > 20)
    assert ("3 clients x 2 tasks x 2 rounds" in file.getvalue()) == (seconds > 20)


def test_an_experiment_has_a_bar_for_all_runs_with_the_time_left():
    shown, file = progress_display(terminal=True)
    with shown:
        shown.experiment_started(3, ["fedavg", "stl"], {"stl": [100.0]})
        shown.run_started("fedavg", 0)
        shown.started(tiny(method="fedavg"), 0, 12, 20.0)
        shown.answered(0, 1, 1, {"images": 20})
        shown.run_finished("fedavg", 0.5, 20.0)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "2 of 3 runs" in plain
    assert "about 1 min 40 s left" in plain


def test_a_command_that_is_killed_leaves_a_folder_that_can_be_shown(tmp_path, command, plan_file):
    running = command.start("run", plan_file, "--out", tmp_path / "run", "--workers", "1")
    until((tmp_path / "run" / "run.json").exists)
    assert running.kill() in (-signal.SIGKILL, 0)
    assert command("show", tmp_path / "run").code == 0
