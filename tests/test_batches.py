"""Images on their way into a network."""

import numpy as np
import torch

from weft.networks.batches import Batches
from weft.scenarios import Split


def test_batches_normalise_with_the_tasks_own_mean_and_deviation():
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
    assert images[1, 0, 0].tolist() == [10, 20, 30]  # the images themselves stay as they are


def test_batches_in_order():
    rng = np.random.default_rng(0)
    split = Split(rng.integers(256, size=(7, 4, 4, 3), dtype=np.uint8), np.arange(7))
    batches = Batches(split, (0.0,) * 3, (1.0,) * 3)
    chunks = list(batches.in_order(chunk=3))
    assert [len(labels) for _, labels in chunks] == [3, 3, 1]
    assert torch.cat([labels for _, labels in chunks]).tolist() == list(range(7))
    whole, _ = batches.take(torch.arange(7))
    assert torch.equal(torch.cat([images for images, _ in chunks]), whole)
