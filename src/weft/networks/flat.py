"""A network's weights as one vector.

Every formula of the paper is then a line of vector arithmetic, the same for any network, and the wire format, ledger
and checkpoint deal with one vector instead of a tree. The vector holds, in this order:

    [ weights of linear and convolution layers | all other parameters, biases above all | statistics | the heads ]
      0 .. layout.weights                        .. layout.body                                        .. layout.size

Only the first part is decomposed by FedWeIT, row by row: a row is one output unit. Statistics are what batch norm
counts while it trains, its means and variances; they move like weights do, but have no gradient. All up to layout.body
is the body, which tasks may share; what is behind it belongs to one task and never leaves its client. Statistics are
behind it where each task has its `own`, and belong to the body, as its last part, where they are `shared`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from weft.errors import WeftError
from weft.networks.batches import Batches
from weft.networks.losses import Loss
from weft.networks.probe import IMAGE, try_out
from weft.registry import Statistics

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
    statistics: tuple[int, int] = (0, 0)  # where they begin and end

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        return tuple((layer.rows, layer.width) for layer in self.layers)

    @property
    def rows(self) -> int:
        return sum(layer.rows for layer in self.layers)

    @property
    def shared_statistics(self) -> slice:
        """Where statistics stand among the biases that tasks share; empty where they are each task's own."""
        begin, end = (min(place, self.body) - self.weights for place in self.statistics)
        return slice(begin, end)

    def by_layer(self, vector: torch.Tensor) -> Iterator[tuple[Layer, torch.Tensor]]:
        """Each layer with its part of a vector of `weights` values, as a (rows, width) view."""
        for layer in self.layers:
            yield layer, vector[layer.span].view(layer.rows, layer.width)


