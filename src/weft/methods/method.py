"""What every method is: hyperparameters, and two halves whose hooks are called in the order in which they stand here.

A method object holds no state. A client's memory is the client's `State`, the server's is the server's, and both are
handed in. This base class is itself a complete method without a server: plain training of one shared body with a head
for each task. A method overrides what it does differently, and says so in one file; where a hook can add to what
others do, it calls `super()` first, so that methods combine (combine.py): `fedprox+ewc` is both penalties.

Names that all methods share: `base` is the vector of weights that tasks share; `private` is the biases, which tasks
may share too, and then the head of the current task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from weft.lazy import torch
from weft.randomness import generator
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.networks.batches import Batches
    from weft.networks.flat import Layout, Network
    from weft.plan import Plan
    from weft.wire.message import Message
    from weft.wire.tensors import Payload


Briefing: TypeAlias = "tuple[dict[str, Payload], dict[str, Any]]"  # tensors and numbers


class Options(BaseModel):
    """Options that every method has; a method's own class adds to them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # shared: one set of biases for all tasks, which travels; private: a set for each task, which stays at the client
    biases: Literal["shared", "private"] = "shared"


Seen: TypeAlias = Literal["train", "valid", "test"]


def no_data(part: Seen) -> Batches:
    raise AssertionError(f"the {part} images of a task may be seen only while it is being learned")


@dataclass(frozen=True)
class Lesson:
    """What a client is being taught now: where it is in the run, and the network that serves as scratch memory.

    `load` gives the images of the task that is being learned; of a task that is over there are none.
    """

    client: int
    step: int
    plan: Plan
    network: Network
    load: Callable[[Seen], Batches] = no_data

    @property
    def layout(self) -> Layout:
        return self.network.layout

    def initial(self) -> torch.Tensor:
        """The body that everybody starts from, drawn from the plan's seed."""
        return initial_body(self.network, self.plan.seed)


@dataclass
class Work:
    """One round of training in fast memory: the variables that the optimiser moves, and their gradients."""

    network: Network
    variables: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    constants: dict[str, Any] = field(default_factory=dict)  # what a method needs at every step, under its own name
    dropout: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)  # of variables that move faster or slower than the others


class Form(NamedTuple):
    """How a tensor of an answer has to look."""

    shape: Literal["dense", "rows", "sparse"]
    size: int  # of the whole vector; rows are those of the network's layers
    once: bool = False  # is it given at a task's end, and not merged?


class Size(NamedTuple):
    """How much a client needs to answer for all its tasks; and the paper's measure, the nonzeros of B and A alone."""

    bytes: int
    paper_bytes: int


