"""Which images a run used: in its folder and its line of results, and held against the cache when it goes on."""

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
from weft import Plan, scenarios
from weft.data import cache
from weft.errors import WeftError
from weft.repro import Row
from weft.repro.store import read_line
from weft.runs.folder import read_images
from weft.runs.run import check_images
from weft.scenarios.marks import CUTS, has_changed, mark_of

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
    """A cache that may be changed."""
    folder = Path(shutil.copytree(small_cache, tmp_path / "cache"))
    monkeypatch.setenv("WEFT_DATA", str(folder))
    return folder


def test_the_fingerprint_is_that_of_the_images(own_cache):
    before = cache.fingerprint("mnist")
    assert len(before) == 16
    arrays = small_dataset("mnist")
    cache.write(own_cache, "mnist", arrays)  # packed anew: another time, the same images
    assert cache.fingerprint("mnist") == before
    np.savez_compressed(own_cache / "mnist.npz", **arrays)
    assert cache.fingerprint("mnist") == before
    cache.write(own_cache, "mnist", {**arrays, "remark": np.array(["of no use to anybody"])})
    assert cache.fingerprint("mnist") == before
    for key in ("x", "y", "split"):
        changed = arrays[key].copy()
        changed.flat[0] = 1 - changed.flat[0]
        cache.write(own_cache, "mnist", {**arrays, key: changed})
        assert cache.fingerprint("mnist") != before, key


def test_a_dataset_that_is_missing_or_damaged_has_none(own_cache):
    (own_cache / "mnist.npz").write_bytes(b"PK no zip")
    with pytest.raises(WeftError, match=r"mnist\.npz is damaged.*--force"):
        cache.fingerprint("mnist")
    (own_cache / "mnist.npz").unlink()
    with pytest.raises(WeftError, match="weft data get mnist"):
        cache.fingerprint("mnist")


def test_a_run_records_every_dataset_that_its_scenario_read(own_cache, tmp_path):
    weft.run(Plan.merge(TINY), tmp_path / "run")
    wanted = {name: mark_of(name) for name in cache.there() if name != "facescrub"}
    assert wanted["svhn"] == cache.fingerprint("svhn")
    assert wanted["notmnist"] == f"{cache.fingerprint('notmnist')}.{CUTS['notmnist']}"
    assert read_images(tmp_path / "run") == wanted
    line = read_line(Row("fedavg", "fedavg"), 0, tmp_path / "run")
    assert line.images.split() == [f"{name}:{wanted[name]}" for name in sorted(wanted)]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert "torch" in environment["packages"]


def test_drawn_images_need_no_fingerprint(tmp_path):
    weft.run(Plan.merge({**TINY, "scenario": "glyphs"}), tmp_path / "run")
    assert read_images(tmp_path / "run") == {}
    assert read_line(Row("fedavg", "fedavg"), 0, tmp_path / "run").images == ""


def test_a_run_goes_on_with_the_same_images_or_not_at_all(own_cache, tmp_path):
    with pytest.raises(Stop):
        weft.run(Plan.merge(TINY), tmp_path / "run", screen=Stopper(3))
    arrays = small_dataset("svhn")
    cache.write(own_cache, "svhn", {**arrays, "x": 255 - arrays["x"]})
    said = r"the run in .*run began with other images of svhn \(\w{16}\) than .*cache has \(\w{16}\); .*--data-dir"
    for _ in range(2):  # and its lock is free again
        with pytest.raises(WeftError, match=said):
            weft.resume(tmp_path / "run")
    cache.write(own_cache, "svhn", arrays)
    assert weft.resume(tmp_path / "run").accuracy is not None


def test_a_run_goes_on_with_the_same_cut_or_not_at_all(own_cache, tmp_path, monkeypatch):
    with pytest.raises(Stop):
        weft.run(Plan.merge(TINY), tmp_path / "run", screen=Stopper(3))
    monkeypatch.setitem(CUTS, "svhn", 1)
    with pytest.raises(WeftError, match=r"another cut of svhn .*run again in a new folder"):
        weft.resume(tmp_path / "run")
    check_images(tmp_path / "run")  # of a model that is taken home the images matter, not their cut
    monkeypatch.delitem(CUTS, "svhn")
    assert weft.resume(tmp_path / "run").accuracy is not None


