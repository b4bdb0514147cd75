"""Bytes of a message: exact round trips, exact counts, and what cannot be sent."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from message_helpers import EMPTY_HEADER, FRAME, message, names, sparse_at, texts, trees

from weft.errors import WeftError
from weft.wire import codec
from weft.wire.message import DEEPEST, LONGEST_HEADER, decode, encode, weigh
from weft.wire.tensors import LARGEST, Rows, Sparse, nonzeros


def shape_of(wire, name="x"):
    """The description that the header holds of a tensor."""
    length = struct.unpack_from("<I", wire, 6)[0]
    return next(found for found in json.loads(wire[18 : 18 + length])["tensors"] if found["name"] == name)


# ---- round trips -----------------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def payloads(draw, values=floats):
    """Any of the three shapes, empty and full ones and large gaps included."""

    def vector(count):
        return torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=torch.float32)

    shape = draw(st.sampled_from(["dense", "rows", "sparse", "crowded"]))
    if shape == "dense":
        return vector(draw(st.integers(0, 20)))
    if shape == "rows":
        segments = tuple(draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=4)))
        total = sum(rows for rows, _ in segments)
        chosen = st.one_of(st.just([True] * total), st.just([False] * total), st.lists(st.booleans(), min_size=total))
        kept = torch.tensor(draw(chosen)[:total], dtype=torch.bool)
        return Rows.of(vector(sum(rows * width for rows, width in segments)), segments, kept)
    if shape == "crowded":  # nearly all positions taken: the mask wins
        size = draw(st.integers(0, 40))
        absent = draw(st.sets(st.integers(0, 40), max_size=5))
        indices = [index for index in range(size) if index not in absent]
    else:
        near = st.sampled_from([0, 1, 2, 253, 254, 255, 256, 65535, 65536, 65537, 10**6])
        gaps = draw(st.lists(st.one_of(near, st.integers(0, 600)), max_size=12))
        indices = (np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1).tolist()
        size = (indices[-1] + 1 if indices else 0) + draw(st.integers(0, 3000))
    return Sparse(size, torch.tensor(indices, dtype=torch.int32), vector(len(indices)))


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(names, payloads(), max_size=3),
    st.dictionaries(texts, trees, max_size=3),
    texts,
    st.lists(texts, max_size=3),
    st.integers(-LARGEST, LARGEST),
)
def test_decode_is_the_exact_inverse(tensors, fields, text, ops, number):
    sent = message(tensors, fields, sender=text, request_id=text, error=text, ops=tuple(ops), task=number, round=0)
    wire = encode(sent)
    got = decode(wire)
    assert got == sent
    assert repr(dict(sorted(got.fields.items()))) == repr(dict(sorted(_sorted_tree(fields).items())))  # types too
    assert encode(got) == wire
    assert decode(memoryview(wire)) == sent
    weights = weigh(wire)
    assert sum(weight.bytes for weight in weights.values()) == len(wire)
    assert {name: weight.nonzeros for name, weight in weights.items() if name != "header"} == {
        name: nonzeros(payload) for name, payload in tensors.items()
    }


def _sorted_tree(tree):
    if isinstance(tree, dict):
        return {key: _sorted_tree(tree[key]) for key in sorted(tree)}
    return [_sorted_tree(item) for item in tree] if isinstance(tree, list) else tree


@settings(max_examples=100, deadline=None)
@given(payloads(values=st.floats(-65504, 65504, width=32)))
def test_half_rounds_to_the_nearest(payload):
    wire = encode(message({"x": payload}), "half")
    got = decode(wire).tensors["x"]
    values, rounded = (sent if isinstance(sent, torch.Tensor) else sent.values for sent in (payload, got))
    assert rounded.dtype == torch.float32
    assert rounded.tolist() == values.numpy().astype(np.float16).astype(np.float32).tolist()
    assert encode(decode(wire), "half") == wire
    assert weigh(wire)["x"].nonzeros == nonzeros(got)
    for precision in ("int8", "int4"):
        wire = encode(message({"x": payload}), precision)
        assert encode(decode(wire), precision) == wire


def test_equal_messages_have_equal_bytes_and_others_differ():
    one, two = torch.ones(1), torch.zeros(2)
    first = message({"a": one, "b": two}, {"p": 1, "q": 2})
    assert encode(first) == encode(message({"b": two, "a": one}, {"q": 2, "p": 1}))
    for tensors in ({"a": one, "b": -two}, {"a": one, "c": two}):
        assert first != message(tensors, {"p": 1, "q": 2})
    assert first != message({"a": one, "b": two}, {"p": 1, "q": 2}, task=2)
    assert first != "a message"


def test_decoded_tensors_own_aligned_memory():
    kept = torch.tensor([True, False, True])
    sent = message({"d": torch.randn(30), "r": Rows.of(torch.randn(9), ((3, 3),), kept), "s": sparse_at(99, 5, 70)})
    wire = bytearray(encode(sent))
    got = decode(memoryview(wire))
    wire[:] = bytes(len(wire))
    assert got == sent
    rows, sparse = got.tensors["r"], got.tensors["s"]
    for tensor in (got.tensors["d"], rows.kept, rows.values, sparse.indices, sparse.values):
        assert tensor.data_ptr() % 64 == 0
        assert tensor.is_contiguous()


# ---- bytes worked by hand --------------------------------------------------------------------------------------------


def test_the_smallest_message_byte_by_byte():
    wire = encode(message())
    body = b"WEFT" + b"\x02\x00" + struct.pack("<I", len(EMPTY_HEADER)) + bytes(8) + EMPTY_HEADER
    assert wire == body + struct.pack("<I", zlib.crc32(body))
    assert weigh(wire) == {"header": (len(EMPTY_HEADER) + FRAME, 0)}


def payload_of(wire):
    header, payload = struct.unpack_from("<IQ", wire, 6)
    assert len(wire) == FRAME + header + payload
    return wire[18 + header : -4]


TEN_ROWS = Rows.of(torch.arange(1.0, 22.0), ((9, 2), (1, 3)), torch.tensor([True] + [False] * 8 + [True]))


@pytest.mark.parametrize(
    ("tensor", "payload", "nonzeros", "description"),
    [
        (torch.tensor([1.0, 0.0, -2.0]), struct.pack("<3f", 1, 0, -2), 2, {"encoding": "dense", "size": 3}),
        # two bytes of mask, rows 0 and 9 kept; row 0 is two wide, row 9 three
        (
            TEN_ROWS,
            b"\x01\x02" + struct.pack("<5f", 1, 2, 19, 20, 21),
            5,
            {"encoding": "rows", "segments": [[9, 2], [1, 3]]},
        ),
        # gaps 3, 0, 254, 255 and 70,000: the last two are escaped
        (
            sparse_at(100_000, 3, 4, 259, 515, 70516),
            b"\x03\x00\xfe\xff\xff" + struct.pack("<2I5f", 255, 70000, *range(1, 6)),
            5,
            {"count": 5, "encoding": "sparse-gaps", "size": 100_000},
        ),
        # the mask takes two bytes; two gaps take as many and win, three would take more
        (
            sparse_at(16, 0, 1),
            b"\x00\x00" + struct.pack("<2f", 1, 2),
            2,
            {"count": 2, "encoding": "sparse-gaps", "size": 16},
        ),
        (
            sparse_at(12, 0, 1, 11),
            b"\x03\x08" + struct.pack("<3f", 1, 2, 3),
            3,
            {"encoding": "sparse-mask", "size": 12},
        ),
    ],
)
def test_the_bytes_of_a_tensor(tensor, payload, nonzeros, description):
    wire = encode(message({"x": tensor}))
    assert payload_of(wire) == payload
    assert weigh(wire)["x"] == (len(payload), nonzeros)
    assert shape_of(wire) == {"name": "x", **description}


def test_a_zero_that_was_sent_is_no_nonzero():
    sparse = Sparse(400, torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0.0, -0.0, 1e-30]))
    assert weigh(encode(message({"x": sparse})))["x"] == (15, 1)
    assert weigh(encode(message({"x": sparse}), "half"))["x"] == (9, 0)  # 1e-30 rounds to nothing in half


# ---- what cannot be sent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("count", [1, 5, 33, 1000])
def test_values_that_are_not_finite_are_not_sent(value, count):
    for place in {0, count // 2, count - 1}:
        vector = torch.ones(count)
        vector[place] = value
        for payload in (vector, Sparse.of(vector), Rows.of(vector, ((1, count),), torch.tensor([True]))):
            with pytest.raises(WeftError, match="'base' has values that are not finite"):
                encode(message({"base": payload}))


def test_too_large_for_half():
    for value in (65504.0, 65519.0):  # the largest half, and what still rounds to it
        assert decode(encode(message({"x": torch.tensor([value])}), "half")).tensors["x"].item() == 65504
    for value in (65520.0, -70000.0, 1e38):
        with pytest.raises(WeftError, match="too large for half; use precision=float32"):
            encode(message({"x": torch.tensor([1.0, value])}), "half")


def nest(depth):
    tree = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"loss": float("nan")}, r"fields\['loss'\] is nan; only finite"),
        ({"a": [1, {"b": float("inf")}]}, r"fields\['a'\]\[1\]\['b'\] is inf"),
        ({"a": (1, 2)}, "is a tuple; JSON has"),
        ({"a": np.float64(1)}, "is a float64; JSON has"),
        ({"a": torch.ones(1)}, "is a Tensor; JSON has"),
        ({1: 2}, "has the key 1, which is not a string"),
        ({"a": {None: 2}}, "has the key None"),
        ({"a": 2**63}, "does not fit into 64 bits"),
        ({"a": -(2**63) - 1}, "does not fit into 64 bits"),
        ({"a": nest(DEEPEST)}, "levels deep"),
        ({"a": "\ud800"}, "not valid Unicode"),
        ({"a": "x" * LONGEST_HEADER}, "send long lists as a tensor"),
    ],
)
def test_fields_that_cannot_be_sent(fields, why):
    with pytest.raises(WeftError, match=why):
        encode(message(fields=fields))


def test_the_limits_can_be_sent():
    sent = message(fields={"deep": nest(DEEPEST - 2), "low": -(2**63), "high": 2**63 - 1, "tiny": 5e-324})
    assert decode(encode(sent)) == sent
    sent = message({"x": sparse_at(LARGEST, LARGEST - 1)})
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("words", "precision", "why"),
    [
        ({"task": 1.0}, "half", "task: .*integer"),
        ({"round": True}, "half", "round: .*integer"),
        ({"sender": 3}, "half", "sender: .*string"),
        ({}, "double", r"precision: .*'int8' or 'int4'"),
        ({"ops": "train"}, "half", "tuple of strings"),
        ({"tensors": {"x": torch.ones(2, 2)}}, "half", "one dimension"),
        ({"tensors": {"x": torch.ones(2, dtype=torch.float64)}}, "half", "must be float32"),
        *(
            ({"tensors": {name: torch.ones(1)}}, "half", r"cannot be sent: tensors\.0\.dense\.name: ")
            for name in ("header", "", "a\nb", "x" * 201)
        ),
    ],
)
def test_what_else_cannot_be_sent(words, precision, why):
    with pytest.raises((WeftError, ValueError), match=why):
        encode(message(**words), precision)


# ---- tensors that go to many clients ---------------------------------------------------------------------------------


def test_a_cache_encodes_the_same_tensor_once(monkeypatch):
    calls = []
    real = codec.values_out
    monkeypatch.setattr(codec, "values_out", lambda name, *rest: calls.append(name) or real(name, *rest))
    rows = Rows.of(torch.randn(9), ((3, 3),), torch.tensor([True, False, True]))
    tensors = {"d": torch.randn(30), "r": rows, "s": sparse_at(99, 5, 70)}
    cache = {}
    for receiver in ("client-0", "client-1"):
        sent = message(tensors, receiver=receiver)
        assert encode(sent, "int8", cache) == encode(sent, "int8")
    assert calls.count("r") == calls.count("d") == 3  # twice without the cache
    assert calls.count("s") == 4  # sparse tensors are not kept
    assert encode(message(tensors), "float32", cache) == encode(message(tensors))
    other = message({**tensors, "d": torch.randn(30)})
    assert encode(other, "float32", cache) == encode(other)
