"""SCAFFOLD: FedAvg with control variates against client drift (Karimireddy et al., ICML 2020).

    step          y <- y - rate * (g(y) - c_i + c)                       c_i: the client's variate, c: the server's
    after K       c_i+ = c_i - c + (x - y) / (sum of the K rates)        option II; x: theta_G as received
    server        x <- x + server_rate * mean of (y_i - x)
                  c <- c + |S| / N * mean of (c_i+ - c_i)                S: clients that replied, of N

It sends twice as much as FedAvg both ways. The formulas take every step to be rate * gradient, so the optimizer is SGD.
A client's variate stays at the client; only its change is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from weft.lazy import torch
from weft.methods.averaging import Average, Tensors, Updates
from weft.methods.context import Download, LocalTraining, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.federated.fedavg import FedAvg, FedAvgClient, FedAvgOptions
from weft.methods.method import MethodInfo, MethodOptions, Traits
from weft.methods.state import SharedServer, shared_of
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout


class ScaffoldOptions(FedAvgOptions):
    average: Average = "equal"  # Karimireddy et al. take the plain mean
    server_rate: float = Field(1.0, gt=0, le=100)  # the server's step size, 1 in their experiments
    variates: bool = True  # off: they stay 0, and with server_rate 1 it is FedAvg

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        if self.keep < 1 and self.server_rate != 1:
            raise ValueError("server_rate needs keep=1: a server that receives some values does not hold all of x")
        return self


@dataclass
class ScaffoldServer(SharedServer):
    variate: dict[str, torch.Tensor] = field(default_factory=dict)  # c

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        super().start(ctx, options)
        self.variate = {name: torch.zeros_like(tensors.dense(value)) for name, value in self.shared(options).items()}


@dataclass
class ScaffoldClient(FedAvgClient):
    variate: dict[str, torch.Tensor] = field(default_factory=dict)  # c_i
    server_variate: dict[str, torch.Tensor] = field(default_factory=dict)  # c, as last received
    change: dict[str, torch.Tensor] = field(default_factory=dict)  # c_i+ - c_i of the last round

    def start(self, ctx: TaskContext, options: MethodOptions) -> None:
        super().start(ctx, options)
        zeros = shared_of(options, torch.zeros(ctx.layout.weights), torch.zeros(ctx.layout.biases))
        self.variate, self.server_variate = zeros, dict(zeros)


class Scaffold(FedAvg[ScaffoldServer, ScaffoldClient]):
    Options = ScaffoldOptions
    Server = ScaffoldServer
    Client = ScaffoldClient
    info = MethodInfo(
        citation="Karimireddy et al., SCAFFOLD: stochastic controlled averaging, ICML 2020",
        kind="federated",
        uploads="theta, change of c_i",
        downloads="theta_G, c",
        verified="tests/test_baselines.py: test_scaffold_finds_the_optimum_that_fedavg_misses",
    )
    traits = Traits(
        federated=True,
        sgd_only=True,
        sgd_rate=0.02,
        why_not_asynchronous="its variates are the mean over clients that started from one theta_G",
    )
    options: ScaffoldOptions

    # ---- server half

    def configure(self, server: ScaffoldServer, client: int, ctx: RoundContext) -> Download:
        variates = {f"variate/{name}": self.compact(value) for name, value in server.variate.items()}
        return Download({**server.shared(self.options), **variates})

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        spec = super().upload_spec(layout, sent)
        return spec | {f"variate/{name}": each for name, each in spec.items()}

    def aggregate(self, server: ScaffoldServer, updates: Updates, ctx: ServerContext) -> None:
        if not updates.senders("weights"):
            return
        before = {name: tensors.dense(value) for name, value in server.shared(self.options).items()}
        super().aggregate(server, updates, ctx)
        for name, old in before.items():
            if self.options.server_rate != 1:
                new = tensors.dense(server.shared(self.options)[name])
                setattr(server, name, old + self.options.server_rate * (new - old))
            # |S| / N times their mean is their sum / N
            server.variate[name] = server.variate[name] + updates.sum(f"variate/{name}") / ctx.plan.clients

    # ---- client half

    def receive(self, client: ScaffoldClient, download: Download, ctx: TaskContext) -> None:
        super().receive(client, download, ctx)
        received = {name: download.tensors[f"variate/{name}"] for name in client.server_variate}
        client.server_variate = {name: tensors.dense(value) for name, value in received.items()}

    def prepare(self, training: LocalTraining, client: ScaffoldClient, ctx: TaskContext) -> None:
        shared = list(self.trained(training))
        started = {name: theta.clone() for name, theta, _ in shared}
        for name, _, gradient in shared if self.options.variates else ():
            correction = client.server_variate[name] - client.variate[name]  # c - c_i, in each step of the round
            training.penalties.append(partial(gradient.add_, correction.to(ctx.device)))
        rates = 0.0

        def add_rate(rate: float) -> None:
            nonlocal rates
            rates += rate

        def store_change() -> None:
            if not rates:  # nothing was trained
                return
            for name, theta, _ in shared:
                change = (started[name] - theta) / rates - client.server_variate[name].to(theta)
                if not self.options.variates:
                    change = torch.zeros_like(change)
                if name == "biases":
                    change[ctx.layout.shared_statistics] = 0  # statistics are counted and not trained
                client.change[name] = change.cpu()

        training.after_step.append(add_rate)
        training.on_end.append(store_change)

    def upload(self, client: ScaffoldClient, ctx: TaskContext) -> Tensors:
        names = self.shared(client, ctx.layout)
        changes = self.cut({f"variate/{name}": client.change[name] for name in names}, client, ctx)
        # c_i moves by what was sent and no more: c stays the mean of all c_i
        client.variate = {name: client.variate[name] + tensors.dense(changes[f"variate/{name}"]) for name in names}
        return super().upload(client, ctx) | changes
