"""FedAvg: every round the server averages the clients' bodies (McMahan et al., AISTATS 2017).

    theta_G = sum over c of (n_c / n) * theta_c          n_c: examples of client c, n: of all that answered

Heads stay private. In the paper's continual setting each client goes on to its next task from theta_G.

With keep < 1 a client sends only that share of its values, those that it moved farthest from theta_G; a value's mean is
taken over those that sent it, and where nobody did each client keeps its own, as FedWeIT does with rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from weft.lazy import torch
from weft.methods import method
from weft.methods.averaging import Average, absorb, average, merge, reply_weights, sent
from weft.methods.fedweit.formulas import largest_places
from weft.methods.method import Briefing, Form, Lesson, Method
from weft.wire import codec, tensors

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.networks.flat import Layout
    from weft.plan import Plan
    from weft.wire.message import Message
    from weft.wire.tensors import Payload


class Options(method.Options):
    average: Average = "examples"  # McMahan et al. weight by n_c
    keep: float = Field(1.0, gt=0, le=1)  # the share of the values that is sent; all in McMahan et al.


class FedAvg(Method):
    options_class: ClassVar[type[method.Options]] = Options
    kind: ClassVar[Literal["local", "federated", "bound"]] = "federated"
    citation: ClassVar[str] = "McMahan et al., Communication-efficient learning of deep networks, AISTATS 2017"
    sends: ClassVar[tuple[str, str]] = ("theta", "theta_G")
    talks: ClassVar[bool] = True
    verified: ClassVar[str] = "tests/test_methods.py: test_fedavg_mean_by_hand"
    options: Options

    # ---- server half

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout, plan: Plan) -> None:
        server.tensors["global"] = initial[: layout.weights].clone()
        if self.options.biases == "shared":
            server.tensors["biases"] = initial[layout.weights :].clone()

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        return dict(server.tensors), {}

    def aggregate(self, server: State, replies: list[Message]) -> None:
        replies = [reply for reply in replies if "base" in reply.tensors]  # a client that has stopped sends none
        if replies:
            self.merge_replies(server, replies, reply_weights(replies, self.options.average))

    def merge_replies(self, server: State, replies: list[Message], weights: list[float]) -> None:
        server.tensors["global"] = average(sent(replies, "base"), weights)
        if self.options.biases == "shared":
            server.tensors["biases"] = average(sent(replies, "biases"), weights)

    def absorb(self, server: State, reply: Message, weight: float) -> None:
        absorb(server, reply, weight)

    def why_not_as_it_comes(self) -> str:
        if type(self).merge_replies is not FedAvg.merge_replies and type(self).absorb is FedAvg.absorb:
            return "it merges a round in its own way, and says nowhere how a single answer is merged (`absorb`)"
        return super().why_not_as_it_comes()

    def expected(self, layout: Layout) -> dict[str, Form] | None:
        found = {"base": Form("dense" if self.options.keep == 1 else "sparse", layout.weights)}
        if self.options.biases == "shared":
            found["biases"] = Form("dense", layout.body - layout.weights)
        return found

    # ---- client half

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        super().receive(client, message, lesson)
        client.tensors["base"] = merge(message.tensors["global"], client.tensor("base"))
        self.receive_biases(client, message)
        if self.options.keep < 1:
            client.tensors["received"] = client.tensor("base").clone()  # APD learns in place

    def contribute(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        return super().contribute(client, lesson) | self.cut(self.shared(client.tensors, lesson.layout), client, lesson)

    def cut(self, vectors: dict[str, torch.Tensor], client: State, lesson: Lesson) -> dict[str, Payload]:
        """What is sent of vectors that are called `base` or `.../base`: with keep < 1 the same places of each."""
        # as they will arrive, since some methods remember what they said
        vectors = {name: codec.arriving(vector, lesson.plan.wire) for name, vector in vectors.items()}
        if self.options.keep == 1:
            return {name: vector.clone() for name, vector in vectors.items()}
        moved = (client.tensor("base") - client.tensor("received")).abs()
        count = math.ceil(self.options.keep * len(moved) - 1e-9)
        chosen = torch.nonzero(largest_places(moved, count)).view(-1)
        found: dict[str, Payload] = {}
        for name, vector in vectors.items():
            whole = name.rpartition("/")[2] != "base"  # biases are few
            found[name] = vector.clone() if whole else tensors.Sparse(len(vector), chosen.int(), vector[chosen])
        return found
