"""Message, and its exact bytes on the wire.

    magic "WEFT" | version, uint16 | header length, uint32 | payload length, uint64
    header: JSON in UTF-8, compact, sorted keys, no NaN
    payload: the tensors, sorted by name, one after another
    CRC32 over all that goes before, uint32

Little-endian throughout. A tensor's place in the payload:

    dense         values
    rows          one bit a row (kept or not), values of the kept rows
    sparse-gaps   one byte a value: how many positions were skipped before it; 255 stands for a larger gap, which is
                  found in the uint32 array that follows; then the values
    sparse-mask   one bit a position, values
                  (of the two, whichever index is smaller; gaps if they tie)

How values are written (float32, half or int8) stands in values.py; decoded they are always float32.

Each message has exactly one encoding, and `decode` refuses every other sequence of bytes. A checksum guards against
accidents only: whoever can send bytes can send a valid checksum, so every claim is checked against the bytes that are
really there before anything is allocated by it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias, get_args

from weft.errors import WeftError
from weft.lazy import np, torch
from weft.wire.codec import Chunk, count_nonzeros, length, own, values_in, values_out
from weft.wire.headers import Precision, description_fault, header_fault, name_fault
from weft.wire.tensors import LARGEST, Payload, Rows, Sparse, kept_size, same

if TYPE_CHECKING:
    import numpy.typing as npt

MAGIC = b"WEFT"
VERSION = 2
PREFIX = struct.Struct("<4sHIQ")  # magic, version, header length, payload length
CHECKSUM = struct.Struct("<I")
LONGEST_HEADER = 2**22  # JSON grows about thirtyfold when parsed: 4 MiB is far above any need and far below harm
ESCAPE = 255

_Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class MessageError(WeftError):
    """Bytes that are no message of this format; the text is one line and says what was wrong."""


@dataclass(frozen=True, eq=False)
class Message:
    """What one side asks or answers; two messages are equal if their tensors are equal bit for bit."""

    sender: str  # "server" or a client's name such as "client-3"
    receiver: str
    request_id: str  # unique for a request; a reply carries the id of what it answers
    ops: tuple[str, ...]  # what is asked, in order; empty in replies
    task: int  # which task of the client's sequence
    round: int
    tensors: dict[str, Payload] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # what JSON can hold: accuracies, losses, counts
    error: str = ""  # an error reply says why

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (
            _words(self) == _words(other)
            and self.tensors.keys() == other.tensors.keys()
            and all(same(tensor, other.tensors[name]) for name, tensor in self.tensors.items())
        )


def failure(asked: Message, why: str) -> Message:
    """The reply to a request that went wrong."""
    words = (asked.receiver, asked.sender, asked.request_id, (), asked.task, asked.round)
    return Message(*words, error=why)


class PartWeight(NamedTuple):
    """What one part of a message weighs."""

    bytes: int
    nonzeros: int


# ---- out: message -> bytes -------------------------------------------------------------------------------------------


def encode(message: Message, precision: Precision = "float32") -> bytes:
    """The bytes of a message; a `WeftError` for what the format cannot carry (NaN, too large for half)."""
    if precision not in get_args(Precision):
        raise ValueError(f"precision is one of {', '.join(get_args(Precision))}, got {precision!r}")
    descriptions: list[dict[str, Any]] = []
    chunks: list[Chunk] = []
    for name in sorted(message.tensors):
        if fault := name_fault(name):
            raise ValueError(f"tensor {name!r} needs another name: {fault}")
        payload = message.tensors[name]
        description, index, values = _shape_out(name, payload)
        descriptions.append({"name": name, **description})
        written = payload.written if isinstance(payload, Rows) else {}
        key = (precision, values._version)  # which every change in place counts up
        if key not in written:
            written[key] = values_out(name, values, precision)
        chunks += [*index, *written[key]]
    header = _header_out(message, precision, descriptions)
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), sum(chunk.nbytes for chunk in chunks))
    checksum = zlib.crc32(header, zlib.crc32(prefix))
    for chunk in chunks:
        checksum = zlib.crc32(chunk.data, checksum)
    return b"".join([prefix, header, *(chunk.data for chunk in chunks), CHECKSUM.pack(checksum)])


def _header_out(message: Message, precision: Precision, descriptions: list[dict[str, Any]]) -> bytes:
    if not isinstance(message.ops, tuple):  # ops=("train") is one text, and would go out letter by letter
        raise ValueError(f"ops must be a tuple of texts, got {message.ops!r}")
    fields = {**_words(message), "precision": precision, "tensors": descriptions}
    if fault := header_fault(fields):
        raise WeftError(f"message from {message.sender!r} cannot be sent: {fault}")
    try:
        header = _canonical(fields)
    except UnicodeEncodeError as reason:
        raise WeftError(f"message from {message.sender!r} cannot be sent: its text is not valid Unicode") from reason
    if len(header) > LONGEST_HEADER:
        raise WeftError(
            f"message from {message.sender!r} cannot be sent: its header takes {len(header):,} bytes, "
            f"{LONGEST_HEADER:,} are allowed; send long lists of fields as a tensor"
        )
    return header


def _shape_out(name: str, payload: Payload) -> tuple[dict[str, Any], list[Chunk], torch.Tensor]:
    """A tensor's description, the chunks that say where its values stand, and the values."""
    if isinstance(payload, Rows):
        kept = np.packbits(payload.kept.cpu().numpy(), bitorder="little")
        return {"encoding": "rows", "segments": [list(segment) for segment in payload.segments]}, [kept], payload.values
    if isinstance(payload, Sparse):
        description, index = _index_out(payload.size, payload.indices.cpu().numpy())
        return description, index, payload.values
    if payload.dtype != torch.float32 or payload.dim() != 1:
        raise ValueError(f"tensor {name!r} must be float32 with one dimension, got {payload.dtype} {payload.dim()}")
    if payload.numel() > LARGEST:
        raise ValueError(f"tensor {name!r} holds {payload.numel():,} values, {LARGEST:,} are allowed")
    return {"encoding": "dense", "size": payload.numel()}, [], payload


