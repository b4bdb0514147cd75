"""Resume: a run that was killed, interrupted or crashed at any moment gives the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from cli_helpers import (
    ANSWERS,
    COMMAND,
    alive,
    assert_one_line,
    assert_same_result,
    contents,
    copy,
    journal_lines,
    stop_after,
    tiny,
    until,
    workers_of,
)

import weft
from weft.runs.folder import RunFolder

pytest_plugins = ["cli_helpers"]

LONG = {"rounds_per_task": 8}  # enough rounds to be interrupted in
ORPHANS = 3  # seconds that a worker may outlive its parent on a busy machine


@pytest.fixture(scope="session")
def long_plan(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("plans") / "long.toml"
    file.write_text(tiny(name="long", **LONG).toml())
    return file


@pytest.fixture(scope="session")
def long_run(tmp_path_factory) -> Path:
    """The same plan without a stop."""
    folder = tmp_path_factory.mktemp("finished") / "long"
    weft.run(tiny(name="long", **LONG), folder)
    return folder


def python(text: str, *words: object) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "-c", textwrap.dedent(text), *map(str, words)]
    return subprocess.run(script, capture_output=True, text=True, check=False, timeout=60)


def processor_time(pid: int) -> float:
    """Seconds of processor time of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


# ---- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_folder_exists_within_a_second(tmp_path, plan_file, command, finished):
    """Wall or processor time, whichever is less, of the best of four starts. A run killed this early resumes too."""
    seconds = []
    for attempt in range(4):
        folder = tmp_path / str(attempt)
        began = time.monotonic()
        process = subprocess.Popen(
            [COMMAND, "run", plan_file, "--out", folder, "--workers", "1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda folder=folder: (folder / "plan.toml").exists() and (folder / "run.json").exists())
            seconds.append(min(time.monotonic() - began, processor_time(process.pid)))
        finally:
            process.kill()
            process.wait()
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, finished)


def test_the_folder_is_on_disk_before_torch_is_imported(tmp_path, plan_file):
    done = python(
        """
        import os, sys
        from pathlib import Path
        plan, folder = sys.argv[1:]

        class Watch:
            def find_spec(self, name, *_):
                if name == "torch":
                    names = {path.name for path in Path(folder).iterdir()} if Path(folder).exists() else set()
                    print(sorted(names & {"plan.toml", "run.json"}), flush=True)
                    os._exit(7)

        sys.meta_path.insert(0, Watch())
        sys.argv = ["weft", "run", plan, "--out", folder, "--workers", "1"]
        from weft.cli.app import main
        main()
        """,
        plan_file,
        tmp_path / "run",
    )
    assert done.returncode == 7, done.stderr  # torch was imported
    assert done.stdout == "['plan.toml', 'run.json']\n"
    assert weft.Plan.load(tmp_path / "run") == weft.Plan.load(plan_file)


@pytest.mark.slow
def test_plans_and_folders_need_no_torch(tmp_path, plan_file, finished):
    done = python(
        """
        import json, sys
        import weft, weft.cli.app
        from pathlib import Path
        from weft.runs.folder import RunFolder
        plan, folder, finished = sys.argv[1:]
        loaded = weft.Plan.load(plan, ["method=fedavg", "seed=3"])
        weft.Plan(method="fedweit@paper"), weft.Plan(method="stl", network="mlp")
        RunFolder.create(Path(folder), loaded).close()
        weft.Result(finished).accuracy_matrix
        print(json.dumps([name for name in ("torch", "safetensors", "pandas", "sympy") if name in sys.modules]))
        """,
        plan_file,
        tmp_path / "run",
        finished,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


# ---- stopped at a chosen moment, in this process ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("replies", [1, 3, 4, 6, 7, 10, 12])
def test_stopped_after_any_reply(tmp_path, finished, replies):
    stop_after(tmp_path / "run", replies)
    assert_same_result(weft.resume(tmp_path / "run", memory=1).folder, finished)


@pytest.mark.slow
def test_stopped_without_any_checkpoint(tmp_path, finished):
    stop_after(tmp_path / "run", ANSWERS, save_every=1000.0)
    assert not (tmp_path / "run" / "checkpoints" / "manifest.json").exists()
    assert_same_result(weft.resume(tmp_path / "run").folder, finished)


def test_stopped_before_anything_was_computed(tmp_path, finished):
    RunFolder.create(tmp_path / "run", tiny()).close()
    assert_same_result(weft.resume(tmp_path / "run").folder, finished)


def test_stopped_between_the_last_checkpoint_and_the_summary(tmp_path, finished):
    folder = copy(finished, tmp_path / "run")
    (folder / "summary.json").unlink()
    result = weft.resume(folder)
    assert_same_result(result.folder, finished)
    assert result.seconds == pytest.approx(weft.Result(finished).seconds, abs=0.5)  # nothing was trained again


def test_time_is_counted_over_all_sessions(tmp_path):
    stop_after(tmp_path / "run", ANSWERS)
    before = json.loads((tmp_path / "run" / "checkpoints" / "manifest.json").read_text())["progress"]["seconds"]
    assert weft.resume(tmp_path / "run").seconds > before > 0


# ---- kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("save", ["always", "default"])
@pytest.mark.parametrize("seed", range(3))
def test_killed_up_to_three_times_at_random(tmp_path, command, long_plan, long_run, seed, save):
    dice = random.Random(f"{seed} {save}")
    folder = tmp_path / "run"
    options = {"save_always": save == "always"}
    saving = ["--save-every", "0"] if save == "always" else []
    words = ["run", long_plan, "--out", folder]
    kills = 0
    for _ in range(3):
        memory = ["--memory", dice.choice(["1", "512"])]
        running = command.start(*words, "--workers", "1", *memory, *saving, **options)
        enough = journal_lines(folder) + dice.randint(1, 20)
        until(lambda running=running, enough=enough: journal_lines(folder) >= enough or not alive(running.pid))
        time.sleep(dice.random() * 0.02)
        code = running.kill()
        assert code in (0, -signal.SIGKILL), running.wait()
        kills += code == -signal.SIGKILL
        words = ["resume", folder]
    assert kills
    outcome = command("resume", folder, "--workers", "1", "--memory", dice.choice(["1", "512"]))
    assert outcome.code == 0, outcome
    assert_same_result(folder, long_run)
    for line in (folder / "journal.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.slow
def test_killed_with_workers_and_resumed_with_others(tmp_path, command, long_plan, long_run):
    folder = tmp_path / "run"
    words = ["run", long_plan, "--out", folder, "--workers", "2", "--save-every", "0"]
    for workers, lines in ((2, 6), (3, 12)):
        running = command.start(*words, save_always=True)
        until(lambda lines=lines: journal_lines(folder) >= lines)
        orphans = workers_of(running.pid)
        assert len(orphans) == workers
        assert running.kill() == -signal.SIGKILL
        until(lambda orphans=orphans: not any(map(alive, orphans)), seconds=ORPHANS)
        words = ["resume", folder, "--workers", "3", "--memory", "1"]
    outcome = command("resume", folder, "--workers", "1")
    assert outcome.code == 0, outcome
    assert_same_result(folder, long_run)


@pytest.mark.slow
def test_orphans_die_even_while_they_start(tmp_path, command, long_plan, long_run):
    folder = tmp_path / "run"
    running = command.start("run", long_plan, "--out", folder, "--workers", "2")
    orphans = until(lambda: (folder / "run.json").exists() and workers_of(running.pid))
    assert running.kill() == -signal.SIGKILL
    until(lambda: not any(map(alive, orphans)), seconds=ORPHANS)  # although the first is importing torch
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, long_run)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])  # the first forks the other
def test_a_worker_that_is_killed(which, tmp_path, command, long_plan, long_run):
    folder = tmp_path / "run"
    running = command.start("run", long_plan, "--out", folder, "--workers", "2", "--save-every", "0", save_always=True)
    until(lambda: journal_lines(folder) >= 6)
    workers = workers_of(running.pid)
    os.kill(workers[which], signal.SIGKILL)
    outcome = running.wait(20)
    assert_one_line(without_progress(outcome), "worker", "died")
    until(lambda: not any(map(alive, workers)), seconds=2)
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, long_run)


