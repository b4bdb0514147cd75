"""The paper's LeNet with standard torch modules and torch's Adam: the reference of `weft bench`.

It needs no weft, so that it also runs on Flower (flower_fedavg.py). A test checks that it computes the same function
as weft's LeNet.
"""

from __future__ import annotations

import torch
from torch import nn


class PlainLeNet(nn.Module):
    def __init__(self, classes: int = 5):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 20, kernel_size=5, padding=2)
        self.conv2 = nn.Conv2d(20, 50, kernel_size=5, padding=2)
        self.norm = nn.LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)
        self.pool = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.relu = nn.ReLU()
        self.fc1 = nn.Linear(50 * 8 * 8, 800)
        self.fc2 = nn.Linear(800, 500)
        self.head = nn.Linear(500, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.norm(self.relu(self.conv1(images))))  # (batch, 20, 16, 16)
        x = self.pool(self.norm(self.relu(self.conv2(x))))  # (batch, 50, 8, 8)
        x = self.relu(self.fc1(x.flatten(1)))
        x = self.relu(self.fc2(x))
        logits: torch.Tensor = self.head(x)
        return logits


class PlainTrainer:
    """Train a network with Adam, one batch per step: images are uint8 (batch, 3, 32, 32), normalized per batch."""

    def __init__(self, net: nn.Module, mean: tuple[float, ...], deviation: tuple[float, ...], rate: float):
        self.net = net
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.deviation = torch.tensor(deviation).view(1, -1, 1, 1)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(net.parameters(), lr=rate)

    def normalize(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() - self.mean) / self.deviation

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.criterion(self.net(self.normalize(images)), labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    @torch.no_grad()
    def accuracy(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        return float((self.net(self.normalize(images)).argmax(dim=1) == labels).float().mean().item())
