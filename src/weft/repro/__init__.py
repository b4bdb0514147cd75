"""Tables that one command makes again: `weft repro NAME` runs what is missing of one and writes its results.

A table is data: a plan, and rows that each change something in it. tables.py defines them, loop.py runs them,
results.py reads what came out, writing.py makes csv, Markdown and LaTeX of it, screens.py shows it in a terminal.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from weft.errors import Problem, nearest
from weft.plan import Plan, ready_plans

TABLES = {
    "methods-glyphs": "weft.repro.tables:methods_glyphs",
    "table2-cifar": "weft.repro.tables:table2_cifar",
    "table2-noniid": "weft.repro.tables:table2_noniid",
}

Scale = Literal["paper", "small"]

Published = tuple[float, float | None]  # mean and deviation as printed, in the unit of our column


@dataclass(frozen=True)
class Row:
    label: str  # in the results, in the name of a run folder and for --only
    method: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the plan, changed in this row


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    plan: str | Path  # the name of a ready plan, or a file
    rows: tuple[Row, ...]
    published: Mapping[str, Mapping[str, Published]] = field(default_factory=dict)  # label -> measure -> the paper's
    note: str = ""  # what a reader must know who compares with the paper
    seeds: int = 3
    first_seed: int = 0
    scale: Scale | None = None  # None: the table has one size only

    def __post_init__(self) -> None:
        labels = [row.label for row in self.rows]
        assert len(set(labels)) == len(labels), f"two rows of {self.name} have one label"
        assert all(re.fullmatch(r"[\w.+@-]+", label) for label in labels), "a label is part of a folder's name"

    @property
    def stem(self) -> str:
        """What its files are called: results of both scales lie side by side."""
        return f"{self.name}-small" if self.scale == "small" else self.name

    @property
    def file(self) -> Path:
        """The plan's file; a ready plan comes before a file of that name, which may lie anywhere by chance."""
        return ready_plans().get(str(self.plan), Path(self.plan))

    def plan_of(self, row: Row, seed: int) -> Plan:
        scale = {} if self.scale is None else {"scale": self.scale}
        return Plan.load(self.file, method=row.method, seed=seed, **scale, **row.keys)

    def choose(self, only: Sequence[str] | None) -> tuple[Row, ...]:
        """The rows with these labels or methods; all of them if nothing is asked for."""
        if only is None:
            return self.rows
        known = {word for row in self.rows for word in (row.label, row.method)}
        for word in only:
            if word not in known:
                raise Problem(f"the table {self.name} has no row {word!r}; {nearest(word, known)}")
        return tuple(row for row in self.rows if row.label in only or row.method in only)


def load(name: str, scale: Scale | None = None) -> Table:
    """A table by its name, at the paper's size unless `scale` says small."""
    if name not in TABLES:
        raise Problem(f"there is no table {name!r}; {nearest(name, TABLES)} (weft list tables shows them)")
    module, _, function = TABLES[name].partition(":")
    table: Table = getattr(importlib.import_module(module), function)()
    if scale is not None and table.scale is None:
        raise Problem(f"the table {name} has one size only; leave --scale out")
    return replace(table, scale=scale) if scale is not None else table
