"""A loss of power takes what the system had not yet put down: so the order in which things are put down counts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cli_helpers import tiny

import weft
from weft.core.storage import State
from weft.runs.folder import read_manifest, write_manifest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc which file is put down")


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """What is put down and what takes its place, by name, as it happens."""
    happened: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def put_down(place: int) -> None:
        happened.append(Path(f"/proc/self/fd/{place}").readlink().name)
        fsync(place)

    def take_place(partial: Path, path: Path) -> Path:
        happened.append(f"-> {path.name}")
        return replace(partial, path)

    monkeypatch.setattr(os, "fsync", put_down)
    monkeypatch.setattr(Path, "replace", take_place)
    return happened


def test_all_that_a_manifest_names_is_on_disk_before_it_takes_its_place(tmp_path, order):
    for count in (1, 2):
        State(reply=b"x" * count).save(tmp_path, f"reply-{count}")
        order.clear()
        write_manifest(tmp_path, {"replies": count})
        *before, place, after = order
        assert place == "-> manifest.json"
        assert {f"reply-{count}.safetensors", tmp_path.name} <= set(before)
        assert before[-1].startswith(".manifest.json.")
        assert after == tmp_path.name
    assert read_manifest(tmp_path) == {"replies": 2}


def test_what_is_on_disk_already_is_not_put_down_again(tmp_path, order):
    State(reply=b"x").save(tmp_path, "old")
    os.utime(tmp_path / "old.safetensors", (1, 1))
    write_manifest(tmp_path, {})
    order.clear()
    State(reply=b"y").save(tmp_path, "new")
    write_manifest(tmp_path, {})
    assert "new.safetensors" in order
    assert "old.safetensors" not in order


def test_the_tables_of_a_run_are_on_disk_before_the_checkpoint_that_counts_on_them(tmp_path, order):
    weft.run(tiny(tasks=1, rounds_per_task=1), tmp_path / "run")
    last = len(order) - 1 - order[::-1].index("-> manifest.json")
    assert {"accuracy.csv", "ledger.csv"} <= set(order[:last])
