"""Formulas of the decomposition: digits by hand, gradients by autograd, minima by subgradients."""

import math

import pytest
import torch
from helpers import layout_of, spread, vector
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.methods.fedweit.formulas import (
    Foreign,
    compose,
    drift,
    drift_gradient,
    drift_gradient_adaptive,
    largest,
    pull_back,
    retroactive,
    rows_in_turn,
    soft_threshold,
    sparsity,
    strongest_rows,
)
from weft.wire.tensors import Sparse

ONE = layout_of((1, 1))  # one weight
TWO = layout_of((2, 3))  # two rows of three
NET = layout_of((4, 3, 2, 2), (5, 8), (1, 5))  # a convolution and two matrices: 48 + 40 + 5 weights, 10 rows
CPU = torch.device("cpu")

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=15, deadline=None)


def draw(seed, *sizes):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=rng) for size in sizes]


def sparse(seed, layout, share=0.3):
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.weights, generator=rng)
    return values * (torch.rand(layout.weights, generator=rng) < share)


def foreign_of(layout, *dense):
    return [Foreign.of(Sparse.of(one), layout, CPU) for one in dense]


def spread_attention(layout, attention, place, count):
    """alpha of one foreign A as a vector of all weights, each layer's number repeated."""
    table = attention.view(-1, count)
    return torch.cat([table[i, place].expand(layer.rows * layer.width) for i, layer in enumerate(layout.layers)])


def theta_of(layout, base, mask=None, adaptive=None, attention=None, foreign=()):
    out = torch.full((layout.weights,), math.nan)  # all of it must be written
    compose(layout, base, mask, adaptive, attention, list(foreign), out)
    return out


# ---- Eq. 1


def test_compose_one_weight_by_hand():
    foreign = foreign_of(ONE, vector(4), vector(-2))
    # 3 * 0.5 + 0.25 + 0.75 * 4 + 0.125 * -2
    assert theta_of(ONE, vector(3), vector(0.5), vector(0.25), vector(0.75, 0.125), foreign).tolist() == [4.5]
    assert theta_of(ONE, vector(3), vector(0.5), vector(0.25)).tolist() == [1.75]
    assert theta_of(ONE, vector(3), vector(0.5)).tolist() == [1.5]
    assert theta_of(ONE, vector(3), None, vector(0.25)).tolist() == [3.25]
    assert theta_of(ONE, vector(3)).tolist() == [3]


def test_compose_two_rows_by_hand():
    base = vector(1, 2, 3, 4, 5, 6)
    mask = vector(2, -1)  # a row each, not a column each
    adaptive = vector(0, 0, 10, 0, 20, 0)
    found = theta_of(TWO, base, mask, adaptive, vector(0.5), foreign_of(TWO, vector(8, 0, 0, 0, 0, -2)))
    assert found.tolist() == [6, 4, 16, -4, 15, -7]


def test_each_layer_has_its_own_attention():
    layout = layout_of((1, 2), (1, 1))
    foreign = foreign_of(layout, vector(1, 1, 1), vector(10, 0, 10))
    attention = vector(0.5, 2, 3, 4)  # layer 0: 0.5 and 2; layer 1: 3 and 4
    found = theta_of(layout, torch.zeros(3), None, None, attention, foreign)
    assert found.tolist() == [20.5, 0.5, 43]


def test_compose_leaves_its_arguments_alone():
    base, mask, adaptive, attention = draw(0, NET.weights, NET.rows, NET.weights, len(NET.layers))
    copies = [one.clone() for one in (base, mask, adaptive, attention)]
    theta_of(NET, base, mask, adaptive, attention, foreign_of(NET, sparse(1, NET)))
    assert all(map(torch.equal, (base, mask, adaptive, attention), copies))


@pytest.mark.parametrize("layout", [ONE, TWO, NET], ids=["one", "two", "net"])
def test_a_foreign_a_is_cut_at_the_layers(layout):
    dense = sparse(3, layout)
    (cut,) = foreign_of(layout, dense)
    assert len(cut.indices) == len(cut.values) == len(layout.layers)
    for layer, indices, values in zip(layout.layers, cut.indices, cut.values, strict=True):
        assert ((indices >= layer.span.start) & (indices < layer.span.stop)).all()
        assert torch.equal(values, dense[indices.long()])
        assert len(values) == dense[layer.span].count_nonzero()


