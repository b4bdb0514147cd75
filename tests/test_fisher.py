"""The Fisher information of whole batches, compared with a loop over images and computed by hand."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from weft import networks
from weft.errors import WeftError
from weft.networks.fisher import fisher
from weft.networks.flat import Network
from weft.networks.lenet import LeNet
from weft.networks.mlp import Mlp

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


# ---- by hand


def test_logistic_regression_by_hand():
    """One value x and two classes: the gradient by class c's bias is p_c - [c = label], by its weight x times that.

    The first weight is ln 3 and all else 0: p = (3/4, 1/4) for x = 1, (1/4, 3/4) for x = -1, (9/10, 1/10) for x = 2.
    """
    network = Network(nn.Flatten(), features=1, heads=(2,), image=(1,))
    network.vector.copy_(torch.tensor([math.log(3), 0, 0, 0]))
    data = [(torch.tensor([[1.0]]), torch.tensor([0])), (torch.tensor([[-1.0], [2.0]]), torch.tensor([0, 1]))]
    # p_0 - [label = 0] is -1/4, -3/4 and 9/10; class 1 has their negatives
    bias = (1 / 16 + 9 / 16 + 81 / 100) / 3
    weight = (1 / 16 + 9 / 16 + 4 * 81 / 100) / 3
    torch.testing.assert_close(fisher(network, data), torch.tensor([weight, weight, bias, bias]))


# ---- against the plain loop, without a backward pass for each image

CONVOLUTIONS = {
    "stride": lambda: nn.Conv2d(4, 6, 3, stride=2),
    "stride that leaves pixels over": lambda: nn.Conv2d(4, 6, (3, 2), stride=(3, 2), padding=(0, 1)),
    "dilation": lambda: nn.Conv2d(4, 6, (2, 3), dilation=(3, 2), padding=2),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, stride=2, padding=1),
    "same": lambda: nn.Conv2d(4, 6, (4, 3), padding="same", dilation=(1, 2)),
    "valid": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "reflect": lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(4, 6, 4, padding="same", padding_mode="circular"),
    "replicate": lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2, padding_mode="replicate"),
    "no bias": lambda: nn.Conv2d(4, 6, 3, bias=False),
    "pixels": lambda: nn.Conv2d(4, 6, 1),
}


def convolving(layer):
    """A layer of interest between two others, so that it has neighbors on both sides."""

    def forward(self, images):
        return functional.tanh(self.layer(functional.tanh(self.before(images)))).flatten(2).square().mean(2)

    return built(Around(forward, before=nn.Conv2d(3, 4, 3), layer=layer), layer.out_channels)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # the uneven case is the one to test
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions(kind, channels_last, passes):
    network, data = convolving(CONVOLUTIONS[kind]()), batches(3, 9, 10)
    if channels_last:  # as Batches returns images
        data = [(images.contiguous(memory_format=torch.channels_last), labels) for images, labels in data]
    found = fisher(network, data)
    assert len(passes) == len(SIZES)
    close(network, found, plain(network, data))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=1),
        nn.Conv1d(4, 6, 4, padding="same", groups=2, bias=False),
        nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"),
    ],
)
def test_convolutions_of_sequences(layer, passes):
    def forward(self, images):
        return functional.relu(self.layer(functional.relu(self.before(images.flatten(2))))).square().mean(2)

    network, data = built(Around(forward, before=nn.Conv1d(3, 4, 3), layer=layer), 6, (3, 4, 4)), batches(3, 4, 4)
    found = fisher(network, data)
    assert len(passes) == len(SIZES)
    close(network, found, plain(network, data))


def tokens_first(self, images):
    """Images become tokens of 8 values, in rows and columns; every token passes the same two layers."""
    tokens = images.flatten(2).mT.unflatten(1, (2, -1))  # (batch, 2, 8, channels)
    return self.second(functional.gelu(self.norm(self.first(tokens)))).square().mean((1, 2))


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


def flat_normalized(self, images):
    return torch.relu(self.norm(self.layer(images.flatten(1))))


KNOWN = {
    "mlp": lambda: (Mlp(3 * 4 * 4, 7, 5), 5, (3, 4, 4)),
    "tokens": lambda: (
        Around(tokens_first, first=nn.Linear(3, 6), norm=nn.LayerNorm(6), second=nn.Linear(6, 4, bias=False)),
        4,
        (3, 4, 4),
    ),
    "layer norm over two dimensions": lambda: normalized(nn.LayerNorm((4, 4))),
    "layer norm without bias": lambda: normalized(nn.LayerNorm((4, 4, 4), bias=False)),
    "norm without values": lambda: normalized(nn.LayerNorm((4, 4), elementwise_affine=False)),
    "group norm": lambda: normalized(nn.GroupNorm(2, 4)),
    "batch norm": lambda: normalized(statistics(nn.BatchNorm2d(4))),
    "batch norm of vectors": lambda: (
        Around(flat_normalized, layer=nn.Linear(12, 5), norm=statistics(nn.BatchNorm1d(5))),
        5,
        (3, 2, 2),
    ),
    "in place": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(inplace=True)),
        5,
        (3, 4, 4),
    ),
    "nothing": lambda: (nn.Flatten(), 12, (3, 2, 2)),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_known_layers(kind, passes):
    body, features, shape = KNOWN[kind]()
    network, data = built(body, features, shape), batches(*shape)
    found = fisher(network, data)
    assert len(passes) == len(SIZES)  # one backward pass for each batch
    close(network, found, plain(network, data))


def test_lenet(passes):
    network, data = built(LeNet(), 500), batches(3, 32, 32, sizes=(3, 1))
    network.vector.mul_(0.1)  # 3,200 inputs: the features would be in the thousands, and one class certain
    found = fisher(network, data)
    assert passes == [5, 5]  # by the outputs of four layers and of the head; no pass per image
    close(network, found, plain(network, data))


@pytest.mark.parametrize("kind", ["tokens", "groups"])
@pytest.mark.parametrize("memory", [1, 3_000, 20_000])
def test_chunks_of_a_batch_sum_to_the_batch(kind, memory):
    if kind == "tokens":
        body, features, shape = KNOWN[kind]()
        network = built(body, features, shape)
    else:
        network, shape = convolving(CONVOLUTIONS[kind]()), (3, 9, 10)
    data = batches(*shape, sizes=(7, 4))
    close(network, fisher(network, data, memory), fisher(network, data))


def convolved():
    return nn.Sequential(nn.Conv2d(512, 512, 3, padding=1), nn.AvgPool2d(2), nn.Flatten()), 512 * 4_608


def in_tokens():
    layers = nn.Flatten(2), nn.Unflatten(1, (4, 128)), nn.Flatten(2), nn.Linear(512, 2_048), nn.Flatten()
    return nn.Sequential(*layers, nn.AvgPool1d(16)), 512 * 2_048


@pytest.mark.parametrize("body", [convolved, in_tokens])
def test_little_memory_means_small_products(body, monkeypatch):
    """Such gradients are 9 and 4 MB for each example; never all of them are in memory."""
    layers, values = body()
    network, data = built(layers, 512, (512, 2, 2)), batches(512, 2, 2, sizes=(6,))
    seen, real = [], torch.Tensor.square_
    monkeypatch.setattr(torch.Tensor, "square_", lambda each: (seen.append(each.numel()), real(each))[1])
    memory = 9 * values  # of 4 bytes: two examples and their inputs
    fisher(network, data, memory)
    assert max(seen) * 4 <= memory
    assert seen.count(2 * values) == 3  # 6 examples, two at a time


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
    body, features, shape = KNOWN["batch norm"]()
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
