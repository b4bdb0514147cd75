"""The scenario folders: images of a user are found, split, checked, packed once and identified by a fingerprint."""

import csv
import io
import json
import shutil
import struct
import subprocess

import numpy as np
import pytest
from cli_helpers import assert_one_line
from image_helpers import CLASSES, CLIENTS, IMAGES, values, write_classes, write_folder, write_image, write_table
from PIL import Image

import weft
from weft import scenarios
from weft.data import images
from weft.errors import WeftError

pytest_plugins = ["cli_helpers"]

SPLITS = ("train", "valid", "test")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    return write_folder(tmp_path / "photos")


def scenario(path, **options):
    keys = {f"scenario.{key}": value for key, value in options.items()}
    return scenarios.of(weft.Plan(scenario="folders", **{"scenario.path": str(path)}, **keys))


def refused(path, *texts, **options):
    with pytest.raises(WeftError) as caught:
        scenario(path, **options)
    assert "\n" not in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


# ---- finding and decoding --------------------------------------------------------------------------------------------


def test_clients_tasks_and_classes_are_those_of_the_folder(photos):
    found = scenario(photos)
    assert [tuple(task.name for task in sequence) for sequence in found.sequences] == list(CLIENTS.values())
    for sequence in found.sequences:
        for task in sequence:
            count = len(task.classes)
            assert task.classes == CLASSES[task.name]
            assert task.sizes == {"train": 14 * count, "test": 4 * count, "valid": 2 * count}
    assert found.warnings == ()
    shutil.copytree(photos, photos.parent / "elsewhere")
    assert scenario(photos.parent / "elsewhere").fingerprint == found.fingerprint
    shutil.rmtree(photos / "oslo" / "2-stones")
    shutil.copytree(photos / "oslo", photos / "9")  # numbers sort by value, before 10 and before names
    shutil.copytree(photos / "oslo", photos / "10")
    found = scenario(photos).sequences
    assert [sequence[0].group for sequence in found] == ["9", "10", "lisbon", "oslo"]
    assert [len(sequence) for sequence in found] == [1, 1, 2, 1]


def test_every_image_is_in_one_split_with_its_label(photos):
    task = scenario(photos).sequences[0][1]
    seen = []
    for name in SPLITS:
        split = task.load(name)
        assert split.images.shape == (task.sizes[name], 32, 32, 3)
        assert split.images.dtype == np.uint8
        for image, label in zip(split.images, split.labels, strict=True):
            columns = image.mean((0, 2))  # the position of the bright bar is the label
            bar = range(8 * label, 8 * label + 8)
            assert columns[bar[2:6]].min() > np.delete(columns, bar).max()
            seen.append(image.tobytes())
    assert len(set(seen)) == 3 * IMAGES


def test_any_size_and_depth(tmp_path):
    folder = tmp_path / "p"
    rng = np.random.default_rng(0)
    for index in range(10):
        write_image(folder / "a" / "1" / "large" / f"{index}.jpg", rng.integers(0, 256, (224, 224, 3), dtype=np.uint8))
        write_image(folder / "a" / "1" / "deep" / f"{index}.png", np.full((50, 60), 6000 * index, dtype=np.uint16))
    with Image.open(folder / "a" / "1" / "deep" / "9.png") as image:
        assert image.mode.startswith("I")

    def deep(bits):
        splits = [scenario(folder, bits=bits).sequences[0][0].load(name) for name in SPLITS]
        return [image for split in splits for image in split.images[split.labels == 0]]

    assert sorted(int(image[0, 0, 0]) for image in deep(16)) == [6000 * index * 255 // 65535 for index in range(10)]
    assert sum(int(image.min()) == 255 for image in deep(12)) == 9  # all but black
    assert any("scenario.bits" in line for line in scenario(folder, bits=12).warnings)


def test_dark_images_of_many_bits_are_reported(tmp_path):
    for label in ("a", "b"):
        for index in range(10):
            array = np.full((9, 9), 300 * index, dtype=np.uint16)
            write_image(tmp_path / "p" / "c" / "t" / label / f"{index}.png", array)
    assert any("scenario.bits=12" in line for line in scenario(tmp_path / "p").warnings)


def test_mean_and_deviation_are_those_of_the_train_images(photos):
    task = scenario(photos).sequences[0][0]
    train = task.load("train").images.astype(np.float64)
    np.testing.assert_allclose(task.mean, train.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(task.deviation, train.std((0, 1, 2)), rtol=1e-9)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def broken_png(chunk):
    """A PNG whose pixels are followed by a damaged chunk."""
    blob = io.BytesIO()
    Image.fromarray(values(0, 0)).save(blob, format="PNG")
    return blob.getvalue().replace(b"IDAT", chunk)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (EPS, "PNG"),
        (b"", "empty"),
        (b"no image", "PNG"),
        (bytes(128) + b"DICM" + bytes(10), "DICOM"),
        (broken_png(b"IDAX"), ""),
        (b"II*\x00\x08\x00\x00\x00\xff\xff", ""),
        (b"GIF89a" + bytes(7), ""),
    ],
    ids=["eps", "empty", "text", "dicom", "png", "tiff", "gif"],
)
def test_a_file_that_is_not_an_image_is_one_line_with_its_name(tmp_path, monkeypatch, blob, reason):
    """Pillow would start Ghostscript for EPS data in a file named .png."""
    monkeypatch.setattr(subprocess, "check_call", lambda *_, **__: pytest.fail("a program was started"))
    (tmp_path / "a.png").write_bytes(blob)
    with pytest.raises(WeftError, match=rf"a\.png cannot be read as an image: .*{reason}") as caught:
        images.read_image(tmp_path / "a.png", 32, 16)
    assert "\n" not in str(caught.value)