def _index_out(size: int, indices: npt.NDArray[np.int32]) -> tuple[dict[str, Any], list[Chunk]]:
    gaps = _gaps(indices)
    if _mask_is_smaller(size, gaps):
        mask = np.zeros(size, dtype=np.bool_)
        mask[indices] = True
        return {"encoding": "sparse-mask", "size": size}, [np.packbits(mask, bitorder="little")]
    short = np.minimum(gaps, ESCAPE).astype(np.uint8)
    escaped = gaps[gaps >= ESCAPE].astype("<u4")
    return {"count": gaps.size, "encoding": "sparse-gaps", "size": size}, [short, escaped]


# ---- in: bytes -> message --------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A tensor found on the wire, its place checked, its values not yet copied."""

    name: str
    nbytes: int
    value_count: int
    values: _Bytes
    shape: Callable[[torch.Tensor], Payload]  # from the values (count,) to the payload


def decode(wire: bytes | memoryview) -> Message:
    """The message that was encoded; `MessageError` for any bytes that `encode` would not have written."""
    header, payload = _unwrap(wire)
    tensors = {part.name: part.shape(_values_in(part, header["precision"])) for part in _parts(header, payload)}
    return Message(
        sender=header["sender"],
        receiver=header["receiver"],
        request_id=header["request_id"],
        ops=tuple(header["ops"]),
        task=header["task"],
        round=header["round"],
        tensors=tensors,
        fields=header["fields"],
        error=header["error"],
    )


def weigh(wire: bytes | memoryview) -> dict[str, PartWeight]:
    """Bytes and nonzeros by part: each tensor by its name, and "header" for all else; the bytes sum to len(wire)."""
    header, payload = _unwrap(wire)
    weights = {"header": PartWeight(memoryview(wire).nbytes - payload.nbytes, 0)}
    for part in _parts(header, payload):
        nonzeros = count_nonzeros(part.values, part.value_count, header["precision"])
        weights[part.name] = PartWeight(part.nbytes, nonzeros)
    return weights


def _unwrap(wire: bytes | memoryview) -> tuple[dict[str, Any], _Bytes]:
    """The header, checked but for its list of tensors, and the payload."""
    whole = memoryview(wire).cast("B")
    least = PREFIX.size + CHECKSUM.size
    if whole.nbytes < least:
        _refuse(f"it is cut short (expected at least {least} bytes, got {whole.nbytes})")
    magic, version, header_length, payload_length = PREFIX.unpack_from(whole)
    if magic != MAGIC:
        _refuse(f"it does not begin with {MAGIC.decode()}; whatever sent it is not weft")
    if version != VERSION:
        _refuse(f"it is written in version {version}, this weft reads {VERSION}; use one weft on all sides")
    expected = least + header_length + payload_length
    if whole.nbytes < expected:
        _refuse(f"it is cut short (expected {expected:,} bytes, got {whole.nbytes:,})")
    if whole.nbytes > expected:
        _refuse(f"it is too long (expected {expected:,} bytes, got {whole.nbytes:,})")
    body = whole[: -CHECKSUM.size]
    if zlib.crc32(body) != CHECKSUM.unpack_from(whole, body.nbytes)[0]:
        _refuse("its checksum is wrong, it was damaged on the way")
    if header_length > LONGEST_HEADER:
        _refuse(f"its header takes {header_length:,} bytes, {LONGEST_HEADER:,} are allowed")
    end = PREFIX.size + header_length
    return _header_in(body[PREFIX.size : end].tobytes()), np.frombuffer(body, dtype=np.uint8)[end:]