@quick
@given(seeds, st.integers(0, 3))
def test_compose_and_pull_back_against_autograd(seed, count):
    base, mask, adaptive, by_theta = draw(seed, NET.weights, NET.rows, NET.weights, NET.weights)
    (attention,) = draw(seed + 1, len(NET.layers) * count)
    others = [sparse(seed + 2 + place, NET) for place in range(count)]
    leaves = [one.clone().requires_grad_() for one in (base, mask, adaptive, attention)]
    plain = leaves[0] * spread(NET, leaves[1]) + leaves[2]
    for place, other in enumerate(others):
        plain = plain + spread_attention(NET, leaves[3], place, count) * other

    foreign = foreign_of(NET, *others)
    found = theta_of(NET, base, mask, adaptive, attention if count else None, foreign)
    torch.testing.assert_close(found, plain.detach(), rtol=1e-5, atol=1e-5)

    wanted = torch.autograd.grad(plain @ by_theta, leaves, allow_unused=True)
    by_base, by_mask = torch.full_like(base, math.nan), torch.full_like(mask, math.nan)
    by_attention = torch.full_like(attention, math.nan) if count else None
    before = by_theta.clone()
    pull_back(NET, by_theta, base, mask, foreign, by_base, by_mask, by_attention)
    assert torch.equal(by_theta, before)  # d theta / d A = 1: the same memory is the gradient by A
    assert torch.equal(before, wanted[2])
    torch.testing.assert_close(by_base, wanted[0])
    torch.testing.assert_close(by_mask, wanted[1], rtol=1e-4, atol=1e-4)
    if count:
        torch.testing.assert_close(by_attention, wanted[3], rtol=1e-4, atol=1e-4)


def test_pull_back_by_hand():
    by_base, by_mask, by_attention = torch.zeros(6), torch.zeros(2), torch.zeros(1)
    by_theta, base = vector(1, 2, 3, -1, 0, 1), vector(1, 2, 3, 4, 5, 6)
    foreign = foreign_of(TWO, vector(8, 0, 0, 0, 0, -2))
    pull_back(TWO, by_theta, base, vector(2, -1), foreign, by_base, by_mask, by_attention)
    assert by_base.tolist() == [2, 4, 6, 1, 0, -1]
    assert by_mask.tolist() == [14, 2]  # 1 + 4 + 9 and -4 + 0 + 6
    assert by_attention.tolist() == [6]  # 1 * 8 + 1 * -2


def test_pull_back_without_a_mask_is_the_identity():
    by_theta, base = draw(5, NET.weights, NET.weights)
    by_base = torch.zeros(NET.weights)
    pull_back(NET, by_theta, base, None, [], by_base, None, None)
    assert torch.equal(by_base, by_theta)


def test_pull_back_through_a_mask_that_is_not_learned():
    """m is in Eq. 1 also where its gradient is not needed."""
    by_base = torch.zeros(1)
    pull_back(ONE, vector(3), vector(7), vector(0.5), [], by_base, None, None)
    assert by_base.tolist() == [1.5]


# ---- Eq. 2


def test_sparsity_by_hand():
    assert sparsity(vector(0.5, -0.25), [vector(1, -2, 0), vector(4)]).item() == 7.75


def test_drift_by_hand():
    # one weight: (2 * 0.5 + 3)^2 + (2 * -1 + 0)^2
    assert drift(ONE, vector(2), [vector(0.5), vector(-1)], [vector(3), vector(0)]).item() == 20
    # two rows, m = (2, 0): |(2, 4, 6) + (1, 0, 0)|^2 + |0 + (0, 0, 5)|^2
    change, moved = vector(1, 2, 3, 4, 5, 6), vector(1, 0, 0, 0, 0, 5)
    assert drift(TWO, change, [vector(2, 0)], [moved]).item() == 9 + 16 + 36 + 25
    assert drift(TWO, torch.ones(6), [], []).item() == 0


