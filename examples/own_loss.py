"""User-defined losses: several labels at once, and a number instead of a class. Each with a scenario to try it on.

    weft run demo scenario=examples/own_loss.py:colours loss=examples/own_loss.py:SeveralLabels
    weft run demo scenario=examples/own_loss.py:lengths loss=examples/own_loss.py:Number

A loss has three methods: what is minimized, how correct each example is (reported as accuracy), and predictions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from weft.networks.losses import Loss
from weft.randomness import generator
from weft.scenarios import Scenario, Task
from weft.scenarios.arrays import from_arrays


class SeveralLabels(Loss):
    """Each output is a question of its own, with yes or no."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        each = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
        return each.mean() if reduction == "mean" else each.sum()

    def correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs > 0) == (targets > 0.5)).float().mean(1)  # the share of its labels

    def predict(self, outputs: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(outputs)


class Number(Loss):
    """The output is a number; it is right if it is within 0.1."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        each = (outputs - targets).square().mean(1)
        return each.mean() if reduction == "mean" else each.sum()

    def correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets).abs() <= 0.1).float().mean(1)

    def predict(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs


def colours(clients: int, tasks: int, seed: int) -> Scenario:
    """Which of red, green and blue is there?"""

    def task(client: int, step: int) -> Task:
        there = generator(seed, "colours", client, step).random((120, 3)) < 0.5  # (images, labels)
        images = np.zeros((120, 32, 32, 3), dtype=np.uint8)
        for colour in range(3):
            images[:, :, 10 * colour : 10 * colour + 10, colour] = 200 * there[:, colour, None, None]
        return from_arrays(f"colours-{step}", images, there.astype(np.float32), classes=["red", "green", "blue"])

    return Scenario("colours", tuple(tuple(task(client, step) for step in range(tasks)) for client in range(clients)))


def lengths(clients: int, tasks: int, seed: int) -> Scenario:
    """How long is the bar, from 0 to 1?"""

    def task(client: int, step: int) -> Task:
        rng = generator(seed, "lengths", client, step)
        length = rng.random(200, dtype=np.float32)
        bars = np.arange(32) < 32 * length[:, None, None]  # (images, 1, columns)
        images = (0.8 * bars + rng.normal(0.1, 0.02, (200, 32, 32))).clip(0, 1)
        return from_arrays(f"lengths-{step}", images, length, classes=["length"])

    return Scenario("lengths", tuple(tuple(task(client, step) for step in range(tasks)) for client in range(clients)))
