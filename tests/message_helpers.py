"""Shared by the tests of messages: valid messages, and ones that lie with a valid checksum."""

import json
import struct
import zlib

import torch
from hypothesis import strategies as st

from weft.wire.message import VERSION, Message
from weft.wire.tensors import Sparse

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


def framed(header, payload=b"", lengths=None):
    """A message with a valid frame and checksum around whatever is claimed; `lengths` are what the frame claims."""
    if not isinstance(header, bytes):
        header = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    body = struct.pack("<4sHIQ", b"WEFT", VERSION, *(lengths or (len(header), len(payload)))) + header + payload
    return body + struct.pack("<I", zlib.crc32(body))


def lying(payload=b"", tensors=None, **changes):
    """A message that is right but for what is passed in."""
    return framed(json.loads(EMPTY_HEADER) | {"tensors": [] if tensors is None else tensors} | changes, payload)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = st.text("abc.:/0é中", min_size=1, max_size=5)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False), texts
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
