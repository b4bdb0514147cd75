"""What several test files need: tiny plans, and a federation in memory that keeps every message that was sent."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft.core import client as client_module
from weft.core import storage
from weft.core.checks import ReplyChecks
from weft.core.client import Runtime
from weft.core.engine import EngineState, Reply, Request
from weft.core.exchange import Exchange
from weft.core.loop import Federation
from weft.core.loop_async import AsynchronousFederation
from weft.core.progress import ClientProgress, Progress
from weft.core.schedule import Assignment, Schedule
from weft.core.task_end import TaskEnd
from weft.engines.simulated import SimulatedEngine
from weft.methods.context import ServerContext, initial_body
from weft.methods.state import ClientState, Table
from weft.networks.batches import Batches
from weft.networks.flat import Layer, Layout
from weft.plan import Plan
from weft.scenarios import Scenario
from weft.wire.ledger import Ledger
from weft.wire.message import Message, decode, encode
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
    scenario: str, options: str, clients: int, tasks: int, seed: int, client: int, task: int, part: Any, label: int
) -> Batches:
    from weft import scenarios

    task = scenarios.build(scenario, json.loads(options), clients, tasks, seed).sequences[client][task]
    return Batches(task.load(part), task.mean, task.deviation, first_label=label)


class CachedRuntime(Runtime):
    """A runtime whose images are drawn once for all tests: they are never changed."""

    def _load(self, client: int, task: int, split: Any) -> Batches:
        plan = self.plan
        options = json.dumps(plan.scenario_options, sort_keys=True)
        label = self._first_label(client, task)
        return _drawn(plan.scenario, options, plan.clients, plan.tasks, plan.seed, client, task, split, label)


class Interrupted(Exception):  # noqa: N818 - not an error
    """The session ends here."""


@dataclasses.dataclass
class Run:
    """A federation in memory, which carries its messages and records its events: clients answer one after another."""

    plan: Plan
    backwards: bool = False  # clients answer in another order
    folder: Path | None = None  # where every state is saved, and read again, after every message
    stop_after_round: bool = False  # ends with `Interrupted` at every point where a checkpoint may be made
    careless: bool = False  # every request is sent twice, and the networks' memory overwritten after it
    runtime: Runtime = None  # type: ignore[assignment]
    clients: dict[int, ClientState] = dataclasses.field(default_factory=dict)
    progress: Progress = None  # type: ignore[assignment]
    wires: list[bytes] = dataclasses.field(default_factory=list)  # requests and replies in turn
    privates: list[torch.Tensor] = dataclasses.field(default_factory=list)  # biases and head, by reply
    reports: list[tuple[int, int, int, dict[str, Any]]] = dataclasses.field(default_factory=list)
    matrices: dict[int, list[list[float]]] = dataclasses.field(default_factory=dict)
    validation: dict[int, list[list[float]]] = dataclasses.field(default_factory=dict)  # on validation images
    incidents: list[tuple[int, int, int, str]] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    marks: int = 0
    kept: EngineState = dataclasses.field(default_factory=EngineState)  # on its way when the last session ended
    engine: SimulatedEngine = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.runtime = self.runtime or CachedRuntime(self.plan)
        network = self.runtime.context(0, 0).network
        self.layout = network.layout
        self.ledger = Ledger(self.layout.body)
        self.ctx = ServerContext(self.plan, self.layout, initial_body(network, self.plan.seed))
        self.checks = ReplyChecks.of(self.method, self.layout, self.ctx.initial, self.plan)
        self.server = self.method.Server()
        self.server.start(self.ctx, self.method.options)
        self.progress = Progress([ClientProgress() for _ in range(self.plan.clients)])
        self._requests: list[Request] = []

    @property
    def method(self) -> Any:
        return self.runtime.method

    @property
    def scenario(self) -> Scenario:
        return self.runtime.scenario

    def go(self) -> Run:
        schedule = Schedule(self.plan, self.scenario, self.method)
        self.engine = SimulatedEngine(self.plan, self, self.folder or Path(), self.kept)
        state = (self.checks, self.ledger, self.progress, self, self.ctx)
        exchange = Exchange(self.plan, self.method, self.server, self.engine, *state)
        kind = AsynchronousFederation if self.plan.asynchronous == "updates" else Federation
        self.federation = kind(schedule, exchange, TaskEnd(schedule, exchange))
        self.federation.run()
        return self

    def go_to(self, task: int) -> Run:
        """Until the tasks before this one are over; `go` continues from there."""
        self.stop_after_round = True
        while self.progress.task < task:
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
                self.server = self._again(self.server, self.method.Server(), f"server@{self.marks}")
                self.progress = Progress.from_json(json.loads(json.dumps(self.progress.to_json())))
                if self.folder is not None:
                    self.kept = EngineState({}, {}, json.loads(json.dumps(self.engine.save().transit)))

    # ---- what carries messages

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def ready(self) -> None:
        return None

    def replies(self) -> Iterator[Reply]:
        # a client answers in the order of its requests, whichever other client is faster
        requests, self._requests = self._requests, []
        for client, wire, request_id, *_ in sorted(requests, key=lambda one: -one[0]) if self.backwards else requests:
            state = self.clients.setdefault(client, self.runtime.new_client())
            reply = client_module.answer(self.runtime, client, state, wire)
            if self.careless:
                assert client_module.answer(self.runtime, client, state, wire) == reply
                network = self.runtime.context(client, decode(wire).task).network
                network.vector.fill_(1e3)
                network.gradient.fill_(1e3)
            self.wires += [wire, reply]
            self.privates.append(state.private)
            self.clients[client] = self._again(state, self.runtime.new_client(), f"client-{client}@{len(self.wires)}")
            yield Reply(client, reply, 0.0, request_id)

    def save(self) -> EngineState:
        return EngineState()

    def ask(self, ops: str, task: int = 0, round_index: int = 0) -> Message:
        """The first client's reply to a request without tensors."""
        request_id = f"{task}.{round_index}.0"
        words = ("server", "client-0", request_id, tuple(ops.split()), task, round_index)
        self.submit(Request(0, encode(Message(*words)), request_id))
        (reply,) = self.replies()
        return decode(reply.wire)

    def _again(self, state: Any, new: Any, prefix: str) -> Any:
        if self.folder is None:
            return state
        return storage.load(new, self.folder, json.loads(json.dumps(storage.save(state, self.folder, prefix))))

    # ---- events

    def counted(self, entries: Any) -> None:
        pass

    def replied(self, assignment: Assignment, seconds: float, fields: dict[str, Any]) -> None:
        self.reports.append((assignment.client, assignment.task, assignment.round, fields))

    def incident(self, client: int, task: int, round_index: int, reason: str) -> None:
        self.incidents.append((client, task, round_index, reason))

    def tested(self, client: int, task: int, accuracies: list[float], validation: list[float]) -> None:
        for matrices, values in ((self.matrices, accuracies), (self.validation, validation)):
            matrix = matrices.setdefault(client, [])
            assert len(matrix) == task
            matrix.append(values)

    def warned(self, text: str) -> None:
        self.warnings.append(text)

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
    def answers(self) -> list[Message]:
        """Of a finished run."""
        return [decode(wire) for wire in self.wires[1::2]]

    def theta(self, client: int, task: int) -> torch.Tensor:
        """All weights, biases and the head of one of the client's tasks, as it would be evaluated now."""
        ctx = self.runtime.context(client, task)
        self.method.load_task(self.clients[client], task, ctx)
        return ctx.network.vector.clone()

    def parts(self, direction: str) -> dict[tuple[int, int, int, str], Payload]:
        """All tensors that were sent in a direction, by (client, task, round, name)."""
        found = {}
        for message in self.requests if direction == "s2c" else self.answers:
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
        found: dict[str, Any] = {"accuracy": list(self.matrices.items()), "validation": list(self.validation.items())}
        found["progress"] = json.dumps(self.progress.to_json())
        found["traffic"] = sorted(map(str, self.ledger.entries))
        for owner, state in {"server": self.server, **self.clients}.items():
            found |= {f"{owner} {key}": value for key, value in state_bits(state).items()}
        return found


