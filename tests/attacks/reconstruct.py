"""A lying hub reconstructs training images from what a site uploads; its numbers are in docs/trust.md.

    python tests/attacks/reconstruct.py

The first layer gets one direction for all neurons, brightness, and a threshold for each; the second passes all of them
on alike. Then the gradients of two neighbors differ by the images between their thresholds, and where that is a single
one, the difference is this image times a number, which the difference of their biases tells (Fowl et al., Robbing the
Fed, ICLR 2022). The hub chooses the plan, and theta_G in every round; it sees what leaves, and nothing else.

`before` is a site without limits. `after` is one with the default policy, to which the hub adapts: allowed batches,
several rounds to steer the weights, and gradients small enough that Adam does not normalize them.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.core.client import Runtime
from weft.flower.site_policy import Policy
from weft.flower.site_state import SiteState
from weft.networks.flat import Layout
from weft.plan import Plan
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import Payload, Rows, dense

IMAGES, HIDDEN, FEATURES = 200, 1000, 16
SPREAD = 0.25  # standard deviation of the mean of a normalized image; public images of the kind tell it
BASE: dict[str, Any] = {
    "clients": 2,
    "tasks": 1,
    "network": "mlp",
    "network.hidden": HIDDEN,
    "network.features": FEATURES,
    "scenario.train": IMAGES,
    "rounds_per_task": 20,
    "epochs_per_round": 1,
    "batch_size": 10**6,
    "method.biases": "shared",
    "precision": "float32",
    "device": "cpu",
}
FEDAVG = {"method": "fedavg", "optimizer": "sgd", "sgd_rate": 100.0}
ADAM = {"method": "fedavg", "optimizer": "adam", "learning_rate": 1e-3}
FEDWEIT = {"method": "fedweit", "learning_rate": 1e-3, "method.keep": 1.0}
PLAIN = {"method.ablate": ["a", "m"]}  # theta = B: a plan may ask for it
SMALL = {"batch_size": 50, "epochs_per_round": 1}  # four steps
NO_LIMITS = Policy().model_copy(update={"largest_batch": 10**6, "least_steps": 1, "largest_jump": math.inf})


@dataclass
class Attack:
    """`strength` of the second layer: the smaller, the smaller the gradients of the first."""

    words: dict[str, Any]
    policy: Policy
    rounds: int = 1  # the last one counts; the ones before steer
    strength: float = 1.0
    scale: float = 1.0  # of the first layer


def crafted(attack: Attack, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and biases that sort images by brightness; thresholds as for images of unit deviation."""
    first, second = layout.layers
    weights = torch.zeros(layout.weights)
    weights[first.span] = attack.scale / first.width
    weights[second.span] = attack.strength / HIDDEN / attack.scale
    share = (torch.arange(HIDDEN) + 0.5) / HIDDEN
    thresholds = torch.special.ndtri(share) * SPREAD
    biases = torch.cat([-attack.scale * thresholds, torch.full((layout.biases - HIDDEN,), 0.1)])
    return weights, biases


def run(attack: Attack) -> int:
    """How many of the site's training images the hub has with at most 1 % error."""
    plan = Plan.merge({**BASE, **attack.words})
    runtime = Runtime(plan)
    layout = runtime.context(0, 0).layout
    target, biases = crafted(attack, layout)
    found: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        start = runtime.context(0, 0)
        own = start.initial()[: layout.weights].clone(), start.initial()[layout.weights :].clone()
        for number in range(attack.rounds):
            sent = _reachable(own[0], target, layout, attack.policy), _near(own[1], biases, attack.policy)
            reply = _ask(Path(folder), attack, plan, number, sent, layout)
            if reply.error:
                return 0
            own = dense(reply.tensors["weights"]), dense(reply.tensors["biases"])
            found = candidates(sent, own, layout)
    batches = runtime.batches(0, 0, "train")
    images = batches.take(slice(0, len(batches)))[0].flatten(1)
    return recovered(found, images)


def _reachable(own: torch.Tensor, target: torch.Tensor, layout: Layout, policy: Policy) -> torch.Tensor:
    """The nearest weights to the target that the site will take as they are; what it has is known from its reply."""
    sent = own.clone()
    for layer in layout.layers:
        sent[layer.span] = _step(own[layer.span], target[layer.span], policy.largest_jump)
    return sent


def _near(own: torch.Tensor, target: torch.Tensor, policy: Policy) -> torch.Tensor:
    return _step(own, target, 4 * policy.largest_jump)


