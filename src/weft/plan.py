"""Plan: one typed, checked description of an experiment.

    clients = 3             Plan(clients=3, method={"name": "fedweit", "keep": 0.3})
    [method]                weft run FILE clients=3 method=fedweit method.keep=0.3
    name = "fedweit"
    keep = 0.3              a file, Python and the command line: the same plan

A section (method, network, scenario, clock, faults) is a table of options; a string in its place is its name. Later
layers override earlier ones: defaults, a preset (`fedweit@paper`), the keys of a file, its section [for.METHOD], the
command line.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from weft import methods, metrics, networks, registry, scenarios
from weft.errors import WeftError, nearest
from weft.registry import StrictModel
from weft.wire.codec import Precision

COMPONENTS = ("method", "network", "scenario")  # sections with a name
MEANT = {  # what people type, and the key that is meant
    "lr": "learning_rate",
    "epochs": "epochs_per_round",
    "local_epochs": "epochs_per_round",
    "rounds": "rounds_per_task",
    "batch": "batch_size",
    "num_clients": "clients",
    "num_tasks": "tasks",
    "model": "network",
    "dataset": "scenario",
    "algorithm": "method",
    "strategy": "method",
}
NO_KEY = {
    "momentum": "clients have no momentum but Adam's; for the server's see FedAvgM in docs/add-a-method.md",
    "weight_decay": "a penalty in a method's `prepare` is weight decay; see docs/add-a-method.md",
}
SMALL = {"clients": 5, "tasks": 5, "rounds_per_task": 8}  # upper bounds of scale = "small"


class ClockOptions(StrictModel):
    """Virtual clock: speed and availability of simulated clients; by default all are equal and always available."""

    spread: float = Field(1.0, ge=1, le=1000)  # the slowest client may take this many times as long as the fastest
    jitter: float = Field(0.0, ge=0, le=2)  # standard deviation of the logarithm of a round's duration
    late: float = Field(0.0, ge=0)  # a client joins up to this many seconds after the start
    stay: float = Field(0.0, ge=0)  # mean seconds until a client goes offline; 0: never
    away: float = Field(5.0, gt=0)  # mean seconds offline


class FaultOptions(StrictModel):
    """Fault injection: the rate of each fault, as a share of all requests; none by default."""

    crash: float = Field(0.0, ge=0, lt=1)  # the client fails before it starts and reports an error
    drop: float = Field(0.0, ge=0, lt=1)  # the client trains and its reply is lost
    corrupt: float = Field(0.0, ge=0, lt=1)  # the reply arrives damaged, or with garbage values
    delay: float = Field(0.0, ge=0, lt=1)  # the reply is late by `delay_seconds`
    delay_seconds: float = Field(3.0, gt=0)

    @model_validator(mode="after")
    def _check_sum(self) -> Self:
        if sum(self.rates.values()) >= 1:
            raise ValueError("the rates of all faults together must be less than 1")
        return self

    @property
    def rates(self) -> dict[str, float]:
        return self.model_dump(exclude={"delay_seconds"})

    @property
    def any(self) -> bool:
        return any(self.rates.values())


OPTION_SECTIONS: dict[str, type[StrictModel]] = {"clock": ClockOptions, "faults": FaultOptions}
SECTIONS = (*COMPONENTS, *OPTION_SECTIONS)


class Plan(StrictModel):
    """Everything that decides a run's result, and nothing else: not the output folder, not the number of workers."""

    name: str = Field("plan", pattern=r"^[\w.+@-]+$")
    scenario: str = "glyphs"
    scenario_options: dict[str, Any]
    clients: int = Field(5, ge=1)
    tasks: int = Field(10, ge=1)  # per client
    network: str = "lenet"
    network_options: dict[str, Any]
    method: str = "fedweit"
    method_options: dict[str, Any]
    rounds_per_task: int = Field(20, ge=1)  # appendix A
    epochs_per_round: int = Field(1, ge=1)  # appendix A
    clients_per_round: int | Literal["all"] = "all"
    selection: Literal["random", "turns"] = "random"  # turns: nobody twice before all had their turn, in random order
    train_unchosen: bool = False  # whether clients that are not selected for a round train locally in it
    batch_size: int = Field(100, ge=1)  # appendix A
    optimizer: Literal["auto", "adam", "sgd"] = "auto"  # auto: sgd for methods that require it, else adam
    learning_rate: float = Field(1e-3 / 3, gt=0)  # Adam's at the start of each task; appendix A, 5 clients
    sgd_rate: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"  # SGD's; auto: the method's default
    rate_decay: float = Field(3.0, gt=1)  # the rate is divided by this ...
    patience: int = Field(5, ge=1)  # ... after this many epochs without a lower validation loss ...
    rate_floor: float = Field(1e-7, ge=0)  # ... and the task ends when the rate reaches this value (rho)
    stop_at_floor: bool = True
    optimizer_memory: Literal["task", "round"] = "task"  # how long Adam's moments are kept
    shuffle: bool = True
    # after the client's last epoch, or after the next theta_G; auto: own, unless the method shares heads by class
    measured_model: Literal["auto", "own", "global"] = "auto"
    precision: Precision | Literal["auto"] = "auto"  # of values on the wire; auto: the method's default
    # task_clocks: common rounds, but a task takes each client a different number of them; updates: no common rounds
    asynchronous: Literal["none", "task_clocks", "updates"] = Field("none", alias="async")
    rounds_spread: float = Field(0.5, ge=0, lt=1)  # async: a task takes rounds_per_task, plus or minus this share
    staleness_exponent: float = Field(0.5, ge=0)  # updates: an update has the weight (1 + staleness) ** -this
    staleness_bound: int | Literal["auto"] = "auto"  # updates: staler ones are rejected; auto: ten times the clients
    quorum: int | Literal["all"] = "all"  # a round ends after this many replies ...
    deadline: Annotated[float, Field(gt=0)] | Literal["none"] = "none"  # ... or after this many seconds
    late: Literal["next", "drop"] = "next"  # a later reply counts in the round in which it arrives, or is dropped
    aggregation: Literal["mean", "median", "clip"] = "mean"  # of a round's replies
    max_update_norm: float = Field(100.0, gt=0)  # in norms of the initial body; a larger tensor is rejected
    clock: ClockOptions
    faults: FaultOptions
    loss: str | None = None  # user-defined, as file.py:Name; unset: cross entropy
    metrics: str | None = None  # reported besides accuracy, by name, separated by commas
    seed: int = Field(0, ge=0)
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"

    def __init__(self, overrides: Mapping[str, Any] | None = None, /, **given: Any):
        """Resolve the given keys, with overrides on top; the first mistake is a `WeftError`."""
        try:
            super().__init__(**resolve(given, overrides or {}))
        except ValidationError as error:
            raise WeftError(explain(error, type(self))) from None

    @classmethod
    def load(cls, path: str | Path, words: Iterable[str] = (), **more: Any) -> Self:
        """Read a plan from a file, a run folder or a ready plan's name; `key=value` words and keywords override it."""
        file = find(path)
        given = read_toml(file)
        tables = [given, *given["for"].values()] if isinstance(given.get("for"), Mapping) else [given]
        for key in (key for table in tables if isinstance(table, Mapping) for key in table if "." in key):
            raise WeftError(f"{file}: write {key!r} as a table: [{key.replace('.', '] with ', 1)} = ...")
        return cls.merge({"name": re.sub(r"[^\w.+@-]", "-", file.stem), **given}, words, **more)

    @classmethod
    def merge(cls, given: Mapping[str, Any], words: Iterable[str] = (), **more: Any) -> Self:
        """Make a plan of a mapping; `key=value` words and keywords override it."""
        return cls({**parse(words), **more}, **given)

    @property
    def wire(self) -> Precision:
        """Precision of values on the wire."""
        assert self.precision != "auto"
        return self.precision

    def toml(self) -> str:
        """Write the whole plan, defaults included, as a file that `load` reads."""
        whole = self.model_dump(by_alias=True)
        tables = {section: {"name": whole.pop(section), **whole.pop(f"{section}_options")} for section in COMPONENTS}
        tables |= {section: whole.pop(section) for section in OPTION_SECTIONS}
        return "\n".join([_lines(whole), *(f"[{name}]\n{_lines(table)}" for name, table in tables.items())])

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Check what no single key can tell."""
        method, updates = methods.class_of(self.method), self.asynchronous == "updates"
        most = self.clients if self.clients_per_round == "all" else self.clients_per_round
        if not 1 <= most <= self.clients:
            text = f"clients_per_round is {most} with {self.clients} clients; choose 1 to {self.clients}, or all"
        elif self.quorum != "all" and not 1 <= self.quorum <= most:
            text = f"quorum is {self.quorum} but a round has {most} clients; choose 1 to {most}, or all"
        elif self.staleness_bound != "auto" and self.staleness_bound < 0:
            text = f"staleness_bound is {self.staleness_bound}; choose 0 or more, or auto"
        elif self.optimizer == "adam" and method.traits.sgd_only:
            text = f"{self.method} requires SGD; leave optimizer=auto, and set its rate with sgd_rate"
        elif self.optimizer == "sgd" and method.traits.composes_theta:
            text = f"{self.method} requires Adam, for which its drift and l1 terms are scaled; leave optimizer=auto"
        elif self.method_options["heads"] == "class" and not method.traits.federated:
            text = f"{self.method} sends nothing, so it cannot share heads; remove method.heads=class"
        elif self.loss is not None and method.traits.sees_all_tasks:
            text = f"{self.method} trains on all tasks at once as classes; remove loss={self.loss}"
        elif updates and (self.clients_per_round, self.quorum, self.aggregation) != ("all", "all", "mean"):
            text = "async=updates has no rounds; leave clients_per_round=all, quorum=all and aggregation=mean"
        elif updates and self.faults.drop and self.deadline == "none":
            text = "async=updates with faults.drop needs a deadline, after which a reply counts as lost; set deadline"
        elif updates and not (traits := methods.load(self.method, self.method_options).traits).supports_async:
            why = traits.why_not_asynchronous
            text = f"{self.method} cannot run with async=updates: {why}; choose async=task_clocks or none"
        else:
            return self
        raise WeftError(text)


# ---- from what is given to the values of a plan ----------------------------------------------------------------------


def resolve(file: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge all layers of a plan and replace every `auto`: the values of Plan's fields, not yet checked.

    An override of a component's name removes the options that the file gives to another one.
    """
    base, top, names = as_tables(file), as_tables(overrides), dict[str, str]()
    for_methods = base.pop("for", {})
    for section in COMPONENTS:
        old = base.get(section, {}).get("name", Plan.model_fields[section].default)
        names[section] = name = _full_name(section, top.get(section, {}).get("name", old))
        if _parts(section, name) != _parts(section, str(old)):
            base[section] = {}
    plain, _, preset = names["method"].partition("@")
    values: dict[str, Any] = {}
    for layer in (as_tables(methods.preset_of(plain, preset)), base, *_for_method(for_methods, plain), top):
        for key, value in layer.items():
            values[key] = {**values.get(key, {}), **value} if key in SECTIONS else value
    options = {section: values.pop(section, {}) for section in SECTIONS}
    for section in COMPONENTS:
        options[section].pop("name", None)
    if not {"clients", "tasks"} <= values.keys():
        values = {**scenarios.default_size(names["scenario"], options["scenario"]), **values}
    values = scaled(values, keep=top) | names
    for section in SECTIONS:
        key = f"{section}_options" if section in COMPONENTS else section
        values[key] = _complete(section, names.get(section, ""), options[section])
    _replace_auto(values)
    for key, optimizer, right in (("learning_rate", "sgd", "sgd_rate"), ("sgd_rate", "adam", "learning_rate")):
        if key in top and values["optimizer"] == optimizer:  # in a file it may be meant for another method
            raise WeftError(f"{key} has no effect: {names['method']} trains with {optimizer}; set {right}")
    return values


