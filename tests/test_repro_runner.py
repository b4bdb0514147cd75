"""Running an experiment by its command: what is run and what is not, stopping, resuming, failing."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import pytest
from cli_helpers import Outcome, assert_one_line, journal_lines, tiny, until

import weft.cli.app
from weft import Plan, repro
from weft.cli.progress import ProgressDisplay
from weft.repro import output, runner
from weft.repro.store import TIMES, Record, Results, columns_of, csv_text, plan_hash, read_csv

pytest_plugins = ["cli_helpers"]

OTHER_SPLIT = "notmnist:" + "0" * 16  # of an earlier split; that is known without the images
TABLE = """
title = "A tiny table"
plan = "plan.toml"
seeds = 1

[rows]
fedavg = {}
avg-fast = { method = "fedavg", set = { learning_rate = 0.01 } }
stl = {}
"""
WILD = "wild = { method = 'fedavg', set = { learning_rate = 1e30 } }"  # diverges


class Command:
    """`weft repro tiny.toml` in an empty folder and in this process, with one worker."""

    def __init__(self, folder: Path, monkeypatch: Any, capsys: Any):
        self.table, self.plan = folder / "tiny.toml", folder / "plan.toml"
        self.table.write_text(TABLE)
        self.plan.write_text(tiny().toml())
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: str) -> Outcome:
        self._capsys.readouterr()
        self._monkeypatch.setattr(sys, "argv", ["weft", "repro", str(self.table), "--workers", "1", *words])
        with pytest.raises(SystemExit) as end:
            weft.cli.app.main()
        printed = self._capsys.readouterr()
        return Outcome(int(end.value.code or 0), printed.out, printed.err)

    def experiment(self) -> repro.Experiment:
        return repro.load(str(self.table))

    def rewrite(self, change: Callable[[Record], Record]) -> None:
        """Change every record of the csv."""
        path = Path("results/tiny.csv")
        records = read_csv(self.experiment(), path).values()
        path.write_text(csv_text(self.experiment(), map(change, records)))

    def process(self, *words: str) -> subprocess.Popen[str]:
        script = "from weft.cli import app; from weft.runs import session; session.SAVE_SHARE = 0; app.main()"
        return subprocess.Popen(
            [sys.executable, "-c", script, "repro", str(self.table), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def made(tmp_path, monkeypatch, capsys) -> Command:
    for name in ("files", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Command(tmp_path / "files", monkeypatch, capsys)


def written(kind: str, folder: str = "results") -> str:
    return Path(folder, f"tiny.{kind}").read_text(encoding="utf-8")


def lines(folder: str = "results") -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(written("csv", folder))))


def lasting(folder: str = "results") -> list[dict[str, str]]:
    """The lines without what may differ from one run to the next."""
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines(folder)]


def runs_made() -> dict[str, int]:
    """Every run folder, and when its result was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in Path("runs/repro/tiny").glob("*/summary.json")}


# ---- what is run -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_of_it_and_then_nothing(made):
    outcome = made()
    assert outcome.code == 0, outcome
    names = {"fedavg-s0", "avg-fast-s0", "stl-s0"}
    assert set(runs_made()) == names
    assert [(line["row"], line["seed"]) for line in lines()] == [("avg-fast", "0"), ("fedavg", "0"), ("stl", "0")]
    for line in lines():
        folder = Path("runs/repro/tiny", f"{line['row']}-s{line['seed']}")
        result = weft.Result(folder)
        assert float(line["accuracy"]) == result.accuracy
        assert int(line["c2s_bytes"]) == result.traffic["c2s"]["bytes"]
        assert line["plan_hash"] == plan_hash((folder / "plan.toml").read_text())
    assert Plan.load(Path("runs/repro/tiny/avg-fast-s0")).learning_rate == 0.01
    assert "3 of 3 runs finished" in outcome.err
    assert re.search(r"1 of 3 runs finished, about \d+ s left", outcome.err)
    assert outcome.out.splitlines()[-3:] == [f"results/tiny.{kind}" for kind in ("csv", "md", "tex")]
    assert max(map(len, outcome.out.splitlines())) <= 80
    files, made_then = {kind: written(kind) for kind in ("csv", "md", "tex")}, runs_made()
    again = made()
    assert (again.code, again.out, again.err) == (0, outcome.out, "")
    assert {kind: written(kind) for kind in files} == files
    assert runs_made() == made_then