class Network:
    """A body and heads whose parameters and statistics are views of `vector`, with their gradient in `gradient`.

    It is scratch memory, not state: whoever trains or tests writes `vector` first. Between calls the body is in eval
    mode, so that asking for `logits` changes nothing.
    """

    def __init__(
        self,
        body: nn.Module,
        features: int,
        heads: tuple[int, ...],
        device: str = "cpu",
        statistics: Statistics = "own",
        image: tuple[int, ...] = IMAGE,
        objective: Loss | None = None,
    ):
        """`heads` has the number of classes of each head: one, or several to learn several tasks at once."""
        self.objective = objective or Loss()
        self.body = body.to(device, torch.float32)
        self.heads, self.classes = heads, sum(heads)
        found, self.random = try_out(self.body, image)  # random: does the body itself draw numbers while it trains?
        weights = decomposed(self.body)
        taken = {id(weight) for weight in weights.values()}
        # what somebody froze stays as it is in the module, and out of the vector
        rest = [each for each in self.body.parameters() if each.requires_grad and id(each) not in taken]
        counted = [module.get_buffer(name) for module, name in found]
        head = [nn.Parameter(torch.zeros(self.classes, features)), nn.Parameter(torch.zeros(self.classes))]
        self.parameters = [*weights.values(), *rest, *head]
        self.layout = lay_out(weights, rest, counted, head, statistics)

        self.vector = torch.zeros(self.layout.size, device=device)
        self.gradient = torch.zeros(self.layout.size, device=device)
        self._pieces: list[torch.Tensor] = []  # of the gradient, one for each parameter
        place = 0
        for each in [*weights.values(), *rest, *counted, *head]:
            span = slice(place, place + each.numel())
            view = self.vector[span].view(each.shape)
            view.copy_(each.detach())
            # a leaf of its own that shares the vector's storage: a slice's gradient would be as large as the vector
            each.data = view
            if each.requires_grad:
                self._pieces.append(self.gradient[span].view(each.shape))
            place = span.stop
        self._statistics = [(module, name, module.get_buffer(name)) for module, name in found]
        self._head_weight, self._head_bias = head
        self._head_of = torch.repeat_interleave(torch.tensor(heads)).to(device)  # (classes,), a class's head
        self._made = self.vector[: self.layout.statistics[1]].cpu().clone()  # before anybody trains in here
        self._dropout = Dropout()
        first = next(iter(weights), "").removesuffix(".weight")  # it sees the images, of which nothing is dropped
        for name, module in self.body.named_modules():
            if isinstance(module, nn.Linear) and name != first:
                module.register_forward_pre_hook(self._dropout.before)

    def initial_body(self, rng: np.random.Generator) -> torch.Tensor:
        """A fresh body: weights by variance scaling (appendix A), biases 0, anything else as its module made it."""
        start = self._made[: self.layout.body].clone()
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
        """All that comes behind the body: statistics if they are a task's own, then fresh heads, one after another."""
        features = self._head_weight.shape[1]
        weights = [variance_scaling((classes, features), rng).view(-1) for classes in self.heads]
        return torch.cat([self._made[self.layout.body :], *weights, torch.zeros(self.classes)])

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._dropout(self.body(images)), self._head_weight, self._head_bias)

    def within_head(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Logits (batch, classes) without those of other heads than the label's. Labels count through all heads."""
        if len(self.heads) == 1:
            return logits
        other = self._head_of[labels][:, None] != self._head_of  # (batch, 1) != (classes,)
        return logits.masked_fill(other, -math.inf)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """What is minimised, usually cross entropy, within the head of each label."""
        return self.objective.loss(self.within_head(logits, labels), labels, reduction)

    def compute_gradient(self, images: torch.Tensor, labels: torch.Tensor, dropout: float = 0.0) -> float:
        """The mean cross entropy of a batch; its gradient by every value of `vector` is left in `gradient`.

        `dropout` is the share of their input that linear layers and heads drop, drawn from torch's global generator.
        """
        with self._learning(dropout):
            try:
                loss = self.loss(self.logits(images), labels)
            except ValueError as error:
                if len(images) > 1 or not self._statistics:
                    raise
                raise WeftError(
                    f"a batch of 1 image is too small for batch norm; change batch_size ({error})"
                ) from error
            pieces = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for place, piece in zip(self._pieces, pieces, strict=True):
            if piece is None:  # a parameter that the module has but does not use
                place.zero_()
            else:
                place.copy_(piece)
        self.hold_statistics()
        self._keep_statistics()
        return loss.item()

    @torch.no_grad()
    def recount(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Statistics counted anew for the weights as they are: forward passes as in training, and nothing learned."""
        with self._learning(dropout=0.0):
            for images, _ in batches:
                self.body(images)
        self._keep_statistics()

    def hold_statistics(self) -> None:
        """Counted and not learned: a penalty on all that is shared must not move them."""
        begin, end = self.layout.statistics
        if begin < end:
            self.gradient[begin:end] = 0

    @contextmanager
    def _learning(self, dropout: float) -> Iterator[None]:
        self._dropout.share = dropout
        self.body.train()
        try:
            yield
        finally:
            self._dropout.share = 0.0
            self.body.eval()

    def _keep_statistics(self) -> None:
        """A module may write `self.mean = 0.9 * self.mean + ...`: a new tensor, whose values belong into the vector."""
        for module, name, view in self._statistics:
            if (now := module._buffers[name]) is not view and now is not None:
                view.copy_(now.detach())
                module._buffers[name] = view

    @torch.no_grad()
    def measure(self, data: Batches) -> tuple[float, float]:
        """Accuracy and mean loss on a whole split."""
        self.body.eval()
        right, loss, count = 0.0, 0.0, 0
        for images, labels in data.in_order(chunk=128):
            logits = self.within_head(self.logits(images), labels)
            loss += self.objective.loss(logits, labels, "sum").item()
            right += self.objective.right(logits, labels).sum().item()
            count += len(labels)
        return right / count, loss / count

    @torch.no_grad()
    def answers(self, data: Batches) -> torch.Tensor:
        """What a person wants to read, such as probabilities, for all images of a split: (count, classes)."""
        self.body.eval()
        found = [self.within_head(self.logits(images), labels) for images, labels in data.in_order(chunk=128)]
        return self.objective.answer(torch.cat(found))


def decomposed(body: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of linear and convolution layers by name, each once, also where layers share it."""
    found: dict[str, nn.Parameter] = {}
    for name, module in body.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            weight = module._parameters.get("weight")  # a reparametrised layer has none, but computes it from others
            if weight is not None and weight.requires_grad and all(weight is not other for other in found.values()):
                found[f"{name}.weight"] = weight
    return found


def lay_out(
    weights: dict[str, nn.Parameter],
    rest: list[nn.Parameter],
    counted: list[torch.Tensor],
    head: list[nn.Parameter],
    statistics: Statistics,
) -> Layout:
    layers, offset, row = [], 0, 0
    for name, weight in weights.items():
        layers.append(Layer(name, tuple(weight.shape), offset, row))
        offset, row = offset + weight.numel(), row + weight.shape[0]
    begin = offset + sum(each.numel() for each in rest)
    end = begin + sum(each.numel() for each in counted)
    size = end + sum(each.numel() for each in head)
    return Layout(tuple(layers), offset, end if statistics == "shared" else begin, size, (begin, end))


class Dropout:
    """Drops a share of what goes into the linear layers and the heads; usually nothing.

    One object for all layers. It does not know the network: a circle would keep a large one in memory for longer.
    """

    share = 0.0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values, self.share) if self.share else values

    def before(self, layer: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(self(each) for each in given)


def variance_scaling(shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Weights from a normal of variance 1 / fan-in, cut at two deviations and widened to make up for the cut."""
    count = math.prod(shape)
    values = rng.standard_normal(count)
    while len(outside := np.flatnonzero(np.abs(values) > 2.0)):
        values[outside] = rng.standard_normal(len(outside))
    deviation = math.sqrt(1.0 / math.prod(shape[1:])) / TRUNCATED_DEVIATION
    return torch.from_numpy((values * deviation).astype(np.float32)).clone().view(shape)
