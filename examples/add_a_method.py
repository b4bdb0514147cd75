"""A method of your own, in one file: weights are held where the last task left them.

    loss(theta) + strength / 2 * |theta - theta at the end of the last task|^2

It is EWC with every weight equally important, and combines with whatever talks to a server:

    weft run demo method=examples/add_a_method.py:Anchored
    weft run demo method=fedavg+examples/add_a_method.py:Anchored method.strength=0.1
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from weft.core.storage import State
from weft.methods import method
from weft.methods.method import Lesson, Method, Work


class Options(method.Options):
    strength: float = Field(0.01, ge=0)  # unknown options and values out of range are refused with a clear line


class Anchored(Method):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "weights pulled towards those of the last task"
    options: Options

    def begin(self, client: State, lesson: Lesson) -> None:
        super().begin(client, lesson)
        client.tensors["anchored"] = client.tensor("base").clone()  # saved, resumed and moved with the client

    def open(self, client: State, lesson: Lesson) -> Work:
        work = super().open(client, lesson)
        if lesson.step > 0:
            work.constants["anchored"] = client.tensor("anchored").to(lesson.network.vector.device)
        return work

    def penalise(self, work: Work) -> None:
        super().penalise(work)
        if "anchored" in work.constants:
            away = work.variables["base"] - work.constants["anchored"]
            work.gradients["base"].add_(away, alpha=self.options.strength)
