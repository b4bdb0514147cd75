"""Message and its exact bytes on the wire.

    magic "WEFT" | version, uint16 | header length, uint32 | payload length, uint64
    header: JSON in UTF-8, compact, sorted keys, no NaN
    payload: the tensors, sorted by name, one after another
    CRC32 over everything before it, uint32

Little-endian throughout; codec.py defines the bytes of a tensor.

Each message has exactly one encoding, and `decode` rejects any other bytes. The checksum protects against accidents
only: anybody can compute one. So every claim is checked against the bytes that are present before memory is allocated
for it, and a header is bounded, because parsed JSON takes about thirty times its length.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError

from weft.errors import WeftError, show
from weft.lazy import np, torch
from weft.wire import codec
from weft.wire.codec import Chunk, Precision, Take
from weft.wire.tensors import LARGEST, Payload, Rows, Sparse, kept_size, same

if TYPE_CHECKING:
    import numpy.typing as npt

MAGIC = b"WEFT"
VERSION = 2
PREFIX = struct.Struct("<4sHIQ")  # magic, version, header length, payload length
CHECKSUM = struct.Struct("<I")
LONGEST_HEADER = 2**20  # bytes
MOST_ITEMS = 10_000  # tensors of a message, segments of a tensor, operations
DEEPEST = 32  # levels of nesting in `fields`

Item = TypeVar("Item")
_Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class MessageError(WeftError):
    """Bytes that are not a message; the text is one line that says what is wrong."""


@dataclass(frozen=True, eq=False)
class Message:
    """A request or a reply; two messages are equal if their tensors are equal bit by bit."""

    sender: str  # "server", or a client such as "client-3"
    receiver: str
    request_id: str  # unique for a request; a reply has the id of its request
    ops: tuple[str, ...]  # requested operations, in order; empty in replies
    task: int  # index in the client's sequence of tasks
    round: int
    tensors: dict[str, Payload] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)  # JSON: accuracies, losses, counts
    error: str = ""  # why the request failed

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (
            _without_tensors(self) == _without_tensors(other)
            and self.tensors.keys() == other.tensors.keys()
            and all(same(tensor, other.tensors[name]) for name, tensor in self.tensors.items())
        )


def failure(request: Message, why: str) -> Message:
    """Make the reply to a request that failed."""
    return Message(request.receiver, request.sender, request.request_id, (), request.task, request.round, error=why)


# ---- header ----------------------------------------------------------------------------------------------------------


def _check_name(name: str) -> str:
    # it becomes a column of a CSV file, where "header" is the rest of a message
    if not 1 <= len(name) <= 200 or not name.isprintable() or name == "header":
        raise ValueError("a name has 1 to 200 printable characters and is not 'header'")
    return name


def _check_segments(segments: list[list[int]]) -> list[list[int]]:
    if sum(rows * width for rows, width in segments) > LARGEST:
        raise ValueError(f"together more than {LARGEST:,} values")
    return segments


def _check_json(value: Any, path: str = "fields", depth: int = 0) -> Any:
    # exact types: a tuple or a numpy float would be decoded as something else than was sent
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{path} does not fit into 64 bits")
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{path} is {value}; only finite numbers can be sent")
    if value is None or type(value) in (str, bool, int, float):
        return value
    if depth == DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    if type(value) is list:
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]", depth + 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{path} has the key {show(key)}, which is not a string")
            _check_json(item, f"{path}[{show(key)}]", depth + 1)
    else:
        raise ValueError(f"{path} is a {type(value).__name__}; JSON has str, int, float, bool, None, list and dict")
    return value


_Count: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
_Name: TypeAlias = Annotated[str, AfterValidator(_check_name)]
_Many: TypeAlias = Annotated[list[Item], Field(max_length=MOST_ITEMS), FailFast()]
_Segment: TypeAlias = Annotated[list[Annotated[int, Field(ge=1, le=LARGEST)]], Field(min_length=2, max_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Dense(_Strict):
    encoding: Literal["dense", "sparse-mask"]
    name: _Name
    size: _Count


class _Rows(_Strict):
    encoding: Literal["rows"]
    name: _Name
    segments: Annotated[_Many[_Segment], AfterValidator(_check_segments)]


class _Gaps(_Strict):
    encoding: Literal["sparse-gaps"]
    name: _Name
    size: _Count
    count: _Count


_Description: TypeAlias = _Dense | _Rows | _Gaps


class Header(_Strict):
    """Everything of a message except the bytes of its tensors."""

    sender: str
    receiver: str
    request_id: str
    ops: _Many[str]
    task: Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
    round: Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
    fields: Annotated[dict[Any, Any], AfterValidator(_check_json)]
    error: str
    precision: Precision
    tensors: _Many[Annotated[_Description, Field(discriminator="encoding")]]


def _explain(error: ValidationError) -> str:
    """The first mistake of a header in one line."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(show(item).strip("'") for item in first["loc"]) or "header"
    text = first["msg"].removeprefix("Value error, ")[:200]
    return f"{path}: {text[0].lower()}{text[1:]}, got {show(first['input'])}"


