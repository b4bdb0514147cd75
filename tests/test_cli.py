"""Commands that show and list, their help, and one line on stderr for every mistake."""

import io
import json
import os
import re
import subprocess
import warnings

import pytest
from cli_helpers import COMMAND, Outcome, assert_one_line, assert_readable, copy, summary_of
from rich.console import Console

from weft import Plan, methods, networks, scenarios
from weft.plan import ready_plans
from weft.report import terminal
from weft.report.text import size

pytest_plugins = ["cli_helpers"]

COMMANDS = {
    "bench": ["--quick", "--json", "--out", "--peers", "--check"],
    "report": ["DIR...", "--out"],
    "watch": ["DIR", "--port"],
    "figures": ["DIR...", "--format", "--out"],
    "tensorboard": ["DIR...", "--out"],
    "export": ["DIR", "--client", "--task", "--format", "--out", "--trust", "--data-dir"],
    "predict": ["FILE", "IMAGE...", "--trust", "--json"],
    "demo": ["--seed", "--workers"],
    "run": ["PLAN", "KEY=VALUE", "--out", "--workers", "--seeds", "--memory", "--save-every", "--data-dir", "--force"],
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


def drawn(table: object, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(table)
    return file.getvalue()


# ---- help ------------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_is_shown_without_arguments(command):
    outcome = command("--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    for name in COMMANDS:
        assert re.search(rf"^ +{name} +\S", outcome.out, re.MULTILINE), name
    assert "weft demo" in outcome.out  # where to start
    outcome = command()
    assert outcome.code == 2
    assert "Usage: weft" in outcome.err
    assert outcome.err.count("\n") > len(COMMANDS)  # formatted, not one line


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(command, name):
    outcome = command(name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    for option in COMMANDS[name]:
        assert option in outcome.out
    assert "\\[" not in outcome.out  # typer escapes for rich
    for line in outcome.out.splitlines():  # every argument has a description
        if re.match(r"^  (PLAN|DIR|NAME)", line):
            assert re.search(r"[a-z]{3}", line.replace("[required]", "")), line


def test_every_command_is_tested_here():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # typer uses names that click has deprecated
        from weft.cli.app import app
    assert {one.name for one in app.registered_commands} == set(COMMANDS)
    # test_phases.py, test_cli_data.py, tests/flower
    assert [one.name for one in app.registered_groups] == ["new", "data", "hub", "site"]


# ---- list ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, "plans"])
def test_list(command, kind):
    outcome = command("list", kind)
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    as_json = command("list", kind, "--json")
    assert (as_json.code, as_json.err) == (0, "")
    entries = {entry["name"]: entry for entry in json.loads(as_json.out)}
    assert list(entries) == list(KINDS.get(kind, ready_plans()))
    for name, entry in entries.items():
        assert re.search(rf"\b{re.escape(name)}\b", outcome.out)
        assert all(value not in ("", None) for value in entry.values())
        for option in entry.get("options", ()):
            assert f"{kind.removesuffix('s')}.{option}" in outcome.out
    if kind == "methods":
        assert entries["fedweit"]["options"]["keep"] == 0.3
        assert set(entries["fedweit"]["presets"]) >= {"paper", "released"}
    if kind == "plans":
        assert entries["demo"]["command"].startswith("weft run demo")


@pytest.mark.parametrize("kind", KINDS)
def test_listed_options_can_be_typed(command, kind):
    """KEY=VALUE of the table is valid on the command line."""
    section, name, options = kind.removesuffix("s"), "", {}
    for word in command("list", kind).out.split():
        name = word if word in KINDS[kind] else name
        if word.startswith(f"{section}.") and "=" in word:  # a required option has no value to show
            options.setdefault(name, []).append(word)
    assert options
    assert "null" not in str(options)
    for name, words in options.items():
        Plan.merge({}, [f"{section}={name}", *words])


# ---- show and compare ------------------------------------------------------------------------------------------------


def test_show(command, finished):
    outcome = command("show", finished)
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    summary = summary_of(finished)
    assert f"{100 * summary['accuracy']:.1f} %" in outcome.out
    assert "the client's, after its last epoch" in outcome.out  # which model was measured
    for client in range(3):
        for images in ("test", "validation"):
            assert re.search(rf"client {client}: .* on {images} images", outcome.out)
    for word in ("c2s", "s2c", "adaptive", "weights", "header"):
        assert word in outcome.out
    assert any(int(number.replace(",", "")) > 100_000 for number in re.findall(r"\d[\d,]{3,}", outcome.out))


def test_show_an_unfinished_run(command, stopped):
    outcome = command("show", stopped)
    assert outcome.code == 0
    assert f"weft resume {stopped}" in outcome.out
    assert "client 0" in outcome.out  # what is known so far
    assert_one_line(command("show", stopped, "--json"), f"weft resume {stopped}")
    assert_one_line(command("compare", stopped), f"weft resume {stopped}")


def test_compare(command, finished, finished_fedavg, finished_stl):
    runs = (finished, finished_fedavg, finished_stl)
    outcome = command("compare", *runs)
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    lines = [line for line in outcome.out.splitlines() if " % " in line]
    rows, chosen = ({line.split()[0]: line for line in part} for part in (lines[:3], lines[3:]))
    assert set(rows) == set(chosen) == {"fedweit", "fedavg", "stl"}
    for run in runs:
        summary = summary_of(run)
        row = rows[summary["method"]]
        assert f"{100 * summary['validation']['accuracy']:.1f} %" in chosen[summary["method"]]
        assert f"{summary['validation']['forgetting']:.3f}" in chosen[summary["method"]]
        assert f"{100 * summary['accuracy']:.1f} %" in row
        assert f"{summary['forgetting']:.3f}" in row
        assert size(summary["model_size_bytes"]) in row
        assert size(summary["traffic"]["c2s"]["bytes"]) in row or summary["method"] == "stl"
        assert f"{summary['seconds']:.1f}" in row


def test_runs_of_one_method_and_seed_are_named_by_folder_and_json_has_the_summaries(tmp_path, command, finished):
    folders = [copy(finished, tmp_path / name) for name in ("keep-3", "keep-5")]
    outcome = command("compare", *folders)
    assert_readable(outcome.out)
    assert all(folder.name in outcome.out for folder in folders)
    one, both = command("show", finished, "--json"), command("compare", *folders, "--json")
    assert [one.code, one.err, both.code, both.err] == [0, "", 0, ""]
    assert [json.loads(one.out)] * 2 == json.loads(both.out) == [summary_of(finished)] * 2


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


def test_large_tables_fit_eighty_columns(finished):
    text = drawn(terminal.comparison([{**summary_of(finished), **LARGE, "seed": seed} for seed in (0, 100)]))
    assert_readable(text)
    for word in ("fedweit", "100.0", "-0.123", "123 GB", "0.44", "123 MB", "s100"):
        assert word in text
    rows = [[1.0] * after + [0.987] for after in range(10)]
    text = drawn(terminal.matrix(3, rows))
    assert_readable(text)
    assert text.count("98.7") == 10
    assert text.count("100.0") == 45
    assert sum("98.7" in line or "100.0" in line for line in text.splitlines()) == 10  # one line per task
    small = drawn(terminal.matrix(3, [[0.5]]))
    assert "client 3: accuracy" in small, "the title is in one line"
    assert len(small.splitlines()) < 8


# ---- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {
    "unknown command": (["frobnicate"], ["frobnicate"]),
    "nearly a command": (["shw"], ["shw", "show"]),
    "unknown option": (["run", "demo", "--wokers", "2"], ["--wokers"]),
    "no plan": (["run"], ["PLAN"]),
    "no folder": (["resume"], ["DIR"]),
    "nothing to list": (["list"], ["methods", "scenarios", "networks", "plans", "tables"]),
    "no such list": (["list", "clients"], ["clients", "methods"]),
    "no workers": (["run", "demo", "--workers", "0"], ["workers", "1 or more"]),
    "workers in words": (["run", "demo", "--workers", "two"], ["--workers", "two"]),
    "no seeds": (["run", "demo", "--seeds", "0"], ["--seeds"]),
    "no memory": (["run", "demo", "--memory", "0"], ["memory"]),
    "saving before time": (["run", "demo", "--save-every", "-1"], ["save"]),
    "saving never": (["run", "demo", "--save-every", "nan"], ["save"]),
    "no seed for the demo": (["demo", "--seed", "-1"], ["seed"]),
    "demo takes no words": (["demo", "seed=3"], ["seed=3"]),
    "missing plan": (["run", "nothing.toml"], ["nothing.toml"]),
    "nearly a plan": (["run", "dmeo"], ["did you mean demo?"]),
    "unknown key": (["run", "demo", "round_per_task=3"], ["did you mean rounds_per_task?"]),
    "wrong type": (["run", "demo", "clients=many"], ["clients", "many"]),
    "8 of 5": (["run", "demo", "clients=5", "clients_per_round=8"], ["clients_per_round", "1 to 5"]),
    "zero tasks": (["run", "demo", "tasks=0"], ["tasks"]),
    "unknown method": (["run", "demo", "method=fedwiet"], ["did you mean fedweit?"]),
    "no key": (["run", "demo", "5"], ["key=value"]),
    "nearly a table": (["repro", "method-glyphs"], ["did you mean methods-glyphs?"]),
    "nearly a row": (["repro", "methods-glyphs", "--only", "fedwiet"], ["did you mean fedweit?"]),
    "a folder twice": (["show", "a", "b"], ["b"]),
    "no such dataset": (["data", "get", "cifar-100"], ["did you mean cifar100?"]),
    "nothing to get": (["data", "get"], ["NAME"]),
    "faces from nowhere": (["data", "get", "facescrub"], ["facescrub", "--from FOLDER"]),
    "faces from no folder": (["data", "get", "facescrub", "--from", "nothing"], ["nothing", "--from"]),
    "two from one folder": (["data", "get", "mnist", "svhn", "--from", "."], ["one dataset"]),
    "a file that is not there": (["data", "get", "svhn", "--from", "."], ["train_32x32.mat", "--from"]),
    "no data for a run": (["run", "overlapped-cifar100"], ["cifar100.npz", "weft data get cifar100"]),
    "no data to show": (["show", "noniid-35"], ["weft data get"]),
    "too many tasks": (["run", "noniid-35", "tasks=8"], ["1 to 5 clients and 1 to 7 tasks"]),
    "no such scale": (["run", "noniid-35", "scale=tiny"], ["choose paper or small, not 'tiny'"]),
    "nearly scale": (["run", "noniid-35", "scal=small"], ["did you mean scale?"]),
    "words for no scenario": (["show", "nothing", "clients=3"], ["clients=3", "glyphs"]),
    "a picture of nothing": (["show", "nothing", "--picture", "a.png"], ["--picture", "glyphs"]),
    "neither run nor scenario": (["show", "nothing"], ["nothing is not a run folder", "demo, folders, glyphs"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(tmp_path, command, case):
    words, said = MISTAKES[case]
    (tmp_path / "here").mkdir()
    environment = {"WEFT_DATA": str(tmp_path / "cache")}
    assert_one_line(command.start(*words, cwd=tmp_path / "here", **environment).wait(10), *said)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert not list((tmp_path / "here").iterdir())


def test_other_mistakes_are_one_line(tmp_path, command):
    for words in (["show", tmp_path, "--json"], ["compare", tmp_path, "--json"], ["list", "nothing", "--json"]):
        assert_one_line(command(*words))
    (tmp_path / "broken.toml").write_text("clients = = 3")
    assert_one_line(command("run", tmp_path / "broken.toml", cwd=tmp_path), "broken.toml", "TOML")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.toml"]


def test_a_device_that_is_not_available(tmp_path, command, plan_file):
    import torch

    if torch.backends.mps.is_available():
        pytest.skip("this machine has one")
    outcome = command("run", plan_file, "device=mps", "--workers", "1", cwd=tmp_path)
    assert_one_line(outcome, "device=mps", "auto", "cpu")


@pytest.mark.slow
def test_the_installed_command_and_a_closed_pipe(tmp_path):
    """weft list methods | head -1 is no error."""
    done = subprocess.run([COMMAND, "run", "dmeo"], capture_output=True, text=True, check=False)
    assert_one_line(Outcome(done.returncode, done.stdout, done.stderr), "did you mean demo?")
    reading, writing = os.pipe()
    os.close(reading)
    with (tmp_path / "err").open("w") as err:
        subprocess.run([COMMAND, "list", "methods"], stdout=writing, stderr=err, check=False)
    os.close(writing)
    assert (tmp_path / "err").read_text() == ""


@pytest.mark.slow
def test_an_ascii_terminal(finished):
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    for words in (["list", "methods"], ["compare", finished]):
        done = subprocess.run([COMMAND, *words], capture_output=True, check=False, env={**os.environ, **plain})
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
