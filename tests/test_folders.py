"""The scenario folders: what is found, how it is cut, what is refused, and that a run knows its images."""

import csv
import json
import shutil

import numpy as np
import pytest
from cli_helpers import assert_one_line
from own_images import CLASSES, CLIENTS, IMAGES, values, write_folder, write_image, write_table
from PIL import Image

import weft
from weft import scenarios
from weft.data import own
from weft.errors import WeftError

pytest_plugins = ["cli_helpers"]

PARTS = ("train", "valid", "test")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    return write_folder(tmp_path / "photos")


def scenario(path, **options):
    keys = {f"scenario.{key}": value for key, value in options.items()}
    return scenarios.of(weft.Plan(scenario="folders", **{"scenario.path": str(path)}, **keys))


def refused(path, *words, **options):
    with pytest.raises(WeftError) as caught:
        scenario(path, **options)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_clients_tasks_and_classes_are_those_of_the_folder(photos):
    found = scenario(photos)
    assert [[task.name for task in sequence] for sequence in found.sequences] == [
        list(names) for names in CLIENTS.values()
    ]
    for sequence in found.sequences:
        for task in sequence:
            assert task.classes == CLASSES[task.name]
            assert task.sizes == {
                "train": 14 * len(task.classes),
                "test": 4 * len(task.classes),
                "valid": 2 * len(task.classes),
            }
    assert found.warnings == ()


def test_every_image_is_in_one_part_with_its_own_label(photos):
    task = scenario(photos).sequences[0][1]
    seen = []
    for part in PARTS:
        split = task.load(part)
        assert split.images.shape == (task.sizes[part], 32, 32, 3)
        assert split.images.dtype == np.uint8
        for image, label in zip(split.images, split.labels, strict=True):
            columns = image.mean((0, 2))  # the bright bar says the kind
            assert (
                columns[8 * label + 2 : 8 * label + 6].min() > np.delete(columns, range(8 * label, 8 * label + 8)).max()
            )
            seen.append(image.tobytes())
    assert len(set(seen)) == 3 * IMAGES


def test_numbers_sort_by_size(tmp_path):
    for client in ("site10", "site2"):
        for label in ("a", "b"):
            for place in range(10):
                write_image(tmp_path / "p" / client / "1" / label / f"{place}.png", values(ord(label) - 97, place))
    assert [sequence[0].group for sequence in scenario(tmp_path / "p").sequences] == ["site2", "site10"]


def test_clients_with_fewer_tasks(photos):
    shutil.rmtree(photos / "oslo" / "2-stones")
    assert [len(sequence) for sequence in scenario(photos).sequences] == [2, 1]


