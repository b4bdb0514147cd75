"""A network's weights as one vector.

Every formula of the paper is then a line of vector arithmetic, the same for any network, and the wire format, ledger
and checkpoint deal with one vector instead of a tree. The vector holds, in this order:

    [ weights of linear and convolution layers | all other parameters, biases above all | the task's head ]
      0 .. layout.weights                        .. layout.body                           .. layout.size

Only the first part is decomposed by FedWeIT, row by row: a row is one output unit. The first two parts are the body,
which tasks may share; the head belongs to one task and never leaves its client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from weft.scenarios import Split

# A unit-variance normal cut at two deviations has this deviation: variance scaling divides by it.
TRUNCATED_DEVIATION = 0.87962566103423978


@dataclass(frozen=True)
class Layer:
    """Where one weight matrix lies in the vector; `rows` are its output units, `width` the values of each."""

    name: str
    shape: tuple[int, ...]
    offset: int
    first_row: int

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.rows * self.width)

    @property
    def row_span(self) -> slice:
        return slice(self.first_row, self.first_row + self.rows)


@dataclass(frozen=True)
class Layout:
    """The plan of the vector: its decomposable layers, then how many values the other parts have."""

    layers: tuple[Layer, ...]
    weights: int
    body: int
    size: int

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        return tuple((layer.rows, layer.width) for layer in self.layers)

    @property
    def rows(self) -> int:
        return sum(layer.rows for layer in self.layers)

    def by_layer(self, vector: torch.Tensor) -> Iterator[tuple[Layer, torch.Tensor]]:
        """Each layer with its part of a vector of `weights` values, as a (rows, width) view."""
        for layer in self.layers:
            yield layer, vector[layer.span].view(layer.rows, layer.width)


class Network:
    """A body and one task's head whose parameters are views of `vector`, with their gradient in `gradient`.

    It is scratch memory, not state: whoever trains or tests writes `vector` first.
    """

    def __init__(self, body: nn.Module, features: int, classes: int, device: str = "cpu"):
        self.body = body.to(device)
        self.classes = classes
        decomposed: list[tuple[str, torch.Tensor]] = [
            (f"{name}.weight", module.weight)
            for name, module in self.body.named_modules()
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d))
        ]
        taken = {id(weight) for _, weight in decomposed}
        rest: list[torch.Tensor] = [each for each in self.body.parameters() if id(each) not in taken]
        head: list[torch.Tensor] = [nn.Parameter(torch.zeros(classes, features)), nn.Parameter(torch.zeros(classes))]
        self.parameters = [weight for _, weight in decomposed] + rest + head

        layers, offset, row = [], 0, 0
        for name, weight in decomposed:
            layers.append(Layer(name, tuple(weight.shape), offset, row))
            offset, row = offset + weight.numel(), row + weight.shape[0]
        body_size = offset + sum(parameter.numel() for parameter in rest)
        size = body_size + sum(parameter.numel() for parameter in head)
        self.layout = Layout(tuple(layers), offset, body_size, size)

        self.vector = torch.zeros(size, device=device)
        self.gradient = torch.zeros(size, device=device)
        place = 0
        for parameter in self.parameters:
            view = self.vector[place : place + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            # a leaf of its own that shares the vector's storage: a slice's gradient would be as large as the vector
            parameter.data = view
            place += parameter.numel()
        self._head_weight, self._head_bias = head
        self._made = self.vector[:body_size].cpu().clone()  # as the modules made it, before anybody trains in here

    def initial_body(self, rng: np.random.Generator) -> torch.Tensor:
        """A fresh body: weights by variance scaling (appendix A), biases 0, anything else as its module made it."""
        start = self._made.clone()
        for layer in self.layout.layers:
            start[layer.span] = variance_scaling(layer.shape, rng).view(-1)
        place = self.layout.weights
        biases = {id(getattr(module, "bias", None)) for module in self.body.modules()}
        for parameter in self.parameters[len(self.layout.layers) : -2]:
            if id(parameter) in biases:
                start[place : place + parameter.numel()] = 0
            place += parameter.numel()
        return start

    def initial_head(self, rng: np.random.Generator) -> torch.Tensor:
        start = torch.zeros(self.layout.size - self.layout.body)
        start[: self._head_weight.numel()] = variance_scaling(tuple(self._head_weight.shape), rng).view(-1)
        return start

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.body(images), self._head_weight, self._head_bias)

    def compute_gradient(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """The mean cross entropy of a batch; its gradient by every value of `vector` is left in `gradient`."""
        loss = functional.cross_entropy(self.logits(images), labels)
        pieces = torch.autograd.grad(loss, self.parameters)
        torch.cat([piece.reshape(-1) for piece in pieces], out=self.gradient)
        return loss.item()

    @torch.no_grad()
    def measure(self, data: Batches) -> tuple[float, float]:
        """Accuracy and mean cross entropy on a whole split."""
        right, loss, count = 0, 0.0, 0
        for images, labels in data.in_order(chunk=128):
            logits = self.logits(images)
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            right += int((logits.argmax(dim=1) == labels).sum())
            count += len(labels)
        return right / count, loss / count


class Batches:
    """A split's uint8 images on a device, normalised batch by batch on their way into the network."""

    def __init__(self, split: Split, mean: tuple[float, ...], deviation: tuple[float, ...], device: str = "cpu"):
        self.images = torch.from_numpy(split.images).to(device)  # uint8 (count, height, width, channels)
        self.labels = torch.from_numpy(split.labels).to(device)
        self._mean = torch.tensor(mean, device=device)
        self._deviation = torch.tensor(deviation, device=device)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._normalise(self.images[chosen]), self.labels[chosen]

    def in_order(self, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, len(self), chunk):
            part = slice(start, start + chunk)
            yield self._normalise(self.images[part]), self.labels[part]

    def _normalise(self, images: torch.Tensor) -> torch.Tensor:
        scaled = images.float().sub_(self._mean).div_(self._deviation)
        return scaled.permute(0, 3, 1, 2)  # (batch, channels, height, width), channels last in memory


def variance_scaling(shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Weights from a normal of variance 1 / fan-in, cut at two deviations and widened to make up for the cut."""
    count = math.prod(shape)
    values = rng.standard_normal(count)
    while len(outside := np.flatnonzero(np.abs(values) > 2.0)):
        values[outside] = rng.standard_normal(len(outside))
    deviation = math.sqrt(1.0 / math.prod(shape[1:])) / TRUNCATED_DEVIATION
    return torch.from_numpy((values * deviation).astype(np.float32)).clone().view(shape)
