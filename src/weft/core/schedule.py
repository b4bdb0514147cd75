"""Who learns which task in which round, and what a client is asked for: functions of the plan, with nothing remembered.

Rounds are counted through the whole run. A client's task takes `rounds_per_task` of them, or, with async=task_clocks or
updates, as many more or fewer as its seed says; what all its tasks take together is always the same.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from weft.methods.method import Method
from weft.plan import Plan
from weft.randomness import generator
from weft.scenarios import Scenario

CLOSING_ATTEMPTS = 3  # so often a client is asked for what it gives at a task's end, before the run goes on without it
Standing = Mapping[str, int]  # by client: the last task of which the server knows that it has got so far


class Visit(NamedTuple):
    """One client's part in one round."""

    client: int
    step: int
    round: int  # of the task; those after its last one close it
    ops: tuple[str, ...]
    exchanges: bool  # with the server; if not, the client works by itself and nothing crosses the wire
    first: bool = False  # its first exchange of the task: kb^(t) comes along
    sure: bool = False  # a measurement, which faults on purpose leave alone
    at: int = 0  # the run's round, or how many answers had been merged, when it was asked
    sent: float = 0.0  # on the engine's clock
    told: Mapping[str, Any] = {}  # the numbers that came with the request

    @property
    def request_id(self) -> str:
        return f"{self.step}.{self.round}.{self.client}"


def task_lengths(plan: Plan, client: int, tasks: int) -> list[int]:
    """How many rounds each task of a client takes. What one takes more another takes less: the work stays the same."""
    lengths = [plan.rounds_per_task] * tasks
    if plan.asynchronous == "none":
        return lengths
    rng = generator(plan.seed, "rounds", client)
    most = int(plan.rounds_spread * plan.rounds_per_task)
    order = rng.permutation(tasks)
    for one, other in zip(order[::2], order[1::2], strict=False):  # with an odd number of tasks one is left as it is
        more = int(rng.integers(-most, most + 1))
        lengths[one] += more
        lengths[other] -= more
    return lengths


@dataclass(frozen=True)
class Place:
    """Where a client is: its task, which of the task's rounds it is, and how many there are."""

    step: int
    round: int
    rounds: int


class Schedule:
    def __init__(self, plan: Plan, scenario: Scenario, method: Method):
        self.plan, self.method = plan, method
        self.lengths = [task_lengths(plan, client, len(tasks)) for client, tasks in enumerate(scenario.sequences)]
        self._ends = [list(accumulate(lengths)) for lengths in self.lengths]
        self.rounds = max(ends[-1] for ends in self._ends)
        self.chosen = functools.cache(self._chosen)

    def place(self, client: int, round_index: int) -> Place | None:
        """Where a client is in a round of the run; None if all its tasks are over."""
        for step, (end, length) in enumerate(zip(self._ends[client], self.lengths[client], strict=True)):
            if round_index < end:
                return Place(step, round_index - (end - length), length)
        return None

    def active(self, round_index: int) -> list[int]:
        return [client for client, ends in enumerate(self._ends) if round_index < ends[-1]]

    def lowest_step(self, round_index: int) -> int:
        """The task that is over for everybody up to here."""
        places = (self.place(client, round_index) for client in range(len(self._ends)))
        return min((place.step for place in places if place is not None), default=max(map(len, self._ends)))

    def _chosen(self, round_index: int) -> list[int]:
        """Alg. 1 line 5: C^(r) ~ C. Where nothing is sent nobody waits for others: all clients work in every round."""
        active, plan = self.active(round_index), self.plan
        if not self.method.talks or plan.clients_per_round == "all" or plan.clients_per_round >= len(active):
            return active
        rng = generator(plan.seed, "choose", *divmod(round_index, plan.rounds_per_task))
        return sorted(active[place] for place in rng.permutation(len(active))[: plan.clients_per_round])

    def working(self, round_index: int) -> list[int]:
        return self.active(round_index) if self.plan.train_unchosen else self.chosen(round_index)

    def visits(self, round_index: int, begun: Standing, met: Standing) -> list[Visit]:
        """Who does what in a round. What is given once a task rides on a client's last planned reply."""
        found = []
        for client in self.working(round_index):
            place = self.place(client, round_index)
            assert place is not None
            exchanges = self.method.talks and client in self.chosen(round_index)
            end = round_index - place.round + place.rounds
            last = not any(client in self.working(later) for later in range(round_index + 1, end))
            visit = self.lesson(client, place, exchanges, last, begun, met)
            found.append(visit._replace(at=round_index))
        return found

    def lesson(self, client: int, place: Place, exchanges: bool, last: bool, begun: Standing, met: Standing) -> Visit:
        """One round of learning; `last`: the client's last one of the task."""
        ops = ["receive", "train", "send"] if exchanges else ["train"]
        if begun.get(str(client), -1) < place.step:
            ops = ["begin", *ops]
        if last:
            ops.append("finish")
            if self.method.wants_gift(chosen_last=exchanges and place.round == place.rounds - 1):
                ops.append("give")
            if self.plan.measured_model == "own":
                ops.append("test")
        first = exchanges and met.get(str(client), -1) < place.step
        return Visit(client, place.step, place.round, tuple(ops), exchanges, first)

    def ending(self, round_index: int) -> list[tuple[int, Place]]:
        """The clients whose task is over with this round."""
        places = {client: self.place(client, round_index) for client in self.active(round_index)}
        return [(client, place) for client, place in places.items() if place and place.round == place.rounds - 1]

    def closing(
        self, client: int, place: Place, begun: Standing, finished: Standing, tested: Standing, by_itself: bool
    ) -> Visit | None:
        """After the last round: the test of the global model, what no round ever reached, and whose answer was lost.

        `by_itself`: nothing is to cross the wire, since it was lost so often.
        """
        step, name = place.step, str(client)
        if tested.get(name, -1) >= step:
            return None
        ops = ["begin"] if begun.get(name, -1) < step else []
        gives = False
        if finished.get(name, -1) < step:
            gives = not ops and not by_itself and self.method.wants_gift(chosen_last=True)
            ops += ["finish", "give"] if gives else ["finish"]
        brings = self.method.talks and self.plan.measured_model == "global"  # theta_G, to be tried on
        return Visit(client, step, place.round, (*ops, "test"), exchanges=gives or brings, sure=not gives)

    def is_over(self, visit: Visit) -> bool:
        """Is it about a task whose rounds are over?"""
        return visit.round >= self.lengths[visit.client][visit.step]

    def gift(self, client: int, place: Place) -> Visit:
        """What is given once a task, asked for by itself, after all that closes it."""
        return Visit(
            client, place.step, place.rounds + CLOSING_ATTEMPTS + 1, ("begin", "finish", "give"), exchanges=True
        )
