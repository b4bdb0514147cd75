"""What several test files need: tiny plans, and a federation in memory that keeps every message that was sent."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from weft.core import client as client_module
from weft.core.checks import Inspector
from weft.core.client import World
from weft.core.engine import Reply, Request, Saved
from weft.core.loop import Federation, Progress
from weft.core.schedule import Schedule
from weft.core.storage import State
from weft.engines.simulated import Clocked
from weft.methods.method import initial_body
from weft.networks.batches import Batches
from weft.networks.flat import Layer, Layout
from weft.plan import Plan
from weft.scenarios import Scenario
from weft.wire.ledger import Ledger
from weft.wire.message import Message, decode
from weft.wire.tensors import Payload, flatten

torch.set_num_threads(1)

TINY: dict[str, Any] = {
    "network": "mlp",
    "network.hidden": 8,
    "network.features": 16,
    "scenario": "glyphs",
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 20,
    "scenario.classes_per_task": 2,
    "clients": 3,
    "tasks": 2,
    "rounds_per_task": 2,
    "batch_size": 10,
    "learning_rate": 3e-3,
    "device": "cpu",
    "precision": "float32",  # nothing is rounded on the way, so that digits and equalities hold
}


def tiny(**changed: Any) -> Plan:
    """A plan of some tenths of a second; `method__keep=1` stands for the key method.keep."""
    return Plan.merge({**TINY, **{key.replace("__", "."): value for key, value in changed.items()}})


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    """A layout of weight matrices alone: no biases, no head."""
    layers, offset, row = [], 0, 0
    for place, shape in enumerate(shapes):
        layers.append(Layer(f"layer{place}", shape, offset, row))
        offset, row = offset + layers[-1].rows * layers[-1].width, row + layers[-1].rows
    return Layout(tuple(layers), offset, offset, offset)


def spread(layout: Layout, mask: torch.Tensor) -> torch.Tensor:
    """The mask as a vector of all weights, each row's number repeated: the plain way to write m * B."""
    return torch.cat([mask[layer.row_span].repeat_interleave(layer.width) for layer in layout.layers])


@functools.lru_cache(maxsize=512)
def _drawn(
    scenario: str, options: str, clients: int, tasks: int, seed: int, client: int, step: int, part: Any, label: int
) -> Batches:
    from weft import scenarios

    task = scenarios.build(scenario, json.loads(options), clients, tasks, seed).sequences[client][step]
    return Batches(task.load(part), task.mean, task.deviation, first_label=label)


class CachedWorld(World):
    """A world whose images are drawn once for all tests: they are never changed."""

    def _load(self, client: int, step: int, part: Any) -> Batches:
        plan = self.plan
        options = json.dumps(plan.scenario_options, sort_keys=True)
        label = self._first_label(client, step)
        return _drawn(plan.scenario, options, plan.clients, plan.tasks, plan.seed, client, step, part, label)


class Interrupted(Exception):  # noqa: N818 - it is no error
    """The session ends here."""


