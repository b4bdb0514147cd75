"""FedAvg: every round the server averages the clients' bodies (McMahan et al., AISTATS 2017).

    theta_G = sum over c of (n_c / n) * theta_c          n_c: examples of client c, n: of all that replied

Heads stay private. In the paper's continual setting each client starts its next task from theta_G.

With keep < 1 a client sends only that share of its values, those that it moved farthest from theta_G. A value's mean is
taken over its senders; where no client sent a value, each keeps its local one, as FedWeIT does with rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import Field

from weft.lazy import torch
from weft.methods.averaging import Average, Tensors, Updates, largest_places, merge
from weft.methods.context import Download, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, SharedServer, empty, shared_of
from weft.wire import codec, tensors
from weft.wire.tensors import Payload

if TYPE_CHECKING:
    from weft.networks.flat import Layout


class FedAvgOptions(MethodOptions):
    average: Average = "examples"  # McMahan et al. weight by n_c
    keep: float = Field(1.0, gt=0, le=1)  # the share of the values that is sent; all in McMahan et al.


@dataclass
class FedAvgClient(ClientState):
    received: torch.Tensor = field(default_factory=empty)  # theta_G as received; only for keep < 1


S = TypeVar("S", bound=SharedServer)
C = TypeVar("C", bound=FedAvgClient)


class FedAvg(Method, Generic[S, C]):
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

    def configure(self, server: S, client: int, ctx: RoundContext) -> Download:
        return Download(server.shared(self.options))

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        weights = TensorSpec("dense" if self.options.keep == 1 else "sparse", layout.weights)
        return shared_of(self.options, weights, TensorSpec("dense", layout.biases))

    def aggregate(self, server: S, updates: Updates, ctx: ServerContext) -> None:
        server.weights = updates.merge("weights", server.weights, self.options.average)
        server.biases = tensors.dense(updates.merge("biases", server.biases, self.options.average))

    def compact(self, vector: torch.Tensor) -> Payload:
        """A vector to send that is mostly 0, as with keep < 1: its nonzeros, whose indices take at most a byte each."""
        mostly_zero = self.options.keep < 1 and 2 * int(vector.count_nonzero()) < len(vector)
        return tensors.Sparse.of(vector) if mostly_zero else vector

    # ---- client half

    def receive(self, client: C, download: Download, ctx: TaskContext) -> None:
        client.weights = merge(download.tensors["weights"], client.weights)
        client.receive_biases(download.tensors.get("biases"))
        if self.options.keep < 1:
            client.received = client.weights.clone()  # APD trains in place

    def upload(self, client: C, ctx: TaskContext) -> Tensors:
        return self.cut(self.shared(client, ctx.layout), client, ctx)

    def cut(self, vectors: dict[str, torch.Tensor], client: C, ctx: TaskContext) -> Tensors:
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
