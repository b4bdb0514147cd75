"""The scenarios of public datasets: on a small cache of the same structure, and on the real one if available."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter

import numpy as np
import pytest
from cli_helpers import summary_of
from data_helpers import PER_CLASS, index_of, small_dataset

import weft
from weft import Plan, scenarios
from weft.data import cache
from weft.data.sources import NORMALIZATION
from weft.errors import WeftError
from weft.plan import ready_plans
from weft.scenarios import SPLITS, Scenario
from weft.scenarios.splits import SPLIT_VERSIONS, split_class

pytest_plugins = ["cli_helpers", "data_helpers"]

real = pytest.mark.skipif("WEFT_DATA" not in os.environ, reason="WEFT_DATA does not name the unpacked datasets")
SHAPES = {"overlapped-cifar100": (5, 10), "noniid-50": (5, 10), "noniid-35": (5, 7)}


def build(name: str, clients: int = 0, tasks: int = 0, seed: int = 0, **options: object) -> Scenario:
    return scenarios.build(name, options, clients or SHAPES[name][0], tasks or SHAPES[name][1], seed)


def names(scenario: Scenario) -> list[list[str]]:
    return [[task.name for task in sequence] for sequence in scenario.sequences]


# ---- all scenarios ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_seed_assigns_tasks_to_clients(small_data, name):
    first, again, other = (build(name, seed=seed) for seed in (0, 0, 1))
    assert names(first) == names(again)
    assert names(first) != names(other)
    split, same = (scenario.sequences[1][2].load("train") for scenario in (first, again))
    assert np.array_equal(split.images, same.images)
    assert np.array_equal(split.labels, same.labels)


@pytest.mark.parametrize("name", SHAPES)
def test_images_and_labels_are_those_of_the_dataset(small_data, name):
    """No image is in two splits or at two clients; every class is in every split."""
    scenario = build(name)
    assert (scenario.clients, scenario.tasks) == SHAPES[name]
    seen: Counter[tuple[str, int]] = Counter()
    for task in itertools.chain(*scenario.sequences):
        dataset = cache.load(task.group)
        expected = NORMALIZATION.get(task.group, ((100, 90, 80), (50, 51, 52)))  # stored with the faces
        assert (task.mean, task.deviation) == expected
        for split_name, size in task.sizes.items():
            split = task.load(split_name)
            assert split.images.dtype == np.uint8
            assert split.images.shape == (size, 32, 32, 3)
            assert len(set(split.labels)) == min(len(task.classes), size)
            indices = index_of(split.images)
            labels = [dataset.class_name(label) for label in dataset.y[indices]]
            assert labels == [task.classes[label] for label in split.labels]
            seen.update((task.group, int(index)) for index in indices)
    assert max(seen.values()) == 1


@pytest.mark.parametrize("name", SHAPES)
def test_fewer_clients_and_tasks_are_the_first_of_all(small_data, name):
    whole, some = names(build(name, seed=3)), names(build(name, 2, 3, seed=3))
    assert some == [sequence[:3] for sequence in whole[:2]]


@pytest.mark.parametrize("name", SHAPES)
def test_too_many_clients_or_tasks_name_the_limits(small_data, name):
    clients, tasks = {"overlapped-cifar100": (100, 20)}.get(name, SHAPES[name])
    for wanted in ((clients + 1, 1), (1, tasks + 1)):
        with pytest.raises(WeftError, match=rf"{name} has 1 to {clients} clients and 1 to {tasks} tasks"):
            build(name, *wanted)


# ---- overlapped-cifar100 ---------------------------------------------------------------------------------------------


def test_a_task_is_a_superclass(small_data):
    dataset = cache.load("cifar100")
    scenario = build("overlapped-cifar100", 3, 20)
    for sequence in scenario.sequences:
        assert sorted(task.name for task in sequence) == sorted(dataset.extra["coarse_names"])
    for task in scenario.sequences[0]:
        superclass = list(dataset.extra["coarse_names"]).index(task.name)
        fine = [int(name.split()[1]) for name in task.classes]
        assert dataset.extra["coarse_of_fine"][fine].tolist() == [superclass] * 5
    assert len({tuple(sequence) for sequence in names(scenario)}) == 3  # an order for each client
    one, other, *_ = names(build("overlapped-cifar100"))
    assert set(one) & set(other)


@pytest.mark.parametrize(("clients", "sizes"), [(1, (105, 30, 15)), (3, (35, 10, 5)), (4, (26, 7, 3)), (5, (21, 6, 3))])
def test_images_are_divided_equally(small_data, clients, sizes):
    """5 classes of 30 images each; images that remain after equal shares are not used."""
    for task in itertools.chain(*build("overlapped-cifar100", clients, 10).sequences):
        assert tuple(task.sizes[split_name] for split_name in SPLITS) == sizes
        counts = Counter(task.load("train").labels.tolist()).values()
        assert max(counts) - min(counts) <= 1


def test_too_many_clients_for_too_few_images(small_data):
    with pytest.raises(WeftError, match="too few images for 31 clients; choose fewer"):
        build("overlapped-cifar100", 31, 1)


# ---- noniid ----------------------------------------------------------------------------------------------------------

OTHERS = {"cifar10": 2, "mnist": 2, "fashion_mnist": 2, "notmnist": 2, "svhn": 2}
LISTS = {
    ("noniid-50", "paper"): {"cifar100": 15, "facescrub": 16, "traffic_signs": 9, **OTHERS},
    ("noniid-50", "released"): {"cifar100": 16, "facescrub": 16, "traffic_signs": 8, **OTHERS},
    ("noniid-35", None): {"cifar100": 17, "traffic_signs": 8, **OTHERS},
}


@pytest.mark.parametrize(("name", "lists"), LISTS)
def test_the_lists_of_tasks(small_data, name, lists):
    scenario = build(name, seed=7, **({"lists": lists} if lists else {}))
    tasks = list(itertools.chain(*scenario.sequences))
    assert Counter(task.group for task in tasks) == LISTS[name, lists]
    taken = Counter((task.group, label) for task in tasks for label in task.classes)
    assert max(taken.values()) == 1  # a class is in one task only
    small = [len(task.classes) for task in tasks if len(task.classes) != 5]
    assert small == ([3] if lists == "paper" else [])


def test_every_seed_has_the_same_tasks(small_data):
    first, second = (itertools.chain(*build("noniid-35", seed=seed).sequences) for seed in (0, 1))
    known, same = ({task.name: (task.classes, task.sizes) for task in tasks} for tasks in (first, second))
    assert known == same


def splits_of(dataset, label):
    """The split of each image of a class."""
    return {int(index): split for split, indices in split_class(dataset, label).items() for index in indices}


def assert_together(dataset, label, key_of):
    """Images with the same key are in one split; returns the split of each key."""
    found = splits_of(dataset, label)
    of_key = {key_of(index): split for index, split in found.items()}
    assert all(of_key[key_of(index)] == split for index, split in found.items())
    assert set(found.values()) == set(SPLITS)
    return of_key


def tracked(folder, frames):
    """Traffic signs that all have a track, with `frames` images each."""
    arrays = small_dataset("traffic_signs")
    for label in range(43):
        mine = np.flatnonzero(arrays["y"] == label)
        arrays["track"][mine] = np.arange(len(mine)) // frames
    cache.write(folder, "traffic_signs", arrays)
    return cache.load("traffic_signs", folder)


def test_a_track_is_never_divided(tmp_path):
    dataset = tracked(tmp_path, frames=5)
    for label in range(43):
        assert_together(dataset, label, lambda index: int(dataset.extra["track"][index]))


def test_images_without_a_track_are_the_test_images(small_data):
    """Their near copies are unknown."""
    dataset = cache.load("traffic_signs")
    assert (dataset.extra["track"] < 0).any()
    for label in range(43):
        found = splits_of(dataset, label)
        assert all((dataset.extra["track"][index] < 0) == (split == "test") for index, split in found.items())
        assert set(found.values()) == set(SPLITS)


def test_copies_of_an_image_are_in_one_split(tmp_path):
    arrays = small_dataset("notmnist")
    for label in range(10):
        mine = np.flatnonzero(arrays["y"] == label)
        arrays["x"][mine[1::3]] = arrays["x"][mine[::3]]  # every third image twice
    cache.write(tmp_path, "notmnist", arrays)
    dataset = cache.load("notmnist", tmp_path)
    for label in range(10):
        assert len(assert_together(dataset, label, lambda index: dataset.x[index].tobytes())) == PER_CLASS * 2 // 3
        assert [len(indices) for indices in split_class(dataset, label).values()] == [21, 6, 3]
    arrays["x"][:] = 0
    cache.write(tmp_path / "blank", "notmnist", arrays)
    with pytest.raises(WeftError, match=r"class 3 of notmnist has 1 different images, too few .* test images"):
        split_class(cache.load("notmnist", tmp_path / "blank"), 3)


KNOWN_SPLITS = {  # version and digest
    "cifar10": (0, "90af0bd01141ed66"),
    "cifar100": (0, "0f9d72230e526a3d"),
    "facescrub": (0, "b965cedc273674f9"),
    "fashion_mnist": (0, "bd3e225e0a37ed1b"),
    "mnist": (0, "888101dc0568832e"),
    "notmnist": (1, "529e784ac23525b7"),
    "svhn": (0, "5b62bd2f05ec9002"),
    "traffic_signs": (1, "19ed4ce1f55be484"),
}


def test_a_changed_split_is_counted(small_data):
    """If this fails, results of before and after do not compare: count the change in SPLIT_VERSIONS."""
    found = {}
    for name in KNOWN_SPLITS:
        splits = [split_class(cache.load(name), index) for index in range(10)]
        text = json.dumps([{split_name: places.tolist() for split_name, places in each.items()} for each in splits])
        found[name] = (SPLIT_VERSIONS.get(name, 0), hashlib.sha256(text.encode()).hexdigest()[:16])
    assert found == KNOWN_SPLITS


def test_splits_are_near_their_shares(small_data, tmp_path):
    # a track of 5 is in one split as a whole
    for dataset, near in ((cache.load("cifar10"), 0), (cache.load("notmnist"), 0), (tracked(tmp_path, frames=5), 4)):
        for chosen in (split_class(dataset, index) for index in range(10)):
            counts = {split_name: len(places) for split_name, places in chosen.items()}
            assert sum(counts.values()) == PER_CLASS
            assert counts["test"] == pytest.approx(6, abs=near)
            assert counts["valid"] == pytest.approx(3, abs=near)


def test_few_large_tracks_leave_no_split_empty(tmp_path):
    dataset = tracked(tmp_path, frames=10)
    for label in range(43):
        assert [len(indices) for indices in split_class(dataset, label).values()] == [10, 10, 10]
    tracks = dataset.extra["track"]
    unknown = ((slice(0, 0), 1, "test"), (slice(None, None, 2), 1, "valid"), (slice(None), 0, "train"))
    for change, count, absent in unknown:
        tracks[:] = 0
        tracks[change] = -1
        with pytest.raises(WeftError, match=rf"class 3 of traffic_signs has {count} tracks, .* {absent} images"):
            split_class(dataset, 3)


# ---- interference ----------------------------------------------------------------------------------------------------


def interference(sender: str, clients: int = 2, seed: int = 0, **options: int) -> Scenario:
    return scenarios.build("interference", {"sender": sender, **options}, clients, 2, seed)


def test_tasks_of_interference(small_data):
    scenario = interference("svhn", images=50, sender_images=100)
    assert names(scenario) == [["waiting", "mnist-0"], ["svhn-0", "svhn-1"]]
    assert [task.sizes["train"] for tasks in scenario.sequences for task in tasks] == [2, 50, 100, 100]
    assert scenario.datasets == ("mnist", "svhn")
    first, second = (task.load("train").images.reshape(100, -1) for task in scenario.sequences[1])
    assert not set(map(bytes, first)) & set(map(bytes, second)), "an image is in both tasks of the sender"
    assert not scenario.sequences[0][0].load("train").images.any()
    other = interference("svhn", seed=1, images=50, sender_images=100)
    assert (scenario.sequences[0][1].load("train").images != other.sequences[0][1].load("train").images).any()


def test_interference_without_a_sender(small_data):
    assert [len(tasks) for tasks in interference("nobody", clients=1, images=50).sequences] == [2]
    for sender, clients in (("nobody", 2), ("svhn", 1)):
        with pytest.raises(WeftError, match=f"scenario.sender={sender} has "):
            interference(sender, clients=clients, images=50, sender_images=100)
    all_images = interference("svhn", images=50, sender_images=5000)  # 21 train images per class, for two tasks
    assert [task.sizes["train"] for task in all_images.sequences[1]] == [100, 100]


@pytest.mark.slow
def test_a_waiting_receiver_returns_the_weights_it_received(small_data):
    """With a single class there is nothing to learn."""
    from helpers import Run

    keys = {"scenario.images": 50, "scenario.sender_images": 100, "rounds_per_task": 2, "batch_size": 10}
    run = Run(Plan.load("interference", network="lenet", device="cpu", **keys)).go_to(1)
    up, down = run.parts("c2s"), run.parts("s2c")
    for round_index in (0, 1):
        assert (up[0, 0, round_index, "weights"] == down[0, 0, round_index, "weights"]).all()
    assert (up[1, 0, 0, "weights"] != down[1, 0, 0, "weights"]).any()


# ---- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("overlapped-cifar100", ("overlapped-cifar100", 5, 10, "all", 100, 1e-3 / 3)),
        ("noniid-50", ("noniid-50", 5, 10, "all", 100, 1e-3 / 3)),
        ("noniid-35", ("noniid-35", 5, 7, "all", 100, 1e-3 / 3)),
        ("clients-20", ("overlapped-cifar100", 20, 10, 5, 10, 1e-4)),
        ("clients-100", ("overlapped-cifar100", 100, 10, 5, 10, 1e-4)),
        ("resnet18", ("noniid-50", 5, 10, "all", 100, 1e-4)),
        ("tasks-20", ("overlapped-cifar100", 5, 20, "all", 100, 1e-3 / 3)),
        ("ablations", ("noniid-50", 5, 10, "all", 100, 1e-3 / 3)),
    ],
)
def test_the_plans_have_the_settings_of_the_paper(name, expected):
    plan = Plan.load(ready_plans()[name])
    found = (plan.scenario, plan.clients, plan.tasks, plan.clients_per_round, plan.batch_size, plan.learning_rate)
    assert found == expected
    assert (plan.rounds_per_task, plan.epochs_per_round) == (20, 1)
    assert plan.network == ("resnet18" if name == "resnet18" else "lenet")
    small = Plan.load(ready_plans()[name], ["scale=small"])
    assert (small.clients, small.tasks, small.rounds_per_task) == (5, 5, 8)


@pytest.mark.slow
def test_overlapped_cifar100_from_end_to_end(tmp_path, command, small_cache):
    keys = ("scale=small", "network=mlp", "rounds_per_task=1", "clients=2", "tasks=2", "--workers", "1")
    outcome = command("run", "overlapped-cifar100", *keys, "--out", "run", "--data-dir", small_cache, cwd=tmp_path)
    assert outcome.code == 0, outcome
    summary = summary_of(tmp_path / "run")
    assert (summary["scenario"], summary["clients"], summary["tasks"]) == ("overlapped-cifar100", 2, 2)
    assert summary["accuracy"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_small_run_with_two_workers(small_data, tmp_path, name):
    plan = Plan.load(ready_plans()[name], ["scale=small", "network=mlp", "rounds_per_task=1", "batch_size=10"])
    assert (plan.clients, plan.tasks) == (5, 5)
    one, two = (weft.run(plan, tmp_path / str(workers), workers=workers) for workers in (1, 2))
    assert one.accuracy == two.accuracy


# ---- the real data ---------------------------------------------------------------------------------------------------


@pytest.mark.data
@real
@pytest.mark.parametrize(("clients", "sizes"), [(5, (420, 120, 60)), (20, (105, 30, 15)), (100, (21, 6, 3))])
def test_the_sizes_of_the_paper(clients, sizes):
    for task in itertools.chain(*build("overlapped-cifar100", clients, 20).sequences):
        assert tuple(task.sizes[split_name] for split_name in SPLITS) == sizes
    task = build("overlapped-cifar100", clients, 1).sequences[-1][0]
    for split_name in SPLITS:
        assert len(set(task.load(split_name).labels)) == min(5, task.sizes[split_name])


@pytest.mark.data
@real
def test_no_image_of_cifar100_is_at_two_clients():
    seen: Counter[bytes] = Counter()
    for task in itertools.chain(*build("overlapped-cifar100", 5, 20).sequences):
        for split_name in SPLITS:
            seen.update(image.tobytes() for image in task.load(split_name).images)
    assert seen.total() == 60_000
    assert seen.total() - len(seen) < 50  # the dataset has a few images twice


@pytest.mark.data
@real
def test_no_letter_of_the_real_notmnist_is_in_two_splits():
    dataset = cache.load("notmnist")
    for index in range(10):
        assert_together(dataset, index, lambda place: dataset.x[place].tobytes())


@pytest.mark.data
@real
def test_the_real_noniid_35():
    tasks = list(itertools.chain(*build("noniid-35").sequences))
    assert len(tasks) == 35
    for task in tasks:
        total = sum(task.sizes.values())
        if task.group == "traffic_signs":  # whole tracks, and GTSRB's test images as the test split
            assert task.sizes["train"] / (total - task.sizes["test"]) == pytest.approx(0.7 / 0.8, abs=0.03)
        else:
            assert task.sizes["train"] / total == pytest.approx(0.7, abs=0.01)
            assert task.sizes["test"] / total == pytest.approx(0.2, abs=0.01)
        scaled = (task.load("train").images - np.array(task.mean)) / np.array(task.deviation)
        assert abs(scaled.mean()) < 0.6
        assert scaled.std() == pytest.approx(1, abs=0.45)