def without_progress(outcome):
    lines = outcome.err.splitlines(keepends=True)
    return outcome._replace(err="".join(line for line in lines if " of 2 learned after " not in line))


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def assert_stopped(outcome, folder):
    assert outcome.code == 130, outcome
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert "Error" not in outcome.err
    assert f"weft resume {folder}" in " ".join(outcome.err.split())
    assert any(f"weft resume {folder}" in line for line in outcome.err.splitlines())  # on one line, to copy


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_interrupted(tmp_path, command, long_plan, long_run, workers):
    """A terminal sends Ctrl-C to the whole process group."""
    folder, count = tmp_path / "run", str(workers)
    running = command.start("run", long_plan, "--out", folder, "--workers", count, "--save-every", "0")
    for lines in (5, 10):
        until(lambda lines=lines: journal_lines(folder) >= lines)
        children = workers_of(running.pid)
        assert len(children) == (workers if workers > 1 else 0)
        os.killpg(running.pid, signal.SIGINT)
        assert_stopped(running.wait(10), folder)
        until(lambda children=children: not any(map(alive, children)), seconds=2)
        assert "summary.json" not in contents(folder)
        running = command.start("resume", folder, "--workers", count)
    assert running.wait().code == 0
    assert_same_result(folder, long_run)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.3, 0.8])
def test_interrupted_while_starting(tmp_path, plan_file, delay):
    """Ctrl-C while this process and its workers are still importing torch: no traceback from any of them."""
    folder = tmp_path / "run"
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [COMMAND, "run", plan_file, "--out", folder, "--workers", "2"],
            stdout=subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
        until(lambda: (folder / "run.json").exists())
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(30)
    time.sleep(0.3)  # a worker may still print something
    said = (tmp_path / "err").read_text()
    assert code == 130, said
    assert "Traceback" not in said
    assert f"weft resume {folder}" in said


@pytest.mark.slow
def test_an_interrupted_demo_names_the_command_to_resume(tmp_path, command):
    running = command.start("demo", "--workers", "1", cwd=tmp_path)
    folder = tmp_path / "runs" / "demo-fedweit-s0"
    until(lambda: journal_lines(folder) >= 2)
    running.send(signal.SIGINT)
    assert_stopped(running.wait(20), Path("runs") / "demo-fedweit-s0")


def test_a_run_of_a_hub_is_resumed_at_the_hub(finished, tmp_path, command):
    """Its clients are on other machines; here they would restart."""
    folder = copy(finished, tmp_path / "run")
    (folder / "summary.json").unlink()
    (folder / "sites.json").write_text('{"names": ["ada"], "run": "demo-1"}')
    before = contents(folder)
    assert_one_line(command("resume", folder), f"use weft hub run {folder}")
    assert f"weft hub run {folder}" in command("show", folder).out
    assert_one_line(command("export", folder), "weft site export at the site")
    assert contents(folder) == before
