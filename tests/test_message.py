"""Bytes of a message: exact round trips, exact counts, and rejection of everything else."""

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import WeftError
from weft.wire import message as message_module
from weft.wire.message import DEEPEST, LONGEST_HEADER, MOST_ITEMS, Message, MessageError, decode, encode, weigh
from weft.wire.tensors import LARGEST, Rows, Sparse, dense, nonzeros, same

FRAME = 22  # magic 4, version 2, header length 4, payload length 8, checksum 4
EMPTY_HEADER = (
    b'{"error":"","fields":{},"ops":[],"precision":"float32","receiver":"server",'
    b'"request_id":"r","round":2,"sender":"client-3","task":1,"tensors":[]}'
)


def message(tensors=None, fields=None, **words):
    words = {"sender": "client-3", "receiver": "server", "request_id": "r", "ops": (), "task": 1, "round": 2, **words}
    return Message(tensors=tensors or {}, fields=fields or {}, **words)


def sparse_at(size, *indices):
    return Sparse(size, torch.tensor(indices, dtype=torch.int32), torch.arange(1.0, len(indices) + 1))


def framed(header, payload=b""):
    """A message with a valid frame and checksum around whatever is claimed."""
    if not isinstance(header, bytes):
        header = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    body = struct.pack("<4sHIQ", b"WEFT", 2, len(header), len(payload)) + header + payload
    return body + struct.pack("<I", zlib.crc32(body))


def lying(payload=b"", tensors=None, **changes):
    """A message that is right but for what is passed in."""
    return framed(json.loads(EMPTY_HEADER) | {"tensors": [] if tensors is None else tensors} | changes, payload)


def refused(wire, why):
    for read in (decode, weigh):
        with pytest.raises(MessageError, match=why) as caught:
            read(wire)
        assert str(caught.value).startswith("message rejected: ")
        assert "\n" not in str(caught.value)


def shape_of(wire, name="x"):
    """The description that the header holds of a tensor."""
    length = struct.unpack_from("<I", wire, 6)[0]
    return next(found for found in json.loads(wire[18 : 18 + length])["tensors"] if found["name"] == name)


# ---- round trips -----------------------------------------------------------------------------------------------------

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
halves = st.floats(width=16, allow_nan=False, allow_infinity=False)


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


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text("abc.:/0é中", min_size=1, max_size=5)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), texts
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


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


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(payloads(values=halves))
def test_half_is_exact_where_half_can_be(payload):
    wire = encode(message({"x": payload}), "half")
    got = decode(wire).tensors["x"]
    assert same(got, payload)
    assert encode(decode(wire), "half") == wire
    assert weigh(wire)["x"].nonzeros == nonzeros(payload)
    assert sum(weight.bytes for weight in weigh(wire).values()) == len(wire)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-65504, 65504, width=32), max_size=20))
def test_half_rounds_to_the_nearest(values):
    got = decode(encode(message({"x": torch.tensor(values, dtype=torch.float32)}), "half")).tensors["x"]
    assert got.dtype == torch.float32
    assert got.tolist() == np.array(values, dtype=np.float16).astype(np.float32).tolist()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.002, 0.01, 0.1, 0.125, 0.3, 1.0]))
def test_sparse_of_any_density(seed, density):
    noise = torch.Generator().manual_seed(seed)
    vector = torch.randn(5000, generator=noise) * (torch.rand(5000, generator=noise) < density)
    sent = message({"x": Sparse.of(vector)})
    wire = encode(sent)
    assert decode(wire) == sent
    assert weigh(wire)["x"].bytes - 4 * nonzeros(vector) <= 625  # never worse than the mask


def test_the_same_message_has_the_same_bytes_whatever_the_order_of_its_dicts():
    one, two = torch.ones(1), torch.zeros(2)
    assert encode(message({"a": one, "b": two}, {"p": 1, "q": 2})) == encode(
        message({"b": two, "a": one}, {"q": 2, "p": 1})
    )


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


def test_messages_that_differ_are_not_equal():
    first = message({"x": torch.zeros(2)})
    assert first != message({"x": -torch.zeros(2)})
    assert first != message({"y": torch.zeros(2)})
    assert first != message({"x": torch.zeros(2)}, task=2)
    assert first != "a message"


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


