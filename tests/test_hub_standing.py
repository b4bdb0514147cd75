"""What `weft hub status` says of a run, without Flower: a real run folder, and events as the server app writes them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

import weft
from weft import running
from weft.engines import Engine, Saved
from weft.hub import standing
from weft.record import SITES, Record, write_text
from weft.session import Session, local_engine

pytest_plugins = ["cli_helpers"]

PLAN = {
    "clients": 2,
    "tasks": 1,
    "network": "mlp",
    "rounds_per_task": 1,
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}
AWAY = ("away", {"client": 1, "site": "north", "time": 1.0})
MISSING = ("incident", {"client": 1, "step": 0, "round": 0, "time": 1.0, "reason": "no answer"})


@pytest.fixture
def run(tmp_path) -> Path:
    """As `weft hub run` makes it."""
    folder: Path = tmp_path / "study"
    Record.create(folder, weft.Plan.merge(PLAN)).close()
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
    assert standing.in_words(standing.state(run)).startswith("finished, 1 rounds done, no incidents")


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


def test_a_folder_that_is_gone_is_said(tmp_path):
    assert "not there any more" in standing.in_words(standing.state(tmp_path / "gone"))
