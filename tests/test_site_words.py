"""What `weft site` says, without Flower: a site's folder, and what it remembers of runs, are real."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

import filelock
import pytest
import typer
from PIL import Image
from site_helpers import FIRST, OTHER, SECOND, TINY, answer, status

from weft.cli import site as cli_site
from weft.errors import WeftError
from weft.flower import audit_log as left
from weft.flower import leaving, remembered
from weft.flower.hub import runs
from weft.flower.hub import supervisor as supervision
from weft.flower.hub.site import Site
from weft.flower.site_state import Memory
from weft.plan import Plan
from weft.scenarios import sites
from weft.wire.message import Message, decode, encode

pytest_plugins = ["site_helpers"]


@pytest.fixture
def three(site) -> Path:
    answer(site, FIRST, 3, "begin", "train", "finish")
    answer(site, SECOND, 5, "begin", "train")
    answer(site, OTHER, 4, "begin", "train")
    return site


# ---- which run -------------------------------------------------------------------------------------------------------


def test_status_lists_runs_by_id_with_their_day_and_tasks(three, capsys):
    said = status(three, capsys)
    assert f"run {FIRST}: 1 task learned, 1 answer, the last on 1970-01-04 01:00:00 UTC" in said
    assert f"run {SECOND}: 0 tasks learned, 1 answer, the last on 1970-01-06 01:00:00 UTC" in said
    assert said.index(FIRST) < said.index(OTHER) < said.index(SECOND)  # in the order of their last answers
    cli_site.status_command(three, as_json=True)
    told = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["id"], run["tasks"]) for run in told] == [(FIRST, 1), (OTHER, 0), (SECOND, 0)]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (FIRST, FIRST),
        ("study-0a", FIRST),
        ("tri", OTHER),
        ("study", SECOND),  # two of the hub's folders were called so: the latest
        ("own", SECOND),  # all are of a plan of that name
    ],
)
def test_a_run_is_found_by_what_a_person_types(three, typed, meant):
    assert remembered.run_called(typed, remembered.known(three)).id == meant


def test_a_beginning_of_several_is_one_line_that_says_what_to_type(three):
    with pytest.raises(WeftError, match=f"say which: {FIRST}, {SECOND}"):
        remembered.run_called("study-0", remembered.known(three))
    with pytest.raises(WeftError, match=f"no run nothing here; there are {FIRST}"):
        remembered.run_called("nothing", remembered.known(three))
    with pytest.raises(WeftError, match="answered in none yet"):
        remembered.run_called("own", [])


def test_export_says_which_run_it_took(three, tmp_path, capsys):
    cli_site.export_command("study-0a", 0, cli_site.Kind.safetensors, tmp_path / "it.safetensors", three)
    assert f"run {FIRST}" in capsys.readouterr().out
    assert (tmp_path / "it.safetensors").is_file()


def test_sites_know_a_run_by_the_name_of_its_folder():
    names = [runs.name_for_sites(Path("/some/where/my study_2")) for _ in range(2)]
    assert names[0] != names[1]
    assert all(name.startswith("my-study-2-") for name in names)
    assert runs.name_for_sites(Path("/some/where/...")).startswith("run-")


# ---- leaving ---------------------------------------------------------------------------------------------------------


def test_status_says_whether_the_hub_knows_that_a_site_leaves(site, capsys):
    assert "leave" not in status(site, capsys)
    cli_site.leave_command(site)
    assert "until weft site status says that the hub was told" in capsys.readouterr().out
    assert "it leaves, and the hub does not know yet" in status(site, capsys)
    leaving.note(site, FIRST)
    leaving.note(site, FIRST)  # it asked again
    leaving.note(site, OTHER)
    said = status(site, capsys)
    assert "does not know yet" not in said
    assert [line.split()[-1] for line in said.splitlines() if "the hub was told on 2" in line] == [FIRST, OTHER]
    cli_site.leave_command(site)
    assert len(leaving.told(site)) == 2  # to say it again forgets nothing


# ---- what has left ---------------------------------------------------------------------------------------------------


@pytest.fixture
def given(site) -> Path:
    """Two replies of a real LeNet of the paper's size, with all that a site sends."""
    plan = Plan.merge({**TINY, "network": "lenet"})
    for step, ops in enumerate((("begin", "train", "send"), ("finish", "give", "test"))):
        request = Message("server", "client-1", f"0.{step}.1", ops, 0, step)
        left.note(site, "hub.hospital.example.org:9443", FIRST, Memory(site / "state", plan, 1).answer(encode(request)))
    return site


def test_what_has_left_is_one_line_for_each_tensor_at_80_columns(given, capsys):
    rows, _ = left.read(given)
    cli_site.left_command(given)
    columns, head, *lines, total = capsys.readouterr().out.splitlines()
    assert columns.split() == ["UTC", "request", "tensor", "shape", "bytes"]
    assert head.endswith(f"to hub.hospital.example.org:9443, run {FIRST}")
    assert len(lines) == len(rows) >= 4
    assert max(map(len, [columns, head, *lines])) <= 80
    assert all(row["tensor"] in line and row["shape"] in line for row, line in zip(rows, lines, strict=True))
    assert total == f"{sum(row['bytes'] for row in rows):,} bytes have left ada"


