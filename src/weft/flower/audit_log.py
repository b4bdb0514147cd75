"""The audit log of a site: each tensor that has left it. It is readable at the site at any time, without the hub."""

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
FILE, LOCK = "audit.csv", ".audit.lock"  # two runs may write at the same time
HEADINGS = ("UTC", "request", "tensor", "shape", "bytes")

Row = dict[str, Any]  # by column; bytes is an int


def record(site: Path, hub: str, run: str, wire: bytes) -> None:
    """Record a reply before it is sent: a line for each tensor, and one for its header.

    A reply that is sent again, because it was lost, is recorded again.
    """
    message, weights = decode(wire), weigh(wire)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    # the hub chose the request's id: it may hold line breaks
    request = message.request_id.encode("unicode_escape").decode("ascii")
    shapes = {"header": "fields"} | {name: shape_of(tensor) for name, tensor in message.tensors.items()}
    rows = [[when, hub, run, request, name, shape, weights[name].bytes] for name, shape in shapes.items()]
    path, text = site / FILE, io.StringIO()
    with filelock.FileLock(site / LOCK):
        before = path.read_bytes()[-1:] if path.exists() else b""
        text.write("" if before in (b"", b"\n") else "\n")  # a kill cut off the last line
        csv.writer(text, lineterminator="\n").writerows(rows if before else [COLUMNS, *rows])
        append(path, text.getvalue())
        sync(path)


def shape_of(tensor: Payload) -> str:
    if isinstance(tensor, Rows):
        return f"{int(tensor.kept.sum())} of {tensor.kept.numel()} rows, {tensor.values.numel()} values"
    if isinstance(tensor, Sparse):
        return f"{tensor.values.numel()} of {tensor.size} values"
    return f"{size(tensor)} values"


def read(site: Path) -> tuple[list[Row], list[int]]:
    """All rows, and the numbers of damaged lines, counted from 1."""
    path = site / FILE
    if not path.exists():
        return [], []
    try:
        with filelock.FileLock(site / LOCK):  # no line is half written
            text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        raise WeftError(f"{path} cannot be read ({error.strerror}); check its permissions") from None
    rows, damaged = [], []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        if (row := _parse(line)) is not None:
            rows.append(row)
        elif line != ",".join(COLUMNS):
            damaged.append(number)
    return rows, damaged


def _parse(line: str) -> Row | None:
    """A line as a row; None for a damaged line."""
    try:
        (cells,) = csv.reader([line], strict=True)
        row: Row = dict(zip(COLUMNS, cells, strict=True))
        datetime.datetime.fromisoformat(row["when"])
        row["bytes"] = int(row["bytes"])
    except (csv.Error, ValueError):
        return None
    return row


def as_text(rows: list[Row]) -> Iterator[str]:
    """A table for 80 columns: a line for each tensor, below one with the day, the hub and the run."""
    cells = [[row["when"][11:19], *(row[key] for key in COLUMNS[3:6]), f"{row['bytes']:,}"] for row in rows]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *cells, strict=True)]

    def line(values: Sequence[str]) -> str:
        padded = [value.ljust(width) for value, width in zip(values[:-1], widths, strict=False)]
        return "  ".join(["", *padded, values[-1].rjust(widths[-1])])

    yield line(HEADINGS)
    pairs = zip(rows, cells, strict=True)
    for title, group in itertools.groupby(pairs, lambda pair: "on {:.10} to {}, run {}".format(*pair[0].values())):
        yield title
        yield from (line(values) for _, values in group)
