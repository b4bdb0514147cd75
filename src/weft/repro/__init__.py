"""Tables and figures that one command makes again: `weft repro NAME` runs what is missing and writes the results.

An experiment is data: a plan, and rows that each change something in it. A table has the paper's numbers beside them;
a figure says what is read from each run folder and how it is drawn.

    tables.py, figures/   what there is        loop.py      runs what is missing     desk.py      csv, under a lock
    published.py          the paper's numbers  results.py   what is kept of a run    describing.py, writing.py   texts
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from weft.errors import WeftError, nearest
from weft.plan import Plan, ready_plans

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

    from weft.repro.figures.points import Panels, Point

TABLES = {
    "methods-glyphs": "weft.repro.tables:methods_glyphs",
    "table1": "weft.repro.tables:table1",
    "table2-cifar": "weft.repro.tables:table2_cifar",
    "table2-noniid": "weft.repro.tables:table2_noniid",
    "table-resnet": "weft.repro.tables:table_resnet",
    "table-20tasks": "weft.repro.tables:table_20tasks",
    "table-ablation": "weft.repro.tables:table_ablation",
    "table-regularizers": "weft.repro.tables:table_regularizers",
    "table-epochs": "weft.repro.tables:table_epochs",
}
FIGURES = {
    "fig-interference": "weft.repro.figures.interference:figure",
    "fig-adaptation": "weft.repro.figures.adaptation:figure",
    "fig-forgetting": "weft.repro.figures.forgetting:figure",
    "fig-cost": "weft.repro.figures.cost:figure",
    "fig-attention": "weft.repro.figures.attention:figure",
    "fig-async": "weft.repro.figures.asynchronous:figure",
    "fig-transfer": "weft.repro.figures.transfer:figure",
}

Scale = Literal["paper", "small"]

Published = tuple[float, float | None]  # mean and deviation as printed, in the unit of our column


@dataclass(frozen=True)
class Row:
    label: str  # in the results, in the name of a run folder and for --only
    method: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the plan, changed in this row
    plan: str = ""  # another ready plan than the experiment's
    small: Mapping[str, Any] = field(default_factory=dict)  # keys at the small scale


@dataclass(frozen=True)
class Experiment:
    """What tables and figures have in common: which runs they are made of."""

    name: str
    title: str
    plan: str | Path  # the name of a ready plan, or a file
    rows: tuple[Row, ...]
    note: str = ""  # what a reader must know who compares with the paper
    seeds: int = 3
    first_seed: int = 0
    scale: Scale | None = None  # None: it has one size only
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the plan, changed in all rows
    small: Mapping[str, Any] = field(default_factory=dict)  # and at the small scale, where it is not 5 x 5 x 8

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
        keys = {**self.keys, **row.keys}
        if self.scale is not None:
            keys["scale"] = self.scale
        if self.scale == "small":
            keys |= {**self.small, **row.small}
        file = ready_plans()[row.plan] if row.plan else self.file
        return Plan.load(file, method=row.method, seed=seed, **keys)

    def choose(self, only: Sequence[str] | None) -> tuple[Row, ...]:
        """The rows with these labels, or of these methods if no row is called so; all if nothing is asked for."""
        if only is None:
            return self.rows
        labels, methods = {row.label for row in self.rows}, {row.method for row in self.rows}
        for word in only:
            if word not in labels | methods:
                raise WeftError(f"{self.name} has no row {word!r}; {nearest(word, labels | methods)}")
        return tuple(row for row in self.rows if row.label in only or row.method in set(only) - labels)


@dataclass(frozen=True, kw_only=True)
class Table(Experiment):
    published: Mapping[str, Mapping[str, Published]] = field(default_factory=dict)  # label -> measure -> the paper's
    measures: tuple[str, ...] = ("accuracy", "forgetting", "up", "up_of_dense", "down", "down_of_dense", "model")


@dataclass(frozen=True, kw_only=True)
class Figure(Experiment):
    columns: tuple[str, str, str, str]  # what panel, series, x and y of a point are called in the csv
    read: Callable[[Row, Path], list[Point]]  # the plotted numbers of one run, from its folder
    draw: Callable[[Panels], Mapping[str, Picture]]  # pictures, by what stands behind the figure's name
    tell: Callable[[Panels], list[str]]  # what is seen, in paragraphs of Markdown


def load(name: str, scale: Scale | None = None) -> Table | Figure:
    """A table or figure by its name, at the paper's size unless `scale` says small."""
    known = {**TABLES, **FIGURES}
    if name not in known:
        raise WeftError(f"there is no table or figure {name!r}; {nearest(name, known)} (weft repro lists them)")
    module, _, function = known[name].partition(":")
    experiment: Table | Figure = getattr(importlib.import_module(module), function)()
    if scale is not None and experiment.scale is None:
        raise WeftError(f"{name} has one size only; leave --scale out")
    return replace(experiment, scale=scale) if scale is not None else experiment
