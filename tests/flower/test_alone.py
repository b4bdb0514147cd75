"""What needs Flower's packages, but none of its processes: certificates, the client app by itself, surroundings."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from weft.cli import hub as cli_hub
from weft.errors import WeftError
from weft.flower import audit_log as left
from weft.flower import client_app as client
from weft.flower import leaving, sharing
from weft.flower.envelope import Asked, pack, unpack_reply
from weft.flower.hub import keys
from weft.flower.hub.hub import Hub
from weft.flower.site_state import FAILED
from weft.plan import Plan
from weft.wire.message import Message, encode

TINY = {
    "clients": 1,
    "tasks": 1,
    "network": "mlp",
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder: Path = tmp_path / "hub"
    Hub.create(folder, None, 9092)
    return folder


@pytest.mark.parametrize(
    ("days", "said"),
    [(365 * keys.YEARS - 61, ""), (365 * keys.YEARS - 59, "in 58 days"), (365 * keys.YEARS + 2, "no site is let in")],
)
def test_status_says_when_certificates_end_soon(hub, days, said, monkeypatch, capsys):
    cli_hub.status_command(hub, as_json=True)
    end = datetime.datetime.fromisoformat(json.loads(capsys.readouterr().out)["certificates end"])
    assert abs((end - datetime.datetime.now(datetime.UTC)).days - 365 * keys.YEARS) <= 1
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(cli_hub, "_now", lambda: later)
    cli_hub.status_command(hub)
    told = capsys.readouterr().out
    assert bool(said) == ("certificates" in told)
    assert said in told
    assert not said or end.strftime("%Y-%m-%d") in told


def test_a_certificate_that_cannot_be_read_is_said_and_the_rest_is_shown(hub, capsys):
    (hub / "server.pem").write_text("nothing")
    cli_hub.status_command(hub)
    assert "sites reach it at" in (told := capsys.readouterr().out)
    assert "server.pem cannot be read" in told


# ---- what goes wrong at a site ---------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for key in ("_run_id", "_node_id", "_task_id"):  # a Message asks who sends it
        monkeypatch.setattr(TaskIdentity, key, 1, raising=False)
    folder: Path = tmp_path / "ada"
    (folder / "state").mkdir(parents=True)
    return folder


def ask(site: Path) -> object:
    wire = encode(Message("server", "client-0", "0.0.0", ("begin", "train"), 0, 0))
    message = pack(Asked(wire, "run-0", Plan.merge(TINY).toml(), 0), 7, 60.0)
    context = Context(0, 7, {"site": str(site), "hub": "hub:1"}, RecordDict(), {})
    return client.on_message(message, context)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda site: (site / left.FILE).mkdir(),  # cannot be written to
        lambda site: (site / leaving.FILE).mkdir(),
        lambda site: (site / sharing.FILE).write_text("/srv/secret"),
    ],
    ids=["left", "leaving", "share"],
)
def test_what_cannot_be_written_down_at_a_site_stands_in_its_own_log_alone(site, spoil, capsys):
    spoil(site)
    with pytest.raises(WeftError) as told:
        ask(site)
    assert str(told.value) == FAILED
    assert str(site) in (said := capsys.readouterr().err) or "/srv/secret" in said


def test_an_answer_is_written_down_before_it_goes(site):
    assert unpack_reply(ask(site)).wire
    rows, damaged = left.read(site)
    assert (len(rows) >= 1, damaged) == (True, [])
    leaving.leave(site)
    assert unpack_reply(ask(site)).left
    assert [told.run for told in leaving.told(site)] == ["run-0"]
