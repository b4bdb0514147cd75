"""A site's memory: what is asked twice is answered once, in the same bytes, whoever dies in between."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from weft import scenarios
from weft.errors import WeftError
from weft.flower import audit_log as left
from weft.flower.site_state import REPLIES_KEPT, Memory, NotYet
from weft.plan import Plan
from weft.scenarios import sites
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import LARGEST, Sparse

TINY = {
    "clients": 2,
    "tasks": 2,
    "network": "mlp",
    "rounds_per_task": 2,
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}


def plan(**more: object) -> Plan:
    return Plan.merge({**TINY, **more})


def request(round_index: int, *ops: str, step: int = 0, client: int = 1) -> bytes:
    words = ("server", f"client-{client}", f"{step}.{round_index}.{client}", ops, step, round_index)
    return encode(Message(*words))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_request_asked_again_is_answered_from_disk(tmp_path):
    ask = [request(0, "begin", "train", "send"), request(1, "train", "send"), request(2, "finish", "give", "test")]
    replies = [Memory(tmp_path, plan(), 1).answer(wire) for wire in ask]  # each as if in a new process
    before = files(tmp_path)
    assert [Memory(tmp_path, plan(), 1).answer(wire) for wire in ask] == replies
    assert files(tmp_path) == before
    assert "adaptive" in decode(replies[2]).tensors


@pytest.mark.slow
def test_only_the_last_replies_are_kept_and_nothing_else_lies_around(tmp_path):
    for place in range(REPLIES_KEPT + 3):
        Memory(tmp_path, plan(), 1).answer(request(place, *(["begin"] if place == 0 else []), "train"))
    assert len(list(tmp_path.glob("reply-*"))) == REPLIES_KEPT
    assert len(list(tmp_path.glob("client-*"))) == 1


def test_a_failure_is_a_reply_and_leaves_no_trace(tmp_path):
    failed = decode(Memory(tmp_path / "one", plan(), 1).answer(request(0, "train")))  # a task that was never begun
    assert failed.error
    assert failed.request_id == "0.0.1"
    good = request(0, "begin", "train", "send")
    assert Memory(tmp_path / "one", plan(), 1).answer(good) == Memory(tmp_path / "two", plan(), 1).answer(good)


def test_a_request_that_claims_gigabytes_is_a_failure_and_leaves_no_trace(tmp_path):
    Memory(tmp_path, plan(), 1).answer(request(0, "begin", "train"))
    before = files(tmp_path)
    huge = Sparse(LARGEST, torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    words = ("server", "client-1", "0.1.1", ("receive",), 0, 1)
    for wire in (encode(Message(*words, {"global": huge})), request(1, "train", step=-1)):
        assert "MessageError" in decode(Memory(tmp_path, plan(), 1).answer(wire)).error
    assert files(tmp_path) == before


def test_a_message_for_somebody_else_is_refused(tmp_path):
    with pytest.raises(WeftError, match="client-0 came to client-1"):
        Memory(tmp_path, plan(), 1).answer(request(0, "begin", "train", client=0))


def test_all_that_left_is_written_down(tmp_path):
    wire = Memory(tmp_path / "run", plan(), 1).answer(request(0, "begin", "train", "send", "finish", "give"))
    left.note(tmp_path, "hub:1", "run", wire)
    left.note(tmp_path, "hub:1", "run", wire)
    rows, damaged = left.read(tmp_path)
    assert not damaged
    assert [row["tensor"] for row in rows] == 2 * ["header", *decode(wire).tensors]
    assert sum(int(row["bytes"]) for row in rows) == 2 * len(wire)
    assert left.read(tmp_path / "run") == ([], [])


# ---- a site's own images ---------------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    """Two classes of ten images that differ in brightness."""
    rng = np.random.default_rng(0)
    for place, name in enumerate(("dark", "light")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for count in range(10):
            pixels = rng.integers(100 * place, 100 * place + 90, (40, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{count}.png")
    return tmp_path / "images"


@pytest.fixture
def site(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tasks.json").write_text("[]")
    monkeypatch.setenv("WEFT_SITE", str(tmp_path / "site"))
    return tmp_path / "site"


def test_a_folder_becomes_a_task(images, site):
    announce(site, images)
    scenario = scenarios.of(own_plan())
    (task,) = scenario.sequences[1]
    assert (task.name, task.classes) == ("task 0", ("dark", "light"))
    assert task.sizes == {"train": 14, "valid": 2, "test": 4}
    train = task.load("train")
    assert train.images.shape == (14, 32, 32, 3)
    assert sorted(set(train.labels)) == [0, 1]
    assert train.images[train.labels == 0].mean() < train.images[train.labels == 1].mean()


def own_plan() -> Plan:
    return Plan.merge({key: value for key, value in TINY.items() if "scenario" not in key} | {"scenario": "sites"})


def announce(site, images, bits=sites.DEFAULT_BITS):
    """As `weft site task add` does."""
    known = sites.listed(site)
    sites.save(site, len(known), sites.look(images, bits))
    known.append({"name": f"task {len(known)}", "folder": str(images), "bits": bits, "pack": len(known)})
    (site / "tasks.json").write_text(json.dumps(known))


def test_a_task_that_is_not_there_yet_is_waited_for(tmp_path, images, site):
    memory = Memory(tmp_path / "run", own_plan(), 1)
    with pytest.raises(NotYet, match="no task 0 yet"):
        memory.answer(request(0, "begin", "train"))
    announce(site, images)
    assert decode(memory.answer(request(0, "begin", "train"))).numbers["examples"] == 14
    with pytest.raises(NotYet, match="no task 1 yet"):
        memory.answer(request(0, "begin", "train", step=1))


def test_what_is_wrong_with_a_folder_is_said(images, tmp_path):
    assert not sites.look(images).errors
    (images / "dark" / "broken.png").write_bytes(b"not an image")
    (images / "dark" / "cut.png").write_bytes((images / "dark" / "0.png").read_bytes()[:-30])
    said = sites.look(images).errors
    assert any("broken.png" in fault and "cannot be read" in fault for fault in said)
    assert any("cut.png" in fault and "cannot be read" in fault for fault in said)
    assert "not a folder" in sites.look(tmp_path / "nowhere").errors[0]
    (tmp_path / "one" / "class").mkdir(parents=True)
    shutil.copy(images / "dark" / "0.png", tmp_path / "one" / "class" / "a.png")
    assert sites.look(tmp_path / "one").errors
    shutil.copy(images / "dark" / "0.png", tmp_path / "one" / "stray.png")
    assert "stray.png" in sites.look(tmp_path / "one").errors[0]


def test_the_images_of_a_site_are_normalised(images, site):
    """The network sees values around 0 with a deviation of 1, whatever the site's images are like."""
    announce(site, images)
    task = scenarios.of(own_plan()).sequences[0][0]
    pixels = task.load("train").images.astype(float)
    np.testing.assert_allclose(task.mean, pixels.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(task.deviation, pixels.std((0, 1, 2)), rtol=1e-6)


def test_a_task_stays_as_it_was_announced(images, site):
    announce(site, images)
    before = scenarios.of(own_plan()).sequences[0][0]
    shutil.copy(images / "light" / "0.png", images / "dark" / "new.png")
    shutil.copytree(images / "light", images / "third")
    after = scenarios.of(own_plan()).sequences[0][0]
    assert (after.classes, after.sizes, after.fingerprint) == (before.classes, before.sizes, before.fingerprint)
    assert (after.load("test").images == before.load("test").images).all()


def test_a_group_stays_on_one_side(images, site):
    for name in ("dark", "light"):
        for patient in range(5):
            (images / name / f"patient{patient}").mkdir()
            for count in (2 * patient, 2 * patient + 1):
                (images / name / f"{count}.png").rename(images / name / f"patient{patient}" / f"{count}.png")
    announce(site, images)
    task = scenarios.of(own_plan()).sequences[0][0]
    assert sum(task.sizes.values()) == 20
    assert all(size % 2 == 0 for size in task.sizes.values())  # two images a patient


def test_deep_images_and_how_deep_they_are(images, site):
    """Twelve bits read as sixteen are nearly black, which is said; read as twelve they are not."""
    for name in ("dark", "light"):
        for place, file in enumerate(sorted((images / name).glob("*.png"))):
            values = np.full((8, 8), 400 * place + (200 if name == "light" else 0), dtype=np.uint16)
            Image.fromarray(values).save(file)
    (note,) = sites.look(images).notes
    assert "--bits=12" in note
    assert not sites.look(images, 12).notes
    announce(site, images, 12)
    assert scenarios.of(own_plan()).sequences[0][0].load("train").images.max() > 180


def test_a_task_is_learned_and_its_model_taken_home(images, site, tmp_path):
    """Two classes that differ in brightness are told apart, by the run and by the file that comes out of it."""
    from weft.export.files import open_model, write
    from weft.export.model import task_from_site

    announce(site, images)
    memory = Memory(site / "state" / "run", own_plan(), 1)
    with pytest.raises(WeftError, match="has no run run"):
        task_from_site(site, "run", 0)
    replies = [
        memory.answer(request(0, "begin", *["train"])),
        *(memory.answer(request(place, "train")) for place in range(1, 8)),
    ]
    assert not any(decode(reply).error for reply in replies)
    with pytest.raises(WeftError, match="has not finished task 0"):
        task_from_site(site, "run", 0)
    tested = decode(memory.answer(request(8, "finish", "test")))
    assert tested.numbers["accuracy"] == [1.0]
    taken = task_from_site(site, "run", 0)
    write(taken, tmp_path / "model.safetensors", "safetensors")
    run, facts = open_model(tmp_path / "model.safetensors")
    assert (facts["classes"], facts["bits"]) == (["dark", "light"], sites.DEFAULT_BITS)
    task = scenarios.of(own_plan()).sequences[1][0].load("test")
    assert (run(task.images)[0].argmax(1) == task.labels).all()


def test_the_hub_knows_nothing_of_a_sites_tasks(monkeypatch):
    monkeypatch.delenv("WEFT_SITE", raising=False)
    scenario = scenarios.of(own_plan())
    assert [len(sequence) for sequence in scenario.sequences] == [2, 2]
    with pytest.raises(WeftError, match="weft hub run"):
        scenario.sequences[0][0].load("train")
