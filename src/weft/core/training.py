"""How a client learns in one round: the same for every method, which is asked at the hooks.

With the paper's adaptive decay and stop (appendix A): the rate starts anew with each task, is divided by 3 after 5
epochs without a lower validation loss, and the task is over when it reaches the floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from weft.core.optimizers import SGD, Adam, make_optimizer
from weft.core.storage import State
from weft.errors import WeftError
from weft.methods.method import Lesson, Method, Work
from weft.networks.batches import Batches
from weft.plan import Plan
from weft.randomness import generator


def begin_schedule(rate: float) -> dict[str, Any]:
    return {"rate": rate, "lowest": None, "waited": 0, "stopped": False, "epochs": 0}


def after_epoch(schedule: dict[str, Any], loss: float, plan: Plan) -> dict[str, Any]:
    """The schedule after an epoch with this validation loss."""
    new = {**schedule, "epochs": schedule["epochs"] + 1}
    if new["lowest"] is None or loss < new["lowest"]:
        return {**new, "lowest": loss, "waited": 0}
    new["waited"] += 1
    if new["waited"] >= plan.patience:
        new["rate"] = max(new["rate"] / plan.rate_decay, plan.rate_floor)
        new["waited"] = 0
        new["stopped"] = plan.stop_at_floor and new["rate"] <= plan.rate_floor
    return new


def train_round(client: State, method: Method, lesson: Lesson, round_index: int) -> dict[str, Any]:
    """One round of local training (Alg. 1 line 7); the client's state is moved on. Returns what there is to report."""
    plan, network = lesson.plan, lesson.network
    train, valid = lesson.load("train"), lesson.load("valid")
    schedule = client.numbers["schedule"]
    work = method.open(client, lesson)
    optimizer = make_optimizer(plan, work, client)
    images, accuracy, valid_loss = 0, 0.0, 0.0
    losses: list[float] = []
    for epoch in range(plan.epochs_per_round):
        if schedule["stopped"]:
            break
        losses = []
        order = _order(plan, lesson, round_index, epoch, train)
        with _drawing(plan, lesson, work, round_index, epoch):
            for chosen in torch.split(order, plan.batch_size):
                losses.append(train_step(method, work, optimizer, *train.take(chosen), schedule["rate"]))
        images += len(order)
        method.compose(work, tested=True)
        accuracy, valid_loss = network.measure(valid)
        if not math.isfinite(valid_loss):
            rate = "learning_rate" if plan.optimizer == "adam" else "sgd_rate"
            raise WeftError(f"training diverged at client {lesson.client}, task {lesson.step}; lower {rate}")
        schedule = after_epoch(schedule, valid_loss, plan)
    method.close(client, work)
    client.numbers["schedule"] = schedule
    if plan.optimizer_memory == "task":
        optimizer.remember(client)
    report = {"examples": len(train), "images": images, "rate": schedule["rate"], "stopped": schedule["stopped"]}
    if losses:
        report |= {"train_loss": sum(losses) / len(losses), "valid_loss": valid_loss, "valid_accuracy": accuracy}
    return report


def train_step(
    method: Method, work: Work, optimizer: Adam | SGD, images: torch.Tensor, labels: torch.Tensor, rate: float
) -> float:
    """One batch; gives its loss."""
    method.compose(work)
    loss = work.network.compute_gradient(images, labels, work.dropout)
    method.pull_back(work)
    method.penalise(work)
    work.network.hold_statistics()
    optimizer.step(rate)
    method.constrain(work, rate)
    return loss


def _order(plan: Plan, lesson: Lesson, round_index: int, epoch: int, train: Batches) -> torch.Tensor:
    """The order of an epoch's examples; of images pooled from several tasks an epoch takes a part."""
    if not plan.shuffle and train.epoch == len(train):
        return torch.arange(len(train), device=lesson.network.vector.device)
    rng = generator(plan.seed, "shuffle", *where(lesson), round_index, epoch)
    return torch.from_numpy(rng.permutation(len(train))[: train.epoch]).to(lesson.network.vector.device)


@contextmanager
def _drawing(plan: Plan, lesson: Lesson, work: Work, round_index: int, epoch: int) -> Iterator[None]:
    """Torch's dropout draws from its global generator: it is seeded for the epoch and put back after it."""
    if not (work.dropout or work.network.random):
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(generator(plan.seed, "dropout", *where(lesson), round_index, epoch).integers(2**62)))
        yield


def where(lesson: Lesson) -> tuple[int, int]:
    return lesson.client, lesson.step
