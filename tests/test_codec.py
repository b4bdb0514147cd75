"""Values in a little more than eight bits each: digits by hand, limits of the error, one way to write each."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import WeftError
from weft.wire.codec import BLOCK, PORTION, arriving, length, values_in, values_out
from weft.wire.message import Message, MessageError, decode, encode

FLOATS = st.floats(-(2.0**120), 2.0**120, width=32)


def written(values: torch.Tensor, precision: str = "int8") -> np.ndarray:
    return np.concatenate([chunk.view(np.uint8) for chunk in values_out("x", values, precision)])


@pytest.mark.parametrize(
    ("values", "exponents", "integers"),
    [
        ([1.0, -0.5, 0.25], [-6], [64, -32, 16]),
        ([127.0, 1.0, 0.4], [0], [127, 1, 0]),
        ([127.5, 1.0], [1], [64, 0]),  # 127.5 would round to 128, so the exponent is one more; 1/2 rounds to even
        ([0.0, -0.0], [-120], [0, 0]),
        ([1e-38], [-120], [0]),  # below half of 2^-120
        ([], [], []),
    ],
)
def test_digits_by_hand(values, exponents, integers):
    wire = written(torch.tensor(values))
    assert wire.view(np.int8).tolist() == [*exponents, *integers]


def test_each_block_has_its_own_exponent():
    values = torch.cat([torch.full((BLOCK,), 1.0), torch.full((3,), 1e-3)])
    wire = written(values)
    assert wire.size == length(values.numel(), "int8") == 2 + BLOCK + 3
    assert wire[:2].view(np.int8).tolist() == [-6, -16]  # 1e-3 * 2^16 = 65.5
    assert torch.allclose(values_in(wire, values.numel(), "int8"), values, rtol=0.5 / 64)


@pytest.mark.parametrize(
    ("values", "exponents", "packed"),
    [
        ([1.0, -0.5, 0.25], [-2], [0xE4, 0x01]),  # 4, -2 and 1, the first of two in the low half of a byte
        ([7.5, 1.0], [1], [0x04]),  # 7.5 would round to 8
        ([0.0], [-120], [0]),
    ],
)
def test_digits_of_four_bits_by_hand(values, exponents, packed):
    wire = written(torch.tensor(values), "int4")
    assert wire.size == length(len(values), "int4")
    assert wire[:1].view(np.int8).tolist() == exponents
    assert wire[1:].tolist() == packed


@pytest.mark.parametrize("byte", [0x08, 0x80])
def test_a_value_that_four_bits_do_not_use_is_refused(byte):
    wire = written(torch.tensor([4.0, 4.0]), "int4")
    assert values_in(wire, 2, "int4").tolist() == [4.0, 4.0]
    wire[1] = byte
    with pytest.raises(ValueError, match="does not use"):
        values_in(wire, 2, "int4")
    wire[1] = 0x44
    with pytest.raises(ValueError, match="beyond its end"):
        values_in(wire, 1, "int4")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "largest"), [("int8", 127), ("int4", 7)])
@settings(max_examples=200, deadline=None)
@given(numbers=st.lists(FLOATS, max_size=3 * BLOCK))
def test_the_error_is_small_and_writing_again_changes_nothing(precision, largest, numbers):
    values = torch.tensor(numbers)
    wire = written(values, precision)
    got = values_in(wire, values.numel(), precision)
    assert np.array_equal(written(got, precision), wire)
    for block, back in zip(values.split(BLOCK), got.split(BLOCK), strict=True):
        if block.numel():
            limit = max(float(block.abs().max()) / largest, 2.0**-121)
            assert float((back.double() - block.double()).abs().max()) <= limit


def test_long_vectors_are_worked_on_in_portions_that_leave_no_seam():
    values = torch.randn(2 * PORTION + 5, generator=torch.Generator().manual_seed(0))
    got = values_in(written(values), values.numel(), "int8")
    seam = slice(PORTION - BLOCK, PORTION + BLOCK)
    assert torch.equal(got[seam], values_in(written(values[seam]), 2 * BLOCK, "int8"))
    assert float((got - values).abs().max()) <= float(values.abs().max()) / 127


def test_what_arrives_is_what_was_promised():
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(arriving(values, "float32"), values)
    assert torch.equal(arriving(values, "half"), values.half().float())
    sent = Message("server", "client-0", "0.0.0", (), 0, 0, {"x": values})
    assert torch.equal(arriving(values, "int8"), decode(encode(sent, "int8")).tensors["x"])


def test_too_large_for_a_byte():
    with pytest.raises(WeftError, match="too large for int8; use precision=float32"):
        values_out("x", torch.tensor([2.0**127]), "int8")
    with pytest.raises(WeftError, match="not finite"):
        values_out("x", torch.tensor([float("nan")]), "int8")


@pytest.mark.parametrize(
    ("integers", "why"),
    [
        ([0, -128, 1], "does not use"),
        ([121, 64, 1], "does not use"),
        ([-121, 64, 1], "does not use"),
        ([0, 63, 1], "smaller exponent"),
        ([-119, 0, 0], "smaller exponent"),
    ],
)
def test_what_nobody_writes_is_refused(integers, why):
    good = encode(Message("server", "client-0", "0.0.0", (), 0, 0, {"x": torch.tensor([1.0, 0.5])}), "int8")
    assert decode(good).tensors["x"].tolist() == [1.0, 0.5]
    body = good[:-7] + np.array(integers, dtype=np.int8).tobytes()
    with pytest.raises(MessageError, match=why):
        decode(body + struct.pack("<I", zlib.crc32(body)))


@pytest.mark.parametrize("place", range(32))
def test_a_forbidden_byte_is_found_wherever_it_stands(place):
    wire = written(torch.full((32,), 100.0))
    values_in(wire, 32, "int8")
    wire[1 + place] = 128  # as a signed byte, -128
    with pytest.raises(ValueError, match="does not use"):
        values_in(wire, 32, "int8")
