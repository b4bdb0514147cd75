"""What is kept of each finished run: a line of NAME.csv for a table, points for a figure, wherever the run was made."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from weft.errors import WeftError
from weft.plan import Plan
from weft.repro import Experiment, Row
from weft.runs.folder import read_images, read_summary
from weft.scenarios.splits import has_changed

TIMES = ("seconds", "images_per_second")  # all of a summary that may differ between two runs of one plan

Key = tuple[str, int]  # row and seed


class Finding(Protocol):
    """What is kept of a run, and of which run it is."""

    @property
    def row(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def plan_hash(self) -> str: ...
    @property
    def images(self) -> str: ...


F = TypeVar("F", bound=Finding)


def key_of(finding: Finding) -> Key:
    return finding.row, finding.seed


@dataclass(frozen=True)
class Line:
    """A finished run of a table; the fields are the columns of the csv."""

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
    images: str = ""  # each dataset and its mark; empty where images are drawn, or it was not recorded

    def traffic(self, direction: str) -> dict[str, float]:
        return {what: getattr(self, f"{direction}_{what}") for what in ("bytes", "nonzeros", "dense_bytes")}


COLUMNS = tuple(field.name for field in dataclasses.fields(Line))
LATER = ("images",)  # columns that a csv of an older weft does not have
KINDS = {field.name: str(field.type) for field in dataclasses.fields(Line)}


def line_of(row: Row, seed: int, plan_text: str, summary: Mapping[str, Any], images: str = "") -> Line:
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
        images=images,
        **kept,
        **sent,
    )


def read_line(row: Row, seed: int, folder: Path) -> Line:
    """The line of a run folder that is over."""
    summary = read_summary(folder)
    assert summary is not None
    return line_of(row, seed, plan_text(folder), summary, images_of(folder))


def plan_text(folder: Path) -> str:
    return (folder / "plan.toml").read_text(encoding="utf-8")


def images_of(folder: Path) -> str:
    """The datasets that a run used as NAME:MARK words; empty if there are none."""
    return " ".join(f"{name}:{mark}" for name, mark in sorted(read_images(folder).items()))


def changed_images(images: str) -> list[str]:
    """Those datasets of NAME:MARK words of which there are other images here now, or which are cut otherwise."""
    marked = (word.partition(":") for word in images.split())
    return sorted(name for name, _, mark in marked if has_changed(name, mark))


def short_hash(text: str) -> str:
    """
    >>> short_hash("")
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def csv_of(columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Floats to their last digit, so that what is read back is what was written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return text.getvalue()


def csv_text(lines: Iterable[Line]) -> str:
    """Sorted by row and seed."""
    return csv_of(COLUMNS, map(dataclasses.astuple, sorted(lines, key=key_of)))


def read_cells(
    path: Path, columns: Sequence[str], take: Callable[[dict[str, str]], None], later: Collection[str] = ()
) -> None:
    """Hand every line of a csv to `take`, which raises a ValueError at one that is none; no file, no lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        raise WeftError(f"{path} cannot be read; move it away or choose another --out") from None
    there: list[str] = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            if number == 1:
                there = [column for column in columns if column in cells or column not in later]
                if cells != there:
                    raise ValueError
                continue
            take(dict(zip(there, cells, strict=True)))
        except ValueError:
            hint = "move it away or choose another --out"
            raise WeftError(f"line {number} of {path} is not one of these results; {hint}") from None


def read_csv(path: Path) -> dict[Key, Line]:
    """The lines of a csv; none if there is no such file."""
    lines: dict[Key, Line] = {}

    def take(cells: dict[str, str]) -> None:
        line = Line(**{name: _value(cell, KINDS[name]) for name, cell in cells.items()})
        lines[key_of(line)] = line

    read_cells(path, COLUMNS, take, LATER)
    return lines


def _value(cell: str, kind: str) -> Any:
    if kind == "str":
        return cell
    if kind == "int":
        return int(cell)
    return None if cell == "" and "None" in kind else float(cell)


class Results(Generic[F]):
    """The findings of one experiment: those that a run of it would give now, and others, which are kept, not counted.

    `rows` and `seeds` are what was asked for, whether or not it is there yet.
    """

    def __init__(self, experiment: Experiment, rows: Sequence[Row], seeds: Sequence[int], lines: Mapping[Key, F]):
        self.experiment, self.rows, self.seeds, self.lines = experiment, rows, seeds, dict(lines)
        self._by_label = {row.label: row for row in experiment.rows}
        self._wanted: dict[Key, str] = {}
        self._changed: dict[str, list[str]] = {}
        self._ours: dict[Key, F] = {}
        self.failures: dict[Key, str] = {}
        self.busy: dict[Key, str] = {}  # other processes are at these runs: no failures, and no word in the pages

    def add(self, line: F) -> None:
        self.lines[key_of(line)] = self._ours[key_of(line)] = line

    def merge(self, written: Mapping[Key, F]) -> None:
        """Take over what another process has written meanwhile; runs that are here stay as they are here."""
        self.lines = {**self.lines, **written, **self._ours}

    def is_current(self, line: F) -> bool:
        """Does the line come from what the experiment's plan says now, with the images that are here now?"""
        return self.is_of_its_plan(line) and not self.changed_images(line)

    def is_of_its_plan(self, line: F) -> bool:
        row, key = self._by_label.get(line.row), key_of(line)
        if row is None:
            return False
        if key not in self._wanted:
            try:
                plan: Plan = self.experiment.plan_of(row, line.seed)
            except WeftError:  # such as a seed that no plan can have
                return False
            self._wanted[key] = short_hash(plan.toml())
        return line.plan_hash == self._wanted[key]

    def changed_images(self, line: F) -> list[str]:
        if line.images not in self._changed:
            self._changed[line.images] = changed_images(line.images)
        return self._changed[line.images]

    def current(self) -> list[F]:
        return sorted((line for line in self.lines.values() if self.is_current(line)), key=key_of)

    def of(self, row: Row) -> list[F]:
        return [line for line in self.current() if line.row == row.label]

    def mixed_images(self) -> list[str]:
        """Datasets of which some runs used other images than others, as far as that is recorded."""
        marks = {word for line in self.current() for word in line.images.split()}
        names = Counter(word.partition(":")[0] for word in marks)
        return sorted(name for name, count in names.items() if count > 1)
