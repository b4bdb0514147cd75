"""Means of what clients sent: dense vectors, some rows, or some single values.

    theta_G = sum over c of w_c * theta_c / sum over c of w_c

Of rows and single values only the senders count. Where nobody sent a value there is none: a client that receives such
a theta_G keeps its own value there.
"""

from __future__ import annotations

from typing import Literal

from weft.lazy import torch
from weft.wire import tensors
from weft.wire.tensors import Payload


def weighted_sum(parts: list[Payload], weights: list[float]) -> torch.Tensor:
    total = torch.zeros(tensors.size(parts[0]))
    for part, weight in zip(parts, weights, strict=True):
        if isinstance(part, tensors.Rows):
            part.add_to(total, weight)
        else:
            total.add_(tensors.dense(part), alpha=weight)
    return total


def average(parts: list[Payload], weights: list[float], divide: Literal["senders", "all"] = "senders") -> Payload:
    """The weighted mean, summed in the given order, so that equal updates give equal bits.

    `divide`: each value's sum by the weight of its senders, or by the weight of all.
    """
    total = weighted_sum(parts, weights)
    if isinstance(parts[0], torch.Tensor):
        return total.div_(sum(weights))
    share = torch.zeros(len(_sent_units(parts[0])))  # for each row or value the weight of its senders
    for part, weight in zip(parts, weights, strict=True):
        share.add_(_sent_units(part), alpha=weight)
    anybody = share > 0
    divisor = share.where(anybody, 1.0) if divide == "senders" else torch.full_like(share, sum(weights))
    if isinstance(parts[0], tensors.Sparse):
        return tensors.Sparse.of(total.div_(divisor))
    return tensors.Rows.of(total.div_(tensors.by_value(divisor, parts[0].segments)), parts[0].segments, anybody)


def mix(known: Payload, update: Payload, weight: float) -> Payload:
    """One update mixed into what is known, in the rows or values that it has: (1 - w) * known + w * update.

    Where nothing was known the update stands as it is.
    """
    if isinstance(known, torch.Tensor) and isinstance(update, torch.Tensor):
        return torch.lerp(known, update, weight)
    in_update, in_known = tensors.present(update), tensors.present(known)
    value, new = tensors.dense(known), tensors.dense(update)
    value = torch.where(in_update, torch.where(in_known, torch.lerp(value, new, weight), new), value)
    if isinstance(known, torch.Tensor):
        return value
    if isinstance(update, tensors.Rows):
        return tensors.Rows.of(value, update.segments, _sent_units(known) | update.kept)
    return tensors.Sparse.of(value)


def _sent_units(part: Payload) -> torch.Tensor:
    """Which rows, or which single values, are present."""
    return part.kept if isinstance(part, tensors.Rows) else tensors.present(part)


def merge(received: Payload, weights: torch.Tensor) -> torch.Tensor:
    """B(n) = theta_G(n) where theta_G(n) is not 0 (section 3.4), and the client's value elsewhere.

    Of rows all sent values count, including those that the wire rounded to 0.
    """
    if isinstance(received, torch.Tensor):
        return received
    if isinstance(received, tensors.Rows):
        return received.over(weights.clone())
    value = received.dense()
    return torch.where(value != 0, value, weights)


def compact(vector: Payload) -> Payload:
    """A vector with many zeros as its nonzeros, whose indices travel with at most a byte each."""
    if isinstance(vector, torch.Tensor) and 2 * int(vector.count_nonzero()) < len(vector):
        return tensors.Sparse.of(vector)
    return vector
