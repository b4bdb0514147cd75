"""Plan: one typed, checked description of an experiment, from a TOML file, `key=value` words, or Python.

    scenario = "glyphs"                 Plan(scenario="glyphs",
    clients = 3                              clients=3,
    method = "fedweit"                       method={"name": "fedweit", "keep": 0.3})
    "method.keep" = 0.3                 (a table [method] with name = and keep = says the same)

Options of the method, the network and the scenario are `method.NAME`, `network.NAME` and `scenario.NAME`, those of the
virtual clock and of faults on purpose `clock.NAME` and `faults.NAME`. What holds only for one method stands in a
section such as [for.fedavg]. Later words win over earlier ones:
defaults < a method's preset (`fedweit@paper`) < the plan's keys < its [for.METHOD] < the command line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weft import methods, metrics, networks, registry, scenarios
from weft.engines.clock import Options as Clock
from weft.engines.faults import Options as Faults
from weft.errors import WeftError, nearest

PARTS = ("method", "network", "scenario")
SECTIONS: dict[str, type[BaseModel]] = {"clock": Clock, "faults": Faults}
SMALL = {"clients": 5, "tasks": 5, "rounds_per_task": 8}  # what scale = "small" leaves of a plan


class Plan(BaseModel):
    """Everything that decides a run's result, and nothing else: not where it is written, nor by how many workers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)

    name: str = Field("plan", pattern=r"^[\w.+@-]+$")
    scenario: str = "glyphs"
    scenario_options: dict[str, Any] = Field(default_factory=dict)
    clients: int = Field(5, ge=1)
    tasks: int = Field(10, ge=1)  # for each client
    network: str = "lenet"
    network_options: dict[str, Any] = Field(default_factory=dict)
    method: str = "fedweit"
    method_options: dict[str, Any] = Field(default_factory=dict)
    rounds_per_task: int = Field(20, ge=1)  # appendix A
    epochs_per_round: int = Field(1, ge=1)  # appendix A
    clients_per_round: int | Literal["all"] = "all"
    train_unchosen: bool = False  # do clients that were not chosen for a round train by themselves in it?
    batch_size: int = Field(100, ge=1)  # appendix A
    optimizer: Literal["auto", "adam", "sgd"] = "auto"  # auto: sgd for the methods that need it, adam for the others
    learning_rate: float = Field(1e-3 / 3, gt=0)  # Adam's at the start of each task; appendix A, 5 clients
    sgd_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"  # SGD's; auto: each method's own
    rate_decay: float = Field(3.0, gt=1)  # the rate is divided by this ...
    patience: int = Field(5, ge=1)  # ... after so many epochs without a lower validation loss ...
    rate_floor: float = Field(1e-7, ge=0)  # ... and the task is over when it gets here (rho)
    stop_at_floor: bool = True
    optimizer_memory: Literal["task", "round"] = "task"  # how long Adam's moments are kept
    shuffle: bool = True
    measured_model: Literal["own", "global"] = "own"  # after the client's last epoch, or after the next theta_G
    precision: Literal["auto", "float32", "half", "int8"] = "auto"  # of values on the wire; auto: each method's own
    # task_clocks: rounds in step, but a task takes each client another number of them; updates: no common rounds either
    asynchronous: Literal["none", "task_clocks", "updates"] = Field("none", alias="async")
    rounds_spread: float = Field(0.5, ge=0, lt=1)  # async: a task takes rounds_per_task, give or take this share
    staleness_exponent: float = Field(0.5, ge=0)  # updates: an answer counts (1 + staleness) ** -this
    staleness_bound: int | Literal["auto"] = "auto"  # updates: a staler one is refused; auto: ten times the clients
    quorum: int | Literal["all"] = "all"  # a round is over when so many have answered ...
    deadline: Annotated[float, Field(gt=0)] | Literal["none"] = "none"  # ... or after so many seconds
    late: Literal["next", "drop"] = "next"  # a later answer counts in the round in which it comes, or not at all
    aggregation: Literal["mean", "median", "clip"] = "mean"  # of a round's answers: see robust.py
    max_update_norm: float = Field(100.0, gt=0)  # a tensor of a larger norm, in initial bodies, is refused
    clock: Clock = Field(default_factory=lambda: Clock.model_validate({}))
    faults: Faults = Field(default_factory=lambda: Faults.model_validate({}))
    loss: str | None = None  # of one's own, as file.py:Name; unset, the cross entropy of classes
    metrics: str | None = None  # to be measured beside accuracy, by their names, with commas between them
    seed: int = Field(0, ge=0)
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, given: Any) -> Any:
        return gather(given) if isinstance(given, Mapping) else given

    def __init__(self, **given: Any):
        given = gather({key: in_words(value) if key in PARTS else value for key, value in given.items()})
        if isinstance(name := given.get("scenario"), str) and not {"clients", "tasks"} <= given.keys():
            given = {**scenarios.usual(name, given.get("scenario_options", {})), **given}
        given = scaled(given)
        name, _, preset = str(given.get("method", "")).partition("@")
        if preset:  # what is given wins over the preset
            below = gather(methods.preset_of(name, preset))
            options = {**below.pop("method_options", {}), **given.get("method_options", {})}
            given = {**below, **given, "method_options": options}
        try:
            super().__init__(**given)
            self._check()
        except ValidationError as error:
            raise WeftError(explain(error, type(self))) from None

    def _check(self) -> None:
        """What no single key can tell; and the options of the three parts, completed with their defaults."""
        if self.clients_per_round != "all" and not 1 <= self.clients_per_round <= self.clients:
            raise WeftError(
                f"clients_per_round is {self.clients_per_round} but there are {self.clients} clients; "
                f"choose 1 to {self.clients}, or all"
            )
        self._check_times()
        # fedprox+ewc and ewc+fedprox are one plan; and a file is found again from any folder
        object.__setattr__(self, "method", methods.canonical("+".join(map(absolute, self.method.split("+")))))
        object.__setattr__(self, "network", absolute(self.network))
        object.__setattr__(self, "scenario", absolute(self.scenario))
        self._check_measures()
        self._settle_optimizer()
        if self.precision == "auto":
            object.__setattr__(self, "precision", methods.class_of(self.method).precision)
        for part, options in (
            ("method", methods.options_of(self.method)),
            ("network", networks.options_of(self.network)),
            ("scenario", scenarios.module_of(self.scenario).Options),
        ):
            given = getattr(self, f"{part}_options")
            given = without_owner(given, getattr(self, part), part == "method")
            try:
                complete = options.model_validate(given).model_dump(mode="json")
            except ValidationError as error:
                raise WeftError(explain(error, options, prefix=f"{part}.")) from None
            object.__setattr__(self, f"{part}_options", complete)
        if self.asynchronous == "updates":
            why = methods.load(self.method, self.method_options).why_not_as_it_comes()
            if why:
                raise WeftError(f"{self.method} cannot run with async=updates: {why}; choose async=task_clocks or none")

    def _check_times(self) -> None:
        """Who waits for whom."""
        most = self.clients if self.clients_per_round == "all" else self.clients_per_round
        if self.quorum != "all" and not 1 <= self.quorum <= most:
            raise WeftError(
                f"quorum is {self.quorum} but {most} clients are asked in a round; choose 1 to {most}, or all"
            )
        if self.staleness_bound == "auto":
            object.__setattr__(self, "staleness_bound", 10 * self.clients)
        elif self.staleness_bound < 0:
            raise WeftError(f"staleness_bound is {self.staleness_bound}; choose 0 or more, or auto")
        if self.asynchronous != "updates":
            return
        for key, value in (("clients_per_round", "all"), ("quorum", "all"), ("aggregation", "mean")):
            if getattr(self, key) != value:
                raise WeftError(f"{key} is for rounds, and with async=updates there are none; leave {key}={value}")
        if self.faults.drop and self.deadline == "none":
            raise WeftError("with async=updates and faults.drop somebody has to notice a lost answer; set a deadline")

    def _check_measures(self) -> None:
        """What is minimised, and what is measured."""
        if self.loss is not None:
            object.__setattr__(self, "loss", absolute(registry.full_name(self.loss, "weft.losses")))
            networks.check_loss(self.loss)
            if methods.class_of(self.method).sees_all:
                raise WeftError(f"{self.method} learns all tasks at once as classes; it cannot have a loss of your own")
        if self.metrics is not None:
            chosen = [name.strip() for name in self.metrics.split(",") if name.strip()]
            wanted = [absolute(registry.full_name(name, "weft.metrics")) for name in chosen]
            metrics.find(wanted)
            object.__setattr__(self, "metrics", ",".join(wanted) or None)

    def _settle_optimizer(self) -> None:
        """`auto` becomes what the method uses: a plan says all that decides a result, whatever later defaults are."""
        method = methods.class_of(self.method)
        if self.optimizer == "adam" and method.optimizer == "sgd":
            raise WeftError(f"{self.method} needs SGD; leave optimizer=auto, and set its rate with sgd_rate")
        if self.optimizer == "sgd" and method.composes:
            raise WeftError(
                f"{self.method} needs Adam, for which its drift and l1 terms are scaled; leave optimizer=auto"
            )
        if self.optimizer == "auto":
            object.__setattr__(self, "optimizer", method.optimizer)
        if self.optimizer == "sgd" and self.sgd_rate == "auto":
            object.__setattr__(self, "sgd_rate", method.sgd_rate)

    @property
    def wire(self) -> Literal["float32", "half", "int8"]:
        """The precision, settled."""
        assert self.precision != "auto"
        return self.precision

    @classmethod
    def load(cls, path: str | Path, words: Iterable[str] = (), **more: Any) -> Self:
        """A plan from a file or the name of a ready one, with `key=value` words and keyword arguments on top."""
        file = find(path)
        try:
            text = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise WeftError(f"{file} is not valid TOML: {error}") from None
        return cls.merge({"name": re.sub(r"[^\w.+@-]", "-", file.stem), **text}, words, **more)

    @classmethod
    def merge(cls, given: Mapping[str, Any], words: Iterable[str] = (), **more: Any) -> Self:
        base = dict(given)
        sections = base.pop("for", {})
        if not isinstance(sections, Mapping) or not all(isinstance(section, Mapping) for section in sections.values()):
            raise WeftError("the section for.METHOD of a plan is a table, such as [for.fedavg]")
        sections = {registry.full_name(name, "weft.methods"): section for name, section in sections.items()}
        for name in sections:
            methods.class_of(name)  # a misspelt section would silently do nothing
        base, top = gather(base), gather({**parse(words), **{key: in_words(value) for key, value in more.items()}})
        chosen = top.get("method", base.get("method", cls.model_fields["method"].default))
        if not isinstance(chosen, str):
            raise WeftError("method must be a name, such as method=fedweit")
        own = base.get("method", cls.model_fields["method"].default)
        if methods.parts_of(methods.canonical(chosen)) != methods.parts_of(methods.canonical(str(own))):
            base.pop("method_options", None)  # options of the plan's own method mean nothing to another one
        for part in ("network", "scenario"):
            if part in top and top[part] != base.get(part, cls.model_fields[part].default):
                base.pop(f"{part}_options", None)
        # sections of a combination's parts, then its own; a preset goes below all of them, in __init__
        plain = methods.canonical(chosen).partition("@")[0]
        own_sections = [sections[part] for part in methods.parts_of(plain) if part in sections and part != plain]
        own_sections += [section for name, section in sections.items() if methods.canonical(name) == plain]
        layers = [base, *map(gather, own_sections), top]
        merged: dict[str, Any] = {}
        for layer in layers:
            for key, value in layer.items():
                old = merged.get(key)
                merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
        merged["method"] = chosen
        plan = cls(**scaled(merged, keep=top))
        for key, optimizer, right in (("learning_rate", "sgd", "sgd_rate"), ("sgd_rate", "adam", "learning_rate")):
            if key in top and plan.optimizer == optimizer:  # in a plan's file it may be meant for another method
                raise WeftError(f"{key} does nothing here: {plan.method} trains with {optimizer}; set {right}")
        return plan

    def toml(self) -> str:
        """The whole plan, defaults included, in the form that `load` reads."""
        whole = self.model_dump(by_alias=True).items()
        keys = {key: value for key, value in whole if not isinstance(value, dict) and value is not None}
        lines = [f"{key} = {_literal(value)}" for key, value in keys.items()]
        for part in PARTS:
            options = getattr(self, f"{part}_options")
            lines += [f'"{part}.{key}" = {_literal(value)}' for key, value in options.items() if value is not None]
        for section in SECTIONS:
            options = getattr(self, section).model_dump()
            lines += [f'"{section}.{key}" = {_literal(value)}' for key, value in options.items()]
        return "\n".join(lines) + "\n"


