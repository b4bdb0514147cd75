"""Scenarios: which client learns which tasks in which order, as pure data rebuilt from a name and a seed anywhere.

`scenario.sequences[client][step]` is a Task. Its images are loaded only when they are asked for: training and
validation images while the task is being learned, test images for as long as anybody wants to test.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel

from weft import registry
from weft.errors import WeftError, nearest
from weft.registry import options_from
from weft.scenarios.marks import mark_of

if TYPE_CHECKING:
    import numpy as np

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "test", "valid")  # in a cut: where two lack as much, the first gets it


@dataclass(frozen=True)
class Split:
    """Some of a task's images and their labels, counted from 0 within the task.

    With a loss of one's own, labels may be anything else: float32 (count, outputs) for several labels or for numbers.
    """

    images: np.ndarray  # uint8 (count, height, width, channels)
    labels: np.ndarray  # int64 (count,)


@dataclass(frozen=True)
class Task:
    name: str
    group: str  # the family or dataset that the task is taken from
    classes: tuple[str, ...]
    sizes: dict[Part, int]
    mean: tuple[float, ...]  # by channel, of 255
    deviation: tuple[float, ...]
    load: Callable[[Part], Split]
    # of somebody's own images, which no name tells apart
    fingerprint: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    name: str
    sequences: tuple[tuple[Task, ...], ...]
    datasets: tuple[str, ...] = ()  # of the cache, whose images it is made of; none if they are drawn
    notes: tuple[str, ...] = ()  # what a person should know about all of it

    @property
    def clients(self) -> int:
        return len(self.sequences)

    @property
    def steps(self) -> int:
        return max(len(sequence) for sequence in self.sequences)

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.notes, *(line for sequence in self.sequences for task in sequence for line in task.warnings))

    @property
    def fingerprint(self) -> str:
        """Which images these are, if they are somebody's own; else empty."""
        marks = [task.fingerprint for sequence in self.sequences for task in sequence]
        return hashlib.sha256(repr(marks).encode()).hexdigest()[:16] if any(marks) else ""

    @property
    def images(self) -> dict[str, str]:
        """What tells each dataset's images, and somebody's own, from others."""
        own = {self.name: self.fingerprint} if self.fingerprint else {}
        return {**{name: mark_of(name) for name in self.datasets}, **own}


class ScenarioModule(Protocol):
    """What a scenario's file provides: a typed description of its options, and the scenario itself."""

    Options: type[BaseModel]

    def build(self, options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario: ...


@dataclass
class Own:
    """Somebody's own: a function of clients, tasks and seed, whose other keyword arguments are its options."""

    name: str
    make: Callable[..., Scenario]
    Options: type[BaseModel]

    def build(self, options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
        try:
            found = self.make(clients=clients, tasks=tasks, seed=seed, **options.model_dump())
        except WeftError as problem:
            raise WeftError(f"scenario {self.name}: {problem}") from problem.__cause__
        except Exception as error:
            raise WeftError(f"scenario {self.name} cannot be made: {registry.error_line(error)}") from error
        if not isinstance(found, Scenario):
            raise WeftError(f"scenario {self.name} made a {type(found).__name__}; wanted is a weft.scenarios.Scenario")
        if found.clients != clients or not all(found.sequences) or found.steps > tasks:
            sizes = f"{found.clients} clients of up to {found.steps} tasks" if found.clients else "no client"
            raise WeftError(f"scenario {self.name} made {sizes}; the plan has clients={clients} and tasks={tasks}")
        return found


SCENARIOS = {
    "glyphs": "weft.scenarios.glyphs",
    "overlapped-cifar100": "weft.scenarios.overlapped_cifar100",
    "noniid-50": "weft.scenarios.noniid_50",
    "noniid-35": "weft.scenarios.noniid_35",
    "interference": "weft.scenarios.interference",
    "folders": "weft.scenarios.folders",
    "sites": "weft.scenarios.sites",
}
GROUP = "weft.scenarios"  # of entry points, by which installed packages add to them


def is_known(name: str) -> bool:
    return name in SCENARIOS or name in registry.installed(GROUP) or ":" in name


def module_of(name: str) -> ScenarioModule:
    """`file.py:name` and `package.module:name` name somebody's own."""
    name = registry.full_name(name, GROUP)
    if ":" in name:
        make = registry.find(name)
        try:
            return Own(registry.short(name), make, options_from(make, "scenario"))
        except WeftError as problem:
            raise WeftError(f"scenario {name}: {problem}") from None
    if name.endswith(".py"):
        raise WeftError(f"{name} is a file; name the function in it too, as in {name}:my_scenario")
    if name not in SCENARIOS:
        raise WeftError(f"there is no scenario {name!r}; {nearest(name, SCENARIOS)}")
    module: ScenarioModule = importlib.import_module(SCENARIOS[name])
    return module


def usual(name: str, options: Mapping[str, object]) -> dict[str, int]:
    """How many clients and tasks there are, where a scenario itself knows and the plan does not say."""
    count = getattr(module_of(name), "count", None) if isinstance(name, str) else None
    found: dict[str, int] = count(options) if count is not None else {}
    return found


def build(name: str, options: dict[str, object], clients: int, tasks: int, seed: int) -> Scenario:
    module = module_of(name)
    return module.build(module.Options.model_validate(options), clients, tasks, seed)


class Planned(Protocol):
    """What a plan says about its scenario."""

    @property
    def scenario(self) -> str: ...
    @property
    def scenario_options(self) -> dict[str, object]: ...
    @property
    def clients(self) -> int: ...
    @property
    def tasks(self) -> int: ...
    @property
    def seed(self) -> int: ...


def of(plan: Planned) -> Scenario:
    return build(plan.scenario, plan.scenario_options, plan.clients, plan.tasks, plan.seed)
