"""Any module as a network: layout, gradient, statistics, heads and dropout."""

import math

import numpy as np
import pytest
import torch
from own_networks import Conv1dNet, Normed, OwnMlp, ViT
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from weft.errors import WeftError
from weft.networks.batches import Batches
from weft.networks.flat import Network
from weft.networks.mlp import Mlp
from weft.networks.resnet18 import ResNet18
from weft.randomness import generator
from weft.scenarios import Split

torch.set_num_threads(1)

KINDS = {
    "mlp": (OwnMlp, 6),
    "vit": (lambda: ViT(dropout=0.0), 8),
    "conv1d": (Conv1dNet, 6),
    "normed": (Normed, 6),
    "resnet18": (ResNet18, 512),
    "resnet18 group": (lambda: ResNet18("classical", "group"), 512),
}

SOME = [pytest.param(kind, marks=pytest.mark.slow) if kind.startswith("resnet") else kind for kind in KINDS]


def make(kind, heads=(3,), **more):
    maker, features = KINDS[kind]
    network = Network(maker(), features, heads, **more)
    fill(network, 0)
    return network


def fill(network, seed):
    network.vector[: network.layout.body] = network.initial_body(generator(seed, "initial"))
    network.vector[network.layout.body :] = network.initial_head(generator(seed, "head"))


def pictures(seed, count=4):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def labelled(seed, labels, side=32):
    images = np.random.default_rng(seed).integers(256, size=(len(labels), side, side, 3), dtype=np.uint8)
    return Batches(Split(images, np.array(labels)), (128.0,) * 3, (64.0,) * 3)


def statistics(network):
    return network.vector[slice(*network.layout.statistics)].clone()


# ---- layout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["own", "shared"])
def test_everything_is_laid_out_once(kind, where):
    """Weights, other parameters, statistics, head: each value of the module is in the vector, in this order."""
    network = make(kind, statistics=where)
    layout, body = network.layout, network.body
    homes = {name: tensor for name, tensor in [*body.named_parameters(), *body.named_buffers()] if tensor.dim()}
    weights = [layer.name for layer in layout.layers]
    others = [name for name, _ in body.named_parameters() if name not in weights]
    counted = [name for name, _ in body.named_buffers() if name.endswith(("running_mean", "running_var"))]
    assert sorted(homes) == sorted([*weights, *others, *counted])
    network.vector[:] = torch.arange(layout.size)
    place = 0
    for name in [*weights, *others, *counted]:
        assert homes[name].flatten()[0] == place, name
        assert homes[name].flatten()[-1] == place + homes[name].numel() - 1, name
        place += homes[name].numel()
    begin, end = layout.statistics
    assert end == place
    assert end - begin == sum(homes[name].numel() for name in counted)
    assert layout.weights == sum(homes[name].numel() for name in weights)
    assert layout.body == (end if where == "shared" else begin)
    assert layout.size == end + 3 * (KINDS[kind][1] + 1)


def test_layers_of_a_vision_transformer_and_of_a_sequence():
    layers = make("conv1d").layout.layers
    assert [(layer.shape, layer.first_row) for layer in layers] == [((4, 3, 8), 0), ((6, 4, 8), 4)]
    layers = make("vit").layout.layers
    assert [(layer.name, layer.rows, layer.width) for layer in layers] == [
        ("patches.weight", 8, 192),
        ("blocks.0.attention.out_proj.weight", 8, 8),
        ("blocks.0.mlp.0.weight", 16, 8),
        ("blocks.0.mlp.3.weight", 8, 16),
    ]


