"""Robust aggregation: what one client says counts no more than what the others bear out.

A method takes the mean of what clients answered. Here the answers are changed before it does, so that the mean of the
changed ones is robust, for any method that averages:

    median   every value becomes the median over those that sent it
    clip     x <- v + (x - v) * min(1, r / |x - v|)      v: that median, r: the median of all |x - v|

So with `median` a minority of liars moves no value out of the range of the honest ones, and with `clip` (centred
clipping, Karimireddy et al., ICML 2021) each can pull only as far as a typical client does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

import torch

from weft.wire.message import Message
from weft.wire.tensors import Payload, Rows, Sparse, dense, present

Aggregation = Literal["mean", "median", "clip"]


def robust(replies: list[Message], names: Collection[str] | None, rule: Aggregation) -> list[Message]:
    """The replies of a round with the tensors of these names (None: all) made harmless."""
    if rule == "mean" or len(replies) < 2:
        return replies
    changed = [dict(reply.tensors) for reply in replies]
    for name in sorted({name for reply in replies for name in reply.tensors if names is None or name in names}):
        senders = [place for place, reply in enumerate(replies) if name in reply.tensors]
        parts = [replies[place].tensors[name] for place in senders]
        for place, part in zip(senders, median(parts) if rule == "median" else clip(parts), strict=True):
            changed[place][name] = part
    return [
        dataclasses.replace(reply, tensors=tensors, fields=_of_equal_weight(reply.fields))
        for reply, tensors in zip(replies, changed, strict=True)
    ]


def _of_equal_weight(numbers: dict[str, Any]) -> dict[str, Any]:
    """How many examples it learned from is a client's own word, and would make its vote as heavy as it likes."""
    return numbers | {"examples": 1} if "examples" in numbers else numbers


def median(parts: list[Payload]) -> list[Payload]:
    """Each part with its values replaced by their median over those that sent them."""
    middle = coordinate_median(parts)
    return [_with_values(part, middle) for part in parts]


def clip(parts: list[Payload]) -> list[Payload]:
    """Each part drawn towards the median, to a typical distance from it."""
    middle = coordinate_median(parts)
    moved = [(dense(part) - middle) * sent for part, sent in zip(parts, map(present, parts), strict=True)]
    distances = torch.stack([change.norm() for change in moved])
    radius = torch.quantile(distances, 0.5)
    return [
        _with_values(part, middle + change * min(1.0, float(radius / distance)) if distance > 0 else middle)
        for part, change, distance in zip(parts, moved, distances, strict=True)
    ]


def coordinate_median(parts: list[Payload]) -> torch.Tensor:
    """The median of each value over those that sent it, the mean of the middle two if their number is even.

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


def _with_values(part: Payload, vector: torch.Tensor) -> Payload:
    if isinstance(part, Rows):
        return Rows.of(vector, part.segments, part.kept)
    if isinstance(part, Sparse):
        return Sparse(part.size, part.indices, vector[part.indices.long()])
    return vector.clone()
