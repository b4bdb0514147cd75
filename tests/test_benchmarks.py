"""The scenarios of public datasets, on a small cache of the same structure; and on the real one where it is there."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter

import numpy as np
import pytest
from cli_helpers import summary_of
from data_helpers import PER_CLASS, number_of, small_dataset

import weft
from weft import Plan, scenarios
from weft.data import cache
from weft.data.sources import NORMALISATION
from weft.errors import WeftError
from weft.plan import ready_plans
from weft.scenarios import PARTS, Scenario
from weft.scenarios.marks import CUTS
from weft.scenarios.parts import parts_of

pytest_plugins = ["cli_helpers", "data_helpers"]

real = pytest.mark.skipif("WEFT_DATA" not in os.environ, reason="WEFT_DATA does not name the unpacked datasets")
SHAPES = {"overlapped-cifar100": (5, 10), "noniid-50": (5, 10), "noniid-35": (5, 7)}


def build(name: str, clients: int = 0, tasks: int = 0, seed: int = 0, **options: object) -> Scenario:
    return scenarios.build(name, options, clients or SHAPES[name][0], tasks or SHAPES[name][1], seed)


def names(scenario: Scenario) -> list[list[str]]:
    return [[task.name for task in sequence] for sequence in scenario.sequences]


# ---- what holds for all of them --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_the_seed_decides_who_gets_what(small_data, name):
    first, again, other = (build(name, seed=seed) for seed in (0, 0, 1))
    assert names(first) == names(again)
    assert names(first) != names(other)
    split, same = (scenario.sequences[1][2].load("train") for scenario in (first, again))
    assert np.array_equal(split.images, same.images)
    assert np.array_equal(split.labels, same.labels)


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_and_images_are_as_they_say(small_data, name):
    scenario = build(name)
    assert (scenario.clients, scenario.steps) == SHAPES[name]
    for task in itertools.chain(*scenario.sequences):
        for part in PARTS:
            split = task.load(part)
            assert split.images.dtype == np.uint8
            assert split.images.shape == (task.sizes[part], 32, 32, 3)
            assert split.labels.shape == (task.sizes[part],)
            assert len(set(split.labels)) == min(len(task.classes), task.sizes[part])  # every class in every part


@pytest.mark.parametrize("name", SHAPES)
def test_no_image_is_in_two_places(small_data, name):
    """Not in two parts of a task, and not at two clients."""
    seen = Counter(
        (task.group, int(number))
        for task in itertools.chain(*build(name).sequences)
        for part in PARTS
        for number in number_of(task.load(part).images)
    )
    assert max(seen.values()) == 1


@pytest.mark.parametrize("name", SHAPES)
def test_labels_are_those_of_the_dataset(small_data, name):
    for task in build(name).sequences[0]:
        dataset = cache.load(task.group)
        split = task.load("valid")
        said = [dataset.class_name(index) for index in dataset.y[number_of(split.images)]]
        assert said == [task.classes[label] for label in split.labels]


@pytest.mark.parametrize("name", SHAPES)
def test_every_set_has_its_own_mean_and_deviation(small_data, name):
    for task in itertools.chain(*build(name).sequences):
        expected = NORMALISATION.get(task.group, ((100, 90, 80), (50, 51, 52)))  # those that came with the faces
        assert (task.mean, task.deviation) == expected


@pytest.mark.parametrize("name", SHAPES)
def test_fewer_clients_and_tasks_are_the_first_of_the_deal(small_data, name):
    whole, some = names(build(name, seed=3)), names(build(name, 2, 3, seed=3))
    assert some == [sequence[:3] for sequence in whole[:2]]


@pytest.mark.parametrize("name", SHAPES)
def test_more_than_there_is_names_the_limits(small_data, name):
    clients, tasks = {"overlapped-cifar100": (100, 20)}.get(name, SHAPES[name])
    for wanted in ((clients + 1, 1), (1, tasks + 1)):
        with pytest.raises(WeftError, match=rf"{name} has 1 to {clients} clients and 1 to {tasks} tasks"):
            build(name, *wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_dataset_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    with pytest.raises(WeftError, match="weft data get cifar100"):
        build(name)


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


def test_clients_overlap_in_tasks(small_data):
    one, other, *_ = names(build("overlapped-cifar100"))
    assert set(one) & set(other)


@pytest.mark.parametrize(("clients", "sizes"), [(1, (105, 30, 15)), (3, (35, 10, 5)), (4, (26, 7, 3)), (5, (21, 6, 3))])
def test_images_are_shared_out_equally(small_data, clients, sizes):
    """Of 5 classes of 30 images; what is left after equal pieces is nobody's."""
    for task in itertools.chain(*build("overlapped-cifar100", clients, 10).sequences):
        assert tuple(task.sizes[part] for part in PARTS) == sizes
        counts = Counter(task.load("train").labels.tolist()).values()
        assert max(counts) - min(counts) <= 1


