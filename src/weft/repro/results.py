"""What is known of a table: a line for each finished run, kept in NAME.csv, wherever the run was made."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import Problem
from weft.plan import Plan
from weft.record import read_summary
from weft.repro import Row, Table

TIMES = ("seconds", "images_per_second")  # all of a summary that may differ between two runs of one plan

Key = tuple[str, int]  # row and seed


@dataclass(frozen=True)
class Line:
    """A finished run; the fields are the columns of the csv."""

    row: str
    method: str
    seed: int
    accuracy: float | None
    forgetting: float | None
    backward_transfer: float | None
    validation_accuracy: float | None
    c2s_bytes: int
    s2c_bytes: int
    c2s_dense_bytes: int
    s2c_dense_bytes: int
    c2s_nonzeros: int
    s2c_nonzeros: int
    model_size_bytes: int
    model_size_paper_bytes: int
    seconds: float
    images_per_second: float | None
    plan_hash: str
    summary_hash: str

    @property
    def key(self) -> Key:
        return self.row, self.seed

    def traffic(self, direction: str) -> dict[str, float]:
        return {what: getattr(self, f"{direction}_{what}") for what in ("bytes", "nonzeros", "dense_bytes")}


COLUMNS = tuple(field.name for field in dataclasses.fields(Line))
KINDS = {field.name: str(field.type) for field in dataclasses.fields(Line)}


def line_of(row: Row, seed: int, plan_text: str, summary: Mapping[str, Any]) -> Line:
    sent = {
        f"{direction}_{what}": summary["traffic"][direction][what]
        for direction in ("c2s", "s2c")
        for what in ("bytes", "nonzeros", "dense_bytes")
    }
    kept = {column: summary[column] for column in COLUMNS if column in summary and column not in ("method", "seed")}
    lasting = {key: value for key, value in summary.items() if key not in TIMES}
    return Line(
        row=row.label,
        method=row.method,
        seed=seed,
        plan_hash=short_hash(plan_text),
        summary_hash=short_hash(json.dumps(lasting, sort_keys=True)),
        **kept,
        **sent,
    )


def read_line(row: Row, seed: int, folder: Path) -> Line:
    """The line of a run folder that is over."""
    summary = read_summary(folder)
    assert summary is not None
    return line_of(row, seed, (folder / "plan.toml").read_text(encoding="utf-8"), summary)


def short_hash(text: str) -> str:
    """
    >>> short_hash("")
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def csv_text(lines: Iterable[Line]) -> str:
    """Sorted by row and seed; floats to their last digit, so that what is read back is what was written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for line in sorted(lines, key=lambda line: line.key):
        writer.writerow("" if value is None else value for value in dataclasses.astuple(line))
    return text.getvalue()


def read_csv(path: Path) -> dict[Key, Line]:
    """The lines of a csv; none if there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise Problem(f"{path} cannot be read; move it away or choose another --out") from None
    lines: dict[Key, Line] = {}
    for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            if number == 1:
                if tuple(cells) != COLUMNS:
                    raise ValueError
                continue
            line = Line(**{name: _value(cell, KINDS[name]) for name, cell in zip(COLUMNS, cells, strict=True)})
            lines[line.key] = line
        except ValueError:
            hint = "move it away or choose another --out"
            raise Problem(f"line {number} of {path} is not one of these results; {hint}") from None
    return lines


def _value(cell: str, kind: str) -> Any:
    if kind == "str":
        return cell
    if kind == "int":
        return int(cell)
    return None if cell == "" and "None" in kind else float(cell)


class Results:
    """The lines of one table: those that its plan would give now, and others, which are kept and not counted.

    `rows` and `seeds` are what was asked for, whether or not it is there yet.
    """

    def __init__(self, table: Table, rows: Sequence[Row], seeds: Sequence[int], lines: Mapping[Key, Line]):
        self.table, self.rows, self.seeds, self.lines = table, rows, seeds, dict(lines)
        self._by_label = {row.label: row for row in table.rows}
        self._wanted: dict[Key, str] = {}
        self._ours: dict[Key, Line] = {}
        self.failures: dict[Key, str] = {}

    def add(self, line: Line) -> None:
        self.lines[line.key] = self._ours[line.key] = line

    def merge(self, written: Mapping[Key, Line]) -> None:
        """Take over what another process has written meanwhile; runs that are here stay as they are here."""
        self.lines = {**self.lines, **written, **self._ours}

    def is_current(self, line: Line) -> bool:
        """Does the line come from what the table's plan says now?"""
        row = self._by_label.get(line.row)
        if row is None:
            return False
        if line.key not in self._wanted:
            try:
                plan: Plan = self.table.plan_of(row, line.seed)
            except Problem:  # such as a seed that no plan can have
                return False
            self._wanted[line.key] = short_hash(plan.toml())
        return line.plan_hash == self._wanted[line.key]

    def current(self) -> list[Line]:
        return sorted((line for line in self.lines.values() if self.is_current(line)), key=lambda line: line.key)

    def of(self, row: Row) -> list[Line]:
        return [line for line in self.current() if line.row == row.label]