@dataclasses.dataclass
class Run:
    """A federation in memory, which is its own engine and listener: clients answer one after another."""

    plan: Plan
    backwards: bool = False  # do the clients answer in another order?
    folder: Path | None = None  # where every state is saved, and read again, after every message
    stop_after_round: bool = False  # ends with `Interrupted` at every mark where a checkpoint may be made
    careless: bool = False  # is every request sent twice, and the networks' memory overwritten after it?
    world: World = None  # type: ignore[assignment]
    server: State = dataclasses.field(default_factory=State)
    clients: dict[int, State] = dataclasses.field(default_factory=dict)
    progress: Progress = dataclasses.field(default_factory=Progress)
    wires: list[bytes] = dataclasses.field(default_factory=list)  # requests and replies in turn
    privates: list[torch.Tensor] = dataclasses.field(default_factory=list)  # biases and head of each who replied
    reports: list[tuple[int, int, int, dict[str, Any]]] = dataclasses.field(default_factory=list)
    matrices: dict[int, list[list[float]]] = dataclasses.field(default_factory=dict)
    incidents: list[tuple[int, int, int, str]] = dataclasses.field(default_factory=list)
    marks: int = 0
    kept: Saved | None = None  # what was on its way when the last session ended
    clock: Clocked = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.world = self.world or CachedWorld(self.plan)
        network = self.world.lesson(0, 0).network
        self.layout = network.layout
        self.ledger = Ledger(self.layout.body)
        initial = initial_body(network, self.plan.seed)
        self.inspector = Inspector.of(self.method, self.layout, initial, self.plan)
        self.method.open_server(self.server, initial, self.layout, self.plan)

    @property
    def method(self) -> Any:
        return self.world.method

    @property
    def scenario(self) -> Scenario:
        return self.world.scenario

    def go(self) -> Run:
        schedule = Schedule(self.plan, self.scenario, self.method)
        self.clock = Clocked(self.plan, self, self.folder, self.kept)
        state = (self.server, self.inspector, self.ledger, self.progress)
        self.federation = Federation(self.plan, schedule, self.method, self.clock, *state, listener=self)
        self.federation.run()
        return self

    def go_to(self, step: int) -> Run:
        """Until the tasks before `step` are over; `go` goes on from there."""
        self.stop_after_round = True
        while self.progress.step < step:
            with contextlib.suppress(Interrupted):
                self.go()
        self.stop_after_round = False
        return self

    def go_with_interruptions(self) -> Run:
        """Every checkpoint is the end of a session: all that is left for the next one is what was saved."""
        self.stop_after_round = True
        while True:
            try:
                return self.go()
            except Interrupted:
                self.server = self._again(self.server, f"server@{self.marks}")
                self.progress = Progress(**json.loads(json.dumps(dataclasses.asdict(self.progress))))
                if self.folder is not None:
                    self.kept = Saved({}, {}, json.loads(json.dumps(self.clock.save().clock)))

    # ---- the engine

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        # a client answers in the order in which it was asked, whoever else is faster
        for client, wire, *_ in sorted(requests, key=lambda one: -one[0]) if self.backwards else requests:
            state = self.clients.setdefault(client, State())
            reply = client_module.answer(self.world, client, state, wire)
            if self.careless:
                assert client_module.answer(self.world, client, state, wire) == reply
                network = self.world.lesson(client, decode(wire).task).network
                network.vector.fill_(1e3)
                network.gradient.fill_(1e3)
            self.wires += [wire, reply]
            self.privates.append(state.tensor("private"))
            if self.folder is not None:
                self.clients[client] = self._again(state, f"client-{client}@{len(self.wires)}")
            yield Reply(client, reply, 0.0)

    def save(self) -> Saved:
        return Saved({}, {})

    def close(self) -> None:
        pass

    def _again(self, state: State, prefix: str) -> State:
        if self.folder is None:
            return state
        return State.load(self.folder, json.loads(json.dumps(state.save(self.folder, prefix))))

    # ---- the listener

    def weighed(self, entries: Any) -> None:
        pass

    def answered(self, client: int, step: int, round_index: int, seconds: float, numbers: dict[str, Any]) -> None:
        self.reports.append((client, step, round_index, numbers))

    def incident(self, client: int, step: int, round_index: int, reason: str) -> None:
        self.incidents.append((client, step, round_index, reason))

    def tested(self, client: int, step: int, accuracies: list[float]) -> None:
        matrix = self.matrices.setdefault(client, [])
        assert len(matrix) == step
        matrix.append(accuracies)

    def round_done(self, progress: Progress) -> None:
        self.marks += 1
        if self.stop_after_round:
            raise Interrupted

    # ---- what came out

    @functools.cached_property
    def requests(self) -> list[Message]:
        """Of a finished run."""
        return [decode(wire) for wire in self.wires[::2]]

    @functools.cached_property
    def replies(self) -> list[Message]:
        """Of a finished run."""
        return [decode(wire) for wire in self.wires[1::2]]

    def theta(self, client: int, step: int) -> torch.Tensor:
        """All that client's weights, biases and head with which it would now answer for one of its tasks."""
        lesson = self.world.lesson(client, step)
        self.method.answer_for(self.clients[client], step, lesson)
        return lesson.network.vector.clone()

    def parts(self, direction: str) -> dict[tuple[int, int, int, str], Payload]:
        """All tensors that were sent in a direction, by (client, step, round, name)."""
        found = {}
        for message in self.requests if direction == "s2c" else self.replies:
            client = int((message.receiver if direction == "s2c" else message.sender).removeprefix("client-"))
            for name, payload in message.tensors.items():
                found[client, message.task, message.round, name] = payload
        return found

    def names(self, direction: str) -> set[str]:
        """The kinds of tensors that were sent in a direction; foreign/1.0 is of the kind foreign."""
        return {name.partition("/")[0] for *_, name in self.parts(direction)}

    def bits(self) -> dict[str, Any]:
        """All that a run leaves behind, for comparing: server, clients, accuracies, progress and traffic."""
        # as lists and text: the order of the rows is part of what a run leaves behind
        found: dict[str, Any] = {"accuracy": list(self.matrices.items())}
        found["progress"] = json.dumps(dataclasses.asdict(self.progress))
        found["traffic"] = sorted(map(str, self.ledger.entries))
        for owner, state in {"server": self.server, **self.clients}.items():
            found |= {f"{owner} {key}": value for key, value in state_bits(state).items()}
        return found


def state_bits(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {"numbers": json.dumps(state.numbers, sort_keys=True), "reply": state.reply}
    for place, payloads in (("tensors", state.tensors), ("archive", state.archive)):
        for name, payload in payloads.items():
            pieces, found[f"{place} {name}"] = flatten(name, payload)
            for piece, value in pieces.items():
                found[f"{place} {piece} bits"] = value.numpy().tobytes()
    return found


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The keys under which two dicts differ: a short message where whole tensors would fill the screen."""
    return sorted(
        str(key) for key in {*first, *second} if key not in first or key not in second or first[key] != second[key]
    )


@functools.lru_cache(maxsize=64)
def _run(words: str) -> Run:
    return Run(tiny(**json.loads(words))).go()


def run(**changed: Any) -> Run:
    """A finished run of a tiny plan; the same plan is run once for all tests, so look and do not touch."""
    return _run(json.dumps(changed, sort_keys=True))


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def shared_bits(finished):
    """What clients would answer with, and what was measured: the same for methods that keep other notes beside it."""
    found = {"accuracy": finished.matrices}
    for client in range(finished.plan.clients):
        for step in range(finished.plan.tasks):
            found[f"theta {client} {step}"] = finished.theta(client, step).numpy().tobytes()
    return found


def assert_same(first, second):
    assert differences(shared_bits(first), shared_bits(second)) == []


def assert_other(first, second):
    assert differences(shared_bits(first), shared_bits(second)) != []