def test_dense_bytes():
    vector = torch.tensor([1.0, 0.0, -2.0])
    assert payload_of(encode(message({"x": vector}))) == struct.pack("<3f", 1, 0, -2)
    assert payload_of(encode(message({"x": vector}), "half")) == struct.pack("<3e", 1, 0, -2)
    assert weigh(encode(message({"x": vector}), "half"))["x"] == (6, 2)


def test_rows_bytes():
    # ten rows: two bytes of mask, rows 0 and 9 kept; row 0 is two wide, row 9 three
    kept = torch.tensor([True] + [False] * 8 + [True])
    rows = Rows.of(torch.arange(1.0, 22.0), ((9, 2), (1, 3)), kept)
    wire = encode(message({"x": rows}))
    assert payload_of(wire) == b"\x01\x02" + struct.pack("<5f", 1, 2, 19, 20, 21)
    assert weigh(wire)["x"] == (22, 5)
    assert shape_of(wire) == {"encoding": "rows", "name": "x", "segments": [[9, 2], [1, 3]]}


def test_gap_bytes():
    # gaps 3, 0, 254, 255 and 70,000: the last two are escaped
    indices = (3, 4, 259, 515, 70516)
    wire = encode(message({"x": sparse_at(100_000, *indices)}))
    assert payload_of(wire) == b"\x03\x00\xfe\xff\xff" + struct.pack("<2I", 255, 70000) + struct.pack(
        "<5f", *range(1, 6)
    )
    assert weigh(wire)["x"] == (5 + 8 + 20, 5)
    assert shape_of(wire) == {"count": 5, "encoding": "sparse-gaps", "name": "x", "size": 100_000}


def test_mask_bytes():
    # twelve positions: the mask takes two bytes, three gaps would take three
    wire = encode(message({"x": sparse_at(12, 0, 1, 11)}))
    assert payload_of(wire) == b"\x03\x08" + struct.pack("<3f", 1, 2, 3)
    assert shape_of(wire) == {"encoding": "sparse-mask", "name": "x", "size": 12}


def test_a_tie_goes_to_the_gaps():
    assert shape_of(encode(message({"x": sparse_at(16, 0, 1)})))["encoding"] == "sparse-gaps"
    assert shape_of(encode(message({"x": sparse_at(16, 0, 1, 2)})))["encoding"] == "sparse-mask"


def test_a_zero_that_was_sent_is_no_nonzero():
    sparse = Sparse(400, torch.tensor([1, 2, 3], dtype=torch.int32), torch.tensor([0.0, -0.0, 1e-30]))
    assert weigh(encode(message({"x": sparse})))["x"] == (15, 1)
    assert weigh(encode(message({"x": sparse}), "half"))["x"] == (9, 0)  # 1e-30 rounds to nothing in half


def test_the_last_position_of_the_largest_vector():
    sent = message({"x": sparse_at(LARGEST, LARGEST - 1)})
    assert decode(encode(sent)) == sent


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


def test_fields_at_the_limits_can_be_sent():
    sent = message(fields={"deep": nest(DEEPEST - 2), "low": -(2**63), "high": 2**63 - 1, "tiny": 5e-324})
    assert decode(encode(sent)) == sent


@pytest.mark.parametrize(
    ("words", "why"),
    [({"task": 1.0}, "task: .*integer"), ({"round": True}, "round: .*integer"), ({"sender": 3}, "sender: .*string")],
)
def test_words_that_cannot_be_sent(words, why):
    with pytest.raises(WeftError, match=why):
        encode(message(**words))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: encode(message({"x": torch.ones(2, 2)})), "one dimension"),
        (lambda: encode(message({"x": torch.ones(2, dtype=torch.float64)})), "must be float32"),
        (lambda: encode(message(ops="train")), "tuple of strings"),
    ],
)
def test_mistakes_of_a_programmer(make, why):
    with pytest.raises(ValueError, match=why):
        make()


@pytest.mark.parametrize("name", ["header", "", "a\nb", "x" * 201])
def test_names_that_cannot_be_sent(name):
    with pytest.raises(WeftError, match=r"cannot be sent: tensors\.0\.dense\.name: "):
        encode(message({name: torch.ones(1)}))


def test_an_unknown_precision_is_named():
    with pytest.raises(WeftError, match=r"precision: .*'half' or 'int8'"):
        encode(message({"x": torch.ones(1)}), "double")


