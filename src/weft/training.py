"""How a client learns in one round: the same for every method, which is asked at the hooks.

Adam, with the paper's adaptive decay and stop (appendix A): the rate starts anew with each task, is divided by 3 after
5 epochs without a lower validation loss, and the task is over when it reaches the floor.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from weft.errors import Problem
from weft.methods.base import Lesson, Method, Work
from weft.networks.flat import Batches
from weft.plan import Plan
from weft.randomness import generator
from weft.state import State


def begin_schedule(plan: Plan) -> dict[str, Any]:
    return {"rate": plan.learning_rate, "lowest": None, "waited": 0, "stopped": False, "epochs": 0}


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


def train_round(
    client: State, method: Method, lesson: Lesson, train: Batches, valid: Batches, round_index: int
) -> dict[str, Any]:
    """One round of local training (Alg. 1 line 7); the client's state is moved on. Returns what there is to report."""
    plan, network = lesson.plan, lesson.network
    schedule = client.numbers["schedule"]
    work = method.open(client, lesson)
    optimizer = Adam(work, client if plan.optimizer_memory == "task" else None)
    images, accuracy, valid_loss = 0, 0.0, 0.0
    losses: list[float] = []
    for epoch in range(plan.epochs_per_round):
        if schedule["stopped"]:
            break
        losses = []
        order = _order(plan, lesson, round_index, epoch, len(train))
        for chosen in torch.split(order, plan.batch_size):
            method.compose(work)
            losses.append(network.compute_gradient(*train.take(chosen)))
            method.pull_back(work)
            method.penalise(work)
            optimizer.step(schedule["rate"])
            method.constrain(work, schedule["rate"])
        images += len(train)
        method.compose(work, tested=True)
        accuracy, valid_loss = network.measure(valid)
        if not math.isfinite(valid_loss):
            raise Problem(f"training diverged at client {lesson.client}, task {lesson.step}; lower learning_rate")
        schedule = after_epoch(schedule, valid_loss, plan)
    method.close(client, work)
    client.numbers["schedule"] = schedule
    if plan.optimizer_memory == "task":
        optimizer.remember(client)
    report = {"examples": len(train), "images": images, "rate": schedule["rate"], "stopped": schedule["stopped"]}
    if losses:
        report |= {"train_loss": sum(losses) / len(losses), "valid_loss": valid_loss, "valid_accuracy": accuracy}
    return report


def _order(plan: Plan, lesson: Lesson, round_index: int, epoch: int, count: int) -> torch.Tensor:
    """The order of an epoch's examples."""
    if not plan.shuffle:
        return torch.arange(count, device=lesson.network.vector.device)
    rng = generator(plan.seed, "shuffle", lesson.client, lesson.step, round_index, epoch)
    return torch.from_numpy(rng.permutation(count)).to(lesson.network.vector.device)


class Adam:
    """Adam over a method's variables (Kingma and Ba, 2015), one fused pass over each.

    It calls the kernel of torch.optim.Adam(fused=True) itself: torch.optim takes seconds to load for what is one call.
    """

    FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, work: Work, memory: State | None):
        """With the moments of the last round, if they are kept in `memory`."""
        self._work = work
        kept = memory.tensors if memory is not None else {}
        steps = memory.numbers.get("adam", {}) if memory is not None else {}
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for name, variable in work.variables.items():
            # taken over, not copied: they are most of a client's state, and `remember` puts them back
            found = (kept.pop(f"adam/{name}/first", None), kept.pop(f"adam/{name}/second", None))
            moments = [
                moment.to(variable.device) if isinstance(moment, torch.Tensor) else torch.zeros_like(variable)
                for moment in found
            ]
            self._moments[name] = (
                moments[0],
                moments[1],
                torch.tensor(float(steps.get(name, 0)), device=variable.device),
            )

    def step(self, rate: float) -> None:
        for name, (first, second, steps) in self._moments.items():
            steps += 1
            torch._fused_adam_(
                [self._work.variables[name]],
                [self._work.gradients[name]],
                [first],
                [second],
                [],
                [steps],
                lr=rate,
                beta1=self.FIRST_DECAY,
                beta2=self.SECOND_DECAY,
                weight_decay=0.0,
                eps=self.EPSILON,
                amsgrad=False,
                maximize=False,
            )

    def remember(self, memory: State) -> None:
        for name, (first, second, _) in self._moments.items():
            memory.tensors[f"adam/{name}/first"] = first.cpu()
            memory.tensors[f"adam/{name}/second"] = second.cpu()
        memory.numbers["adam"] = {name: steps.item() for name, (_, _, steps) in self._moments.items()}


def forget_optimizer(client: State) -> None:
    """A task is over: its moments go."""
    client.numbers.pop("adam", None)
    for key in [key for key in client.tensors if key.startswith("adam/")]:
        del client.tensors[key]
