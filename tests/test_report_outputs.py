"""The facts of the page in other outputs: the terminal, figures for a paper, TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import TINY, Outcome, assert_one_line, contents, summary_of
from report_helpers import attention_sums
from skips import LOUD

from weft.report.facts import collect, group
from weft.report.learning import accuracy
from weft.report.reading import read_runs
from weft.runs.folder import read_rows

pytest_plugins = ["cli_helpers"]


def needs(package: str, extra: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{LOUD}{package} is not installed (pip install 'weft[{extra}]')")


needs_matplotlib = needs("matplotlib", "figures")
needs_tensorboard = needs("tensorboard", "tensorboard")


# ---- terminal --------------------------------------------------------------------------------------------------------


def test_show_has_the_same_facts(command, finished):
    done = command("show", finished, COLUMNS="80")
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
    for title in ("at the end", "density (%) of A", "who helped whom", "not a proof of help"):
        assert title in done.out
    sums = attention_sums(finished, TINY["tasks"])
    (line,) = re.findall(r"^ 0 +- +(\S+) +(\S+) ", done.out[done.out.index("who helped whom") :], flags=re.MULTILINE)
    assert line == (f"{sums[0, 1]:.2f}", f"{sums[0, 2]:.2f}")


def test_show_leaves_out_what_a_method_does_not_have(command, finished_fedavg, stopped):
    out = command("show", finished_fedavg).out
    assert "at the end" in out
    assert "who helped whom" not in out
    assert "incidents" not in out
    assert "at the end" in command("show", stopped).out


# ---- figures for a paper ---------------------------------------------------------------------------------------------

STARTS = {"pdf": b"%PDF-1.4", "svg": b"<?xml version", "png": b"\x89PNG"}
ALL = {"accuracy", "matrices", "forgetting", "adaptation", "gain", "helping", "traffic", "density"}


@needs_matplotlib
@pytest.mark.slow
@pytest.mark.parametrize("kind", STARTS)
def test_figures_are_written_the_same_each_time(command, tmp_path, finished, finished_fedavg, kind):
    stl = tmp_path / "stl"
    assert command("run", finished / "plan.toml", "method=stl", "--out", stl, "--workers", "1").code == 0
    for name in ("one", "two"):
        folders = (finished, finished_fedavg, stl)
        done = command("figures", *folders, "--format", kind, "--out", tmp_path / name, cwd=tmp_path)
        assert done.code == 0, done.err
        assert {Path(line).name for line in done.out.split()} == {f"{each}.{kind}" for each in ALL}
    one = contents(tmp_path / "one")
    assert one == contents(tmp_path / "two")
    assert all(blob.startswith(STARTS[kind]) for blob in one.values())


@needs_matplotlib
def test_the_lines_are_those_of_the_page(finished, finished_fedavg):
    from weft.report.matplotlib import draw

    figure = draw(accuracy(group(read_runs([finished, finished_fedavg]))).charts)
    ends = [line.get_ydata()[-1] for line in figure.axes[0].get_lines()]
    assert ends == pytest.approx([100 * summary_of(folder)["accuracy"] for folder in (finished, finished_fedavg)])


@pytest.mark.slow
@needs_matplotlib
def test_errors_of_figures_are_one_line(command, finished, tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_line(command("figures", finished, "--out", tmp_path / "file"), "cannot be written", "--out")
    assert_one_line(command("figures", finished, "--format", "gif"), "'gif' is not one of 'pdf', 'svg', 'png'")


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def events_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read again by the package itself."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    loaded = (event for file in folder.iterdir() for event in LegacyEventFileLoader(str(file)).Load())
    return collect((value.tag, (event.step, value.simple_value)) for event in loaded for value in event.summary.value)


@needs_tensorboard
def test_tensorboard_reads_what_the_folder_holds(command, finished, tmp_path):
    done = command("tensorboard", finished, "--out", tmp_path / "logs", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out == f"{tmp_path / 'logs' / 'run'}\n"
    found = events_of(tmp_path / "logs" / "run")
    summary = summary_of(finished)
    assert max(found["after a task/accuracy"])[1] == pytest.approx(summary["accuracy"])
    assert max(found["after a task/forgetting"])[1] == pytest.approx(summary["forgetting"])
    replies = [json.loads(line) for line in (finished / "journal.jsonl").read_text().splitlines()]
    wanted = [each["valid_accuracy"] for each in replies if each["event"] == "reply" and each["client"] == 2]
    assert [value for _, value in found["valid_accuracy/client 2"]] == pytest.approx(wanted)
    assert [step for step, _ in found["valid_accuracy/client 2"]] == list(range(len(wanted)))
    for direction, way in (("c2s", "up"), ("s2c", "down")):
        total = sum(int(row[5]) for row in read_rows(finished, "ledger.csv") if row[0] == direction)
        assert sum(value for _, value in found[f"bytes/{way}"]) == pytest.approx(total, rel=1e-6)
    assert_one_line(command("tensorboard", finished, "--out", tmp_path / "logs"), "is not empty", "--out")


@pytest.mark.slow
def test_a_missing_extra_is_a_one_line_error(finished, tmp_path):
    for word, package in (("figures", "matplotlib"), ("tensorboard", "tensorboard")):
        program = f"import sys; sys.modules[{package!r}] = None; from weft.cli.app import main; main()"
        argv = [sys.executable, "-c", program, word, str(finished), "--out", str(tmp_path / word)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert_one_line(Outcome(done.returncode, done.stdout, done.stderr), f"pip install 'weft[{word}]'")