def test_what_is_known_of_other_images_and_of_another_cut(own_cache):
    mark = mark_of("notmnist")
    other = "x" + mark[1:]
    assert not has_changed("notmnist", mark)
    assert not has_changed("somebody's own", "0" * 16)
    assert all(has_changed("notmnist", one) for one in (other, mark.partition(".")[0], f"{mark}1", ""))
    (own_cache / "notmnist.npz").unlink()  # which images they were cannot be known any more, which cut can
    assert not has_changed("notmnist", other)
    assert has_changed("notmnist", mark.partition(".")[0])


@pytest.mark.parametrize("scenario", ["overlapped-cifar100", "noniid-35"])
def test_a_run_of_an_older_weft_goes_on_unless_its_images_are_cut_otherwise_now(own_cache, tmp_path, scenario):
    with pytest.raises(Stop):
        weft.run(Plan.merge({**TINY, "scenario": scenario}), tmp_path / "run", screen=Stopper(3))
    path = tmp_path / "run" / "environment.json"
    environment = json.loads(path.read_text())
    del environment["images"]
    path.write_text(json.dumps(environment))
    if scenario == "noniid-35":
        with pytest.raises(WeftError, match="began with another cut of traffic_signs"):
            weft.resume(tmp_path / "run")
    else:
        assert weft.resume(tmp_path / "run").accuracy is not None


# ---- the scenario of interference ------------------------------------------------------------------------------------


def interference(sender: str, clients: int = 2, seed: int = 0, **options: int) -> scenarios.Scenario:
    return scenarios.build("interference", {"sender": sender, **options}, clients, 2, seed)


def test_who_learns_what_in_the_scenario_of_interference(own_cache):
    scenario = interference("svhn", images=50, sender_images=100)
    assert [[task.name for task in tasks] for tasks in scenario.sequences] == [
        ["waiting", "mnist-0"],
        ["svhn-0", "svhn-1"],
    ]
    assert [task.sizes["train"] for tasks in scenario.sequences for task in tasks] == [2, 50, 100, 100]
    assert scenario.datasets == ("mnist", "svhn")
    first, second = (task.load("train").images.reshape(100, -1) for task in scenario.sequences[1])
    assert not set(map(bytes, first)) & set(map(bytes, second)), "the sender sees an image in both tasks"
    assert not scenario.sequences[0][0].load("train").images.any()
    other = interference("svhn", seed=1, images=50, sender_images=100)
    assert (scenario.sequences[0][1].load("train").images != other.sequences[0][1].load("train").images).any()


def test_nobody_is_alone(own_cache):
    assert [len(tasks) for tasks in interference("nobody", clients=1, images=50).sequences] == [2]
    for sender, clients in (("nobody", 2), ("svhn", 1)):
        with pytest.raises(WeftError, match=f"scenario.sender={sender} has "):
            interference(sender, clients=clients, images=50, sender_images=100)
    whole = interference("svhn", images=50, sender_images=5000)  # as many as there are, 21 of each class in both tasks
    assert [task.sizes["train"] for task in whole.sequences[1]] == [100, 100]


@pytest.mark.slow
def test_who_waits_answers_with_what_it_was_given(own_cache):
    """Where all is of one class there is nothing to learn: the receiver sends the very network that it got."""
    from helpers import Run

    keys = {"scenario.images": 50, "scenario.sender_images": 100, "rounds_per_task": 2, "batch_size": 10}
    run = Run(Plan.load("interference", network="lenet", device="cpu", **keys)).go_to(1)
    up, down = run.parts("c2s"), run.parts("s2c")
    for round_index in (0, 1):
        assert (up[0, 0, round_index, "base"] == down[0, 0, round_index, "global"]).all()
    assert (up[1, 0, 0, "base"] != down[1, 0, 0, "global"]).any()