# ---- tensors that go to many clients ---------------------------------------------------------------------------------


def test_a_cache_encodes_the_same_tensor_once(monkeypatch):
    calls = []
    real = message_module.values_out
    monkeypatch.setattr(message_module, "values_out", lambda name, *rest: calls.append(name) or real(name, *rest))
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


# ---- rejection -------------------------------------------------------------------------------------------------------


def small():
    kept = torch.tensor([True, False, True])
    tensors = {
        "dense": torch.tensor([1.0, 2.0]),
        "gaps": sparse_at(9000, 3, 700, 701),
        "mask": sparse_at(12, 0, 1, 11),
        "rows": Rows.of(torch.arange(1.0, 7.0), ((3, 2),), kept),
    }
    return encode(message(tensors, {"accuracy": 0.5}))


def test_every_truncation_is_refused():
    wire = small()
    for length in range(len(wire)):
        refused(wire[:length], f"truncated .*got {length:,}")


def test_truncation_tells_both_lengths():
    wire = encode(message({"x": torch.ones(1100)}))
    with pytest.raises(MessageError) as caught:
        decode(wire[:4100])
    assert str(caught.value) == f"message rejected: it is truncated (expected {len(wire):,} bytes, got 4,100)"


def test_every_altered_byte_is_refused():
    wire = small()
    for place in range(len(wire)):
        for change in (0x01, 0x80, 0xFF):
            altered = bytearray(wire)
            altered[place] ^= change
            with pytest.raises(MessageError):
                decode(altered)


def test_altered_frames_say_what_is_wrong():
    wire = small()
    refused(b"HTTP" + wire[4:], "does not begin with WEFT")
    refused(b"WEFT\x01\x00" + wire[6:], "version 1, this weft has 2")
    refused(wire + b"\x00", "too long")
    refused(wire[:-1] + bytes([wire[-1] ^ 1]), "checksum is wrong")
    refused(b"", "expected at least 22 bytes, got 0")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_noise_is_refused(noise):
    for wire in (noise, framed(noise), framed(EMPTY_HEADER, noise or b"x")):
        refused(wire, ".")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_lie_in_a_description_is_refused_or_harmless(data):
    """Whatever a header claims with a valid checksum: it is refused, or it is a message with one encoding."""
    wire = small()
    length = struct.unpack_from("<I", wire, 6)[0]
    header = json.loads(wire[18 : 18 + length])
    lie = st.one_of(trees, st.integers(-2, 40), st.sampled_from([2**31, 2**62, "rows", "dense", "sparse-gaps", "half"]))
    target = data.draw(st.sampled_from([header, *header["tensors"]]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(lie)
    wire = framed(header, wire[18 + length : -4])
    try:
        got = decode(wire)
    except MessageError as refusal:
        assert "\n" not in str(refusal)  # noqa: PT017 - both outcomes are right
    else:
        assert encode(got, header["precision"]) == wire


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "valid dictionary"),
        (b"null", "valid dictionary"),
        (b'"text"', "valid dictionary"),
        (b"{}", "sender: field required"),
        (EMPTY_HEADER.replace(b'"fields":{}', b'"fields":{"a":NaN}'), "not JSON"),
        (EMPTY_HEADER.replace(b'"fields":{}', b'"fields":{"a":1e999}'), "not JSON"),
        (EMPTY_HEADER.replace(b'"fields":{}', b'"fields":{"a":"\\ud800"}'), "not JSON"),
        (EMPTY_HEADER.replace(b'"fields":{}', b'"fields":{"a":' + b"9" * 5000 + b"}"), "not JSON"),
        (EMPTY_HEADER.replace(b'"fields":{}', b'"fields":{"a":' + b"9" * 30 + b"}"), "64 bits"),
        (EMPTY_HEADER.replace(b'"fields":{}', b'"fields":{"a":' + b"[" * 40 + b"]" * 40 + b"}"), "levels deep"),
        (EMPTY_HEADER.replace(b'"fields":{}', b'"fields":{"a":1.50}'), "canonical"),
        (EMPTY_HEADER.replace(b'"task":1', b'"task":1,"task":1'), "canonical"),
        (EMPTY_HEADER.replace(b'"task":1', b'"task": 1'), "canonical"),
        (EMPTY_HEADER + b"\n", "canonical"),
        (b'{"x":"' + b"x" * LONGEST_HEADER + b'"}', "its header has"),
    ],
)
def test_wrong_headers(header, why):
    refused(framed(header), why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"extra": 1}, "extra: extra inputs"),
        ({"a\nb" * 50: 1}, "extra inputs"),
        ({"sender": None}, "sender: .*string"),
        ({"error": 0}, "error: .*string"),
        ({"task": 1.5}, "task: .*integer"),
        ({"round": True}, "round: .*integer"),
        ({"round": 2**31}, "round: .*2147483647"),
        ({"ops": "train"}, "ops: .*list"),
        ({"ops": [1]}, "ops.0: .*string"),
        ({"ops": ["train"] * (MOST_ITEMS + 1)}, "ops: .*at most"),
        ({"fields": []}, "fields: .*dictionary"),
        ({"precision": "double"}, "precision: .*'double'"),
        ({"precision": ["half"]}, "precision: "),
        ({"tensors": {}}, "tensors: .*list"),
    ],
)
def test_wrong_fields(changes, why):
    refused(lying(**changes), why)


