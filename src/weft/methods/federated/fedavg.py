"""FedAvg: every round the server averages the clients' bodies (McMahan et al., AISTATS 2017).

    theta_G = sum over c of (n_c / n) * theta_c          n_c: examples of client c, n: of all that replied

Heads stay private. In the paper's continual setting each client starts its next task from theta_G.

With keep < 1 a client sends only that share of its values, those that it moved farthest from theta_G. A value's mean is
taken over its senders; where nobody sent a value each client keeps its own, as FedWeIT does with rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from weft.lazy import torch
from weft.methods.averaging import Average, Tensors, Updates, merge
from weft.methods.fedweit.formulas import largest_places
from weft.methods.method import (
    Download,
    Method,
    MethodInfo,
    MethodOptions,
    RoundContext,
    ServerContext,
    TaskContext,
    TensorSpec,
    Traits,
    receive_biases,
)
from weft.methods.state import ClientState, SharedServer, empty
from weft.wire import codec, tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout


class FedAvgOptions(MethodOptions):
    average: Average = "examples"  # McMahan et al. weight by n_c
    keep: float = Field(1.0, gt=0, le=1)  # the share of the values that is sent; all in McMahan et al.


@dataclass
class FedAvgClient(ClientState):
    received: torch.Tensor = field(default_factory=empty)  # theta_G as received; only for keep < 1


class FedAvg(Method):
    Options: ClassVar[type[MethodOptions]] = FedAvgOptions
    Server = SharedServer
    Client = FedAvgClient
    info = MethodInfo(
        citation="McMahan et al., Communication-efficient learning of deep networks, AISTATS 2017",
        kind="federated",
        uploads="theta",
        downloads="theta_G",
        verified="tests/test_methods.py: test_fedavg_mean_by_hand",
    )
    traits = Traits(federated=True, asynchronous=True)
    options: FedAvgOptions

    # ---- server half

    def configure(self, server: SharedServer, client: int, ctx: RoundContext) -> Download:
        return Download(server.shared(self.options))

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        spec = {"weights": TensorSpec("dense" if self.options.keep == 1 else "sparse", layout.weights)}
        if self.options.biases == "shared":
            spec["biases"] = TensorSpec("dense", layout.body - layout.weights)
        return spec

    def aggregate(self, server: SharedServer, updates: Updates, ctx: ServerContext) -> None:
        server.weights = updates.merge("weights", server.weights, self.options.average)
        server.biases = tensors.dense(updates.merge("biases", server.biases, self.options.average))

    # ---- client half

    def receive(self, client: FedAvgClient, download: Download, ctx: TaskContext) -> None:
        client.weights = merge(download.tensors["weights"], client.weights)
        receive_biases(client, download)
        if self.options.keep < 1:
            client.received = client.weights.clone()  # APD trains in place

    def upload(self, client: FedAvgClient, ctx: TaskContext) -> Tensors:
        return self.cut(self.shared(client, ctx.layout), client, ctx)

    def cut(self, vectors: dict[str, torch.Tensor], client: FedAvgClient, ctx: TaskContext) -> Tensors:
        """What is sent of vectors called `weights` or `.../weights`: with keep < 1 the same positions of each."""
        # as they will arrive, since some methods remember what they sent
        vectors = {name: codec.arriving(vector, ctx.plan.wire) for name, vector in vectors.items()}
        if self.options.keep == 1:
            return {name: vector.clone() for name, vector in vectors.items()}
        moved = (client.weights - client.received).abs()
        count = math.ceil(self.options.keep * len(moved) - 1e-9)
        chosen = torch.nonzero(largest_places(moved, count)).view(-1)
        found: Tensors = {}
        for name, vector in vectors.items():
            whole = name.rpartition("/")[2] != "weights"  # biases are few
            found[name] = vector.clone() if whole else tensors.Sparse(len(vector), chosen.int(), vector[chosen])
        return found
