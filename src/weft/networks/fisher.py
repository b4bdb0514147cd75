"""The diagonal of the empirical Fisher information, for whole batches at a time.

    F_j = 1/N * sum over examples n of (d log p(label_n | image_n) / d vector_j)^2

The square stands inside the sum: the square of a batch's mean gradient is something else, smaller and with its noise
averaged away. Plainly this takes a backward pass for each image. But an example's gradient by a layer's weight follows
from what the layer was given and from the gradient by its output, and both are there for the whole batch after one
forward and one backward pass. A parameter whose uses are not all understood this way takes the plain way, it alone.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional

from weft.errors import WeftError
from weft.networks.flat import Network

Squares = tuple[torch.Tensor, torch.Tensor]  # by weight and by bias, each summed over the examples
Rule = Callable[[torch.Tensor, torch.Tensor, int], Squares]  # of a layer's input, the gradient by its output, memory


class Call(NamedTuple):
    """A layer's one call in a forward pass."""

    rule: Rule
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    given: torch.Tensor
    edge: GradientEdge  # the output as autograd knows it, which stays valid if a ReLU then overwrites it in place


class Pass(NamedTuple):
    loss: torch.Tensor
    calls: dict[object, Call]  # by module; layers that were called once, and the head
    uses: dict[int, list[Any]]  # by a parameter's id: the nodes of the graph that use it


def fisher(
    network: Network, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], memory: int = 64 << 20
) -> torch.Tensor:
    """The mean over all examples of the squared gradient of log p(label | image) by each value of `network.vector`.

    Values that no gradient reaches get 0. Layers whose gradients for single examples are large go through the batch
    in parts of about `memory` bytes.
    """
    total, count = torch.zeros(network.layout.size, device=network.vector.device, dtype=network.vector.dtype), 0
    for name, module in network.body.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise WeftError(
                f"{name} normalises by its batch, so that no image has a gradient of its own; "
                "build it with track_running_stats=True"
            )
    modes = [(module, module.training) for module in network.body.modules()]  # a body may be frozen in part
    network.body.eval()
    try:
        with torch.enable_grad():
            for images, labels in batches:
                if len(labels):
                    _add_batch(total, network, images, labels, memory)
                count += len(labels)
    finally:
        for module, mode in modes:
            module.training = mode
    if not count:
        raise WeftError("the Fisher information is a mean over examples and there are none; give at least one")
    return total.div_(count)


