"""`weft site` without Flower: a site's folder and its state of runs are real."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import threading
import time
from pathlib import Path

import filelock
import pytest
import typer
from site_helpers import FIRST, OF_SITES, OTHER, SECOND, TINY, answer, make_groups, status, status_json

from weft.cli import site as cli_site
from weft.errors import WeftError
from weft.flower import audit_log, site_policy, site_state
from weft.flower.hub import runs
from weft.flower.hub.site import Site
from weft.flower.site_state import SiteState
from weft.plan import Plan
from weft.scenarios import sites
from weft.wire.message import Message, decode, encode

pytest_plugins = ["site_helpers"]

# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(site) -> Path:
    answer(site, FIRST, 3, "begin", "train", "end")
    answer(site, SECOND, 5, "begin", "train")
    answer(site, OTHER, 4, "begin", "train")
    return site


def test_status_lists_runs_by_their_last_reply(three, capsys):
    text = status(three, capsys)
    assert text.index(FIRST) < text.index(OTHER) < text.index(SECOND)
    found = [(run["id"], run["tasks"], run["replies"], run["when"][:10]) for run in status_json(three, capsys)["runs"]]
    assert found == [(FIRST, 1, 1, "1970-01-04"), (OTHER, 0, 1, "1970-01-05"), (SECOND, 0, 1, "1970-01-06")]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (FIRST, FIRST),
        ("study-0a", FIRST),
        ("tri", OTHER),
        ("study", SECOND),  # the latest of two run folders of this name
        ("own", SECOND),  # the name of the plan of all three
    ],
)
def test_a_run_is_found_by_id_prefix_name_or_plan(three, name, found):
    assert site_state.find_run(name, site_state.site_runs(three)).id == found


def test_an_ambiguous_or_unknown_run_is_an_error_with_the_choices(three):
    for name in ("study-0", "nothing"):
        with pytest.raises(WeftError, match=f"{name}.*{FIRST}, .*{SECOND}"):
            site_state.find_run(name, site_state.site_runs(three))
    with pytest.raises(WeftError, match="own"):
        site_state.find_run("own", [])


def test_export_names_its_run_which_sites_name_by_its_folder(three, tmp_path, capsys):
    cli_site.export_command("study-0a", 0, cli_site.ModelFormat.safetensors, tmp_path / "it.safetensors", three)
    assert FIRST in capsys.readouterr().out
    assert (tmp_path / "it.safetensors").is_file()
    names = [runs.name_at_sites(Path("/some/where/my study_2")) for _ in range(2)]
    assert names[0] != names[1]
    assert all(name.startswith("my-study-2-") for name in names)
    assert runs.name_at_sites(Path("/some/where/...")).startswith("run-")


# ---- leaving ---------------------------------------------------------------------------------------------------------


def test_status_shows_whether_the_hub_was_notified_that_a_site_leaves(site, capsys):
    assert not status_json(site, capsys)["left"]
    cli_site.leave_command(site)
    assert "weft site status" in capsys.readouterr().out
    assert "next request" in status(site, capsys)
    for run in (FIRST, FIRST, OTHER):  # the hub sent two requests in the first run
        site_policy.record_leave_notice(site, run)
    cli_site.leave_command(site)  # leaving again keeps the notices
    capsys.readouterr()
    assert [notice["run"] for notice in status_json(site, capsys)["leave_notices"]] == [FIRST, OTHER]
    lines = [line for line in status(site, capsys).splitlines() if "notified at 2" in line]
    assert [line.split()[-1] for line in lines] == [FIRST, OTHER]


# ---- the audit log ---------------------------------------------------------------------------------------------------


@pytest.fixture
def audited(site) -> Path:
    """Two replies of a LeNet of the paper's size with all that a site sends."""
    plan = Plan.merge({**TINY, "network": "lenet"})
    for index, ops in enumerate((("begin", "train", "upload"), ("end", "share", "test"))):
        request = Message("server", "client-1", f"0.{index}.1", ops, 0, index)
        wire = SiteState(site / "state", plan, 1).answer(encode(request))
        audit_log.record(site, "hub.hospital.example.org:9443", FIRST, wire)
    return site


