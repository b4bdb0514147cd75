"""`weft hub status` of a run without Flower: a real run folder with events of the server app."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import filelock
import pytest
from cli_helpers import tiny
from site_helpers import journal

from weft.cli import hub as cli_hub
from weft.core.checks import ReplyChecks
from weft.core.client import Runtime
from weft.core.engine import Engine, EngineState
from weft.files import write_json, write_text
from weft.flower.hub.status import ERROR_FILE, FLOWER_RUN, STARTING, WATCHED, run_status
from weft.runs import run as running
from weft.runs.folder import SITES, RunFolder
from weft.runs.session import local_engine

pytest_plugins = ["cli_helpers", "site_helpers"]

AWAY = ("away", {"client": 1, "site": "north", "time": 1.0})
MISSING = ("incident", {"client": 1, "task": 0, "round": 0, "time": 1.0, "reason": "no reply"})
NO_TASK = ("waiting", {"client": 0, "site": "ada", "reason": "it has no task 1 yet"})


@pytest.fixture
def run(tmp_path) -> Path:
    """A run folder as made by `weft hub run`."""
    folder: Path = tmp_path / "study"
    RunFolder.create(folder, tiny(clients=2, tasks=1, rounds_per_task=1)).close()
    write_json(folder / SITES, {"names": ["ada", "north"], "run": "study-0123456789ab"})
    return folder


def connect(folder: RunFolder, saved: EngineState, checks: ReplyChecks) -> Engine:
    return local_engine(folder, Runtime(folder.plan), saved, 64, None)


def shown(command, folder: Path) -> str:
    done = command("show", folder)
    assert done.code == 0
    return str(done.out)


def test_an_undisturbed_run_has_no_incidents(run, command):
    running.resume(run, connect=connect)
    assert "incidents" not in shown(command, run)
    found = run_status(run)
    assert (found.state, found.rounds, found.incidents) == ("finished", 1, {})


def test_a_server_app_that_died_is_an_incident_of_the_hub(run, command):
    def dies(*state: Any) -> Engine:
        engine = connect(*state)
        engine.clients = {}.popitem  # type: ignore[method-assign, assignment]
        return engine

    with pytest.raises(KeyError):
        running.resume(run, connect=dies)
    running.resume(run, connect=connect)
    assert shown(command, run).count("resumed") == 1
    assert run_status(run).incidents == {"the hub": 1}


def test_incidents_are_those_of_weft_show_by_site(run, command):
    journal(run, AWAY, MISSING, NO_TASK)
    assert run_status(run).incidents == {"north": 2}
    text = shown(command, run)
    for part in ("away", "no reply", "it has no task 1 yet"):
        assert part in " ".join(text.split())


def test_regular_events_are_not_incidents(run):
    journal(run, AWAY, *[(event, {"client": 1, "site": "north"}) for event in ("back", "retry", "removed")])
    found = run_status(run)
    assert (found.incidents, found.removed) == ({"north": 1}, ["north"])
    assert "north was removed" in found.as_text()


def test_a_run_is_running_while_a_process_works_on_it_or_watches_it(run):
    journal(run, NO_TASK)
    assert (run_status(run).state, run_status(run).waiting_for) == ("stopped", [])
    write_text(run / FLOWER_RUN, "17\n")  # submitted a moment ago
    assert run_status(run).state == "running"
    assert "waiting for ada: it has no task 1 yet" in run_status(run).as_text()
    assert run_status(run, is_up=False).state == "stopped"
    with filelock.FileLock(run / WATCHED):
        assert run_status(run, is_up=False).state == "running"
        write_text(run / "summary.json", "{}\n")
        assert "waiting for" not in run_status(run).as_text()
        (run / "summary.json").unlink()
    long_ago = time.time() - 2 * STARTING
    os.utime(run / FLOWER_RUN, (long_ago, long_ago))
    assert run_status(run).state == "stopped"


def test_a_stopped_run_shows_its_reason_and_how_to_resume_it(run):
    write_text(run / ERROR_FILE, "task 0 of ada failed:\nsee its log\n")
    found = run_status(run)
    assert (found.state, found.reason) == ("stopped", "task 0 of ada failed: see its log")
    assert found.reason in found.as_text()
    assert f"weft hub run {os.path.relpath(run)}" in found.as_text()
    with contextlib.closing(RunFolder.open(run)):  # a server app works on it: the reason is outdated
        assert (run_status(run).state, run_status(run).reason) == ("running", "")


def test_status_names_sites_that_left_unless_invited_again(run, hub, capsys):
    """The site of an incident has the name of the run's own list, which may differ from the hub's."""
    write_json(hub / "runs.json", [str(run)])
    journal(run, ("left", {"client": 1, "site": "north"}), AWAY)
    cli_hub.status_command(hub)
    text = capsys.readouterr().out
    assert "weft hub remove north" in text
    assert "weft hub remove south" not in text
    assert "study-0123456789ab" in text
    assert "north has left" in text
    later = time.time() + 60
    os.utime(hub / "north.pub", (later, later))
    cli_hub.status_command(hub)
    assert "weft hub remove" not in capsys.readouterr().out


def test_a_missing_run_folder_is_an_error_of_the_run(tmp_path):
    assert "does not exist" in run_status(tmp_path / "gone").as_text()