@pytest.mark.slow
def test_some_rows_and_other_seeds_are_added(made):
    assert made("--only", "stl", "--seeds", "1").code == 0
    assert set(runs_made()) == {"stl-s0"}
    assert f"`weft repro {made.table} --seeds 1 --only stl`" in written("md")
    assert made("--only", "fedavg,avg-fast", "--seeds", "1", "--first-seed", "5").code == 0
    assert set(runs_made()) == {"stl-s0", "fedavg-s5", "avg-fast-s5"}
    assert [(line["row"], line["seed"]) for line in lines()] == [("avg-fast", "5"), ("fedavg", "5"), ("stl", "0")]
    commands = ["--seeds 1 --first-seed 5 --only fedavg,avg-fast", "--seeds 1 --only stl"]
    assert f"Made by {' and '.join(f'`weft repro {made.table} {words}`' for words in commands)}." in written("md")
    before = written("csv")
    shutil.rmtree("runs")  # as with results of another machine: they count without their runs
    assert made("--only", "stl", "--seeds", "1").code == 0
    assert written("csv") == before
    assert not runs_made()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"plan_hash": "0" * 16}, ("another plan or table", "another plan")),
        ({"images": OTHER_SPLIT}, ("other images or splits of notmnist", "other images or splits of notmnist")),
    ],
)
def test_stale_lines_are_run_again_or_left_out(made, change, reasons):
    assert made("--seeds", "1", "--only", "stl,fedavg").code == 0
    before = lasting()
    made.rewrite(lambda line: dataclasses.replace(line, **change))
    shutil.rmtree("runs")
    table = made.experiment()
    stale = Results(table, table.rows, range(1), read_csv(table, Path("results/tiny.csv")))
    assert "| stl | -" in output.page(stale)
    outcome = made("--seeds", "1", "--only", "stl")
    assert outcome.code == 0
    assert [line for line in outcome.err.splitlines() if "tiny.csv has" in line] == [
        f"results/tiny.csv has fedavg s0 of {reasons[0]}: kept, not counted in the means",
        f"results/tiny.csv has stl s0 of {reasons[1]}: stale, run again (--out keeps yours apart)",
    ]
    assert set(runs_made()) == {"stl-s0"}
    assert lasting() == [{**before[0], **change}, before[1]]
    assert "| fedavg | -" in written("md")


@pytest.mark.slow
def test_a_run_folder_of_other_images_is_refused_before_anything_runs(made):
    assert made("--seeds", "1", "--only", "stl").code == 0
    path = Path("runs/repro/tiny/stl-s0/environment.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "images": dict([OTHER_SPLIT.split(":")])}))
    assert made("--seeds", "1", "--only", "stl").code == 0, "its line is current: the folder is not needed"
    made.rewrite(lambda line: dataclasses.replace(line, images=OTHER_SPLIT))
    before = {kind: written(kind) for kind in ("csv", "md", "tex")}
    outcome = made("--seeds", "1")
    assert_one_line(
        outcome, "runs/repro/tiny/stl-s0 used other images or splits of notmnist", "remove it or choose another --runs"
    )
    assert set(runs_made()) == {"stl-s0"}
    assert {kind: written(kind) for kind in before} == before


def test_lines_that_were_not_requested_are_kept_and_not_counted(made):
    assert made("--seeds", "1", "--only", "stl").code == 0
    made.rewrite(lambda line: dataclasses.replace(line, row="gone"))
    old = lines()
    outcome = made("--seeds", "1", "--only", "stl")
    assert "results/tiny.csv has gone s0 of another plan or table: kept" in outcome.err
    assert lines()[0] == old[0]
    assert [line["row"] for line in lines()] == ["gone", "stl"]
    assert "gone" not in written("md")


@pytest.mark.slow
def test_a_run_folder_of_another_plan_is_refused_before_anything_runs(made):
    assert made("--seeds", "1", "--only", "stl").code == 0
    before = written("csv")
    made.plan.write_text(tiny(batch_size=5).toml())
    outcome = made("--seeds", "1")
    assert_one_line(outcome, "runs/repro/tiny/stl-s0", "another plan", "remove it or choose another --runs")
    assert set(runs_made()) == {"stl-s0"}
    assert written("csv") == before
    outcome = made("--seeds", "1", "--only", "stl", "--runs", "others")
    assert outcome.code == 0
    assert "stale" in outcome.err
    assert Path("others/stl-s0/summary.json").exists()
    assert written("csv") != before


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("runs/repro/tiny/stl-s0/notes.txt", "mine", ["stl-s0 is not a run folder", "--runs"]),
        ("results", "a file", ["results", "--out"]),
        ("results/tiny.csv", "a,b\n1,2\n", ["results/tiny.csv", "move it away"]),
        ("results/tiny.csv", "COLUMNS\nfedavg,fedavg\n", ["results/tiny.csv", "move it away"]),
    ],
)
def test_what_is_in_the_way_is_an_error_before_anything_runs(made, file, text, said):
    text = text.replace("COLUMNS", ",".join(columns_of(made.experiment())))
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    Path(file).write_text(text)
    assert_one_line(made("--seeds", "1"), *said)
    assert [path for path in Path().rglob("*") if path.is_file() and path.name[0] != "."] == [Path(file)]
    assert Path(file).read_text() == text


