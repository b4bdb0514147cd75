"""Networks and data for tests of the Fisher information, and its direct computation. PYTEST_DONT_REWRITE"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from weft.networks.flat import Network

torch.set_num_threads(1)

CLASSES = 3
SIZES = (5, 2, 1)  # unequal, and a batch of one


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def built(body, features, image=(3, 32, 32), seed=0):
    """A network of random values, so that no gradient is 0 because a bias, a head or an embedding is."""
    network = Network(body, features, (CLASSES,), image=image)
    network.vector.copy_(0.3 * draw(network.layout.size, seed=seed))
    begin, end = network.layout.statistics
    network.vector[begin:end] = 0.5 + network.vector[begin:end].abs()  # a variance is positive
    network.body.train()
    return network


def batches(*shape, sizes=SIZES):
    images = draw(sum(sizes), *shape, seed=1)
    labels = torch.randint(CLASSES, (sum(sizes),), generator=torch.Generator().manual_seed(2))
    return list(zip(images.split(sizes), labels.split(sizes), strict=True))


def plain(network, data):
    """One backward pass for each image, in the order of the definition."""
    network.body.eval()
    total, count = torch.zeros(network.layout.size), 0
    for images, labels in data:
        for image, label in zip(images, labels, strict=True):
            loss = functional.cross_entropy(network.logits(image[None]), label[None])
            pieces = torch.autograd.grad(loss, network.parameters, allow_unused=True, materialize_grads=True)
            for each, piece in zip(network.parameters, pieces, strict=True):
                total[each.storage_offset() : each.storage_offset() + each.numel()] += piece.reshape(-1) ** 2
            count += 1
    network.body.train()
    return total / count


def close(network, found, expected):
    """Each parameter relative to its largest value: squares of layers may differ by a factor of a million."""
    for each in network.parameters:
        part = slice(each.storage_offset(), each.storage_offset() + each.numel())
        # a bias before a norm has no effect, and a gradient of rounding errors only
        scale = max(expected[part].max(), 1e-9 * expected.max())
        torch.testing.assert_close(found[part] / scale, expected[part] / scale, rtol=1e-4, atol=1e-5)


@pytest.fixture
def passes(monkeypatch):
    """The number of values that were differentiated in each backward pass."""
    sizes, real = [], torch.autograd.grad

    def grad(outputs, inputs, *given, **more):
        sizes.append(len(inputs))
        return real(outputs, inputs, *given, **more)

    def forbidden(*_, **__):
        raise AssertionError("gradients are requested, not accumulated")

    monkeypatch.setattr(torch.autograd, "grad", grad)
    monkeypatch.setattr(torch.autograd, "backward", forbidden)
    return sizes


class Around(nn.Module):
    """A body out of layers and a function that calls them."""

    def __init__(self, forward, parameters=None, **layers):
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)
        for name, value in (parameters or {}).items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, images):
        return self._forward(self, images)


def normalized(norm):
    def forward(self, images):
        return functional.relu(self.norm(self.layer(images))).flatten(1)

    return Around(forward, layer=nn.Conv2d(3, 4, 3), norm=norm), 4 * 4 * 4, (3, 6, 6)


def statistics(norm):
    """A batch norm with non-trivial running statistics."""
    size = norm.num_features
    norm.running_mean.copy_(draw(size, seed=3))
    norm.running_var.copy_(draw(size, seed=4).exp())
    return norm
