"""How a client learns in one round: the same for every method, which is asked at the hooks.

Adam, with the paper's adaptive decay and stop (appendix A): the rate starts anew with each task, is divided by 3 after
5 epochs without a lower validation loss, and the task is over when it reaches the floor.
"""

from __future__ import annotations

from typing import Any

import torch

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
    optimizer = _adam(work, client if plan.optimizer_memory == "task" else None)
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
            optimizer.param_groups[0]["lr"] = schedule["rate"]
            optimizer.step()
            method.constrain(work, schedule["rate"])
        images += len(train)
        method.compose(work, tested=True)
        accuracy, valid_loss = network.measure(valid)
        schedule = after_epoch(schedule, valid_loss, plan)
    method.close(client, work)
    client.numbers["schedule"] = schedule
    if plan.optimizer_memory == "task":
        _remember(client, optimizer, work)
    report = {"examples": len(train), "images": images, "rate": schedule["rate"], "stopped": schedule["stopped"]}
    if losses:
        report |= {"train_loss": sum(losses) / len(losses), "valid_loss": valid_loss, "valid_accuracy": accuracy}
        client.numbers["valid_accuracy"] = accuracy
    return report


def _order(plan: Plan, lesson: Lesson, round_index: int, epoch: int, count: int) -> torch.Tensor:
    """The order of an epoch's examples."""
    if not plan.shuffle:
        return torch.arange(count)
    rng = generator(plan.seed, "shuffle", lesson.client, lesson.step, round_index, epoch)
    return torch.from_numpy(rng.permutation(count)).to(lesson.network.vector.device)


def _adam(work: Work, memory: State | None) -> torch.optim.Adam:
    """Adam over the method's variables, a fused pass over each; with the moments of the last round if they are kept."""
    for name, variable in work.variables.items():
        variable.grad = work.gradients[name]
    optimizer = torch.optim.Adam(list(work.variables.values()), fused=True)
    for name, variable in work.variables.items():
        if memory is not None and f"adam/{name}/first" in memory.tensors:
            optimizer.state[variable] = {
                "step": torch.tensor(float(memory.numbers["adam"][name])),
                "exp_avg": memory.tensor(f"adam/{name}/first").to(variable.device, copy=True),
                "exp_avg_sq": memory.tensor(f"adam/{name}/second").to(variable.device, copy=True),
            }
    return optimizer


def _remember(client: State, optimizer: torch.optim.Adam, work: Work) -> None:
    steps = {}
    for name, variable in work.variables.items():
        if moments := optimizer.state.get(variable):
            client.tensors[f"adam/{name}/first"] = moments["exp_avg"].cpu()
            client.tensors[f"adam/{name}/second"] = moments["exp_avg_sq"].cpu()
            steps[name] = moments["step"].item()
    client.numbers["adam"] = steps


def forget_optimizer(client: State) -> None:
    """A task is over: its moments go."""
    client.numbers.pop("adam", None)
    for key in [key for key in client.tensors if key.startswith("adam/")]:
        del client.tensors[key]