def test_too_many_clients_for_too_few_images(small_data):
    with pytest.raises(WeftError, match="too few images for 31 clients"):
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


def test_the_same_tasks_for_every_seed(small_data):
    """Only who gets them differs."""
    known = [
        {
            task.name: (task.classes, task.sizes)
            for sequence in build("noniid-35", seed=seed).sequences
            for task in sequence
        }
        for seed in (0, 1)
    ]
    assert known[0] == known[1]


def sides(dataset, index):
    """For each image of a class the part that it is in."""
    return {int(place): part for part, places in parts_of(dataset, index).items() for place in places}


def tracked(folder, frames):
    """Traffic signs that all have a track, of so many frames."""
    arrays = small_dataset("traffic_signs")
    for index in range(43):
        mine = np.flatnonzero(arrays["y"] == index)
        arrays["track"][mine] = np.arange(len(mine)) // frames
    cache.write(folder, "traffic_signs", arrays)
    return cache.load("traffic_signs", folder)


def test_a_track_is_never_cut(tmp_path):
    dataset = tracked(tmp_path, frames=5)
    for index in range(43):
        found = sides(dataset, index)
        of_track = {int(dataset.extra["track"][place]): part for place, part in found.items()}
        assert all(of_track[int(dataset.extra["track"][place])] == part for place, part in found.items())
        assert set(of_track.values()) == set(PARTS)


def test_images_without_a_track_are_for_testing_alone_and_no_others_are(small_data):
    """Nobody knows which of them are near copies of each other."""
    dataset = cache.load("traffic_signs")
    assert (dataset.extra["track"] < 0).any()
    for index in range(43):
        found = sides(dataset, index)
        assert all((dataset.extra["track"][place] < 0) == (part == "test") for place, part in found.items())
        assert set(found.values()) == set(PARTS)


def test_copies_of_an_image_are_on_one_side(tmp_path):
    arrays = small_dataset("notmnist")
    for index in range(10):
        mine = np.flatnonzero(arrays["y"] == index)
        arrays["x"][mine[1::3]] = arrays["x"][mine[::3]]  # every third image twice
    cache.write(tmp_path, "notmnist", arrays)
    dataset = cache.load("notmnist", tmp_path)
    for index in range(10):
        found = sides(dataset, index)
        of_image = {dataset.x[place].tobytes(): part for place, part in found.items()}
        assert len(of_image) == PER_CLASS * 2 // 3
        assert all(of_image[dataset.x[place].tobytes()] == part for place, part in found.items())
        assert [list(found.values()).count(part) for part in PARTS] == [21, 6, 3]
    arrays["x"][:] = 0
    cache.write(tmp_path / "blank", "notmnist", arrays)
    with pytest.raises(
        WeftError, match="class 3 of notmnist has 1 images that differ: too few, there are no test images"
    ):
        parts_of(cache.load("notmnist", tmp_path / "blank"), 3)


KNOWN_CUTS = {  # how often it was changed, and what it is
    "cifar10": (0, "90af0bd01141ed66"),
    "cifar100": (0, "0f9d72230e526a3d"),
    "facescrub": (0, "b965cedc273674f9"),
    "fashion_mnist": (0, "bd3e225e0a37ed1b"),
    "mnist": (0, "888101dc0568832e"),
    "notmnist": (1, "529e784ac23525b7"),
    "svhn": (0, "5b62bd2f05ec9002"),
    "traffic_signs": (1, "19ed4ce1f55be484"),
}


