"""User-defined networks in plain torch, without any import of weft; tests name them by this file."""

import torch
from torch import nn
from torch.nn import functional


class OwnMlp(nn.Module):
    def __init__(self, hidden: int = 8, features: int = 6):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3072, hidden), nn.ReLU(), nn.Linear(hidden, features), nn.ReLU()
        )

    def forward(self, images):
        return self.layers(images)


class Block(nn.Module):
    def __init__(self, width, heads, dropout, attention_dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=attention_dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small vision transformer (Dosovitskiy et al. 2021)."""

    def __init__(self, width: int = 8, depth: int = 1, heads=2, dropout: float = 0.1, attention_dropout=0.0):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, attention_dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)  # (batch, 16, width)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.norm(self.blocks(self.dropout(x)))[:, 0]


class Conv1dNet(nn.Module):
    """An image as a sequence of rows of pixels; the widths of its layers are a list."""

    def __init__(self, widths=(4, 6), act=nn.ReLU):
        super().__init__()
        assert isinstance(widths, tuple)
        layers, inputs = [], 3
        for width in widths:
            layers += [nn.Conv1d(inputs, width, 8, stride=8), act()]
            inputs = width
        self.layers = nn.Sequential(*layers)

    def forward(self, images):
        return self.layers(images.flatten(2)).mean(2)  # (batch, 3, 1024) -> (batch, width, 16) -> (batch, width)


class Normed(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 5, stride=4, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 6)
        self.norm2 = nn.BatchNorm1d(6)

    def forward(self, images):
        x = functional.relu(self.norm(self.conv(images))).mean((2, 3))
        return functional.relu(self.norm2(self.fc(x)))


class Lazy(nn.Module):
    """Infers its sizes from the first images."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.LazyConv2d(4, 5, stride=4), nn.LazyBatchNorm2d(), nn.LazyLinear(6)

    def forward(self, images):
        return self.fc(self.norm(self.conv(images)).flatten(1))


def from_a_function(depth: int, *, wide: bool = False, rate: float = 0.5, copy=1, act=nn.ReLU, **more):
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 8 if wide else 4), *(act() for _ in range(depth)))


def image_to_image():
    return nn.Conv2d(3, 4, 3)


def returns_a_pair():
    class Pair(nn.Linear):
        def forward(self, images):
            return images, images

    return Pair(1, 1)


def nothing_to_train():
    return nn.Flatten()


def wrong_size():
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 4))


def no_module():
    return 5


def takes_statistics(statistics: str = "own"):
    return image_to_image()


number = 5
