"""joint: each client learns all its tasks at once, the bound for learning them one after another.

The one exception to the rule that a task's data is seen only while it is trained. One body, a head for each task, and
batches drawn from all of the client's tasks. An epoch is as many images as the current task has, so that a whole run
costs what every other method costs; before the last task the numbers are those of a model half trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, Size


class JointOptions(MethodOptions):
    biases: Literal["shared"] = "shared"  # there is one network for all tasks


@dataclass
class JointClient(ClientState):
    def size(self) -> Size:
        return Size(self.weights.nbytes + self.private.nbytes, 4 * int(self.weights.count_nonzero()))


class Joint(Method):
    Options = JointOptions
    Client = JointClient
    info = MethodInfo(
        citation="multi-task learning, Caruana, Machine Learning 1997",
        kind="bound",
        verified="tests/test_baselines.py: test_joint_sees_every_task_from_the_first_step",
    )
    traits = Traits(
        sees_all_tasks=True,
        not_combinable="it sees all tasks at once, so there is no earlier task to protect",
    )