ONE = struct.pack("<f", 1.0)
DENSE = {"encoding": "dense", "name": "x", "size": 1}
GAPS = {"count": 2, "encoding": "sparse-gaps", "name": "x", "size": 9000}
MASK = {"encoding": "sparse-mask", "name": "x", "size": 12}
ROWS = {"encoding": "rows", "name": "x", "segments": [[3, 1]]}


@pytest.mark.parametrize(
    ("description", "payload", "ones"),
    [
        (DENSE, ONE, [0]),
        (GAPS, b"\x01\x02" + 2 * ONE, [1, 4]),
        (MASK, b"\x03\x08" + 3 * ONE, [0, 1, 11]),
        (ROWS, b"\x05" + 2 * ONE, [0, 2]),
    ],
)
def test_the_truth_is_taken_in(description, payload, ones):
    wire = lying(payload, [description])
    assert encode(decode(wire)) == wire
    assert dense(decode(wire).tensors["x"]).nonzero().flatten().tolist() == ones


@pytest.mark.parametrize(
    ("payload", "tensors", "why"),
    [
        (b"", [3], r"tensors\.0: "),
        (b"", [{"encoding": ["dense"]}], r"tensors\.0: "),
        (b"", [DENSE | {"encoding": "zip"}], r"tensors\.0: .*zip"),
        (ONE, [DENSE | {"extra": 1}], "extra: extra inputs"),
        (ONE, [{"encoding": "dense", "name": "x"}], "size: field required"),
        (ONE, [DENSE | {"name": "header"}], "name: .*not 'header'"),
        (ONE, [DENSE | {"name": 7}], "name: .*string"),
        (ONE, [DENSE | {"name": ""}], "name: .*printable"),
        (ONE, [DENSE | {"name": "a\nb"}], "name: .*printable"),
        (ONE, [DENSE | {"size": -1}], "size: .*got -1"),
        (ONE, [DENSE | {"size": 1.0}], r"size: .*got 1\.0"),
        (ONE, [DENSE | {"size": True}], "size: .*got True"),
        (ONE, [DENSE | {"size": 2**31}], "size: .*got 2147483648"),
        (ONE[:3], [DENSE], "claims 4 bytes where 3 are left"),
        (b"", [DENSE | {"size": 0}, GAPS | {"count": 1, "name": "y"}], "claims 1 bytes where 0 are left"),
        (ONE, [DENSE | {"size": 2}], "claims 8 bytes where 4 are left"),
        (ONE, [DENSE | {"size": LARGEST}], "claims 8,589,934,588 bytes where 4 are left"),
        (ONE, [DENSE | {"size": 0}], "4 bytes of its payload belong to no tensor"),
        (ONE, [], "4 bytes of its payload belong to no tensor"),
        (ONE + ONE, [DENSE, DENSE], "repeated or out of order"),
        (ONE + ONE, [DENSE | {"name": "y"}, DENSE], "repeated or out of order"),
        (struct.pack("<f", float("nan")), [DENSE], "not finite"),
        (struct.pack("<f", float("-inf")), [DENSE], "not finite"),
        # gaps
        (b"\x01\x02" + 2 * ONE, [GAPS | {"count": LARGEST}], "claims 2,147,483,647 bytes"),
        (b"\x01\x02" + 2 * ONE, [GAPS | {"count": 2**40}], "count: .*got 1099511627776"),
        (b"\x01\x02" + 2 * ONE, [GAPS | {"size": 4}], "index 4, beyond its size 4"),
        (b"\x01\x02" + 2 * ONE, [GAPS | {"size": 5}], "gaps where a mask is shorter"),
        (b"\x01\xff" + 2 * ONE, [GAPS], "claims 8 bytes where 4 are left"),
        (b"\x01\xff" + struct.pack("<I", 254) + 2 * ONE, [GAPS], "escaped gap of 254"),
        (b"\xff\xff" + struct.pack("<2I", 2**32 - 1, 2**32 - 1) + 2 * ONE, [GAPS], "index 8,589,934,591, beyond"),
        (b"\x01\x02" + ONE, [GAPS], "claims 8 bytes where 4 are left"),
        # mask
        (b"\x03\x18" + 3 * ONE, [MASK], "bits beyond its end"),
        (b"\x03\x08" + 2 * ONE, [MASK], "claims 12 bytes where 8 are left"),
        (b"\x03\x00" + 2 * ONE, [MASK], "mask where gaps are not longer"),
        (b"\x03", [MASK | {"size": LARGEST}], "claims 268,435,456 bytes where 1 are left"),
        # rows
        (b"\x0d" + 3 * ONE, [ROWS], "bits beyond its end"),
        (b"\x05" + ONE, [ROWS], "claims 8 bytes where 4 are left"),
        *(
            (b"\x05" + 2 * ONE, [ROWS | {"segments": segments}], r"segments[.:]")
            for segments in ([[3]], [3, 1], {"3": 1}, [[3, 0]], [[-3, -1]], [[3, True]], [[3, 2**31 - 1]])
        ),
        (b"\x05" + 2 * ONE, [ROWS | {"segments": [[LARGEST, 1]]}], "claims 268,435,456 bytes"),
    ],
)
def test_lies_with_a_valid_checksum(payload, tensors, why):
    wire = lying(payload, tensors)
    with pytest.raises(MessageError, match=why):
        decode(wire)
    if "finite" not in why:  # weigh reads no values
        refused(wire, why)