def test_the_audit_log_is_a_table_of_80_columns(audited, capsys):
    rows, damaged = audit_log.read(audited)
    assert not damaged
    assert audit_log.read(audited / "state") == ([], [])
    cli_site.audit_command(audited)
    columns, title, *lines, total = capsys.readouterr().out.splitlines()
    assert columns.split() == ["UTC", "request", "tensor", "shape", "bytes"]
    assert title.endswith(f"to hub.hospital.example.org:9443, run {FIRST}")
    assert len(lines) == len(rows) >= 4
    assert max(map(len, [columns, title, *lines])) <= 80
    assert all(row["tensor"] in line and row["shape"] in line for row, line in zip(rows, lines, strict=True))
    assert f"{sum(row['bytes'] for row in rows):,}" in total


def test_damaged_lines_of_the_audit_log_are_listed_by_number(audited, capsys):
    """A full disk or a kill cuts a line; the next reply starts on a new line."""
    path, (rows, _) = audited / audit_log.FILE, audit_log.read(audited)
    lines = path.read_text().splitlines(keepends=True)
    half = "".join(lines)[:-9]
    path.write_text(half + "\n" + "2026,a,b\n" + lines[0] + half.rpartition("\n")[2])
    audit_log.record(audited, "hub:1", FIRST, encode(Message("server", "client-1", "one\ntwo,\x1b", ("test",), 0, 2)))
    again, damaged = audit_log.read(audited)
    assert again[: len(rows) - 1] == rows[:-1]
    assert [row["request"] for row in again[len(rows) - 1 :]] == ["one\\ntwo,\\x1b"]
    assert damaged == [len(lines), len(lines) + 1, len(lines) + 3]
    cli_site.audit_command(audited, as_json=True)
    output = capsys.readouterr()
    assert json.loads(output.out) == again
    assert all(type(row["bytes"]) is int and row["bytes"] > 0 for row in again)
    assert str(path) in output.err
    assert ", ".join(map(str, damaged)) in output.err


