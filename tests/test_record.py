"""The run folder: what is in it, what it refuses, and that nothing in it is ever lost."""

import csv
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cli_helpers import (
    ANSWERS,
    TINY,
    Stop,
    Stopper,
    assert_one_line,
    assert_same_result,
    contents,
    copy,
    journal_lines,
    stop_after,
    summary_of,
    tiny,
    until,
)

import weft
from weft import Result, WeftError, metrics
from weft.plan import Plan
from weft.runs.folder import FORMAT, RunFolder, accuracy_matrices, read_rows
from weft.wire.ledger import Entry, by

pytest_plugins = ["cli_helpers"]

RUNS = ["finished", "finished_fedavg", "finished_stl"]


@pytest.fixture(params=RUNS)
def any_run(request):
    return request.getfixturevalue(request.param)


# ---- what is in it ---------------------------------------------------------------------------------------------------


def test_the_files(any_run):
    names = {path.name for path in any_run.iterdir()} - {".lock"}
    assert names == {
        "plan.toml",
        "environment.json",
        "journal.jsonl",
        "run.json",
        "contents.json",
        "accuracy.csv",
        "ledger.csv",
        "checkpoints",
        "summary.json",
    }
    assert json.loads((any_run / "run.json").read_text())["format"] == FORMAT
    assert json.loads((any_run / "environment.json").read_text())["packages"]["torch"].startswith("2.")
    manifest = json.loads((any_run / "checkpoints" / "manifest.json").read_text())
    assert manifest["progress"]["task"] == TINY["tasks"]


def test_the_plan_in_the_folder_is_the_whole_plan(finished):
    assert Plan.load(finished) == tiny() == Result(finished).plan


def test_the_journal_tells_what_happened_when(any_run):
    events = [json.loads(line) for line in (any_run / "journal.jsonl").read_text().splitlines()]
    assert [events[0]["event"], events[-1]["event"]] == ["created", "finished"]
    assert all(one["at"] <= other["at"] for one, other in itertools.pairwise(events))
    answers = [event for event in events if event["event"] == "reply"]
    places = {(event["client"], event["task"], event["round"]) for event in answers}
    assert places == {(client, step, r) for client in range(3) for step in range(2) for r in range(2)}


def test_the_fields_of_a_summary(any_run):
    summary = summary_of(any_run)
    words = {"method": str, "scenario": str, "network": str}
    counts = dict.fromkeys(("seed", "clients", "tasks", "rounds_per_task"), int)
    sizes = {"model_size_bytes": int, "model_size_paper_bytes": int}
    times = {"images_per_second": float, "seconds": float}
    measures = dict.fromkeys(("accuracy", "validation_accuracy", "forgetting", "backward_transfer"), float)
    for key, kind in {**words, **counts, **sizes, **times, **measures}.items():
        assert type(summary[key]) is kind, key
    assert (summary["scenario"], summary["network"], summary["clients"], summary["tasks"]) == ("glyphs", "mlp", 3, 2)
    assert summary["rounds_per_task"] == 2
    assert len(summary["accuracy_by_client"]) == 3
    for fraction in (summary["accuracy"], summary["validation_accuracy"], *summary["accuracy_by_client"]):
        assert 0 < fraction <= 1  # a fraction, not percent
    assert -1 <= summary["forgetting"] <= 1
    assert -1 <= summary["backward_transfer"] <= 1
    if summary["method"] == "fedweit":
        assert 0 < summary["adaptive_density"] <= 1
    else:
        assert summary["adaptive_density"] is None
    assert set(summary["traffic"]) == {"c2s", "s2c"}
    for traffic in summary["traffic"].values():
        assert {key: type(value) for key, value in traffic.items()} == dict.fromkeys(
            ("bytes", "nonzeros", "dense_bytes"), int
        )
    assert summary["model_size_bytes"] >= summary["model_size_paper_bytes"] > 0
    assert summary["seconds"] > 0
    assert summary["images_per_second"] > 0
    assert summary["measured_model"] == "own"  # the model that was measured is stated


