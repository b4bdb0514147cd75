"""The three forms of a vector in messages and checkpoints.

The body of a network is one float32 vector. A `Payload` is that vector as a plain tensor with one dimension (dense), as
`Rows` (only some output units kept) or as `Sparse` (only some weights kept).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from weft.errors import WeftError
from weft.lazy import torch

Segments = tuple[tuple[int, int], ...]

LARGEST = 2**31 - 1  # indices are int32


@dataclass(frozen=True, eq=False)
class Rows:
    """Whole rows of a vector that is divided into segments of rows (the output units of a layer).

    >>> Rows.of(torch.tensor([1.0, 2, 3, 4, 5]), ((2, 2), (1, 1)), torch.tensor([False, True, True])).values
    tensor([3., 4., 5.])
    """

    segments: Segments  # (rows, width) of each layer in order; the size of the vector is sum(rows * width)
    kept: torch.Tensor  # bool (total rows,)
    values: torch.Tensor  # float32 (sum of the widths of kept rows,), row by row

    def __post_init__(self) -> None:
        if any(rows < 1 or width < 1 for rows, width in self.segments):
            raise ValueError(f"a segment needs at least one row and one column, got {self.segments}")
        if self.size > LARGEST:
            raise ValueError(f"a vector may have {LARGEST:,} values, these segments have {self.size:,}")
        _expect("kept", self.kept, torch.bool, sum(rows for rows, _ in self.segments))
        _expect("values", self.values, torch.float32, kept_size(self.segments, self.kept))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and same(self, other)

    @staticmethod
    def of(vector: torch.Tensor, segments: Segments, kept: torch.Tensor) -> Rows:
        """Copy the kept rows of a vector."""
        segments = tuple((rows, width) for rows, width in segments)  # JSON gives lists
        _expect("vector", vector, torch.float32, sum(rows * width for rows, width in segments))
        _expect("kept", kept, torch.bool, sum(rows for rows, _ in segments))
        values = torch.empty(kept_size(segments, kept))
        for rows, indices, kept_rows in _blocks(vector.detach().cpu(), values, segments, kept):
            torch.index_select(rows, 0, indices, out=kept_rows)
        return Rows(segments, kept.clone(), values)

    @property
    def size(self) -> int:
        """Number of values of the whole vector."""
        return sum(rows * width for rows, width in self.segments)

    @property
    def nonzeros(self) -> int:
        return int(torch.count_nonzero(self.values))

    def dense(self) -> torch.Tensor:
        """The whole vector (size,), with zeros in rows that are not kept."""
        return self.over(self.values.new_zeros(self.size))

    def over(self, vector: torch.Tensor) -> torch.Tensor:
        """Overwrite the kept rows of a vector (size,) in place, and return it."""
        for rows, indices, kept_rows in _blocks(vector, self.values, self.segments, self.kept):
            rows.index_copy_(0, indices, kept_rows)
        return vector

    def add_to(self, vector: torch.Tensor, weight: float) -> None:
        """Add the kept rows, times `weight`, to those of a vector (size,) in place."""
        for rows, indices, kept_rows in _blocks(vector, self.values, self.segments, self.kept):
            rows.index_add_(0, indices, kept_rows, alpha=weight)


@dataclass(frozen=True, eq=False)
class Sparse:
    """Single values of a vector and their positions.

    >>> Sparse.of(torch.tensor([0.0, 5, 0, 7])).indices
    tensor([1, 3], dtype=torch.int32)
    """

    size: int  # number of values of the whole vector
    indices: torch.Tensor  # int32 (count,), strictly increasing
    values: torch.Tensor  # float32 (count,)

    def __post_init__(self) -> None:
        if not 0 <= self.size <= LARGEST:
            raise ValueError(f"the size of a sparse vector is between 0 and {LARGEST:,}, got {self.size:,}")
        _expect("values", self.values, torch.float32, self.values.numel())
        _expect("indices", self.indices, torch.int32, self.values.numel())
        if self.indices.numel():
            if not bool((self.indices[1:] > self.indices[:-1]).all()):
                raise ValueError("the indices of a sparse vector must be strictly increasing")
            if int(self.indices[0]) < 0 or int(self.indices[-1]) >= self.size:
                raise ValueError(f"the indices of a sparse vector must be at least 0 and below its size {self.size:,}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sparse) and same(self, other)

    @staticmethod
    def of(vector: torch.Tensor) -> Sparse:
        """Copy the nonzeros of a dense vector."""
        _expect("vector", vector, torch.float32, vector.numel())
        vector = vector.detach().cpu()
        # numpy finds 300,000 nonzeros among 3 million in 5 ms, torch.nonzero in 14 ms
        where = torch.from_numpy((vector != 0).numpy().nonzero()[0])  # int64 (count,)
        return Sparse(vector.numel(), where.int(), vector[where])

    @property
    def nonzeros(self) -> int:
        return int(torch.count_nonzero(self.values))

    @property
    def nbytes(self) -> int:
        """Size in memory: four bytes per index and per value."""
        return 8 * self.values.numel()

    def dense(self) -> torch.Tensor:
        """The whole vector (size,), with zeros elsewhere."""
        vector = self.values.new_zeros(self.size)
        vector[self.indices.long()] = self.values
        return vector


Payload: TypeAlias = "torch.Tensor | Rows | Sparse"  # a plain tensor is float32 and has one dimension


def dense(payload: Payload) -> torch.Tensor:
    """The whole vector (size,); a plain tensor is returned as it is, not copied."""
    return payload if isinstance(payload, torch.Tensor) else payload.dense()


def size(payload: Payload) -> int:
    """Number of values of the whole vector."""
    return payload.numel() if isinstance(payload, torch.Tensor) else payload.size


def nonzeros(payload: Payload) -> int:
    """Number of values that are not zero."""
    return int(torch.count_nonzero(payload)) if isinstance(payload, torch.Tensor) else payload.nonzeros


def nbytes(payload: Payload) -> int:
    """Size in memory: 4 bytes per value and per index, one per row that could be kept."""
    if isinstance(payload, Rows):
        return payload.kept.nbytes + payload.values.nbytes
    return payload.nbytes


def by_value(by_row: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Repeat what is given per row (total rows,) for each value of the row (size,)."""
    pairs = zip(_by_segment(by_row, segments), segments, strict=True)
    return torch.cat([rows[:, None].expand(-1, width).reshape(-1) for rows, (_, width) in pairs])