@quick
@given(seeds, st.integers(1, 4))
def test_drift_is_zero_when_a_moves_against_b(seed, tasks):
    """dA_i = -dB * m_i: every past theta_i is what it was."""
    (change,) = draw(seed, NET.weights)
    masks = draw(seed + 1, *[NET.rows] * tasks)
    moved = [-change * spread(NET, mask) for mask in masks]
    assert drift(NET, change, masks, moved).item() == 0
    moved[0][seed % NET.weights] += 0.5
    assert drift(NET, change, masks, moved).item() == pytest.approx(0.25)


@quick
@given(seeds, st.integers(1, 4), st.floats(0.01, 100))
def test_drift_gradient_while_past_a_is_fixed(seed, tasks, weight):
    change, first = draw(seed, NET.weights, NET.weights)
    masks = draw(seed + 1, *[NET.rows] * tasks)
    leaf = change.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(weight * drift(NET, leaf, masks, [torch.zeros_like(change)] * tasks), leaf)
    by_base = first.clone()
    drift_gradient(NET, change, torch.stack(masks).square().sum(dim=0), None, weight, by_base)
    torch.testing.assert_close(by_base, first + wanted, rtol=1e-4, atol=1e-3)


@quick
@given(seeds, st.integers(1, 4), st.floats(0.01, 100))
def test_drift_gradients_when_past_a_moves_too(seed, tasks, weight):
    change, first = draw(seed, NET.weights, NET.weights)
    masks = draw(seed + 1, *[NET.rows] * tasks)
    moved = draw(seed + 2, *[NET.weights] * tasks)
    leaves = [change.clone().requires_grad_(), *(one.clone().requires_grad_() for one in moved)]
    wanted = torch.autograd.grad(weight * drift(NET, leaves[0], masks, leaves[1:]), leaves)

    masked = torch.zeros(NET.weights)
    for place, (mask, one) in enumerate(zip(masks, moved, strict=True)):
        by_adaptive = first.clone()  # added to what is there
        drift_gradient_adaptive(NET, change, mask, one, weight, by_adaptive, masked)
        torch.testing.assert_close(by_adaptive, first + wanted[1 + place], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(masked, sum(spread(NET, m) * one for m, one in zip(masks, moved, strict=True)))
    by_base = first.clone()
    drift_gradient(NET, change, torch.stack(masks).square().sum(dim=0), masked, weight, by_base)
    torch.testing.assert_close(by_base, first + wanted[0], rtol=1e-4, atol=1e-3)


# ---- the retroactive update


def test_retroactive_by_hand():
    # A(t-1) - dB * m = 1 - 4 * 0.125 = 0.5, threshold 0.125
    assert retroactive(ONE, vector(1), vector(4), vector(0.125), 0.125).tolist() == [0.375]
    before, change = vector(1, 0, -1, 0, 0.5, 0), vector(1, 1, 1, 2, 2, 0)
    # rows (1, 0, -1) - 0.5 and (0, 0.5, 0) - (0.5, 0.5, 0), threshold 0.25
    assert retroactive(TWO, before, change, vector(0.5, 0.25), 0.25).tolist() == [0.25, -0.25, -1.25, -0.25, 0, 0]
    assert before.tolist() == [1, 0, -1, 0, 0.5, 0]  # dA is counted from it in the next round too


def test_retroactive_without_l1_undoes_the_drift():
    before, change, mask = draw(7, NET.weights, NET.weights, NET.rows)
    best = retroactive(NET, before, change, mask, 0.0)
    assert drift(NET, change, [mask], [best - before]).item() == pytest.approx(0, abs=1e-9)
    torch.testing.assert_close(best + change * spread(NET, mask), before)


@quick
@given(seeds, st.floats(0.01, 2), st.floats(0.1, 10))
def test_retroactive_is_where_the_subgradient_holds_zero(seed, sparse_weight, drift_weight):
    before, change, mask = draw(seed, NET.weights, NET.weights, NET.rows)
    best = retroactive(NET, before, change, mask, sparse_weight / (2 * drift_weight))
    slope = 2 * drift_weight * (change * spread(NET, mask) + best - before)
    there = best != 0
    torch.testing.assert_close(slope[there], -sparse_weight * best[there].sign(), rtol=1e-3, atol=1e-4)
    assert (slope[~there].abs() <= sparse_weight + 1e-4).all()


# ---- small parts


@quick
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=20), st.floats(0, 4, width=32))
def test_soft_threshold_is_the_proximal_step(values, threshold):
    before = torch.tensor(values)
    after = before.clone()
    soft_threshold(after, threshold)
    wanted = before.sign() * (before.abs() - threshold).clamp(min=0)
    torch.testing.assert_close(after, wanted, rtol=1e-6, atol=1e-6)
    assert ((after == 0) == (before.abs() <= threshold)).all()  # exact zeros, and only there
    assert (after.abs() <= before.abs()).all()
    assert (after * before >= 0).all()


