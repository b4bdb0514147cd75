"""FedCurv: EWC across clients; each is held where its weights matter to the others (Shoham et al., 2019).

    loss_s(theta) + lambda * sum over others j of u_j * (theta - theta_j)^2
      = ... + lambda * sum of theta^2 * (U - u_s) - 2 * theta * (V - v_s) + constant

u_j is the diagonal Fisher information of client j after its last round, v_j = u_j * theta_j, and U and V are their sums
over the clients of that round. A client sends theta, u and v and receives theta_G, U and V: three times FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from weft.lazy import torch
from weft.methods.averaging import Tensors, Updates
from weft.methods.context import Download, LocalTraining, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.continual.ewc import curvature_gradient, task_information
from weft.methods.federated.fedavg import FedAvg, FedAvgClient, FedAvgOptions
from weft.methods.method import MethodInfo, MethodOptions, Traits
from weft.methods.state import SharedServer
from weft.wire import tensors
from weft.wire.tensors import Payload

if TYPE_CHECKING:
    from weft.networks.flat import Layout

U, V = "fisher", "fisher_theta"  # before the name of a tensor: u or U, v or V


class FedCurvOptions(FedAvgOptions):
    lambda_fedcurv: float = Field(1.0, ge=0, le=1e9)  # appendix A: in [1e-2, 1]


@dataclass
class FedCurvServer(SharedServer):
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # U and V, by "fisher/weights", ...
    counted: list[int] = field(default_factory=list)  # the clients whose u and v are in them

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        super().start(ctx, options)
        zeros = {name: torch.zeros_like(tensors.dense(value)) for name, value in self.shared(options).items()}
        self.sums = {f"{kind}/{name}": zero for name, zero in zeros.items() for kind in (U, V)}


@dataclass
class FedCurvClient(FedAvgClient):
    sent: dict[str, Payload] = field(default_factory=dict)  # u and v as the server got them
    others: dict[str, torch.Tensor] = field(default_factory=dict)  # U - u and V - v


class FedCurv(FedAvg[FedCurvServer, FedCurvClient]):
    Options = FedCurvOptions
    Server = FedCurvServer
    Client = FedCurvClient
    info = MethodInfo(
        citation="Shoham et al., Overcoming forgetting in federated learning on non-IID data, 2019",
        kind="federated",
        uploads="theta, u, u * theta",
        downloads="theta_G, U, V",
        verified="tests/test_baselines.py: test_fedcurv_pulls_towards_the_others",
    )
    traits = Traits(
        federated=True,
        why_not_asynchronous="U and V are sums over the clients of one round",
        needs_theta="the Fisher information of fedcurv is that of theta",
    )
    options: FedCurvOptions

    # ---- server half

    def configure(self, server: FedCurvServer, client: int, ctx: RoundContext) -> Download:
        """`counted`: whether the client has to take its own u and v out of U and V."""
        sums = {name: self.compact(value) for name, value in server.sums.items()}
        return Download({**server.shared(self.options), **sums}, {"counted": client in server.counted})

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        spec = super().upload_spec(layout, sent)
        return spec | {f"{kind}/{name}": each for kind in (U, V) for name, each in spec.items()}

    def aggregate(self, server: FedCurvServer, updates: Updates, ctx: ServerContext) -> None:
        if not (senders := updates.senders("weights")):
            return
        super().aggregate(server, updates, ctx)
        server.counted = [update.client for update in senders]
        server.sums = {name: updates.sum(name) for name in server.sums}

    # ---- client half

    def receive(self, client: FedCurvClient, download: Download, ctx: TaskContext) -> None:
        super().receive(client, download, ctx)
        sums = {name: tensors.dense(value) for name, value in download.tensors.items() if "/" in name}
        if download.fields["counted"]:
            sums = {name: value - tensors.dense(client.sent[name]) for name, value in sums.items()}
        # what rounding leaves of U - u where u is all of U may be negative
        client.others = {name: each.clamp(min=0) if name.startswith(f"{U}/") else each for name, each in sums.items()}

    def prepare(self, training: LocalTraining, client: FedCurvClient, ctx: TaskContext) -> None:
        for name, theta, gradient in self.trained(training) if client.others else ():
            u, v = (client.others[f"{kind}/{name}"].to(ctx.device) for kind in (U, V))
            weight = 2 * self.options.lambda_fedcurv
            training.penalties.append(partial(curvature_gradient, theta, u, v, weight, gradient))

    def upload(self, client: FedCurvClient, ctx: TaskContext) -> Tensors:
        information, theta = task_information(self, client, ctx), self.shared(client, ctx.layout)
        own = {f"{U}/{name}": u for name, u in information.items()}
        own |= {f"{V}/{name}": u * theta[name] for name, u in information.items()}
        client.sent = self.cut(own, client, ctx)
        return super().upload(client, ctx) | client.sent