def _header_in(raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode())
        # one comparison settles repeated keys, white space, NaN, 1e999, needless escapes and the order of keys
        canonical = _canonical(header) == raw
    except (ValueError, RecursionError):  # ValueError covers wrong UTF-8, wrong JSON, NaN and lone surrogates
        _refuse("its header is not JSON")
    if not isinstance(header, dict):
        _refuse("its header is not a JSON object")
    if not canonical:
        _refuse("its header is not in canonical form (compact, sorted keys, no key twice)")
    if fault := header_fault(header):
        _refuse(fault)
    return header


def _parts(header: dict[str, Any], payload: _Bytes) -> Iterator[_Part]:
    """The tensors one after another; together they must be the payload exactly."""
    before, at = "", 0

    def take(count: int) -> _Bytes:
        nonlocal at
        if count > payload.size - at:
            _refuse(f"tensor {name!r} claims {count:,} bytes where {payload.size - at:,} are left")
        at += count
        return payload[at - count : at]

    for description in header["tensors"]:
        if fault := description_fault(description):
            _refuse(fault)
        name, begin = description["name"], at
        if name <= before:
            _refuse(f"tensor {name!r} is named twice or out of order")
        count, values, shape = _shape_in(description, take, header["precision"])
        yield _Part(name, at - begin, count, values, shape)
        before = name
    if at != payload.size:
        _refuse(f"{payload.size - at:,} bytes of its payload belong to no tensor")


def _shape_in(
    description: dict[str, Any], take: Callable[[int], _Bytes], precision: Precision
) -> tuple[int, _Bytes, Callable[[torch.Tensor], Payload]]:
    """How many values a tensor has, their bytes, and what makes the payload of them; nothing is built before."""
    name, encoding = description["name"], description["encoding"]
    if encoding == "dense":
        count = description["size"]
        return count, take(length(count, precision)), lambda values: values
    if encoding == "rows":
        segments = tuple((rows, columns) for rows, columns in description["segments"])
        kept = own(_mask_in(name, take, sum(rows for rows, _ in segments)), torch.bool)
        count = kept_size(segments, kept)
        return count, take(length(count, precision)), partial(Rows, segments, kept)
    size = description["size"]
    if encoding == "sparse-mask":
        mask = _mask_in(name, take, size)
        count = int(np.count_nonzero(mask))
        values = take(length(count, precision))
        indices = np.flatnonzero(mask)
        if not _mask_is_smaller(size, _gaps(indices)):
            _refuse(f"tensor {name!r} comes with a mask where gaps are not longer")
    else:
        count = description["count"]
        short = take(count)
        large = short == ESCAPE
        escaped = take(4 * int(np.count_nonzero(large))).view("<u4")
        values = take(length(count, precision))
        gaps = short.astype(np.int64)
        gaps[large] = escaped
        indices = np.cumsum(gaps + 1) - 1  # below 2**63: fewer than 2**31 gaps, each below 2**32
        if indices.size and indices[-1] >= size:
            _refuse(f"tensor {name!r} has an index {indices[-1]:,} beyond its size {size:,}")
        if escaped.size and escaped.min() < ESCAPE:
            _refuse(f"tensor {name!r} has an escaped gap of {escaped.min()}, which needs no escape")
        if _mask_is_smaller(size, gaps):
            _refuse(f"tensor {name!r} comes with gaps where a mask is shorter")
    return count, values, partial(Sparse, size, own(indices, torch.int32))


def _mask_in(name: str, take: Callable[[int], _Bytes], count: int) -> npt.NDArray[np.bool_]:
    bits = np.unpackbits(take(_mask_length(count)), bitorder="little").view(np.bool_)
    if bits[count:].any():
        _refuse(f"the mask of tensor {name!r} has bits beyond its end")
    return bits[:count]


def _values_in(part: _Part, precision: Precision) -> torch.Tensor:
    try:
        return values_in(part.values, part.value_count, precision)
    except ValueError as reason:
        _refuse(f"tensor {part.name!r} {reason}")


# ---- both ways -------------------------------------------------------------------------------------------------------


def _words(message: Message) -> dict[str, Any]:
    """All of a message that is not a tensor."""
    return {key: getattr(message, key) for key in ("sender", "receiver", "request_id", "task", "round", "error")} | {
        "ops": list(message.ops),
        "fields": message.fields,
    }


def _canonical(header: Any) -> bytes:
    text = json.dumps(header, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


def _gaps(indices: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """How many positions were skipped before each index: (count,), none below 0 as indices increase."""
    return np.diff(indices, prepend=np.array(-1, dtype=indices.dtype)) - 1


def _mask_is_smaller(size: int, gaps: npt.NDArray[Any]) -> bool:
    return _mask_length(size) < gaps.size + 4 * int(np.count_nonzero(gaps >= ESCAPE))


def _mask_length(count: int) -> int:
    return (count + 7) // 8


def _refuse(why: str) -> NoReturn:
    raise MessageError(f"message refused: {why}")