def test_any_error_of_a_decoder_is_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise struct.error("unpack requires\na buffer")

    path = write_image(tmp_path / "a.png", values(0, 0))
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(WeftError, match=r"a\.png cannot be read as an image: unpack requires$"):
        images.read_image(path, 32, 16)
    with pytest.raises(WeftError, match=r"b\.png cannot be read as an image: No such file"):
        images.read_image(tmp_path / "b.png", 32, 16)


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    path = write_image(tmp_path / "a.png", values(0, 0))
    monkeypatch.setattr(images, "MAX_PIXELS", 1599)
    with pytest.raises(WeftError, match="40 x 40 pixels"):
        images.read_image(path, 32, 16)
    monkeypatch.setattr(images, "MAX_FILE_BYTES", 99)
    with pytest.raises(WeftError, match="99 bytes"):
        images.read_image(path, 32, 16)


# ---- splits and groups -----------------------------------------------------------------------------------------------


def splits_of_groups(path):
    """The splits that each group of a client is in."""
    rows = images.find(path)
    groups = {(row.client, images.read_image(row.file, 32, 16).tobytes()): (row.client, row.group) for row in rows}
    seen = {}
    for sequence in scenario(path).sequences:
        for task in sequence:
            for split in SPLITS:
                for image in task.load(split).images:
                    seen.setdefault(groups[task.group, image.tobytes()], set()).add(split)
    return seen


def test_a_group_is_in_one_split_also_across_tasks(tmp_path):
    folder = tmp_path / "p"
    for task in ("1", "2"):
        for kind, label in enumerate(("ill", "well")):
            for index in range(30):
                path = folder / "clinic" / task / label / f"patient{index % 10}" / f"{index}.png"
                write_image(path, values(kind, 100 * int(task) + index))
    found = splits_of_groups(folder)
    assert len(found) == 10
    assert all(len(splits) == 1 for splits in found.values())
    assert set.union(*found.values()) == set(SPLITS)
    found = splits_of_groups(write_table(tmp_path))
    assert [len(splits) for splits in found.values()] == [1] * 20


def test_given_splits_are_kept_and_valid_is_taken_from_train(tmp_path):
    task = tmp_path / "p" / "c" / "t"
    write_classes(task / "train", "a", "b")
    write_classes(task / "test", "a", "b", images=5, seed=100)
    (found,) = scenario(tmp_path / "p").sequences[0]
    assert found.sizes == {"train": 36, "valid": 4, "test": 10}
    expected = {images.read_image(file, 32, 16).tobytes() for file in (task / "test").rglob("*.png")}
    assert {image.tobytes() for image in found.load("test").images} == expected


# ---- errors and warnings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "cause"),
    [
        (["train/a", "train/b", "test/a", "test/b", "test/c"], "class 'c' is in test and not in train"),
        (["only"], "task t has only one class, 'only'"),
        (["train/a", "train/b"], "task t has no test images"),
        (["train/a/patient1", "train/b", "test/a/patient1", "test/b"], "group 'patient1' is in test and train"),
    ],
)
def test_a_task_that_cannot_be_learned(tmp_path, classes, cause):
    write_classes(tmp_path / "p" / "x" / "t", *classes, images=10)
    refused(tmp_path / "p", "client x", cause)


def test_imbalance_and_a_class_without_test_images(tmp_path):
    for label, count in (("common", 60), ("rare", 5), ("single", 1)):
        write_classes(tmp_path / "p" / "x" / "t", label, images=count, seed=len(label))
    lines = " / ".join(scenario(tmp_path / "p").warnings)
    assert "class 'single' has no test images" in lines
    assert "metrics=balanced,recall" in lines


def test_broken_images(photos):
    folder = photos / "oslo" / "2-stones" / "flint"
    (folder / "bad.png").write_bytes(b"no image")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:500])
    refused(photos, "2 files cannot be read", "bad.png", "cut.png", "scenario.broken=skip")
    found = scenario(photos, broken="skip")
    assert sum(found.sequences[1][1].sizes.values()) == 2 * IMAGES
    assert "bad.png" in found.warnings[0]


