"""Bytes that are not a message: decode and weigh reject them, whatever they claim."""

import json
import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from message_helpers import EMPTY_HEADER, framed, lying, message, sparse_at, trees

from weft.wire.message import LONGEST_HEADER, MOST_ITEMS, MessageError, decode, encode, weigh
from weft.wire.tensors import LARGEST, Rows, dense


def refused(wire, why):
    for read in (decode, weigh):
        with pytest.raises(MessageError, match=why) as caught:
            read(wire)
        assert str(caught.value).startswith("message rejected: ")
        assert "\n" not in str(caught.value)


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
        refused(wire[:length], f"truncated .expected .*{len(wire) if length > 21 else 22:,} bytes, got {length:,}")


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
        (ONE, [DENSE | {"name": "a\nb"}], "name: .*printable"),
        (ONE, [DENSE | {"size": -1}], "size: .*got -1"),
        (ONE, [DENSE | {"size": 1.0}], r"size: .*got 1\.0"),
        (ONE, [DENSE | {"size": True}], "size: .*got True"),
        (ONE, [DENSE | {"size": 2**31}], "size: .*got 2147483648"),
        (ONE[:3], [DENSE], "claims 4 bytes where 3 are left"),
        (ONE, [DENSE | {"size": 2}], "claims 8 bytes where 4 are left"),
        (ONE, [DENSE | {"size": LARGEST}], "claims 8,589,934,588 bytes where 4 are left"),
        (ONE, [DENSE | {"size": 0}], "4 bytes of its payload belong to no tensor"),
        (ONE, [], "4 bytes of its payload belong to no tensor"),
        (ONE + ONE, [DENSE, DENSE], "repeated or out of order"),
        (ONE + ONE, [DENSE | {"name": "y"}, DENSE], "repeated or out of order"),
        (struct.pack("<f", float("nan")), [DENSE], "not finite"),
        (struct.pack("<f", float("-inf")), [DENSE], "not finite"),
        (struct.pack("<f", float("inf")), [DENSE], "not finite"),
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
    largest = ({"size": LARGEST}, {"count": LARGEST, "size": LARGEST}, {"size": LARGEST}, {"segments": [[LARGEST, 1]]})
    claims = zip((DENSE, GAPS, MASK, ROWS), largest, strict=True)
    lies = [lying(b"\x00" * 99, [description | claim]) for description, claim in claims]
    lies += [lying(b"\xff" * 25_000, [MASK | {"size": 200_000}])]  # a full mask without values
    lies += [b"WEFT\x02\x00\xff\xff\xff\xff" + b"\xff" * 20]
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
    allowed = lying(bytes(MOST_ITEMS // 8), [ROWS | {"segments": [[1, 1]] * MOST_ITEMS}])
    assert len(decode(allowed).tensors["x"].segments) == MOST_ITEMS


def peak_of(lies):
    tracemalloc.start()
    for wire in lies:
        with pytest.raises(MessageError):
            decode(wire)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak
