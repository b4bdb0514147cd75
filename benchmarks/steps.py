"""One client's training step on one thread: a plain LeNet, ours alone, and FedWeIT after any number of tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from weft.plan import Plan
from weft.randomness import generator

from .internals import BenchClient, Runtime, states_before, task_knowledge
from .plain_lenet import PlainLeNet, PlainTrainer
from .timing import Progress, interleave, quartiles, ratio, seconds_of

TASKS = (1, 2, 5, 10, 20, 50)
FOREIGN = (0, 5, 20)
SIDE = 2048  # of the matrix product whose speed counts as the machine's peak
PEAK_OPERATIONS = 2 * SIDE**3
STEPS = 2  # timed in each turn, after one that loads the contender's memory into the caches


class Case(NamedTuple):
    """A client of FedWeIT: at which task, with how many foreign A's, and its option `past`."""

    task: int
    foreign: int
    past: str = "frozen"

    @property
    def name(self) -> str:
        """
        >>> Case(10, 5).name, Case(2, 0, "closed").name
        ('fedweit task 10 foreign 5', 'fedweit task 2 foreign 0 past=closed')
        """
        name = f"fedweit task {self.task} foreign {self.foreign}"
        return name if self.past == "frozen" else f"{name} past={self.past}"


EARLY, MIDDLE, LATE = COMPARED = (Case(2, 5), Case(10, 5), Case(50, 5))  # in ratios
FULL = (*(Case(task, foreign) for task in TASKS for foreign in FOREIGN), Case(2, 5, "closed"), Case(50, 5, "closed"))
QUICK = (Case(1, 0), EARLY, Case(10, 0), MIDDLE, Case(10, 20), LATE)
TWIN = "twin"  # equal to EARLY: their difference is noise


def measure(plan: dict[str, Any], quick: bool, passes: int, progress: Progress) -> dict[str, Any]:
    plan = {**plan, "tasks": max(TASKS), "clients": 2, "device": "cpu"}
    cases = QUICK if quick else FULL
    contenders = make_contenders(plan, cases)
    compared = {"peak", "plain", "lenet", TWIN, *(case.name for case in COMPARED)}
    groups = [
        {name: contenders[name] for name in contenders if (name in compared) == in_ratio} for in_ratio in (True, False)
    ]
    times = interleave(groups, passes, progress)
    batch = Plan(**plan).batch_size
    operations = batch * operations_per_image(PlainLeNet())
    table: dict[str, Any] = {}
    for name in ("plain", "lenet", *(case.name for case in cases)):
        step = quartiles(times[name])
        table[name] = {
            "step_seconds": step,
            "images_per_second": batch / step["median"],
            "share_of_peak": operations / PEAK_OPERATIONS * ratio(times["peak"], times[name])["median"],
        }
        if isinstance(contender := contenders[name], ClientSteps):
            table[name]["round_seconds"] = quartiles(contender.overhead)
    for case in cases:
        table[case.name] |= case._asdict()
    return {
        "batch_size": batch,
        "operations_per_image": operations // batch,
        "peak_operations_per_second": PEAK_OPERATIONS / quartiles(times["peak"])["median"],
        "contenders": table,
        "ratios": {
            "lenet_speedup_over_plain": ratio(times["plain"], times["lenet"]),
            "fedweit_task10_over_lenet": ratio(times[MIDDLE.name], times["lenet"]),
            "fedweit_task50_over_task2": ratio(times[LATE.name], times[EARLY.name]),
        },
        "noise": ratio(times[TWIN], times[EARLY.name]),
    }


def make_contenders(plan: dict[str, Any], cases: Sequence[Case]) -> dict[str, Callable[[], float]]:
    runtimes = {
        past: Runtime(Plan(**plan, method={"name": "fedweit", "past": past}))
        for past in sorted({case.past for case in cases})
    }
    knowledge = task_knowledge(runtimes[EARLY.past], max(FOREIGN))
    states = states_before(runtimes[EARLY.past], {case.task - 1 for case in cases})

    def client(case: Case) -> ClientSteps:
        client = BenchClient(runtimes[case.past], case.task - 1, states[case.task - 1])
        client.receive(knowledge[: case.foreign])
        return ClientSteps(client)

    local = Runtime(Plan(**plan, method="local"))
    return {
        "peak": matrix_product(),
        "plain": plain_steps(local),
        "lenet": ClientSteps(BenchClient(local, 0)),
        **{case.name: client(case) for case in cases},
        TWIN: client(EARLY),
    }


class Steps:
    """Some training steps of a contender; returns the seconds of a step."""

    def __init__(self, step: Callable[[torch.Tensor], object], images: int, batch: int):
        """`step` trains on the images with these indices."""
        self._step, self._images, self._batch, self._turns = step, images, batch, 0

    def __call__(self) -> float:
        """The first step of a turn is not counted."""
        rng = generator(0, "bench", "order", self._turns)
        self._turns += 1
        batches = [torch.from_numpy(rng.permutation(self._images)[: self._batch]) for _ in range(STEPS + 1)]
        self._step(batches[0])
        return sum(seconds_of(self._step, indices) for indices in batches[1:]) / STEPS


class ClientSteps:
    """Some steps of a client within one round."""

    def __init__(self, client: BenchClient):
        self._client = client
        images = client.runtime.batches(0, 0, "train")  # the same for all contenders
        self._steps = Steps(lambda indices: self._train(*images.take(indices)), len(images), client.batch_size)
        self.overhead: list[float] = []  # seconds for the start and the end of a round

    def __call__(self) -> float:
        start = time.perf_counter()
        with self._client.training_round() as self._train:
            opening = time.perf_counter() - start
            seconds = self._steps()
            end = time.perf_counter()
        self.overhead.append(opening + time.perf_counter() - end)
        return seconds


def plain_steps(runtime: Runtime) -> Steps:
    """Steps of the plain LeNet with torch's Adam."""
    task, plan = runtime.task(0, 0), runtime.plan
    split = task.load("train")
    images = torch.from_numpy(split.images).permute(0, 3, 1, 2).contiguous()  # uint8 (count, 3, 32, 32)
    labels = torch.from_numpy(split.labels)
    trainer = PlainTrainer(PlainLeNet(), task.mean, task.deviation, plan.learning_rate)
    return Steps(lambda indices: trainer.step(images[indices], labels[indices]), len(labels), plan.batch_size)


def matrix_product() -> Callable[[], float]:
    """A large matrix product: the peak speed of the machine on one thread."""
    left, right, out = (torch.ones(SIDE, SIDE) for _ in range(3))
    return lambda: seconds_of(lambda: torch.mm(left, right, out=out))


def operations_per_image(network: nn.Module) -> int:
    """Additions and multiplications of convolution and linear layers, forward and backward, for one image.

    The first layer needs no gradient by its input. ReLU, pooling, normalization and Adam are not counted.
    """
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 32, 32)).sum().backward()
    return int(counter.get_total_flops())