class Odd(nn.Module):
    """Two layers that share a weight, a frozen layer, one that is never used, a computed weight, and an idle one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(3072, 6).requires_grad_(False)
        self.idle = nn.Linear(2, 2)
        self.computed = parametrizations.weight_norm(nn.Linear(6, 6))
        self.register_buffer("constant", torch.full((6,), 2.0))

    def forward(self, images):
        x = self.frozen(images.flatten(1)) * self.constant
        return self.computed(self.second(self.first(x)))


def test_shared_frozen_and_idle_parameters():
    body = Odd()
    frozen = body.frozen.weight.clone()
    network = Network(body, 6, (2,))
    assert [layer.name for layer in network.layout.layers] == ["first.weight", "idle.weight"]
    assert network.layout.weights == 36 + 4
    assert network.layout.body == 36 + 4 + 6 + 6 + 2 + (6 + 6 + 36)
    assert network.layout.statistics == (network.layout.body, network.layout.body)  # a constant is no statistic
    fill(network, 0)
    network.gradient.fill_(math.nan)
    network.compute_gradient(pictures(0), torch.tensor([0, 1, 1, 0]))
    assert network.gradient.isfinite().all()
    idle = network.layout.layers[1]
    assert (network.gradient[idle.span] == 0).all()
    assert network.gradient[:36].count_nonzero() == 36
    assert torch.equal(body.frozen.weight, frozen)
    assert body.first.weight is body.second.weight
    network.vector.zero_()
    assert not body.first.weight.any()
    assert torch.equal(body.frozen.weight, frozen)


@pytest.mark.parametrize("kind", SOME)
def test_the_gradient_equals_that_of_the_module_alone(kind):
    network = make(kind)
    alone = KINDS[kind][0]()
    alone.load_state_dict(network.body.state_dict())
    head = nn.Linear(KINDS[kind][1], 3)
    with torch.no_grad():
        head.weight.copy_(network.vector[-3 - head.weight.numel() : -3].view_as(head.weight))
        head.bias.copy_(network.vector[-3:])
    images, labels = pictures(1), torch.tensor([0, 2, 1, 1])
    wanted = functional.cross_entropy(head(alone.train()(images)), labels)
    wanted.backward()
    network.gradient.fill_(math.nan)
    assert network.compute_gradient(images, labels) == pytest.approx(wanted.item(), rel=1e-5)

    of = dict(alone.named_parameters())
    weights = [layer.name for layer in network.layout.layers]
    parts = [of[name].grad for name in [*weights, *(name for name in of if name not in weights)]]
    begin, end = network.layout.statistics
    parts += [torch.zeros(end - begin), head.weight.grad, head.bias.grad]
    torch.testing.assert_close(network.gradient, torch.cat([part.reshape(-1) for part in parts]), rtol=1e-3, atol=1e-5)
    moved = [buffer for name, buffer in alone.named_buffers() if "running" in name]  # by the same step
    torch.testing.assert_close(statistics(network), torch.cat([each.reshape(-1) for each in [*moved, torch.zeros(0)]]))


@pytest.mark.parametrize("kind", SOME)
def test_the_vector_is_the_complete_state(kind):
    """A client's values can be restored in a network that others have used since."""
    network = make(kind)
    images = pictures(2)
    for seed in range(2):
        network.compute_gradient(pictures(seed), torch.tensor([0, 1, 2, 0]))
        network.vector.sub_(network.gradient, alpha=0.1)
    kept, before = network.vector.clone(), network.logits(images)
    network.vector.fill_(0.5)
    network.compute_gradient(pictures(9), torch.tensor([0, 1, 2, 0]))
    assert not torch.equal(network.logits(images), before)
    network.vector.copy_(kept)
    assert torch.equal(network.logits(images), before)


# ---- statistics


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normed", "resnet18"])
def test_statistics_change_in_training_and_not_in_evaluation(kind):
    network = make(kind)
    start = statistics(network)
    assert set(start.tolist()) == {0.0, 1.0}  # the initial values of batch norm: probing has not changed them
    network.gradient.fill_(7.0)
    network.compute_gradient(pictures(0), torch.tensor([0, 1, 2, 0]))
    assert (network.gradient[slice(*network.layout.statistics)] == 0).all()
    moved = statistics(network)
    assert ((moved != start).float().mean() > 0.9).item()
    network.logits(pictures(1))
    network.measure(labelled(0, [0, 1, 2, 1]))
    assert torch.equal(statistics(network), moved)
    assert not any(module.training for module in network.body.modules())


def test_evaluation_uses_the_statistics():
    network = make("normed")
    data = labelled(0, [0, 1, 2, 1])
    before = network.measure(data)
    network.vector[network.layout.statistics[0]] += 5.0
    assert network.measure(data) != before


