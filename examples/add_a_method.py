"""A method in one file: hold the weights where the last task left them.

    loss(theta) + strength / 2 * |theta - theta at the end of the last task|^2

It is EWC with every weight equally important, and combines with any method that has a server half:

    weft run demo method=examples/add_a_method.py:Anchored
    weft run demo method=fedavg+examples/add_a_method.py:Anchored method.strength=0.1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from pydantic import Field

from weft.methods.context import LocalTraining, TaskContext
from weft.methods.method import Method, MethodInfo, MethodOptions
from weft.methods.state import ClientState, empty


class AnchoredOptions(MethodOptions):
    strength: float = Field(0.01, ge=0)  # unknown options and values out of range are refused with a clear line


@dataclass
class AnchoredClient(ClientState):
    last_weights: torch.Tensor = field(default_factory=empty)  # saved, resumed and moved with the client


class Anchored(Method):
    Options = AnchoredOptions
    Client = AnchoredClient
    info = MethodInfo(citation="weights pulled towards those of the last task")
    options: AnchoredOptions

    def begin_task(self, client: AnchoredClient, ctx: TaskContext) -> None:
        client.last_weights = client.weights.clone()

    def prepare(self, training: LocalTraining, client: AnchoredClient, ctx: TaskContext) -> None:
        if ctx.task == 0:
            return
        weights, gradient = training.variables["weights"], training.gradients["weights"]
        anchor = client.last_weights.to(ctx.device)

        def pull_to_anchor() -> None:
            gradient.add_(weights - anchor, alpha=self.options.strength)

        training.penalties.append(pull_to_anchor)
