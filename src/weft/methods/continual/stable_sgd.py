"""Stable-SGD: a training regime that forgets less (Mirzadeh et al., NeurIPS 2020).

    rate of task t = rate * decay^t;    dropout;    small batches;    plain SGD

A larger rate and dropout find wider minima, and a rate that falls with each task moves less and less away from them.
"""

from __future__ import annotations

from pydantic import Field

from weft.methods.context import TaskContext
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState


class StableSGDOptions(MethodOptions):
    decay: float = Field(0.85, gt=0, le=1)  # of the rate, with each task; users reproduced it with these two
    dropout: float = Field(0.1, ge=0, lt=1)  # Mirzadeh et al.


class StableSGD(Method):
    Options = StableSGDOptions
    info = MethodInfo(
        citation="Mirzadeh et al., Understanding the role of training regimes, NeurIPS 2020",
        verified="tests/test_baselines.py: test_stable_sgd_lowers_the_rate_with_each_task",
    )
    traits = Traits(sgd_only=True, sgd_rate=0.05)  # 0.15, which others needed, breaks this LeNet: docs/experiments.md
    options: StableSGDOptions

    def begin_task(self, client: ClientState, ctx: TaskContext) -> None:
        client.rate.rate *= self.options.decay**ctx.task
