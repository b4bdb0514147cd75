"""What is minimised, and what counts as right: cross entropy of classes, or somebody's own by `loss=file.py:Name`.

A loss of your own derives from `Loss` and is made without arguments. `outputs` (batch, n) is what the task's head
gives, one column for each of its classes; `targets` is what the scenario has as labels: int64 (batch,), or float32
(batch, n).
"""

from __future__ import annotations

import torch
from torch.nn import functional


class Loss:
    """Cross entropy of classes."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """What is minimised: the mean over the examples of a batch (`reduction` mean), or their sum (`sum`)."""
        return functional.cross_entropy(outputs, targets, reduction=reduction)

    def right(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How right each example is, (batch,) from 0 to 1; the mean is reported as accuracy."""
        return outputs.argmax(dim=1) == targets

    def answer(self, outputs: torch.Tensor) -> torch.Tensor:
        """What a person wants to read, such as probabilities: for metrics, and in an exported model."""
        return torch.softmax(outputs, dim=1)
