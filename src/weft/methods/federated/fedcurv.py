"""FedCurv: EWC across clients; each is held where its weights matter to the others (Shoham et al., 2019).

    loss_s(theta) + lambda * sum over others j of u_j * (theta - theta_j)^2
      = ... + lambda * sum of theta^2 * (U - u_s) - 2 * theta * (V - v_s) + constant

u_j is the diagonal Fisher information of client j after its last round, v_j = u_j * theta_j, and U and V are their sums
over the clients of that round. A client sends theta, u and v and is sent theta_G, U and V: three times FedAvg each way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from weft.lazy import torch
from weft.methods import method
from weft.methods.averaging import compact, sent, weighted_sum
from weft.methods.continual.ewc import task_information
from weft.methods.federated import fedavg
from weft.methods.federated.fedavg import FedAvg
from weft.methods.fedweit.formulas import curvature_gradient
from weft.methods.method import Briefing, Form, Lesson, Work, in_parts
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.networks.flat import Layout
    from weft.plan import Plan
    from weft.wire.message import Message
    from weft.wire.tensors import Payload

KINDS = ("fisher", "fisher_theta")  # u and v; at the server their sums, U and V


class Options(fedavg.Options):
    lambda_fedcurv: float = Field(1.0, ge=0, le=1e9)  # appendix A: in [1e-2, 1]


class FedCurv(FedAvg):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "Shoham et al., Overcoming forgetting in federated learning on non-IID data, 2019"
    sends: ClassVar[tuple[str, str]] = ("theta, u, u * theta", "theta_G, U, V")
    verified: ClassVar[str] = "tests/test_baselines.py: test_fedcurv_pulls_towards_the_others"
    needs_theta: ClassVar[str] = "the Fisher information of fedcurv is that of theta"
    options: Options

    # ---- server half

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout, plan: Plan) -> None:
        super().open_server(server, initial, layout, plan)
        server.numbers["answered"] = []
        for name, value in self.shared(in_parts(initial, layout), layout).items():
            server.tensors |= {f"{kind}/{name}": torch.zeros_like(value) for kind in KINDS}

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        """`counted`: are the client's own u and v in U and V, so that it has to take them out?"""
        said, numbers = super().brief(server, client, step, first, plan)
        if self.options.keep < 1:
            said = {key: compact(value) if key.partition("/")[0] in KINDS else value for key, value in said.items()}
        return said, {**numbers, "counted": f"client-{client}" in server.numbers["answered"]}

    def merge_replies(self, server: State, replies: list[Message], weights: list[float]) -> None:
        super().merge_replies(server, replies, weights)
        server.numbers["answered"] = [reply.sender for reply in replies]
        for key in [key for key in replies[0].tensors if key.partition("/")[0] in KINDS]:
            server.tensors[key] = weighted_sum(sent(replies, key), [1.0] * len(replies))

    def why_not_as_it_comes(self) -> str:
        return "U and V are sums over the clients of one round"

    def expected(self, layout: Layout) -> dict[str, Form] | None:
        found = super().expected(layout) or {}
        return found | {f"{kind}/{name}": form for kind in KINDS for name, form in found.items()}

    # ---- client half

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        super().receive(client, message, lesson)
        for key, value in message.tensors.items():
            if key.partition("/")[0] in KINDS:
                others = tensors.dense(value)
                if message.fields["counted"]:
                    others = others - tensors.dense(client.tensors[f"own_{key}"])
                if key.startswith(f"{KINDS[0]}/"):
                    others = others.clamp(min=0)  # what rounding leaves of U - u where u is all of U
                client.tensors[f"others_{key}"] = others

    def open(self, client: State, lesson: Lesson) -> Work:
        work = super().open(client, lesson)
        device = lesson.network.vector.device
        work.constants["fedcurv"] = {
            name: tuple(client.tensor(f"others_{kind}/{name}").to(device) for kind in KINDS)
            for name in self.shared(client.tensors, lesson.layout)
            if f"others_{KINDS[0]}/{name}" in client.tensors
        }
        return work

    def penalise(self, work: Work) -> None:
        super().penalise(work)
        layout = work.network.layout
        theta, gradient = self.shared(work.variables, layout), self.shared(work.gradients, layout)
        for name, (u, v) in work.constants["fedcurv"].items():
            curvature_gradient(theta[name], u, v, 2 * self.options.lambda_fedcurv, gradient[name])

    def contribute(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        information = task_information(self, client, lesson)
        theta = self.shared(client.tensors, lesson.layout)
        own = {f"{KINDS[0]}/{name}": u for name, u in information.items()}
        own |= {f"{KINDS[1]}/{name}": u * theta[name] for name, u in information.items()}
        said = self.cut(own, client, lesson)
        client.tensors |= {f"own_{key}": value for key, value in said.items()}
        return super().contribute(client, lesson) | said
