"""Formulas that methods share, each once, as plain functions of vectors; tests check their gradients by autograd.

Most belong to the decomposition: all vectors have the layout's `weights` values; masks have one number for each row
(output unit), and m * B means that row r of B is multiplied by m[r].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from weft.lazy import torch
from weft.methods.averaging import largest_places

if TYPE_CHECKING:
    from torch import Tensor

    from weft.networks.flat import Layer, Layout
    from weft.wire.tensors import Sparse


class Foreign(NamedTuple):
    """One foreign A, sparse, cut by layer: each layer has a separate attention."""

    indices: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @staticmethod
    def of(adaptive: Sparse, layout: Layout, device: torch.device) -> Foreign:
        starts = torch.tensor([layer.offset for layer in layout.layers[1:]], dtype=adaptive.indices.dtype)
        cuts = torch.searchsorted(adaptive.indices, starts).tolist()
        return Foreign(
            tuple(part.to(device) for part in adaptive.indices.tensor_split(cuts)),
            tuple(part.to(device) for part in adaptive.values.tensor_split(cuts)),
        )


def compose(
    layout: Layout,
    base: Tensor,
    mask: Tensor | None,
    adaptive: Tensor | None,
    attention: Tensor | None,
    foreign: list[Foreign],
    out: Tensor,
    origin: Tensor | None = None,
) -> None:
    """Eq. 1: theta = B * m + A + sum over foreign f and layers l of alpha[l, f] * A_f, written into `out`.

    `attention` is (layers * foreign,), layer by layer. No mask means m = 1, no adaptive A = 0. With an `origin`,
    `adaptive` is counted from there: A = origin + adaptive.
    """
    if origin is not None and adaptive is not None:
        compose(layout, base, mask, origin, attention, foreign, out)
        out.add_(adaptive)
        return
    if mask is None:
        out.copy_(base)
        if adaptive is not None:
            out.add_(adaptive)
    else:
        for layer, rows in layout.by_layer(out):
            b, m = base[layer.span].view_as(rows), mask[layer.row_span, None]  # (rows, width), (rows, 1)
            if adaptive is None:
                torch.mul(b, m, out=rows)
            else:
                torch.addcmul(adaptive[layer.span].view_as(rows), b, m, out=rows)
    if foreign and attention is not None:
        alpha = attention.view(-1, len(foreign)).tolist()
        for place, one in enumerate(foreign):
            for level, (indices, values) in enumerate(zip(*one, strict=True)):
                out.index_add_(0, indices, values, alpha=alpha[level][place])


def pull_back(
    layout: Layout,
    by_theta: Tensor,
    base: Tensor,
    mask: Tensor | None,
    foreign: list[Foreign],
    by_base: Tensor,
    by_mask: Tensor | None,
    by_attention: Tensor | None,
) -> None:
    """The gradient of Eq. 1: from g, by theta, to those by B (g * m), m (row sums of g * B) and alpha (g . A_f)."""
    if mask is None:
        by_base.copy_(by_theta)
    else:
        for layer, rows in layout.by_layer(by_theta):
            torch.mul(rows, mask[layer.row_span, None], out=by_base[layer.span].view_as(rows))
            if by_mask is not None:
                by_mask[layer.row_span] = torch.linalg.vecdot(rows, base[layer.span].view_as(rows))
    if by_attention is not None:
        table = by_attention.view(-1, len(foreign))
        for place, one in enumerate(foreign):
            for level, (indices, values) in enumerate(zip(*one, strict=True)):
                table[level, place] = torch.dot(by_theta.index_select(0, indices), values)


def sparsity(mask: Tensor, adaptives: list[Tensor]) -> Tensor:
    """Eq. 2, second term without its weight: |m|_1 + sum of |A_i|_1."""
    return mask.abs().sum() + torch.stack([adaptive.abs().sum() for adaptive in adaptives]).sum()


def drift(layout: Layout, change: Tensor, masks: list[Tensor], moved: list[Tensor]) -> Tensor:
    """Eq. 2, last term without its weight: the sum over past tasks of |dB * m_i + dA_i|^2."""
    total = torch.zeros(())
    for mask, adaptive_change in zip(masks, moved, strict=True):
        for layer, rows in layout.by_layer(change):
            own = adaptive_change[layer.span].view_as(rows)
            total = total + (rows * mask[layer.row_span, None] + own).square().sum()
    return total


def drift_gradient(
    layout: Layout, change: Tensor, mask_squares: Tensor, masked_changes: Tensor | None, weight: float, by_base: Tensor
) -> None:
    """The gradient of weight * drift by B, added: 2 * weight * (dB * sum of m_i^2 + sum of m_i * dA_i).

    Two sums over the past tasks, so its cost does not grow with their number.
    """
    add_masked(layout, change, mask_squares, by_base, 2 * weight)
    if masked_changes is not None:
        by_base.add_(masked_changes, alpha=2 * weight)


def drift_gradient_adaptive(
    layout: Layout, change: Tensor, mask: Tensor, moved: Tensor, weight: float, by_adaptive: Tensor, masked: Tensor
) -> None:
    """The gradient of weight * drift by a past A_i, added: 2 * weight * (dB * m_i + dA_i); `masked` gets m_i * dA_i."""
    for layer, rows in layout.by_layer(by_adaptive):
        m = mask[layer.row_span, None]
        own = moved[layer.span].view_as(rows)
        rows.addcmul_(change[layer.span].view_as(rows), m, value=2 * weight).add_(own, alpha=2 * weight)
    add_masked(layout, moved, mask, masked)


def add_masked(layout: Layout, vector: Tensor, mask: Tensor, total: Tensor, scale: float = 1.0) -> None:
    """Add scale * m * vector to `total`."""
    for layer, rows in layout.by_layer(total):
        rows.addcmul_(vector[layer.span].view_as(rows), mask[layer.row_span, None], value=scale)


def retroactive(layout: Layout, before: Tensor, change: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """The past A_i that minimises Eq. 2 for a fixed B: soft(A_i(t-1) - dB * m_i, lambda_1 / (2 * lambda_2))."""
    best = before.clone()
    add_masked(layout, change, mask, best, -1)
    soft_threshold(best, threshold)
    return best


def soft_threshold(vector: Tensor, threshold: float) -> None:
    """In place: sign(a) * max(|a| - threshold, 0), the proximal step of threshold * |a|_1; it leaves exact zeros."""
    torch.ops.aten.softshrink.out(vector, threshold, out=vector)  # three times faster than composing it in place


def largest(adaptive: Tensor, share: float, sizes: Tensor | None = None) -> Tensor:
    """A with all but a share of its values set to 0, over the whole network; the first of equals stay.

    `sizes` says which are the largest: their own sizes if not given.
    """
    count = math.floor(share * len(adaptive) + 1e-9)
    if int(adaptive.count_nonzero()) <= count:
        return adaptive
    return torch.where(largest_places(adaptive.abs() if sizes is None else sizes, count), adaptive, 0.0)


def rows_kept(layer: Layer, keep: float) -> int:
    """How many rows of a layer are sent: its share, rounded up."""
    return math.ceil(keep * layer.rows - 1e-9)  # 0.14 * 50 is a little more than 7 in floating point


def strongest_rows(layout: Layout, mask: Tensor, keep: float) -> Tensor:
    """Which rows to send: of each layer the share `keep` with the largest |m|, rounded up; the first of equals."""
    kept = torch.zeros(layout.rows, dtype=torch.bool)
    for layer in layout.layers:
        order = mask[layer.row_span].abs().argsort(descending=True, stable=True)
        kept[layer.first_row + order[: rows_kept(layer, keep)]] = True
    return kept


def rows_in_turn(layout: Layout, turn: int, keep: float) -> Tensor:
    """Which rows to send: the next share `keep` of each layer, rounded up; after the last row comes the first again."""
    kept = torch.zeros(layout.rows, dtype=torch.bool)
    for layer in layout.layers:
        count = rows_kept(layer, keep)
        kept[layer.first_row + (turn * count + torch.arange(count)) % layer.rows] = True
    return kept
