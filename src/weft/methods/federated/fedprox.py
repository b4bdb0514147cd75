"""FedProx: FedAvg whose clients are held near theta_G (Li et al., MLSys 2020).

    loss(theta) + mu / 2 * |theta - theta_G|^2            the square of the distance: several libraries forget it

theta_G is what the client received last. All that is averaged is held: weights, and biases where they are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from pydantic import Field

from weft.lazy import torch
from weft.methods.context import Download, LocalTraining, TaskContext
from weft.methods.federated.fedavg import FedAvg, FedAvgClient, FedAvgOptions
from weft.methods.method import MethodInfo
from weft.methods.state import SharedServer


class FedProxOptions(FedAvgOptions):
    mu: float = Field(5e-3, ge=0, le=1e6)  # appendix A


@dataclass
class FedProxClient(FedAvgClient):
    anchor: dict[str, torch.Tensor] = field(default_factory=dict)  # theta_G as last received


class FedProx(FedAvg[SharedServer, FedProxClient]):
    Options = FedProxOptions
    Client = FedProxClient
    info = MethodInfo(
        citation="Li et al., Federated optimization in heterogeneous networks, MLSys 2020",
        kind="federated",
        uploads="theta",
        downloads="theta_G",
        verified="tests/test_baselines.py: test_fedprox_pulls_towards_theta_g",
    )
    options: FedProxOptions

    def begin_task(self, client: FedProxClient, ctx: TaskContext) -> None:
        if not client.anchor:
            self._set_anchor(client, ctx)  # the initial theta_G, drawn from the seed

    def receive(self, client: FedProxClient, download: Download, ctx: TaskContext) -> None:
        super().receive(client, download, ctx)
        self._set_anchor(client, ctx)

    def _set_anchor(self, client: FedProxClient, ctx: TaskContext) -> None:
        client.anchor = {name: value.clone() for name, value in self.shared(client, ctx.layout).items()}

    def prepare(self, training: LocalTraining, client: FedProxClient, ctx: TaskContext) -> None:
        for name, theta, gradient in self.trained(training) if self.options.mu else ():
            anchor = client.anchor[name].to(ctx.device)
            training.penalties.append(partial(proximal_gradient, theta, anchor, self.options.mu, gradient))


def proximal_gradient(theta: torch.Tensor, theta_g: torch.Tensor, mu: float, by_theta: torch.Tensor) -> None:
    """The gradient of mu / 2 * |theta - theta_G|^2, added: mu * (theta - theta_G)."""
    by_theta.add_(theta, alpha=mu).add_(theta_g, alpha=-mu)
