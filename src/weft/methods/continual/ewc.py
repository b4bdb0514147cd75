"""EWC, elastic weight consolidation: what mattered to past tasks is held in place (Kirkpatrick et al., PNAS 2017).

    loss(theta) + lambda / 2 * sum over past tasks i of F_i * (theta - theta_i)^2

F_i is the diagonal of the Fisher information after task i: for each weight the mean over the task's training examples
of the squared gradient of log p(label | image). The sum needs two vectors however many tasks there were: sum of F_i and
sum of F_i * theta_i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from weft.lazy import lazy, torch
from weft.methods import method
from weft.methods.fedweit.formulas import curvature_gradient
from weft.methods.method import Lesson, Method, Work, in_parts

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.networks import fisher
else:
    fisher = lazy("weft.networks.fisher")

FISHER_BATCH = 25  # as LeNet takes at once: a layer that is called twice for a batch needs a pass for each image


class Options(method.Options):
    lambda_ewc: float = Field(1.0, ge=0, le=1e9)  # appendix A: in [1e-2, 1]


class EWC(Method):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "Kirkpatrick et al., Overcoming catastrophic forgetting in neural networks, PNAS 2017"
    verified: ClassVar[str] = "tests/test_baselines.py: test_ewc_holds_what_mattered"
    needs_theta: ClassVar[str] = "the Fisher information of ewc is that of theta"
    options: Options

    def open(self, client: State, lesson: Lesson) -> Work:
        work = super().open(client, lesson)
        if lesson.step > 0 and "curvature/base" in client.tensors:
            names, device = self.shared(client.tensors, lesson.layout), lesson.network.vector.device
            work.constants["ewc"] = {
                name: tuple(client.tensor(f"{kind}/{name}").to(device) for kind in ("curvature", "pulled"))
                for name in names
            }
        return work

    def penalise(self, work: Work) -> None:
        super().penalise(work)
        layout = work.network.layout
        theta, gradient = self.shared(work.variables, layout), self.shared(work.gradients, layout)
        for name, (curvature, pulled) in work.constants.get("ewc", {}).items():
            curvature_gradient(theta[name], curvature, pulled, self.options.lambda_ewc, gradient[name])

    def finish(self, client: State, lesson: Lesson) -> None:
        super().finish(client, lesson)
        if not client.numbers["schedule"]["epochs"] or not self.options.lambda_ewc:
            return  # a task that was never trained has nothing to hold
        information = task_information(self, client, lesson)
        for name, theta in self.shared(client.tensors, lesson.layout).items():
            f = information[name]
            for kind, value in (("curvature", f), ("pulled", f * theta)):
                key = f"{kind}/{name}"
                client.tensors[key] = value if key not in client.tensors else client.tensor(key) + value


def task_information(method: Method, client: State, lesson: Lesson) -> dict[str, torch.Tensor]:
    """The diagonal Fisher information of the client's model on its current task, for what tasks share."""
    method.answer_for(client, lesson.step, lesson)
    found = fisher.fisher(lesson.network, lesson.load("train").in_order(FISHER_BATCH)).cpu()
    shared = method.shared(in_parts(found, lesson.layout), lesson.layout)
    return {name: value.clone() for name, value in shared.items()}
