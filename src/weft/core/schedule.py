"""Schedule: which client trains which task in which round. A function of the plan; nothing is remembered here.

Rounds are counted through the whole run. A client's task takes `rounds_per_task` of them; with async=task_clocks or
updates as many more or fewer as its seed says. All tasks of a client together always take the same number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from weft.methods.method import Method
from weft.plan import Plan
from weft.randomness import generator
from weft.scenarios import Scenario

if TYPE_CHECKING:
    from weft.core.progress import ClientProgress

TASK_END_ATTEMPTS = 3  # requests for what a client uploads at the end of a task, before the run continues without it


@dataclass(frozen=True, order=True)
class Assignment:
    """What one client does in one round."""

    client: int
    task: int
    round: int  # of the task; task-end requests are numbered after its last one
    ops: tuple[str, ...]
    exchanges: bool  # with the server; if not, the client works locally and nothing is sent
    first: bool = False  # the client's first download of the task: kb^(t) is sent along
    lossless: bool = False  # a measurement, which fault injection leaves alone
    kind: Literal["train", "task_end", "knowledge", "announce"] = "train"

    @property
    def request_id(self) -> str:
        return f"{self.task}.{self.round}.{self.client}"


@dataclass(frozen=True)
class TaskPosition:
    """A client's task, which of the task's rounds it is, and how many there are."""

    task: int
    round: int
    rounds: int


def task_lengths(plan: Plan, client: int, tasks: int) -> list[int]:
    """How many rounds each task of a client takes. What one takes more another takes less: the work stays the same."""
    lengths = [plan.rounds_per_task] * tasks
    if plan.asynchronous == "none":
        return lengths
    rng = generator(plan.seed, "rounds", client)
    most = int(plan.rounds_spread * plan.rounds_per_task)
    order = rng.permutation(tasks)
    for one, other in zip(order[::2], order[1::2], strict=False):  # of an odd number of tasks one keeps its length
        more = int(rng.integers(-most, most + 1))
        lengths[one] += more
        lengths[other] -= more
    return lengths


class Schedule:
    def __init__(self, plan: Plan, scenario: Scenario, method: Method):
        self.plan, self.traits = plan, method.traits
        self.lengths = [task_lengths(plan, client, len(tasks)) for client, tasks in enumerate(scenario.sequences)]
        self._ends = [list(accumulate(lengths)) for lengths in self.lengths]
        self.rounds = max(ends[-1] for ends in self._ends)
        self.selected = functools.cache(self._selected)

    def position(self, client: int, round_index: int) -> TaskPosition | None:
        """Where a client is in a round of the run; None after its last task."""
        for task, (end, length) in enumerate(zip(self._ends[client], self.lengths[client], strict=True)):
            if round_index < end:
                return TaskPosition(task, round_index - (end - length), length)
        return None

    def active(self, round_index: int) -> list[int]:
        return [client for client, ends in enumerate(self._ends) if round_index < ends[-1]]

    def lowest_task(self, round_index: int) -> int:
        """The first task that is not over for all clients."""
        positions = (self.position(client, round_index) for client in range(len(self._ends)))
        return min((place.task for place in positions if place is not None), default=max(map(len, self._ends)))

    def _selected(self, round_index: int) -> list[int]:
        """Alg. 1 line 5: C^(r) ~ C. Where nothing is sent all clients train in every round."""
        active, plan = self.active(round_index), self.plan
        if not self.traits.federated or plan.clients_per_round == "all" or plan.clients_per_round >= len(active):
            return active
        if plan.selection == "turns":
            count = len(self.lengths)
            places = [
                divmod(round_index * plan.clients_per_round + index, count) for index in range(plan.clients_per_round)
            ]
            chosen = {int(generator(plan.seed, "turns", turn).permutation(count)[place]) for turn, place in places}
            return sorted(chosen & set(active))
        rng = generator(plan.seed, "choose", *divmod(round_index, plan.rounds_per_task))
        return sorted(active[index] for index in rng.permutation(len(active))[: plan.clients_per_round])

    def training(self, round_index: int) -> list[int]:
        return self.active(round_index) if self.plan.train_unchosen else self.selected(round_index)

    def assignments(self, round_index: int, clients: Sequence[ClientProgress]) -> list[Assignment]:
        """Who does what in a round. What is uploaded once per task comes with a client's last planned reply."""
        found = []
        for client in self.training(round_index):
            place = self.position(client, round_index)
            assert place is not None
            exchanges = self.traits.federated and client in self.selected(round_index)
            end = round_index - place.round + place.rounds
            last = not any(client in self.training(later) for later in range(round_index + 1, end))
            found.append(self.training_round(client, place, exchanges, last, clients[client]))
        return found

    def training_round(
        self, client: int, place: TaskPosition, exchanges: bool, last: bool, known: ClientProgress
    ) -> Assignment:
        """One round of training; `last`: the client's last one of the task."""
        ops = ["receive", "train", "upload"] if exchanges else ["train"]
        if known.started < place.task:
            ops = ["begin", *ops]
        if last:
            ops.append("end")
            if self._shares(selected_last=exchanges and place.round == place.rounds - 1):
                ops.append("share")
            if self.plan.measured_model == "own":
                ops.append("test")
        first = exchanges and known.contacted < place.task
        return Assignment(client, place.task, place.round, tuple(ops), exchanges, first)

    def _shares(self, selected_last: bool) -> bool:
        """Whether a client uploads task knowledge; `selected_last`: it takes part in the task's last round."""
        return self.traits.shares_tasks == "all" or (self.traits.shares_tasks == "selected" and selected_last)

    def ending(self, round_index: int) -> list[tuple[int, TaskPosition]]:
        """The clients whose task is over with this round."""
        places = {client: self.position(client, round_index) for client in self.active(round_index)}
        return [(client, place) for client, place in places.items() if place and place.round == place.rounds - 1]

    def task_end(self, client: int, task: int, attempt: int, known: ClientProgress) -> Assignment | None:
        """After the last round: the test of the global model, what no round reached, and what was lost; None: nothing.

        The last attempt sends nothing over the network, since it was lost so often.
        """
        if known.tested >= task:
            return None
        local = attempt >= TASK_END_ATTEMPTS
        ops = ["begin"] if known.started < task else []
        shares = False
        if known.finished < task:
            shares = not ops and not local and self._shares(selected_last=True)
            ops += ["end", "share"] if shares else ["end"]
        needs_global = self.traits.federated and self.plan.measured_model == "global"  # theta_G, to be tested
        what = client, task, self.lengths[client][task] + attempt, (*ops, "test")
        return Assignment(*what, exchanges=shares or needs_global, lossless=not shares, kind="task_end")

    def task_knowledge(self, client: int, task: int) -> Assignment:
        """What is uploaded once per task, requested separately, after all that ends the task."""
        number = self.lengths[client][task] + TASK_END_ATTEMPTS + 1
        return Assignment(client, task, number, ("begin", "end", "share"), exchanges=True, kind="knowledge")

    def announcement(self, client: int, task: int) -> Assignment:
        """Which classes a task has; before its first download, for methods that share by class."""
        number = self.lengths[client][task] + TASK_END_ATTEMPTS + 2
        return Assignment(client, task, number, ("announce",), exchanges=True, kind="announce")
