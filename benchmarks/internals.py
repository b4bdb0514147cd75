"""Everything that the benchmark knows of the internals of core, engines, methods and runs.

`Timers` measures where the time of a run goes. `BenchClient` and `BenchServer` are the two halves of FedWeIT outside a
run, in a state that would take hours of training to reach: it is built by the method's hooks from random numbers of
the right shape and density, on which a step does the same work.
"""

from __future__ import annotations

import contextlib
import copy
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
from weft.core import storage, training
from weft.core.client import Runtime, begin, end
from weft.core.exchange import SERVER_MEMORY
from weft.core.loop import Federation
from weft.engines.host import ClientHost, keep_memory
from weft.engines.workers import ENVIRONMENT as WORKER_ENVIRONMENT
from weft.methods.averaging import Update, Updates
from weft.methods.context import (
    KNOWLEDGE,
    Download,
    LocalTraining,
    RoundContext,
    ServerContext,
    TaskContext,
    initial_body,
)
from weft.methods.fedweit.fedweit import FedWeIT
from weft.methods.fedweit.formulas import largest, rows_in_turn
from weft.methods.state import ClientState
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
    return runtime.context(0, 0).layout


class ReplyCounter:
    """The progress of a run, in replies."""

    def __init__(self, progress: Progress):
        self._progress, self._done, self._total = progress, 0, 1

    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None:
        self._done, self._total = done, total

    def warned(self, text: str) -> None: ...

    def answered(self, client: int, task: int, round_index: int, fields: dict[str, Any]) -> None:
        self._done += 1
        self._progress(min(self._done, self._total), self._total)


# ---- where the time of a run goes ------------------------------------------------------------------------------------

LOOP = (Federation, "run")
PLACES: dict[str, list[tuple[Any, str]]] = {
    "training": [(training, "train_round")],
    "encoding": [(wire_message, name) for name in ("encode", "decode", "weigh")],
    # the rest of a client's work, the preparation of a round, and checkpoints
    "state": [(ClientHost, "answer"), (FedWeIT, "prepare"), (Session, "save")],
    "evaluation": [(core_client, "evaluate"), (Network, "measure")],
    "aggregation": [(FedWeIT, "configure"), (FedWeIT, "aggregate")],
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

    def __init__(self, runtime: Runtime, task: int, state: ClientState | None = None):
        """`state`: of the client before the task, which is copied; None: a new client."""
        self.runtime, self._ctx = runtime, runtime.training_context(0, task)
        self.batch_size = runtime.plan.batch_size
        self.state: Any = _new_client(runtime, self._ctx) if state is None else copy_of(state)
        begin(runtime, self.state, self._ctx)

    def receive(self, knowledge: list[Sparse]) -> None:
        """Receive A's of client 1 as in a run: encoded, in the first message of a task."""
        keys = [f"1.{task}" for task in range(len(knowledge))]
        tensors: dict[str, Payload] = {f"{KNOWLEDGE}{key}": one for key, one in zip(keys, knowledge, strict=True)}
        sent = Message("server", "client-0", "bench", ("receive",), self._ctx.task, 0, tensors, {"foreign": keys})
        received = decode(encode(sent, self.runtime.plan.wire))
        self.state.knowledge.update({key: received.tensors[f"{KNOWLEDGE}{key}"] for key in keys})
        self.runtime.method.receive(self.state, Download(fields=received.fields), self._ctx)

    @contextlib.contextmanager
    def training_round(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], float]]:
        """A round without validation: yields a function that trains on a batch of images and labels."""
        state = self.state
        local = LocalTraining.plain(state, self._ctx)
        self.runtime.method.prepare(local, state, self._ctx)
        optimizer = training.make_optimizer(self.runtime.plan, local, state.optimizer)
        yield lambda images, labels: training.train_step(local, optimizer, images, labels, state.rate.rate)
        for callback in local.on_end:
            callback()
        state.optimizer = optimizer.state()


