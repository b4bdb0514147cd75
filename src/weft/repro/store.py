"""Results of an experiment: a record of each finished run, kept in NAME.csv and written under a lock.

A csv counts without its run folders, so results can be committed, or computed on several machines.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError
from weft.files import write_bytes, write_text
from weft.metrics import spread
from weft.repro import Experiment, Row
from weft.repro.figures import FIGURES, Curve
from weft.runs.folder import read_images, read_summary
from weft.scenarios.splits import has_changed

LOCK_TIMEOUT = 60.0  # seconds that another process may take to write
TIMES = ("seconds", "images_per_second")  # the only values of a summary that may differ between two runs of one plan
SENT = tuple(f"{direction}_{what}" for what in ("bytes", "dense_bytes", "nonzeros") for direction in ("c2s", "s2c"))
SCORES = ("accuracy", "forgetting", "backward_transfer", "validation_accuracy")
MEASURED = (*SCORES, *SENT, "model_size_bytes", "model_size_paper_bytes", *TIMES)
OPTIONAL = (*SCORES, "images_per_second")  # an empty cell is None
TEXTS = ("row", "method", "plan_hash", "summary_hash", "images")

# lines of a plan's file
NEUTRAL = {'heads = "private"', 'deal = "superclasses"', "dropout = 0.0", 'selection = "random"'}

Key = tuple[str, int]  # row and seed
Render = Callable[["Results", bool], Mapping[str, str | bytes]]


@dataclass(frozen=True)
class Record:
    """What is kept of a finished run: one line of values for a table, one line per point for a figure."""

    row: str
    method: str
    seed: int
    plan_hash: str
    images: str  # NAME:FINGERPRINT of each dataset; empty where images are drawn
    lines: tuple[Mapping[str, Any], ...]

    @property
    def key(self) -> Key:
        return self.row, self.seed


def record_of(experiment: Experiment, row: Row, seed: int, folder: Path) -> Record:
    """Read a finished run."""
    if experiment.figure:
        figure = FIGURES[experiment.figure](experiment)
        points = [
            (panel, series, int(x) if float(x).is_integer() else x, y)
            for panel, series, x, y in figure.points(row, folder)
        ]
        lines = tuple(dict(zip(figure.columns, point, strict=True)) for point in points)
    else:
        summary = read_summary(folder)
        assert summary is not None
        lines = (measured_line(summary),)
    identity = plan_hash((folder / "plan.toml").read_text(encoding="utf-8"))
    return Record(row.label, row.method, seed, identity, images_of(folder), lines)


def measured_line(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table's line."""
    sent = {f"{way}_{what}": value for way in ("c2s", "s2c") for what, value in summary["traffic"][way].items()}
    lasting = {key: value for key, value in summary.items() if key not in TIMES}
    values = {column: {**summary, **sent}[column] for column in MEASURED}
    return {**values, "summary_hash": short_hash(json.dumps(lasting, sort_keys=True))}


def plan_hash(text: str) -> str:
    """Identify a plan by its file. An option that changes nothing does not count if it is newer than some results.

    >>> plan_hash('seed = 1\\nheads = "private"\\n') == plan_hash("seed = 1\\n")
    True
    """
    return short_hash("".join(line for line in text.splitlines(keepends=True) if line.rstrip() not in NEUTRAL))


def short_hash(text: str) -> str:
    """
    >>> short_hash("")
    'e3b0c44298fc1c14'
    """
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def images_of(folder: Path) -> str:
    """The datasets that a run read, as NAME:FINGERPRINT words."""
    return " ".join(f"{name}:{mark}" for name, mark in sorted(read_images(folder).items()))


def changed_images(images: str) -> list[str]:
    """Datasets of NAME:FINGERPRINT words whose cached images, or splits, are different now."""
    marked = (word.partition(":") for word in images.split())
    return sorted(name for name, _, mark in marked if has_changed(name, mark))


# ---- the csv ---------------------------------------------------------------------------------------------------------


def columns_of(experiment: Experiment) -> tuple[str, ...]:
    if experiment.figure:
        return ("row", "method", "seed", *FIGURES[experiment.figure].columns, "plan_hash", "images")
    return ("row", "method", "seed", *MEASURED, "plan_hash", "summary_hash", "images")


