"""The paper's LeNet (appendix A): two 5x5 convolutions of 20 and 50 filters, then 800 and 500 units.

After each convolution come ReLU, local response normalization and 3x3 pooling of stride 2, in that order. 2,986,500
weights, 1,370 biases, and a head of 2,505 values for a task of five classes: 3,012,920 values with ten heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

FEATURES = 500

# Local response normalization as the released networks use it: k = 1, alpha = 1e-3 over 9 channels, beta = 3/4.
WINDOW = 9
ALPHA = 1e-3

# Images per pass through the convolutions: what is between two layers then stays in the cache of a core.
CHUNK = 25


class LeNet(nn.Module):
    def __init__(self, pool: int = 3):
        """`pool` is the side of the pooling window: 3 in the paper's table, 2 in its text; either halves the image."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, 20, 5, padding=2)
        self.conv2 = nn.Conv2d(20, 50, 5, padding=2)
        self.fc1 = nn.Linear(50 * 8 * 8, 800)
        self.fc2 = nn.Linear(800, FEATURES)
        self.pool = pool
        self.plain = False  # standard operations on whole batches, for export; the same results
        self.register_buffer("band1", channel_band(20), persistent=False)
        self.register_buffer("band2", channel_band(50), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        chunks = (images,) if self.plain else torch.split(images, CHUNK)
        x = torch.cat([self._convolutions(chunk).flatten(1) for chunk in chunks])
        x = functional.relu(self.fc1(x))
        return functional.relu(self.fc2(x))

    def _convolutions(self, images: torch.Tensor) -> torch.Tensor:
        x = self._block(self.conv1(images), self.band1)  # (chunk, 20, 16, 16)
        return self._block(self.conv2(x), self.band2)  # (chunk, 50, 8, 8)

    def _block(self, x: torch.Tensor, band: Any) -> torch.Tensor:
        x = functional.relu(x, inplace=not self.plain)
        x = normalize(x, band)[0] if self.plain else LocalResponseNorm.apply(x, band)  # type: ignore[no-untyped-call]
        return functional.max_pool2d(x, self.pool, stride=2, ceil_mode=True)  # rounds up, as TensorFlow's SAME does


def channel_band(channels: int) -> torch.Tensor:
    """The matrix that sums squares over a window of channels: alpha / window within the window, 0 outside."""
    index = torch.arange(channels)
    inside = (index[:, None] - index[None, :]).abs() <= WINDOW // 2
    return inside.float() * (ALPHA / WINDOW)


def normalize(x: torch.Tensor, band: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = x * d^(-3/4) with d = 1 + band(x^2), and values for the backward pass: x as a matrix, d^(-1/2), d^(-3/4)."""
    batch, channels, height, width = x.shape
    flat = x.permute(0, 2, 3, 1).reshape(-1, channels)  # a view: (batch * height * width, channels)
    root = torch.addmm(x.new_ones(()), flat * flat, band).rsqrt_()  # d^(-1/2)
    power = root.sqrt().mul_(root)  # d^(-3/4)
    return (flat * power).view(batch, height, width, channels).permute(0, 3, 1, 2), flat, root, power


class LocalResponseNorm(torch.autograd.Function):
    """y = x * d^(-3/4) with d = 1 + band(x^2): a fast nn.LocalResponseNorm, which took most of the LeNet step.

    Three times faster on one core: the window sum is a matrix product over the channels of channels-last images, the
    power is rsqrt(d) * sqrt(rsqrt(d)), and the backward pass is explicit:
    dx = g * d^(-3/4) - 3/2 * x * band(g * x * d^(-7/4)).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, band: torch.Tensor) -> torch.Tensor:
        normal, flat, root, power = normalize(x, band)
        ctx.save_for_backward(flat, root, power, band)
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        flat, root, power, band = ctx.saved_tensors
        batch, channels, height, width = gradients[0].shape
        g = gradients[0].permute(0, 2, 3, 1).reshape(-1, channels)
        inner = (g * flat).mul_(power).mul_(root).mul_(root)  # g * x * d^(-7/4)
        out = torch.mm(inner, band).mul_(flat).mul_(-1.5).addcmul_(g, power)  # the band is symmetric
        return out.view(batch, height, width, channels).permute(0, 3, 1, 2), None


def body(pool: int) -> tuple[nn.Module, int]:
    return LeNet(pool), FEATURES
