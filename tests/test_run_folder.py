"""The run folder: its files, what it rejects, and that nothing in it is lost or overwritten."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest
from cli_helpers import (
    ANSWERS,
    TINY,
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
from weft import WeftError
from weft.core.storage import files_of
from weft.plan import Plan
from weft.runs.folder import FORMAT, RunFolder

pytest_plugins = ["cli_helpers"]

ALL = ("resume", "show", "compare")


# ---- files -----------------------------------------------------------------------------------------------------------


def test_files(finished, finished_stl):
    for run in (finished, finished_stl):
        tables = {"accuracy.csv", "validation.csv", "ledger.csv", "journal.jsonl"}
        facts = {"plan.toml", "environment.json", "run.json", "contents.json", "summary.json"}
        assert {path.name for path in run.iterdir()} - {".lock"} == {*tables, *facts, "checkpoints"}
        assert json.loads((run / "run.json").read_text())["format"] == FORMAT
        assert json.loads((run / "environment.json").read_text())["packages"]["torch"].startswith("2.")
        manifest = json.loads((run / "checkpoints" / "manifest.json").read_text())
        assert manifest["progress"]["task"] == TINY["tasks"]


def test_events_of_the_journal(finished, finished_stl):
    for run in (finished, finished_stl):
        events = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        assert [events[0]["event"], events[-1]["event"]] == ["created", "finished"]
        assert all(one["at"] <= other["at"] for one, other in itertools.pairwise(events))
        replies = {(each["client"], each["task"], each["round"]) for each in events if each["event"] == "reply"}
        assert replies == {(client, task, r) for client in range(3) for task in range(2) for r in range(2)}


def test_checkpoints_contain_only_the_files_of_the_manifest(finished):
    manifest = json.loads((finished / "checkpoints" / "manifest.json").read_text())
    named = {"manifest.json"}.union(*map(files_of, (manifest["server"], *manifest["clients"].values())))
    assert {path.name for path in (finished / "checkpoints").iterdir()} == named


# ---- nothing is overwritten ------------------------------------------------------------------------------------------


def test_a_run_is_never_overwritten(tmp_path, finished, stopped, command, plan_file):
    for number, run in enumerate((finished, stopped)):
        folder = copy(run, tmp_path / str(number))
        before = contents(folder)
        with pytest.raises(WeftError, match=rf"already holds a run; weft resume {folder}"):
            weft.run(tiny(), folder)
        assert_one_line(command("run", plan_file, "--out", folder, "--workers", "1"), "already holds a run", "--out")
        assert contents(folder) == before


def test_a_folder_with_other_files_is_not_changed(tmp_path, command, plan_file):
    (tmp_path / "thesis.tex").write_text("three years of work")
    assert_one_line(command("run", plan_file, "--out", tmp_path, "--workers", "1"), "is not empty", "--out")
    assert contents(tmp_path) == {"thesis.tex": b"three years of work"}


def test_a_file_at_the_path_of_a_folder(tmp_path, command, plan_file):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert_one_line(command("run", plan_file, "--out", out, "--workers", "1"), str(out))
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_new_folder_is_private_and_may_be_empty_or_nested(tmp_path):
    (tmp_path / "empty").mkdir(mode=0o755)
    for path in (tmp_path / "empty", tmp_path / "a" / "b" / "c"):
        RunFolder.create(path, tiny()).close()
        assert Plan.load(path) == tiny()
        assert path.stat().st_mode & 0o777 == 0o700


def test_resuming_a_finished_run_changes_nothing(tmp_path, finished, command):
    folder = copy(finished, tmp_path / "run")
    before = contents(folder)
    outcome = command("resume", folder, "--workers", "1")
    assert outcome.code == 0
    assert "finished" in outcome.err
    assert contents(folder) == before
    assert weft.resume(folder).summary == summary_of(finished)
    assert contents(folder) == before


class Crash(BaseException):
    """As sudden as kill -9: nothing catches it or cleans up."""


@pytest.mark.parametrize("writes", range(7))
def test_a_kill_while_a_folder_is_created(tmp_path, monkeypatch, writes):
    """After a kill between any two files there is either a run to resume, or room for a new run."""
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
        assert writes > 0  # all files were written
    monkeypatch.undo()
    try:
        folder = RunFolder.open(tmp_path / "run")
    except WeftError:
        folder = RunFolder.create(tmp_path / "run", tiny())
    assert folder.plan == tiny()
    assert folder.manifest() is None
    folder.close()


# ---- one process at a time -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_process_is_rejected_and_the_lock_ends_with_the_first(tmp_path, command, plan_file, finished):
    folder = tmp_path / "run"
    first = command.start("run", plan_file, "--out", folder, "--workers", "1", "--save-every", "0")
    until(lambda: journal_lines(folder) > 3)
    first.send(signal.SIGSTOP)  # alive and holding the lock, but idle
    before = contents(folder)
    assert_one_line(command("resume", folder, "--workers", "1"), "another process", str(folder))
    assert_one_line(command("run", plan_file, "--out", folder, "--workers", "1"), "already holds a run")
    with pytest.raises(WeftError, match="another process"):
        weft.resume(folder)
    assert command("show", folder).code == 0  # reading needs no lock
    assert contents(folder) == before
    assert first.kill() == -signal.SIGKILL
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, finished)


def test_the_same_process_twice_is_rejected_too(tmp_path):
    folder = RunFolder.create(tmp_path / "run", tiny())
    with pytest.raises(WeftError, match="another process"):
        RunFolder.open(tmp_path / "run")
    folder.close()
    RunFolder.open(tmp_path / "run").close()


# ---- damage ----------------------------------------------------------------------------------------------------------


def assert_rejected(command, folder, *words, commands=("resume",)):
    """Each command prints one line and exits with 2, and no byte of the folder changes; only the journal may grow."""
    before = contents(folder)
    for name in commands:
        outcome = command(name, folder, *(["--workers", "1"] if name == "resume" else []))
        assert_one_line(outcome._replace(out="") if name == "show" else outcome, *words)  # it may have printed before
    after = contents(folder)
    after["journal.jsonl"] = after.get("journal.jsonl", b"")[: len(before.get("journal.jsonl", b""))]
    assert [name for name in before if after.get(name) != before[name]] == []


@pytest.mark.slow
def test_a_folder_that_is_no_run(tmp_path, command):
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "file").write_text("text")
    for name in ("empty", "photos", "file", "nowhere"):
        for verb in ALL:
            assert_one_line(command(verb, tmp_path / name), "not a run folder", str(tmp_path / name))
    assert contents(tmp_path) == {"photos/cat.jpg": b"\xff\xd8", "file": b"text"}
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_of_another_version(tmp_path, command, stopped):
    folder = copy(stopped, tmp_path / "run")
    (folder / "run.json").write_text(json.dumps({"format": 99, "weft": "7.1"}))
    assert_rejected(command, folder, "weft 7.1", "layout 99", commands=ALL)


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
    assert_rejected(command, folder, "plan.toml", commands=ALL)
    (folder / "plan.toml").unlink()
    assert_rejected(command, folder, str(folder), commands=ALL)


def state_files(folder: Path) -> dict[str, Path]:
    """One file of each kind of a checkpoint."""
    manifest = json.loads((folder / "checkpoints" / "manifest.json").read_text())
    client, server = manifest["clients"]["0"], manifest["server"]
    marks = {
        "server": server["file"],
        "knowledge": next(iter(server["tables"]["knowledge"].values())),
        "client": client["file"],
        "task": next(iter(client["tables"]["tasks"].values())),
    }
    return {kind: folder / "checkpoints" / name for kind, (name, _) in marks.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["server", "client", "task"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_state(tmp_path, command, stopped, kind, damage):
    folder = copy(stopped, tmp_path / "run")
    file = state_files(folder)[kind]
    blob = bytearray(file.read_bytes())
    blob[len(blob) // 2] ^= 1
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(blob if damage == "flip" else file.read_bytes()[:-1])
    assert_rejected(command, folder, "the checkpoint is", file.name)


def test_damaged_knowledge_is_noticed_when_it_is_needed(tmp_path):
    folder = tmp_path / "run"
    stop_after(folder, ANSWERS // 2 + 1)  # in the first round of the second task, before the knowledge is sent
    file = state_files(folder)["knowledge"]
    blob = bytearray(file.read_bytes())
    blob[-1] ^= 128
    file.write_bytes(blob)
    with pytest.raises(WeftError, match="checkpoint is corrupt"):
        weft.resume(folder)


def assert_manifest_rejected(folder: Path) -> None:
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
    assert_manifest_rejected(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["progress"].update(images=1 + manifest["progress"]["images"]),
        lambda manifest: manifest["progress"].update(round=0),
        lambda manifest: manifest["progress"].update(steps=1),
        lambda manifest: manifest["progress"]["clients"][0]["validation"].update({"0": 1.0}),
        lambda manifest: manifest["lengths"].update({"ledger.csv": manifest["lengths"]["ledger.csv"] - 7}),
        lambda manifest: manifest["clients"].pop("1"),
        lambda manifest: manifest["answered"].pop("1"),
        lambda manifest: manifest.update(clients=[]),
        lambda manifest: manifest["server"].pop("file"),
    ],
    ids=["images", "round", "unknown", "validation", "lengths", "client", "answered", "list", "server"],
)
def test_a_manifest_that_is_json_but_not_what_was_written(tmp_path, stopped, change):
    """The manifest has the checksums of the states; without one for itself, a flipped digit gives a wrong result."""
    folder = copy(stopped, tmp_path / "run")
    path = folder / "checkpoints" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert_manifest_rejected(folder)


@pytest.mark.parametrize("table", ["accuracy.csv", "ledger.csv"])
def test_a_table_that_lost_lines_its_checkpoint_needs(tmp_path, command, stopped, table):
    """Resuming would leave a gap, and the result would be wrong."""
    folder = copy(stopped, tmp_path / "run")
    length = json.loads((folder / "checkpoints" / "manifest.json").read_text())["lengths"][table]
    os.truncate(folder / table, length - 5)
    assert_rejected(command, folder, table)
    (folder / table).unlink()
    assert_rejected(command, folder, table)


def test_rows_after_the_checkpoint_are_removed(tmp_path, stopped, finished):
    folder = copy(stopped, tmp_path / "run")
    for table, line in (("ledger.csv", "c2s,0,1,1,weights,9,9,9\nc2s,0,"), ("accuracy.csv", "0,1,0,0.5\n0,1")):
        with (folder / table).open("a") as file:
            file.write(line)
    (folder / "checkpoints" / "client-0000@99.safetensors").write_bytes(b"half a st")
    (folder / "checkpoints" / ".manifest.json.123.part").write_bytes(b"{")
    (folder / ".summary.json.123.part").write_bytes(b"{")
    weft.resume(folder)
    assert_same_result(folder, finished)
    assert [path.name for path in folder.rglob("*.part")] in ([], [".summary.json.123.part"])
    assert not (folder / "checkpoints" / "client-0000@99.safetensors").exists()
