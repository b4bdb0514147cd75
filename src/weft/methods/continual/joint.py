"""joint: each client learns all its tasks at once, the bound for learning them one after another.

The one exception to the rule that a task's data is seen only while it is being trained. One body, a head for each task,
and batches drawn from all of the client's tasks. An epoch is as many images as the current task has, so that over a
whole run it costs what every other method costs; before the last task the numbers are those of a model half trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from weft.methods import method
from weft.methods.method import Lesson, Method, Size

if TYPE_CHECKING:
    from weft.core.storage import State


class Options(method.Options):
    biases: Literal["shared"] = "shared"  # there is one network for all tasks


class Joint(Method):
    options_class: ClassVar[type[method.Options]] = Options
    kind: ClassVar[Literal["local", "federated", "bound"]] = "bound"
    citation: ClassVar[str] = "multi-task learning, Caruana, Machine Learning 1997"
    verified: ClassVar[str] = "tests/test_baselines.py: test_joint_sees_every_task_from_the_first_step"
    sees_all: ClassVar[bool] = True
    alone: ClassVar[str] = "it sees all tasks at once, so there is nothing to guard and nobody to ask"

    def begin(self, client: State, lesson: Lesson) -> None:
        if "private" not in client.tensors:  # the heads of all tasks are there from the start
            super().begin(client, lesson)

    def finish(self, client: State, lesson: Lesson) -> None:
        """Nothing is put away: no task is ever over."""

    def size(self, client: State) -> Size:
        own = client.tensor("base")
        return Size(own.nbytes + client.tensor("private").nbytes, 4 * int(own.count_nonzero()))
