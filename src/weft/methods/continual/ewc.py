"""EWC, elastic weight consolidation: hold what mattered to past tasks in place (Kirkpatrick et al., PNAS 2017).

    loss(theta) + lambda / 2 * sum over past tasks i of F_i * (theta - theta_i)^2

F_i is the diagonal of the Fisher information after task i: for each weight the mean over the task's training examples
of the squared gradient of log p(label | image). The sum needs two vectors for any number of tasks: sum of F_i and sum
of F_i * theta_i.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from pydantic import Field

from weft.lazy import torch
from weft.methods.context import LocalTraining, TaskContext
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, shared_of

FISHER_BATCH = 25  # as LeNet takes at once: a layer that is called twice for a batch needs a pass for each image


class EWCOptions(MethodOptions):
    lambda_ewc: float = Field(1.0, ge=0, le=1e9)  # appendix A: in [1e-2, 1]


@dataclass
class EWCClient(ClientState):
    curvature: dict[str, torch.Tensor] = field(default_factory=dict)  # sum of F_i, of weights and shared biases
    pulled: dict[str, torch.Tensor] = field(default_factory=dict)  # sum of F_i * theta_i


class EWC(Method):
    Options = EWCOptions
    Client = EWCClient
    info = MethodInfo(
        citation="Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, PNAS 2017",
        verified="tests/test_baselines.py: test_ewc_holds_what_mattered",
    )
    traits = Traits(needs_theta="the Fisher information of ewc is that of theta")
    options: EWCOptions

    def prepare(self, training: LocalTraining, client: EWCClient, ctx: TaskContext) -> None:
        for name, theta, gradient in self.trained(training) if client.curvature else ():
            sums = client.curvature[name].to(ctx.device), client.pulled[name].to(ctx.device)
            training.penalties.append(partial(curvature_gradient, theta, *sums, self.options.lambda_ewc, gradient))

    def end_task(self, client: EWCClient, ctx: TaskContext) -> None:
        if not client.rate.epochs or not self.options.lambda_ewc:
            return  # a task that was never trained has nothing to hold
        information = task_information(self, client, ctx)
        for name, theta in self.shared(client, ctx.layout).items():
            f = information[name]
            for sums, value in ((client.curvature, f), (client.pulled, f * theta)):
                sums[name] = value if name not in sums else sums[name] + value


def task_information(method: Method, client: ClientState, ctx: TaskContext) -> dict[str, torch.Tensor]:
    """The diagonal Fisher information of the client's model on its current task, for what tasks share."""
    from weft.networks.fisher import fisher  # loads torch

    method.load_task(client, ctx.task, ctx)
    found = fisher(ctx.network, ctx.load("train").in_order(FISHER_BATCH)).cpu()
    weights, body = ctx.layout.weights, ctx.layout.body
    return shared_of(method.options, found[:weights].clone(), found[weights:body].clone())


def curvature_gradient(
    theta: torch.Tensor, curvature: torch.Tensor, pulled: torch.Tensor, weight: float, by_theta: torch.Tensor
) -> None:
    """The gradient of weight / 2 * sum over i of F_i * (theta - theta_i)^2, added.

    It is weight * (theta * sum of F_i - sum of F_i * theta_i): two sums, `curvature` and `pulled`, for any number of i.
    """
    by_theta.addcmul_(theta, curvature, value=weight).add_(pulled, alpha=-weight)
