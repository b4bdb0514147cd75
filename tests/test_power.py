"""After a loss of power only synced files remain, so the order of fsync and rename matters."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import tiny

import weft
from weft.core import storage
from weft.methods.state import ClientState
from weft.runs.folder import read_manifest, write_manifest

pytestmark = [
    pytest.mark.attack,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to see which file is synced"),
]


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """Names of synced and renamed files, in order."""
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def rename(partial: Path, path: Path) -> Path:
        events.append(f"-> {path.name}")
        return replace(partial, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", rename)
    return events


def test_all_files_of_a_manifest_are_synced_before_it_and_only_once(tmp_path, order):
    kept: dict[str, Any] = {}
    for count in (1, 2):
        kept[str(count)] = storage.save(ClientState(reply=b"x" * count), tmp_path, f"reply-{count}")
        os.utime(tmp_path / f"reply-{count}.safetensors", (1, 1))  # a clock that goes back
        order.clear()
        write_manifest(tmp_path, {"clients": kept})
        *before, renamed, after = order
        assert renamed == "-> manifest.json"
        assert {f"reply-{count}.safetensors", tmp_path.name} <= set(before)
        assert before[-1].startswith(".manifest.json.")
        assert after == tmp_path.name
        assert count == 1 or "reply-1.safetensors" not in order
    assert read_manifest(tmp_path) == {"clients": kept}


def test_the_tables_of_a_run_are_synced_before_its_checkpoint(tmp_path, order):
    weft.run(tiny(tasks=1, rounds_per_task=1), tmp_path / "run")
    last = len(order) - 1 - order[::-1].index("-> manifest.json")
    assert {"accuracy.csv", "ledger.csv"} <= set(order[:last])
