"""The paper's LeNet, compared with a plain one; any network as one vector; batches."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from weft import networks
from weft.benchmarks.plain_lenet import PlainLeNet
from weft.networks.batches import Batches
from weft.networks.flat import TRUNCATED_DEVIATION, Network, variance_scaling
from weft.networks.lenet import CHUNK, LocalResponseNorm, channel_band
from weft.networks.mlp import Mlp
from weft.randomness import generator
from weft.scenarios import Split

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def lenet():
    """Scratch memory that tests share."""
    network = networks.build("lenet", {}, heads=(5,))
    fill(network, 0)
    return network


def fill(network, seed):
    network.vector[: network.layout.body] = network.initial_body(generator(seed, "initial"))
    network.vector[network.layout.body :] = network.initial_head(generator(seed, "head"))


def pictures(seed, count=4, strength=1.0):
    return strength * torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


# ---- LeNet


def test_lenet_counts(lenet):
    layout = lenet.layout
    biases, head = layout.body - layout.weights, layout.size - layout.body
    assert (layout.weights, biases, head) == (2_986_500, 1_370, 2_505)
    assert layout.body + 10 * head == 3_012_920  # 60.3 MB for five clients in float32, the paper's 61
    assert layout.rows == 1_370


def test_lenet_layout(lenet):
    found = [(layer.name, layer.shape, layer.offset, layer.first_row) for layer in lenet.layout.layers]
    assert found == [
        ("conv1.weight", (20, 3, 5, 5), 0, 0),
        ("conv2.weight", (50, 20, 5, 5), 1_500, 20),
        ("fc1.weight", (800, 3200), 26_500, 70),
        ("fc2.weight", (500, 800), 2_586_500, 870),
    ]
    assert lenet.layout.segments == ((20, 75), (50, 500), (800, 3200), (500, 800))


@pytest.mark.parametrize(("pool", "channels_last"), [(3, True), (3, False), (2, True)])
def test_lenet_equals_a_plain_one(pool, channels_last):
    """Logits, loss and gradient of the benchmark's reference, which has only standard torch modules."""
    network = networks.build("lenet", {"pool": pool}, heads=(5,))
    fill(network, 1)
    plain = PlainLeNet()
    plain.pool = nn.MaxPool2d(pool, stride=2, ceil_mode=True)
    layers = [f"{layer}.{kind}" for kind in ("weight", "bias") for layer in ("conv1", "conv2", "fc1", "fc2")]
    parameters = [plain.get_parameter(name) for name in (*layers, "head.weight", "head.bias")]  # as in the vector
    network.vector[network.layout.weights : network.layout.body].normal_(0, 0.1, generator=torch.Generator())  # biases
    nn.utils.vector_to_parameters(network.vector, parameters)
    images, labels = pictures(2, strength=30.0), torch.tensor([0, 4, 2, 2])
    given = images.contiguous(memory_format=torch.channels_last) if channels_last else images

    loss = functional.cross_entropy(plain(images), labels)
    gradients = torch.autograd.grad(loss, parameters)
    assert network.compute_gradient(given, labels) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(network.logits(given), plain(images), rtol=1e-4, atol=1e-5)
    wanted = nn.utils.parameters_to_vector(gradients)
    # two equal values in a pooling window may differ in their last bits, so a few gradients may go elsewhere
    apart = (network.gradient - wanted).abs()
    assert (apart > 1e-3 * wanted.abs() + 1e-5 * wanted.abs().max()).float().mean() < 1e-3
    assert apart.norm() < 5e-3 * wanted.norm()


def test_convolutions_in_chunks_have_the_gradient_of_a_whole_batch(monkeypatch):
    network = networks.build("lenet", {}, heads=(5,))
    fill(network, 1)
    images = pictures(3, count=60, strength=30.0)  # two chunks and ten images
    labels = torch.arange(60) % 5
    assert len(images) > CHUNK
    network.compute_gradient(images, labels)
    in_chunks = network.gradient.clone()
    monkeypatch.setattr("weft.networks.lenet.CHUNK", len(images))
    network.compute_gradient(images, labels)
    assert (in_chunks - network.gradient).norm() < 1e-5 * in_chunks.norm()


@pytest.mark.parametrize("channels", [1, 5, 9, 20])
@pytest.mark.parametrize("strength", [0.0, 1.0, 100.0])
def test_local_response_norm_equals_torchs(channels, strength):
    x = strength * torch.randn(2, channels, 3, 4, generator=torch.Generator().manual_seed(channels))
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    found = LocalResponseNorm.apply(first, channel_band(channels))
    wanted = nn.LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1)(second)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-4, atol=1e-5)


