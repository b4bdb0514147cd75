"""STL, single-task learning: a separate network for every task, from the same start, with nothing shared or sent.

The paper's upper bound for methods that keep one network for all tasks, at as many times its size as there are tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from weft.lazy import torch
from weft.methods.context import TaskContext
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, Size, Table, TaskState, empty


class STLOptions(MethodOptions):
    biases: Literal["private"] = "private"  # tasks share nothing


@dataclass
class STLTask(TaskState):
    weights: torch.Tensor = field(default_factory=empty)


@dataclass
class STLClient(ClientState):
    tasks: Table[int, STLTask] = field(default_factory=Table)

    def size(self) -> Size:
        tasks = list(self.tasks.values())
        total = sum(task.weights.nbytes + task.private.nbytes for task in tasks)
        return Size(total, sum(4 * int(task.weights.count_nonzero()) for task in tasks))


class STL(Method):
    Options = STLOptions
    Client = STLClient
    Task = STLTask
    info = MethodInfo(
        citation="the baseline `Single Task Learning` of Yoon et al., ICML 2021",
        verified="tests/test_methods.py: test_tasks_of_stl_do_not_influence_one_another",
    )
    traits = Traits(not_combinable="each of its tasks has a separate network, which nothing else may change")

    def begin_task(self, client: STLClient, ctx: TaskContext) -> None:
        client.start(ctx, self.options)  # the initial weights again

    def end_task(self, client: STLClient, ctx: TaskContext) -> None:
        client.tasks[ctx.task] = replace(client.tasks[ctx.task], weights=client.weights.clone())

    def load_task(self, client: STLClient, task: int, ctx: TaskContext) -> None:
        super().load_task(client, task, ctx)
        if task in client.tasks:
            ctx.network.vector[: ctx.layout.weights] = client.tasks[task].weights
