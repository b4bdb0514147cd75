"""Stable-SGD: a training regime that forgets less (Mirzadeh et al., NeurIPS 2020).

    rate of task t = rate * decay^t;    dropout;    small batches;    plain SGD

A larger rate and dropout find wider minima, and a rate that falls with each task moves less and less away from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from weft.methods import method
from weft.methods.method import Lesson, Method, Work

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.plan import Plan


class Options(method.Options):
    decay: float = Field(0.85, gt=0, le=1)  # of the rate, with each task; users reproduced it with these two
    dropout: float = Field(0.1, ge=0, lt=1)  # of the inputs of fully connected layers, the network's first excepted


class StableSGD(Method):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "Mirzadeh et al., Understanding the role of training regimes, NeurIPS 2020"
    verified: ClassVar[str] = "tests/test_baselines.py: test_stable_sgd_lowers_the_rate_with_each_task"
    optimizer: ClassVar[Literal["adam", "sgd"]] = "sgd"
    sgd_rate: ClassVar[float] = 0.05  # 0.15, which others needed, breaks this LeNet: docs/experiments.md
    options: Options

    def first_rate(self, plan: Plan, step: int) -> float:
        return super().first_rate(plan, step) * self.options.decay**step

    def open(self, client: State, lesson: Lesson) -> Work:
        work = super().open(client, lesson)
        work.dropout = self.options.dropout
        return work