def test_any_size_and_depth(tmp_path):
    folder = tmp_path / "p"
    rng = np.random.default_rng(0)
    for place in range(10):
        write_image(folder / "a" / "1" / "large" / f"{place}.jpg", rng.integers(0, 256, (224, 224, 3), dtype=np.uint8))
        deep = np.full((50, 60), 6000 * place, dtype=np.uint16)
        write_image(folder / "a" / "1" / "deep" / f"{place}.png", deep)
    with Image.open(folder / "a" / "1" / "deep" / "9.png") as image:
        assert image.mode.startswith("I")
    task = scenario(folder).sequences[0][0]
    splits = [task.load(part) for part in PARTS]
    grey = sorted(
        int(image[0, 0, 0])
        for split in splits
        for image, label in zip(split.images, split.labels, strict=True)
        if label == 0
    )
    assert grey == [6000 * place * 255 // 65535 for place in range(10)]
    brighter = [task.load(part) for task in scenario(folder, bits=12).sequences[0] for part in PARTS]
    white = [image for split in brighter for image, label in zip(split.images, split.labels, strict=True) if label == 0]
    assert sum(int(image.min()) == 255 for image in white) == 9  # all but black
    assert any("above 4095 is white" in line for line in scenario(folder, bits=12).warnings)


def test_dark_deep_images_are_warned_of(tmp_path):
    for label in ("a", "b"):
        for place in range(10):
            write_image(
                tmp_path / "p" / "c" / "t" / label / f"{place}.png", np.full((9, 9), 300 * place, dtype=np.uint16)
            )
    assert any("scenario.bits=12" in line for line in scenario(tmp_path / "p").warnings)


def test_mean_and_deviation_are_those_of_the_training_images(photos):
    task = scenario(photos).sequences[0][0]
    train = task.load("train").images.astype(np.float64)
    np.testing.assert_allclose(task.mean, train.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(task.deviation, train.std((0, 1, 2)), rtol=1e-9)


# ---- parts and groups ------------------------------------------------------------------------------------------------


def sides(found, rows):
    """For each group of a client the parts that it is in, told by the images."""
    by_image = {own.own_picture(row.file.read_bytes(), 32, 16)[0].tobytes(): (row.client, row.group) for row in rows}
    seen = {}
    for sequence in found.sequences:
        for task in sequence:
            for part in PARTS:
                for image in task.load(part).images:
                    seen.setdefault(by_image[image.tobytes()], set()).add(part)
    return seen


def test_a_group_is_on_one_side_also_across_tasks(tmp_path):
    folder = tmp_path / "p"
    for task in ("1", "2"):
        for kind, label in enumerate(("ill", "well")):
            for place in range(30):
                picture = values(kind, 100 * int(task) + place)
                write_image(folder / "clinic" / task / label / f"patient{place % 10}" / f"{place}.png", picture)
    found = sides(scenario(folder), own.find(folder))
    assert len(found) == 10
    assert all(len(parts) == 1 for parts in found.values())
    assert {part for parts in found.values() for part in parts} == set(PARTS)


def test_the_groups_of_a_table(tmp_path):
    table = write_table(tmp_path)
    found = scenario(table)
    assert [task.name for sequence in found.sequences for task in sequence] == ["1", "1"]
    seen = {}
    for sequence in found.sequences:
        for part in PARTS:
            for image in sequence[0].load(part).images:
                seen.setdefault(image.tobytes(), set()).add((sequence[0].group, part))
    by_group = {}
    for row in own.find(table):
        image = own.own_picture(row.file.read_bytes(), 32, 16)[0].tobytes()
        by_group.setdefault((row.client, row.group), set()).update(
            part for client, part in seen[image] if client == row.client
        )
    assert len(by_group) == 20
    assert all(len(parts) == 1 for parts in by_group.values())


def test_parts_that_are_given_are_kept_and_valid_comes_out_of_train(tmp_path):
    folder = tmp_path / "p"
    for kind, label in enumerate(("a", "b")):
        for part, count in (("train", 20), ("test", 5)):
            for place in range(count):
                write_image(
                    folder / "c" / "t" / part / label / f"{place}.png", values(kind, place + 100 * (part == "test"))
                )
    task = scenario(folder).sequences[0][0]
    assert task.sizes == {"train": 36, "valid": 4, "test": 10}
    tested = {image.tobytes() for image in task.load("test").images}
    assert tested == {
        own.own_picture(row.file.read_bytes(), 32, 16)[0].tobytes() for row in own.find(folder) if row.part == "test"
    }


# ---- what is refused or warned of ------------------------------------------------------------------------------------


def test_a_class_unknown_in_training(tmp_path):
    folder = tmp_path / "p"
    for part, labels in (("train", "ab"), ("test", "abc")):
        for label in labels:
            for place in range(10):
                write_image(
                    folder / "x" / "t" / part / label / f"{place}.png",
                    values(ord(label) - 97, place + 50 * (part == "test")),
                )
    refused(folder, "class 'c' is in test and not in train")


def test_one_class_only(tmp_path):
    for place in range(10):
        write_image(tmp_path / "p" / "x" / "t" / "only" / f"{place}.png", values(0, place))
    refused(tmp_path / "p", "client x, task t has one class only, 'only'")


def test_no_test_data(tmp_path):
    for label in "ab":
        for place in range(10):
            write_image(tmp_path / "p" / "x" / "t" / "train" / label / f"{place}.png", values(0, place))
    refused(tmp_path / "p", "client x, task t has no test images")


def test_a_group_on_both_sides(tmp_path):
    for part in ("train", "test"):
        for label in "ab":
            for place in range(5):
                write_image(tmp_path / "p" / "x" / "t" / part / label / "patient1" / f"{place}.png", values(0, place))
    refused(tmp_path / "p", "group 'patient1' is in test and train")


def test_imbalance_and_a_class_that_is_not_tested(tmp_path):
    for label, count in (("common", 60), ("rare", 5), ("single", 1)):
        for place in range(count):
            write_image(tmp_path / "p" / "x" / "t" / label / f"{place}.png", values(len(label) % 3, place))
    lines = " / ".join(scenario(tmp_path / "p").warnings)
    assert "the class 'single' has no test images" in lines
    assert "metrics=balanced,recall" in lines


def test_broken_images(photos):
    (photos / "oslo" / "2-stones" / "flint" / "bad.png").write_bytes(b"no picture")
    cut_short = photos / "oslo" / "2-stones" / "flint" / "cut.png"
    cut_short.write_bytes((photos / "oslo" / "2-stones" / "flint" / "0.png").read_bytes()[:500])
    refused(photos, "2 files cannot be read", "bad.png", "scenario.broken=skip")
    found = scenario(photos, broken="skip")
    assert sum(found.sequences[1][1].sizes.values()) == 2 * IMAGES
    assert "2 files cannot be read and are left out" in found.warnings[0]


def test_what_is_no_folder_of_images(tmp_path):
    refused(tmp_path / "nothing", "there is no folder or table")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no images", "CLIENT/TASK/CLASS")
    write_image(tmp_path / "p" / "x" / "t" / "stray.png", values(0, 0))
    refused(tmp_path / "p", "stray.png lies in no class")
    with pytest.raises(WeftError, match=r"scenario\.path=FOLDER"):
        scenarios.of(weft.Plan(scenario="folders"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path,client,task\na.png,1,1\n", "has no column 'label'"),
        ("path,client,task,label\n", "has no lines"),
        ("path,client,task,label\na.png,1,,x\n", "line 2 of"),
        ("path,client,task,label\na.png,1,1,x\n", "there is no image"),
        ("path,client,task,label,split\na.png,1,1,x,dev\n", "has the split 'dev'"),
    ],
)
def test_what_is_wrong_with_a_table(tmp_path, text, said):
    (tmp_path / "t.csv").write_text(text)
    refused(tmp_path / "t.csv", said)


def test_too_many_clients_or_tasks(photos):
    with pytest.raises(WeftError, match="has 2 clients, not 3"):
        scenarios.of(weft.Plan(scenario="folders", clients=3, **{"scenario.path": str(photos)}))
    with pytest.raises(WeftError, match="up to 2 tasks a client, not 7"):
        scenarios.of(weft.Plan(scenario="folders", tasks=7, **{"scenario.path": str(photos)}))


# ---- the cache, and runs ---------------------------------------------------------------------------------------------


def test_packed_once_and_again_when_a_file_changes(photos, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(own, "own_picture", lambda *words, real=own.own_picture: read.append(1) or real(*words))
    first = scenario(photos)
    assert len(read) == 9 * IMAGES
    own._load.cache_clear()
    assert scenario(photos).fingerprint == first.fingerprint
    assert len(read) == 9 * IMAGES
    (pack,) = (tmp_path / "cache" / "own").iterdir()
    pack.write_bytes(pack.read_bytes()[:1000])  # damaged: made again
    own._load.cache_clear()
    assert scenario(photos).fingerprint == first.fingerprint
    write_image(photos / "oslo" / "1-leaves" / "oak" / "3.png", values(2, 999))
    assert scenario(photos).fingerprint != first.fingerprint


def test_the_fingerprint_is_of_the_images_and_not_of_their_place(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "elsewhere")
    assert scenario(photos).fingerprint == scenario(tmp_path / "elsewhere").fingerprint


TINY = {"network": "mlp", "network.hidden": 8, "rounds_per_task": 2, "batch_size": 10, "device": "cpu"}


def test_a_run_knows_its_images_and_goes_on_with_no_others(photos, tmp_path):
    plan = weft.Plan(scenario="folders", **{"scenario.path": str(photos)}, **TINY)
    weft.run(plan, tmp_path / "run")
    marks = json.loads((tmp_path / "run" / "environment.json").read_text())["images"]
    assert marks == {"folders": scenario(photos).fingerprint}
    (tmp_path / "run" / "summary.json").unlink()
    weft.resume(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    write_image(photos / "oslo" / "1-leaves" / "oak" / "3.png", values(2, 999))
    with pytest.raises(WeftError, match="began with other images of folders"):
        weft.resume(tmp_path / "run")


@pytest.mark.slow
def test_warnings_stand_in_the_journal_and_in_what_is_shown(photos, tmp_path, command):
    (photos / "oslo" / "1-leaves" / "oak" / "bad.png").write_bytes(b"no picture")
    words = ["scenario.path=" + str(photos), "scenario.broken=skip"]
    shown = command("show", "folders", *words)
    assert shown.code == 0, shown
    assert "note: 1 files cannot be read" in shown.out
    assert json.loads(command("show", "folders", *words, "--json").out)["warnings"]
    done = command("run", "folders", *words, "network=mlp", "rounds_per_task=1", "--out", tmp_path / "run")
    assert done.code == 0, done
    assert "are left out" in command("show", tmp_path / "run").out.replace("\n", " ").replace("  ", " ")
    assert_one_line(command("show", "folders", "scenario.path=" + str(photos)), "scenario.broken=skip")


def test_a_relative_path_is_found_from_anywhere(photos, tmp_path, monkeypatch):
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
def test_what_was_measured_is_written_and_shown(photos, tmp_path, command):
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
    assert "measured at the end, beside accuracy" in shown
    assert "lowest" in shown
