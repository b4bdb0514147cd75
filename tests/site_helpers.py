"""A site's folder and what it remembers of runs, both real, without Flower.

Used as a plugin, and imported by the tests before that, hence PYTEST_DONT_REWRITE: it asserts nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from weft.cli import site as cli_site
from weft.flower.site_state import Memory
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
    """As `weft site join` makes it, without keys."""
    folder: Path = tmp_path / "ada"
    for name in ("state", "logs", "tasks"):
        (folder / name).mkdir(parents=True)
    (folder / "site.json").write_text(json.dumps({"name": "ada", "hub": "127.0.0.1:9092"}))
    (folder / "tasks.json").write_text("[]\n")
    monkeypatch.setattr(cli_site, "check_flower", lambda: None)
    return folder


def answer(site: Path, run: str, day: int, *ops: str, plan: str = "own") -> None:
    """What the client app does, on a day of its own."""
    request = Message("server", "client-1", "0.0.1", ops, 0, 0)
    Memory(site / "state" / run, Plan.merge({**TINY, "name": plan}), 1).answer(encode(request))
    moment = 86400 * day + 3600
    os.utime(site / "state" / run / "manifest.json", (moment, moment))


def status(site: Path, capsys: pytest.CaptureFixture[str]) -> str:
    cli_site.status_command(site)
    return capsys.readouterr().out