def _new_client(runtime: Runtime, ctx: TaskContext) -> ClientState:
    state = runtime.new_client()
    state.start(ctx, runtime.method.options)
    return state


def copy_of(state: ClientState) -> ClientState:
    """An independent copy; entries of tables never change and are shared."""
    entries = [*state.tasks.values(), *state.knowledge.values()]
    return copy.deepcopy(state, {id(entry): entry for entry in entries})


def _finished_tasks(runtime: Runtime, client: int, count: int) -> Iterator[tuple[int, ClientState, TaskContext]]:
    """The number of finished tasks and the state of a client after each task, with random values for trained ones."""
    state: Any = _new_client(runtime, runtime.context(client, 0))
    values = generator(runtime.plan.seed, "bench", client).standard_normal(len(state.weights), dtype="float32")
    noise = torch.from_numpy(values)
    for task in range(count):
        ctx = runtime.context(client, task)
        begin(runtime, state, ctx)
        state.rate.epochs = 1  # as if trained
        # rotated, since drawing takes longer than all the rest
        state.mask = state.mask + noise[: len(state.mask)].roll(SHIFT * task)
        state.adaptive = state.adaptive + 1e-2 * noise.roll(SHIFT * task)
        end(runtime, state, ctx)
        yield task + 1, state, ctx


def states_before(runtime: Runtime, tasks: set[int]) -> dict[int, ClientState]:
    """The state of client 0 before each of these tasks."""
    states = {0: _new_client(runtime, runtime.context(0, 0))}
    for finished, state, _ in _finished_tasks(runtime, 0, max(tasks)):
        if finished in tasks:
            states[finished] = copy_of(state)
    return states


def task_knowledge(runtime: Runtime, count: int) -> list[Sparse]:
    """The A's that client 1 uploads after its first tasks."""
    shared = [runtime.method.share_task(state, ctx)["adaptive"] for _, state, ctx in _finished_tasks(runtime, 1, count)]
    return [adaptive for adaptive in shared if isinstance(adaptive, Sparse)]


# ---- the server ------------------------------------------------------------------------------------------------------


class BenchServer:
    """The server's half of the method; what exceeds its share of memory goes to `folder`."""

    def __init__(self, runtime: Runtime, folder: Path | None = None):
        self._method, self._plan = runtime.method, runtime.plan
        ctx = runtime.context(0, 0)
        self._ctx = ServerContext(runtime.plan, ctx.layout, initial_body(ctx.network, runtime.plan.seed))
        self.state: Any = self._method.Server()
        self.state.start(self._ctx, self._method.options)
        if folder is not None:
            storage.attach(self.state, folder)

    def aggregate(self, updates: list[Update]) -> None:
        self._method.aggregate(self.state, Updates(updates), self._ctx)

    def store(self, task: int, adaptive: Sparse) -> None:
        """Store the A of a task of client 1."""
        self.aggregate([Update(1, task, {}, {"adaptive": adaptive}, {}, None, received=True)])
        storage.spill(self.state, SERVER_MEMORY, "server")

    def sample(self, client: int, task: int) -> None:
        """Configure the first round of a task, with A's from the knowledge base."""
        self._method.configure(self.state, client, RoundContext(self._plan, task, first=True))
        storage.spill(self.state, SERVER_MEMORY, "server")

    @property
    def memory_bytes(self) -> int:
        return storage.state_bytes(self.state.knowledge)


def make_updates(runtime: Runtime, count: int) -> list[Update]:
    """Replies of clients after a round: the same rows of different bases."""
    layout, updates = layout_of(runtime), []
    for client in range(count):
        rng = generator(runtime.plan.seed, "bench", "reply", client)
        base = torch.from_numpy(rng.standard_normal(layout.weights, dtype="float32"))
        rows = Rows.of(base, layout.segments, rows_in_turn(layout, 0, runtime.plan.method_options["keep"]))
        updates.append(Update(client, 0, {"weights": rows}, {}, {"examples": 200}, {}, received=True))
    return updates


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
