"""What a hub shows and watches, without processes: its folder is real, what Flower says is not."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

import weft
from weft.hub import runs
from weft.hub.hub import Hub
from weft.record import Record, write_text

PLAN = {"clients": 2, "tasks": 2, "network": "mlp", "rounds_per_task": 2}


@pytest.fixture
def hub(tmp_path) -> Hub:
    made = Hub.create(tmp_path / "hub", None, 9092)
    write_text(made.folder / "sites.json", '["ada", "ben"]\n')
    return made


@pytest.fixture
def run(tmp_path, hub) -> Path:
    folder: Path = tmp_path / "run"
    Record.create(folder, weft.Plan.merge(PLAN)).close()
    hub.note(folder)
    return folder


def test_whoever_watches_a_run_does_not_keep_its_server_app_from_working(hub, run, monkeypatch):
    monkeypatch.setattr(runs, "LOOK", 0.0)
    monkeypatch.setattr(runs, "ASK", 1e9)
    watcher = threading.Thread(target=runs.watch, args=(hub, run, "1"))
    watcher.start()
    try:
        for _ in range(300):
            with contextlib.closing(Record.open(run)) as record:
                record.journal("resumed")
    finally:
        write_text(run / "summary.json", "{}\n")
        watcher.join()
