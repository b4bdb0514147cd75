"""FedProx: FedAvg whose clients are held near to theta_G (Li et al., MLSys 2020).

    loss(theta) + mu / 2 * |theta - theta_G|^2            the square of the distance: several libraries forget it

theta_G is what the client received last. All that is averaged is held: weights, and biases where they are shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from weft.lazy import torch
from weft.methods import method
from weft.methods.federated import fedavg
from weft.methods.federated.fedavg import FedAvg
from weft.methods.method import Lesson, Work, in_parts

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.wire.message import Message


class Options(fedavg.Options):
    mu: float = Field(5e-3, ge=0, le=1e6)  # appendix A


class FedProx(FedAvg):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "Li et al., Federated optimization in heterogeneous networks, MLSys 2020"
    verified: ClassVar[str] = "tests/test_baselines.py: test_fedprox_pulls_towards_theta_g"
    options: Options

    def join(self, client: State, lesson: Lesson) -> None:
        super().join(client, lesson)
        self._note(client, self.shared(in_parts(lesson.initial(), lesson.layout), lesson.layout))

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        super().receive(client, message, lesson)
        self._note(client, self.shared(client.tensors, lesson.layout))

    @staticmethod
    def _note(client: State, theta_g: dict[str, torch.Tensor]) -> None:
        client.tensors |= {f"fedprox/{name}": value.clone() for name, value in theta_g.items()}

    def open(self, client: State, lesson: Lesson) -> Work:
        work = super().open(client, lesson)
        names, device = self.shared(client.tensors, lesson.layout), lesson.network.vector.device
        work.constants["fedprox"] = {name: client.tensor(f"fedprox/{name}").to(device) for name in names}
        return work

    def penalise(self, work: Work) -> None:
        super().penalise(work)
        if self.options.mu:
            layout = work.network.layout
            theta, gradient = self.shared(work.variables, layout), self.shared(work.gradients, layout)
            for name, theta_g in work.constants["fedprox"].items():
                proximal_gradient(theta[name], theta_g, self.options.mu, gradient[name])


def proximal_gradient(theta: torch.Tensor, theta_g: torch.Tensor, mu: float, by_theta: torch.Tensor) -> None:
    """The gradient of mu / 2 * |theta - theta_G|^2, added: mu * (theta - theta_G)."""
    by_theta.add_(theta, alpha=mu).add_(theta_g, alpha=-mu)
