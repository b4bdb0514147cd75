"""A network's weights as one vector.

Every formula of the paper is then one line of vector arithmetic, the same for any network, and the wire format, ledger
and checkpoint handle one vector instead of a tree. The vector holds, in this order:

    [ weights of linear and convolution layers | all other parameters, mostly biases | statistics | heads ]
      0 .. layout.weights                        .. layout.body                                   .. layout.size

FedWeIT decomposes only the first part, row by row: a row is one output unit. Statistics are the running means and
variances of batch norm; they are handled like weights, but have no gradient. Everything up to layout.body is the body,
which tasks may share; what follows belongs to one task and never leaves its client. Statistics follow the body if each
task has its `own`; they are the last part of the body if they are `shared`.
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
from weft.registry import Statistics, error_line

IMAGE = (3, 32, 32)  # every scenario resizes its images to this

# The standard deviation of a unit normal truncated at two deviations: variance scaling divides by it.
TRUNCATED_DEVIATION = 0.87962566103423978


@dataclass(frozen=True)
class Layer:
    """Position of one weight matrix in the vector; `rows` are its output units, `width` the values of each."""

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
    """Structure of the vector: its decomposable layers and where the other parts end."""

    layers: tuple[Layer, ...]
    weights: int
    body: int
    size: int
    statistics: tuple[int, int] = (0, 0)  # first and end index
    features: int = 0  # of the body: a class has as many weights in a head, and a bias

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        return tuple((layer.rows, layer.width) for layer in self.layers)

    @property
    def rows(self) -> int:
        return sum(layer.rows for layer in self.layers)

    @property
    def head(self) -> int:
        """Where heads begin: after the statistics."""
        return self.statistics[1]

    @property
    def biases(self) -> int:
        """The number of biases, and other values of the body that are not decomposed."""
        return self.body - self.weights

    @property
    def shared_statistics(self) -> slice:
        """Position of statistics among the biases that tasks share; empty if each task has its own."""
        return slice(*(min(index, self.body) - self.weights for index in self.statistics))

    def by_layer(self, vector: torch.Tensor) -> Iterator[tuple[Layer, torch.Tensor]]:
        """Each layer with its slice of a vector of `weights` values, as a (rows, width) view."""
        for layer in self.layers:
            yield layer, vector[layer.span].view(layer.rows, layer.width)


class Network:
    """A body and heads whose parameters and statistics are views of `vector`, with their gradient in `gradient`.

    It is scratch memory, not state: write `vector` before training or testing. Between calls the body is in eval mode,
    so that computing `logits` changes nothing.
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
        """`heads` has the number of classes of each head: one head, or several to train on several tasks at once."""
        self.objective = objective or Loss()
        self.body = body.to(device, torch.float32)
        self.heads, self.classes = heads, sum(heads)
        buffers, self.random = probe(self.body, image)  # random: does the body draw random numbers in training?
        weights = decomposed_weights(self.body)
        decomposed = {id(weight) for weight in weights.values()}
        # frozen parameters stay in the module and out of the vector
        rest = [each for each in self.body.parameters() if each.requires_grad and id(each) not in decomposed]
        running = [module.get_buffer(name) for module, name in buffers]
        head = [nn.Parameter(torch.zeros(self.classes, features)), nn.Parameter(torch.zeros(self.classes))]
        self.parameters = [*weights.values(), *rest, *head]
        self.layout = make_layout(weights, rest, running, head, statistics)

        self.vector = torch.zeros(self.layout.size, device=device)
        self.gradient = torch.zeros(self.layout.size, device=device)
        self._gradient_views: list[torch.Tensor] = []  # one for each parameter
        offset = 0
        for each in [*weights.values(), *rest, *running, *head]:
            span = slice(offset, offset + each.numel())
            view = self.vector[span].view(each.shape)
            view.copy_(each.detach())
            # a separate leaf that shares the vector's storage: a slice's gradient would be as large as the vector
            each.data = view
            if each.requires_grad:
                self._gradient_views.append(self.gradient[span].view(each.shape))
            offset = span.stop
        self._statistics = [(module, name, module.get_buffer(name)) for module, name in buffers]
        self._head_weight, self._head_bias = head
        self._head_of = torch.repeat_interleave(torch.tensor(heads)).to(device)  # (classes,): the head of each class
        self._initial = self.vector[: self.layout.statistics[1]].cpu().clone()  # before any training
        self._dropout = Dropout()
        first = next(iter(weights), "").removesuffix(".weight")  # its input are the images: no dropout
        for name, module in self.body.named_modules():
            if isinstance(module, nn.Linear) and name != first:
                module.register_forward_pre_hook(self._dropout.before_layer)

    def initial_body(self, rng: np.random.Generator) -> torch.Tensor:
        """A new body: weights by variance scaling (appendix A), biases 0, the rest as its module initialized it."""
        start = self._initial[: self.layout.body].clone()
        for layer in self.layout.layers:
            start[layer.span] = variance_scaling(layer.shape, rng).view(-1)
        offset = self.layout.weights
        biases = {id(getattr(module, "bias", None)) for module in self.body.modules()}
        for parameter in self.parameters[len(self.layout.layers) : -2]:
            if id(parameter) in biases:
                start[offset : offset + parameter.numel()] = 0
            offset += parameter.numel()
        return start

    @property
    def initial_statistics(self) -> torch.Tensor:
        """Statistics before any training, where each task has its own."""
        return self._initial[self.layout.body :]

    def initial_head(self, rng: np.random.Generator) -> torch.Tensor:
        """Everything after the body: statistics if each task has its own, then new heads, one after another."""
        features = self._head_weight.shape[1]
        weights = [variance_scaling((classes, features), rng).view(-1) for classes in self.heads]
        return torch.cat([self.initial_statistics, *weights, torch.zeros(self.classes)])

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._dropout(self.body(images)), self._head_weight, self._head_bias)

    def within_head(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Logits (batch, classes), masked outside the head of each label. Labels are numbered across all heads."""
        if len(self.heads) == 1:
            return logits
        other = self._head_of[labels][:, None] != self._head_of  # (batch, 1) != (classes,)
        return logits.masked_fill(other, -math.inf)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """The value to minimize, usually cross entropy, within the head of each label."""
        return self.objective.loss(self.within_head(logits, labels), labels, reduction)

    def compute_gradient(self, images: torch.Tensor, labels: torch.Tensor, dropout: float = 0.0) -> float:
        """Return the mean loss of a batch and write its gradient by every value of `vector` into `gradient`.

        `dropout` is the rate at the input of linear layers and heads, drawn from torch's global generator.
        """
        with self._train_mode(dropout):
            try:
                loss = self.loss(self.logits(images), labels)
            except ValueError as error:
                if len(images) > 1 or not self._statistics:
                    raise
                cause = "a batch of 1 image is too small for batch norm"
                raise WeftError(f"{cause}; change batch_size ({error})") from error
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for view, gradient in zip(self._gradient_views, gradients, strict=True):
            if gradient is None:  # a parameter that the module has but does not use
                view.zero_()
            else:
                view.copy_(gradient)
        self.hold_statistics()
        self._restore_views()
        return loss.item()

    @torch.no_grad()
    def recount(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Update statistics for the current weights: forward passes in training mode, without any gradient."""
        with self._train_mode(dropout=0.0):
            for images, _ in batches:
                self.body(images)
        self._restore_views()

    def hold_statistics(self) -> None:
        """Set the gradient of statistics to 0, so that a penalty on all shared values does not change them."""
        begin, end = self.layout.statistics
        if begin < end:
            self.gradient[begin:end] = 0

    @contextmanager
    def _train_mode(self, dropout: float) -> Iterator[None]:
        self._dropout.rate = dropout
        self.body.train()
        try:
            yield
        finally:
            self._dropout.rate = 0.0
            self.body.eval()

    def _restore_views(self) -> None:
        """Copy statistics into the vector where a module assigned a new tensor (`self.mean = 0.9 * self.mean`)."""
        for module, name, view in self._statistics:
            if (buffer := module._buffers[name]) is not view and buffer is not None:
                view.copy_(buffer.detach())
                module._buffers[name] = view

    @torch.no_grad()
    def measure(self, data: Batches) -> tuple[float, float]:
        """Accuracy and mean loss on a whole split."""
        self.body.eval()
        correct, loss, count = 0.0, 0.0, 0
        for images, labels in data.in_order(chunk=128):
            logits = self.within_head(self.logits(images), labels)
            loss += self.objective.loss(logits, labels, "sum").item()
            correct += self.objective.correct(logits, labels).sum().item()
            count += len(labels)
        return correct / count, loss / count

    @torch.no_grad()
    def predictions(self, data: Batches) -> torch.Tensor:
        """Predictions such as probabilities for all images of a split: (count, classes)."""
        self.body.eval()
        logits = [self.within_head(self.logits(images), labels) for images, labels in data.in_order(chunk=128)]
        return self.objective.predict(torch.cat(logits))


def decomposed_weights(body: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of linear and convolution layers by name; a weight that layers share appears once."""
    found: dict[str, nn.Parameter] = {}
    for name, module in body.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            weight = module._parameters.get("weight")  # None if the layer is reparametrized
            if weight is not None and weight.requires_grad and all(weight is not other for other in found.values()):
                found[f"{name}.weight"] = weight
    return found


def make_layout(
    weights: dict[str, nn.Parameter],
    rest: list[nn.Parameter],
    running: list[torch.Tensor],
    head: list[nn.Parameter],
    statistics: Statistics,
) -> Layout:
    layers, offset, row = [], 0, 0
    for name, weight in weights.items():
        layers.append(Layer(name, tuple(weight.shape), offset, row))
        offset, row = offset + weight.numel(), row + weight.shape[0]
    begin = offset + sum(each.numel() for each in rest)
    end = begin + sum(each.numel() for each in running)
    size = end + sum(each.numel() for each in head)
    body, features = end if statistics == "shared" else begin, head[0].shape[1]
    return Layout(tuple(layers), offset, body, size, (begin, end), features)


class Dropout:
    """Dropout at the input of linear layers and heads; usually off.

    One object for all layers. It has no reference to the network: a cycle would keep a large one in memory for longer.
    """

    rate = 0.0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return functional.dropout(values, self.rate) if self.rate else values

    def before_layer(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(self(each) for each in inputs)


def variance_scaling(shape: tuple[int, ...], rng: np.random.Generator) -> torch.Tensor:
    """Weights from a normal of variance 1 / fan-in, truncated at two deviations and scaled to keep the variance."""
    count = math.prod(shape)
    values = rng.standard_normal(count)
    while len(outside := np.flatnonzero(np.abs(values) > 2.0)):
        values[outside] = rng.standard_normal(len(outside))
    deviation = math.sqrt(1.0 / math.prod(shape[1:])) / TRUNCATED_DEVIATION
    return torch.from_numpy((values * deviation).astype(np.float32)).clone().view(shape)


# ---- probing a body: by its behavior and not its class, so that user-defined norms and dropout are found too ---------


def count_features(body: nn.Module, image: tuple[int, ...] = IMAGE) -> int:
    """The n of a body's output (batch, n). Lazy modules infer their sizes here."""
    return _features(body.eval(), image).shape[1]


def probe(body: nn.Module, image: tuple[int, ...] = IMAGE) -> tuple[list[tuple[nn.Module, str]], bool]:
    """The float buffers that training changes, as (module, name), and whether training draws random numbers.

    Runs one forward pass in training mode and restores everything.
    """
    for name, module in body.named_modules():
        tracks = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if tracks and module.momentum is None:  # a mean over all batches, which num_batches_tracked counts
            raise WeftError(f"batch norm {name!r} has momentum=None, which is not supported; choose one such as 0.1")
    pairs = [(prefix, module, name) for prefix, module in body.named_modules() for name in module._buffers]
    owners = {f"{prefix}.{name}".lstrip("."): (module, name) for prefix, module, name in pairs}
    buffers = dict(body.named_buffers())  # a tensor that modules share appears once
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    with torch.random.fork_rng(devices=[]):
        state = torch.random.get_rng_state()
        _features(body.train(), image)
        random = not torch.equal(torch.random.get_rng_state(), state)
    body.eval()
    changed = []
    for name, old in before.items():
        owner, attribute = owners[name]
        new = owner._buffers[attribute]
        if new is not None and new.shape == old.shape and torch.equal(new, old):
            continue
        buffers[name].copy_(old)
        owner._buffers[attribute] = buffers[name]
        if attribute == "num_batches_tracked":  # only momentum=None reads it
            continue
        if new is None or new.shape != old.shape or not old.is_floating_point():
            raise WeftError(f"training changes buffer {name!r}, which cannot be kept; use a float one of fixed shape")
        changed.append((owner, attribute))
    return changed, random


@torch.no_grad()
def _features(body: nn.Module, image: tuple[int, ...]) -> torch.Tensor:
    shape = (2, *image)  # batch norm needs two images
    device = next((tensor.device for tensor in [*body.parameters(), *body.buffers()]), torch.device("cpu"))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    if len(image) == 3:
        images = images.contiguous(memory_format=torch.channels_last)
    try:
        features = body(images)
    except Exception as error:
        raise WeftError(f"it fails on images of shape {shape}: {error_line(error)}") from error
    expected = f"for images of shape {shape}; expected features of shape ({shape[0]}, n)"
    if not isinstance(features, torch.Tensor):
        raise WeftError(f"it returned a {type(features).__name__} {expected}")
    if features.dim() != 2 or features.shape[0] != shape[0] or not features.shape[1]:
        raise WeftError(f"it returned shape {tuple(features.shape)} {expected}: flatten or average the rest")
    return features