def total_loss(network: Network, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p(label | image), summed: in a mean each example's gradient would be divided by the size of its batch."""
    return network.loss(network.logits(images), labels, reduction="sum")


def _add_batch(total: torch.Tensor, network: Network, images: torch.Tensor, labels: torch.Tensor, memory: int) -> None:
    places = {id(each): each.storage_offset() - network.vector.storage_offset() for each in network.parameters}

    def add(parameter: torch.Tensor, squares: torch.Tensor) -> None:
        place = places[id(parameter)]
        total[place : place + parameter.numel()] += squares.reshape(-1)

    made = _forward(network, images, labels)
    calls = _by_example(network, made, images, labels)
    once = {key for key, nodes in made.uses.items() if len(nodes) == 1 and key in places}
    understood = {id(each) for call in calls for each in (call.weight, call.bias)} & once
    rest = {key: each for each in network.parameters if (key := id(each)) in made.uses and key not in understood}
    if calls:
        # by the outputs alone: autograd then leaves out the batch's gradient by the weights
        gradients = torch.autograd.grad(made.loss, [call.edge for call in calls], allow_unused=True)
        for call, by_output in zip(calls, gradients, strict=True):
            wanted = [id(each) in understood for each in (call.weight, call.bias)]
            if by_output is None or not any(wanted):
                continue
            with torch.no_grad():
                squares = call.rule(call.given, by_output, memory)
            for parameter, mine, its_squares in zip((call.weight, call.bias), wanted, squares, strict=True):
                if parameter is not None and mine:
                    add(parameter, its_squares)
    if not rest:
        return
    for place in range(len(labels)):
        # an image's own small graph: each pass backward through the batch's would take as long as the whole batch
        loss = total_loss(network, images[place : place + 1], labels[place : place + 1])
        pieces = torch.autograd.grad(loss, list(rest.values()), allow_unused=True)
        for parameter, piece in zip(rest.values(), pieces, strict=True):
            if piece is not None:
                add(parameter, piece.square())


def _by_example(network: Network, made: Pass, images: torch.Tensor, labels: torch.Tensor) -> list[Call]:
    """The calls whose first dimension counts the examples: with one image it is 1, and the others are the same.

    The length alone does not tell: tokens that stand first, or the rows of a table of positions, may by chance be as
    many as the batch's images.
    """
    alone = made if len(labels) == 1 else _forward(network, images[:1], labels[:1])
    shapes = {key: call.given.shape for key, call in alone.calls.items()}
    return [
        call
        for key, call in made.calls.items()
        if key in shapes and shapes[key][0] == 1 and call.given.shape == (len(labels), *shapes[key][1:])
    ]


# ---- what happened in the forward pass -------------------------------------------------------------------------------


def _forward(network: Network, images: torch.Tensor, labels: torch.Tensor) -> Pass:
    noted: dict[nn.Module, list[Call | None]] = defaultdict(list)

    def note(module: nn.Module, given: tuple[Any, ...], out: torch.Tensor) -> None:
        if not given or out.grad_fn is None:
            noted[module].append(None)
            return
        parameters = module._parameters  # weight normalisation and its like put something else in a parameter's place
        rule = functools.partial(RULES[type(module)], module)
        edge = get_gradient_edge(out)
        noted[module].append(Call(rule, parameters.get("weight"), parameters.get("bias"), given[0].detach(), edge))

    # the type itself, since a subclass may compute something else; first in line, before a hook that changes the output
    layers = [module for module in network.body.modules() if type(module) in RULES]
    hooks = [module.register_forward_hook(note, prepend=True) for module in layers]
    try:
        loss = total_loss(network, images, labels)
    finally:
        for hook in hooks:
            hook.remove()
    nodes, uses = _graph(loss)
    calls: dict[object, Call] = {}
    for module, several in noted.items():
        call = several[0]
        if len(several) == 1 and call is not None and call.edge.node in nodes:
            calls[module] = call
    if (head := _head(network, uses)) is not None:
        calls["head"] = head
    return Pass(loss, calls, uses)


def _graph(loss: torch.Tensor) -> tuple[set[Any], dict[int, list[Any]]]:
    """All nodes that the loss depends on, and for each parameter (by id) those that use it, once for each use.

    Calls of modules do not tell this: a weight may be used without its module, or a module's output by nobody.
    """
    nodes: set[Any] = {loss.grad_fn} - {None}
    uses: dict[int, list[Any]] = defaultdict(list)
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        for source, _ in node.next_functions:
            if type(source).__name__ == "AccumulateGrad":
                uses[id(source.variable)].append(node)
            elif source is not None and source not in nodes:
                nodes.add(source)
                waiting.append(source)
    return nodes, uses


def _head(network: Network, uses: dict[int, list[Any]]) -> Call | None:
    """The head, which is no module, found in the graph: functional.linear is addmm(bias, features, weight^T)."""
    weight, bias = network._head_weight, network._head_bias
    by_weight, by_bias = uses.get(id(weight), []), uses.get(id(bias), [])
    if len(by_weight) != 1 or len(by_bias) != 1:
        return None
    transposed, product = by_weight[0], by_bias[0]
    if type(transposed).__name__ != "TBackward0" or type(product).__name__ != "AddmmBackward0":
        return None
    if product.next_functions[2][0] is not transposed:
        return None
    features = product._saved_mat1.detach()  # (batch, features)
    return Call(functools.partial(_linear, None), weight, bias, features, GradientEdge(product, 0))


# ---- from a layer's input and the gradient by its output to the squares ----------------------------------------------


def _linear(_: nn.Linear | None, given: torch.Tensor, by_output: torch.Tensor, memory: int) -> Squares:
    if given.ndim == 2:
        # an example's gradient is an outer product, and the square of a product is the product of squares
        squares = by_output.square()
        return squares.T @ given.square(), squares.sum(0)  # (out, batch) @ (batch, in)
    given, by_output = given.flatten(1, -2), by_output.flatten(1, -2)  # (batch, tokens, in), (batch, tokens, out)
    weight = given.new_zeros(by_output.shape[2], given.shape[2])
    for part in _parts(given, weight.numel(), memory):
        each = torch.bmm(by_output[part].mT, given[part])  # (part, out, tokens) @ (part, tokens, in)
        weight += each.square_().sum(0)
    return weight, by_output.sum(1).square_().sum(0)


def _convolution(layer: nn.Conv1d | nn.Conv2d, given: torch.Tensor, by_output: torch.Tensor, memory: int) -> Squares:
    groups, places = layer.groups, math.prod(by_output.shape[2:])
    rows, width = layer.out_channels // groups, layer.weight[0].numel()
    by_output = by_output.reshape(-1, groups, rows, places)
    # both sides of each dimension, the last dimension first, and 'same' worked out: as the layer pads by itself
    sides = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    kernel, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
    if given.ndim == 3:  # unfold knows images alone: a sequence is an image one pixel high
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    weight = given.new_zeros(groups, rows, width)
    for part in _parts(given, groups * width * places + weight.numel(), memory):
        padded = functional.pad(given[part], sides, mode)
        images = padded.unsqueeze(2) if padded.ndim == 3 else padded  # (part, channels, height, width)
        patches = functional.unfold(images, kernel, dilation, 0, stride).view(-1, groups, width, places)
        each = by_output[part] @ patches.mT  # (part, groups, rows, places) @ (part, groups, places, width)
        weight += each.square_().sum(0)
    return weight, by_output.sum(3).square_().sum(0)


def _layer_norm(layer: nn.LayerNorm, given: torch.Tensor, by_output: torch.Tensor, _: int) -> Squares:
    normal = functional.layer_norm(given, layer.normalized_shape, eps=layer.eps)
    shape = (len(given), -1, *layer.normalized_shape)  # (batch, tokens, normalised...)
    return _affine(normal.reshape(shape), by_output.reshape(shape), 1)


def _group_norm(layer: nn.GroupNorm, given: torch.Tensor, by_output: torch.Tensor, _: int) -> Squares:
    normal = functional.group_norm(given, layer.num_groups, eps=layer.eps)
    return _affine(_by_channel(normal), _by_channel(by_output), 2)


def _batch_norm(layer: nn.BatchNorm2d, given: torch.Tensor, by_output: torch.Tensor, _: int) -> Squares:
    normal = functional.batch_norm(given, layer.running_mean, layer.running_var, eps=layer.eps)
    return _affine(_by_channel(normal), _by_channel(by_output), 2)


def _by_channel(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(*values.shape[:2], -1)  # (batch, channels, places)


def _affine(normal: torch.Tensor, by_output: torch.Tensor, within: int) -> Squares:
    """For output = weight * normal + bias, where dimension `within` runs over the places of one example."""
    return (normal * by_output).sum(within).square_().sum(0), by_output.sum(within).square_().sum(0)


def _parts(given: torch.Tensor, values: int, memory: int) -> Iterator[slice]:
    """A batch in parts whose examples, each with so many values at work, fit into so many bytes; one at least."""
    size = max(1, memory // (values * given.element_size()))
    return (slice(start, start + size) for start in range(0, len(given), size))


RULES: dict[type[nn.Module], Callable[[Any, torch.Tensor, torch.Tensor, int], Squares]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
}
