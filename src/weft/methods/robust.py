"""Robust aggregation: what one client sends counts no more than what the others support.

    median   every value becomes the median over its senders
    clip     x <- v + (x - v) * min(1, r / |x - v|)      v: that median, r: the median of all |x - v|

The updates are changed before a method takes their mean, so the mean of the changed ones is robust, for any method that
averages. With `median` a minority of liars moves no value out of the range of the honest ones; with `clip` (centered
clipping, Karimireddy et al., ICML 2021) each can pull only as far as a typical client does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from weft.lazy import torch
from weft.methods.averaging import Update
from weft.wire.tensors import Payload, dense, present, with_values

Aggregation = Literal["mean", "median", "clip"]


def robust(updates: list[Update], rule: Aggregation) -> list[Update]:
    """The updates with every merged tensor made harmless."""
    changed = [dict(update.tensors) for update in updates]
    for name in sorted({name for update in updates for name in update.tensors}):
        senders = [index for index, update in enumerate(updates) if name in update.tensors]
        parts = [updates[index].tensors[name] for index in senders]
        for index, part in zip(senders, median(parts) if rule == "median" else clip(parts), strict=True):
            changed[index][name] = part
    return [replace(update, tensors=tensors) for update, tensors in zip(updates, changed, strict=True)]


def center(parts: list[torch.Tensor], rule: Aggregation) -> torch.Tensor:
    """The mean of some vectors, or of what a rule makes of them."""
    changed: list[Payload] = [*parts]
    if rule != "mean":
        changed = median(changed) if rule == "median" else clip(changed)
    total = torch.zeros_like(parts[0])
    for part in changed:
        total += dense(part)
    return total.div_(len(parts))


def median(parts: list[Payload]) -> list[Payload]:
    """Each part with its values replaced by their median over the senders."""
    middle = coordinate_median(parts)
    return [with_values(part, middle) for part in parts]


def clip(parts: list[Payload]) -> list[Payload]:
    """Each part drawn towards the median, to a typical distance from it."""
    middle = coordinate_median(parts)
    moved = [(dense(part) - middle) * sent for part, sent in zip(parts, map(present, parts), strict=True)]
    distances = torch.stack([change.norm() for change in moved])
    radius = torch.quantile(distances, 0.5)
    return [
        with_values(part, middle + change * min(1.0, float(radius / distance)) if distance > 0 else middle)
        for part, change, distance in zip(parts, moved, distances, strict=True)
    ]


def coordinate_median(parts: list[Payload]) -> torch.Tensor:
    """The median of each value over its senders, the mean of the middle two if their number is even.

    >>> coordinate_median([torch.tensor([1.0, 5.0]), torch.tensor([2.0, 7.0]), torch.tensor([9.0, 6.0])])
    tensor([2., 6.])
    """
    there = torch.stack([present(part) for part in parts])  # (parts, size)
    values = torch.stack([dense(part) for part in parts]).masked_fill_(~there, torch.inf)
    values = values.sort(dim=0).values
    count = there.sum(dim=0, keepdim=True)  # (1, size)
    low, high = ((count - 1) // 2).clamp_(min=0), count // 2
    middle = (values.gather(0, low) + values.gather(0, high)).squeeze(0) / 2
    return middle.masked_fill_(~there.any(dim=0), 0.0)
