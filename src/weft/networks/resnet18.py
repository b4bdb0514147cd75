"""ResNet-18 (He et al. 2016, "Deep residual learning for image recognition", table 1 and figure 3, left).

Four stages of two blocks, of 64, 128, 256 and 512 channels; each stage after the first halves the image. A block adds
the output of two 3x3 convolutions to its input, or to a 1x1 convolution of its input where the shape changes (option B
of section 3.3). 11,168,832 values without the head, with the small stem.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

FEATURES = 512
CHANNELS = (64, 128, 256, 512)

# Channels per group of group norm, equal in every stage: a mean is over at least 8 values, even where the classical
# stem reduces a 32x32 image to 1x1. With the 32 groups of Wu and He (2018) the first 64 channels would have 2 each.
GROUP = 8


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = make_norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = make_norm(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(convolution, make_norm(norm, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))  # (batch, outputs, height / stride, width / stride)
        return functional.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, stem: str = "small", norm: str = "batch"):
        """`stem` small: 3x3 of stride 1, usual for 32x32 images. Classical: 7x7 of stride 2, then pooling."""
        super().__init__()
        self.small = stem == "small"
        side, stride = (3, 1) if self.small else (7, 2)
        # no bias in convolutions: the norm after each has one
        self.conv = nn.Conv2d(3, CHANNELS[0], side, stride=stride, padding=side // 2, bias=False)
        self.norm = make_norm(norm, CHANNELS[0])
        stages, inputs = [], CHANNELS[0]
        for stage, outputs in enumerate(CHANNELS):
            stages += [Block(inputs, outputs, 2 if stage else 1, norm), Block(outputs, outputs, 1, norm)]
            inputs = outputs
        self.blocks = nn.Sequential(*stages)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.conv(images)))  # (batch, 64, 32, 32), or 16 x 16 with the classical stem
        if not self.small:
            x = functional.max_pool2d(x, 3, stride=2, padding=1)  # (batch, 64, 8, 8)
        x = self.blocks(x)  # (batch, 512, 4, 4), or 1 x 1
        return torch.mean(x, (2, 3))  # (batch, 512)


def make_norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(channels // GROUP, channels)


def body(stem: str, norm: str) -> tuple[nn.Module, int]:
    return ResNet18(stem, norm), FEATURES