def test_a_line_that_does_not_fit_on_the_disk_is_removed(audited):
    """A limit on file sizes in place of a full disk."""
    before = (audited / audit_log.FILE).read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(WeftError, match=r"audit\.csv"):
            audit_log.record(audited, "hub:1", FIRST, encode(Message("server", "client-1", "0.9.1", ("test",), 0, 2)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (audited / audit_log.FILE).read_bytes() == before


def test_two_runs_that_reply_at_once_write_one_header(site):
    wire = encode(Message("client-1", "server", "0.0.1", (), 0, 0))
    threads = [threading.Thread(target=audit_log.record, args=(site, "hub:1", run, wire)) for run in (FIRST, OTHER)]
    with filelock.FileLock(site / audit_log.LOCK):
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        assert not (site / audit_log.FILE).exists()
    for thread in threads:
        thread.join()
    rows, damaged = audit_log.read(site)
    assert (sorted(row["run"] for row in rows), damaged) == ([FIRST, OTHER], [])
    assert (site / audit_log.FILE).read_text().count("when,to,run") == 1


# ---- a folder of images ----------------------------------------------------------------------------------------------


def check(folder: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(typer.Exit) if code else contextlib.nullcontext():
        cli_site.check_command(folder)
    return capsys.readouterr().out


def dicom(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(128) + b"DICM" + bytes(200))


def test_check_names_other_files_empty_classes_broken_links_and_small_classes(images, capsys):
    assert "ignored" not in check(images, capsys)
    (images / "notes.txt").write_text("of the ward")
    (images / ".DS_Store").write_text("")
    dicom(images / "dark" / "scan.dcm")
    (images / "unsure").mkdir()
    text = check(images, capsys)
    assert "2 (dark/scan.dcm, notes.txt)" in text
    assert "note: unsure has no images" in text
    cli_site.check_command(images, as_json=True)
    assert json.loads(capsys.readouterr().out)["other_files"] == ["dark/scan.dcm", "notes.txt"]
    (images / "dark" / "10.png").symlink_to("nowhere.png")
    assert "10.png" in check(images, capsys, code=2)
    (images / "dark" / "10.png").unlink()
    for index in range(2, 10):
        (images / "light" / f"{index}.png").unlink()
    assert "note: class light has no valid images" in check(images, capsys)


def test_check_shows_why_a_file_cannot_be_read(images, tmp_path, capsys):
    for name in ("scan.dcm", "IM000001"):
        for index in range(2):
            dicom(tmp_path / name / f"class{index}" / name)
        text = check(tmp_path / name, capsys, code=2)
        assert f"class0/{name}" in text
        assert "export them to PNG first" in text
    (images / "dark" / "text.png").write_text("no picture")
    (images / "dark" / "empty.png").write_bytes(b"")
    dicom(images / "dark" / "scan.png")
    text = check(images, capsys, code=2)
    assert "BytesIO" not in text
    assert "text.png (not a PNG" in text
    assert "empty.png (the file is empty)" in text
    assert "scan.png (a DICOM file; export it to PNG first)" in text


def test_check_counts_images_by_class_and_groups(images, capsys):
    text = check(images, capsys)
    assert "dark: images: 10 (train: 7, valid: 1, test: 2)" in text
    assert "no groups" in text
    make_groups(images)
    assert "groups: 5" in check(images, capsys)


# ---- tasks -----------------------------------------------------------------------------------------------------------


def learn(site: Path, task: int) -> None:
    """A run starts a task of the site."""
    plan = sites.at_site(Plan.merge(OF_SITES), site)
    request = encode(Message("server", "client-1", f"{task}.0.1", ("begin", "train"), task, 0))
    assert not decode(SiteState(site / "state" / FIRST, plan, 1).answer(request)).error


@pytest.fixture
def announced(site, images) -> Path:
    for name in ("lungs", "hearts", "knees"):
        cli_site.add_command(name, images, sites.DEFAULT_BITS, site)
    return site


def fingerprints(site: Path) -> list[str]:
    return [task.fingerprint for task in sites.build(sites.Options(folder=str(site)), 1, 3, 0).sequences[0]]


def test_a_task_that_no_run_has_started_can_be_removed(announced, images, capsys):
    learn(announced, 0)
    before = fingerprints(announced)
    capsys.readouterr()
    cli_site.remove_command("hearts", announced)
    assert f"task 1: knees ({images})" in capsys.readouterr().out
    cli_site.list_command(announced)
    assert capsys.readouterr().out.split()[2::4] == ["lungs", "knees"]
    assert fingerprints(announced) == [before[0], before[2]]
    assert len(list((announced / "tasks").glob("*.npz"))) == 2
    cli_site.add_command("elbows", images, sites.DEFAULT_BITS, announced)  # does not overwrite another task's images
    assert len(set(sites.packs(announced))) == 3
    learn(announced, 1)
    with pytest.raises(WeftError, match=f"{FIRST} .*knees"):
        Site(announced).remove_task("knees")
    with pytest.raises(WeftError, match=r"elbow.*elbows"):
        Site(announced).remove_task("elbow")
    with filelock.FileLock(announced / "state" / FIRST / ".lock"), pytest.raises(WeftError, match="study"):
        Site(announced).remove_task("elbows")  # the site is working
    for command, words in ((cli_site.add_command, ("hips", images, 16)), (cli_site.remove_command, ("elbows",))):
        with site_state.changing_tasks(announced), pytest.raises(WeftError, match="another command"):
            command(*words, announced)
    assert [task["name"] for task in sites.listed(announced)] == ["lungs", "knees", "elbows"]
