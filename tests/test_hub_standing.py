"""What `weft hub status` says of a run, without Flower: a real run folder, and events as the server app writes them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import filelock
import pytest
from cli_helpers import tiny

from weft.cli import hub as cli_hub
from weft.core.engine import Engine, Saved
from weft.files import write_text
from weft.flower.hub import status as standing
from weft.runs import run as running
from weft.runs.folder import SITES, Record
from weft.runs.session import Session, local_engine

pytest_plugins = ["cli_helpers"]

AWAY = ("away", {"client": 1, "site": "north", "time": 1.0})
MISSING = ("incident", {"client": 1, "task": 0, "round": 0, "time": 1.0, "reason": "no answer"})


@pytest.fixture
def run(tmp_path) -> Path:
    """As `weft hub run` makes it."""
    folder: Path = tmp_path / "study"
    Record.create(folder, tiny(clients=2, tasks=1, rounds_per_task=1)).close()
    write_text(folder / SITES, json.dumps({"names": ["ada", "north"], "run": "study-0123456789ab"}) + "\n")
    return folder


def told(run: Path, *events: tuple[str, dict[str, object]]) -> None:
    with contextlib.closing(Record.open(run)) as record:
        for event, facts in events:
            record.journal(event, **facts)


def connect(session: Session, saved: Saved) -> Engine:
    return local_engine(session.record, saved, 64, None)


def shown(command, folder: Path) -> str:
    done = command("show", folder)
    assert done.code == 0
    return str(done.out)


def test_a_run_that_nothing_stopped_has_no_incident_anywhere(run, command):
    running.resume(run, connect=connect)  # as the hub's server app begins
    assert "incidents" not in shown(command, run)
    assert standing.in_words(standing.state(run)).startswith("finished, 1 round done, no incidents")


def test_a_server_app_that_died_is_an_incident_to_both(run, command):
    class Dies(Exception):  # noqa: N818
        pass

    def dies(session: Session, saved: Saved) -> Engine:
        engine = connect(session, saved)

        def exchange(*_: object) -> None:
            raise Dies

        engine.exchange = exchange  # type: ignore[method-assign, assignment]
        return engine

    with pytest.raises(Dies):
        running.resume(run, connect=dies)
    running.resume(run, connect=connect)
    assert shown(command, run).count("resumed") == 1
    assert "1 incident (the hub: 1)" in standing.in_words(standing.state(run))


def test_incidents_are_those_that_show_lists_by_the_runs_own_names(run, command):
    told(run, AWAY, MISSING, ("waiting", {"client": 0, "site": "ada", "reason": "it has no task 1 yet"}))
    assert standing.state(run)["of"] == {"north": 2}
    said = shown(command, run)
    incidents, sites = said[said.index("incidents") :].split("what sites did")
    assert ("away" in incidents, "no answer" in incidents, "waiting" in incidents) == (True, True, False)
    assert "it has no task 1 yet" in " ".join(sites.split())


def test_what_sites_do_in_good_order_is_no_incident(run, command):
    orderly = [(event, {"client": 1, "site": "north"}) for event in ("back", "retry", "removed")]
    told(run, AWAY, *orderly)
    assert standing.state(run)["of"] == {"north": 1}
    assert standing.in_words(standing.state(run)).endswith("1 incident (north: 1), north was taken out")
    assert "away client=1 site=north" in shown(command, run)


def test_a_run_is_under_way_while_somebody_works_on_it_or_watches_it(run):
    def words(is_up: bool = True) -> str:
        return standing.in_words(standing.state(run, is_up)).split(",")[0].split(";")[0]

    told(run, ("waiting", {"client": 0, "site": "ada", "reason": "it has no task 1 yet"}))
    assert words() == "stopped"
    assert "waiting" not in standing.in_words(standing.state(run))
    write_text(run / "flower.txt", "17\n")  # Flower was told to start its server app a moment ago
    assert words() == "under way"
    assert "waiting for ada: it has no task 1 yet" in standing.in_words(standing.state(run))
    assert words(is_up=False) == "stopped"
    with filelock.FileLock(run / ".watched"):
        assert words(is_up=False) == "under way"


def test_status_names_who_has_left_unless_it_was_invited_again(run, hub, capsys):
    """The site of an incident is named by the run's own list, though the hub has none of that name any more."""
    told(run, ("left", {"client": 1, "site": "north"}), AWAY)
    cli_hub.status_command(hub)
    said = capsys.readouterr().out
    assert "client 0: north, away; it has left (weft hub remove north takes it out)" in said
    assert "client 1: south, away\n" in said
    assert f"study-0123456789ab): stopped; weft hub run {os.path.relpath(run)} goes on, 0 rounds done" in said
    assert "1 incident (north: 1), north has left" in said
    later = time.time() + 60
    os.utime(hub / "north.pub", (later, later))
    cli_hub.status_command(hub)
    assert "client 0: north, away\n" in capsys.readouterr().out


@pytest.fixture
def hub(tmp_path, run, monkeypatch) -> Path:
    """Its folder alone; it is down."""
    folder: Path = tmp_path / "hub"
    folder.mkdir()
    words = {"hub.json": {"address": "127.0.0.1:9092", "port": 9092}, "sites.json": ["north", "south"]}
    for name, content in {**words, "runs.json": [str(run)]}.items():
        write_text(folder / name, json.dumps(content))
    for name in ("north", "south"):
        write_text(folder / f"{name}.pub", "")
        os.utime(folder / f"{name}.pub", (1e9, 1e9))
    monkeypatch.setattr(cli_hub, "check_flower", lambda: None)
    return folder


def test_a_folder_that_is_gone_is_said(tmp_path):
    assert "not there any more" in standing.in_words(standing.state(tmp_path / "gone"))


# ---- is anybody at work? ---------------------------------------------------------------------------------------------


def test_a_run_that_nobody_works_on_is_stopped_and_says_how_it_goes_on(run):
    way = f"weft hub run {os.path.relpath(run)} goes on"
    assert standing.in_words(standing.state(run)).startswith(f"stopped; {way}, 0 rounds done")
    write_text(run / "problem.txt", "task 0 of ada failed:\nit failed at the site\n")
    said = standing.in_words(standing.state(run))
    assert said.startswith(f"stopped (task 0 of ada failed: it failed at the site); {way}, 0 rounds done")
    with contextlib.closing(Record.open(run)):  # a server app is at work; what was wrong before is of the past
        assert standing.in_words(standing.state(run)).startswith("under way, 0 rounds done")


def test_a_server_app_that_is_being_started_is_no_stopped_run(run):
    write_text(run / "flower.txt", "7\n")
    assert standing.in_words(standing.state(run)).startswith("under way")
    long_ago = time.time() - 2 * standing.STARTING
    os.utime(run / "flower.txt", (long_ago, long_ago))
    assert standing.in_words(standing.state(run)).startswith("stopped")
