"""State of clients, tasks and the server: plain dataclasses, saved field by field by core/storage.py.

A method that remembers more extends the class that it needs and names it (`Client = MyClient`). A field may be a
tensor, a dictionary of tensors, a number, a text, a list, another dataclass, or a `Table`. Every field has a default.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from weft.lazy import torch
from weft.wire import tensors
from weft.wire.tensors import Payload, Sparse

if TYPE_CHECKING:
    from weft.methods.context import ServerContext, TaskContext
    from weft.methods.method import MethodOptions
    from weft.plan import Plan

K = TypeVar("K", int, str)
V = TypeVar("V")


def empty() -> torch.Tensor:
    return torch.empty(0)


class Table(MutableMapping[K, V], Generic[K, V]):
    """Entries that are written once, when they changed, and read from disk when they are needed.

    So a hundred clients with ten tasks each neither fill the memory nor make every checkpoint larger than the last one.
    An entry is replaced and never changed in place: `table[3] = dataclasses.replace(table[3], adaptive=new)`.
    """

    def __init__(self, entry: type[Any] | None = None) -> None:
        self.entry = entry  # the dataclass of an entry; None: a tensor
        self.memory: dict[K, V] = {}
        self.files: dict[K, Any] = {}  # of entries that are on disk
        self.changed: set[K] = set()
        self.folder: Path | None = None  # where they are; set, like `read`, by core/storage.py
        self.read: Callable[[Any], V] | None = None

    def copy(self) -> Self:
        """Another table with the same entries."""
        other = copy.copy(self)
        other.memory, other.files, other.changed = dict(self.memory), dict(self.files), set(self.changed)
        return other

    def __getitem__(self, key: K) -> V:
        if key not in self.memory:
            if key not in self.files or self.read is None:
                raise KeyError(key)
            self.memory[key] = self.read(self.files[key])
        return self.memory[key]

    def __setitem__(self, key: K, value: V) -> None:
        self.memory[key] = value
        self.changed.add(key)

    def __delitem__(self, key: K) -> None:
        if key not in self:
            raise KeyError(key)
        self.memory.pop(key, None)
        self.files.pop(key, None)
        self.changed.discard(key)

    def __contains__(self, key: object) -> bool:
        return key in self.memory or key in self.files

    def __iter__(self) -> Iterator[K]:
        return iter(sorted(self.memory.keys() | self.files.keys()))

    def __len__(self) -> int:
        return len(self.memory.keys() | self.files.keys())


def shared_of(options: MethodOptions, weights: V, biases: V) -> dict[str, V]:
    """What tasks share, by name: the weights, and the biases unless each task has its own."""
    return {"weights": weights, "biases": biases} if options.biases == "shared" else {"weights": weights}


class Size(NamedTuple):
    """Bytes that a client keeps to answer for all its tasks; and the paper's measure, the nonzeros of B and A alone."""

    bytes: int
    paper_bytes: int


@dataclass
class RateSchedule:
    """Learning rate of the current task: divided after `patience` epochs without a lower validation loss."""

    rate: float = 0.0
    lowest: float | None = None  # validation loss so far
    waited: int = 0  # epochs since then
    stopped: bool = False  # the rate has reached its floor: the client keeps what it has
    epochs: int = 0

    def after_epoch(self, loss: float, plan: Plan) -> None:
        self.epochs += 1
        if self.lowest is None or loss < self.lowest:
            self.lowest, self.waited = loss, 0
            return
        self.waited += 1
        if self.waited >= plan.patience:
            self.rate = max(self.rate / plan.rate_decay, plan.rate_floor)
            self.waited = 0
            self.stopped = plan.stop_at_floor and self.rate <= plan.rate_floor


@dataclass
class OptimizerState:
    """Adam's moments by variable; empty for SGD, and between tasks."""

    first: dict[str, torch.Tensor] = field(default_factory=dict)
    second: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: dict[str, float] = field(default_factory=dict)


@dataclass
class TaskState:
    """What a finished task leaves at its client."""

    private: torch.Tensor = field(default_factory=empty)  # its head, and its biases unless tasks share them

    def density(self) -> float | None:
        """The share of nonzeros in the task's A; None for methods without one."""
        return None

    def choice(self) -> str:
        """Whose result the task is tested with, own or shared; empty for methods that offer no choice."""
        return ""


@dataclass
class ClientState:
    """Everything that a client remembers."""

    weights: torch.Tensor = field(default_factory=empty)  # (layout.weights,), shared by the client's tasks
    private: torch.Tensor = field(default_factory=empty)  # biases, then the head of the current task
    shared_biases: int = 0  # how many of these biases all tasks share
    rate: RateSchedule = field(default_factory=RateSchedule)
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    tasks: Table[int, Any] = field(default_factory=Table)  # finished ones, by number: the method's `Task`
    knowledge: Table[str, Sparse] = field(default_factory=Table)  # of other clients, by "client.task"
    started: int = -1  # the last task that was started, and finished
    finished: int = -1
    request_id: str = ""  # the last request, and its encoded reply in case it is repeated
    reply: bytes = b""

    def start(self, ctx: TaskContext, options: MethodOptions) -> None:
        """Initialize a new client: B_c = theta_G (Alg. 1 line 1), which every client draws from the same seed."""
        self.weights = ctx.initial()[: ctx.layout.weights].clone()

    def private_of(self, task: int) -> torch.Tensor:
        """Biases and head of a task, current or finished."""
        if task not in self.tasks:
            return self.private
        return torch.cat([self.private[: self.shared_biases], self.tasks[task].private])

    def receive_biases(self, biases: Payload | None) -> None:
        """Replace the shared biases, if they were sent along with theta_G."""
        if biases is not None:
            self.private = torch.cat([tensors.dense(biases), self.private[tensors.size(biases) :]])

    def size(self) -> Size:
        heads = sum(tensors.nbytes(task.private) for task in self.tasks.values())
        return Size(self.weights.nbytes + heads + 4 * self.shared_biases, 4 * int(self.weights.count_nonzero()))


@dataclass
class ServerState:
    """Everything that the server remembers; a method without a server half needs nothing."""

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        """Initialize the server before the first task."""

    def remove_client(self, client: int) -> None:
        """Remove what is kept of and for a client that has left for good."""


@dataclass
class SharedServer(ServerState):
    """theta_G, and the biases where tasks share them."""

    weights: Payload = field(default_factory=empty)
    biases: torch.Tensor = field(default_factory=empty)

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        super().start(ctx, options)
        self.weights = ctx.initial[: ctx.layout.weights].clone()
        if options.biases == "shared":
            self.biases = ctx.initial[ctx.layout.weights :].clone()

    def shared(self, options: MethodOptions) -> dict[str, Payload]:
        """What every client is sent."""
        return shared_of(options, self.weights, self.biases)
