"""What crossed the wire: bytes and nonzeros by direction, client, task, round and tensor.

The ledger weighs the very bytes that travel. Beside them stands what the same message would weigh if it carried the
whole body in float32 once: the yardstick for every claim of saving.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal, NamedTuple

from weft.errors import WeftError, nearest
from weft.wire.message import weigh

Direction = Literal["c2s", "s2c"]  # client to server, server to client

DIRECTIONS: tuple[Direction, ...] = ("c2s", "s2c")
COLUMNS = ("direction", "client", "task", "round", "tensor")  # what a row is filed under; the other columns are sums


@dataclass(frozen=True)
class Entry:
    """One tensor of one message."""

    direction: Direction
    client: int
    task: int
    round: int
    tensor: str  # a tensor's name, or "header" for everything else
    bytes: int
    nonzeros: int
    dense_bytes: int  # of the whole message, on its "header" row; 0 on the others, so that sums come out right

    def to_row(self) -> list[str]:
        """A row for csv.writer, in the order of HEADER."""
        return [str(value) for value in astuple(self)]

    @staticmethod
    def from_row(row: Sequence[str]) -> Entry:
        """The entry of a CSV row; a `WeftError` if the row is damaged, such as a half-written last line.

        >>> Entry.from_row(["c2s", "3", "0", "1", "base", "120", "30", "0"]).bytes
        120
        """
        try:
            direction, client, task, round_, tensor, *sums = row
            size, nonzeros, dense_bytes = (int(value) for value in sums)
            return Entry(
                _direction(direction), int(client), int(task), int(round_), tensor, size, nonzeros, dense_bytes
            )
        except ValueError as reason:
            text = ",".join(row)
            raise WeftError(f"ledger row {text[:80]!r} is damaged; it should read {','.join(HEADER)}") from reason


HEADER = tuple(field.name for field in fields(Entry))  # the first line of a ledger file


class Sums(NamedTuple):
    """Sums over some rows."""

    bytes: int
    nonzeros: int
    dense_bytes: int


def by(entries: Iterable[Entry], *columns: str) -> dict[tuple[str | int, ...], Sums]:
    """Sums for each combination of values in the columns, sorted; with no column, one sum under ().

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
        old = sums.get(key, Sums(0, 0, 0))
        sums[key] = Sums(old.bytes + entry.bytes, old.nonzeros + entry.nonzeros, old.dense_bytes + entry.dense_bytes)
    return dict(sorted(sums.items()))  # a column holds either words or numbers, so keys compare


class Ledger:
    """All rows so far. To resume, extend `entries` by those of the file."""

    def __init__(self, body_size: int) -> None:
        self.body_size = body_size  # values in the whole body
        self.entries: list[Entry] = []

    def enter(
        self,
        direction: Direction,
        client: int,
        task: int,
        round: int,  # noqa: A002 - the paper's word, and the column's
        wire: bytes | memoryview,
    ) -> list[Entry]:
        """Weigh a message and add its rows; hands back the new rows, the header's first."""
        weights = weigh(wire)
        whole_body = 4 * self.body_size if len(weights) > 1 else 0  # a message without tensors would carry no body
        dense_bytes = {"header": weights["header"].bytes + whole_body}
        rows = [
            Entry(
                _direction(direction),
                client,
                task,
                round,
                tensor,
                weight.bytes,
                weight.nonzeros,
                dense_bytes.get(tensor, 0),
            )
            for tensor, weight in weights.items()
        ]
        self.entries += rows
        return rows

    def by(self, *columns: str) -> dict[tuple[str | int, ...], Sums]:
        """Sums for each combination of values in the columns."""
        return by(self.entries, *columns)

    def totals(self) -> dict[str, dict[str, int]]:
        """Bytes, nonzeros and dense bytes of each direction, ready for JSON."""
        found = self.by("direction")
        return {direction: found.get((direction,), Sums(0, 0, 0))._asdict() for direction in DIRECTIONS}


def _direction(word: str) -> Direction:
    for known in DIRECTIONS:
        if word == known:
            return known
    raise ValueError(f"a direction is 'c2s' or 's2c', got {word!r}")