def test_a_summary_tells_no_path_host_or_date(any_run):
    text = (any_run / "summary.json").read_text()
    for secret in (str(any_run), str(any_run.parent), str(Path.home()), platform.node(), str(Path.cwd())):
        assert len(secret) < 3 or secret not in text
    assert "/" not in text
    assert not re.search(r"\b20\d\d-\d\d", text)
    assert not re.search(r"\b1[6-9]\d{8}\b", text)  # seconds since 1970


def test_accuracy_and_summary_agree(any_run):
    with (any_run / "accuracy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["client", "after_task", "task", "accuracy"]
    places = [(int(row["client"]), int(row["after_task"]), int(row["task"])) for row in rows]
    expected = {(client, after, task) for client in range(3) for after in range(2) for task in range(after + 1)}
    assert len(places) == len(expected)
    assert set(places) == expected
    values = dict(zip(places, (float(row["accuracy"]) for row in rows), strict=True))
    for value in values.values():
        assert 0 <= value <= 1
        assert math.isclose(value * TINY["scenario.test"], round(value * TINY["scenario.test"]), abs_tol=1e-6)

    # worked out once more, without the library
    summary = summary_of(any_run)
    last = [(values[client, 1, 0] + values[client, 1, 1]) / 2 for client in range(3)]
    forgotten = [values[client, 0, 0] - values[client, 1, 0] for client in range(3)]
    assert summary["accuracy_by_client"] == pytest.approx(last)
    assert summary["accuracy"] == pytest.approx(sum(last) / 3)
    assert summary["forgetting"] == pytest.approx(sum(forgotten) / 3)
    assert summary["backward_transfer"] == pytest.approx(-sum(forgotten) / 3)

    matrix = Result(any_run).accuracy_matrix
    for (client, after, task), value in values.items():
        assert matrix[client, after, task] == value
    matrices = accuracy_matrices(any_run)
    assert metrics.over_clients(metrics.average_accuracy, matrices.values()) == summary["accuracy"]


def test_the_ledger_sums_up_to_the_traffic(any_run):
    summary = summary_of(any_run)
    sums = {direction: dict.fromkeys(("bytes", "nonzeros", "dense_bytes"), 0) for direction in ("c2s", "s2c")}
    with (any_run / "ledger.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            for key in sums[row["direction"]]:
                sums[row["direction"]][key] += int(row[key])
    columns = ["direction", "client", "task", "round", "part", "bytes", "nonzeros", "dense_bytes"]
    assert reader.fieldnames == columns
    assert summary["traffic"] == sums
    if summary["method"] == "stl":
        assert sums["c2s"]["bytes"] == sums["s2c"]["bytes"] == 0
    else:
        assert sums["c2s"]["bytes"] > sums["c2s"]["nonzeros"] > 0  # at least a byte for each value


def test_the_ledger_names_every_message_once(finished):
    entries = [Entry.from_row(row) for row in read_rows(finished, "ledger.csv")]
    headers = [(e.direction, e.client, e.step, e.round) for e in entries if e.part == "header"]
    assert len(headers) == len(set(headers)) == 2 * ANSWERS
    parts = {part for _, part in by(entries, "direction", "tensor")}
    assert {"header", "weights", "adaptive", "global"} <= parts
    given = [e for e in entries if e.part == "adaptive"]  # Alg. 1 line 11: once a client and task
    assert sorted((e.client, e.step) for e in given) == [(client, step) for client in range(3) for step in range(2)]


def test_checkpoints_hold_nothing_but_what_the_manifest_names(finished):
    manifest = json.loads((finished / "checkpoints" / "manifest.json").read_text())
    named = {"manifest.json"}
    for reference in (manifest["server"], *manifest["clients"].values()):
        named |= {reference["file"][0], *(mark[0] for mark in reference["archive"].values())}
    assert {path.name for path in (finished / "checkpoints").iterdir()} == named


# ---- the result in Python --------------------------------------------------------------------------------------------


def test_a_result_has_the_summarys_names(finished):
    result = Result(finished)
    summary = summary_of(finished)
    assert result.plan.name == summary.pop("plan")
    for key, value in summary.items():
        assert getattr(result, key) == value
    with pytest.raises(AttributeError, match=r"no 'acuracy'.*accuracy"):
        _ = result.acuracy
    assert "fedweit" in repr(result)
    assert str(finished) in repr(result)


def test_the_accuracy_matrix(finished):
    matrix = Result(finished).accuracy_matrix
    assert matrix.shape == (3, 2, 2)
    for client in range(3):
        assert math.isnan(matrix[client, 0, 1])  # task 1 after task 0: not yet learned
        assert not any(math.isnan(matrix[client, after, task]) for after, task in ((0, 0), (1, 0), (1, 1)))


def test_a_result_as_a_frame(finished):
    pandas = pytest.importorskip("pandas")
    result = Result(finished)
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["client", "after_task", "task", "accuracy"]
    assert len(frame) == 9
    last = frame[frame.after_task == 1].groupby("client").accuracy.mean()
    assert list(last) == pytest.approx(result.accuracy_by_client)
    ledger = result.frame("ledger")
    assert ledger[ledger.direction == "c2s"].bytes.sum() == result.traffic["c2s"]["bytes"]
    with pytest.raises(WeftError, match=r"no table 'ledgr'.*accuracy, ledger"):
        result.frame("ledgr")


def test_a_frame_without_pandas_says_what_is_missing(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(WeftError, match="pip install pandas"):
        Result(finished).frame()


def test_an_unfinished_run_has_no_result(stopped):
    with pytest.raises(WeftError, match=rf"not over; weft resume {stopped}"):
        Result(stopped)


def test_ten_lines_of_python(tmp_path, monkeypatch, finished):
    monkeypatch.chdir(tmp_path)
    result = weft.run(weft.Plan(name="tiny", **TINY))
    assert result.folder == Path("runs/tiny-fedweit-s0")
    assert_same_result(result.folder, finished)
    again = weft.resume(str(result.folder))
    assert again.summary == result.summary


# ---- nothing is written over -----------------------------------------------------------------------------------------


def test_a_run_is_never_written_over(tmp_path, finished, stopped, command, plan_file):
    for number, run in enumerate((finished, stopped)):
        folder = copy(run, tmp_path / str(number))
        before = contents(folder)
        with pytest.raises(WeftError, match=rf"already holds a run; weft resume {folder}"):
            weft.run(tiny(), folder)
        assert_one_line(command("run", plan_file, "--out", folder, "--workers", "1"), "already holds a run", "--out")
        assert contents(folder) == before


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path, command, plan_file):
    (tmp_path / "thesis.tex").write_text("three years of work")
    assert_one_line(command("run", plan_file, "--out", tmp_path, "--workers", "1"), "is not empty", "--out")
    assert contents(tmp_path) == {"thesis.tex": b"three years of work"}


def test_a_file_in_the_way(tmp_path, command, plan_file):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert_one_line(command("run", plan_file, "--out", out, "--workers", "1"), str(out))
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_new_folder_may_be_empty_or_deep(tmp_path):
    for folder in (tmp_path / "there", tmp_path / "a" / "b" / "c"):
        if folder.name == "there":
            folder.mkdir()
        RunFolder.create(folder, tiny()).close()
        assert Plan.load(folder) == tiny()


def test_resuming_a_finished_run_changes_nothing(tmp_path, finished, command):
    folder = copy(finished, tmp_path / "run")
    before = contents(folder)
    outcome = command("resume", folder, "--workers", "1")
    assert outcome.code == 0
    assert "over" in outcome.err
    assert contents(folder) == before
    assert weft.resume(folder).summary == summary_of(finished)
    assert contents(folder) == before


class Crash(BaseException):
    """As sudden as kill -9: nothing catches it, nothing tidies up."""


@pytest.mark.parametrize("writes", range(7))
def test_a_folder_that_was_killed_while_being_made_can_be_used(tmp_path, monkeypatch, writes):
    """After a kill between any two files there is either a run to resume, or a folder that a new run may take."""
    left = writes
    whole = weft.runs.folder.write_text

    def crashing(path, text):
        nonlocal left
        if left == 0:
            raise Crash
        left -= 1
        whole(path, text)

    monkeypatch.setattr(weft.runs.folder, "write_text", crashing)
    try:
        RunFolder.create(tmp_path / "run", tiny()).close()
    except Crash:
        pass
    else:
        assert writes > 0  # it came through: there were no more files to write
    monkeypatch.undo()
    try:
        record = RunFolder.open(tmp_path / "run")
    except WeftError:
        record = RunFolder.create(tmp_path / "run", tiny())
    assert record.plan == tiny()
    assert record.manifest() is None
    record.close()


# ---- one process at a time -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_process_is_refused_and_the_lock_dies_with_the_first(tmp_path, command, plan_file, finished):
    folder = tmp_path / "run"
    first = command.start("run", plan_file, "--out", folder, "--workers", "1", "--save-every", "0")
    until(lambda: journal_lines(folder) > 3)
    first.send(signal.SIGSTOP)  # it lives and holds the folder, but does nothing
    before = contents(folder)
    assert_one_line(command("resume", folder, "--workers", "1"), "another process", str(folder))
    assert_one_line(command("run", plan_file, "--out", folder, "--workers", "1"), "already holds a run")
    with pytest.raises(WeftError, match="another process"):
        weft.resume(folder)
    assert command("show", folder).code == 0  # reading is free
    assert contents(folder) == before
    assert first.kill() == -signal.SIGKILL
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, finished)


def test_the_same_process_twice_is_refused_too(tmp_path):
    record = RunFolder.create(tmp_path / "run", tiny())
    with pytest.raises(WeftError, match="another process"):
        RunFolder.open(tmp_path / "run")
    record.close()
    RunFolder.open(tmp_path / "run").close()


def test_a_run_that_failed_lets_go_of_its_folder(tmp_path, finished):
    stop_after(tmp_path / "run", 5)
    assert_same_result(weft.resume(tmp_path / "run").folder, finished)


# ---- damage ----------------------------------------------------------------------------------------------------------


def assert_refused(command, folder, *words, commands=("resume",)):
    """One line and code 2 for each command, and not a byte of the folder is changed."""
    before = contents(folder)
    for name in commands:
        options = ["--workers", "1"] if name == "resume" else []
        outcome = command(name, folder, *options)
        assert_one_line(outcome._replace(out="") if name == "show" else outcome, *words)  # it may have begun to show
    after = contents(folder)
    after["journal.jsonl"] = after.get("journal.jsonl", b"")[: len(before.get("journal.jsonl", b""))]  # may grow
    assert after.keys() >= before.keys()
    changed = [name for name in before if after[name] != before[name]]
    assert not changed


ALL = ("resume", "show", "compare")


@pytest.mark.slow
def test_a_folder_that_is_no_run(tmp_path, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "file").write_text("text")
    for name in ("empty", "photos", "file", "nowhere"):
        for act in ALL:
            assert_one_line(command(act, tmp_path / name), "not a run folder", str(tmp_path / name))
    assert contents(tmp_path) == {"photos/cat.jpg": b"\xff\xd8", "file": b"text"}
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_of_another_version(tmp_path, command, stopped):
    folder = copy(stopped, tmp_path / "run")
    (folder / "run.json").write_text(json.dumps({"format": 99, "weft": "7.1"}))
    assert_refused(command, folder, "weft 7.1", "layout 99", commands=ALL)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weft": "0.1.0"}', "3", "\x00\x01"])
def test_a_damaged_run_json(tmp_path, stopped, text):
    folder = copy(stopped, tmp_path / "run")
    (folder / "run.json").write_text(text)
    with pytest.raises(WeftError, match="not a run folder"):
        weft.resume(folder)


@pytest.mark.slow
def test_a_plan_that_was_damaged_or_lost(tmp_path, command, stopped):
    folder = copy(stopped, tmp_path / "run")
    text = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(text.replace("clients = ", "clients == ", 1))
    assert_refused(command, folder, "plan.toml", commands=ALL)
    (folder / "plan.toml").unlink()
    assert_refused(command, folder, str(folder), commands=ALL)


def state_files(folder: Path) -> dict[str, Path]:
    """One file of each kind that a checkpoint consists of."""
    manifest = json.loads((folder / "checkpoints" / "manifest.json").read_text())
    client = manifest["clients"]["0"]
    adaptive = next(mark for key, mark in client["archive"].items() if key.startswith("adaptive/"))
    given = next(iter(manifest["server"]["archive"].values()))
    marks = {"server": manifest["server"]["file"], "given": given, "client": client["file"], "adaptive": adaptive}
    return {kind: folder / "checkpoints" / mark[0] for kind, mark in marks.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["server", "client", "adaptive"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_state(tmp_path, command, stopped, kind, damage):
    folder = copy(stopped, tmp_path / "run")
    file = state_files(folder)[kind]
    blob = bytearray(file.read_bytes())
    if damage == "flip":
        blob[len(blob) // 2] ^= 1
        file.write_bytes(blob)
    elif damage == "cut":
        file.write_bytes(blob[:-1])
    else:
        file.unlink()
    assert_refused(command, folder, "the checkpoint is", file.name)


def test_a_damaged_gift_to_the_knowledge_base_is_noticed_when_it_is_needed(tmp_path):
    folder = tmp_path / "run"
    stop_after(
        folder, ANSWERS // 2 + 1
    )  # in the first round of the second task: the knowledge base is about to be sent
    file = state_files(folder)["given"]
    blob = bytearray(file.read_bytes())
    blob[-1] ^= 128
    file.write_bytes(blob)
    with pytest.raises(WeftError, match="checkpoint is corrupt"):
        weft.resume(folder)


def assert_manifest_refused(folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(WeftError, match="checkpoint") as caught:
        weft.resume(folder)
    assert "\n" not in str(caught.value)
    after = contents(folder)
    del before["journal.jsonl"], after["journal.jsonl"]
    assert after == before


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"progress": {}}', "\x00" * 40])
def test_a_damaged_manifest(tmp_path, stopped, text):
    folder = copy(stopped, tmp_path / "run")
    (folder / "checkpoints" / "manifest.json").write_text(text)
    assert_manifest_refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["progress"].update(images=1 + manifest["progress"]["images"]),
        lambda manifest: manifest["progress"].update(round=0),
        lambda manifest: manifest["progress"].update(steps=1),
        lambda manifest: manifest["progress"]["validation"].update({"0/0": 1.0}),
        lambda manifest: manifest["lengths"].update({"ledger.csv": manifest["lengths"]["ledger.csv"] - 7}),
        lambda manifest: manifest["clients"].pop("1"),
        lambda manifest: manifest["answers"].pop("1"),
        lambda manifest: manifest.update(clients=[]),
        lambda manifest: manifest["server"].pop("file"),
    ],
    ids=["images", "round", "unknown", "validation", "lengths", "client", "answers", "list", "server"],
)
def test_a_manifest_that_is_json_but_not_what_was_written(tmp_path, stopped, change):
    """A state has a checksum in the manifest; the manifest needs one too, or a flipped digit is a wrong result."""
    folder = copy(stopped, tmp_path / "run")
    path = folder / "checkpoints" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert_manifest_refused(folder)


@pytest.mark.parametrize("table", ["accuracy.csv", "ledger.csv"])
def test_a_table_that_lost_lines_its_checkpoint_counts_on(tmp_path, command, stopped, table):
    """To go on from here would fill the gap with nothing, and the result would be wrong."""
    folder = copy(stopped, tmp_path / "run")
    length = json.loads((folder / "checkpoints" / "manifest.json").read_text())["lengths"][table]
    os.truncate(folder / table, length - 5)
    assert_refused(command, folder, table)
    (folder / table).unlink()
    assert_refused(command, folder, table)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["accuracy.csv", "ledger.csv"])
@pytest.mark.parametrize("line", ["0,1", "c2s,0,0", "a,b,c,d", "0,0,0,x", "c2s,0,0,0,base,one,2,3", ""])
def test_a_table_with_a_damaged_line(tmp_path, command, finished, table, line):
    folder = copy(finished, tmp_path / "run")
    lines = (folder / table).read_text().splitlines()
    lines[2] = line
    (folder / table).write_text("\n".join(lines) + "\n")
    assert_refused(command, folder, commands=["show"])


def test_a_matrix_with_a_hole_is_refused(tmp_path, finished):
    folder = copy(finished, tmp_path / "run")
    lines = (folder / "accuracy.csv").read_text().splitlines()
    del lines[next(place for place, line in enumerate(lines) if line.startswith("0,1,0,"))]  # half of a row
    (folder / "accuracy.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(WeftError, match=r"accuracy\.csv"):
        _ = Result(folder).accuracy_matrix


def test_a_line_that_is_still_being_written_is_left_out(tmp_path, stopped):
    folder = copy(stopped, tmp_path / "run")
    whole = read_rows(folder, "ledger.csv")
    with (folder / "ledger.csv").open("a") as file:
        file.write("c2s,0,1,1,ba")
    assert read_rows(folder, "ledger.csv") == whole


def test_what_was_written_after_the_checkpoint_is_taken_back(tmp_path, stopped, finished):
    folder = copy(stopped, tmp_path / "run")
    for table, line in (("ledger.csv", "c2s,0,1,1,base,9,9,9\nc2s,0,"), ("accuracy.csv", "0,1,0,0.5\n0,1")):
        with (folder / table).open("a") as file:
            file.write(line)
    (folder / "checkpoints" / "client-0000@99.safetensors").write_bytes(b"half a st")
    (folder / "checkpoints" / ".manifest.json.123.part").write_bytes(b"{")
    (folder / ".summary.json.123.part").write_bytes(b"{")
    weft.resume(folder)
    assert_same_result(folder, finished)
    assert [path.name for path in folder.rglob("*.part")] in ([], [".summary.json.123.part"])
    assert not (folder / "checkpoints" / "client-0000@99.safetensors").exists()


def test_a_damaged_summary_is_written_again_by_resume(tmp_path, command, finished):
    folder = copy(finished, tmp_path / "run")
    text = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(text[: len(text) // 2])
    for act in ("show", "compare"):
        assert_one_line(command(act, folder), "summary.json", f"weft resume {folder}")
    assert command("resume", folder, "--workers", "1").code == 0  # as the line promised
    assert_same_result(folder, finished)


@pytest.mark.slow
def test_a_summary_that_is_json_but_no_summary(tmp_path, command, finished):
    folder = copy(finished, tmp_path / "run")
    for text in ("[]", "{}", "null", '{"method": "fedweit"}'):
        (folder / "summary.json").write_text(text)
        assert_one_line(command("compare", folder), "summary.json")


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_file_may_grow_any_more(tmp_path, command, plan_file, finished):
    """The limit lets the first checkpoints through and stops a later one, as a disk that fills up does."""
    sizes = []
    for answers in (4, ANSWERS):
        stop_after(tmp_path / str(answers), answers)
        sizes.append(max(path.stat().st_size for path in (tmp_path / str(answers) / "checkpoints").iterdir()))
    assert sizes[0] + 10_000 < sizes[1]
    folder = tmp_path / "run"
    words = ("run", plan_file, "--out", folder, "--workers", "1", "--save-every", "0")
    outcome = command(*words, largest_file=sizes[0] + 5_000, save_always=True)
    error = "".join(line for line in outcome.err.splitlines(keepends=True) if not line.startswith("fedweit: "))
    assert_one_line(outcome._replace(err=error), "cannot be written (File too large)", "weft resume")
    assert (folder / "checkpoints" / "manifest.json").exists()
    assert not list(folder.rglob("*.part"))
    assert not (folder / "summary.json").exists()
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, finished)


def test_not_even_a_line_can_be_added(tmp_path, command, stopped, finished):
    """Half a line is written before the disk is full: it must not spoil the line that a resumed run adds."""
    folder = copy(stopped, tmp_path / "run")
    journal = folder / "journal.jsonl"
    room = journal.stat().st_size + 20
    assert_one_line(
        command("resume", folder, "--workers", "1", largest_file=room), "cannot be written", "journal.jsonl"
    )
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, finished)
    for line in journal.read_text().splitlines():
        json.loads(line)


@pytest.mark.slow
def test_no_room_for_a_new_folder(tmp_path, command, plan_file, finished):
    folder = tmp_path / "run"
    words = ("run", plan_file, "--out", folder, "--workers", "1")
    # plan.toml is larger; what goes to stderr is not
    assert_one_line(command(*words, largest_file=1000), "cannot be", "File too large")
    assert command(*words).code == 0  # once there is room, the same command works
    assert_same_result(folder, finished)


FULL_DISK = """
    import json, subprocess, sys, weft
    place, plan = sys.argv[1:]
    def mount(*options):
        subprocess.run(["mount", "-t", "tmpfs", *options, "none", place], check=True)
    import weft.runs.session
    weft.runs.session.SAVE_SHARE = 0  # a checkpoint after each round, however long it takes
    mount("-o", "size=3m")
    try:
        weft.run(weft.Plan.load(plan), f"{place}/run", save_every=0)
        raise SystemExit("the disk was large enough")
    except weft.WeftError as problem:
        said = str(problem)
    mount("-o", "remount,size=64m")
    result = weft.resume(f"{place}/run")
    tables = {name: (result.folder / name).read_text() for name in ("accuracy.csv", "ledger.csv")}
    print(json.dumps({"said": said, "summary": result.summary, **tables}))
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path, plan_file, finished):
    """A small disk in memory, mounted where nobody else sees it; then it grows, and the run goes on."""
    if shutil.which("unshare") is None:
        pytest.skip("NOT TESTED: no `unshare` here, so no disk can be made that is full")
    apart = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    (tmp_path / "disk").mkdir()
    trial = subprocess.run(
        [*apart, "mount", "-t", "tmpfs", "none", tmp_path / "disk"], capture_output=True, check=False
    )
    if trial.returncode:
        pytest.skip("NOT TESTED: mounting is not allowed here, so no disk can be made that is full")
    script = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path / "disk"), str(plan_file)]
    done = subprocess.run([*apart, *script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "No space left on device" in found["said"]
    assert "weft resume" in found["said"]
    again = tmp_path / "again"
    again.mkdir()
    (again / "summary.json").write_text(json.dumps(found["summary"]))
    for table in ("accuracy.csv", "ledger.csv"):
        (again / table).write_text(found[table])
    assert_same_result(again, finished)


def test_the_stopper_stops():
    """The tests above rest on it."""
    stopper = Stopper(2)
    stopper.answered()
    with pytest.raises(Stop):
        stopper.answered()
