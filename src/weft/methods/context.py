"""What the hooks of a method get: contexts, the download of a client, and one round of local training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from weft.lazy import torch
from weft.methods.averaging import Fields, Tensors
from weft.methods.state import ClientState
from weft.randomness import generator
from weft.wire.tensors import Sparse

if TYPE_CHECKING:
    from weft.networks.batches import Batches
    from weft.networks.flat import Layout, Network
    from weft.plan import Plan

KNOWLEDGE = "foreign/"  # before the name of a tensor of `Download.once`
SplitName: TypeAlias = Literal["train", "valid", "test"]


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
    initial: torch.Tensor  # the body that all clients start from


@dataclass(frozen=True)
class RoundContext:
    """The request that `configure` fills."""

    plan: Plan
    task: int
    first: bool  # the client's first download of this task: kb^(t) is sent along (line 3)
    repeats: Mapping[str, Any] = field(default_factory=dict)  # fields of an earlier first download, if it is repeated
    classes: Mapping[int, list[str]] = field(default_factory=dict)  # identifiers that the client announced, by task
    testing: bool = False  # all tasks so far are tested next
    round: int = 0  # of the client's task


@dataclass(frozen=True)
class TaskContext:
    """The client's hooks get its task, the network as scratch memory, and the images of the task in training."""

    client: int
    task: int
    plan: Plan
    network: Network
    # identifiers of the classes of a task of this client: equal ones are the same class at any client
    classes_of: Callable[[int], tuple[str, ...]] = lambda task: ()
    load: Callable[[SplitName], Batches] = no_images
    round: int = 0  # of the task
    class_names: tuple[str, ...] = ()  # of the task, as its scenario calls them

    @property
    def classes(self) -> tuple[str, ...]:
        return self.classes_of(self.task)

    @property
    def layout(self) -> Layout:
        return self.network.layout

    @property
    def device(self) -> torch.device:
        return self.network.vector.device

    def initial(self) -> torch.Tensor:
        """The body that all clients start from, drawn from the plan's seed."""
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
    penalties: list[Callable[[], object]] = field(default_factory=list)  # each adds the gradient of a regularizer
    after_step: list[Callable[[float], None]] = field(default_factory=list)  # gets the learning rate
    on_end: list[Callable[[], None]] = field(default_factory=list)  # writes the variables to the client's state
    rates: dict[str, float] = field(default_factory=dict)  # factor of the learning rate, by variable
    dropout: float = 0.0
    # phases: the names of the variables that do not learn in an epoch of the round; their optimizer state rests too
    frozen: Callable[[int], Collection[str]] = lambda epoch: ()
    epoch: int = 0  # of the round; for penalties and callbacks

    @classmethod
    def plain(cls, client: ClientState, ctx: TaskContext) -> LocalTraining:
        """Train theta itself: the variables are the network's memory."""
        network, weights = ctx.network, ctx.layout.weights
        network.vector[:weights], network.vector[weights:] = client.weights, client.private
        variables = {"weights": network.vector[:weights], "private": network.vector[weights:]}
        gradients = {"weights": network.gradient[:weights], "private": network.gradient[weights:]}

        theta = tuple(variables.values())

        def store() -> None:
            client.weights, client.private = (part.detach().cpu().clone() for part in theta)

        return cls(network, variables, gradients, on_end=[store])

    def split_head(self) -> None:
        """Make the head a variable apart from the biases: `private` becomes `biases` and `head`."""
        count = self.network.layout.head - self.network.layout.weights
        for source in (self.variables, self.gradients):
            private = source.pop("private")
            source["biases"], source["head"] = private[:count], private[count:]


@functools.lru_cache(maxsize=2)
def initial_body(network: Network, seed: int) -> torch.Tensor:
    """The body that a seed gives; drawn once, so copy it before changing it."""
    return network.initial_body(generator(seed, "initial"))
