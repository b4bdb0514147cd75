"""`Method`: the options and both halves of one method, as ten hooks.

A method object holds options and no state: a client's memory is its `ClientState`, the server's is its `ServerState`.
This base class is itself a complete method without a server: plain training of one body with a head for each task. A
method overrides the hooks in which it differs, in one file. `fedprox+ewc` calls the hooks of both (combine.py).

    >>> class Decay(Method):
    ...     "Plain training with weight decay."
    ...
    ...     def prepare(self, training, client, ctx):
    ...         weights, gradient = training.variables["weights"], training.gradients["weights"]
    ...         training.penalties.append(lambda: gradient.add_(weights, alpha=0.01))
    >>> Decay(MethodOptions()).traits.federated
    False
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from weft.lazy import torch
from weft.methods.averaging import Fields, Tensors, Updates
from weft.methods.state import ClientState, ServerState, TaskState
from weft.randomness import generator
from weft.wire import tensors
from weft.wire.tensors import Sparse

if TYPE_CHECKING:
    from weft.networks.batches import Batches
    from weft.networks.flat import Layout, Network
    from weft.plan import Plan

KNOWLEDGE = "foreign/"  # before the name of a tensor of `Download.once`
SplitName: TypeAlias = Literal["train", "valid", "test"]


class MethodOptions(BaseModel):
    """Options that every method has; a method's own class adds to them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # shared: one set of biases for all tasks, which is sent; private: one set per task, which stays at the client
    biases: Literal["shared", "private"] = "shared"


@dataclass(frozen=True)
class MethodInfo:
    """What `weft list` says about a method."""

    citation: str = ""
    kind: Literal["local", "federated", "bound"] = "local"
    uploads: str = "nothing"  # each round
    downloads: str = "nothing"
    verified: str = ""  # the test that fails without the method's characteristic term; empty: not verified


@dataclass(frozen=True)
class Traits:
    """What the loop, the plan and combinations need to know about a method."""

    federated: bool = False  # it has a server half
    sgd_only: bool = False  # its formulas hold for no other optimizer
    sgd_rate: float = 0.05  # initial rate of SGD where the plan names none; docs/experiments.md
    precision: Literal["float32", "half", "int8"] = "float32"  # of values on the wire, unless the plan says otherwise
    composes_theta: bool = False  # theta is made of several variables
    sees_all_tasks: bool = False  # all tasks of a client at once: the exception to a task's data being private to it
    shares_tasks: Literal["no", "selected", "all"] = "no"  # who uploads task knowledge (line 11)
    asynchronous: bool = False  # `aggregate` can merge a single update (async=updates) ...
    why_not_asynchronous: str = "its `aggregate` does not declare how a single update is merged"  # ... or why not
    needs_theta: str = ""  # why it combines with no method that composes theta
    not_combinable: str = ""  # why it combines with no method at all

    @property
    def supports_async(self) -> bool:
        return self.asynchronous or not self.federated  # with nothing sent there is nothing to merge


@dataclass(frozen=True)
class TensorSpec:
    """The form of one tensor of a reply."""

    shape: Literal["dense", "rows", "sparse"]
    size: int  # of the whole vector; rows are those of the network's layers
    once: bool = False  # uploaded at the end of a task and not merged
    rows: torch.Tensor | None = None  # exactly these rows, bool (rows,)
    most_rows: tuple[int, ...] | None = None  # at most so many rows of each layer


@dataclass
class Download:
    """What the server sends to one client."""

    tensors: Tensors = field(default_factory=dict)
    fields: Fields = field(default_factory=dict)
    once: dict[str, Sparse] = field(default_factory=dict)  # goes to `client.knowledge`, even if training has stopped


def no_images(split: SplitName) -> Batches:
    raise AssertionError(f"the {split} images of a task are available only while it is trained")


@dataclass(frozen=True)
class ServerContext:
    """What the server's hooks may use."""

    plan: Plan
    layout: Layout
    initial: torch.Tensor  # the body that everybody starts from


@dataclass(frozen=True)
class RoundContext:
    """The request that `configure` fills."""

    plan: Plan
    task: int
    first: bool  # the client's first download of this task: kb^(t) is sent along (line 3)
    repeats: Mapping[str, Any] = field(default_factory=dict)  # fields of an earlier first download, if it is repeated


@dataclass(frozen=True)
class TaskContext:
    """The client's hooks get its task, the network as scratch memory, and the images of the task in training."""

    client: int
    task: int
    plan: Plan
    network: Network
    load: Callable[[SplitName], Batches] = no_images

    @property
    def layout(self) -> Layout:
        return self.network.layout

    @property
    def device(self) -> torch.device:
        return self.network.vector.device

    def initial(self) -> torch.Tensor:
        """The body that everybody starts from, drawn from the plan's seed."""
        return initial_body(self.network, self.plan.seed)


