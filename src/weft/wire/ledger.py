"""Bytes and nonzeros that crossed the wire, by direction, client, task, round and tensor.

The ledger counts the bytes that are sent. Next to them is the size of the same message with the whole body in float32,
the baseline of every claim of saving.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from weft.errors import WeftError, nearest
from weft.wire.message import weigh

Direction = Literal["c2s", "s2c"]  # client to server, server to client

DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
COLUMNS = ("direction", "client", "task", "round", "tensor")  # the key of a row; the other columns can be summed


class Entry(NamedTuple):
    """One tensor of one message."""

    direction: Direction
    client: int
    task: int
    round: int
    tensor: str  # the name of a tensor, or "header" for all else
    bytes: int
    nonzeros: int
    dense_bytes: int  # of the whole message, in its "header" row; 0 in the others, so that sums are right

    def to_row(self) -> list[str]:
        """A row for csv.writer, in the order of HEADER."""
        return list(map(str, self))

    @staticmethod
    def from_row(row: Sequence[str]) -> Entry:
        """Read a CSV row; raise a `WeftError` if it is damaged, such as a half-written last line.

        >>> Entry.from_row(["c2s", "3", "0", "1", "base", "120", "30", "0"]).bytes
        120
        """
        try:
            client, task, round_, size, nonzeros, dense_bytes = map(int, (*row[1:4], *row[5:]))
            direction = DIRECTIONS[DIRECTIONS.index(row[0])]
            return Entry(direction, client, task, round_, row[4], size, nonzeros, dense_bytes)
        except (ValueError, IndexError) as reason:
            text = ",".join(row)
            raise WeftError(f"ledger row {text[:80]!r} is damaged; expected {','.join(HEADER)}") from reason


HEADER = Entry._fields  # the first line of a ledger file


class Sums(NamedTuple):
    """Sums over rows."""

    bytes: int = 0
    nonzeros: int = 0
    dense_bytes: int = 0


def by(entries: Iterable[Entry], *columns: str) -> dict[tuple[str | int, ...], Sums]:
    """Sums for each combination of values in the columns, sorted; without columns, one sum under ().

    >>> row = ["c2s", "3", "0", "1", "base", "120", "30", "0"]
    >>> by([Entry.from_row(row), Entry.from_row(row)], "client", "tensor")
    {(3, 'base'): Sums(bytes=240, nonzeros=60, dense_bytes=0)}
    """
    for column in columns:
        if column not in COLUMNS:
            raise WeftError(f"the ledger has no column {column!r}; {nearest(column, COLUMNS)}")
    sums: dict[tuple[str | int, ...], Sums] = {}
    for entry in entries:
        key = tuple(getattr(entry, column) for column in columns)
        old = sums.get(key, Sums())
        sums[key] = Sums(old.bytes + entry.bytes, old.nonzeros + entry.nonzeros, old.dense_bytes + entry.dense_bytes)
    return dict(sorted(sums.items()))


class Ledger:
    """All rows of a run. To resume one, set `entries` to those of its file."""

    def __init__(self, body_size: int) -> None:
        self.body_size = body_size  # values of the whole body
        self.entries: list[Entry] = []

    def enter(self, direction: Direction, client: int, task: int, round_: int, wire: bytes | memoryview) -> list[Entry]:
        """Weigh a message and add its rows; return them, the header's first."""
        weights = weigh(wire)
        body = 4 * self.body_size if len(weights) > 1 else 0  # a message without tensors would not have a body
        dense_bytes = {"header": weights["header"].bytes + body}
        key = direction, client, task, round_
        rows = [Entry(*key, tensor, *weight, dense_bytes.get(tensor, 0)) for tensor, weight in weights.items()]
        self.entries += rows
        return rows

    def by(self, *columns: str) -> dict[tuple[str | int, ...], Sums]:
        """Sums for each combination of values in the columns."""
        return by(self.entries, *columns)

    def totals(self) -> dict[str, dict[str, int]]:
        """Bytes, nonzeros and dense bytes of each direction, ready for JSON."""
        sums = self.by("direction")
        return {direction: sums.get((direction,), Sums())._asdict() for direction in DIRECTIONS}