def test_a_cut_that_changes_is_counted(small_data):
    """If this fails, results of before and after do not compare: count the change in scenarios/marks.py."""
    found = {}
    for name in KNOWN_CUTS:
        parts = [parts_of(cache.load(name), index) for index in range(10)]
        text = json.dumps([{part: places.tolist() for part, places in each.items()} for each in parts])
        found[name] = (CUTS.get(name, 0), hashlib.sha256(text.encode()).hexdigest()[:16])
    assert found == KNOWN_CUTS


def test_parts_are_near_their_shares(small_data, tmp_path):
    # a track of 5 goes here or there as a whole
    for dataset, near in ((cache.load("cifar10"), 0), (cache.load("notmnist"), 0), (tracked(tmp_path, frames=5), 4)):
        for chosen in (parts_of(dataset, index) for index in range(10)):
            counts = {part: len(places) for part, places in chosen.items()}
            assert sum(counts.values()) == PER_CLASS
            assert counts["test"] == pytest.approx(6, abs=near)
            assert counts["valid"] == pytest.approx(3, abs=near)


def test_few_large_tracks_leave_no_part_empty(tmp_path):
    dataset = tracked(tmp_path, frames=10)
    for index in range(43):
        found = parts_of(dataset, index)
        assert [len(found[part]) for part in PARTS] == [10, 10, 10]
    dataset.extra["track"][:] = 0
    with pytest.raises(WeftError, match="class 3 of traffic_signs has 1 tracks: too few, there are no test images"):
        parts_of(dataset, 3)
    dataset.extra["track"][::2] = -1
    with pytest.raises(WeftError, match="class 3 of traffic_signs has 1 tracks: too few, there are no valid images"):
        parts_of(dataset, 3)
    dataset.extra["track"][:] = -1
    with pytest.raises(WeftError, match="class 3 of traffic_signs has 0 tracks: too few, there are no train images"):
        parts_of(dataset, 3)


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


def run_words(folder: str) -> list[str]:
    return [
        "scale=small",
        "network=mlp",
        "rounds_per_task=1",
        "clients=2",
        "tasks=2",
        "--workers",
        "1",
        "--out",
        folder,
    ]


@pytest.mark.slow
def test_overlapped_cifar100_from_end_to_end(tmp_path, command, small_cache):
    outcome = command("run", "overlapped-cifar100", *run_words("run"), "--data-dir", small_cache, cwd=tmp_path)
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
        assert tuple(task.sizes[part] for part in PARTS) == sizes
    task = build("overlapped-cifar100", clients, 1).sequences[-1][0]
    for part in PARTS:
        assert len(set(task.load(part).labels)) == min(5, task.sizes[part])


@pytest.mark.data
@real
def test_no_image_of_cifar100_is_at_two_clients():
    seen: Counter[bytes] = Counter()
    for sequence in build("overlapped-cifar100", 5, 20).sequences:
        for task in sequence:
            for part in PARTS:
                seen.update(image.tobytes() for image in task.load(part).images)
    assert seen.total() == 60_000
    assert seen.total() - len(seen) < 50  # the set itself holds a few images twice


@pytest.mark.data
@real
def test_no_letter_of_the_real_notmnist_is_on_two_sides():
    dataset = cache.load("notmnist")
    for index in range(10):
        images = {
            part: {dataset.x[place].tobytes() for place in mine} for part, mine in parts_of(dataset, index).items()
        }
        assert len(set.union(*images.values())) == sum(map(len, images.values()))


@pytest.mark.data
@real
def test_the_real_noniid_35():
    tasks = list(itertools.chain(*build("noniid-35").sequences))
    assert len(tasks) == 35
    for task in tasks:
        total = sum(task.sizes.values())
        if task.group == "traffic_signs":  # whole tracks, and GTSRB's own test set to test with
            assert task.sizes["train"] / (total - task.sizes["test"]) == pytest.approx(0.7 / 0.8, abs=0.03)
        else:
            assert task.sizes["train"] / total == pytest.approx(0.7, abs=0.01)
            assert task.sizes["test"] / total == pytest.approx(0.2, abs=0.01)
        scaled = (task.load("train").images - np.array(task.mean)) / np.array(task.deviation)
        assert abs(scaled.mean()) < 0.6
        assert scaled.std() == pytest.approx(1, abs=0.45)
