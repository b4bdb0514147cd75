"""All that has left a site, line by line: what a person at the site can read at any time without asking the hub."""

from __future__ import annotations

import csv
import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.errors import Problem
from weft.message import decode, weigh
from weft.tensors import Payload, Rows, Sparse, size

COLUMNS = ("when", "to", "run", "request", "tensor", "shape", "bytes")
FILE = "left.csv"

Row = dict[str, Any]  # by column; bytes are a number


def note(site: Path, hub: str, run: str, wire: bytes) -> None:
    """Write down a reply before it goes: each tensor, and one line for all words and numbers of its header.

    A reply that goes a second time, because the hub did not get it, is written down a second time.
    """
    message, weights = decode(wire), weigh(wire)
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    shapes = {"header": "words and numbers"} | {name: shape_of(tensor) for name, tensor in message.tensors.items()}
    path = site / FILE
    new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for name, shape in shapes.items():
            writer.writerow([when, hub, run, message.request_id, name, shape, weights[name].bytes])


def shape_of(tensor: Payload) -> str:
    if isinstance(tensor, Rows):
        return f"{int(tensor.kept.sum())} of {tensor.kept.numel()} rows, {tensor.values.numel()} values"
    if isinstance(tensor, Sparse):
        return f"{tensor.values.numel()} of {tensor.size} values"
    return f"{size(tensor)} values"


def read(site: Path) -> list[Row]:
    try:
        with (site / FILE).open(encoding="utf-8", newline="") as file:
            return [{**row, "bytes": int(row["bytes"])} for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error, ValueError, TypeError, KeyError):
        raise Problem(f"{site / FILE} cannot be read") from None


def lines(rows: list[Row]) -> Iterator[str]:
    """A line for each tensor, below one that says the day, to whom, and in which run: they fit into 80 columns."""
    cells = [
        [row["when"][11:19], row["request"], row["tensor"], row["shape"], f"{row['bytes']:,}".rjust(10)] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    pairs = zip(rows, cells, strict=True)
    for (day, hub, run), told in itertools.groupby(
        pairs, lambda pair: (pair[0]["when"][:10], pair[0]["to"], pair[0]["run"])
    ):
        yield f"on {day} (UTC) to {hub}, run {run}: time, request, tensor, shape, bytes"
        for _, line in told:
            yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