def test_half_of_infinity_is_refused():
    with pytest.raises(MessageError, match="not finite"):
        decode(lying(struct.pack("<e", float("inf")), [DENSE], precision="half"))


def test_no_lie_makes_memory_grow():
    """A few hundred bytes that claim gigabytes are rejected without allocating a megabyte."""
    lies = [
        lying(b"\x00" * 99, [DENSE | {"size": LARGEST}]),
        lying(b"\x00" * 99, [GAPS | {"count": LARGEST, "size": LARGEST}]),
        lying(b"\x00" * 99, [MASK | {"size": LARGEST}]),
        lying(b"\x00" * 99, [ROWS | {"segments": [[LARGEST, 1]]}]),
        lying(b"\xff" * 25_000, [MASK | {"size": 200_000}]),  # a full mask without values
        b"WEFT\x02\x00\xff\xff\xff\xff" + b"\xff" * 20,
    ]
    assert peak_of(lies) < 2**20
    # a sparse vector may be huge: it is passed on as it came, and only its reader makes it dense
    assert decode(lying(b"\x01" + ONE, [GAPS | {"count": 1, "size": LARGEST}])).tensors["x"].nbytes == 8


def test_a_header_full_of_segments_takes_bounded_memory():
    full = (LONGEST_HEADER - 400) // 6
    many = lying(b"", [ROWS | {"segments": [[1, 1]] * full}])
    wrong = lying(b"", [ROWS | {"segments": [[0, 0]] * full}])
    tensors = lying(b"", [DENSE | {"name": f"{number:05}", "size": 0} for number in range(20_000)])
    refused(many, "at most 10000")
    assert peak_of([many, wrong, tensors]) < 100 * LONGEST_HEADER
    allowed = [[1, 1]] * MOST_ITEMS
    assert (
        len(decode(lying(bytes(MOST_ITEMS // 8), [ROWS | {"segments": allowed}])).tensors["x"].segments) == MOST_ITEMS
    )


def peak_of(lies):
    tracemalloc.start()
    for wire in lies:
        with pytest.raises(MessageError):
            decode(wire)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
