"""What every method is: hyperparameters, and two halves whose hooks are called in the order in which they stand here.

A method object holds no state. A client's memory is the client's `State`, the server's is the server's, and both are
handed in. This base class is itself a complete method without a server: plain training of one shared body with a head
for each task. A method overrides what it does differently, and says so in one file.

Names that all methods share: `base` is the vector of weights that tasks share; `private` is what belongs to the current
task alone, biases first and then the head.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from weft.errors import Problem
from weft.lazy import lazy
from weft.randomness import generator

if TYPE_CHECKING:
    import torch

    from weft.message import Message
    from weft.networks.flat import Layout, Network
    from weft.plan import Plan
    from weft.state import State
    from weft.tensors import Payload
else:
    torch = lazy("torch")


Briefing: TypeAlias = "tuple[dict[str, Payload], dict[str, Any]]"  # tensors and numbers


class Options(BaseModel):
    """Options that every method has; a method's own class adds to them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # shared: one set of biases for all tasks, which travels; private: a set for each task, which stays at the client
    biases: Literal["shared", "private"] = "shared"


@dataclass(frozen=True)
class Lesson:
    """What a client is being taught now: where it is in the run, and the network that serves as scratch memory."""

    client: int
    step: int
    plan: Plan
    network: Network

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
    constants: dict[str, Any] = field(default_factory=dict)


class Size(NamedTuple):
    """How much a client needs to answer for all its tasks; and the paper's measure, the nonzeros of B and A alone."""

    bytes: int
    paper_bytes: int


class Method:
    """Plain training of one body, task after task, with nothing sent: the frame that the other methods fill in."""

    options_class: ClassVar[type[Options]] = Options
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    citation: ClassVar[str] = ""
    sends: ClassVar[tuple[str, str]] = ("nothing", "nothing")  # up each round, down each round
    talks: ClassVar[bool] = False  # does anything go over the wire?

    def __init__(self, options: Options):
        self.options = options

    # ---- server half, in calling order -------------------------------------------------------------------------------

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout) -> None:
        """Before the first task: put theta_G into the server's state."""

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        """What a chosen client is sent in a round; `first` marks its first message of the task."""
        return {}, {}

    def aggregate(self, server: State, replies: list[Message]) -> None:
        """Merge one round's replies, which come sorted by client."""

    def wants_gift(self, chosen_last: bool) -> bool:
        """Is a client asked to give something at the end of a task? `chosen_last`: it takes part in the last round."""
        return False

    def collect(self, server: State, client: int, step: int, reply: Message) -> None:
        """Take in what a client gives once, at the end of a task."""

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
        client.archive[f"private/{lesson.step}"] = client.tensor("private").clone()

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
        return Size(base.nbytes + sum(_bytes(head) for head in heads), 4 * int(base.count_nonzero()))

    # ---- shared by the methods ---------------------------------------------------------------------------------------

    def private_part(self, client: State, step: int, lesson: Lesson) -> torch.Tensor:
        """Biases and head of a task, whether it is over or still being learned."""
        finished = f"private/{step}" in client.archive
        own = client.archive[f"private/{step}"] if finished else client.tensor("private")
        assert isinstance(own, torch.Tensor)
        if finished and self.options.biases == "shared":
            biases = lesson.layout.body - lesson.layout.weights
            own = torch.cat([client.tensor("private")[:biases], own[biases:]])
        return own

    def shared_biases(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        """The biases as they travel, where they are shared."""
        if self.options.biases == "private":
            return {}
        return {"biases": client.tensor("private")[: lesson.layout.body - lesson.layout.weights].clone()}

    def receive_biases(self, client: State, message: Message) -> None:
        if (biases := message.tensors.get("biases")) is not None:
            assert isinstance(biases, torch.Tensor)
            client.tensors["private"] = torch.cat([biases, client.tensor("private")[len(biases) :]])


@functools.lru_cache(maxsize=2)
def initial_body(network: Network, seed: int) -> torch.Tensor:
    """The body that a seed gives; drawn once, so whoever wants to change it copies it first."""
    return network.initial_body(generator(seed, "initial"))


def mean(vectors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """The weighted mean, added up in the order given, so that equal replies give equal bits."""
    total = torch.zeros_like(vectors[0])
    for vector, weight in zip(vectors, weights, strict=True):
        total.add_(vector, alpha=weight)
    return total.div_(sum(weights))


def reply_weights(replies: list[Message], average: str) -> list[float]:
    return [1.0 if average == "equal" else float(reply.numbers["examples"]) for reply in replies]


def dense_tensors(replies: list[Message], name: str) -> list[torch.Tensor]:
    """The same dense tensor out of every reply; a reply without it, or of another size, is refused."""
    found: list[torch.Tensor] = []
    for reply in replies:
        value = reply.tensors.get(name)
        if not isinstance(value, torch.Tensor) or (found and len(value) != len(found[0])):
            raise Problem(f"{reply.sender} did not answer with {name!r} as this method expects it")
        found.append(value)
    return found


def _bytes(payload: Payload) -> int:
    from weft.tensors import nbytes

    return nbytes(payload)
