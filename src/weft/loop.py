"""Algorithm 1 of the paper, for any method: the only loop over tasks and rounds.

The loop knows no method and no engine. It decides who is asked for what and when replies are merged; every request and
reply is encoded to bytes and weighed in the ledger. It can stop after any round and go on from a checkpoint with the
same bits, because nothing is remembered but `Progress` and the server's state, and all that is random is drawn anew
from the plan's seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from weft.engines import Engine, Request
from weft.errors import Problem
from weft.ledger import Entry, Ledger
from weft.message import Message, decode, encode
from weft.methods.base import Method
from weft.plan import Plan
from weft.randomness import generator
from weft.scenarios import Scenario
from weft.state import State

SERVER_MEMORY = 64 << 20  # bytes of knowledge base that stay in memory; the rest is read from disk when it is sent


@dataclass
class Progress:
    """Where the run is: the next step and round (after the last round a task is closed), and what a summary needs."""

    step: int = 0
    round: int = 0
    images: int = 0  # trained on so far
    seconds: float = 0.0  # worked so far, in all sessions
    validation: dict[str, float] = field(default_factory=dict)  # by "client/step", at the task's end
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)  # by client, as last reported
    densities: dict[str, list[float]] = field(default_factory=dict)  # of each client's A's, as last reported


class Listener(Protocol):
    """Whoever keeps the record of a run and shows it."""

    def weighed(self, entries: list[Entry]) -> None: ...
    def answered(self, client: int, step: int, round_index: int, seconds: float, numbers: dict[str, Any]) -> None: ...
    def tested(self, client: int, step: int, accuracies: list[float]) -> None: ...
    def round_done(self, progress: Progress) -> None: ...


class Visit(NamedTuple):
    """One client's part in one round."""

    client: int
    ops: tuple[str, ...]
    exchanges: bool  # with the server; if not, the client works by itself and nothing crosses the wire
    first: bool = False  # its first exchange of the task: kb^(t) comes along


@dataclass
class Federation:
    """Everything a run is made of."""

    plan: Plan
    scenario: Scenario
    method: Method
    engine: Engine
    server: State
    ledger: Ledger
    progress: Progress
    listener: Listener

    def run(self) -> None:
        """Algorithm 1, from where `progress` stands. Line 1 (B_c starts as theta_G) is a method's `join`."""
        rounds, progress = self.plan.rounds_per_task, self.progress
        for step in range(progress.step, self.scenario.steps):  # line 2; line 3 is the method's, at `first`
            active = [client for client, tasks in enumerate(self.scenario.sequences) if step < len(tasks)]
            chosen = [choose(self.plan, self.method, active, step, r) for r in range(rounds)]  # line 5
            for round_index in range(progress.round, rounds):  # line 4
                asked = visits(self.plan, self.method, active, chosen, round_index)
                replies = self.exchange(asked, step, round_index)  # lines 6 to 8
                self.method.aggregate(self.server, replies)  # line 9
                progress.step, progress.round = step, round_index + 1
                self.listener.round_done(progress)
            asked = closing_visits(self.plan, self.method, active, chosen)
            self.exchange(asked, step, rounds)  # the rest of line 11, and tests
            progress.step, progress.round = step + 1, 0
            self.listener.round_done(progress)

    def exchange(self, asked: list[Visit], step: int, round_index: int) -> list[Message]:
        """Ask, and wait for all; the replies of those that exchanged with the server, sorted by client."""
        by_client = {visit.client: visit for visit in asked}
        replies: dict[int, Message] = {}
        for client, wire, seconds in self.engine.exchange(self._requests(asked, step, round_index)):
            reply = decode(wire)
            if reply.error:
                raise Problem(f"client {client} failed in task {step}, round {round_index}: {reply.error}")
            visit = by_client[client]
            if visit.exchanges or reply.tensors:
                self._weigh("c2s", client, step, round_index, wire)
            if "give" in visit.ops:  # line 11: kb <- kb + {A}
                self.method.collect(self.server, client, step, reply)
                self.server.archive.spill(SERVER_MEMORY)
            self.listener.answered(client, step, round_index, seconds, reply.numbers)
            replies[client] = reply
        for client in sorted(replies):  # in an order that does not depend on who was fastest
            self._note(client, step, replies[client].numbers)
        return [replies[client] for client in sorted(replies) if by_client[client].exchanges]

    def _requests(self, asked: list[Visit], step: int, round_index: int) -> Iterator[Request]:
        for client, ops, exchanges, first in asked:
            tensors, numbers = self.method.brief(self.server, client, step, first, self.plan) if exchanges else ({}, {})
            name = f"client-{client}"
            request_id = f"{step}.{round_index}.{client}"
            request = Message("server", name, request_id, ops, step, round_index, tensors, numbers)
            wire = encode(request, self.plan.wire)
            self.server.archive.spill(SERVER_MEMORY)
            if exchanges:
                self._weigh("s2c", client, step, round_index, wire)
            yield Request(client, wire)

    def _weigh(self, direction: Any, client: int, step: int, round_index: int, wire: bytes) -> None:
        self.listener.weighed(self.ledger.enter(direction, client, step, round_index, wire))

    def _note(self, client: int, step: int, numbers: dict[str, Any]) -> None:
        self.progress.images += numbers.get("images", 0)
        if numbers.get("task_valid_accuracy") is not None:
            self.progress.validation[f"{client}/{step}"] = numbers["task_valid_accuracy"]
        if "size" in numbers:
            self.progress.sizes[str(client)] = numbers["size"]
            self.progress.densities[str(client)] = numbers["density"]
        if "accuracy" in numbers:
            self.listener.tested(client, step, numbers["accuracy"])


def choose(plan: Plan, method: Method, active: list[int], step: int, round_index: int) -> list[int]:
    """Alg. 1 line 5: C^(r) ~ C. Where nothing is sent there is nobody to wait for: all clients work in every round."""
    if not method.talks or plan.clients_per_round == "all" or plan.clients_per_round >= len(active):
        return active
    rng = generator(plan.seed, "choose", step, round_index)
    return sorted(active[place] for place in rng.permutation(len(active))[: plan.clients_per_round])


def visits(plan: Plan, method: Method, active: list[int], chosen: list[list[int]], round_index: int) -> list[Visit]:
    """Who does what in a round. What is given once a task rides on a client's last planned reply."""
    found = []
    working = [set(active) if plan.train_unchosen else set(those) for those in chosen]
    for client in sorted(working[round_index]):
        rounds = [r for r, those in enumerate(working) if client in those]
        exchanges = method.talks and client in chosen[round_index]
        first = exchanges and not any(client in those for those in chosen[:round_index])
        ops = ["train"]
        if exchanges:
            ops = ["receive", "train", "send"]
        if round_index == rounds[0]:
            ops = ["begin", *ops]
        if round_index == rounds[-1]:
            ops.append("finish")
            if method.wants_gift(chosen_last=exchanges and round_index == plan.rounds_per_task - 1):
                ops.append("give")
            if plan.measured_model == "own":
                ops.append("test")
        found.append(Visit(client, tuple(ops), exchanges, first))
    return found


def closing_visits(plan: Plan, method: Method, active: list[int], chosen: list[list[int]]) -> list[Visit]:
    """After the last round: tests of the global model, and the clients that no round ever reached."""
    reached = set(active) if plan.train_unchosen else {client for those in chosen for client in those}
    found = []
    for client in active:
        ops = () if client in reached else ("begin", "finish")
        if plan.measured_model == "global" or client not in reached:
            found.append(Visit(client, (*ops, "test"), exchanges=method.talks and plan.measured_model == "global"))
    return found