class Merged(NamedTuple):
    """An update that the method merged, and when."""

    at: int  # the run's round
    client: int
    task: int
    round: int  # of the task
    mix: float | None  # its weight, if it was merged alone


class Watched(Run):
    """Notes which updates are merged; `heard`: the requests that were answered by the last merge."""

    def go(self) -> Watched:
        self.merged: list[Merged] = []
        self.heard: set[str] = set()
        aggregate = self.method.aggregate

        def noted(server: Any, updates: Any, ctx: ServerContext) -> None:
            requests = {id(fields): place for *place, fields in self.reports}  # an update has the fields of its reply
            merged = [requests[id(update.fields)] for update in updates if update.tensors]
            self.merged += [Merged(self.progress.round, *place, updates.mix) for place in merged]
            if merged:
                self.heard = {f"{task}.{round_index}.{client}" for client, task, round_index, _ in self.reports}
            aggregate(server, updates, ctx)

        self.method.aggregate = noted
        super().go()
        return self


def state_bits(state: Any) -> dict[str, Any]:
    """Every tensor of a state, bit for bit, and all the rest of it."""
    found: dict[str, Any] = {}
    tensors: dict[str, Payload] = {}
    found["values"] = json.dumps(storage._split(state, "", tensors), sort_keys=True)
    for each in dataclasses.fields(state):
        table = getattr(state, each.name)
        if isinstance(table, Table):
            for key, entry in table.items():
                path = f"{each.name}/{key}"
                found[path] = json.dumps(storage._split(entry, path, tensors), sort_keys=True)
    for name, payload in tensors.items():
        if isinstance(payload, torch.Tensor) and payload.dtype == torch.uint8:
            found[name] = payload.numpy().tobytes()
            continue
        pieces, found[name] = flatten(name, payload)
        for piece, value in pieces.items():
            found[f"{piece} bits"] = value.numpy().tobytes()
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
        for task in range(finished.plan.tasks):
            found[f"theta {client} {task}"] = finished.theta(client, task).numpy().tobytes()
    return found


def assert_same(first, second):
    assert differences(shared_bits(first), shared_bits(second)) == []


def assert_other(first, second):
    assert differences(shared_bits(first), shared_bits(second)) != []
