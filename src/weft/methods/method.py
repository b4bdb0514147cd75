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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.lazy import torch
from weft.methods.averaging import Tensors, Updates
from weft.methods.context import Download, LocalTraining, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.state import ClientState, ServerState, TaskState, shared_of
from weft.wire.codec import Precision

if TYPE_CHECKING:
    from weft.networks.flat import Layout


class MethodOptions(BaseModel):
    """Options that every method has; a method's own class adds to them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # shared: one set of biases for all tasks, which is sent; private: one set per task, which stays at the client
    biases: Literal["shared", "private"] = "shared"
    # private: heads stay at their client; class: rows of heads are sent and averaged by class (class_heads.py)
    heads: Literal["private", "class"] = "private"
    dropout: float = Field(0.0, ge=0, lt=1)  # in training: of the inputs of linear layers, except the network's first


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
    precision: Precision = "float32"  # of values on the wire, unless the plan says otherwise
    composes_theta: bool = False  # theta is made of several variables
    sees_all_tasks: bool = False  # all tasks of a client at once: the exception to a task's data being private to it
    shares_tasks: Literal["no", "selected", "all"] = "no"  # who uploads task knowledge (line 11)
    by_class: bool = False  # clients announce the classes of a task before its first download
    improves_tasks: bool = False  # finished tasks take in what is sent before a test, and keep it
    asynchronous: bool = False  # `aggregate` can merge a single update (async=updates) ...
    why_not_asynchronous: str = "its `aggregate` does not declare how a single update is merged"  # ... or why not
    needs_theta: str = ""  # why it combines with no method that composes theta
    not_combinable: str = ""  # why it combines with no method at all

    @property
    def supports_async(self) -> bool:
        return self.asynchronous or not self.federated  # with nothing sent there is nothing to merge


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
        ctx.network.vector[weights:] = client.private_of(task)

    # ---- for the hooks of methods ------------------------------------------------------------------------------------

    def shared(self, client: ClientState, layout: Layout) -> dict[str, torch.Tensor]:
        """Views of what a client's tasks share: weights, and biases unless each task has its own."""
        return shared_of(self.options, client.weights, client.private[: layout.biases])

    def trained(self, training: LocalTraining) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Of what tasks share: its name, the variable in training and its gradient, to be changed in place."""
        biases = training.network.layout.biases
        variables, gradients = (
            shared_of(self.options, source["weights"], source["biases" if "biases" in source else "private"][:biases])
            for source in (training.variables, training.gradients)
        )
        return ((name, variables[name], gradients[name]) for name in variables)