def csv_text(experiment: Experiment, records: Iterable[Record]) -> str:
    """Sorted by row and seed; floats to their last digit, so that they are read back unchanged."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns_of(experiment), lineterminator="\n")
    writer.writeheader()
    for record in sorted(records, key=lambda record: record.key):
        shared = {key: value for key, value in vars(record).items() if key != "lines"}
        writer.writerows({**shared, **line} for line in record.lines)
    return text.getvalue()


def read_csv(experiment: Experiment, path: Path) -> dict[Key, Record]:
    """The records of a csv; none if the file does not exist."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise WeftError(f"{path} cannot be read; move it away or choose another --out") from None
    columns = columns_of(experiment)
    found: dict[Key, dict[str, Any]] = {}
    lines: dict[Key, list[dict[str, Any]]] = {}
    texts = {*TEXTS, *(FIGURES[experiment.figure].columns[:2] if experiment.figure else ())}
    for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            if number == 1:
                if tuple(cells) != columns:
                    raise ValueError("other columns")
                continue
            line = {name: _value(name, cell, texts) for name, cell in zip(columns, cells, strict=True)}
            shared = {key: line.pop(key) for key in ("row", "method", "seed", "plan_hash", "images")}
            key = shared["row"], shared["seed"]
            if found.setdefault(key, shared) != shared:
                raise ValueError("two runs with the same name")
            lines.setdefault(key, []).append(line)
        except ValueError:
            advice = "move it away or choose another --out"
            raise WeftError(f"line {number} of {path} is not a result of {experiment.name}; {advice}") from None
    return {key: Record(**shared, lines=tuple(lines[key])) for key, shared in found.items()}


def _value(name: str, cell: str, texts: set[str]) -> Any:
    if name in texts:
        return cell
    if cell == "" and name in OPTIONAL:
        return None
    return int(cell) if cell.lstrip("-").isdecimal() else float(cell)


# ---- records and the experiment as it is now -------------------------------------------------------------------------


@dataclass
class Results:
    """Records of an experiment. Those of other plans or images are kept in the csv, but not counted."""

    experiment: Experiment
    rows: Sequence[Row]  # requested, finished or not
    seeds: Sequence[int]
    records: dict[Key, Record] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    locked: dict[Key, str] = field(default_factory=dict)  # runs of other processes: no failures, not in the files
    _ours: dict[Key, Record] = field(default_factory=dict)
    _hashes: dict[Key, str | None] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        self.records[record.key] = self._ours[record.key] = record

    def merge(self, written: Mapping[Key, Record]) -> None:
        """Take over what another process has written; runs of this process win."""
        self.records = {**self.records, **written, **self._ours}

    def has_current_plan(self, record: Record) -> bool:
        if record.key not in self._hashes:
            row = next((row for row in self.experiment.rows if row.label == record.row), None)
            try:
                plan = row and self.experiment.plan_of(row, record.seed)
            except WeftError:  # such as a seed that no plan can have
                plan = None
            self._hashes[record.key] = plan_hash(plan.toml()) if plan else None
        return record.plan_hash == self._hashes[record.key]

    def is_current(self, record: Record) -> bool:
        """Would a run now have the same plan and the same images?"""
        return self.has_current_plan(record) and not changed_images(record.images)

    def current(self) -> list[Record]:
        return sorted((one for one in self.records.values() if self.is_current(one)), key=lambda one: one.key)

    def panels(self) -> dict[str, dict[str, Curve]]:
        """The curves of a figure: means over seeds, in the order of the experiment's rows."""
        assert self.experiment.figure
        columns = FIGURES[self.experiment.figure].columns
        order = [row.label for row in self.experiment.rows]
        values: dict[str, dict[str, dict[float, list[float]]]] = {}
        for record in sorted(self.current(), key=lambda record: order.index(record.row)):
            for line in record.lines:
                panel, series, x, y = (line[column] for column in columns)
                values.setdefault(panel, {}).setdefault(series, {}).setdefault(x, []).append(y)
        return {
            panel: {name: [(x, found) for x in sorted(ys) if (found := spread(ys[x]))] for name, ys in curves.items()}
            for panel, curves in values.items()
        }

    def mixed_images(self) -> list[str]:
        """Datasets of which some runs used different images than others."""
        marks = {word for record in self.current() for word in record.images.split()}
        names = Counter(word.partition(":")[0] for word in marks)
        return sorted(name for name, count in names.items() if count > 1)


# ---- the folder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """The files of an experiment: NAME.csv and what `render` makes of it, each written atomically."""

    experiment: Experiment
    folder: Path
    render: Render

    def path(self, suffix: str) -> Path:
        return self.folder / f"{self.experiment.stem}{suffix}"

    def read(self) -> dict[Key, Record]:
        return read_csv(self.experiment, self.path(".csv"))

    def check(self) -> None:
        """Fail now, and not after hours, if the folder cannot be written."""
        with self._lock():
            pass

    def write(self, results: Results, more_to_come: bool = False) -> list[Path]:
        """Write all files and return their paths. Records that another process has added to the csv are kept."""
        with self._lock():
            results.merge(self.read())
            write_text(self.path(".csv"), csv_text(self.experiment, results.records.values()))
            others = self.render(results, more_to_come)
            for suffix, content in others.items():
                write_bytes(self.path(suffix), content if isinstance(content, bytes) else content.encode("utf-8"))
        return [self.path(suffix) for suffix in (".csv", *others)]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(self.folder / f".{self.experiment.stem}.lock", timeout=LOCK_TIMEOUT):
                yield
        except filelock.Timeout:
            raise WeftError(f"another process is writing {self.path('.csv')}; wait for it or stop it") from None
        except OSError as error:
            raise WeftError(f"{self.folder} cannot be written ({error.strerror}); choose another --out") from None
