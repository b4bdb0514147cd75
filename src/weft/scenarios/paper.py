"""Scenarios of the FedWeIT paper, from public datasets: overlapped-cifar100, noniid-50, noniid-35 and interference.

Which classes form a task and how its images are split is fixed. The seed of the plan decides which client gets which
tasks in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import BaseModel, Field

from weft.data import cache
from weft.errors import WeftError
from weft.lazy import np
from weft.randomness import generator
from weft.scenarios import SPLITS, Scenario, ScenarioOptions, Split, SplitName, Task
from weft.scenarios.splits import SEED, split_class, task_of

if TYPE_CHECKING:
    from weft.data.cache import Dataset
    from weft.scenarios.splits import Indices

MAX_CLIENTS = 100  # of overlapped-cifar100, as in the paper; with more, a share has fewer test images than classes
CLASSES_PER_TASK = 5  # of noniid; the last task of a dataset may have fewer
OTHERS = {"cifar10": 2, "mnist": 2, "fashion_mnist": 2, "notmnist": 2, "svhn": 2}
NONIID_35 = {"cifar100": 17, "traffic_signs": 8, **OTHERS}  # number of tasks by dataset
NONIID_50 = {  # the paper and the released code differ, FIDELITY.md row 14
    "paper": {"cifar100": 15, "facescrub": 16, "traffic_signs": 9, **OTHERS},  # the last of the signs has 3 classes
    "released": {"cifar100": 16, "facescrub": 16, "traffic_signs": 8, **OTHERS},
}
RECEIVER = "mnist"
EVALUATED = 1000  # valid and test images of an interference task, all classes together
BLANK = 2  # images of the task in which the receiver waits


class OverlappedCIFAR100:
    """A task has five classes. The images of a superclass are divided into equal, disjoint shares, one per client: with
    5 clients 420 train, 120 test and 60 valid images each; with 20 clients 105, 30 and 15; with 100 clients 21, 6 and
    3. Two clients may learn the same classes, never from the same image.
    """

    class Options(ScenarioOptions):
        """CIFAR-100's 20 superclasses, shared by all clients: up to 100 clients, up to 20 tasks."""

        # superclasses: a task is a superclass, which other clients learn too, as in the paper; disjoint: one that no
        # other client learns; mixed: five classes of five superclasses, so that two tasks share one or none
        deal: Literal["superclasses", "disjoint", "mixed"] = "superclasses"

    @staticmethod
    def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
        assert isinstance(options, OverlappedCIFAR100.Options)
        dataset = cache.load("cifar100")
        kinds = int(dataset.extra["coarse_of_fine"].max()) + 1
        disjoint = options.deal == "disjoint"
        _check_size("overlapped-cifar100", clients, tasks, MAX_CLIENTS, kinds // clients if disjoint else kinds)
        shares = [_shares(dataset, kind, clients) for kind in range(kinds)]
        rng = generator(seed, "deal")
        if options.deal == "mixed":  # one class of each position within its superclass, so that all tasks are as large
            drawn = [[rng.permutation(kinds)[:tasks] for _ in range(CLASSES_PER_TASK)] for _ in range(clients)]
            sequences = tuple(
                tuple(_mixed(dataset, shares, client, task, drawn[client]) for task in range(tasks))
                for client in range(clients)
            )
            return Scenario("overlapped-cifar100", sequences, datasets=(dataset.name,))
        if disjoint:
            dealt = list(rng.permutation(kinds)[: clients * tasks].reshape(clients, tasks))
        else:
            dealt = [rng.permutation(kinds)[:tasks] for _ in range(clients)]
        named = [[task_of(dataset, *each) for each in kind] for kind in shares]
        sequences = tuple(tuple(named[kind][client] for kind in dealt[client]) for client in range(clients))
        return Scenario("overlapped-cifar100", sequences, datasets=(dataset.name,))


Share: TypeAlias = "tuple[str, tuple[int, ...], dict[SplitName, list[Indices]]]"  # name, classes, indices by class


def _mixed(dataset: Dataset, shares: list[list[Share]], client: int, task: int, drawn: list[Indices]) -> Task:
    """A task of one class of each of several superclasses, with the client's share of their images."""
    chosen = [(shares[int(kinds[task])][client], position) for position, kinds in enumerate(drawn)]
    classes = tuple(share[1][position] for share, position in chosen)
    indices = {split: [share[2][split][position] for share, position in chosen] for split in SPLITS}
    return task_of(dataset, f"mixed-{client}-{task}", classes, indices)


def _shares(dataset: Dataset, superclass: int, clients: int) -> list[Share]:
    """One superclass for every client: equal and disjoint shares with classes as balanced as possible."""
    coarse = dataset.extra["coarse_of_fine"][: dataset.classes]
    classes = tuple(map(int, np.flatnonzero(coarse == superclass)))
    by_class = [split_class(dataset, label) for label in classes]
    name = str(dataset.extra["coarse_names"][superclass])
    indices = {split: _divide([each[split] for each in by_class], clients) for split in SPLITS}
    if any(len(mine) == 0 for split in ("train", "test") for share in indices[split] for mine in share):
        raise WeftError(f"{name} has too few images for {clients} clients; choose fewer clients")
    shares = [{split: indices[split][client] for split in SPLITS} for client in range(clients)]
    return [(name, classes, share) for share in shares]


def _divide(by_class: list[Indices], clients: int) -> list[list[Indices]]:
    """Indices for each client and class. Classes take turns, so a share of 21 has 4 or 5 images of each of five
    classes; images that remain after equal shares are not used."""
    turns = sorted((turn, label) for label, mine in enumerate(by_class) for turn in range(len(mine)))
    shares = np.array(turns).reshape(-1, 2)[: len(turns) // clients * clients].reshape(clients, -1, 2)
    return [[mine[share[share[:, 1] == label, 0]] for label, mine in enumerate(by_class)] for share in shares]


class NonIID50:
    class Options(ScenarioOptions):
        """The paper's 50 tasks of eight datasets, with faces: up to 5 clients, up to 10 tasks."""

        lists: Literal["paper", "released"] = "paper"

    @staticmethod
    def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
        assert isinstance(options, NonIID50.Options)
        return _noniid("noniid-50", NONIID_50[options.lists], 10, clients, tasks, seed)


class NonIID35:
    """noniid-50 without FaceScrub, which has no public source."""

    class Options(ScenarioOptions):
        """35 tasks of seven datasets, without faces: up to 5 clients, up to 7 tasks."""

    @staticmethod
    def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
        return _noniid("noniid-35", NONIID_35, 7, clients, tasks, seed)


def _noniid(name: str, counts: Mapping[str, int], per_client: int, clients: int, tasks: int, seed: int) -> Scenario:
    """Deal all tasks of five classes each to clients; every task has one client."""
    most = sum(counts.values()) // per_client
    _check_size(name, clients, tasks, most, per_client)
    all_tasks = [(dataset, place) for dataset, count in counts.items() for place in range(count)]
    order = generator(seed, "deal").permutation(len(all_tasks)).reshape(most, per_client)[:clients, :tasks]
    # all datasets: a run must not fail for one seed only because a dataset is missing
    datasets = {dataset: cache.load(dataset) for dataset in counts}
    sequences = tuple(tuple(_noniid_task(datasets, counts, *all_tasks[place]) for place in row) for row in order)
    return Scenario(name, sequences, datasets=tuple(datasets))


def _noniid_task(datasets: Mapping[str, Dataset], counts: Mapping[str, int], name: str, place: int) -> Task:
    dataset = datasets[name]
    order = generator(SEED, "classes", name).permutation(dataset.classes)
    classes = tuple(sorted(map(int, order[place * CLASSES_PER_TASK : (place + 1) * CLASSES_PER_TASK])))
    if len(classes) < 2:
        raise WeftError(f"{name} has {dataset.classes} classes, too few for {counts[name]} tasks of {CLASSES_PER_TASK}")
    by_class = [split_class(dataset, label) for label in classes]
    return task_of(dataset, f"{name}-{place}", classes, {split: [each[split] for each in by_class] for split in SPLITS})


class Interference:
    """One client learns MNIST while it receives from another that has learned something else (figure 2).

    The sender learns the same classes in both tasks, from different images. In its first task the receiver waits: its
    images are blank and of one class, so there is nothing to learn and it replies with the weights it received. In its
    second task it learns MNIST from few images, starting from the sender's knowledge.
    """

    class Options(ScenarioOptions):
        """MNIST at one client that receives from another, which learns SVHN or CIFAR-10, or from nobody."""

        sender: Literal["svhn", "cifar10", "nobody"] = "svhn"
        images: int = Field(200, ge=10)  # at most, of MNIST; with many, transfer gains nothing
        sender_images: int = Field(2000, ge=10)  # at most, in each of the sender's two tasks

    @staticmethod
    def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
        assert isinstance(options, Interference.Options)
        expected = 1 if options.sender == "nobody" else 2
        if (clients, tasks) != (expected, 2):
            size = f"has {expected} clients and 2 tasks; set clients={expected} tasks=2"
            raise WeftError(f"interference with scenario.sender={options.sender} {size}")
        receiver = (_waiting(), *_whole_tasks(RECEIVER, options.images, 1, seed))
        if options.sender == "nobody":
            return Scenario("interference", (receiver,), datasets=(RECEIVER,))
        sender = tuple(_whole_tasks(options.sender, options.sender_images, 2, seed))
        return Scenario("interference", (receiver, sender), datasets=(RECEIVER, options.sender))


def _whole_tasks(name: str, images: int, count: int, seed: int) -> list[Task]:
    """`count` tasks of all classes of a dataset, with disjoint images selected by the seed."""
    dataset = cache.load(name)
    classes = tuple(range(dataset.classes))
    sizes: dict[SplitName, int] = {"train": images, "valid": EVALUATED, "test": EVALUATED}
    indices: list[dict[SplitName, list[Indices]]] = [{split: [] for split in SPLITS} for _ in range(count)]
    for label in classes:
        mine = split_class(dataset, label)
        for split in SPLITS:
            order = generator(seed, "images", name, split, label).permutation(mine[split])
            size = min(sizes[split] // len(classes), len(order) // count)
            if size == 0:
                raise WeftError(f"class {label} of {name} has {len(order)} {split} images, too few for {count} tasks")
            for task in range(count):
                indices[task][split].append(order[task * size : (task + 1) * size])
    return [task_of(dataset, f"{name}-{task}", classes, indices[task]) for task in range(count)]


def _waiting() -> Task:
    sizes = dict.fromkeys(SPLITS, BLANK)
    return Task("waiting", "blank", ("blank",), sizes, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0), _blank)


def _blank(split: SplitName) -> Split:
    return Split(np.zeros((BLANK, 32, 32, 3), dtype=np.uint8), np.zeros(BLANK, dtype=np.int64))


def _check_size(name: str, clients: int, tasks: int, max_clients: int, max_tasks: int) -> None:
    if clients > max_clients or tasks > max_tasks:
        limits = f"1 to {max_clients} clients and 1 to {max_tasks} tasks per client"
        raise WeftError(f"{name} has {limits}, not {clients} and {tasks}")
