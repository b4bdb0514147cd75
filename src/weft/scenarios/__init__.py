"""Scenarios: which client learns which tasks in which order, as pure data rebuilt from a name and a seed.

`scenario.sequences[client][task]` is a Task. Its images are loaded on demand: train and valid images while the task is
being learned, test images for later evaluations too.
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
from weft.registry import StrictModel, options_from

if TYPE_CHECKING:
    import numpy as np

    from weft.plan import Plan

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "test", "valid")  # in order of priority: ties go to the first


@dataclass(frozen=True)
class Split:
    """Images of one split of a task and their labels, counted from 0 within the task.

    With a user-defined loss, labels may also be float32 (count, outputs): several labels per image, or numbers.
    """

    images: np.ndarray  # uint8 (count, height, width, channels)
    labels: np.ndarray  # int64 (count,)


@dataclass(frozen=True)
class Task:
    name: str
    group: str  # the family or dataset that the task is taken from
    classes: tuple[str, ...]
    sizes: dict[SplitName, int]
    mean: tuple[float, ...]  # per channel, in 0..255
    deviation: tuple[float, ...]
    load: Callable[[SplitName], Split]
    fingerprint: str = ""  # of user images, which no name identifies
    vocabulary: str = ""  # where class names are unique: a dataset; user images of all clients have one vocabulary
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    name: str
    sequences: tuple[tuple[Task, ...], ...]
    datasets: tuple[str, ...] = ()  # of the cache; empty if images are drawn
    notes: tuple[str, ...] = ()  # warnings about the whole scenario

    @property
    def clients(self) -> int:
        return len(self.sequences)

    @property
    def tasks(self) -> int:
        """The length of the longest sequence."""
        return max(len(sequence) for sequence in self.sequences)

    @property
    def warnings(self) -> tuple[str, ...]:
        return (*self.notes, *(line for sequence in self.sequences for task in sequence for line in task.warnings))

    @property
    def fingerprint(self) -> str:
        """Identifies user images; empty if there are none."""
        found = [task.fingerprint for sequence in self.sequences for task in sequence]
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16] if any(found) else ""

    @property
    def images(self) -> dict[str, str]:
        """Fingerprints of all images: by dataset, and of user images by the name of the scenario."""
        from weft.scenarios.splits import fingerprint_of

        user = {self.name: self.fingerprint} if self.fingerprint else {}
        return {**{name: fingerprint_of(name) for name in self.datasets}, **user}


class ScenarioOptions(StrictModel):
    """Base of the options of built-in scenarios."""


class Builder(Protocol):
    """A registered scenario: the type of its options, and how it is built. May be a module or a class."""

    Options: type[BaseModel]

    def build(self, options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario: ...


@dataclass
class UserBuilder:
    """A user-defined scenario: a function of clients, tasks and seed, whose other keyword arguments are options."""

    name: str
    make: Callable[..., Scenario]
    Options: type[BaseModel]

    def build(self, options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
        try:
            found = self.make(clients=clients, tasks=tasks, seed=seed, **options.model_dump())
        except WeftError as error:
            raise WeftError(f"scenario {self.name}: {error}") from error.__cause__
        except Exception as error:
            raise WeftError(f"scenario {self.name} failed: {registry.error_line(error)}") from error
        if not isinstance(found, Scenario):
            kind = type(found).__name__
            raise WeftError(f"scenario {self.name} returned {kind}; it must return a weft.scenarios.Scenario")
        if found.clients != clients or not all(found.sequences) or found.tasks > tasks:
            sizes = f"{found.clients} clients with up to {found.tasks} tasks" if found.clients else "no client"
            raise WeftError(f"scenario {self.name} returned {sizes}; the plan has clients={clients} and tasks={tasks}")
        return found


SCENARIOS = {
    "glyphs": "weft.scenarios.glyphs",
    "overlapped-cifar100": "weft.scenarios.paper:OverlappedCIFAR100",
    "noniid-50": "weft.scenarios.paper:NonIID50",
    "noniid-35": "weft.scenarios.paper:NonIID35",
    "interference": "weft.scenarios.paper:Interference",
    "folders": "weft.scenarios.folders",
    "sites": "weft.scenarios.sites",
}
GROUP = "weft.scenarios"  # of entry points, by which installed packages add scenarios


def is_known(name: str) -> bool:
    return name in SCENARIOS or name in registry.installed(GROUP) or ":" in name


def builder_of(name: str) -> Builder:
    """The builder of a scenario; `file.py:name` and `package.module:name` are user-defined."""
    name = registry.full_name(name, GROUP)
    if ":" in name:
        make = registry.find(name)
        try:
            return UserBuilder(registry.short(name), make, options_from(make, "scenario"))
        except WeftError as error:
            raise WeftError(f"scenario {name}: {error}") from None
    if name.endswith(".py"):
        raise WeftError(f"{name} is a file; add the name of the function, as in {name}:my_scenario")
    if name not in SCENARIOS:
        raise WeftError(f"there is no scenario {name!r}; {nearest(name, SCENARIOS)}")
    module, _, attribute = SCENARIOS[name].partition(":")
    found = importlib.import_module(module)
    builder: Builder = getattr(found, attribute) if attribute else found
    return builder


def class_ids(task: Task, plan: Plan) -> tuple[str, ...]:
    """Identifiers by which clients of a run recognize classes that they have in common; docs/trust.md.

    They are no secret: who knows the vocabulary can compute them.
    """
    texts = (f"{plan.name}\n{plan.seed}\n{task.vocabulary}\n{name}" for name in task.classes)
    return tuple("c" + hashlib.sha256(text.encode()).hexdigest()[:15] for text in texts)  # a letter first: no number


def default_size(name: str, options: Mapping[str, object]) -> dict[str, int]:
    """Clients and tasks for a plan that does not set them, if the scenario knows them."""
    found: dict[str, int] = getattr(builder_of(name), "default_size", lambda _: {})(options)
    return found


def build(name: str, options: Mapping[str, object], clients: int, tasks: int, seed: int) -> Scenario:
    builder = builder_of(name)
    return builder.build(builder.Options.model_validate(options), clients, tasks, seed)


def of(plan: Plan) -> Scenario:
    return build(plan.scenario, plan.scenario_options, plan.clients, plan.tasks, plan.seed)