def gather(given: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the ways to write an option (`"method.keep" = 1`, [method] keep = 1) into one: method_options = {keep: 1}.

    >>> gather({"method": {"name": "fedweit", "keep": 0.3}, "method.past": "frozen", "seed": 1})
    {'method': 'fedweit', 'method_options': {'keep': 0.3, 'past': 'frozen'}, 'seed': 1}
    """
    result: dict[str, Any] = {}
    for key, value in given.items():
        part, _, option = key.partition(".")
        if part in SECTIONS and (option or isinstance(value, Mapping)):
            result.setdefault(part, {}).update({option: value} if option else value)
        elif part in PARTS and option:
            result.setdefault(f"{part}_options", {})[option] = value
        elif part in PARTS and isinstance(value, Mapping):
            table = dict(value)
            if "name" in table:
                result[part] = table.pop("name")
            result.setdefault(f"{part}_options", {}).update(table)
        elif key.endswith("_options") and isinstance(value, Mapping):
            result.setdefault(key, {}).update(value)
        else:
            result[key] = value
    for part in PARTS:  # what an installed package offers by a name of its own
        if isinstance(name := result.get(part), str):
            parts = name.split("+") if part == "method" else [name]
            result[part] = "+".join(registry.full_name(each, f"weft.{part}s") for each in parts)
    return result


def scaled(given: Mapping[str, Any], keep: Collection[str] = ()) -> dict[str, Any]:
    """A plan without the word `scale`: "small" lowers what is above SMALL, but for the keys to keep.

    The word itself is no part of a plan: what it did stands there, so that a run's plan is read as it was written.

    >>> scaled({"scale": "small", "clients": 20, "tasks": 3, "seed": 1}, keep=["tasks"])
    {'clients': 5, 'tasks': 3, 'seed': 1, 'rounds_per_task': 8}
    """
    rest = {key: value for key, value in given.items() if key != "scale"}
    scale = given.get("scale", "paper")
    if scale not in ("paper", "small"):
        raise WeftError(f"scale: choose paper or small, not {scale!r}")
    if scale == "small":
        for key in (key for key in SMALL if key not in keep):
            value = rest.get(key, Plan.model_fields[key].default)
            rest[key] = min(value, SMALL[key]) if isinstance(value, int) else value  # what is no number is told later
    return rest


def without_owner(given: dict[str, Any], name: str, method: bool) -> dict[str, Any]:
    """`method.fedweit.keep` says the same as `method.keep`, where fedweit is the method or a part of it."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        owner, dot, option = key.rpartition(".")
        if dot and owner in methods.parts_of(name):
            if method and option not in methods.options_of(owner).model_fields:
                fields = methods.options_of(owner).model_fields
                raise WeftError(f"unknown key method.{key}; {nearest(option, fields, f'method.{owner}.')}")
            key = option
        if key in found and found[key] != value:
            raise WeftError(f"{key} is given twice, as {found[key]!r} and as {value!r}; give it once")
        found[key] = value
    return found


def absolute(name: str) -> str:
    """`file.py:Name` with the whole path of the file; any other name as it is."""
    place, colon, what = name.rpartition(":")
    return f"{Path(place).resolve()}:{what}" if colon and place.endswith(".py") else name


def in_words(part: Any) -> Any:
    """A method or network may be given as a class; in the plan it is the words by which any process finds it."""
    if isinstance(part, Mapping) and "name" in part:
        return {**part, "name": in_words(part["name"])}
    return registry.reference(part) if callable(part) else part


def parse(words: Iterable[str]) -> dict[str, Any]:
    """`key=value` words; a value is read as TOML where it can be, and as plain text where not.

    >>> parse(["seed=5", "method.keep=0.3", "clients_per_round=all", "shuffle=false"])
    {'seed': 5, 'method.keep': 0.3, 'clients_per_round': 'all', 'shuffle': False}
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise WeftError(f"{word!r} is not of the form key=value, such as seed=5")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text.strip()
    return values


def find(path: str | Path) -> Path:
    """A plan's file: as given, or one of the ready plans by its name."""
    file = Path(path)
    if file.is_dir():
        file = file / "plan.toml"  # a run folder holds the plan that made it
    if file.is_file():
        return file
    ready = ready_plans()
    if str(path) in ready:
        return ready[str(path)]
    raise WeftError(f"there is no plan {path}; {nearest(Path(path).stem, ready)} (weft list plans shows them)")


def ready_plans() -> dict[str, Path]:
    """The plans that come with weft, by name: inside an installed package, or at the top of a source tree."""
    here = Path(__file__).resolve().parent
    for folder in (here / "plans", here.parent.parent / "plans"):
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.toml"))}
    return {}


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first fault that was found, in one line that says what to do."""
    faults = error.errors()
    first = faults[0]
    kinds = ("literal[", "constrained", "int", "float")  # pydantic names the branch of a union that it tried
    place = [str(part) for part in first["loc"] if not str(part).startswith(kinds)]
    key = prefix + ".".join(place)
    if first["type"] == "extra_forbidden":
        if place[0] in SECTIONS and not prefix and place[1:]:
            return f"unknown key {key}; {nearest(place[-1], SECTIONS[place[0]].model_fields, f'{place[0]}.')}"
        known = [field.alias or name for name, field in model.model_fields.items() if not name.endswith("_options")]
        known += [] if prefix else ["scale"]  # used up before a plan is checked
        return f"unknown key {key}; {nearest(key.removeprefix(prefix), known, prefix)}{owner_of(key)}"
    # a union gives a fault for each of its branches: "a valid integer" and "'all'"
    said = [fault["msg"].removeprefix("Value error, ") for fault in faults if fault["loc"][:1] == first["loc"][:1]]
    given = "" if first["type"] == "missing" else f", not {first['input']!r}"
    words = " or ".join(
        [said[0][0].lower() + said[0][1:], *(more.removeprefix("Input should be ") for more in said[1:])]
    )
    return f"{key}: {words}{given}"


def owner_of(key: str) -> str:
    """Whose option it is, if it is one of another method's: ` (method.mu is an option of fedprox)`."""
    owners = [name for name in methods.METHODS if key.removeprefix("method.") in _fields(name)]
    return f" ({key} is an option of {', '.join(owners)})" if key.startswith("method.") and owners else ""


def _fields(name: str) -> Iterable[str]:
    return methods.options_of(name).model_fields


def _literal(value: Any) -> str:
    """A value as TOML writes it; JSON agrees with TOML on numbers, true and false, plain strings and lists."""
    return json.dumps(value, ensure_ascii=False)
