"""The three shapes in which a vector travels and rests.

A network's body is one float32 vector. Whole, it is a plain tensor of one dimension; with only some output units kept
it is `Rows`; with only some single weights left it is `Sparse`. All three are a `Payload`: what a message carries and
what a checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from weft.errors import WeftError
from weft.lazy import np, torch

Segments = tuple[tuple[int, int], ...]

LARGEST = 2**31 - 1  # an index is an int32


@dataclass(frozen=True, eq=False)
class Rows:
    """Some whole rows of a vector that is cut into segments of rows (a layer's output units).

    >>> Rows.of(torch.tensor([1.0, 2, 3, 4, 5]), ((2, 2), (1, 1)), torch.tensor([False, True, True])).values
    tensor([3., 4., 5.])
    """

    segments: Segments  # (rows, width) for each layer, in order; the vector's size is sum(rows * width)
    kept: torch.Tensor  # bool (total rows,)
    values: torch.Tensor  # float32 (sum of the widths of kept rows,), row after row
    # by precision and version of the values, once it has been written: a server sends the same rows to every client
    written: dict[tuple[str, int], list[np.ndarray[Any, Any]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if any(rows < 1 or width < 1 for rows, width in self.segments):
            raise ValueError(f"a segment needs at least one row and one column, got {self.segments}")
        if self.size > LARGEST:
            raise ValueError(f"a vector may hold {LARGEST:,} values, these segments make {self.size:,}")
        total = sum(rows for rows, _ in self.segments)
        _expect("kept", self.kept, torch.bool, total)
        _expect("values", self.values, torch.float32, kept_size(self.segments, self.kept))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and same(self, other)

    @staticmethod
    def of(vector: torch.Tensor, segments: Segments, kept: torch.Tensor) -> Rows:
        """The kept rows of `vector`, copied."""
        _expect("vector", vector, torch.float32, sum(rows * width for rows, width in segments))
        _expect("kept", kept, torch.bool, sum(rows for rows, _ in segments))
        segments = tuple((rows, width) for rows, width in segments)  # lists, as JSON gives them, are welcome
        values = torch.empty(kept_size(segments, kept))
        for rows, chosen, its_values in _blocks(vector.detach().cpu(), values, segments, kept):
            torch.index_select(rows, 0, chosen, out=its_values)
        return Rows(segments, kept.clone(), values)

    @property
    def size(self) -> int:
        """How many values the whole vector has."""
        return sum(rows * width for rows, width in self.segments)

    @property
    def nonzeros(self) -> int:
        return int(torch.count_nonzero(self.values))

    def dense(self) -> torch.Tensor:
        """The whole vector (size,), zeros where a row was not kept."""
        return self.over(self.values.new_zeros(self.size))

    def over(self, vector: torch.Tensor) -> torch.Tensor:
        """The given vector (size,) with the kept rows written over its own, in place."""
        for rows, chosen, its_values in _blocks(vector, self.values, self.segments, self.kept):
            rows.index_copy_(0, chosen, its_values)
        return vector

    def add_to(self, vector: torch.Tensor, weight: float) -> None:
        """Added to the given vector (size,), in place and `weight` times; rows that were not kept are let alone."""
        for rows, chosen, its_values in _blocks(vector, self.values, self.segments, self.kept):
            rows.index_add_(0, chosen, its_values, alpha=weight)


@dataclass(frozen=True, eq=False)
class Sparse:
    """Some single values of a vector and where they stand.

    >>> Sparse.of(torch.tensor([0.0, 5, 0, 7])).indices
    tensor([1, 3], dtype=torch.int32)
    """

    size: int  # how many values the whole vector has
    indices: torch.Tensor  # int32 (count,), strictly increasing
    values: torch.Tensor  # float32 (count,)

    def __post_init__(self) -> None:
        if not 0 <= self.size <= LARGEST:
            raise ValueError(f"the size of a sparse vector lies between 0 and {LARGEST:,}, got {self.size:,}")
        _expect("values", self.values, torch.float32, self.values.numel())
        _expect("indices", self.indices, torch.int32, self.values.numel())
        if self.indices.numel():
            if not bool((self.indices[1:] > self.indices[:-1]).all()):
                raise ValueError("the indices of a sparse vector must be strictly increasing")
            if int(self.indices[0]) < 0 or int(self.indices[-1]) >= self.size:
                raise ValueError(
                    f"the indices of a sparse vector of size {self.size:,} must lie below it and not below 0"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sparse) and same(self, other)

    @staticmethod
    def of(vector: torch.Tensor) -> Sparse:
        """The nonzeros of a dense vector, copied."""
        _expect("vector", vector, torch.float32, vector.numel())
        vector = vector.detach().cpu()
        # numpy finds three hundred thousand nonzeros among three million in 5 ms, torch.nonzero in 14
        where = torch.from_numpy(np.flatnonzero((vector != 0).numpy()))  # int64 (count,)
        return Sparse(vector.numel(), where.int(), vector[where])

    @property
    def nonzeros(self) -> int:
        return int(torch.count_nonzero(self.values))

    @property
    def nbytes(self) -> int:
        """What it takes at rest: four bytes an index, four a value."""
        return 8 * self.values.numel()

    def dense(self) -> torch.Tensor:
        """The whole vector (size,), zeros elsewhere."""
        vector = self.values.new_zeros(self.size)
        vector[self.indices.long()] = self.values
        return vector


Payload: TypeAlias = "torch.Tensor | Rows | Sparse"  # a plain tensor is float32 and has one dimension


def dense(payload: Payload) -> torch.Tensor:
    """The payload as a whole vector (size,); a plain tensor is handed back as it is, not copied."""
    return payload if isinstance(payload, torch.Tensor) else payload.dense()


def size(payload: Payload) -> int:
    """How many values the whole vector has."""
    return payload.numel() if isinstance(payload, torch.Tensor) else payload.size


def by_value(by_row: torch.Tensor, segments: Segments) -> torch.Tensor:
    """What is said of each row (total rows,), said of each of its values (size,)."""
    parts = zip(_by_segment(by_row, segments), segments, strict=True)
    return torch.cat([part[:, None].expand(-1, width).reshape(-1) for part, (_, width) in parts])


def present(payload: Payload) -> torch.Tensor:
    """Which single values the payload brings: bool (size,).

    >>> present(Sparse.of(torch.tensor([0.0, 5, 0, 7])))
    tensor([False,  True, False,  True])
    """
    if isinstance(payload, Rows):
        return by_value(payload.kept, payload.segments)
    there = torch.ones(size(payload), dtype=torch.bool)
    if isinstance(payload, Sparse):
        there.zero_()[payload.indices.long()] = True
    return there


def nonzeros(payload: Payload) -> int:
    """How many of the values are not zero."""
    return int(torch.count_nonzero(payload)) if isinstance(payload, torch.Tensor) else payload.nonzeros


def nbytes(payload: Payload) -> int:
    """What the payload takes at rest: 4 bytes a value, 4 an index, one for each row that may be kept."""
    if isinstance(payload, Sparse):
        return payload.nbytes
    if isinstance(payload, Rows):
        return payload.kept.nbytes + payload.values.nbytes
    return payload.nbytes


def same(first: Payload, second: Payload) -> bool:
    """Whether two payloads have the same shape and the same bits (so 0.0 and -0.0 differ, and NaN equals itself)."""
    if isinstance(first, Rows) and isinstance(second, Rows):
        alike = first.segments == second.segments and torch.equal(first.kept, second.kept)
        return alike and _same_bits(first.values, second.values)
    if isinstance(first, Sparse) and isinstance(second, Sparse):
        alike = first.size == second.size and torch.equal(first.indices, second.indices)
        return alike and _same_bits(first.values, second.values)
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return _same_bits(first, second)
    return False


def kept_size(segments: Segments, kept: torch.Tensor) -> int:
    """How many values the kept rows have: the sum of their widths."""
    return sum(
        int(chosen.sum()) * width for (_, width), chosen in zip(segments, _by_segment(kept, segments), strict=True)
    )


# ---- payloads in a file: a flat dict of tensors and a JSON description -----------------------------------------------

_PARTS = {"dense": (), "rows": ("kept", "values"), "sparse": ("indices", "values")}
_SUFFIXES = (":kept", ":indices", ":values")


def flatten(name: str, payload: Payload) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The payload as named tensors and a JSON-able description; the tensors share the payload's memory.

    >>> tensors, description = flatten("adaptive.0", Sparse.of(torch.tensor([0.0, 5.0])))
    >>> sorted(tensors), description
    (['adaptive.0:indices', 'adaptive.0:values'], {'shape': 'sparse', 'size': 2})
    """
    if name.endswith(_SUFFIXES):  # else two payloads could meet under one name when a caller merges their dicts
        raise ValueError(f"a payload's name may not end in {', '.join(_SUFFIXES)}, got {name!r}")
    if isinstance(payload, Rows):
        segments = [list(segment) for segment in payload.segments]
        return {
            f"{name}:kept": payload.kept.contiguous(),
            f"{name}:values": payload.values.contiguous(),
        }, {"shape": "rows", "segments": segments}
    if isinstance(payload, Sparse):
        return {
            f"{name}:indices": payload.indices.contiguous(),
            f"{name}:values": payload.values.contiguous(),
        }, {"shape": "sparse", "size": payload.size}
    _expect(name, payload, torch.float32, payload.numel())
    return {name: payload.detach().contiguous()}, {"shape": "dense"}


def unflatten(name: str, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> Payload:
    """The inverse of `flatten`; a `WeftError` if the file and its description do not fit together."""
    try:
        shape = description["shape"]
        parts = [tensors[f"{name}:{part}"] for part in _PARTS[shape]]
        if shape == "rows":
            return Rows(tuple((int(rows), int(width)) for rows, width in description["segments"]), *parts)
        if shape == "sparse":
            return Sparse(int(description["size"]), *parts)
        _expect(name, tensors[name], torch.float32, tensors[name].numel())
        return tensors[name]
    except (KeyError, TypeError, ValueError) as reason:
        text = f"{reason} is missing or unknown" if isinstance(reason, KeyError) else str(reason)
        raise WeftError(f"the stored vector {name!r} is damaged ({text}); take an earlier checkpoint") from reason


# ---- small helpers ---------------------------------------------------------------------------------------------------


def _blocks(
    vector: torch.Tensor, values: torch.Tensor, segments: Segments, kept: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of each segment its rows in a whole vector (rows, width), which of them are kept, and those among the values."""
    at = begin = 0
    for (rows, width), chosen in zip(segments, _by_segment(kept, segments), strict=True):
        places = chosen.nonzero().view(-1)
        end = begin + len(places) * width
        yield vector[at : at + rows * width].view(rows, width), places, values[begin:end].view(-1, width)
        at, begin = at + rows * width, end


def _by_segment(kept: torch.Tensor, segments: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    return torch.split_with_sizes(kept, [rows for rows, _ in segments])


def _expect(what: str, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.numel() != count:
        have = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        raise ValueError(f"{what} must be {str(dtype).removeprefix('torch.')} ({count},), got {have}")


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.detach().contiguous().view(torch.uint8), second.detach().contiguous().view(torch.uint8))
