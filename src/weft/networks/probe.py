"""What a body does, found by trying it on two images: how many features it gives, and what a training step changes.

By what it does and not by its class, so that somebody's own norm or dropout is found as well as torch's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from weft.errors import WeftError
from weft.registry import error_line

IMAGE = (3, 32, 32)  # every scenario's images are brought to this size


class Tried(NamedTuple):
    statistics: list[tuple[nn.Module, str]]  # floating buffers that training changes: whose, and under which name
    random: bool  # does training draw random numbers, as dropout does?


def count_features(body: nn.Module, image: tuple[int, ...] = IMAGE) -> int:
    """The n of the (batch, n) that a body gives. Lazy modules find their sizes here."""
    return _features(body.eval(), image).shape[1]


def try_out(body: nn.Module, image: tuple[int, ...] = IMAGE) -> Tried:
    """One forward pass as in training; everything is put back as it was."""
    for name, module in body.named_modules():
        counting = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if counting and module.momentum is None:  # a mean over all batches, counted in num_batches_tracked
            raise WeftError(f"batch norm {name!r} has momentum=None, which is not supported; choose one such as 0.1")
    homes = {
        f"{prefix}.{name}".lstrip("."): (module, name)
        for prefix, module in body.named_modules()
        for name in module._buffers
    }
    held = dict(body.named_buffers())  # each tensor once, also where two modules share it
    before = {name: buffer.clone() for name, buffer in held.items()}
    with torch.random.fork_rng(devices=[]):
        state = torch.random.get_rng_state()
        _features(body.train(), image)
        random = not torch.equal(torch.random.get_rng_state(), state)
    body.eval()
    changed = []
    for name, old in before.items():
        owner, own_name = homes[name]
        now = owner._buffers[own_name]
        if now is not None and now.shape == old.shape and torch.equal(now, old):
            continue
        held[name].copy_(old)
        owner._buffers[own_name] = held[name]
        if own_name == "num_batches_tracked":  # only momentum=None reads it
            continue
        if now is None or now.shape != old.shape or not old.is_floating_point():
            raise WeftError(
                f"buffer {name!r} is changed by training and cannot be kept; use a float one of fixed shape"
            )
        changed.append((owner, own_name))
    return Tried(changed, random)


@torch.no_grad()
def _features(body: nn.Module, image: tuple[int, ...]) -> torch.Tensor:
    shape = (2, *image)  # a batch norm needs two images
    source = torch.Generator()
    source.manual_seed(0)
    device = next((tensor.device for tensor in [*body.parameters(), *body.buffers()]), torch.device("cpu"))
    images = torch.randn(shape, generator=source).to(device)
    if len(image) == 3:
        images = images.contiguous(memory_format=torch.channels_last)
    try:
        found = body(images)
    except Exception as error:
        raise WeftError(f"it fails on images of shape {shape}: {error_line(error)}") from error
    if not isinstance(found, torch.Tensor):
        raise WeftError(
            f"it gave a {type(found).__name__} for images of shape {shape}; wanted are features ({shape[0]}, n)"
        )
    if found.dim() != 2 or found.shape[0] != shape[0] or not found.shape[1]:
        raise WeftError(
            f"it gave shape {tuple(found.shape)} for images of shape {shape}; wanted are features ({shape[0]}, n), "
            "so flatten or average what is left of an image"
        )
    return found