@dataclass
class LocalTraining:
    """One round of local training: the variables that the optimizer moves, their gradients, and what else happens.

    For each batch: compose, gradient, backward, penalties, optimizer step, after_step.
    """

    network: Network
    variables: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    compose: Callable[[bool], None] = lambda evaluated: None  # variables -> theta (Eq. 1); True: as evaluated
    backward: Callable[[], None] = lambda: None  # gradient by theta -> gradient by each variable
    penalties: list[Callable[[], None]] = field(default_factory=list)  # each adds the gradient of a regularizer
    after_step: list[Callable[[float], None]] = field(default_factory=list)  # gets the learning rate
    on_end: list[Callable[[], None]] = field(default_factory=list)  # writes the variables to the client's state
    rates: dict[str, float] = field(default_factory=dict)  # factor of the learning rate, by variable
    dropout: float = 0.0

    @classmethod
    def plain(cls, client: ClientState, ctx: TaskContext) -> LocalTraining:
        """Train theta itself: the variables are the network's memory."""
        network, weights = ctx.network, ctx.layout.weights
        network.vector[:weights], network.vector[weights:] = client.weights, client.private
        variables = {"weights": network.vector[:weights], "private": network.vector[weights:]}
        gradients = {"weights": network.gradient[:weights], "private": network.gradient[weights:]}

        def store() -> None:
            client.weights, client.private = (variables[name].detach().cpu().clone() for name in variables)

        return cls(network, variables, gradients, on_end=[store])


class Method:
    """Plain training of one body, task after task, with nothing sent. Every hook below does nothing by default."""

    Options: ClassVar[type[MethodOptions]] = MethodOptions
    Server: ClassVar[type[ServerState]] = ServerState
    Client: ClassVar[type[ClientState]] = ClientState
    Task: ClassVar[type[TaskState]] = TaskState
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    info: ClassVar[MethodInfo] = MethodInfo()
    traits: Traits = Traits()  # of a class; an object may have others, if they depend on its options

    def __init__(self, options: MethodOptions):
        self.options = options

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "aggregate" in vars(cls) and "traits" not in vars(cls):  # an inherited promise about another `aggregate`
            cls.traits = replace(cls.traits, asynchronous=False)

    # ---- server half, in calling order -------------------------------------------------------------------------------

    def configure(self, server: Any, client: int, ctx: RoundContext) -> Download:
        """Return what a selected client is sent (lines 3 and 6). Changes nothing."""
        return Download()

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        """Declare the tensors that a reply may have; `sent`: the fields of the request. Others are refused."""
        return {}

    def aggregate(self, server: Any, updates: Updates, ctx: ServerContext) -> None:
        """Merge accepted updates into theta_G (line 9); store task knowledge (line 11)."""

    # ---- client half, in calling order -------------------------------------------------------------------------------

    def begin_task(self, client: Any, ctx: TaskContext) -> None:
        """A task starts; its head, biases and learning rate are set."""

    def receive(self, client: Any, download: Download, ctx: TaskContext) -> None:
        """Take in what `configure` returned. Assign tensors, never write into them."""

    def prepare(self, training: LocalTraining, client: Any, ctx: TaskContext) -> None:
        """Before a round's first batch: change variables, add penalties and callbacks."""

    def upload(self, client: Any, ctx: TaskContext) -> Tensors:
        """Return the client's part of the round (line 8)."""
        return {}

    def end_task(self, client: Any, ctx: TaskContext) -> None:
        """A task ends: fill `client.tasks[ctx.task]`, which has its head already."""

    def share_task(self, client: Any, ctx: TaskContext) -> Tensors:
        """Return what is uploaded once per task (line 11). May be called again."""
        return {}

    def load_task(self, client: Any, task: int, ctx: TaskContext) -> None:
        """Write the weights of one task, current or finished, into the network."""
        weights = ctx.layout.weights
        ctx.network.vector[:weights] = client.weights
        ctx.network.vector[weights:] = self.private_of(client, task)

    # ---- for the hooks of methods ------------------------------------------------------------------------------------

    def shared(self, source: ClientState | Mapping[str, torch.Tensor], layout: Layout) -> dict[str, torch.Tensor]:
        """What tasks share: views of weights and biases of a client, of variables or of gradients."""
        weights, private = (
            (source.weights, source.private)
            if isinstance(source, ClientState)
            else (source["weights"], source["private"])
        )
        return self.shared_of(weights, private[: layout.body - layout.weights])

    def shared_of(self, weights: torch.Tensor, biases: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weights": weights, **({"biases": biases} if self.options.biases == "shared" else {})}

    def private_of(self, client: ClientState, task: int) -> torch.Tensor:
        """Biases and head of a task, current or finished."""
        if task not in client.tasks:
            return client.private
        private: torch.Tensor = client.tasks[task].private
        if self.options.biases == "shared":
            private = torch.cat([client.private[: client.shared_biases], private])
        return private


def receive_biases(client: ClientState, download: Download) -> None:
    """Replace the shared biases, which are sent along with theta_G."""
    if (biases := download.tensors.get("biases")) is not None:
        client.private = torch.cat([tensors.dense(biases), client.private[tensors.size(biases) :]])


@functools.lru_cache(maxsize=2)
def initial_body(network: Network, seed: int) -> torch.Tensor:
    """The body that a seed gives; drawn once, so copy it before changing it."""
    return network.initial_body(generator(seed, "initial"))
