"""Everything that the benchmark knows of the internals of core, engines, methods and runs.

`Timers` measures where the time of a run goes. `BenchClient` and `BenchServer` are the two halves of FedWeIT outside a
run, in a state that would take hours of training to reach: it is built by the method's hooks from random numbers of
the right shape and density, on which a step does the same work.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from weft.core import client as core_client
from weft.core import training
from weft.core.client import Runtime as Runtime
from weft.core.loop import SERVER_MEMORY, Federation
from weft.core.optimizers import forget_optimizer, make_optimizer
from weft.core.storage import Archive, State
from weft.engines.host import Host, keep_memory
from weft.engines.workers import ENVIRONMENT as WORKER_ENVIRONMENT
from weft.methods.fedweit.fedweit import FedWeIT
from weft.methods.fedweit.formulas import largest, rows_in_turn
from weft.methods.method import TaskContext, initial_body
from weft.networks.flat import Layout, Network
from weft.plan import Plan
from weft.randomness import generator
from weft.runs.session import Session
from weft.wire import message as wire_message
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import Payload, Rows, Sparse

from .timing import Progress

__all__ = ["WORKER_ENVIRONMENT", "BenchClient", "BenchServer", "ReplyCounter", "Runtime", "Timers", "prepare_process"]

SHIFT = 7919  # positions by which noise is rotated from task to task


def prepare_process() -> None:
    """Compute as a worker does."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_memory()


def layout_of(runtime: Runtime) -> Layout:
    return runtime.lesson(0, 0).layout


class ReplyCounter:
    """The progress of a run, in replies."""

    def __init__(self, progress: Progress):
        self._progress, self._done, self._total = progress, 0, 1

    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None:
        self._done, self._total = done, total

    def answered(self, client: int, task: int, round_index: int, fields: dict[str, Any]) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)


# ---- where the time of a run goes ------------------------------------------------------------------------------------

LOOP = (Federation, "run")
PLACES: dict[str, list[tuple[Any, str]]] = {
    "training": [(training, "train_round")],
    "encoding": [(wire_message, name) for name in ("encode", "decode", "weigh")],
    # the rest of a client's work, a round's copy of the state into the network and back, and checkpoints
    "state": [(Host, "answer"), (FedWeIT, "open"), (FedWeIT, "close"), (Session, "save")],
    "evaluation": [(core_client, "test"), (Network, "measure")],
    "aggregation": [(FedWeIT, name) for name in ("brief", "aggregate", "collect")],
    "images": [(Runtime, "_load")],  # drawn when a task begins
}


class Timers:
    """Seconds by category. A second belongs to the innermost timed function; the rest of the loop is `rest`.

    Validation is part of training, and `measure` within an evaluation part of that.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys([*PLACES, "rest"], 0.0)
        self.calls: dict[tuple[Any, str], int] = {}
        self._active: list[str] = []  # categories, innermost last
        self._since = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for category, places in {"rest": [LOOP], **PLACES}.items():
                for owner, name in places:
                    timed = self.timed(category, (owner, name), inspect.getattr_static(owner, name))
                    for holder in holders(owner, name):
                        stack.enter_context(mock.patch.object(holder, name, timed))
            yield

    def timed(self, category: str, place: tuple[Any, str], function: Callable[..., Any]) -> Callable[..., Any]:
        self.calls[place] = 0

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            self.calls[place] += 1
            outer = self._active[-1] if self._active else None
            if outer is None and category != "rest":  # before or after the loop
                return function(*arguments, **keywords)
            self._switch()
            self._active.append("training" if (outer, category) == ("training", "evaluation") else category)
            try:
                return function(*arguments, **keywords)
            finally:
                self._switch()
                self._active.pop()

        return timed

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost category."""
        now = time.perf_counter()
        if self._active:
            self.seconds[self._active[-1]] += now - self._since
        self._since = now


def holders(owner: Any, name: str) -> list[Any]:
    """The class, or every module of weft that has imported a function of this module."""
    if isinstance(owner, type):
        return [owner]
    modules = [module for key, module in sys.modules.items() if key.startswith("weft.")]
    return [module for module in modules if vars(module).get(name) is getattr(owner, name)]


# ---- clients with finished tasks -------------------------------------------------------------------------------------


class BenchClient:
    """A client that has just begun a task."""

    def __init__(self, runtime: Runtime, task: int, state: State | None = None):
        """`state`: of the client before the task, which is copied; None: a new client."""
        self.runtime, self._lesson = runtime, runtime.learning(0, task)
        self.batch_size = runtime.plan.batch_size
        self.state = _new_state(runtime, self._lesson) if state is None else copy_of(state)
        runtime.method.begin(self.state, self._lesson)
        self.state.numbers["schedule"] = training.begin_schedule(runtime.method.first_rate(runtime.plan, task))

    def receive(self, knowledge: list[Payload]) -> None:
        """Receive A's of client 1 as in a run: encoded, in the first message of a task."""
        keys = [f"1.{task}" for task in range(len(knowledge))]
        tensors = {f"foreign/{key}": adaptive for key, adaptive in zip(keys, knowledge, strict=True)}
        task = self._lesson.step
        message = Message("server", "client-0", "bench", ("receive",), task, 0, tensors, {"foreign": keys})
        received = decode(encode(message, self.runtime.plan.wire))
        self.runtime.method.receive(self.state, received, self._lesson)

    @contextlib.contextmanager
    def training_round(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], float]]:
        """A round without validation: yields a function that trains on a batch of images and labels."""
        method = self.runtime.method
        work = method.open(self.state, self._lesson)
        optimizer = make_optimizer(self.runtime.plan, work, self.state)
        rate = self.state.numbers["schedule"]["rate"]
        yield lambda images, labels: training.train_step(method, work, optimizer, images, labels, rate)
        method.close(self.state, work)
        optimizer.remember(self.state)


