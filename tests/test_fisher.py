"""The Fisher information of whole batches, compared with a loop over images and computed by hand."""

import math

import pytest
import torch
from fisher_helpers import SIZES, Around, batches, built, close, normalized, plain, statistics
from torch import nn
from torch.nn import functional

from weft.networks.fisher import fisher
from weft.networks.flat import Network
from weft.networks.lenet import LeNet
from weft.networks.mlp import Mlp

pytest_plugins = ["fisher_helpers"]


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
    "sequences": lambda: nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=1),
    "sequences, same": lambda: nn.Conv1d(4, 6, 4, padding="same", groups=2, bias=False),
    "sequences, circular": lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="circular"),
}


def convolving(layer):
    """A layer of interest between two others, so that it has neighbors on both sides."""

    one = isinstance(layer, nn.Conv1d)

    def forward(self, images):
        before = functional.tanh(self.before(images.flatten(2) if one else images))
        return functional.tanh(self.layer(before)).flatten(2).square().mean(2)

    return built(Around(forward, before=(nn.Conv1d if one else nn.Conv2d)(3, 4, 3), layer=layer), layer.out_channels)


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


def tokens_first(self, images):
    """Images become tokens of 8 values, in rows and columns; every token passes the same two layers."""
    tokens = images.flatten(2).mT.unflatten(1, (2, -1))  # (batch, 2, 8, channels)
    return self.second(functional.gelu(self.norm(self.first(tokens)))).square().mean((1, 2))


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