# ---- stopping, resuming, failing -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stopped_before_the_first_run_is_over_nothing_has_changed(made, monkeypatch):
    assert made("--seeds", "1", "--only", "stl,fedavg").code == 0  # the folder of the second one stays
    made.rewrite(lambda line: line if line.row == "fedavg" else dataclasses.replace(line, plan_hash="0" * 16))
    shutil.rmtree("runs/repro/tiny/stl-s0")
    before = {kind: written(kind) for kind in ("csv", "md", "tex")}

    def answered(bars: ProgressDisplay, *_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ProgressDisplay, "answered", answered)
        assert made().code == 130
    assert {kind: written(kind) for kind in before} == before
    assert "2 of 3 runs to do" in made().err
    assert any("resumed" in path.read_text() for path in Path("runs").rglob("journal.jsonl"))


@pytest.mark.slow
def test_a_failed_run_does_not_stop_the_table(made):
    made.table.write_text(TABLE + WILD)
    outcome = made("--seeds", "1", "--only", "wild,stl")
    assert outcome.code == 1
    assert re.search(r"^weft: wild s0 failed: .*(diverged|finite).*", outcome.err, re.MULTILINE)
    assert [line["row"] for line in lines()] == ["stl"]
    assert "| wild | - | - |" in written("md")
    assert "- wild s0: " in written("md")
    found = made("--seeds", "1", "--only", "wild", "--json")
    assert found.code == 1
    shown = json.loads(found.out)
    assert [(one["row"], one["seed"]) for one in shown["failed"]] == [("wild", 0)]
    assert shown["commands"] == [f"weft repro {made.table} --seeds 1 --only stl"]
    assert [row["row"] for row in shown["rows"]] == ["fedavg", "avg-fast", "stl", "wild"]
    row = shown["rows"][2]
    assert row["accuracy"] == {"mean": 100 * float(lines()[0]["accuracy"]), "deviation": None}
    assert (row["seeds"], row["up"], shown["kendall_tau"]) == (1, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_real_signal_and_two_workers(made, number):
    assert made("--seeds", "2", "--out", "whole", "--runs", "whole-runs").code == 0
    first = made.process("--workers", "2", "--seeds", "2")
    until(lambda: journal_lines(Path("runs/repro/tiny/stl-s0")) > 2)
    os.kill(first.pid, number)
    _, said = first.communicate(timeout=60)
    if number == signal.SIGINT:
        assert first.returncode == 130
        assert f"repeat the command to resume: weft repro {made.table} --workers 2 --seeds 2" in said
    assert 2 <= len(lines()) < 6
    assert "| fedavg | " in written("md")
    second = made.process("--workers", "2", "--seeds", "2")
    _, said = second.communicate(timeout=120)
    assert second.returncode == 0, said
    assert re.search(r"[1-4] of 6 runs to do", said)
    assert lasting() == lasting("whole")
    for kind in ("md", "tex"):
        assert written(kind) == written(kind, "whole")


@pytest.mark.slow
def test_runs_after_a_failed_one_have_fresh_workers(made):
    made.table.write_text(TABLE + WILD)
    running = made.process("--workers", "2", "--seeds", "2")
    _, said = running.communicate(timeout=120)
    assert running.returncode == 1, said
    assert said.count("weft: wild s") == 2
    failed = lasting()
    made.table.write_text(TABLE)
    assert made("--seeds", "2", "--out", "whole", "--runs", "whole-runs").code == 0
    assert failed == lasting("whole")


def test_a_run_that_another_process_is_at_is_no_failure(made, monkeypatch):
    """It is reported, but not on the page; pictures are drawn at the end also if it was the last run."""
    assert made("--only", "stl").code == 0
    (folder,) = Path("runs").rglob("stl-s0")
    (folder / "summary.json").unlink()  # as if it were in progress
    Path("results/tiny.csv").unlink()
    with filelock.FileLock(folder / ".lock"):
        outcome = made("--only", "stl")
    assert outcome.code == 1
    assert "another process is working on" in outcome.err
    assert "Failed" not in written("md")
    drawn = []

    def noted(results: Any, more_to_come: bool) -> Any:
        drawn.append(not more_to_come)
        return output.render(results, more_to_come)

    monkeypatch.setattr(runner, "render", noted)
    with filelock.FileLock(folder / ".lock"):
        assert made("--only", "fedavg,stl").code == 1
    assert drawn == [False, True]


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "fedavgg"], ["tiny has no row 'fedavgg'", "did you mean fedavg?"]),
        (["--only", "stl,"], ["no row ''"]),
        (["--seeds", "0"], ["--seeds"]),
        (["--seeds", "many"], ["--seeds", "many"]),
        (["--first-seed", "-1"], ["--first-seed"]),
        (["--workers", "0"], ["workers", "1 or more"]),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(made, words, said):
    assert_one_line(made(*words), *said)
    assert not list(Path().iterdir())


def test_missing_images_are_reported_once_and_before_anything_is_written(made, monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path / "empty"))
    made.plan.write_text('scenario = "overlapped-cifar100"\nclients = 2\ntasks = 1\nnetwork = "mlp"\n')
    assert_one_line(made("--seeds", "2"), "cifar100", "weft data get cifar100")
    assert not list(Path().iterdir())