class Method:
    """Plain training of one body, task after task, with nothing sent: the frame that the other methods fill in."""

    options_class: ClassVar[type[Options]] = Options
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    kind: ClassVar[Literal["local", "federated", "bound"]] = "local"
    citation: ClassVar[str] = ""
    sends: ClassVar[tuple[str, str]] = ("nothing", "nothing")  # up each round, down each round
    talks: ClassVar[bool] = False  # does anything go over the wire?
    verified: ClassVar[str] = ""  # the test that fails without what is the method's own; empty: not verified

    optimizer: ClassVar[Literal["adam", "sgd"]] = "adam"  # sgd: the method's formulas hold for no other
    sgd_rate: ClassVar[float] = 0.05  # at the start of a task, where the plan names none; docs/experiments.md
    precision: ClassVar[Literal["float32", "half", "int8"]] = "float32"  # of values on the wire, unless the plan says
    sees_all: ClassVar[bool] = False  # all tasks of a client at once, the one exception to a task's data being its own
    # for combinations
    composes: ClassVar[bool] = False  # is theta made of several variables, and not `base` itself?
    needs_theta: ClassVar[str] = ""  # why `base` has to be theta, if it has to
    alone: ClassVar[str] = ""  # why the method combines with no other, if it does not

    def __init__(self, options: Options):
        self.options = options

    def first_rate(self, plan: Plan, step: int) -> float:
        """The rate at the start of a task."""
        if plan.optimizer == "adam":
            return plan.learning_rate
        assert plan.sgd_rate != "auto"  # a plan settles it
        return plan.sgd_rate

    # ---- server half, in calling order -------------------------------------------------------------------------------

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout, plan: Plan) -> None:
        """Before the first task: put theta_G into the server's state."""

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        """What a chosen client is sent in a round; `first` marks its first message of the task."""
        return {}, {}

    def aggregate(self, server: State, replies: list[Message]) -> None:
        """Merge one round's replies, which come sorted by client."""

    def absorb(self, server: State, reply: Message, weight: float) -> None:
        """Merge one answer as it comes, without a round (async=updates); a weight of 1 puts it in place of theirs."""

    def why_not_as_it_comes(self) -> str:
        """Why answers cannot be merged one by one, if they cannot."""
        if self.talks and type(self).absorb is Method.absorb:
            return "it says nowhere how a single answer is merged (`absorb`)"
        return ""

    def expected(self, layout: Layout) -> dict[str, Form] | None:
        """The tensors that an answer may have, which is checked before it is used; None: any that fit the network."""
        return None

    def fault(self, sent: Mapping[str, Payload], told: Mapping[str, Any], layout: Layout) -> str:
        """What else is wrong with tensors of the expected forms, given what `brief` told; nothing if nothing is."""
        return ""

    def confirm(self, server: State, client: int, reply: Message, told: Mapping[str, Any]) -> None:
        """A client has answered a request: what `brief` sent with these numbers has arrived."""

    def wants_gift(self, chosen_last: bool) -> bool:
        """Is a client asked to give something at the end of a task? `chosen_last`: it takes part in the last round."""
        return False

    def collect(self, server: State, client: int, step: int, reply: Message) -> None:
        """Take in what a client gives once, at the end of a task."""

    def part(self, server: State, client: int) -> None:
        """A client has left for good: remove what it gave and what is kept for it."""

    # ---- client half, in calling order -------------------------------------------------------------------------------

    def join(self, client: State, lesson: Lesson) -> None:
        """A client's first moment: B_c starts as theta_G (Alg. 1 line 1), which everybody draws from the same seed."""
        client.tensors["base"] = lesson.initial()[: lesson.layout.weights].clone()

    def begin(self, client: State, lesson: Lesson) -> None:
        """A task begins: a head of its own, and biases of its own unless they are shared."""
        biases = lesson.initial()[lesson.layout.weights :]
        if self.options.biases == "shared" and "private" in client.tensors:
            biases = client.tensor("private")[: len(biases)]
        head = lesson.network.initial_head(generator(lesson.plan.seed, "head", lesson.client, lesson.step))
        client.tensors["private"] = torch.cat([biases, head])
        client.numbers["shared_biases"] = len(biases) if self.options.biases == "shared" else 0

    def store(self, client: State, message: Message) -> None:
        """The part of `receive` that no client may miss, learning or not: what is sent once and never again."""

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        """Take in what `brief` sent."""

    def open(self, client: State, lesson: Lesson) -> Work:
        """Before the first batch of a round: variables into fast memory. Here they are the network's own vector."""
        network, weights = lesson.network, lesson.layout.weights
        network.vector[:weights] = client.tensor("base")
        network.vector[weights:] = client.tensor("private")
        return Work(
            network,
            variables={"base": network.vector[:weights], "private": network.vector[weights:]},
            gradients={"base": network.gradient[:weights], "private": network.gradient[weights:]},
        )

    def compose(self, work: Work, tested: bool = False) -> None:
        """Write theta, made of the variables, into the network; `tested`: as it is measured. Here they are theta."""

    def pull_back(self, work: Work) -> None:
        """From the gradient by theta to the gradient by each variable. Here they are the same memory."""

    def penalise(self, work: Work) -> None:
        """Add the gradients of regularisers."""

    def constrain(self, work: Work, rate: float) -> None:
        """After the optimiser's step: what a gradient cannot do, such as exact zeros."""

    def close(self, client: State, work: Work) -> None:
        """After the last batch of a round: variables back into the client's state."""
        for name in ("base", "private"):
            client.tensors[name] = work.variables[name].detach().cpu().clone()

    def contribute(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        """What a chosen client answers with."""
        return {}

    def finish(self, client: State, lesson: Lesson) -> None:
        """A task ends: what it needs later goes into the archive."""
        shared = lesson.layout.body - lesson.layout.weights if self.options.biases == "shared" else 0
        client.archive[f"private/{lesson.step}"] = client.tensor("private")[shared:].clone()

    def give(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        """What a client gives once, at the end of a task (Alg. 1 line 11)."""
        return {}

    def answer_for(self, client: State, step: int, lesson: Lesson) -> None:
        """Write into the network all that is needed to answer for one of the client's tasks."""
        network, weights = lesson.network, lesson.layout.weights
        network.vector[:weights] = client.tensor("base")
        network.vector[weights:] = self.private_part(client, step, lesson)

    def size(self, client: State) -> Size:
        """What must be kept to answer for all tasks."""
        base = client.tensor("base")
        heads = [value for key, value in client.archive.items() if key.startswith("private/")]
        kept = sum(map(tensors.nbytes, heads)) + self.biases_size(client)
        return Size(base.nbytes + kept, 4 * int(base.count_nonzero()))

    @staticmethod
    def biases_size(client: State) -> int:
        """The bytes of biases that all tasks share: once, however many tasks there are."""
        return 4 * int(client.numbers["shared_biases"])

    # ---- shared by the methods ---------------------------------------------------------------------------------------

    def shared(self, tensors: Mapping[str, Any], layout: Layout) -> dict[str, torch.Tensor]:
        """What tasks share, out of a client's tensors, or of variables or gradients: views of base and biases."""
        found = {"base": tensors["base"]}
        if self.options.biases == "shared":
            found["biases"] = tensors["private"][: layout.body - layout.weights]
        return found

    def private_part(self, client: State, step: int, lesson: Lesson) -> torch.Tensor:
        """Biases and head of a task, whether it is over or still being learned."""
        if (own := client.archive.get(f"private/{step}")) is None:
            return client.tensor("private")
        assert isinstance(own, torch.Tensor)
        if self.options.biases == "shared":
            own = torch.cat([client.tensor("private")[: lesson.layout.body - lesson.layout.weights], own])
        return own

    @staticmethod
    def receive_biases(client: State, message: Message) -> None:
        """Shared biases come along with theta_G."""
        if (biases := message.tensors.get("biases")) is not None:
            private = client.tensor("private")
            client.tensors["private"] = torch.cat([tensors.dense(biases), private[tensors.size(biases) :]])


def in_parts(vector: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """A vector of the network's layout under the names that a client's tensors have."""
    return {"base": vector[: layout.weights], "private": vector[layout.weights :]}


@functools.lru_cache(maxsize=2)
def initial_body(network: Network, seed: int) -> torch.Tensor:
    """The body that a seed gives; drawn once, so whoever wants to change it copies it first."""
    return network.initial_body(generator(seed, "initial"))
