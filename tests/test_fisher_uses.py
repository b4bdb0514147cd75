"""The Fisher information of parameters that no rule covers, and the absence of side effects."""

import math

import pytest
import torch
from fisher_helpers import CLASSES, SIZES, Around, batches, built, close, draw, normalized, plain, statistics
from torch import nn
from torch.nn import functional

from weft import networks
from weft.errors import WeftError
from weft.networks.fisher import fisher
from weft.networks.flat import Network
from weft.networks.mlp import Mlp

pytest_plugins = ["fisher_helpers"]


# ---- parameters that take a backward pass for each image


def attending(self, images):
    tokens = self.embed(images.flatten(2).mT)  # (batch, 4, 8)
    tokens = torch.cat([self.first.expand(len(images), 1, -1), tokens], 1) + self.positions
    tokens = tokens + self.attention(*3 * (self.norm(tokens),), need_weights=False)[0]
    return tokens[:, 0]


def attention(**more):
    embedding = {"first": torch.zeros(1, 1, 8), "positions": torch.zeros(1, 5, 8)}
    layers = {"embed": nn.Linear(3, 8), "norm": nn.LayerNorm(8), "attention": nn.MultiheadAttention(8, 2, **more)}
    return Around(attending, embedding, **layers)


def twice(self, images):
    return self.last(functional.tanh(self.shared(functional.tanh(self.shared(images.flatten(1))))))


def tied(self, images):
    """The module is called once, but its weight is used a second time."""
    hidden = functional.tanh(self.layer(images.flatten(1)))
    return functional.linear(hidden, self.layer.weight.T)


def ignored(self, images):
    """The module is called once and its output is unused; its weight is used directly."""
    self.layer(images.flatten(1))
    return functional.linear(images.flatten(1), self.layer.weight)


def tried_twice(self, images):
    """Called twice; the second output is unused."""
    out = self.layer(images.flatten(1))
    self.layer(2 * images.flatten(1))
    return torch.tanh(out)


def sequence_first(self, images):
    tokens = images.flatten(2).permute(2, 0, 1)  # (tokens, batch, channels)
    return torch.tanh(self.layer(tokens)).mean(0)


def over_positions(self, images):
    """A layer over a table with as many rows as the batch has images."""
    table = self.layer(torch.arange(20.0).view(5, 4).sin())  # (5, 12)
    return images.flatten(1) * table.sum(0).tanh()


class Doubled(nn.Linear):
    def forward(self, values):
        return 2 * super().forward(values)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, images):
        return torch.tanh(images.flatten(1) * self.scale)


# for each: the body, its features, an image's shape, and how many parameters go image by image
UNKNOWN = {
    "attention": lambda: (attention(batch_first=True), 8, (3, 2, 2), 6),
    "shared": lambda: (Around(twice, shared=nn.Linear(12, 12), last=nn.Linear(12, 4)), 4, (3, 2, 2), 2),
    "tied": lambda: (Around(tied, layer=nn.Linear(12, 5)), 12, (3, 2, 2), 1),
    "ignored": lambda: (Around(ignored, layer=nn.Linear(12, 5)), 5, (3, 2, 2), 1),
    "tried twice": lambda: (Around(tried_twice, layer=nn.Linear(12, 5)), 5, (3, 2, 2), 2),
    "sequence first": lambda: (Around(sequence_first, layer=nn.Linear(3, 6)), 6, (3, 1, 5), 2),
    "positions": lambda: (Around(over_positions, layer=nn.Linear(4, 12)), 12, (3, 2, 2), 2),
    "subclass": lambda: (nn.Sequential(nn.Flatten(), Doubled(12, 5), nn.Tanh()), 5, (3, 2, 2), 2),
    "bare": lambda: (Bare(), 12, (3, 2, 2), 1),
    "volumes": lambda: (
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten()),
        4,
        (3, 2, 2),
        2,
    ),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_uses_without_a_rule_go_image_by_image(kind, passes):
    body, features, shape, slow = UNKNOWN[kind]()
    network = built(body, features, shape)
    data = batches(*shape, sizes=(5, 2))  # 5 is also the number of tokens and rows
    found = fisher(network, data)
    batch, *images = passes[:6]
    assert images == [slow] * 5  # these parameters, and no others
    assert batch > 0
    assert len(passes) == 2 + 7
    close(network, found, plain(network, data))


def test_reparametrized_weights():
    body = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(12, 5)), nn.Tanh())
    network, data = built_of_parameters(body, 5), batches(3, 2, 2)
    close(network, fisher(network, data), plain(network, data))


def built_of_parameters(body, features):
    """The decomposed part of a vector is for real parameters; here it is built by hand."""
    network = Network(nn.Flatten(), features, (CLASSES,))
    head = network.parameters
    parameters = [*body.parameters(), *head]
    size = sum(each.numel() for each in parameters)
    network.vector = 0.3 * draw(size)
    place = 0
    for each in parameters:
        each.data = network.vector[place : place + each.numel()].view(each.shape)
        place += each.numel()
    network.body, network.parameters = body, parameters
    network.layout = type(network.layout)((), 0, size - CLASSES * (features + 1), size)
    return network


