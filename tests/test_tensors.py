"""The three shapes of a vector: what goes in comes out, and what makes no sense is refused."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from weft.errors import WeftError
from weft.wire.tensors import LARGEST, Rows, Sparse, by_value, dense, flatten, nonzeros, same, size, unflatten

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def vectors(draw):
    """A vector with a good share of zeros, possibly empty."""
    values = draw(st.lists(st.one_of(st.just(0.0), floats), max_size=40))
    return torch.tensor(values, dtype=torch.float32)


@st.composite
def cut_vectors(draw):
    """A vector, its segments and the rows to keep."""
    segments = tuple(draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=4)))
    total, count = sum(rows for rows, _ in segments), sum(rows * width for rows, width in segments)
    vector = torch.tensor(draw(st.lists(floats, min_size=count, max_size=count)), dtype=torch.float32)
    kept = torch.tensor(draw(st.lists(st.booleans(), min_size=total, max_size=total)), dtype=torch.bool)
    return vector, segments, kept


@settings(deadline=None)
@given(cut_vectors(), st.integers(0, 2**32 - 1))
def test_rows_agree_with_the_slow_twin(cut, seed):
    vector, segments, kept = cut
    widths = [width for rows, width in segments for _ in range(rows)]
    spread = [bool(kept[row]) for row, width in enumerate(widths) for _ in range(width)]
    mask = torch.tensor(spread, dtype=torch.bool)  # by value, one row at a time
    rows, expected = Rows.of(*cut), torch.where(mask, vector, 0.0)
    assert same(rows.dense(), expected)
    assert same(rows.values, vector[mask])
    assert size(rows) == expected.numel()
    assert nonzeros(rows) == rows.nonzeros == int(torch.count_nonzero(expected))
    assert Rows.of(rows.dense(), rows.segments, rows.kept) == rows
    assert not segments or torch.equal(by_value(kept, segments), mask)
    total = torch.randn(vector.numel(), generator=torch.Generator().manual_seed(seed))
    assert same(rows.over(total.clone()), torch.where(mask, vector, total))
    added = total.clone()
    rows.add_to(added, 3.0)
    torch.testing.assert_close(added, torch.where(mask, total + 3.0 * vector, total))


@settings(deadline=None)
@given(vectors())
def test_sparse_keeps_all_nonzeros(vector):
    sparse = Sparse.of(vector)
    assert torch.equal(sparse.dense(), vector)
    assert size(sparse) == vector.numel()
    assert nonzeros(sparse) == nonzeros(vector) == sum(value != 0 for value in vector.tolist())
    assert sparse.nbytes == 8 * nonzeros(sparse)
    assert torch.equal(sparse.values, vector[vector != 0])


def test_a_copy_is_a_copy():
    vector = torch.ones(4, requires_grad=True)
    kept = torch.ones(4, dtype=torch.bool)
    rows, sparse = Rows.of(vector, ((4, 1),), kept), Sparse.of(vector)
    with torch.no_grad():
        vector.zero_()
    kept.zero_()
    assert rows.dense().tolist() == sparse.dense().tolist() == [1, 1, 1, 1]
    assert not rows.values.requires_grad
    assert not sparse.values.requires_grad
    assert dense(vector) is vector


def test_same_compares_bits():
    zero, minus = torch.zeros(2), -torch.zeros(2)
    assert torch.equal(zero, minus)
    assert not same(zero, minus)
    assert same(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same(zero, torch.zeros(3))
    assert not same(zero, torch.zeros(2, dtype=torch.float64))
    assert not same(zero, Sparse.of(zero))
    assert Sparse.of(torch.ones(2)) != Sparse.of(torch.tensor([1.0, 1, 0]))
    assert Sparse.of(torch.ones(2)) != Sparse.of(torch.tensor([1.0, 2]))
    both, one = torch.tensor([True, True]), torch.tensor([True, False])
    assert Rows.of(zero, ((2, 1),), both) != Rows.of(zero, ((2, 1),), one)
    assert Rows.of(zero, ((2, 1),), both) != Rows.of(zero, ((1, 1), (1, 1)), both)
    assert Rows.of(zero, ((2, 1),), both) != Sparse.of(zero)


INT = torch.int32


@pytest.mark.parametrize(
    ("size", "indices", "values", "why"),
    [
        (3, torch.tensor([1, 1], dtype=INT), torch.ones(2), "strictly increasing"),
        (3, torch.tensor([2, 1], dtype=INT), torch.ones(2), "strictly increasing"),
        (3, torch.tensor([1, 3], dtype=INT), torch.ones(2), "at least 0 and below"),
        (3, torch.tensor([-1, 1], dtype=INT), torch.ones(2), "at least 0"),
        (3, torch.tensor([1], dtype=INT), torch.ones(2), r"indices must be int32 \(2,\)"),
        (3, torch.tensor([1, 2]), torch.ones(2), "indices must be int32"),
        (3, torch.tensor([1], dtype=INT), torch.ones(1, dtype=torch.float64), "values must be float32"),
        (3, torch.tensor([[1]], dtype=INT), torch.ones(1, 1), "values must be float32"),
        (-1, torch.zeros(0, dtype=INT), torch.zeros(0), "between 0 and"),
        (LARGEST + 1, torch.zeros(0, dtype=INT), torch.zeros(0), "between 0 and"),
    ],
)
def test_nonsense_sparse_is_refused(size, indices, values, why):
    with pytest.raises(ValueError, match=why):
        Sparse(size, indices, values)


def kept(*rows):
    return torch.tensor(rows, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Rows(((2, 2),), kept(True), torch.zeros(2)), r"kept must be bool \(2,\)"),
        (lambda: Rows(((2, 2),), kept(True, False), torch.zeros(3)), r"values must be float32 \(2,\)"),
        (lambda: Rows(((0, 2),), kept(), torch.zeros(0)), "at least one row"),
        (lambda: Rows(((1, 0),), kept(True), torch.zeros(0)), "at least one row"),
        (lambda: Rows(((1, 2**31),), kept(True), torch.zeros(0)), "these segments have 2,147,483,648"),
        (lambda: Rows.of(torch.ones(3), ((2, 2),), kept(True, True)), "vector must be float32"),
        (lambda: Sparse.of(torch.ones(2, 2)), "vector must be float32"),
        (lambda: flatten("a:values", torch.ones(1)), "must not end in"),  # two payloads could have equal names
    ],
)
def test_nonsense_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.slow
@settings(deadline=None)
@given(vectors(), cut_vectors())
def test_payloads_survive_a_safetensors_file(vector, cut):
    payloads = {"a": vector, "b": Rows.of(*cut), "c": Sparse.of(vector)}
    tensors, descriptions = {}, {}
    for name, payload in payloads.items():
        flat, descriptions[name] = flatten(name, payload)
        assert not flat.keys() & tensors.keys()
        tensors |= flat
    stored, described = load(save(tensors)), json.loads(json.dumps(descriptions))
    for name, payload in payloads.items():
        assert same(unflatten(name, stored, described[name]), payload)


@pytest.mark.parametrize(
    ("tensors", "description", "why"),
    [
        ({}, {}, "'shape' is missing or unknown"),
        ({}, {"shape": "round"}, "'round' is missing or unknown"),
        ({}, {"shape": []}, "unhashable"),
        ({}, {"shape": "dense"}, "'a' is missing"),
        ({"a": torch.ones(2, 2)}, {"shape": "dense"}, "a must be float32"),
        ({"a:values": torch.ones(1)}, {"shape": "sparse", "size": 3}, "'a:indices' is missing"),
        (
            {"a:values": torch.ones(1), "a:indices": torch.tensor([7], dtype=INT)},
            {"shape": "sparse", "size": 3},
            "at least 0 and below",
        ),
        (
            {"a:values": torch.ones(1), "a:kept": torch.ones(1, dtype=torch.bool)},
            {"shape": "rows", "segments": [[1]]},
            "not enough values to unpack",
        ),
    ],
)
def test_a_damaged_file_is_a_problem_that_says_so(tensors, description, why):
    with pytest.raises(WeftError, match=f"stored vector 'a' is damaged .*{why}"):
        unflatten("a", tensors, description)