def test_local_response_norm_gradcheck():
    # values this large make the norm matter: d reaches 3, not 1.001
    x = 40 * torch.randn(2, 12, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    band = channel_band(12).double()
    assert torch.autograd.gradcheck(lambda x: LocalResponseNorm.apply(x, band), x.requires_grad_())


# ---- any network as one vector


class WithBatchNorm(nn.Module):
    """A user-defined module: a norm in the middle, a layer without bias, a separate parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.full((2,), 0.75))

    def forward(self, images):
        return self.fc(functional.relu(self.norm(self.conv(images))).mean((2, 3))) * self.scale.sum()


KINDS = {
    "lenet": lambda: networks.build("lenet", {}, heads=(5,)),
    "mlp": lambda: Network(Mlp(3072, 8, 6), 6, (3,)),
    "own": lambda: Network(WithBatchNorm(), 6, (3,)),
}


def test_by_layer_gives_views():
    layout = Network(WithBatchNorm(), 6, (3,)).layout
    vector = torch.zeros(layout.weights)
    for layer, rows in layout.by_layer(vector):
        assert rows.shape == (layer.rows, layer.width)
        rows.fill_(1.0)
    assert (vector == 1).all()


def test_changing_the_vector_changes_the_output():
    network = Network(Mlp(3072, 8, 6), 6, (3,))
    fill(network, 0)
    images = pictures(0)
    before = network.logits(images)
    network.vector[network.layout.body - 1] += 1.0  # the last bias of the second layer
    assert not torch.equal(network.logits(images), before)
    network.vector.zero_()
    network.vector[-3:] = torch.tensor([1.0, 2.0, 3.0])  # only the head's bias
    assert network.logits(images).tolist() == [[1, 2, 3]] * 4


# ---- initial values


@pytest.mark.parametrize("shape", [(50, 20, 5, 5), (400, 800), (500, 40)])
def test_initial_weights_have_fan_in_variance_and_no_tails(shape):
    values = variance_scaling(shape, generator(0, "test"))
    assert values.shape == shape
    fan_in = math.prod(shape[1:])
    assert values.var().item() * fan_in == pytest.approx(1, abs=0.04)
    assert values.mean().item() * math.sqrt(fan_in) == pytest.approx(0, abs=0.03)
    cut = 2 / (TRUNCATED_DEVIATION * math.sqrt(fan_in))
    assert 0.99 * cut < values.abs().max().item() <= cut * (1 + 1e-6)


def test_the_deviation_of_a_truncated_normal():
    """1 - 4 * pdf(2) / (2 * cdf(2) - 1) is the variance of a normal truncated at two deviations."""
    density, inside = math.exp(-2) / math.sqrt(2 * math.pi), math.erf(math.sqrt(2))
    assert pytest.approx(math.sqrt(1 - 4 * density / inside), rel=1e-12) == TRUNCATED_DEVIATION


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bits(kind):
    network = KINDS[kind]()
    first = network.initial_body(generator(0, "initial"))
    network.vector.add_(5.0)  # scratch memory that all clients share
    again, other = (network.initial_body(generator(seed, "initial")) for seed in (0, 1))
    assert torch.equal(first, again)
    assert len(first) == network.layout.body
    assert not torch.equal(first, other)
    assert kind == "own" or (first[network.layout.weights :] == 0).all()  # biases
    assert first.data_ptr() != network.vector.data_ptr()
    head, same = (network.initial_head(generator(0, "head")) for _ in range(2))
    assert torch.equal(head, same)
    assert len(head) == network.layout.size - network.layout.body
    assert (head[-network.classes :] == 0).all()
    assert head[-network.classes * 7 : -network.classes].count_nonzero() > 0


def test_other_parameters_start_as_their_module_initialized_them():
    network = Network(WithBatchNorm(), 6, (3,))
    start = network.initial_body(generator(0, "initial"))
    rest, place = {}, network.layout.weights
    for name, parameter in network.body.named_parameters():
        if name not in ("conv.weight", "fc.weight"):
            rest[name] = start[place : place + parameter.numel()].tolist()
            place += parameter.numel()
    assert rest == {"scale": [0.75] * 2, "norm.weight": [1.0] * 4, "norm.bias": [0.0] * 4, "fc.bias": [0.0] * 6}


# ---- evaluation


def test_measure_is_over_the_whole_split():
    """Accuracy and cross entropy of 300 images in three chunks are those of all at once."""
    network = Network(Mlp(3072, 8, 6), 6, (3,))
    fill(network, 0)
    rng = np.random.default_rng(1)
    split = Split(rng.integers(256, size=(300, 32, 32, 3), dtype=np.uint8), rng.integers(3, size=300))
    batches = Batches(split, (128.0,) * 3, (64.0,) * 3)
    accuracy, loss = network.measure(batches)
    with torch.no_grad():
        logits = network.logits(batches.take(torch.arange(300))[0])
    assert accuracy == int((logits.argmax(1) == batches.labels).sum()) / 300
    assert loss == pytest.approx(functional.cross_entropy(logits, batches.labels).item(), rel=1e-5)


def test_a_network_is_built_once_for_each_kind():
    options = {"hidden": 4, "features": 4}
    first, again = (networks.build("mlp", options, heads=(2,)) for _ in range(2))
    assert first is again
    assert networks.build("mlp", options, heads=(3,)) is not first


# ---- batches


def test_batches_normalize_with_mean_and_deviation_of_the_task():
    images = np.zeros((3, 2, 2, 3), dtype=np.uint8)
    images[1] = [10, 20, 30]
    images[2, 0, 1] = [255, 0, 7]
    split = Split(images, np.array([0, 1, 2]))
    batches = Batches(split, mean=(10.0, 0.0, 6.0), deviation=(5.0, 2.0, 0.5))
    found, labels = batches.take(torch.tensor([2, 1]))
    assert found.shape == (2, 3, 2, 2)
    assert labels.tolist() == [2, 1]
    assert found[1, :, 0, 0].tolist() == [0, 10, 48]
    assert found[0, :, 0, 1].tolist() == [49, 0, 2]
    assert found[0, :, 1, 1].tolist() == [-2, 0, -12]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert not found.is_contiguous()
    assert len(batches) == 3
    assert images[1, 0, 0].tolist() == [10, 20, 30]  # the images are not changed


def test_batches_in_order():
    rng = np.random.default_rng(0)
    split = Split(rng.integers(256, size=(7, 4, 4, 3), dtype=np.uint8), np.arange(7))
    batches = Batches(split, (0.0,) * 3, (1.0,) * 3)
    chunks = list(batches.in_order(chunk=3))
    assert [len(labels) for _, labels in chunks] == [3, 3, 1]
    assert torch.cat([labels for _, labels in chunks]).tolist() == list(range(7))
    whole, _ = batches.take(torch.arange(7))
    assert torch.equal(torch.cat([images for images, _ in chunks]), whole)
