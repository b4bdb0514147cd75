"""Fingerprints of images: recorded in the run folder and in results, and checked when a run is resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_helpers import Stop, Stopper
from data_helpers import small_dataset

import weft
from weft import Plan
from weft.data import cache
from weft.errors import WeftError
from weft.repro.store import images_of
from weft.runs.folder import read_images
from weft.runs.run import check_images
from weft.scenarios.splits import SPLIT_VERSIONS, fingerprint_of, has_changed

pytest_plugins = ["data_helpers"]

TINY: dict[str, Any] = {
    "scenario": "noniid-35",
    "clients": 2,
    "tasks": 1,
    "network": "mlp",
    "network.hidden": 8,
    "network.features": 8,
    "rounds_per_task": 2,
    "method": "fedavg",
}


@pytest.fixture
def own_cache(small_cache, tmp_path, monkeypatch) -> Path:
    """A cache that a test may change."""
    folder = Path(shutil.copytree(small_cache, tmp_path / "cache"))
    monkeypatch.setenv("WEFT_DATA", str(folder))
    return folder


def test_the_fingerprint_depends_on_the_images_only(own_cache):
    before = cache.fingerprint("mnist")
    assert len(before) == 16
    arrays = small_dataset("mnist")
    cache.write(own_cache, "mnist", arrays)  # packed again: same images, new time
    assert cache.fingerprint("mnist") == before
    np.savez_compressed(own_cache / "mnist.npz", **arrays)
    assert cache.fingerprint("mnist") == before
    cache.write(own_cache, "mnist", {**arrays, "remark": np.array(["not used"])})
    assert cache.fingerprint("mnist") == before
    for key in ("x", "y", "split"):
        changed = arrays[key].copy()
        changed.flat[0] = 1 - changed.flat[0]
        cache.write(own_cache, "mnist", {**arrays, key: changed})
        assert cache.fingerprint("mnist") != before, key


def test_a_missing_or_damaged_dataset_has_no_fingerprint(own_cache):
    (own_cache / "mnist.npz").write_bytes(b"PK no zip")
    with pytest.raises(WeftError, match=r"mnist\.npz is damaged.*--force"):
        cache.fingerprint("mnist")
    (own_cache / "mnist.npz").unlink()
    with pytest.raises(WeftError, match="weft data get mnist"):
        cache.fingerprint("mnist")


def test_a_run_records_all_datasets_of_its_scenario(own_cache, tmp_path):
    weft.run(Plan.merge(TINY), tmp_path / "run")
    wanted = {name: fingerprint_of(name) for name in cache.available() if name != "facescrub"}
    assert wanted["svhn"] == cache.fingerprint("svhn")
    assert wanted["notmnist"] == f"{cache.fingerprint('notmnist')}.{SPLIT_VERSIONS['notmnist']}"
    assert read_images(tmp_path / "run") == wanted
    assert images_of(tmp_path / "run").split() == [f"{name}:{wanted[name]}" for name in sorted(wanted)]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "torch" in environment["packages"]
    weft.run(Plan.merge({**TINY, "scenario": "glyphs"}), tmp_path / "drawn")
    assert (read_images(tmp_path / "drawn"), images_of(tmp_path / "drawn")) == ({}, "")


def test_a_run_is_resumed_with_the_same_images_and_split_only(own_cache, tmp_path, monkeypatch):
    with pytest.raises(Stop):
        weft.run(Plan.merge(TINY), tmp_path / "run", display=Stopper(3))
    arrays = small_dataset("svhn")
    cache.write(own_cache, "svhn", {**arrays, "x": 255 - arrays["x"]})
    said = r"the run in .*run started with other images of svhn \(\w{16}\) than .*cache has \(\w{16}\); .*--data-dir"
    for _ in range(2):  # and its lock is free again
        with pytest.raises(WeftError, match=said):
            weft.resume(tmp_path / "run")
    cache.write(own_cache, "svhn", arrays)
    with monkeypatch.context() as patch:
        patch.setitem(SPLIT_VERSIONS, "svhn", 1)
        with pytest.raises(WeftError, match=r"other .* splits of svhn .*run again in a new folder"):
            weft.resume(tmp_path / "run")
        check_images(tmp_path / "run", same_splits=False)  # for export only the images matter
    assert weft.resume(tmp_path / "run").accuracy is not None


def test_changed_images_and_changed_splits(own_cache):
    recorded = fingerprint_of("notmnist")
    other = "x" + recorded[1:]
    assert not has_changed("notmnist", recorded)
    assert not has_changed("somebody's own", "0" * 16)
    assert all(has_changed("notmnist", one) for one in (other, recorded.partition(".")[0], f"{recorded}1", ""))
    (own_cache / "notmnist.npz").unlink()  # images cannot be compared any more, split versions can
    assert not has_changed("notmnist", other)
    assert has_changed("notmnist", recorded.partition(".")[0])