def as_tables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Put the options of each section into one table.

    >>> as_tables({"method": "fedweit", "method.keep": 0.3, "clock": {"late": 2.0}, "seed": 1})
    {'method': {'name': 'fedweit', 'keep': 0.3}, 'clock': {'late': 2.0}, 'seed': 1}
    """
    result: dict[str, Any] = {}
    for key, value in given.items():
        section, dot, option = key.removesuffix("_options").partition(".")
        if section not in SECTIONS:
            result["async" if key == "asynchronous" else key] = value
            continue
        if dot:
            table = {option: value}
        elif isinstance(value, Mapping):
            table = dict(value)
        elif section in OPTION_SECTIONS or key.endswith("_options"):
            raise WeftError(f"{key}: give a table of options, not {value!r}")
        else:
            table = {"name": value}
        if callable(table.get("name")):  # a class, in the plan the name by which any process can import it
            table["name"] = registry.reference(table["name"])
        result.setdefault(section, {}).update(table)
    return result


def read_toml(file: Path) -> dict[str, Any]:
    """A file as data; nothing that it names is imported."""
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise WeftError(f"{file} cannot be read ({error.strerror}); check the path and its permissions") from None
    except (ValueError, RecursionError) as error:  # a ValueError for wrong TOML, UTF-8 and numbers of 5,000 digits
        raise WeftError(f"{file} is not valid TOML: {' '.join(str(error).split())[:200]}") from None


def named_code(file: Path) -> list[str]:
    """The programs that a plan names, as file.py:Name or package.module:Name; none of them is loaded."""
    given = as_tables(read_toml(file))
    names = [table.get("name") for key in COMPONENTS if isinstance(table := given.get(key), Mapping)]
    texts = [text for text in [*names, given.get("loss"), given.get("metrics")] if isinstance(text, str)]
    return [part for text in texts for part in re.split("[+,]", text) if ":" in part]


def flat_keys(text: str) -> dict[str, Any]:
    """Keys of a plan's file, options as `section.option`; no check, and nothing that the plan names is imported.

    >>> flat_keys('seed = 1\\n[method]\\nname = "fedweit"\\nkeep = 0.3')
    {'seed': 1, 'method': 'fedweit', 'method.keep': 0.3}
    """
    flat: dict[str, Any] = {}
    for key, value in as_tables(tomllib.loads(text)).items():
        for option, inner in value.items() if key in SECTIONS else [("name", value)]:
            flat[key if option == "name" else f"{key}.{option}"] = inner
    return flat


def scaled(given: Mapping[str, Any], keep: Collection[str] = ()) -> dict[str, Any]:
    """Apply and remove the key `scale`: "small" lowers what is above SMALL, except for the keys to keep.

    The plan of a run has the lowered numbers and not the word, so it does not change with later versions of SMALL.

    >>> scaled({"scale": "small", "clients": 20, "tasks": 3, "seed": 1}, keep=["tasks"])
    {'clients': 5, 'tasks': 3, 'seed': 1, 'rounds_per_task': 8}
    """
    rest = {key: value for key, value in given.items() if key != "scale"}
    scale = given.get("scale", "paper")
    if scale not in ("paper", "small"):
        raise WeftError(f"scale: choose paper or small, not {scale!r}")
    for key in (key for key in SMALL if scale == "small" and key not in keep):
        value = rest.get(key, Plan.model_fields[key].default)
        rest[key] = min(value, SMALL[key]) if isinstance(value, int) else value  # a wrong type is reported later
    return rest


def _replace_auto(values: dict[str, Any]) -> None:
    """Replace `auto` by what it stands for: a plan has all that decides a result, whatever later defaults are."""
    traits = methods.class_of(values["method"]).traits
    by_class = traits.by_class or values["method_options"]["heads"] == "class"
    auto: dict[str, Any] = {
        "optimizer": "sgd" if traits.sgd_only else "adam",
        "precision": traits.precision,
        "measured_model": "global" if by_class else "own",
    }
    if isinstance(clients := values.get("clients", Plan.model_fields["clients"].default), int):
        auto["staleness_bound"] = 10 * clients
    values |= {key: value for key, value in auto.items() if values.get(key, "auto") == "auto"}
    if values["optimizer"] == "sgd" and values.get("sgd_rate", "auto") == "auto":
        values["sgd_rate"] = traits.sgd_rate
    if isinstance(values.get("loss"), str):
        values["loss"] = registry.full_name(values["loss"], "weft.losses")
        networks.check_loss(values["loss"])
    if isinstance(values.get("metrics"), str):
        chosen = [name.strip() for name in values["metrics"].split(",") if name.strip()]
        chosen = [registry.full_name(name, "weft.metrics") for name in chosen]
        metrics.find(chosen)
        values["metrics"] = ",".join(chosen) or None


def _for_method(given: Any, method: str) -> list[dict[str, Any]]:
    """The sections [for.METHOD] of a method: those of its parts, then its own."""
    if not isinstance(given, Mapping) or not all(isinstance(table, Mapping) for table in given.values()):
        raise WeftError("for.METHOD is a table of keys for one method, such as [for.fedavg]")
    tables = {_full_name("method", name): table for name, table in given.items()}  # an unknown name is an error
    return [as_tables(tables[name]) for name in dict.fromkeys([*methods.parts_of(method), method]) if name in tables]


def _full_name(section: str, name: Any) -> str:
    """The name of a component, the same for any spelling and in any folder."""
    if not isinstance(name, str):
        raise WeftError(f"{section}: give a name, such as {Plan.model_fields[section].default}, not {name!r}")
    parts = name.split("+") if section == "method" else [name]
    name = "+".join(registry.full_name(part, f"weft.{section}s") for part in parts)
    return methods.canonical(name) if section == "method" else name  # fedprox+ewc and ewc+fedprox are one plan


def _parts(section: str, name: str) -> list[str]:
    name = _full_name(section, name)
    return methods.parts_of(name) if section == "method" else [name]


def _complete(section: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a section and add the defaults of the others."""
    options: type[BaseModel]
    if section == "method":
        options = methods.options_of(name)
    elif section == "network":
        options = networks.options_of(name)
    else:
        options = scenarios.builder_of(name).Options if section == "scenario" else OPTION_SECTIONS[section]
    complete: dict[str, Any] = {}
    for key, value in given.items():  # `method.fedprox.mu` is `method.mu`, where fedprox is one of the method's parts
        owner, _, option = key.rpartition(".")
        if section == "method" and owner in methods.parts_of(name):
            if option not in (known := methods.options_of(owner).model_fields):
                raise WeftError(f"unknown key method.{key}; {nearest(option, known, f'method.{owner}.')}")
            key = option
        if key in complete and complete[key] != value:
            raise WeftError(f"{section}.{key} is given twice, as {complete[key]!r} and as {value!r}; give it once")
        complete[key] = value
    try:
        return options.model_validate(complete).model_dump(mode="json")
    except ValidationError as error:
        raise WeftError(explain(error, options, f"{section}.")) from None