def _step(own: torch.Tensor, target: torch.Tensor, most: float) -> torch.Tensor:
    move, limit = target - own, 0.99 * most * float(own.norm())
    if most == math.inf:
        return target
    return target if float(move.norm()) <= limit else own + move * (limit / float(move.norm()))


def _ask(
    folder: Path, attack: Attack, plan: Plan, number: int, sent: tuple[torch.Tensor, torch.Tensor], layout: Layout
) -> Message:
    weights: Payload = sent[0]
    if plan.method == "fedweit":
        weights = Rows.of(sent[0], layout.segments, torch.ones(layout.rows, dtype=torch.bool))
    ops = ("begin", "receive", "train", "upload") if number == 0 else ("receive", "train", "upload")
    tensors: dict[str, Payload] = {"weights": weights, "biases": sent[1]}
    request = Message("server", "client-0", f"0.{number}.0", ops, 0, number, tensors, {"foreign": [], "turn": 0})
    return decode(SiteState(folder, plan, 0, attack.policy).answer(encode(request)))


def candidates(
    sent: tuple[torch.Tensor, torch.Tensor], received: tuple[torch.Tensor, torch.Tensor], layout: Layout
) -> list[torch.Tensor]:
    """An image for each pair of neighbors, if there is one between their thresholds."""
    first = layout.layers[0]
    change = (sent[0] - received[0])[first.span].view(HIDDEN, first.width).double()
    by_bias = (sent[1] - received[1])[:HIDDEN].double()
    rows, numbers = change[:-1] - change[1:], by_bias[:-1] - by_bias[1:]
    return [row / number for row, number in zip(rows, numbers, strict=True) if float(number) != 0.0]


def recovered(found: list[torch.Tensor], images: torch.Tensor) -> int:
    """How many images have a candidate at a relative distance of at most 1 %."""
    if not found:
        return 0
    distances = torch.cdist(images.double(), torch.stack(found)) / images.double().norm(dim=1, keepdim=True)
    return int((distances.min(dim=1).values <= 0.01).sum())


TINY = {"strength": 1e-9, "scale": 1e-2}  # gradients far below Adam's epsilon are not normalized
INT8 = {"precision": "int8"}
ATTACKS = {
    "before: FedAvg, SGD, one step": Attack(FEDAVG, NO_LIMITS),
    "before: FedAvg, Adam, one step": Attack(ADAM, NO_LIMITS),
    "before: FedAvg, Adam, one step, tiny gradients": Attack(ADAM, NO_LIMITS, **TINY),
    "before: FedAvg, SGD, int8, one step": Attack({**FEDAVG, **INT8}, NO_LIMITS),
    "before: FedWeIT, Adam, int8, one step": Attack({**FEDWEIT, **INT8}, NO_LIMITS),
    "before: FedWeIT without m and A, Adam, one step, tiny gradients": Attack({**FEDWEIT, **PLAIN}, NO_LIMITS, **TINY),
    "before: the same, int8": Attack({**FEDWEIT, **PLAIN, **INT8}, NO_LIMITS, **TINY),
    "after: FedAvg, SGD, one step": Attack(FEDAVG, Policy()),
    "after: FedAvg, SGD, four steps": Attack({**FEDAVG, **SMALL}, Policy()),
    "after: FedAvg, SGD, four steps, steered in 5 rounds": Attack({**FEDAVG, **SMALL, "sgd_rate": 1.0}, Policy(), 5),
    "after: FedAvg, SGD, four steps, steered in 15 rounds": Attack({**FEDAVG, **SMALL, "sgd_rate": 1.0}, Policy(), 15),
    "after: FedAvg, Adam, four steps, tiny gradients, steered in 15 rounds": Attack(
        {**ADAM, **SMALL}, Policy(), 15, **TINY
    ),
    "after: FedWeIT, Adam, int8, four steps, steered in 15 rounds": Attack({**FEDWEIT, **SMALL, **INT8}, Policy(), 15),
    "after: FedWeIT without m and A, Adam, four steps, tiny gradients, steered in 15 rounds": Attack(
        {**FEDWEIT, **PLAIN, **SMALL}, Policy(), 15, **TINY
    ),
    "after: the same, int8": Attack({**FEDWEIT, **PLAIN, **SMALL, **INT8}, Policy(), 15, **TINY),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, attack in ATTACKS.items():
        print(f"{run(attack):4} of {IMAGES}  {name}", flush=True)
