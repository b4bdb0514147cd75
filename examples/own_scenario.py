"""Scenarios of your own, in Python: from arrays, and from a torch.utils.data.Dataset.

A scenario is a function of the plan's clients, tasks and seed that gives a Scenario; its other arguments are options:

    weft show examples/own_scenario.py:stripes clients=2 tasks=2
    weft run demo scenario=examples/own_scenario.py:stripes clients=2 tasks=2 scenario.images=60
    weft run demo scenario=examples/own_scenario.py:from_torch clients=2 tasks=1
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from weft.randomness import generator
from weft.scenarios import Scenario, Task
from weft.scenarios.arrays import from_arrays, from_dataset


def stripes(clients: int, tasks: int, seed: int, images: int = 90) -> Scenario:
    """Stripes that run across, down or both ways, in grey and 48x48: weft resizes them. Three shots of each scene."""

    def task(client: int, step: int) -> Task:
        rng = generator(seed, "stripes", client, step)
        labels = np.arange(images) % 3
        across, down = (np.sin(np.arange(48) / rng.uniform(1, 4, (images, 1))) for _ in range(2))
        kinds = [across[:, :, None] + 0 * down[:, None], 0 * across[:, :, None] + down[:, None]]
        kinds.append(across[:, :, None] + down[:, None])
        pictures = np.choose(labels[:, None, None], kinds) / 4 + 0.5  # (images, 48, 48), from 0 to 1
        scenes = [f"scene {place // 9}" for place in range(images)]  # a scene is never in train and in test
        return from_arrays(f"stripes-{step}", pictures, labels, classes=["across", "down", "both"], groups=scenes)

    return Scenario("stripes", tuple(tuple(task(client, step) for step in range(tasks)) for client in range(clients)))


class Squares(Dataset[tuple[torch.Tensor, int]]):
    """Any map-style dataset will do: images as tensors, arrays or Pillow's, labels as numbers or words."""

    classes = ("left", "right")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        image = torch.zeros(3, 20, 20)
        side = place % 2
        image[:, 5:15, 10 * side : 10 * side + 5 + place % 5] = 1
        return image, side


def from_torch(clients: int, tasks: int, seed: int) -> Scenario:
    task = from_dataset("squares", Squares())
    return Scenario("squares", ((task,) * tasks,) * clients)