def test_a_path_without_images(tmp_path):
    refused(tmp_path / "nothing", "nothing does not exist", "scenario.path")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no images", "CLIENT/TASK/CLASS")
    write_image(tmp_path / "p" / "x" / "t" / "stray.png", values(0, 0))
    refused(tmp_path / "p", "stray.png", "CLIENT/TASK/CLASS")
    with pytest.raises(WeftError, match=r"scenario\.path=FOLDER"):
        scenarios.of(weft.Plan(scenario="folders"))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("path,client,task\na.png,1,1\n", "no column 'label'"),
        ("path,client,task,label\n", "no lines"),
        ("path,client,task,label\na.png,1,,x\n", "line 2 of"),
        ("path,client,task,label\na.png,1,1,x\n", "a.png"),
        ("path,client,task,label,split\na.png,1,1,x,dev\n", "the split 'dev'"),
    ],
)
def test_errors_in_a_table(tmp_path, text, cause):
    (tmp_path / "t.csv").write_text(text)
    refused(tmp_path / "t.csv", cause)


def test_too_many_clients_or_tasks(photos):
    for key, cause in (("clients", "has 2 clients, not 7"), ("tasks", "has up to 2 tasks per client, not 7")):
        with pytest.raises(WeftError, match=f"{cause}; remove {key}"):
            scenarios.of(weft.Plan(scenario="folders", **{key: 7, "scenario.path": str(photos)}))


# ---- the cache, and runs ---------------------------------------------------------------------------------------------


def test_images_are_packed_once_and_again_when_a_file_changes(photos, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(images, "decode", lambda *args, real=images.decode: read.append(1) or real(*args))
    first = scenario(photos)
    assert len(read) == 9 * IMAGES
    images._load.cache_clear()
    assert scenario(photos).fingerprint == first.fingerprint
    assert len(read) == 9 * IMAGES
    (pack,) = (tmp_path / "cache" / "own").iterdir()
    assert (pack.stat().st_mode & 0o777, pack.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    pack.write_bytes(pack.read_bytes()[:1000])  # damaged: packed again
    images._load.cache_clear()
    assert scenario(photos).fingerprint == first.fingerprint
    write_image(photos / "oslo" / "1-leaves" / "oak" / "3.png", values(2, 999))
    assert scenario(photos).fingerprint != first.fingerprint


TINY = {"network": "mlp", "network.hidden": 8, "rounds_per_task": 2, "batch_size": 10, "device": "cpu"}


def test_a_run_is_resumed_with_the_same_images_only(photos, tmp_path):
    plan = weft.Plan(scenario="folders", **{"scenario.path": str(photos)}, **TINY)
    weft.run(plan, tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "environment.json").read_text())["images"]
    assert recorded == {"folders": scenario(photos).fingerprint}
    (tmp_path / "run" / "summary.json").unlink()
    weft.resume(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    write_image(photos / "oslo" / "1-leaves" / "oak" / "3.png", values(2, 999))
    with pytest.raises(WeftError, match="started with other images of folders"):
        weft.resume(tmp_path / "run")


@pytest.mark.slow
def test_warnings_are_shown_and_in_the_journal(photos, tmp_path, command):
    (photos / "oslo" / "1-leaves" / "oak" / "bad.png").write_bytes(b"no image")
    keys = ["scenario.path=" + str(photos), "scenario.broken=skip"]
    shown = command("show", "folders", *keys)
    assert shown.code == 0, shown
    assert "note: 1 files cannot be read" in shown.out
    assert json.loads(command("show", "folders", *keys, "--json").out)["warnings"]
    done = command("run", "folders", *keys, "network=mlp", "rounds_per_task=1", "--out", tmp_path / "run")
    assert done.code == 0, done
    assert "are skipped" in command("show", tmp_path / "run").out.replace("\n", " ").replace("  ", " ")
    assert_one_line(command("show", "folders", "scenario.path=" + str(photos)), "scenario.broken=skip")


def test_a_relative_path_becomes_absolute(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = weft.Plan(scenario="folders", **{"scenario.path": "photos"})
    assert plan.scenario_options["path"] == str(photos)
    assert (plan.clients, plan.tasks) == (2, 2)


@pytest.mark.slow
def test_workers_see_the_same_images(photos, tmp_path):
    plan = weft.Plan(scenario="folders", **{"scenario.path": str(photos)}, **TINY)
    one, two = (weft.run(plan, tmp_path / str(count), workers=count).accuracy_matrix for count in (1, 2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_metrics_are_written_and_shown(photos, tmp_path, command):
    plan = weft.Plan(scenario="folders", metrics="recall,balanced,auroc", **{"scenario.path": str(photos)}, **TINY)
    result = weft.run(plan, tmp_path / "run")
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    recall = {row["class"] for row in rows if row["metric"] == "recall" and (row["client"], row["task"]) == ("0", "1")}
    assert recall == set(CLASSES["2-shells"])
    # classes are equally frequent in these test images, so the mean recall is the accuracy
    for row in rows:
        if row["metric"] == "balanced":
            accuracy = result.accuracy_matrix[int(row["client"]), int(row["after_task"]), int(row["task"])]
            assert float(row["value"]) == pytest.approx(accuracy)
    assert result.metrics["balanced"] == pytest.approx(result.accuracy)
    assert set(result.frame("metrics").columns) == {"client", "after_task", "task", "metric", "class", "value"}
    shown = command("show", tmp_path / "run").out
    assert "other metrics, at the end" in shown
    assert "lowest" in shown
