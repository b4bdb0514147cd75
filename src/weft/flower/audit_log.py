"""All that has left a site, line by line: what a person at the site can read at any time without asking the hub."""

from __future__ import annotations

import csv
import datetime
import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError
from weft.files import append, sync
from weft.wire.message import decode, weigh
from weft.wire.tensors import Payload, Rows, Sparse, size

COLUMNS = ("when", "to", "run", "request", "tensor", "shape", "bytes")
FILE, LOCK = "left.csv", ".left.lock"  # a site may answer in two runs at the same time
SHOWN = ("UTC", "request", "tensor", "shape", "bytes")  # in a line for a person

Row = dict[str, Any]  # by column; bytes are a number


def note(site: Path, hub: str, run: str, wire: bytes) -> None:
    """Write down a reply before it goes: each tensor, and one line for all words and numbers of its header.

    A reply that goes a second time, because the hub did not get it, is written down a second time.
    """
    message, weights = decode(wire), weigh(wire)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    shapes = {"header": "words and numbers"} | {name: shape_of(tensor) for name, tensor in message.tensors.items()}
    request = _on_one_line(message.request_id)
    rows = [[when, hub, run, request, name, shape, weights[name].bytes] for name, shape in shapes.items()]
    with filelock.FileLock(site / LOCK):
        append(site / FILE, _start(site / FILE) + _as_csv(rows))
        sync(site / FILE)


def _start(path: Path) -> str:
    """What has to stand before new lines: the columns in a new file, and an end to half a line that a kill left."""
    try:
        with path.open("rb") as file:
            if file.seek(0, io.SEEK_END) == 0:
                return _as_csv([COLUMNS])
            file.seek(-1, io.SEEK_END)
            return "" if file.read() == b"\n" else "\n"
    except FileNotFoundError:
        return _as_csv([COLUMNS])


def _as_csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _on_one_line(text: str) -> str:
    """A request's id is the hub's word, and could have more than one.

    >>> _on_one_line("0.3.1"), _on_one_line("a\\nb")
    ('0.3.1', 'a\\\\nb')
    """
    return text.encode("unicode_escape").decode("ascii")


def shape_of(tensor: Payload) -> str:
    if isinstance(tensor, Rows):
        return f"{int(tensor.kept.sum())} of {tensor.kept.numel()} rows, {tensor.values.numel()} values"
    if isinstance(tensor, Sparse):
        return f"{tensor.values.numel()} of {tensor.size} values"
    return f"{size(tensor)} values"


def read(site: Path) -> tuple[list[Row], list[int]]:
    """All that has left, and the numbers of lines that are damaged, counted from 1."""
    path = site / FILE
    if not path.exists():
        return [], []
    try:
        with filelock.FileLock(site / LOCK):  # no line is on its way
            text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise WeftError(f"{path} cannot be read ({error.strerror})") from None
    rows, damaged = [], []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        if (row := _row(line)) is not None:
            rows.append(row)
        elif line != ",".join(COLUMNS):
            damaged.append(number)
    return rows, damaged


def _row(line: str) -> Row | None:
    """None if it is none."""
    try:
        (cells,) = csv.reader([line], strict=True)
        row: Row = dict(zip(COLUMNS, cells, strict=True))
        datetime.datetime.fromisoformat(row["when"])
        row["bytes"] = int(row["bytes"])
    except (csv.Error, ValueError):
        return None
    return row


def lines(rows: list[Row]) -> Iterator[str]:
    """A line for each tensor, below one that says the day, to whom, and in which run: they fit into 80 columns."""
    cells = [[row["when"][11:19], *(row[key] for key in COLUMNS[3:6]), f"{row['bytes']:,}"] for row in rows]
    widths = [max(map(len, column)) for column in zip(SHOWN, *cells, strict=True)]

    def line(values: Sequence[str]) -> str:
        *words, number = (value.ljust(width) for value, width in zip(values, widths, strict=True))
        return "  ".join(["", *words, number.strip().rjust(widths[-1])])

    yield line(SHOWN)
    told = zip(rows, cells, strict=True)
    for (day, hub, run), those in itertools.groupby(
        told, lambda one: (one[0]["when"][:10], one[0]["to"], one[0]["run"])
    ):
        yield f"on {day} to {hub}, run {run}"
        yield from (line(values) for _, values in those)