def test_bytes_are_numbers_in_json(given, capsys):
    cli_site.left_command(given, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert all(type(row["bytes"]) is int and row["bytes"] > 0 for row in rows)


def test_damaged_lines_of_what_left_are_told_by_number(given, capsys):
    """Half a line, as a full disk or a kill leaves it; the next message begins on a line of its own."""
    rows, _ = left.read(given)
    lines = (given / "left.csv").read_text().splitlines(keepends=True)
    half = "".join(lines)[:-9]
    (given / "left.csv").write_text(half + "\n" + "2026,a,b\n" + lines[0] + half.rpartition("\n")[2])
    request = Message("server", "client-1", "one\ntwo,\x1b", ("test",), 0, 2)
    left.note(given, "hub:1", FIRST, encode(request))
    again, damaged = left.read(given)
    assert again[: len(rows) - 1] == rows[:-1]
    assert [row["request"] for row in again[len(rows) - 1 :]] == ["one\\ntwo,\\x1b"]
    assert damaged == [len(lines), len(lines) + 1, len(lines) + 3]
    cli_site.left_command(given, as_json=True)
    said = capsys.readouterr()
    assert json.loads(said.out) == again
    numbers = ", ".join(map(str, damaged))
    assert f"lines {numbers} of {given / 'left.csv'} cannot be read and are not counted" in said.err


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(given):
    """A limit on the size of files stands for a full disk."""
    before = (given / "left.csv").read_bytes()
    request = Message("server", "client-1", "0.9.1", ("test",), 0, 2)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(WeftError, match=r"left\.csv cannot be written"):
            left.note(given, "hub:1", FIRST, encode(request))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (given / "left.csv").read_bytes() == before


def test_two_runs_that_answer_at_once_write_one_header(site):
    """Both find no file; whoever comes first writes the columns, and the other one waits for it."""
    wire = encode(Message("client-1", "server", "0.0.1", (), 0, 0))
    both = [threading.Thread(target=left.note, args=(site, "hub:1", run, wire)) for run in (FIRST, OTHER)]
    with filelock.FileLock(site / left.LOCK):
        for one in both:
            one.start()
        time.sleep(0.3)
        assert not (site / left.FILE).exists()
    for one in both:
        one.join()
    rows, damaged = left.read(site)
    assert (sorted(row["run"] for row in rows), damaged) == ([FIRST, OTHER], [])
    assert (site / left.FILE).read_text().count("when,to,run") == 1


# ---- a folder of images ----------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path) -> Path:
    folder: Path = tmp_path / "images"
    for place, name in enumerate(("ill", "well")):
        (folder / name).mkdir(parents=True)
        for count in range(10):
            Image.new("RGB", (8, 8), (100 * place + count, count, 9)).save(folder / name / f"{count}.png")
    return folder


def check(folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(typer.Exit) if code else contextlib.nullcontext():
        cli_site.check_command(folder)
    return capsys.readouterr().out


def dicom(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(128) + b"DICM" + bytes(200))


def test_files_that_are_no_images_are_counted_and_named(images, capsys):
    assert "left out" not in check(images, capsys)
    (images / "notes.txt").write_text("of the ward")
    (images / ".DS_Store").write_text("")
    dicom(images / "ill" / "scan.dcm")
    assert "2 files left out, no image by the name: ill/scan.dcm, notes.txt\n" in check(images, capsys)
    with pytest.raises(typer.Exit):
        cli_site.check_command(images, as_json=True)
    assert json.loads(capsys.readouterr().out)["others"] == ["ill/scan.dcm", "notes.txt"]


def test_what_is_empty_leads_nowhere_or_is_too_little_is_told_of(images, capsys):
    (images / "unsure").mkdir()
    assert "note: unsure has no images" in check(images, capsys)
    (images / "ill" / "10.png").symlink_to("nowhere.png")
    assert "wrong: " in (said := check(images, capsys, code=2))
    assert "10.png" in said
    (images / "ill" / "10.png").unlink()
    for place in range(2, 10):
        (images / "well" / f"{place}.png").unlink()
    assert "note: class well has no valid images" in check(images, capsys)


@pytest.mark.parametrize("name", ["scan.dcm", "IM000001"])
def test_a_folder_of_dicom_alone_is_told_to_be_exported(tmp_path, name, capsys):
    for place in range(2):
        dicom(tmp_path / "scans" / f"class{place}" / name)
    said = check(tmp_path / "scans", capsys, code=2)
    assert f"has no images but 2 DICOM files, such as class0/{name}; export them to PNG first" in said


def test_why_a_file_cannot_be_read_is_said_in_words_of_ours(images, capsys):
    (images / "ill" / "text.png").write_text("no picture")
    (images / "ill" / "empty.png").write_bytes(b"")
    dicom(images / "ill" / "scan.png")
    said = check(images, capsys, code=2)
    assert "BytesIO" not in said
    assert "text.png (not a PNG" in said
    assert "empty.png (the file is empty)" in said
    assert "scan.png (a DICOM file; export it to PNG first)" in said


def test_groups_are_counted(images, capsys):
    assert "no groups: every image is cut by itself" in check(images, capsys)
    for name in ("ill", "well"):
        for count in range(10):
            patient = images / name / f"patient{count // 2}"
            patient.mkdir(exist_ok=True)
            (images / name / f"{count}.png").rename(patient / f"{count}.png")
    assert "  5 groups (folders below a class, such as a patient's), each on one side" in check(images, capsys)


def test_one_image_is_not_images(images, capsys):
    (images / "rare").mkdir()
    (images / "ill" / "0.png").rename(images / "rare" / "0.png")
    assert "  rare: 1 image, 1 to train, 0 to valid, 0 to test\n" in check(images, capsys)


# ---- tasks -----------------------------------------------------------------------------------------------------------


def learn(site: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the site's own tasks begins one of them."""
    monkeypatch.setenv("WEFT_SITE", str(site))
    plan = Plan.merge({key: value for key, value in TINY.items() if "scenario" not in key} | {"scenario": "sites"})
    ask = encode(Message("server", "client-1", f"{step}.0.1", ("begin", "train"), step, 0))
    assert not decode(Memory(site / "state" / FIRST, plan, 1).answer(ask)).error


@pytest.fixture
def announced(site, images) -> Path:
    for name in ("lungs", "hearts", "knees"):
        cli_site.add_command(name, images, sites.DEFAULT_BITS, site)
    return site


def test_a_task_that_no_run_has_begun_can_be_removed(announced, images, monkeypatch, capsys):
    learn(announced, 0, monkeypatch)
    before = sites.build(sites.Options(), 1, 3, 0).sequences[0]
    capsys.readouterr()
    cli_site.remove_command("hearts", announced)
    assert f"task 1: knees ({images})" in capsys.readouterr().out
    cli_site.list_command(announced)
    assert capsys.readouterr().out.split()[2::4] == ["lungs", "knees"]
    after = sites.build(sites.Options(), 1, 3, 0).sequences[0]
    assert [task.fingerprint for task in after] == [before[0].fingerprint, before[2].fingerprint]
    assert len(list((announced / "tasks").glob("*.npz"))) == 2
    cli_site.add_command("elbows", images, sites.DEFAULT_BITS, announced)  # takes the place of no other's pack
    assert len(set(sites.packs(announced))) == 3
    learn(announced, 1, monkeypatch)
    with pytest.raises(WeftError, match=f"task 1 .knees. was begun in the run {FIRST}"):
        Site(announced).remove_task("knees")
    assert [task["name"] for task in sites.listed(announced)] == ["lungs", "knees", "elbows"]


def test_no_task_is_removed_while_the_site_works_or_that_is_not_there(announced, monkeypatch):
    learn(announced, 0, monkeypatch)
    with pytest.raises(WeftError, match=r"has no task knee; .*knees"):
        Site(announced).remove_task("knee")
    with filelock.FileLock(announced / "state" / FIRST / ".lock"), pytest.raises(WeftError, match="at work on study"):
        Site(announced).remove_task("knees")
    assert len(sites.listed(announced)) == 3


# ---- the site and its hub --------------------------------------------------------------------------------------------

# as flwr 1.41.0 wrote it, of a site that was let in, of one that the hub had removed, and while the hub was stopped
LET_IN = "INFO :      Starting Flower SuperNode\nINFO :      SuperNode ID: 15274791773210793579\n"
REFUSED = """ERROR :     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[code: 2004] Failed to activate SuperNode.
The SuperNode could not establish a connection to the SuperLink.
INFO:     Finished server process [31538]
INFO :      Starting Flower SuperNode
"""
RETRYING = "WARNING :   Connection attempt failed, retrying in 15.35 seconds\n"
BACK = "INFO :      Connection successful after 52.63 seconds and 9 tries.\n"


@pytest.mark.parametrize(
    ("log", "failing", "said"),
    [
        (LET_IN, 0.0, ""),
        (LET_IN + RETRYING + REFUSED, 1e9, "the hub does not let it in since 2001-09-09 01:46:40 UTC: it was removed"),
        (LET_IN + RETRYING, 0.0, "the hub cannot be reached; last tried 1970-01-01 00:00:07 UTC"),
        (LET_IN + RETRYING + BACK, 0.0, ""),
        (LET_IN + REFUSED + LET_IN, 0.0, ""),
    ],
)
def test_status_says_whether_the_hub_lets_the_site_in(site, log, failing, said, capsys):
    path = site / "logs" / "supernode.log"
    path.write_text(log)
    os.utime(path, (7, 7))
    processes = {"supernode": {"pid": 1, "starts": 5, "failing": failing}}
    (site / supervision.FILE).write_text(json.dumps({"supervisor": 1, "processes": processes}))
    assert "the hub" not in status(site, capsys)  # it is down: what its log says is of the past
    with supervision.hold(site):
        told = status(site, capsys)
    assert said in told
    assert bool(said) == ("the hub" in told)
