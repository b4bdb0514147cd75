"""One client's training step on one thread: a plain LeNet, ours alone, and FedWeIT after any number of tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.plan import Plan
from weft.randomness import generator

from .internals import BenchClient, Runtime, states_before, task_knowledge
from .plain_lenet import PlainLeNet, PlainTrainer
from .timing import Progress, interleave, quartiles, ratio, seconds_of

TASKS = (1, 2, 5, 10, 20, 50)
FOREIGN = (0, 5, 20)
SIDE = 2048  # of the matrix product whose speed counts as the machine's peak
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
            "share_of_peak": operations / MatrixProduct.operations * ratio(times["peak"], times[name])["median"],
        }
        if isinstance(contender := contenders[name], ClientSteps):
            table[name]["round_seconds"] = quartiles(contender.overhead)
    for case in cases:
        table[case.name] |= case._asdict()
    return {
        "batch_size": batch,
        "operations_per_image": operations // batch,
        "peak_operations_per_second": MatrixProduct.operations / quartiles(times["peak"])["median"],
        "contenders": table,
        "ratios": {
            "lenet_speedup_over_plain": ratio(times["plain"], times["lenet"]),
            "fedweit_task10_over_lenet": ratio(times[MIDDLE.name], times["lenet"]),
            "fedweit_task50_over_task2": ratio(times[LATE.name], times[EARLY.name]),
        },
        "noise": ratio(times[TWIN], times[EARLY.name]),
    }


def make_contenders(plan: dict[str, Any], cases: Sequence[Case]) -> dict[str, ClientSteps | PlainSteps | MatrixProduct]:
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
        "peak": MatrixProduct(),
        "plain": PlainSteps(local),
        "lenet": ClientSteps(BenchClient(local, 0)),
        **{case.name: client(case) for case in cases},
        TWIN: client(EARLY),
    }


class ClientSteps:
    """Some steps of a client within one round; returns the seconds of a step."""

    def __init__(self, client: BenchClient):
        self._client = client
        self._batches = client.runtime.batches(0, 0, "train")  # the same images for all contenders
        self._turns = 0
        self.overhead: list[float] = []  # seconds for the start and the end of a round

    def __call__(self) -> float:
        start = time.perf_counter()
        with self._client.training_round() as train:
            opening = time.perf_counter() - start
            seconds = _seconds_per_step(
                lambda indices: train(*self._batches.take(indices)),
                self._turns,
                len(self._batches),
                self._client.runtime.plan.batch_size,
            )
            end = time.perf_counter()
        self.overhead.append(opening + time.perf_counter() - end)
        self._turns += 1
        return seconds


class PlainSteps:
    """Some steps of the plain LeNet with torch's Adam."""

    def __init__(self, runtime: Runtime):
        task, plan = runtime.task(0, 0), runtime.plan
        split = task.load("train")
        self._images = torch.from_numpy(split.images).permute(0, 3, 1, 2).contiguous()  # uint8 (count, 3, 32, 32)
        self._labels = torch.from_numpy(split.labels)
        self._batch, self._turns = plan.batch_size, 0
        self._trainer = PlainTrainer(PlainLeNet(), task.mean, task.deviation, plan.learning_rate)

    def __call__(self) -> float:
        seconds = _seconds_per_step(
            lambda indices: self._trainer.step(self._images[indices], self._labels[indices]),
            self._turns,
            len(self._labels),
            self._batch,
        )
        self._turns += 1
        return seconds


def _seconds_per_step(step: Callable[[torch.Tensor], object], turn: int, images: int, batch: int) -> float:
    """The first step of a turn is not counted."""
    rng = generator(0, "bench", "order", turn)
    batches = [torch.from_numpy(rng.permutation(images)[:batch]) for _ in range(STEPS + 1)]
    step(batches[0])
    return sum(seconds_of(step, indices) for indices in batches[1:]) / STEPS


class MatrixProduct:
    """A large matrix product: the peak speed of the machine on one thread."""

    operations = 2 * SIDE**3

    def __init__(self) -> None:
        self._left, self._right = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
        self._out = torch.empty(SIDE, SIDE)

    def __call__(self) -> float:
        return seconds_of(lambda: torch.mm(self._left, self._right, out=self._out))


def operations_per_image(network: nn.Module) -> int:
    """Additions and multiplications of convolution and linear layers, forward and backward, from their shapes.

    Backward is two products of the forward's size, by the weights and by the input; the first layer needs no gradient
    by its input, the images. Everything else (ReLU, pooling, normalization, Adam) is not counted.
    """
    forward: list[int] = []

    def count(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        weight = layer.get_parameter("weight")
        forward.append(2 * out.numel() * weight[0].numel())  # an output is a sum over one row of the weights

    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        network(torch.zeros(1, 3, 32, 32))
    for hook in hooks:
        hook.remove()
    return 3 * sum(forward) - forward[0]
