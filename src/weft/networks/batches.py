"""The uint8 images of a split on a device, normalized batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weft.scenarios import Split


class Batches:
    def __init__(
        self, split: Split, mean: Sequence[float], deviation: Sequence[float], device: str = "cpu", first_label: int = 0
    ):
        """`first_label` is the index of the task's first class among those of several heads."""
        self.images = torch.from_numpy(split.images).to(device)  # uint8 (count, height, width, channels)
        self.labels = torch.from_numpy(split.labels).to(device) + first_label
        self.epoch = len(self.labels)  # images per epoch
        self._mean = torch.tensor(mean, device=device)  # (channels,), or per image (count, 1, 1, channels)
        self._deviation = torch.tensor(deviation, device=device)

    @staticmethod
    def pool(parts: Sequence[Batches], epoch: int) -> Batches:
        """The images of several tasks as one set, each normalized with the mean and deviation of its task."""
        pooled = Batches.__new__(Batches)
        pooled.images = torch.cat([part.images for part in parts])
        pooled.labels = torch.cat([part.labels for part in parts])
        pooled._mean = torch.cat([part._mean.expand(len(part), 1, 1, -1) for part in parts])
        pooled._deviation = torch.cat([part._deviation.expand(len(part), 1, 1, -1) for part in parts])
        pooled.epoch = epoch
        return pooled

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (batch, channels, height, width), channels last in memory, and their labels."""
        mean, deviation = self._mean, self._deviation
        if mean.dim() > 1:  # per image
            mean, deviation = mean[chosen], deviation[chosen]
        scaled = self.images[chosen].float().sub_(mean).div_(deviation)
        return scaled.permute(0, 3, 1, 2), self.labels[chosen]

    def in_order(self, chunk: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, len(self), chunk):
            yield self.take(slice(start, start + chunk))
