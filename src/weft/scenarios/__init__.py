"""Scenarios: which client learns which tasks in which order, as pure data rebuilt from a name and a seed anywhere.

`scenario.sequences[client][step]` is a Task. Its images are loaded only when they are asked for: training and
validation images while the task is being learned, test images for as long as anybody wants to test.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from pydantic import BaseModel

from weft.errors import Problem, nearest

Part = Literal["train", "valid", "test"]


@dataclass(frozen=True)
class Split:
    """Some of a task's images and their labels, counted from 0 within the task."""

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


@dataclass(frozen=True)
class Scenario:
    name: str
    sequences: tuple[tuple[Task, ...], ...]
    datasets: tuple[str, ...] = ()  # of the cache, whose images it is made of; none if they are drawn

    @property
    def clients(self) -> int:
        return len(self.sequences)

    @property
    def steps(self) -> int:
        return max(len(sequence) for sequence in self.sequences)


class ScenarioModule(Protocol):
    """What a scenario's file provides: a typed description of its options, and the scenario itself."""

    Options: type[BaseModel]

    def build(self, options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario: ...


SCENARIOS = {
    "glyphs": "weft.scenarios.glyphs",
    "overlapped-cifar100": "weft.scenarios.overlapped_cifar100",
    "noniid-50": "weft.scenarios.noniid_50",
    "noniid-35": "weft.scenarios.noniid_35",
    "interference": "weft.scenarios.interference",
    "sites": "weft.scenarios.sites",
}


def module_of(name: str) -> ScenarioModule:
    if name not in SCENARIOS:
        raise Problem(f"there is no scenario {name!r}; {nearest(name, SCENARIOS)}")
    module: ScenarioModule = importlib.import_module(SCENARIOS[name])
    return module


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
