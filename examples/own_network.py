"""A network of your own: an nn.Module from images (batch, 3, 32, 32) to features (batch, n); weft adds the heads.

weft run demo network=examples/own_network.py:Small network.width=24
"""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    """Its keyword arguments are its options, and their defaults the plan's."""

    def __init__(self, width: int = 16, dropout: float = 0.1):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 5, stride=2, padding=2), nn.BatchNorm2d(width), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Dropout(dropout))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.last(self.second(self.first(images)))
        return features
