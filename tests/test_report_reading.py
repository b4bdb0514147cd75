"""The reader of run folders: runs in progress, resumed runs, damaged files, plans of another machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from cli_helpers import TINY, assert_one_line, copy, tiny
from report_helpers import data_of, figure, page_of, traces

import weft
from weft.report.reading import read_run
from weft.report.terminal import details
from weft.runs.journal import Journal, read_journal, read_rounds

pytest_plugins = ["cli_helpers"]

CLIENTS, TASKS = TINY["clients"], TINY["tasks"]


def test_an_unfinished_run_is_shown(stopped):
    text = page_of(stopped)
    assert "Not finished: fedweit" in text
    (line,) = traces(data_of(text), "accuracy-after", group=0, client="mean")
    assert len(line["y"]) == 1


def test_a_resumed_run_counts_each_round_once(stopped, tmp_path):
    folder = copy(stopped, tmp_path / "run")
    weft.resume(folder)
    assert len(read_run(folder).rounds) == CLIENTS * TASKS * TINY["rounds_per_task"]
    assert "Resumed 1 time" in page_of(folder)


@pytest.mark.slow
def test_a_resumed_run_with_task_clocks_keeps_all_rounds(tmp_path):
    whole = weft.run(tiny(rounds_per_task=4, **{"async": "updates", "clock.spread": 3.0}), tmp_path / "whole").folder
    lines = (whole / "journal.jsonl").read_text().splitlines()
    cut = next(index for index in range(len(lines) // 2, len(lines)) if '"event": "reply"' in lines[index])
    again = [*lines[:cut], json.dumps({"at": 0.0, "event": "resumed"}), *lines[cut - 3 :]]
    other = copy(whole, tmp_path / "other")
    (other / "journal.jsonl").write_text("\n".join(again) + "\n")
    before, after = (read_run(folder).rounds for folder in (whole, other))
    assert [item[:3] for item in after] == [item[:3] for item in before]


def test_the_journal_is_read_from_where_the_last_call_stopped(finished, tmp_path):
    lines = (finished / "journal.jsonl").read_text().splitlines(keepends=True)
    journal = Journal(tmp_path)
    assert journal.new_events() == []
    half = lines[2][: len(lines[2]) // 2]
    journal.path.write_text("".join(lines[:2]) + half)
    assert len(journal.new_events()) == 2
    journal.path.write_text("".join(lines))
    assert len(journal.new_events()) == len(lines) - 2
    assert journal.notes == []
    assert read_journal(tmp_path)[0].kind == "created"


def test_damaged_parts_are_named_and_left_out(finished, tmp_path, command):
    folder = copy(finished, tmp_path / "run")
    journal = (folder / "journal.jsonl").read_text()
    bad = re.sub(r'"valid_accuracy": [\d.e-]+', '"valid_accuracy": "<b>"', journal, count=1)
    (folder / "journal.jsonl").write_text(bad + '{"at": 1, "event"\n{"half')
    next((folder / "checkpoints").glob("client-*.tasks.1.safetensors")).write_bytes(b"nothing")
    run = read_run(folder)
    assert len(run.notes) == 3
    assert not run.densities
    assert not run.attention
    text = page_of(folder)
    assert "3 items could not be read" in text
    assert "helping-pairs-0" not in data_of(text)["figures"]
    assert command("show", folder, cwd=tmp_path).code == 0


@pytest.mark.parametrize("name", ["valid_accuracy", "valid_loss", "train_loss", "round"])
@pytest.mark.parametrize("value", ['"high"', "[0.5]", "NaN", "1e999", "{}"])
def test_a_reply_with_a_bad_value_is_named_and_left_out(finished, tmp_path, name, value):
    reply = '{"at": 2e9, "event": "reply", "client": 0, "task": 0, "round": 77, "images": 5, "%s": %s}\n'
    text = (finished / "journal.jsonl").read_text()
    (tmp_path / "journal.jsonl").write_text(text + reply % (name, value))
    whole, damaged = Journal(finished), Journal(tmp_path)
    rounds = [read_rounds(journal.new_events(), journal) for journal in (whole, damaged)]
    assert rounds[0] == rounds[1]
    assert (len(whole.notes), len(damaged.notes)) == (0, 1)
    assert "damaged" in damaged.notes[0]


@pytest.mark.parametrize("name", ["accuracy.csv", "ledger.csv"])
def test_a_damaged_table_is_a_one_line_error(finished, tmp_path, command, name):
    folder = copy(finished, tmp_path / "run")
    with (folder / name).open("a") as file:
        file.write("x,y\n")
    assert_one_line(command("report", folder, cwd=tmp_path), name, "damaged")


@pytest.mark.parametrize("missed", [0, 1])
def test_a_missing_test_is_left_out(missed, finished, tmp_path):
    folder = copy(finished, tmp_path / "run")
    table = folder / "accuracy.csv"
    head, *lines = table.read_text().splitlines()
    kept = [line for line in lines if line.split(",")[:2] != ["1", str(missed)]]
    assert len(kept) < len(lines)
    table.write_text("\n".join([head, *kept]) + "\n")
    shown = data_of(page_of(folder))
    json.dumps(shown, allow_nan=False)
    assert set(figure(shown, "matrix-0-1")["traces"][0]["z"][missed]) == {None}
    details(read_run(folder))


def test_a_plan_with_a_network_of_another_machine_can_be_read(finished, tmp_path):
    folder = copy(finished, tmp_path / "run")
    plan = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(plan.replace('name = "mlp"', 'name = "/nowhere/nets.py:Own"'))
    assert "/nowhere/nets.py:Own" in page_of(folder)


def test_the_reader_loads_neither_numpy_nor_torch():
    program = "import sys; import weft.report.reading; sys.exit('numpy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
