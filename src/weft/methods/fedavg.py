"""FedAvg: every round the server averages the clients' bodies (McMahan et al., AISTATS 2017).

    theta_G = sum over c of (n_c / n) * theta_c          n_c: examples of client c, n: of all that answered

Heads stay private. In the paper's continual setting each client goes on to its next task from theta_G.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from weft.lazy import lazy
from weft.methods import base
from weft.methods.base import Briefing, Lesson, Method, dense_tensors, mean, reply_weights

if TYPE_CHECKING:
    import torch

    from weft.message import Message
    from weft.networks.flat import Layout
    from weft.plan import Plan
    from weft.state import State
    from weft.tensors import Payload
else:
    torch = lazy("torch")


class Options(base.Options):
    average: Literal["equal", "examples"] = "examples"  # McMahan et al. weight by n_c


class FedAvg(Method):
    options_class: ClassVar[type[base.Options]] = Options
    citation: ClassVar[str] = "McMahan et al., Communication-efficient learning of deep networks, AISTATS 2017"
    sends: ClassVar[tuple[str, str]] = ("the whole body", "the whole body")
    talks: ClassVar[bool] = True
    options: Options

    # ---- server half

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout) -> None:
        server.tensors["global"] = initial[: layout.weights].clone()
        if self.options.biases == "shared":
            server.tensors["biases"] = initial[layout.weights :].clone()

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        return dict(server.tensors), {}

    def aggregate(self, server: State, replies: list[Message]) -> None:
        replies = [reply for reply in replies if "base" in reply.tensors]  # a client that has stopped sends none
        if not replies:
            return
        weights = reply_weights(replies, self.options.average)
        server.tensors["global"] = mean(dense_tensors(replies, "base"), weights)
        if self.options.biases == "shared":
            server.tensors["biases"] = mean(dense_tensors(replies, "biases"), weights)

    # ---- client half

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        received = message.tensors["global"]
        assert isinstance(received, torch.Tensor)
        client.tensors["base"] = received
        self.receive_biases(client, message)

    def contribute(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        return {"base": client.tensor("base"), **self.shared_biases(client, lesson)}
