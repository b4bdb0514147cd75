"""ResNet-18: its size, its stages, a block by hand, and its statistics."""

import pytest
import torch

from weft import networks
from weft.networks.resnet18 import ResNet18

torch.set_num_threads(1)


def pictures(seed, count=4):
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("options", "weights", "rest", "counted"),
    [
        ({}, 11_159_232, 9_600, 9_600),
        ({"norm": "group"}, 11_159_232, 9_600, 0),
        ({"stem": "classical"}, 11_166_912, 9_600, 9_600),
    ],
    ids=["small", "group", "classical"],
)
def test_resnet18_counts(options, weights, rest, counted):
    layout = networks.build("resnet18", options, (10,)).layout
    begin, end = layout.statistics
    assert (layout.weights, layout.body - layout.weights, end - begin) == (weights, rest, counted)
    if not options.get("stem"):  # the known size for CIFAR-10
        assert layout.body == 11_168_832
        assert layout.body + 10 * 513 == 11_173_962
    assert (len(layout.layers), layout.rows) == (20, 4_800)  # 17 convolutions of 3x3 and three of 1x1


def test_resnet18_can_share_its_statistics():
    own, shared = (networks.build("resnet18", {"statistics": where}, (10,)).layout for where in ("own", "shared"))
    assert shared.body == own.body + 9_600
    assert shared.size == own.size


@pytest.mark.parametrize(("stem", "sides"), [("small", [32, 32, 16, 8, 4]), ("classical", [16, 8, 4, 2, 1])])
def test_resnet18_stages(stem, sides):
    body, seen = ResNet18(stem), []
    for module in [body.conv, *(body.blocks[place] for place in (1, 3, 5, 7))]:
        module.register_forward_hook(lambda _, given, out: seen.append((out.shape[1:], out)))
    body(pictures(0, 2).contiguous(memory_format=torch.channels_last))
    assert [tuple(shape) for shape, _ in seen] == [
        (channels, side, side) for channels, side in zip((64, 64, 128, 256, 512), sides, strict=True)
    ]
    assert all(out.is_contiguous(memory_format=torch.channels_last) for _, out in seen)


def test_a_block_of_resnet18():
    """relu(norm(conv(relu(norm(conv x)))) + shortcut x), in numbers: convolutions of a single centered weight."""
    body = ResNet18().eval()
    block = body.blocks[2]
    with torch.no_grad():
        for conv, factor in ((block.conv1, 2.0), (block.conv2, -3.0), (block.shortcut[0], 5.0)):
            conv.weight.zero_()
            conv.weight[:64, :64, conv.kernel_size[0] // 2, conv.kernel_size[0] // 2] = factor * torch.eye(64)
        for factor, wanted in ((1.0, 0.0), (-1.0, 0.0)):  # 5 - 3 * 2 < 0; -5 - 3 * 0 < 0
            assert block(torch.full((1, 64, 4, 4), factor)).unique().tolist() == [wanted]
        block.conv2.weight.mul_(-1)
        x = block(torch.full((1, 64, 4, 4), 1.0))
    assert x.shape == (1, 128, 2, 2)
    assert x[0, 0].tolist() == [[pytest.approx(11.0, rel=1e-4)] * 2] * 2  # 5 + 3 * 2; norms divide by sqrt(1 + 1e-5)
    assert not x[0, 64:].any()
