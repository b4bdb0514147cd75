"""NewMethod: what it does, in one sentence (authors, title, venue).

    the formula that tells it from FedAvg, with its equation number

Fill in below. As it is, this is FedAvg. docs/add-a-method.md explains the hooks; remove those that you do not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from pydantic import Field

from weft.methods.averaging import Tensors, Updates
from weft.methods.context import Download, LocalTraining, ServerContext, TaskContext
from weft.methods.federated.fedavg import FedAvg, FedAvgClient, FedAvgOptions
from weft.methods.method import MethodInfo, Traits
from weft.methods.state import SharedServer


class NewMethodOptions(FedAvgOptions):
    strength: float = Field(0.0, ge=0)  # in a plan: method.strength=0.1; say where a default comes from


@dataclass
class NewMethodClient(FedAvgClient):
    """What a client remembers: tensors, numbers, text, lists and dictionaries, each with a default."""


@dataclass
class NewMethodServer(SharedServer):
    """What the server remembers besides theta_G."""


class NewMethod(FedAvg[NewMethodServer, NewMethodClient]):
    Options = NewMethodOptions
    Client = NewMethodClient
    Server = NewMethodServer
    info = MethodInfo(citation="authors, title, venue", kind="federated", uploads="theta", downloads="theta_G")
    traits = Traits(federated=True)
    options: NewMethodOptions

    def aggregate(self, server: NewMethodServer, updates: Updates, ctx: ServerContext) -> None:
        super().aggregate(server, updates, ctx)

    def receive(self, client: NewMethodClient, download: Download, ctx: TaskContext) -> None:
        super().receive(client, download, ctx)

    def prepare(self, training: LocalTraining, client: NewMethodClient, ctx: TaskContext) -> None:
        """Add penalties; or train in phases.

        training.split_head()  # the variables are now weights, biases and head
        training.frozen = lambda epoch: ("weights", "biases") if epoch == 0 else ("head",)
        """
        strength = self.options.strength
        for _, variable, gradient in self.trained(training) if strength else ():
            training.penalties.append(partial(gradient.add_, variable, alpha=strength))

    def upload(self, client: NewMethodClient, ctx: TaskContext) -> Tensors:
        return super().upload(client, ctx)