def _without_tensors(message: Message) -> dict[str, Any]:
    keys = ("sender", "receiver", "request_id", "task", "round", "fields", "error")
    return {key: getattr(message, key) for key in keys} | {"ops": list(message.ops)}


def _canonical(header: Any) -> bytes:
    text = json.dumps(header, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return text.encode()


# ---- encode ----------------------------------------------------------------------------------------------------------


class Cached(NamedTuple):
    """Values of a tensor and their encoding."""

    values: torch.Tensor
    precision: Precision
    chunks: list[Chunk]


def encode(message: Message, precision: Precision = "float32", cache: dict[str, Cached] | None = None) -> bytes:
    """Encode a message; raise a `WeftError` for what the format cannot hold (NaN, too large for half).

    A server that sends the same tensors to many clients passes one dict as `cache` for all of them: it keeps the last
    encoding of each dense or rows tensor by name, and uses it again for the same tensor object. The caller drops the
    dict, or clears it, before it changes a tensor in place.
    """
    tensors = [(name, payload, *_index_out(name, payload)) for name, payload in sorted(message.tensors.items())]
    header = _header_out(message, precision, [{"name": name, **described} for name, _, described, _, _ in tensors])
    chunks: list[Chunk] = []
    for name, payload, _, index, values in tensors:
        known = cache.get(name) if cache is not None else None
        if known is None or known.values is not values or known.precision != precision:
            known = Cached(values, precision, codec.values_out(name, values, precision))
            if cache is not None and not isinstance(payload, Sparse):  # sparse ones go to few clients
                cache[name] = known
        chunks += [*index, *known.chunks]
    prefix = PREFIX.pack(MAGIC, VERSION, len(header), sum(chunk.nbytes for chunk in chunks))
    checksum = zlib.crc32(header, zlib.crc32(prefix))
    for chunk in chunks:
        checksum = zlib.crc32(chunk.data, checksum)
    return b"".join([prefix, header, *(chunk.data for chunk in chunks), CHECKSUM.pack(checksum)])


def _header_out(message: Message, precision: Precision, descriptions: list[dict[str, Any]]) -> bytes:
    if not isinstance(message.ops, tuple):  # ops=("train") is a string, and would be sent letter by letter
        raise ValueError(f"ops must be a tuple of strings, got {message.ops!r}")
    header = {**_without_tensors(message), "precision": precision, "tensors": descriptions}
    try:
        Header.model_validate(header)
        if len(raw := _canonical(header)) <= LONGEST_HEADER:
            return raw
        why = f"its header has {len(raw):,} bytes, {LONGEST_HEADER:,} are allowed; send long lists as a tensor"
    except ValidationError as error:
        why = _explain(error)
    except UnicodeEncodeError:
        why = "a text is not valid Unicode"
    raise WeftError(f"message from {message.sender!r} cannot be sent: {why}")


def _index_out(name: str, payload: Payload) -> tuple[dict[str, Any], list[Chunk], torch.Tensor]:
    """Description of a tensor, the chunks with the positions of its values, and the values."""
    if isinstance(payload, Rows):
        segments = [list(segment) for segment in payload.segments]
        return {"encoding": "rows", "segments": segments}, [codec.mask_out(payload.kept.cpu().numpy())], payload.values
    if isinstance(payload, Sparse):
        indices = payload.indices.cpu().numpy()
        encoding, chunks = codec.indices_out(payload.size, indices)
        description = {"encoding": encoding, "size": payload.size}
        return description | ({"count": indices.size} if encoding == "sparse-gaps" else {}), chunks, payload.values
    if payload.dtype != torch.float32 or payload.dim() != 1:
        raise ValueError(f"tensor {name!r} must be float32 with one dimension, got {payload.dtype} {payload.dim()}")
    return {"encoding": "dense", "size": payload.numel()}, [], payload


# ---- decode ----------------------------------------------------------------------------------------------------------


class TensorWeight(NamedTuple):
    """Size of one tensor of a message, or of its header."""

    bytes: int
    nonzeros: int


class _Tensor(NamedTuple):
    """A tensor on the wire: its positions are checked, its values not yet decoded."""

    name: str
    nbytes: int
    value_count: int
    values: _Bytes
    make: Callable[[torch.Tensor], Payload]  # of the decoded values (count,)


def decode(wire: bytes | memoryview) -> Message:
    """Decode a message; raise a `MessageError` for any bytes that `encode` does not write."""
    header, payload = _unwrap(wire)
    tensors: dict[str, Payload] = {}
    for tensor in _tensors(header, payload):
        try:
            tensors[tensor.name] = tensor.make(codec.values_in(tensor.values, tensor.value_count, header.precision))
        except ValueError as reason:
            _reject(f"tensor {tensor.name!r} {reason}")
    ids = (header.sender, header.receiver, header.request_id, tuple(header.ops), header.task, header.round)
    return Message(*ids, tensors, header.fields, header.error)


def weigh(wire: bytes | memoryview) -> dict[str, TensorWeight]:
    """Bytes and nonzeros of each tensor by name, and of all else as "header"; the bytes sum to len(wire)."""
    header, payload = _unwrap(wire)
    weights = {"header": TensorWeight(memoryview(wire).nbytes - payload.nbytes, 0)}
    for tensor in _tensors(header, payload):
        nonzeros = codec.count_nonzeros(tensor.values, tensor.value_count, header.precision)
        weights[tensor.name] = TensorWeight(tensor.nbytes, nonzeros)
    return weights


def _unwrap(wire: bytes | memoryview) -> tuple[Header, _Bytes]:
    whole = memoryview(wire).cast("B")
    least = PREFIX.size + CHECKSUM.size
    if whole.nbytes < least:
        _reject(f"it is truncated (expected at least {least} bytes, got {whole.nbytes})")
    magic, version, header_length, payload_length = PREFIX.unpack_from(whole)
    if magic != MAGIC:
        _reject(f"it does not begin with {MAGIC.decode()}; the sender is not weft")
    if version != VERSION:
        _reject(f"it has wire version {version}, this weft has {VERSION}; install the same weft on all machines")
    expected = least + header_length + payload_length
    if whole.nbytes != expected:
        problem = "truncated" if whole.nbytes < expected else "too long"
        _reject(f"it is {problem} (expected {expected:,} bytes, got {whole.nbytes:,})")
    body = whole[: -CHECKSUM.size]
    if zlib.crc32(body) != CHECKSUM.unpack_from(whole, body.nbytes)[0]:
        _reject("its checksum is wrong: it was damaged in transit")
    if header_length > LONGEST_HEADER:
        _reject(f"its header has {header_length:,} bytes, {LONGEST_HEADER:,} are allowed")
    end = PREFIX.size + header_length
    return _header_in(body[PREFIX.size : end].tobytes()), np.frombuffer(body, dtype=np.uint8)[end:]


def _header_in(raw: bytes) -> Header:
    try:
        header = json.loads(raw.decode())
        # one comparison finds repeated keys, white space, NaN, 1e999, needless escapes and unsorted keys
        canonical = _canonical(header) == raw
    except (ValueError, RecursionError):  # a ValueError for wrong UTF-8, wrong JSON, NaN and lone surrogates
        _reject("its header is not JSON")
    if not canonical:
        _reject("its header is not in canonical form (compact, sorted keys, no repeated key)")
    try:
        return Header.model_validate(header)
    except ValidationError as error:
        _reject(_explain(error))


def _tensors(header: Header, payload: _Bytes) -> Iterator[_Tensor]:
    """The tensors one by one; together they must be exactly the payload."""
    before, position = "", 0

    def take(count: int) -> _Bytes:
        nonlocal position
        if count > payload.size - position:
            _reject(f"tensor {name!r} claims {count:,} bytes where {payload.size - position:,} are left")
        position += count
        return payload[position - count : position]

    for description in header.tensors:
        name, start = description.name, position
        if name <= before:
            _reject(f"tensor {name!r} is repeated or out of order")
        try:
            count, values, make = _index_in(description, take, header.precision)
        except ValueError as reason:
            _reject(f"tensor {name!r} {reason}")
        yield _Tensor(name, position - start, count, values, make)
        before = name
    if position != payload.size:
        _reject(f"{payload.size - position:,} bytes of its payload belong to no tensor")


def _index_in(
    description: _Description, take: Take, precision: Precision
) -> tuple[int, _Bytes, Callable[[torch.Tensor], Payload]]:
    """Number of values of a tensor, their bytes, and the function that makes the payload of the decoded values."""
    if isinstance(description, _Rows):
        segments = tuple((rows, width) for rows, width in description.segments)
        kept = codec.copied(codec.mask_in(take, sum(rows for rows, _ in segments)), torch.bool)
        count = kept_size(segments, kept)
        return count, take(codec.length(count, precision)), partial(Rows, segments, kept)
    size = description.size
    if description.encoding == "dense":
        return size, take(codec.length(size, precision)), lambda values: values
    if isinstance(description, _Gaps):
        indices, values = codec.gaps_in(take, size, description.count, precision)
    else:
        indices, values = codec.masked_in(take, size, precision)
    return indices.size, values, partial(Sparse, size, codec.copied(indices, torch.int32))


def _reject(why: str) -> NoReturn:
    raise MessageError(f"message rejected: {why}")
