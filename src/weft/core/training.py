"""One round of local training (Alg. 1 line 7), and the two optimizers.

With the paper's adaptive decay and stop (appendix A): the rate starts anew with each task, is divided by 3 after 5
epochs without a lower validation loss, and the task is over when it reaches the floor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from weft.errors import WeftError
from weft.methods.context import LocalTraining, TaskContext
from weft.methods.method import Method
from weft.methods.state import ClientState, OptimizerState
from weft.networks.batches import Batches
from weft.plan import Plan
from weft.randomness import generator


def train_round(client: ClientState, method: Method, ctx: TaskContext, round_index: int) -> dict[str, Any]:
    """Train for one round and return what there is to report; the client's state is updated."""
    plan, network = ctx.plan, ctx.network
    train, valid = ctx.load("train"), ctx.load("valid")
    schedule = replace(client.rate)
    training = LocalTraining.plain(client, ctx)
    training.dropout = method.options.dropout
    method.prepare(training, client, ctx)
    optimizer = make_optimizer(plan, training, client.optimizer)
    images, accuracy, valid_loss = 0, 0.0, 0.0
    losses: list[float] = []
    for epoch in range(plan.epochs_per_round):
        if schedule.stopped:
            break
        losses, training.epoch = [], epoch
        order = _order(ctx, round_index, epoch, train)
        with _seeded_dropout(ctx, training, round_index, epoch):
            for chosen in torch.split(order, plan.batch_size):
                losses.append(train_step(training, optimizer, *train.take(chosen), schedule.rate))
        images += len(order)
        training.compose(True)
        accuracy, valid_loss = network.measure(valid)
        if not math.isfinite(valid_loss):
            rate = "learning_rate" if plan.optimizer == "adam" else "sgd_rate"
            raise WeftError(f"training diverged at client {ctx.client}, task {ctx.task}; lower {rate}")
        schedule.after_epoch(valid_loss, plan)
    for callback in training.on_end:
        callback()
    client.rate = schedule
    client.optimizer = optimizer.state() if plan.optimizer_memory == "task" else OptimizerState()
    report = {"examples": len(train), "images": images, "rate": schedule.rate, "stopped": schedule.stopped}
    if losses:
        report |= {"train_loss": sum(losses) / len(losses), "valid_loss": valid_loss, "valid_accuracy": accuracy}
    return report


def train_step(
    training: LocalTraining, optimizer: Adam | SGD, images: torch.Tensor, labels: torch.Tensor, rate: float
) -> float:
    """Train on one batch; returns its loss."""
    training.compose(False)
    loss = training.network.compute_gradient(images, labels, training.dropout)
    training.backward()
    for penalty in training.penalties:
        penalty()
    training.network.hold_statistics()
    optimizer.step(rate, training.frozen(training.epoch))
    for callback in training.after_step:
        callback(rate)
    return loss


def _order(ctx: TaskContext, round_index: int, epoch: int, train: Batches) -> torch.Tensor:
    """The order of an epoch's examples; of images pooled from several tasks an epoch takes some."""
    if not ctx.plan.shuffle and train.epoch == len(train):
        return torch.arange(len(train), device=ctx.device)
    rng = generator(ctx.plan.seed, "shuffle", ctx.client, ctx.task, round_index, epoch)
    return torch.from_numpy(rng.permutation(len(train))[: train.epoch]).to(ctx.device)


@contextmanager
def _seeded_dropout(ctx: TaskContext, training: LocalTraining, round_index: int, epoch: int) -> Iterator[None]:
    """Torch's dropout draws from its global generator: seed it for the epoch and put it back afterwards."""
    if not (training.dropout or training.network.random):
        yield
        return
    with torch.random.fork_rng(devices=[]):
        rng = generator(ctx.plan.seed, "dropout", ctx.client, ctx.task, round_index, epoch)
        torch.manual_seed(int(rng.integers(2**62)))
        yield


def make_optimizer(plan: Plan, training: LocalTraining, state: OptimizerState) -> Adam | SGD:
    return SGD(training) if plan.optimizer == "sgd" else Adam(training, state)


class SGD:
    """Plain gradient descent, which remembers nothing."""

    def __init__(self, training: LocalTraining):
        self._training = training

    def step(self, rate: float, frozen: Collection[str] = ()) -> None:
        training = self._training
        for name, variable in training.variables.items():
            if name in frozen:
                continue
            variable.add_(training.gradients[name], alpha=-rate * training.rates.get(name, 1.0))

    def state(self) -> OptimizerState:
        return OptimizerState()


class Adam:
    """Adam (Kingma and Ba, 2015) over a method's variables, one pass each.

    It calls the kernel of torch.optim.Adam(fused=True) itself: torch.optim takes seconds to load for one call.
    """

    FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, training: LocalTraining, state: OptimizerState):
        """With the moments of the last round, taken over and not copied: they are most of a client's state."""
        self._training = training
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for name, variable in training.variables.items():
            first, second = (
                moments.pop(name).to(variable.device) if name in moments else torch.zeros_like(variable)
                for moments in (state.first, state.second)
            )
            steps = torch.tensor(float(state.steps.get(name, 0)), device=variable.device)
            self._moments[name] = (first, second, steps)

    def step(self, rate: float, frozen: Collection[str] = ()) -> None:
        training = self._training
        for name, (first, second, steps) in self._moments.items():
            if name in frozen:
                continue
            steps += 1
            torch._fused_adam_(
                [training.variables[name]],
                [training.gradients[name]],
                [first],
                [second],
                [],
                [steps],
                lr=rate * training.rates.get(name, 1.0),
                beta1=self.FIRST_DECAY,
                beta2=self.SECOND_DECAY,
                weight_decay=0.0,
                eps=self.EPSILON,
                amsgrad=False,
                maximize=False,
            )

    def state(self) -> OptimizerState:
        moments = self._moments.items()
        return OptimizerState(
            {name: first.cpu() for name, (first, _, _) in moments},
            {name: second.cpu() for name, (_, second, _) in moments},
            {name: steps.item() for name, (_, _, steps) in moments},
        )
