"""The training loss and what counts as correct: cross entropy of classes, or a user-defined loss (`loss=file.py:Name`).

A user-defined loss derives from `Loss` and is created without arguments. `outputs` (batch, n) are the outputs of the
task's head, one column per class; `targets` are the labels of the scenario: int64 (batch,), or float32 (batch, n).
"""

from __future__ import annotations

import torch
from torch.nn import functional


class Loss:
    """Cross entropy of classes."""

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """The value to minimize: the mean over the examples of a batch (`reduction` mean), or their sum (`sum`)."""
        return functional.cross_entropy(outputs, targets, reduction=reduction)

    def correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """How correct each example is, (batch,) from 0 to 1; the mean is reported as accuracy."""
        return outputs.argmax(dim=1) == targets

    def predict(self, outputs: torch.Tensor) -> torch.Tensor:
        """Predictions for people, such as probabilities: for metrics, and in an exported model."""
        return torch.softmax(outputs, dim=1)
