"""What needs Flower's packages, but none of its processes: certificates, the client app by itself, surroundings."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from weft import cli_hub
from weft.hub import keys
from weft.hub.hub import Hub


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
