"""What an installed package can add to weft by entry points (pyproject.toml): no fork, no file beside the plan."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import nn
from torch.nn import functional

from weft.methods.context import LocalTraining, TaskContext
from weft.methods.method import Method, MethodInfo, MethodOptions
from weft.methods.state import ClientState
from weft.networks.losses import Loss
from weft.randomness import generator
from weft.scenarios import Scenario
from weft.scenarios.arrays import from_arrays


class CautiousOptions(MethodOptions):
    longest: float = Field(1.0, gt=0)


class Cautious(Method):
    """Clip the norm of the gradient."""

    Options = CautiousOptions
    info = MethodInfo(citation="Pascanu et al., On the difficulty of training recurrent neural networks, 2013")
    options: CautiousOptions

    def prepare(self, training: LocalTraining, client: ClientState, ctx: TaskContext) -> None:
        gradient, longest = training.gradients["weights"], self.options.longest

        def clip() -> None:
            gradient.mul_(longest / gradient.norm().clamp(min=longest))

        training.penalties.append(clip)


def stripe(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, (5, 32)), nn.ReLU(), nn.Flatten())


def halves(clients: int, tasks: int, seed: int) -> Scenario:
    """Is the upper or the lower half bright?"""
    labels = np.arange(40) % 2
    images = generator(seed, "halves").integers(0, 60, size=(40, 32, 32), dtype=np.uint8)
    images[labels == 0, :16] += 150
    images[labels == 1, 16:] += 150
    task = from_arrays("halves", images, labels, classes=["upper", "lower"])
    return Scenario("halves", ((task,) * tasks,) * clients)


class Softened(Loss):
    """Cross entropy with labels that are only nearly sure."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        return functional.cross_entropy(outputs, targets, reduction=reduction, label_smoothing=0.1)


def doubt(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> float:
    """One minus the mean probability of the class that was chosen."""
    return float(1 - scores.max(1).mean())