def present(payload: Payload) -> torch.Tensor:
    """Mask of the values that the payload contains: bool (size,).

    >>> present(Sparse.of(torch.tensor([0.0, 5, 0, 7])))
    tensor([False,  True, False,  True])
    """
    if isinstance(payload, Rows):
        return by_value(payload.kept, payload.segments)
    mask = torch.ones(size(payload), dtype=torch.bool)
    if isinstance(payload, Sparse):
        mask.zero_()[payload.indices.long()] = True
    return mask


def same(first: Payload, second: Payload) -> bool:
    """Whether two payloads have the same form and the same bits (0.0 and -0.0 differ, NaN equals itself)."""
    if isinstance(first, Rows) and isinstance(second, Rows):
        equal = first.segments == second.segments and torch.equal(first.kept, second.kept)
        return equal and same(first.values, second.values)
    if isinstance(first, Sparse) and isinstance(second, Sparse):
        equal = first.size == second.size and torch.equal(first.indices, second.indices)
        return equal and same(first.values, second.values)
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor) or first.dtype != second.dtype:
        return False
    return torch.equal(first.detach().contiguous().view(torch.uint8), second.detach().contiguous().view(torch.uint8))


def kept_size(segments: Segments, kept: torch.Tensor) -> int:
    """Number of values in the kept rows: the sum of their widths."""
    pairs = zip(segments, _by_segment(kept, segments), strict=True)
    return sum(int(rows.sum()) * width for (_, width), rows in pairs)


def with_values(part: Payload, vector: torch.Tensor) -> Payload:
    """A payload of the same form with the values of a vector."""
    if isinstance(part, Rows):
        return Rows.of(vector, part.segments, part.kept)
    if isinstance(part, Sparse):
        return Sparse(part.size, part.indices, vector[part.indices.long()])
    return vector.clone()


# ---- payloads in a file: a flat dict of tensors and a JSON description -----------------------------------------------

_SUFFIXES = {"dense": (), "rows": ("kept", "values"), "sparse": ("indices", "values")}


def flatten(name: str, payload: Payload) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Named tensors and a JSON description of a payload; the tensors share its memory.

    >>> tensors, description = flatten("adaptive.0", Sparse.of(torch.tensor([0.0, 5.0])))
    >>> sorted(tensors), description
    (['adaptive.0:indices', 'adaptive.0:values'], {'shape': 'sparse', 'size': 2})
    """
    if name.endswith((":kept", ":indices", ":values")):  # two payloads could have tensors of the same name
        raise ValueError(f"the name of a payload must not end in :kept, :indices or :values, got {name!r}")
    if isinstance(payload, torch.Tensor):
        _expect(name, payload, torch.float32, payload.numel())
        return {name: payload.detach().contiguous()}, {"shape": "dense"}
    description: dict[str, Any] = {"shape": "sparse", "size": payload.size}
    if isinstance(payload, Rows):
        description = {"shape": "rows", "segments": [list(segment) for segment in payload.segments]}
    suffixes = _SUFFIXES[description["shape"]]
    return {f"{name}:{suffix}": getattr(payload, suffix).contiguous() for suffix in suffixes}, description


def unflatten(name: str, tensors: Mapping[str, torch.Tensor], description: Mapping[str, Any]) -> Payload:
    """Invert `flatten`; raise a `WeftError` if the tensors do not match the description."""
    try:
        shape = description["shape"]
        found = [tensors[f"{name}:{suffix}"] for suffix in _SUFFIXES[shape]]
        if shape == "rows":
            return Rows(tuple((int(rows), int(width)) for rows, width in description["segments"]), *found)
        if shape == "sparse":
            return Sparse(int(description["size"]), *found)
        _expect(name, tensors[name], torch.float32, tensors[name].numel())
        return tensors[name]
    except (KeyError, TypeError, ValueError) as reason:
        text = f"{reason} is missing or unknown" if isinstance(reason, KeyError) else str(reason)
        raise WeftError(f"the stored vector {name!r} is damaged ({text}); use an earlier checkpoint") from reason


def _blocks(
    vector: torch.Tensor, values: torch.Tensor, segments: Segments, kept: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each segment: its rows in the vector (rows, width), the kept indices, the kept rows (kept, width)."""
    start = kept_start = 0
    for (rows, width), mask in zip(segments, _by_segment(kept, segments), strict=True):
        indices, end = mask.nonzero().view(-1), start + rows * width
        kept_end = kept_start + len(indices) * width
        yield vector[start:end].view(rows, width), indices, values[kept_start:kept_end].view(-1, width)
        start, kept_start = end, kept_end


def _by_segment(by_row: torch.Tensor, segments: Sequence[tuple[int, int]]) -> Sequence[torch.Tensor]:
    return torch.split_with_sizes(by_row, [rows for rows, _ in segments])


def _expect(what: str, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.numel() != count:
        actual = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        raise ValueError(f"{what} must be {str(dtype).removeprefix('torch.')} ({count},), got {actual}")
