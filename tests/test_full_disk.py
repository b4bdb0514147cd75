"""A run on a full disk: the error is one line, nothing is damaged, and the run resumes once there is room."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from cli_helpers import ANSWERS, assert_one_line, assert_same_result, copy, stop_after

pytest_plugins = ["cli_helpers"]
pytestmark = pytest.mark.attack


@pytest.mark.slow
def test_a_disk_that_fills_up(tmp_path, command, plan_file, finished):
    """The first checkpoints fit the limit on file sizes, a later one does not."""
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


def test_no_room_for_a_line(tmp_path, command, stopped, finished):
    """Half a line is written before the disk is full. It must not damage the next line."""
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
    # plan.toml is larger than this; stderr is not
    assert_one_line(command(*words, largest_file=1000), "cannot be", "File too large")
    assert command(*words).code == 0  # once there is room, the same command works
    assert_same_result(folder, finished)


FULL_DISK = """
    import json, subprocess, sys, weft
    disk, plan = sys.argv[1:]
    def mount(*options):
        subprocess.run(["mount", "-t", "tmpfs", *options, "none", disk], check=True)
    import weft.runs.session
    weft.runs.session.SAVE_SHARE = 0  # a checkpoint after each round, however long it takes
    mount("-o", "size=3m")
    try:
        weft.run(weft.Plan.load(plan), f"{disk}/run", save_every=0)
        raise SystemExit("the disk was large enough")
    except weft.WeftError as problem:
        text = str(problem)
    mount("-o", "remount,size=64m")
    result = weft.resume(f"{disk}/run")
    tables = {name: (result.folder / name).read_text() for name in ("accuracy.csv", "ledger.csv")}
    print(json.dumps({"text": text, "summary": result.summary, **tables}))
"""


@pytest.mark.slow
def test_a_disk_that_is_really_full(tmp_path, plan_file, finished):
    """A small tmpfs in a private mount namespace. Once it is enlarged, the run resumes."""
    if shutil.which("unshare") is None:
        pytest.skip("NOT TESTED: no `unshare` here, so there is no full disk")
    isolated = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    (tmp_path / "disk").mkdir()
    trial = subprocess.run(
        [*isolated, "mount", "-t", "tmpfs", "none", tmp_path / "disk"], capture_output=True, check=False
    )
    if trial.returncode:
        pytest.skip("NOT TESTED: mounting is not allowed here, so there is no full disk")
    script = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path / "disk"), str(plan_file)]
    done = subprocess.run([*isolated, *script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "No space left on device" in found["text"]
    assert "weft resume" in found["text"]
    again = tmp_path / "again"
    again.mkdir()
    (again / "summary.json").write_text(json.dumps(found["summary"]))
    for table in ("accuracy.csv", "ledger.csv"):
        (again / table).write_text(found[table])
    assert_same_result(again, finished)
