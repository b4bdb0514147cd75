"""FedProx: FedAvg whose clients are held near theta_G (Li et al., MLSys 2020).

    loss(theta) + mu / 2 * |theta - theta_G|^2            the square of the distance: several libraries forget it

theta_G is what the client received last. All that is averaged is held: weights, and biases where they are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from pydantic import Field

from weft.lazy import torch
from weft.methods.federated.fedavg import FedAvg, FedAvgClient, FedAvgOptions
from weft.methods.method import Download, LocalTraining, MethodInfo, MethodOptions, TaskContext


class FedProxOptions(FedAvgOptions):
    mu: float = Field(5e-3, ge=0, le=1e6)  # appendix A


@dataclass
class FedProxClient(FedAvgClient):
    anchor: dict[str, torch.Tensor] = field(default_factory=dict)  # theta_G as last received

    def start(self, ctx: TaskContext, options: MethodOptions) -> None:
        super().start(ctx, options)
        initial, weights = ctx.initial(), ctx.layout.weights
        self.anchor = {"weights": initial[:weights].clone()}
        if options.biases == "shared":
            self.anchor["biases"] = initial[weights:].clone()


class FedProx(FedAvg):
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

    def receive(self, client: FedProxClient, download: Download, ctx: TaskContext) -> None:  # type: ignore[override]
        super().receive(client, download, ctx)
        client.anchor = {name: value.clone() for name, value in self.shared(client, ctx.layout).items()}

    def prepare(self, training: LocalTraining, client: FedProxClient, ctx: TaskContext) -> None:
        if not self.options.mu:
            return
        theta, gradient = self.shared(training.variables, ctx.layout), self.shared(training.gradients, ctx.layout)
        for name, anchor in client.anchor.items():
            anchor = anchor.to(ctx.device)
            training.penalties.append(partial(proximal_gradient, theta[name], anchor, self.options.mu, gradient[name]))


def proximal_gradient(theta: torch.Tensor, theta_g: torch.Tensor, mu: float, by_theta: torch.Tensor) -> None:
    """The gradient of mu / 2 * |theta - theta_G|^2, added: mu * (theta - theta_G)."""
    by_theta.add_(theta, alpha=mu).add_(theta_g, alpha=-mu)
