"""STL, single task learning: a network of its own for every task, from the same start, with nothing shared or sent.

The paper's upper bound for methods that keep one network for all tasks, at as many times its size as there are tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from weft.lazy import torch
from weft.methods import method
from weft.methods.method import Lesson, Method, Size

if TYPE_CHECKING:
    from weft.core.storage import State


class Options(method.Options):
    biases: Literal["private"] = "private"  # nothing is shared between tasks, biases no more than weights


class STL(Method):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "the baseline `Single Task Learning` of Yoon et al., ICML 2021"
    verified: ClassVar[str] = "tests/test_methods.py: test_tasks_of_stl_do_not_influence_one_another"
    alone: ClassVar[str] = "each of its tasks has a network of its own, which nothing else may change"

    def begin(self, client: State, lesson: Lesson) -> None:
        self.join(client, lesson)  # the initial weights once more
        super().begin(client, lesson)

    def finish(self, client: State, lesson: Lesson) -> None:
        super().finish(client, lesson)
        client.archive[f"base/{lesson.step}"] = client.tensor("base").clone()

    def answer_for(self, client: State, step: int, lesson: Lesson) -> None:
        super().answer_for(client, step, lesson)
        if (finished := client.archive.get(f"base/{step}")) is not None:
            assert isinstance(finished, torch.Tensor)
            lesson.network.vector[: lesson.layout.weights] = finished

    def size(self, client: State) -> Size:
        total, paper = 0, 0
        for key, value in client.archive.items():
            assert isinstance(value, torch.Tensor)
            total += value.nbytes
            paper += 4 * int(value.count_nonzero()) if key.startswith("base/") else 0
        return Size(total, paper)