def _new_state(runtime: Runtime, lesson: TaskContext) -> State:
    state = State()
    runtime.method.join(state, lesson)
    return state


def copy_of(state: State) -> State:
    """An independent copy; entries of the archive never change and are shared."""
    archive = Archive()
    archive.update(state.archive)
    tensors = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.tensors.items()}
    return State(tensors, dict(state.numbers), archive)


def _finished_tasks(runtime: Runtime, client: int, count: int) -> Iterator[tuple[int, State, TaskContext]]:
    """The number of finished tasks and the state of a client after each task, with random values for trained ones."""
    method = runtime.method
    state = _new_state(runtime, runtime.lesson(client, 0))
    values = generator(runtime.plan.seed, "bench", client).standard_normal(
        state.tensor("base").numel(), dtype="float32"
    )
    noise = torch.from_numpy(values)
    for task in range(count):
        lesson = runtime.lesson(client, task)
        method.begin(state, lesson)
        schedule = training.begin_schedule(method.first_rate(runtime.plan, task))
        state.numbers["schedule"] = {**schedule, "epochs": 1}  # as if trained
        for name, deviation in (("mask", 1.0), ("adaptive", 1e-2)):
            shifted = noise[: state.tensor(name).numel()].roll(SHIFT * task)  # drawing takes longer than all the rest
            state.tensors[name] = state.tensor(name) + deviation * shifted
        method.finish(state, lesson)
        forget_optimizer(state)
        yield task + 1, state, lesson


def states_before(runtime: Runtime, tasks: set[int]) -> dict[int, State]:
    """The state of client 0 before each of these tasks."""
    states = {0: _new_state(runtime, runtime.lesson(0, 0))}
    for finished, state, _ in _finished_tasks(runtime, 0, max(tasks)):
        if finished in tasks:
            states[finished] = copy_of(state)
    return states


def task_knowledge(runtime: Runtime, count: int) -> list[Payload]:
    """The A's that client 1 uploads after its first tasks."""
    return [runtime.method.give(state, lesson)["adaptive"] for _, state, lesson in _finished_tasks(runtime, 1, count)]


# ---- the server ------------------------------------------------------------------------------------------------------


class BenchServer:
    """The server's half of the method; what exceeds its share of memory goes to `folder`."""

    def __init__(self, runtime: Runtime, folder: Path | None = None):
        lesson = runtime.lesson(0, 0)
        self._runtime = runtime
        self.state = State(archive=Archive(folder, owner="server"))
        initial = initial_body(lesson.network, runtime.plan.seed)
        runtime.method.open_server(self.state, initial, lesson.layout, runtime.plan)

    def aggregate(self, replies: list[Message]) -> None:
        self._runtime.method.aggregate(self.state, replies)

    def store(self, task: int, adaptive: Sparse) -> None:
        """Store the A of a task of client 1."""
        reply = Message("client-1", "server", "bench", (), task, 0, {"adaptive": adaptive})
        self._runtime.method.collect(self.state, 1, task, reply)
        self.state.archive.spill(SERVER_MEMORY)

    def sample(self, client: int, task: int) -> None:
        """Configure the first round of a task, with A's from the knowledge base."""
        self._runtime.method.brief(self.state, client, task, True, self._runtime.plan)
        self.state.archive.spill(SERVER_MEMORY)

    @property
    def memory_bytes(self) -> int:
        return self.state.archive.nbytes


def make_replies(runtime: Runtime, count: int) -> list[Message]:
    """Replies of clients after a round: the same rows of different bases."""
    layout, replies = layout_of(runtime), []
    for client in range(count):
        rng = generator(runtime.plan.seed, "bench", "reply", client)
        base = torch.from_numpy(rng.standard_normal(layout.weights, dtype="float32"))
        rows = Rows.of(base, layout.segments, rows_in_turn(layout, 0, runtime.plan.method_options["keep"]))
        replies.append(Message(f"client-{client}", "server", "bench", (), 0, 0, {"base": rows}, {"examples": 200}))
    return replies


def payloads(plan: Plan) -> dict[str, Payload]:
    """The network's weights in the three forms that FedWeIT sends: dense, some rows, and a sparse A."""
    layout = layout_of(Runtime(plan))
    values = generator(plan.seed, "bench", "wire").standard_normal(layout.weights, dtype="float32")
    vector = torch.from_numpy(values)
    kept = torch.from_numpy(generator(plan.seed, "bench", "rows").random(layout.rows) < plan.method_options["keep"])
    return {
        "dense": vector,
        "rows": Rows.of(vector, layout.segments, kept),
        "sparse": Sparse.of(largest(vector, plan.method_options["adaptive_keep"])),
    }
