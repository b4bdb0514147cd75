"""A site's state: a repeated request gets the same bytes without training again, also after a kill."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import filelock
import numpy as np
import pytest
import torch
from PIL import Image
from site_helpers import FIRST, OF_SITES, OTHER, TINY, answer, make_groups

from weft import scenarios
from weft.errors import WeftError
from weft.export.files import open_model, write
from weft.flower import site_state
from weft.flower.hub.site import Site
from weft.flower.site_state import KEPT_REPLIES, SiteState, TaskNotAvailableError
from weft.plan import Plan
from weft.runs.model import task_from_site
from weft.scenarios import sites
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import LARGEST, Sparse

pytest_plugins = ["site_helpers"]


def state(folder: Path) -> SiteState:
    return SiteState(folder, Plan.merge(TINY), 1)


def request(round_index: int, *ops: str, task: int = 0, client: int = 1) -> bytes:
    request_id = f"{task}.{round_index}.{client}"
    return encode(Message("server", f"client-{client}", request_id, ops, task, round_index))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_repeated_request_is_answered_from_disk(tmp_path):
    requests = [
        request(0, "begin", "train", "upload"),
        request(1, "train", "upload"),
        request(2, "end", "share", "test"),
    ]
    replies = [state(tmp_path).answer(wire) for wire in requests]  # each as in a new process
    before = files(tmp_path)
    assert [state(tmp_path).answer(wire) for wire in requests] == replies
    assert files(tmp_path) == before
    assert "adaptive" in decode(replies[2]).tensors


def test_a_damaged_reply_is_not_sent(tmp_path):
    state(tmp_path).answer(request(0, "begin", "train"))
    (path,) = tmp_path.glob("reply-*")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(Exception, match="checksum"):
        state(tmp_path).answer(request(0, "begin", "train"))


@pytest.mark.slow
def test_only_the_last_replies_are_kept(tmp_path):
    for index in range(KEPT_REPLIES + 3):
        state(tmp_path).answer(request(index, *(["begin"] if index == 0 else []), "train"))
    assert len(list(tmp_path.glob("reply-*"))) == KEPT_REPLIES
    assert len(list(tmp_path.glob("client-*"))) == 1


def test_a_failure_is_a_reply_and_changes_no_state(tmp_path):
    failed = decode(state(tmp_path / "one").answer(request(0, "train")))  # a task that was never started
    assert failed.error
    assert failed.request_id == "0.0.1"
    good = request(0, "begin", "train", "upload")
    assert state(tmp_path / "one").answer(good) == state(tmp_path / "two").answer(good)


def test_a_request_that_claims_gigabytes_is_a_failure_and_changes_no_state(tmp_path):
    state(tmp_path).answer(request(0, "begin", "train"))
    before = files(tmp_path)
    huge = Sparse(LARGEST, torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    header = ("server", "client-1", "0.1.1", ("receive",), 0, 1)
    for wire in (encode(Message(*header, {"global": huge})), request(1, "train", task=-1)):
        assert "MessageError" in decode(state(tmp_path).answer(wire)).error
    assert files(tmp_path) == before


def test_a_message_for_another_client_is_rejected(tmp_path):
    with pytest.raises(WeftError, match="client-0"):
        state(tmp_path).answer(request(0, "begin", "train", client=0))


# ---- locks -----------------------------------------------------------------------------------------------------------


def test_no_run_starts_while_a_task_is_being_removed(site):
    """It has no folder yet that could be locked."""
    thread = threading.Thread(target=answer, args=(site, FIRST, 3, "begin", "train"))
    with site_state.no_active_run(site):
        thread.start()
        time.sleep(1.0)
        assert not list((site / "state" / FIRST).glob("*.*s*"))
        assert thread.is_alive()
    thread.join()
    assert (site / "state" / FIRST / "manifest.json").exists()


def test_a_working_run_blocks_only_itself(site):
    answer(site, FIRST, 3, "begin", "train")
    thread = threading.Thread(target=answer, args=(site, FIRST, 3, "train"))
    with filelock.FileLock(site / "state" / FIRST / ".lock"):
        thread.start()
        answer(site, OTHER, 4, "begin", "train")
        assert thread.is_alive()
    thread.join()
    assert [run.id for run in site_state.site_runs(site)] == [FIRST, OTHER]


# ---- tasks of a site -------------------------------------------------------------------------------------------------


def site_plan(site: Path | None = None) -> Plan:
    return Plan.merge(OF_SITES) if site is None else sites.at_site(Plan.merge(OF_SITES), site)


def first_task(site: Path) -> scenarios.Task:
    return scenarios.of(site_plan(site)).sequences[1][0]


def announce(site: Path, images: Path, bits: int = sites.DEFAULT_BITS) -> None:
    Site(site).add_task("first", images, bits)


def test_a_folder_becomes_a_task(images, site):
    announce(site, images)
    task = first_task(site)
    assert (task.name, task.classes) == ("first", ("dark", "light"))
    assert task.sizes == {"train": 14, "valid": 2, "test": 4}
    train = task.load("train")
    assert train.images.shape == (14, 32, 32, 3)
    assert sorted(set(train.labels)) == [0, 1]
    assert train.images[train.labels == 0].mean() < train.images[train.labels == 1].mean()
    pixels = train.images.astype(float)
    np.testing.assert_allclose(task.mean, pixels.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(task.deviation, pixels.std((0, 1, 2)), rtol=1e-6)


def test_a_request_for_a_later_task_has_to_wait(tmp_path, images, site):
    run = SiteState(tmp_path / "run", site_plan(site), 1)
    with pytest.raises(TaskNotAvailableError, match="no task 0 yet"):
        run.answer(request(0, "begin", "train"))
    announce(site, images)
    assert decode(run.answer(request(0, "begin", "train"))).fields["examples"] == 14
    with pytest.raises(TaskNotAvailableError, match="no task 1 yet"):
        run.answer(request(0, "begin", "train", task=1))


def test_the_errors_of_a_folder_name_files(images, tmp_path):
    assert not sites.look(images).errors
    (images / "dark" / "cut.png").write_bytes((images / "dark" / "0.png").read_bytes()[:-30])
    assert "cut.png" in sites.look(images).errors[0]
    assert "not a folder" in sites.look(tmp_path / "nowhere").errors[0]
    (tmp_path / "one" / "class").mkdir(parents=True)
    shutil.copy(images / "dark" / "0.png", tmp_path / "one" / "class" / "a.png")
    assert sites.look(tmp_path / "one").errors
    shutil.copy(images / "dark" / "0.png", tmp_path / "one" / "stray.png")
    assert "stray.png" in sites.look(tmp_path / "one").errors[0]


def test_an_announced_task_does_not_change_with_its_files(images, site):
    announce(site, images)
    before = first_task(site)
    shutil.copy(images / "light" / "0.png", images / "dark" / "new.png")
    shutil.copytree(images / "light", images / "third")
    after = first_task(site)
    assert (after.classes, after.sizes, after.fingerprint) == (before.classes, before.sizes, before.fingerprint)
    assert (after.load("test").images == before.load("test").images).all()


def test_a_group_stays_in_one_split(images, site):
    make_groups(images)
    announce(site, images)
    assert sum(first_task(site).sizes.values()) == 20
    assert all(size % 2 == 0 for size in first_task(site).sizes.values())  # two images per patient


def test_images_of_twelve_bits(images, site):
    """Read as sixteen bits they are nearly black, and a note says so."""
    for name in ("dark", "light"):
        for index, file in enumerate(sorted((images / name).glob("*.png"))):
            values = np.full((8, 8), 400 * index + (200 if name == "light" else 0), dtype=np.uint16)
            Image.fromarray(values).save(file)
    (note,) = sites.look(images).notes
    assert "--bits=12" in note
    assert not sites.look(images, 12).notes
    announce(site, images, 12)
    assert first_task(site).load("train").images.max() > 180


def test_a_task_is_learned_and_exported(images, site, tmp_path):
    announce(site, images)
    run = SiteState(site / "state" / "run", site_plan(site), 1)
    with pytest.raises(WeftError, match="has no run run"):
        task_from_site(site, "run", 0)
    replies = [run.answer(request(index, *(["begin"] if index == 0 else []), "train")) for index in range(8)]
    assert not any(decode(reply).error for reply in replies)
    with pytest.raises(WeftError, match="has not finished task 0"):
        task_from_site(site, "run", 0)
    assert decode(run.answer(request(8, "end", "test"))).fields["accuracy"] == [1.0]
    write(task_from_site(site, "run", 0), tmp_path / "model.safetensors", "safetensors")
    model, facts = open_model(tmp_path / "model.safetensors")
    assert (facts["classes"], facts["bits"]) == (["dark", "light"], sites.DEFAULT_BITS)
    split = first_task(site).load("test")
    assert (model(split.images)[0].argmax(1) == split.labels).all()


def test_the_hub_knows_nothing_of_a_sites_tasks():
    scenario = scenarios.of(site_plan())
    assert [len(sequence) for sequence in scenario.sequences] == [2, 2]
    with pytest.raises(WeftError, match="weft hub run"):
        scenario.sequences[0][0].load("train")