def test_the_position_of_statistics():
    for where, in_body in (("own", False), ("shared", True)):
        network = make("normed", statistics=where)
        network.vector[slice(*network.layout.statistics)] = 9.0  # of another client
        body, head = network.initial_body(generator(0, "initial")), network.initial_head(generator(0, "head"))
        made = torch.cat([torch.zeros(4), torch.ones(4), torch.zeros(6), torch.ones(6)])
        assert len(body) == network.layout.body
        assert len(head) == network.layout.size - network.layout.body
        assert torch.equal(body[-20:] if in_body else head[:20], made)
        assert torch.equal(head[-21:-3], make("normed").initial_head(generator(0, "head"))[-21:-3])


class Rebinding(nn.Module):
    """A user-defined norm that replaces the tensor of its statistics, and has a constant buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3072, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("share", torch.full((4,), 0.5))

    def forward(self, images):
        x = self.fc(images.flatten(1))
        if self.training:
            self.mean = self.share * self.mean + self.share * x.mean(0)
        return x - self.mean.detach()


def test_statistics_are_found_by_their_behavior():
    network = Network(Rebinding(), 4, (2,))
    fill(network, 0)
    begin, end = network.layout.statistics
    assert (end - begin, statistics(network).tolist()) == (4, [0.0] * 4)
    for seed in (0, 1):
        wanted = 0.5 * statistics(network) + 0.5 * network.body.fc(pictures(seed).flatten(1)).mean(0)
        network.compute_gradient(pictures(seed), torch.tensor([0, 1, 1, 0]))
        torch.testing.assert_close(statistics(network), wanted)
    network.vector[begin:end] = 3.0
    assert network.body.mean.tolist() == [3.0] * 4


class Counting(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.fc = nn.Linear(3072, 4)
        self.register_buffer("seen", buffer)

    def forward(self, images):
        if self.training:
            self.seen = torch.cat([self.seen, self.seen]) if self.seen.is_floating_point() else self.seen + 1
        return self.fc(images.flatten(1))


@pytest.mark.parametrize("buffer", [torch.zeros(1, dtype=torch.int64), torch.zeros(2)], ids=["whole", "growing"])
def test_buffers_that_cannot_be_kept_are_rejected(buffer):
    with pytest.raises(WeftError, match=r"training changes buffer 'seen', which cannot be kept"):
        Network(Counting(buffer), 4, (2,))


def test_batch_norm_without_momentum_is_rejected():
    body = Normed()
    body.norm.momentum = None
    with pytest.raises(WeftError, match=r"batch norm 'norm' has momentum=None, which is not supported; choose"):
        Network(body, 6, (2,))


def test_a_batch_of_one_image():
    network = make("normed")
    with pytest.raises(WeftError, match=r"a batch of 1 image is too small for batch norm; change batch_size"):
        network.compute_gradient(pictures(0, 1), torch.tensor([0]))
    make("mlp").compute_gradient(pictures(0, 1), torch.tensor([0]))


# ---- several heads


def test_heads_by_hand():
    """Heads of 3 and 2 classes with logits 1, 2, 3 and 4, 0: each example counts within its head."""
    network = Network(Mlp(3072, 8, 6), 6, (3, 2))
    network.vector[-5:] = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0])
    network.vector[:-5] = 0
    loss = network.compute_gradient(pictures(0, 2), torch.tensor([0, 4]))
    first, second = math.log(math.e + math.e**2 + math.e**3) - 1, math.log(1 + math.e**4)
    assert (first, second) == (pytest.approx(2.407606), pytest.approx(4.018150))
    assert loss == pytest.approx((first + second) / 2)
    wanted = [0.5 * (0.0900306 - 1), 0.5 * 0.2447285, 0.5 * 0.6652410, 0.5 * 0.9820138, 0.5 * (0.0179862 - 1)]
    assert network.gradient[-5:].tolist() == pytest.approx(wanted, abs=1e-6)
    accuracy, loss = network.measure(labelled(0, [2, 3, 4]))
    assert accuracy == pytest.approx(2 / 3)  # label 4 loses against 3; label 2 does not see the 4 of another head
    assert loss == pytest.approx((0.407606 + 0.018150 + 4.018150) / 3, abs=1e-5)
    each = network.loss(network.logits(pictures(0, 2)), torch.tensor([2, 3]), "none")
    assert each.tolist() == pytest.approx([0.407606, 0.018150], abs=1e-5)


def test_heads_are_initialized_one_after_another():
    rng = generator(0, "head")
    first, second = Network(Mlp(3072, 8, 6), 6, (3,)), Network(Mlp(3072, 8, 6), 6, (2,))
    wanted = torch.cat([first.initial_head(rng)[:18], second.initial_head(rng)[:12], torch.zeros(5)])
    both = Network(Mlp(3072, 8, 6), 6, (3, 2))
    assert torch.equal(both.initial_head(generator(0, "head")), wanted)
    assert (both.heads, both.classes) == ((3, 2), 5)


def test_a_head_has_the_gradient_of_a_single_head():
    alone, both = Network(Mlp(3072, 8, 6), 6, (3,)), Network(Mlp(3072, 8, 6), 6, (2, 3))
    fill(alone, 0)
    both.vector[: both.layout.body] = alone.vector[: alone.layout.body]
    tail = alone.vector[alone.layout.body :]
    both.vector[both.layout.body :] = torch.cat([torch.ones(12), tail[:18], torch.ones(2), tail[18:]])
    images, labels = pictures(3), torch.tensor([0, 2, 1, 1])
    assert both.compute_gradient(images, labels + 2) == pytest.approx(alone.compute_gradient(images, labels))
    torch.testing.assert_close(both.gradient[: both.layout.body], alone.gradient[: alone.layout.body])
    found, wanted = both.gradient[both.layout.body :], alone.gradient[alone.layout.body :]
    zeros = torch.zeros(12), torch.zeros(2)
    torch.testing.assert_close(found, torch.cat([zeros[0], wanted[:18], zeros[1], wanted[18:]]))


# ---- dropout


def test_dropout_by_hand():
    """At the inputs of the second layer and of the head, not of the images."""
    network = make("mlp")
    images, labels = pictures(0), torch.tensor([0, 2, 1, 1])
    first, second = network.body.layers[1], network.body.layers[3]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        x = functional.dropout(functional.relu(first(images.flatten(1))), 0.4)
        x = functional.dropout(functional.relu(second(x)), 0.4)
        weight, bias = network.parameters[-2:]
        plain = functional.cross_entropy(functional.linear(x, weight, bias), labels)
        wanted = torch.cat([part.reshape(-1) for part in torch.autograd.grad(plain, network.parameters)])
        torch.manual_seed(5)
        assert network.compute_gradient(images, labels, dropout=0.4) == pytest.approx(plain.item())
    torch.testing.assert_close(network.gradient, wanted)


@pytest.mark.parametrize("kind", ["mlp", "vit", "conv1d"])
def test_dropout_changes_the_gradient_and_none_does_not(kind):
    network = make(kind)
    images, labels = pictures(0), torch.tensor([0, 2, 1, 1])
    state = torch.random.get_rng_state()
    network.compute_gradient(images, labels)
    plain = network.gradient.clone()
    network.compute_gradient(images, labels, dropout=0.0)
    assert torch.equal(network.gradient, plain)
    assert torch.equal(torch.random.get_rng_state(), state)
    network.compute_gradient(images, labels, dropout=0.5)
    assert not torch.equal(network.gradient, plain)
    data = labelled(0, [0, 1, 2, 1])
    assert network.measure(data) == network.measure(data)
    network.compute_gradient(images, labels)
    assert torch.equal(network.gradient, plain)


class DropsByHand(OwnMlp):
    def forward(self, images):
        return functional.dropout(super().forward(images), 0.5, self.training)


@pytest.mark.parametrize(
    ("body", "features", "random"),
    [
        (OwnMlp(), 6, False),
        (ViT(), 8, True),
        (ViT(dropout=0.0), 8, False),
        (ViT(dropout=0.0, attention_dropout=0.1), 8, True),  # not a module
        (DropsByHand(), 6, True),
        (Normed(), 6, False),
    ],
    ids=["mlp", "vit", "vit without", "vit attention", "by hand", "normed"],
)
def test_random_is_whether_a_body_draws_random_numbers(body, features, random):
    state = torch.random.get_rng_state()
    assert Network(body, features, (2,)).random is random
    assert torch.equal(torch.random.get_rng_state(), state)
