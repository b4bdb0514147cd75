"""The command line as a person meets it: help, tables, JSON, progress, and one line for every mistake."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import time
import warnings
from pathlib import Path

import pytest
from cli_helpers import (
    COMMAND,
    TIMES,
    assert_one_line,
    assert_same_result,
    contents,
    copy,
    summary_of,
    tiny,
)
from rich.console import Console

from weft import Plan, methods, networks, scenarios
from weft.cli.progress import ProgressDisplay
from weft.plan import ready_plans
from weft.report import screens

pytest_plugins = ["cli_helpers"]

COMMANDS = {
    "bench": ["--quick", "--json", "--out", "--peers", "--check"],
    "report": ["DIR...", "--out"],
    "watch": ["DIR", "--port"],
    "figures": ["DIR...", "--format", "--out"],
    "tensorboard": ["DIR...", "--out"],
    "export": ["DIR", "--client", "--task", "--format", "--out", "--data-dir"],
    "predict": ["FILE", "IMAGE...", "--trust", "--json"],
    "demo": ["--seed", "--workers"],
    "run": ["PLAN", "KEY=VALUE", "--out", "--workers", "--seeds", "--memory", "--save-every", "--data-dir"],
    "resume": ["DIR", "--workers", "--memory", "--save-every", "--data-dir"],
    "show": ["DIR|SCENARIO", "KEY=VALUE", "--picture", "--data-dir", "--json"],
    "compare": ["DIR", "--json"],
    "repro": ["NAME", "--seeds", "--first-seed", "--only", "--out", "--runs", "--workers", "--json"],
    "list": ["methods|scenarios|networks|plans|tables", "--json"],
}
KINDS = {
    "methods": [*methods.METHODS, *methods.COMBINATIONS],
    "scenarios": scenarios.SCENARIOS,
    "networks": networks.NETWORKS,
}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def assert_readable(text: str, width: int = 80) -> None:
    """Plain text that fits the terminal, with nothing cut away."""
    assert not CONTROL.search(text)
    for line in text.splitlines():
        assert len(line) <= width, line
    assert "…" not in text


def drawn(table: object, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue()


# ---- help ------------------------------------------------------------------------------------------------------------


def test_help_names_every_command(command):
    outcome = command("--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    for name in COMMANDS:
        assert re.search(rf"^ +{name} +\S", outcome.out, re.MULTILINE), name
    assert "weft demo" in outcome.out  # where to start


def test_no_words_at_all_is_a_cry_for_help(command):
    outcome = command()
    text = outcome.out + outcome.err
    assert "Usage: weft" in text
    assert text.count("\n") > 8  # laid out for reading
    assert "run" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(command, name):
    outcome = command(name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    for option in COMMANDS[name]:
        assert option in outcome.out
    assert "\\[" not in outcome.out  # an escape that was meant for somebody else
    described = re.findall(r"^  (--\S+|[A-Z=\[\].]{3,})( \S+)*  +(\S.*)?", outcome.out, re.MULTILINE)
    assert described
    for line in outcome.out.splitlines():  # every argument says what it is
        if re.match(r"^  (PLAN|DIR|NAME)", line):
            assert re.search(r"[a-z]{3}", line.replace("[required]", "")), line


def test_every_command_is_tested_here():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer asks click for names that click wants to give up
        from weft.cli.app import app
    assert {one.name for one in app.registered_commands} == set(COMMANDS)
    assert [one.name for one in app.registered_groups] == ["data", "hub", "site"]  # test_cli_data.py, tests/flower


# ---- list ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "plans"])
def test_list(command, kind):
    outcome = command("list", kind)
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    for name in KINDS.get(kind, ready_plans()):
        assert re.search(rf"\b{re.escape(name)}\b", outcome.out)


@pytest.mark.parametrize("kind", KINDS)
def test_listed_options_can_be_typed(command, kind):
    """What `list` shows of an option, a person may type as it stands; every option is there."""
    text = command("list", kind).out
    part = kind.removesuffix("s")
    listed = json.loads(command("list", kind, "--json").out)
    assert [entry["name"] for entry in listed] == list(KINDS[kind])
    for entry in listed:
        for option in entry["options"]:
            assert f"{part}.{option}" in text
    assert "=null" not in text
    name = ""
    words = {}
    for line in text.splitlines():
        for word in line.split():
            if word in KINDS[kind]:
                name = word
            if word.startswith(f"{part}.") and "=" in word:  # one that is unset has no value to show
                words.setdefault(name, []).append(word)
    assert words
    for name, options in words.items():
        Plan.merge({}, [f"{part}={name}", *options])


@pytest.mark.parametrize("kind", [*KINDS, "plans"])
def test_list_as_json(command, kind):
    outcome = command("list", kind, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    entries = json.loads(outcome.out)
    assert {entry["name"] for entry in entries} == set(KINDS.get(kind, ready_plans()))
    for entry in entries:
        assert all(value not in ("", None) for value in entry.values())
    if kind == "methods":
        by_name = {entry["name"]: entry for entry in entries}
        assert by_name["fedweit"]["options"]["keep"] == 0.3
        assert set(by_name["fedweit"]["presets"]) >= {"paper", "released"}
    if kind == "plans":
        assert next(entry for entry in entries if entry["name"] == "demo")["command"].startswith("weft run demo")


# ---- show and compare ------------------------------------------------------------------------------------------------


def test_show(command, finished):
    outcome = command("show", finished)
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    summary = summary_of(finished)
    assert f"{100 * summary['accuracy']:.1f} %" in outcome.out
    assert "the client's own after its last epoch" in outcome.out  # which model was measured
    for client in range(3):
        assert re.search(rf"client {client}\b", outcome.out)
    for word in ("c2s", "s2c", "adaptive", "base", "global", "header"):
        assert word in outcome.out
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]{3,}", outcome.out)]
    assert sum(summary["traffic"]["c2s"].values()) > 0
    assert any(number > 100_000 for number in numbers)


def test_show_a_run_that_is_not_over(command, stopped):
    outcome = command("show", stopped)
    assert outcome.code == 0
    assert f"weft resume {stopped}" in outcome.out
    assert "client 0" in outcome.out  # what is known so far
    assert_one_line(command("show", stopped, "--json"), f"weft resume {stopped}")
    assert_one_line(command("compare", stopped), f"weft resume {stopped}")


def test_show_as_json_is_the_summary(command, finished):
    outcome = command("show", finished, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out) == summary_of(finished)


def test_compare(command, finished, finished_fedavg, finished_stl):
    runs = (finished, finished_fedavg, finished_stl)
    outcome = command("compare", *runs)
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    rows = {line.split()[0]: line for line in outcome.out.splitlines() if " % " in line}
    assert set(rows) == {"fedweit", "fedavg", "stl"}
    for run in runs:
        summary = summary_of(run)
        row = rows[summary["method"]]
        assert f"{100 * summary['accuracy']:.1f} %" in row
        assert f"{summary['forgetting']:.3f}" in row
        assert screens.size(summary["model_size_bytes"]) in row
        assert screens.size(summary["traffic"]["c2s"]["bytes"]) in row or summary["method"] == "stl"
        assert f"{summary['seconds']:.1f}" in row
    for heading in ("method", "accuracy", "forgets", "up", "down", "model", "time"):
        assert heading in outcome.out


def test_compare_as_json(command, finished, finished_fedavg):
    outcome = command("compare", finished, finished_fedavg, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    assert json.loads(outcome.out) == [summary_of(finished), summary_of(finished_fedavg)]


def test_two_runs_of_one_name_can_be_told_apart(tmp_path, command, finished):
    """The same method and seed with other options: a table in which all rows look alike helps nobody."""
    folders = [copy(finished, tmp_path / name) for name in ("keep-3", "keep-5")]
    outcome = command("compare", *folders)
    assert_readable(outcome.out)
    for folder in folders:
        assert folder.name in outcome.out


LARGE = {
    "method": "fedweit@released",
    "accuracy": 1.0,
    "forgetting": -0.123,
    "traffic": {
        direction: {"bytes": 123_456_789_012, "nonzeros": 10**10, "dense_bytes": 9 * 10**10}
        for direction in ("c2s", "s2c")
    },
    "model_size_bytes": 123_456_789,
    "model_size_paper_bytes": 123_456_789,
    "seconds": 123_456.7,
}


@pytest.mark.parametrize("seeds", [(0,), (0, 100)])
def test_large_numbers_and_long_names_fit_eighty_columns(finished, seeds):
    summaries = [{**summary_of(finished), **LARGE, "seed": seed} for seed in seeds]
    text = drawn(screens.comparison(summaries))
    assert_readable(text)
    for word in ("fedweit", "100.0", "-0.123", "123 GB", "0.44", "123 MB"):
        assert word in text
    if len(seeds) > 1:
        assert "s100" in text


def test_a_matrix_of_ten_tasks_fits_eighty_columns():
    rows = [[1.0] * after + [0.987] for after in range(10)]
    text = drawn(screens.matrix(3, rows))
    assert_readable(text)
    assert text.count("98.7") == 10
    assert text.count("100.0") == 45
    assert sum("98.7" in line or "100.0" in line for line in text.splitlines()) == 10  # a task a line
    assert "client 3" in text


def test_the_title_of_a_small_matrix_is_not_squeezed():
    text = drawn(screens.matrix(0, [[0.5]]))
    assert "client 0: accuracy" in text
    assert len(text.splitlines()) < 8


# ---- run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_in_the_current_folder(tmp_path, command, plan_file, finished):
    """Folders under runs/, named by plan, method and seed; a second run gets a number; the last line says where."""
    for name in ("tiny-fedweit-s0", "tiny-fedweit-s0-2"):
        outcome = command("run", plan_file, "--workers", "1", cwd=tmp_path)
        assert outcome.code == 0, outcome
        assert outcome.out.splitlines()[-1] == f"runs/{name}"
        assert_readable(outcome.out)
        assert_same_result(tmp_path / "runs" / name, finished)
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_progress_is_plain_lines_where_there_is_no_terminal(tmp_path, command, plan_file):
    outcome = command("run", plan_file, "--workers", "1", "--out", tmp_path / "run")
    assert not CONTROL.search(outcome.err)
    lines = outcome.err.splitlines()
    assert len(lines) >= 2  # one a task, at least
    for task, line in enumerate(lines[-2:]):
        assert re.search(rf"fedweit: task {task} .*\d+ s", line)


def test_words_change_the_plan(tmp_path, command, plan_file):
    words = ["method=fedavg", "seed=4", "clients=2", "tasks=1", "method.average=equal"]
    outcome = command("run", plan_file, *words, "--out", tmp_path / "run", "--workers", "1")
    assert outcome.code == 0, outcome
    summary = summary_of(tmp_path / "run")
    assert [summary[key] for key in ("method", "seed", "clients", "tasks")] == ["fedavg", 4, 2, 1]
    assert summary["forgetting"] is None  # of one task nothing can be forgotten
    assert Plan.load(tmp_path / "run").method_options["average"] == "equal"
    assert command("show", tmp_path / "run").code == 0


@pytest.mark.slow
def test_a_long_path_is_told_in_one_piece(tmp_path, command, plan_file):
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


def test_resume_goes_on_and_shows_the_result(tmp_path, command, stopped, finished):
    folder = copy(stopped, tmp_path / "run")
    outcome = command("resume", folder, "--workers", "1")
    assert outcome.code == 0
    assert f"{100 * summary_of(finished)['accuracy']:.1f} %" in outcome.out
    assert_same_result(folder, finished)


# ---- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown command": (["frobnicate"], ["frobnicate"]),
    "nearly a command": (["shw"], ["shw", "show"]),
    "unknown option": (["run", "demo", "--wokers", "2"], ["--wokers"]),
    "unknown option at the top": (["--frobnicate"], ["--frobnicate"]),
    "no plan": (["run"], ["PLAN"]),
    "no folder": (["resume"], ["DIR"]),
    "nothing to show": (["show"], ["DIR"]),
    "nothing to compare": (["compare"], ["DIR"]),
    "nothing to list": (["list"], ["methods", "scenarios", "networks", "plans", "tables"]),
    "no such list": (["list", "clients"], ["clients", "methods"]),
    "no workers": (["run", "demo", "--workers", "0"], ["workers", "1 or more"]),
    "negative workers": (["run", "demo", "--workers", "-2"], ["workers"]),
    "workers in words": (["run", "demo", "--workers", "two"], ["--workers", "two"]),
    "no seeds": (["run", "demo", "--seeds", "0"], ["--seeds"]),
    "seeds in words": (["run", "demo", "--seeds", "many"], ["--seeds", "many"]),
    "no memory": (["run", "demo", "--memory", "0"], ["memory"]),
    "saving before time": (["run", "demo", "--save-every", "-1"], ["save"]),
    "saving never": (["run", "demo", "--save-every", "nan"], ["save"]),
    "no seed for the demo": (["demo", "--seed", "-1"], ["seed"]),
    "demo takes no words": (["demo", "seed=3"], ["seed=3"]),
    "missing plan": (["run", "nothing.toml"], ["there is no plan nothing.toml"]),
    "nearly a plan": (["run", "dmeo"], ["did you mean demo?"]),
    "unknown key": (["run", "demo", "round_per_task=3"], ["did you mean rounds_per_task?"]),
    "wrong type": (["run", "demo", "clients=many"], ["clients", "many"]),
    "8 of 5": (["run", "demo", "clients=5", "clients_per_round=8"], ["clients_per_round is 8", "choose 1 to 5"]),
    "zero tasks": (["run", "demo", "tasks=0"], ["tasks"]),
    "unknown method": (["run", "demo", "method=fedwiet"], ["did you mean fedweit?"]),
    "no key": (["run", "demo", "5"], ["key=value"]),
    "nearly a table": (["repro", "method-glyphs"], ["did you mean methods-glyphs?"]),
    "nearly a row": (["repro", "methods-glyphs", "--only", "fedwiet"], ["did you mean fedweit?"]),
    "no seeds of a table": (["repro", "methods-glyphs", "--seeds", "0"], ["--seeds"]),
    "a folder twice": (["show", "a", "b"], ["b"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path, command, case):
    words, said = MISTAKES[case]
    assert_one_line(command.start(*words, cwd=tmp_path).wait(10), *said)
    assert not list(tmp_path.iterdir())


def test_a_mistake_with_json_leaves_stdout_empty(tmp_path, command):
    for words in (["show", tmp_path, "--json"], ["compare", tmp_path, "--json"], ["list", "nothing", "--json"]):
        assert_one_line(command(*words))


def test_broken_toml_is_one_line(tmp_path, command):
    (tmp_path / "broken.toml").write_text("clients = = 3")
    assert_one_line(command("run", tmp_path / "broken.toml", cwd=tmp_path), "broken.toml", "TOML")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.toml"]


def test_a_device_that_is_not_there(tmp_path, command, plan_file):
    import torch

    if torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    outcome = command("run", plan_file, "device=mps", "--workers", "1", cwd=tmp_path)
    assert_one_line(outcome, "device=mps", "choose auto or cpu")


@pytest.mark.slow
def test_an_installed_command_without_torch_is_quick_and_right():
    """The real command, started anew: the entry point works, and mistakes need no torch."""
    done = subprocess.run([COMMAND, "run", "dmeo"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "weft: there is no plan dmeo; did you mean demo? (weft list plans shows them)\n"


@pytest.mark.slow
def test_a_reader_who_has_gone(tmp_path):
    """weft list methods | head -1"""
    reading, writing = os.pipe()
    os.close(reading)
    with (tmp_path / "err").open("w") as err:
        subprocess.run([COMMAND, "list", "methods"], stdout=writing, stderr=err, check=False)
    os.close(writing)
    assert (tmp_path / "err").read_text() == ""


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_alone(finished):
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for words in (["list", "methods"], ["compare", finished]):
        done = subprocess.run([COMMAND, *words], capture_output=True, check=False, env={**os.environ, **plain})
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()


# ---- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_terminal_gets_a_bar(tmp_path, plan_file):
    """It names client, task, round and time left, and goes to stderr; the table alone goes to stdout."""
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
    """All that is written to a terminal until its last writer has gone."""
    pieces, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        if not select.select([screen], [], [], 0.2)[0]:
            continue
        try:
            piece = os.read(screen, 65536)
        except OSError:  # how Linux says that the other side is closed
            break
        if not piece:
            break
        pieces.append(piece)
    return b"".join(pieces).decode(errors="replace")


def progress_display(terminal: bool) -> tuple[ProgressDisplay, io.StringIO]:
    file = io.StringIO()
    return ProgressDisplay(Console(file=file, force_terminal=terminal, width=100)), file


def test_a_long_run_is_announced():
    shown, file = progress_display(terminal=False)
    with shown:
        shown.started(tiny(), 0, 12, 95.0)
    assert "3 clients x 2 tasks x 2 rounds" in file.getvalue()
    assert "1 min 35 s" in file.getvalue()


def test_a_short_run_is_not():
    shown, file = progress_display(terminal=False)
    with shown:
        shown.started(tiny(), 0, 12, 2.0)
    assert file.getvalue() == ""


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


def test_summaries_hold_the_times_that_may_differ(finished):
    """So that `equal in everything but` means something."""
    assert set(TIMES) <= set(summary_of(finished))


def test_a_command_that_is_killed_leaves_a_folder_that_can_be_shown(tmp_path, command, plan_file):
    running = command.start("run", plan_file, "--out", tmp_path / "run", "--workers", "1")
    while not (tmp_path / "run" / "run.json").exists():
        time.sleep(0.002)
    assert running.kill() in (-signal.SIGKILL, 0)
    assert command("show", tmp_path / "run").code == 0
