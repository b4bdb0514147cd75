"""All that has left a site, line by line: what a person at the site can read at any time without asking the hub."""

from __future__ import annotations

import csv
import datetime
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.errors import Problem
from weft.message import decode, weigh
from weft.tensors import Payload, Rows, Sparse, size

COLUMNS = ("when", "to", "run", "request", "tensor", "shape", "bytes")
FILE = "left.csv"
SHOWN = ("UTC", "request", "tensor", "shape", "bytes")  # in a line for a person

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
