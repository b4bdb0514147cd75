"""A site's folder and its state of runs without Flower.

A plugin that tests also import, hence PYTEST_DONT_REWRITE: it asserts nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from weft.cli import site as cli_site
from weft.files import write_json
from weft.flower.site_state import SiteState
from weft.plan import Plan
from weft.runs.folder import RunFolder
from weft.wire.message import Message, encode

TINY = {
    "name": "own",
    "clients": 2,
    "tasks": 2,
    "network": "mlp",
    "rounds_per_task": 1,
    "batch_size": 5,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}
OF_SITES = {key: value for key, value in TINY.items() if "scenario" not in key} | {"scenario": "sites"}
FIRST, SECOND, OTHER = "study-0aaaaaaaaaaa", "study-0bbbbbbbbbbb", "trial-1ccccccccccc"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A site as made by `weft site join`, without keys."""
    folder: Path = tmp_path / "ada"
    for name in ("state", "logs", "tasks"):
        (folder / name).mkdir(parents=True)
    (folder / "site.json").write_text(json.dumps({"name": "ada", "hub": "127.0.0.1:9092"}))
    (folder / "tasks.json").write_text("[]\n")
    monkeypatch.setattr("weft.flower.hub.programs.check_flower", lambda: None)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The folder of a stopped hub with two sites that were invited long ago."""
    folder: Path = tmp_path / "hub"
    folder.mkdir()
    content = {"hub": {"address": "127.0.0.1:9092", "port": 9092}, "sites": ["north", "south"], "runs": []}
    for name, value in content.items():
        write_json(folder / f"{name}.json", value)
    for name in ("north", "south"):
        (folder / f"{name}.pub").touch()
        os.utime(folder / f"{name}.pub", (1e9, 1e9))
    monkeypatch.setattr("weft.flower.hub.programs.check_flower", lambda: None)
    return folder


@pytest.fixture
def images(tmp_path) -> Path:
    """Two classes of ten images that differ in brightness."""
    rng = np.random.default_rng(0)
    for index, name in enumerate(("dark", "light")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for count in range(10):
            pixels = rng.integers(100 * index, 100 * index + 90, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{count}.png")
    return tmp_path / "images"


def make_groups(images: Path) -> None:
    """Move the images of each class to five folders of patients with two images each."""
    for path in sorted(images.glob("*/*.png")):
        patient = path.parent / f"patient{int(path.stem) // 2}"
        patient.mkdir(exist_ok=True)
        path.rename(patient / path.name)


def journal(run: Path, *events: tuple[str, dict[str, Any]]) -> None:
    with contextlib.closing(RunFolder.open(run)) as folder:
        for event, facts in events:
            folder.journal(event, **facts)


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
