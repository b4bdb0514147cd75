"""A site's folder and its state of runs without Flower.

A plugin that tests also import, hence PYTEST_DONT_REWRITE: it asserts nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from weft.cli import site as cli_site
from weft.flower.site_state import SiteState
from weft.plan import Plan
from weft.wire.message import Message, encode

TINY = {
    "name": "own",
    "clients": 2,
    "tasks": 2,
    "network": "mlp",
    "rounds_per_task": 1,
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}
FIRST, SECOND, OTHER = "study-0aaaaaaaaaaa", "study-0bbbbbbbbbbb", "trial-1ccccccccccc"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A site as made by `weft site join`, without keys."""
    folder: Path = tmp_path / "ada"
    for name in ("state", "logs", "tasks"):
        (folder / name).mkdir(parents=True)
    (folder / "site.json").write_text(json.dumps({"name": "ada", "hub": "127.0.0.1:9092"}))
    (folder / "tasks.json").write_text("[]\n")
    monkeypatch.setattr(cli_site, "check_flower", lambda: None)
    return folder


def answer(site: Path, run: str, day: int, *ops: str, plan: str = "own") -> None:
    """Answer a request of a run as the client app does; `day` is the time of the reply."""
    request = Message("server", "client-1", "0.0.1", ops, 0, 0)
    SiteState(site / "state" / run, Plan.merge({**TINY, "name": plan}), 1).answer(encode(request))
    moment = 86400 * day + 3600
    os.utime(site / "state" / run / "manifest.json", (moment, moment))


def status(site: Path, capsys: pytest.CaptureFixture[str]) -> str:
    cli_site.status_command(site)
    return capsys.readouterr().out


def status_json(site: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    cli_site.status_command(site, as_json=True)
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts
