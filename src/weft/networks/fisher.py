"""The diagonal of the empirical Fisher information, computed for whole batches.

    F_j = 1/N * sum over examples n of (d log p(label_n | image_n) / d vector_j)^2

The square is inside the sum: the square of a batch's mean gradient is smaller, because noise is averaged out. The
direct computation needs a backward pass per image. But an example's gradient by a layer's weight follows from the
layer's input and the gradient by its output, and one forward and one backward pass give both for the whole batch. Only
parameters with a use that has no such rule need the direct computation.
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
    """The only call of a layer in a forward pass."""

    rule: Rule
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    inputs: torch.Tensor
    edge: GradientEdge  # the output in the graph; stays valid if a ReLU overwrites the output in place


class Pass(NamedTuple):
    loss: torch.Tensor
    calls: dict[object, Call]  # by module: layers that were called once, and the head
    uses: dict[int, list[Any]]  # by a parameter's id: the nodes of the graph that use it


def fisher(
    network: Network, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], memory: int = 64 << 20
) -> torch.Tensor:
    """The mean over all examples of the squared gradient of log p(label | image) by each value of `network.vector`.

    Values that no gradient reaches get 0. Layers with large per-example gradients process the batch in chunks of about
    `memory` bytes.
    """
    total, count = torch.zeros(network.layout.size, device=network.vector.device, dtype=network.vector.dtype), 0
    for name, module in network.body.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            cause = f"{name} normalizes by batch, so there is no gradient per image"
            raise WeftError(f"{cause}; set track_running_stats=True")
    modes = [(module, module.training) for module in network.body.modules()]  # parts of a body may be frozen
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
        raise WeftError("the Fisher information is a mean over examples, and there are none; provide at least one")
    return total.div_(count)


def total_loss(network: Network, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """-log p(label | image), summed: a mean would divide each example's gradient by the batch size."""
    return network.loss(network.logits(images), labels, reduction="sum")


def _add_batch(total: torch.Tensor, network: Network, images: torch.Tensor, labels: torch.Tensor, memory: int) -> None:
    offsets = {id(each): each.storage_offset() - network.vector.storage_offset() for each in network.parameters}

    def add(parameter: torch.Tensor, squares: torch.Tensor) -> None:
        offset = offsets[id(parameter)]
        total[offset : offset + parameter.numel()] += squares.reshape(-1)

    traced = _forward(network, images, labels)
    calls = _by_example(network, traced, images, labels)
    once = {key for key, nodes in traced.uses.items() if len(nodes) == 1 and key in offsets}
    covered = {id(each) for call in calls for each in (call.weight, call.bias)} & once
    rest = {key: each for each in network.parameters if (key := id(each)) in traced.uses and key not in covered}
    if calls:
        # by the outputs only: autograd then skips the batch's gradient by the weights
        gradients = torch.autograd.grad(traced.loss, [call.edge for call in calls], allow_unused=True)
        for call, by_output in zip(calls, gradients, strict=True):
            wanted = [id(each) in covered for each in (call.weight, call.bias)]
            if by_output is None or not any(wanted):
                continue
            with torch.no_grad():
                squares = call.rule(call.inputs, by_output, memory)
            for parameter, include, its_squares in zip((call.weight, call.bias), wanted, squares, strict=True):
                if parameter is not None and include:
                    add(parameter, its_squares)
    if not rest:
        return
    for index in range(len(labels)):
        # a small graph per image: each backward pass through the batch's graph would take as long as the whole batch
        loss = total_loss(network, images[index : index + 1], labels[index : index + 1])
        gradients = torch.autograd.grad(loss, list(rest.values()), allow_unused=True)
        for parameter, gradient in zip(rest.values(), gradients, strict=True):
            if gradient is not None:
                add(parameter, gradient.square())


def _by_example(network: Network, traced: Pass, images: torch.Tensor, labels: torch.Tensor) -> list[Call]:
    """The calls whose first dimension is the batch: with one image it is 1, and the other dimensions are equal.

    The length alone is ambiguous: a first dimension of tokens, or of positions in an embedding table, may happen to
    equal the batch size.
    """
    alone = traced if len(labels) == 1 else _forward(network, images[:1], labels[:1])
    shapes = {key: call.inputs.shape for key, call in alone.calls.items()}
    return [
        call
        for key, call in traced.calls.items()
        if key in shapes and shapes[key][0] == 1 and call.inputs.shape == (len(labels), *shapes[key][1:])
    ]


# ---- tracing the forward pass ----------------------------------------------------------------------------------------


def _forward(network: Network, images: torch.Tensor, labels: torch.Tensor) -> Pass:
    recorded: dict[nn.Module, list[Call | None]] = defaultdict(list)

    def record(module: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> None:
        if not inputs or out.grad_fn is None:
            recorded[module].append(None)
            return
        parameters = module._parameters  # with weight normalization an attribute is no parameter
        rule = functools.partial(RULES[type(module)], module)
        edge = get_gradient_edge(out)
        recorded[module].append(Call(rule, parameters.get("weight"), parameters.get("bias"), inputs[0].detach(), edge))

    # the exact type, since a subclass may compute something else; before any hook that changes the output
    layers = [module for module in network.body.modules() if type(module) in RULES]
    hooks = [module.register_forward_hook(record, prepend=True) for module in layers]
    try:
        loss = total_loss(network, images, labels)
    finally:
        for hook in hooks:
            hook.remove()
    nodes, uses = _graph(loss)
    calls: dict[object, Call] = {}
    for module, (call, *others) in recorded.items():
        if not others and call is not None and call.edge.node in nodes:
            calls[module] = call
    if (head := _head(network, uses)) is not None:
        calls["head"] = head
    return Pass(loss, calls, uses)


def _graph(loss: torch.Tensor) -> tuple[set[Any], dict[int, list[Any]]]:
    """All nodes that the loss depends on, and for each parameter (by id) the nodes that use it, once per use.

    Module calls are not enough: a weight may be used outside its module, and a module's output may be unused.
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
    """The head, which is not a module, found in the graph: functional.linear is addmm(bias, features, weight^T)."""
    weight, bias = network._head_weight, network._head_bias
    by_weight, by_bias = uses.get(id(weight), []), uses.get(id(bias), [])
    if len(by_weight) != 1 or len(by_bias) != 1:
        return None
    transposed, product = by_weight[0], by_bias[0]
    if (type(transposed).__name__, type(product).__name__) != ("TBackward0", "AddmmBackward0"):
        return None
    if product.next_functions[2][0] is not transposed:
        return None
    features = product._saved_mat1.detach()  # (batch, features)
    return Call(functools.partial(_linear, None), weight, bias, features, GradientEdge(product, 0))


# ---- rules: squares from a layer's input and the gradient by its output ----------------------------------------------


def _linear(_: nn.Linear | None, inputs: torch.Tensor, by_output: torch.Tensor, memory: int) -> Squares:
    if inputs.ndim == 2:
        # an example's gradient is an outer product, and the square of a product is the product of squares
        squares = by_output.square()
        return squares.T @ inputs.square(), squares.sum(0)  # (out, batch) @ (batch, in)
    inputs, by_output = inputs.flatten(1, -2), by_output.flatten(1, -2)  # (batch, tokens, in), (batch, tokens, out)
    weight = inputs.new_zeros(by_output.shape[2], inputs.shape[2])
    for chunk in _chunks(inputs, weight.numel(), memory):
        each = torch.bmm(by_output[chunk].mT, inputs[chunk])  # (chunk, out, tokens) @ (chunk, tokens, in)
        weight += each.square_().sum(0)
    return weight, by_output.sum(1).square_().sum(0)


def _convolution(layer: nn.Conv1d | nn.Conv2d, inputs: torch.Tensor, by_output: torch.Tensor, memory: int) -> Squares:
    groups, positions = layer.groups, math.prod(by_output.shape[2:])
    rows, width = layer.out_channels // groups, layer.weight[0].numel()
    by_output = by_output.reshape(-1, groups, rows, positions)
    # as the layer pads: both sides of each dimension, the last dimension first, with 'same' resolved
    sides = layer._reversed_padding_repeated_twice
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    kernel, dilation, stride = layer.kernel_size, layer.dilation, layer.stride
    if inputs.ndim == 3:  # unfold needs images: a sequence is an image one pixel high
        kernel, dilation, stride = (1, *kernel), (1, *dilation), (1, *stride)
    weight = inputs.new_zeros(groups, rows, width)
    for chunk in _chunks(inputs, groups * width * positions + weight.numel(), memory):
        padded = functional.pad(inputs[chunk], sides, mode)
        images = padded.unsqueeze(2) if padded.ndim == 3 else padded  # (chunk, channels, height, width)
        patches = functional.unfold(images, kernel, dilation, 0, stride).view(-1, groups, width, positions)
        each = by_output[chunk] @ patches.mT  # (chunk, groups, rows, positions) @ (chunk, groups, positions, width)
        weight += each.square_().sum(0)
    return weight, by_output.sum(3).square_().sum(0)


def _layer_norm(layer: nn.LayerNorm, inputs: torch.Tensor, by_output: torch.Tensor, _: int) -> Squares:
    normal = functional.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    shape = (len(inputs), -1, *layer.normalized_shape)  # (batch, tokens, normalized...)
    return _affine(normal.reshape(shape), by_output.reshape(shape), 1)


def _group_norm(layer: nn.GroupNorm, inputs: torch.Tensor, by_output: torch.Tensor, _: int) -> Squares:
    normal = functional.group_norm(inputs, layer.num_groups, eps=layer.eps)
    return _affine(_by_channel(normal), _by_channel(by_output), 2)


def _batch_norm(layer: nn.BatchNorm2d, inputs: torch.Tensor, by_output: torch.Tensor, _: int) -> Squares:
    normal = functional.batch_norm(inputs, layer.running_mean, layer.running_var, eps=layer.eps)
    return _affine(_by_channel(normal), _by_channel(by_output), 2)


def _by_channel(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(*values.shape[:2], -1)  # (batch, channels, positions)


def _affine(normal: torch.Tensor, by_output: torch.Tensor, within: int) -> Squares:
    """For output = weight * normal + bias, where dimension `within` is over the positions of one example."""
    return (normal * by_output).sum(within).square_().sum(0), by_output.sum(within).square_().sum(0)


def _chunks(inputs: torch.Tensor, values: int, memory: int) -> Iterator[slice]:
    """Split a batch into chunks that fit into `memory` bytes, with `values` values per example; at least one each."""
    size = max(1, memory // (values * inputs.element_size()))
    return (slice(start, start + size) for start in range(0, len(inputs), size))


RULES: dict[type[nn.Module], Callable[[Any, torch.Tensor, torch.Tensor, int], Squares]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
}
