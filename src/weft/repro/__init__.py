"""Tables and figures from one command: `weft repro NAME` runs what is missing and writes the results.

An experiment is a TOML file: a plan, rows that each change something in it, and the paper's numbers. The files of the
paper's tables and figures are in experiments/; `weft repro my_table.toml` runs one of the user's.

    figures.py   points, charts and text of figures    store.py    results as csv, written under a lock
    runner.py    run what is missing                   output.py   Markdown, LaTeX, pictures, JSON
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from weft.errors import WeftError, nearest
from weft.plan import Plan, ready_plans

Scale = Literal["paper", "small"]
Measure = Literal[
    "accuracy", "forgetting", "backward_transfer", "up", "up_of_dense", "down", "down_of_dense", "model"
]  # fmt: skip
FigureName = Literal["interference", "adaptation", "forgetting", "cost", "attention", "async", "transfer"]


def dotted(given: Any, prefix: str = "") -> Any:
    """Spell nested tables as the command line does.

    >>> dotted({"tasks": 5, "method": {"keep": 0.3}})
    {'tasks': 5, 'method.keep': 0.3}
    """
    if not isinstance(given, Mapping):
        return given
    flat: dict[str, Any] = {}
    for key, value in given.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _pair(given: Any) -> Any:
    """Read 61 as (61, None), [44.26, 0.53] as a mean and its deviation."""
    return tuple(given) if isinstance(given, list) else (given, None) if isinstance(given, int | float) else given


Overrides = Annotated[dict[str, Any], BeforeValidator(dotted)]  # of keys of the plan
# mean and deviation, in the unit of our column
Published = Annotated[tuple[float, float | None], BeforeValidator(_pair)]


class Row(BaseModel):
    """One line of a table, one or more curves of a figure: a run for each seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str = Field(pattern=r"^[\w.+@-]+$")  # in the results, in the name of a run folder and for --only
    method: str
    plan: str = ""  # a different plan than the experiment's
    set: Overrides = {}
    small: Overrides = {}  # in addition, at the small scale
    paper: dict[Measure, Published] = {}
    panel: str = ""  # of a figure ...
    series: str = ""  # ... where its run folder does not tell


class Experiment(BaseModel):
    """A table, or a figure if it names one: the plans of all its runs and what is written about them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[\w.+@-]+$")
    file: Path | None = None  # of a user's experiment, as given; plans are looked up next to it
    title: str
    plan: str
    rows: tuple[Row, ...] = Field(min_length=1)
    figure: FigureName | None = None
    names: dict[str, str] = {}  # of the series of a figure, as shown
    reference: str = ""  # the series that others are compared with
    note: str = ""  # what a reader needs to know to compare with the paper
    seeds: int = Field(3, ge=1)
    first_seed: int = Field(0, ge=0)
    set: Overrides = {}  # in all rows
    small: Overrides | None = None  # at the small scale, besides what `scale` does; None: the experiment has one size
    scale: Scale | None = None
    measures: tuple[Measure, ...] = ("accuracy", "forgetting", "up", "up_of_dense", "down", "down_of_dense", "model")

    @model_validator(mode="before")
    @classmethod
    def _label_rows(cls, given: dict[str, Any]) -> dict[str, Any]:
        rows, method = given.get("rows"), given.pop("method", None)
        if isinstance(rows, Mapping):
            given["rows"] = tuple(
                {"label": label, "method": method or label, **row} if isinstance(row, Mapping) else row
                for label, row in rows.items()
            )
        return given

    @property
    def stem(self) -> str:
        """The name of its files: results of both scales have the same folder."""
        return f"{self.name}-small" if self.scale == "small" else self.name

    def plan_file(self, row: Row) -> Path:
        """A ready plan, or a file next to the experiment's."""
        name = row.plan or self.plan
        return ready_plans().get(name, self.file.parent / name if self.file else Path(name))

    def plan_of(self, row: Row, seed: int) -> Plan:
        keys = {**self.set, **row.set}
        if self.small is not None:
            keys["scale"] = self.scale
        if self.scale == "small":
            keys |= {**(self.small or {}), **row.small}
        return Plan.load(self.plan_file(row), method=row.method, seed=seed, **keys)

    def choose(self, only: Sequence[str] | None) -> tuple[Row, ...]:
        """Select rows by label, or by method where no row has that label; all rows if `only` is None."""
        if only is None:
            return self.rows
        labels, methods = {row.label for row in self.rows}, {row.method for row in self.rows}
        for word in only:
            if word not in labels | methods:
                raise WeftError(f"{self.name} has no row {word!r}; {nearest(word, labels | methods)}")
        return tuple(row for row in self.rows if row.label in only or row.method in {*only} - labels)


def ready_experiments() -> dict[str, Path]:
    return ready_plans("experiments")


def names_of(kind: Literal["tables", "figures"]) -> list[str]:
    return [name for name in ready_experiments() if bool(load(name).figure) == (kind == "figures")]


def load(name: str, scale: Scale | None = None) -> Experiment:
    """Load a table or figure by its name or file, at the paper's size unless `scale` is small."""
    ready = ready_experiments()
    if name not in ready and not name.endswith(".toml"):
        raise WeftError(f"there is no table or figure {name!r}; {nearest(name, ready)} (weft repro lists them)")
    file = ready.get(name, Path(name))
    try:
        given = {**tomllib.loads(file.read_text(encoding="utf-8")), "name": file.stem}
    except OSError:
        raise WeftError(f"{file} cannot be read; give the TOML file of an experiment, or a name (weft repro)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WeftError(f"{file} is not valid TOML: {error}") from None
    if name not in ready:
        given["file"] = file
    try:
        experiment = Experiment(**given)
    except ValidationError as error:
        raise WeftError(f"{file}: {_explain(error, list(given.get('rows', ())))}") from None
    if scale is not None and experiment.small is None:
        raise WeftError(f"{name} has one size only; remove --scale")
    return experiment.model_copy(update={"scale": scale or "paper"} if experiment.small is not None else {})


def _explain(error: ValidationError, labels: Sequence[str]) -> str:
    """One error in one line, with the label of its row."""
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")  # a misspelled key is also missing
    place, fields = [str(key) for key in first["loc"]], {*Experiment.model_fields, "method"} - {"name", "file", "scale"}
    if place[0] == "rows" and place[1:]:
        place[1], fields = labels[int(place[1])], {*Row.model_fields} - {"label"}
    if first["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(place)}; {nearest(place[-1], fields)}"
    return f"{'.'.join(place)}: {first['msg'][0].lower()}{first['msg'][1:]}"