def test_largest_by_hand():
    values = vector(1, -5, 0, 3, -2, 0.5, 0, 4)
    assert largest(values, 0.25).tolist() == [0, -5, 0, 0, 0, 0, 0, 4]
    assert largest(values, 0.45).tolist() == [0, -5, 0, 3, 0, 0, 0, 4]  # 3.6 values, rounded down
    assert largest(values, 0.75).tolist() == values.tolist()  # six nonzeros are not more than six
    assert largest(values, 0.1).tolist() == [0] * 8
    assert values.tolist() == [1, -5, 0, 3, -2, 0.5, 0, 4]
    # after one step of Adam most values of an A that started at 0 are plus or minus the rate
    assert largest(vector(1, -1, 1, 1), 0.5).count_nonzero() == 2


@quick
@given(seeds, st.floats(0.01, 1))
def test_nothing_left_out_is_larger(seed, share):
    (values,) = draw(seed, NET.weights)
    kept = largest(values, share)
    there = kept != 0
    assert there.sum() == math.floor(share * NET.weights + 1e-9)
    assert torch.equal(kept[there], values[there])
    if there.any() and not there.all():
        assert values[there].abs().min() >= values[~there].abs().max()


def test_strongest_rows_by_hand():
    layout = layout_of((4, 2), (3, 5))
    mask = vector(0.1, -0.9, 0.5, 0.2, 0.3, 0.3, 0.1)  # strength is |m|; of equals the first
    kept = strongest_rows(layout, mask, 0.5)
    assert kept.tolist() == [False, True, True, False, True, True, False]  # 2 of 4, and 1.5 of 3 rounded up
    assert strongest_rows(layout, mask, 0.01).tolist() == [False, True, False, False, True, False, False]
    assert strongest_rows(layout, mask, 1.0).all()


@pytest.mark.parametrize(
    ("keep", "rows", "count"), [(0.3, 10, 3), (0.7, 10, 7), (0.55, 20, 11), (0.14, 50, 7), (0.31, 10, 4)]
)
def test_a_share_is_no_row_more_than_it_says(keep, rows, count):
    """0.14 * 50 is 7.000000000000001 in floating point, and 7 rows are meant."""
    assert strongest_rows(layout_of((rows, 1)), torch.rand(rows), keep).sum() == count


def test_rows_in_turn_by_hand():
    layout = layout_of((4, 2), (3, 5))  # 2 of 4 rows, and 1.5 of 3 rounded up
    turns = [rows_in_turn(layout, turn, 0.5).int().tolist() for turn in range(3)]
    assert turns == [[1, 1, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0, 1], [1, 1, 0, 0, 0, 1, 1]]
    assert rows_in_turn(layout, 7, 1.0).all()


@quick
@given(st.integers(0, 1000), st.floats(0.01, 1))
def test_every_row_has_its_turn(first, keep):
    turns = [rows_in_turn(NET, turn, keep) for turn in range(first, first + math.ceil(1 / keep))]
    assert torch.stack(turns).any(dim=0).all()
    for layer in NET.layers:
        assert {int(turn[layer.row_span].sum()) for turn in turns} == {math.ceil(keep * layer.rows - 1e-9)}


@quick
@given(seeds, st.floats(0.01, 1))
def test_no_row_left_out_is_stronger(seed, keep):
    (mask,) = draw(seed, NET.rows)
    kept = strongest_rows(NET, mask, keep)
    for layer in NET.layers:
        here, strength = kept[layer.row_span], mask[layer.row_span].abs()
        assert keep * layer.rows <= here.sum() + 1e-6 < keep * layer.rows + 1.00001
        if not here.all():
            assert strength[here].min() >= strength[~here].max()