def test_values_are_placed_by_their_storage():
    """Neither the order of `parameters` nor that they fill the vector matters."""
    network = built(Mlp(12, 7, 5), 5, (3, 2, 2))
    data = batches(3, 2, 2)
    expected = fisher(network, data)
    longer = torch.cat([torch.full((4,), 7.0), network.vector, torch.full((3,), 7.0)])
    for each in network.parameters:
        place = 4 + each.storage_offset()
        each.data = longer[place : place + each.numel()].view(each.shape)
    network.vector, network.parameters = longer, network.parameters[::-1]
    network.layout = type(network.layout)((), 0, 0, len(longer))
    found = fisher(network, data)
    assert not found[:4].any()
    assert not found[-3:].any()
    assert torch.equal(found[4:-3], expected)


def test_a_frozen_layer_gets_nothing():
    network, data = built(Mlp(12, 7, 5), 5, (3, 2, 2)), batches(3, 2, 2)
    expected = fisher(network, data)
    weight = network.body.fc1.weight
    weight.requires_grad_(False)
    found = fisher(network, data)
    part = slice(weight.storage_offset(), weight.storage_offset() + weight.numel())
    assert expected[part].any()
    expected[part] = 0
    assert torch.equal(found, expected)


def test_masked_logits_keep_the_head_fast(passes, monkeypatch):
    """Of all heads' classes a task has some; a network that masks the others needs no pass per image."""
    network, data = built(Mlp(12, 7, 5), 5, (3, 2, 2)), batches(3, 2, 2)
    data = [(images, labels.clamp(max=1)) for images, labels in data]
    real, hidden = network.logits, torch.tensor([False, False, True])
    monkeypatch.setattr(network, "logits", lambda images: 0.5 * real(images).masked_fill(hidden, -math.inf))
    found = fisher(network, data)
    assert len(passes) == len(SIZES)
    close(network, found, plain(network, data))


@pytest.mark.parametrize(
    "weight", [lambda weight: 2 * weight.t(), lambda weight: weight.view(5, CLASSES), lambda weight: (2 * weight).t()]
)
def test_a_head_of_another_form_goes_image_by_image(weight, passes, monkeypatch):
    network, data = built(Mlp(12, 7, 5), 5, (3, 2, 2)), batches(3, 2, 2, sizes=(4,))
    matrix, bias = network.parameters[-2:]
    monkeypatch.setattr(network, "logits", lambda images: torch.addmm(bias, network.body(images), weight(matrix)))
    found = fisher(network, data)
    assert passes == [2, 2, 2, 2, 2]  # two layers of the batch, then weight and bias of the head
    close(network, found, plain(network, data))


# ---- side effects


def hooks(body):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in body.modules())


def test_there_are_no_side_effects():
    """No changed value, hook, gradient or mode; works within torch.no_grad."""
    body, features, shape = normalized(statistics(nn.BatchNorm2d(4)))
    network, data = built(body, features, shape), batches(*shape)
    network.gradient.fill_(3)
    before, buffers = network.vector.clone(), [each.clone() for each in body.buffers()]
    body.train()
    body.norm.eval()  # partly frozen
    with torch.no_grad():
        found = fisher(network, data)
        assert not torch.is_grad_enabled()
    assert not found.requires_grad
    assert found.any()
    assert found.data_ptr() not in (network.vector.data_ptr(), network.gradient.data_ptr())
    assert torch.equal(network.vector, before)
    assert (network.gradient == 3).all()
    assert all(torch.equal(*pair) for pair in zip(body.buffers(), buffers, strict=True))
    assert (body.training, body.layer.training, body.norm.training) == (True, True, False)
    assert all(each.grad is None for each in network.parameters)
    assert hooks(body) == 0
    assert torch.equal(fisher(network, data), found)


def test_an_error_has_no_side_effects():
    network, data = built(Mlp(12, 7, 5), 5, (3, 2, 2)), batches(3, 2, 2)
    before = hooks(network.body)
    for bad in ((draw(2, 3, 2, 3), data[0][1][:2]), (draw(2, 3, 2, 2), torch.tensor([0, CLASSES]))):
        with pytest.raises((RuntimeError, IndexError)):
            fisher(network, [data[0], bad])
        assert hooks(network.body) == before
        assert network.body.training


def test_a_hook_that_changes_an_output():
    network, data = built(Mlp(12, 7, 5), 5, (3, 2, 2)), batches(3, 2, 2)
    before = hooks(network.body)
    handle = network.body.fc1.register_forward_hook(lambda module, given, out: out * 3)
    close(network, fisher(network, data), plain(network, data))
    assert hooks(network.body) == before + 1
    handle.remove()


def test_how_examples_are_batched_does_not_matter():
    network, data = built(Mlp(12, 7, 5), 5, (3, 2, 2)), batches(3, 2, 2)
    whole = [(torch.cat([images for images, _ in data]), torch.cat([labels for _, labels in data]))]
    close(network, fisher(network, iter(data)), fisher(network, whole))
    empty = (data[0][0][:0], data[0][1][:0])
    assert torch.equal(fisher(network, [*data, empty]), fisher(network, data))


def test_no_examples():
    network = built(Mlp(12, 7, 5), 5, (3, 2, 2))
    with pytest.raises(WeftError, match="provide at least one"):
        fisher(network, [])


def test_a_norm_by_batch_is_rejected():
    body, features, shape = normalized(nn.BatchNorm2d(4, track_running_stats=False))
    with pytest.raises(WeftError, match=r"norm normalizes by batch.*track_running_stats"):
        fisher(built(body, features, shape), batches(*shape))


def test_networks_by_name():
    network = networks.build("mlp", {"hidden": 6, "features": 5}, heads=(CLASSES,))
    network.vector.copy_(0.1 * draw(network.layout.size))
    data = batches(3, 32, 32)
    close(network, fisher(network, data), plain(network, data))