# ---- files, words, errors --------------------------------------------------------------------------------------------


def parse(words: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` words; a value is TOML if it can be, else plain text.

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
    """Find a plan's file: a path, a run folder, or the name of a ready plan."""
    file = Path(path)
    if file.is_dir():
        file = file / "plan.toml"  # of a run
    if file.is_file():
        return file
    ready = ready_plans()
    if str(path) in ready:
        return ready[str(path)]
    raise WeftError(f"there is no plan {path}; {nearest(Path(path).stem, ready)} (weft list plans shows them)")


def ready_plans(kind: str = "plans") -> dict[str, Path]:
    """The plans (or experiments) of weft by name: inside an installed package, or at the top of a source tree."""
    here = Path(__file__).resolve().parent
    for folder in (here / kind, here.parent.parent / kind):
        if folder.is_dir():
            return {file.stem: file for file in sorted(folder.glob("*.toml"))}
    return {}


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first mistake in one line that says how to fix it."""
    mistakes = error.errors()
    first = mistakes[0]
    option = str(first["loc"][0]) if first["loc"] else ""  # empty: a mistake of the whole section
    key = (prefix + option).rstrip(".")
    if first["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in model.model_fields.items() if not name.endswith("_options")]
        known += ["scale"] if not prefix else []
        owners = [name for name in methods.METHODS if option in methods.options_of(name).model_fields]
        owner = f" ({key} is an option of {', '.join(owners)})" if prefix == "method." and owners else ""
        if not prefix and option in NO_KEY:
            return f"unknown key {key}; {NO_KEY[option]}"
        hint = f"did you mean {MEANT[option]}?" if not prefix and option in MEANT else nearest(option, known, prefix)
        if not prefix and not hint.startswith("did"):
            hint = "docs/plans.md has all keys"
        return f"unknown key {key}; {hint}{owner}"
    # a union gives a mistake for each of its branches: "a valid integer" and "'all'"
    texts = [item["msg"].removeprefix("Value error, ") for item in mistakes if item["loc"][:1] == first["loc"][:1]]
    texts = [texts[0][0].lower() + texts[0][1:], *(text.removeprefix("Input should be ") for text in texts[1:])]
    given = "" if first["type"] == "missing" else f", not {first['input']!r}"
    return f"{key}: {' or '.join(texts)}{given}"


def _lines(keys: Mapping[str, Any]) -> str:
    """Lines of TOML; JSON agrees with it on numbers, true and false, plain strings and lists."""
    given = ((key, value) for key, value in keys.items() if value is not None)
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in given)
