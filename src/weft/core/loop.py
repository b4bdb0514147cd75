"""Algorithm 1 of the paper, for any method: the only loop over tasks and rounds.

`Federation.run` is the algorithm: in rounds, where with async=task_clocks each client has its own task clock, or, with
async=updates, with no rounds at all; task_end.py has what is still to do when a task is over. The loop knows no method
and no engine. It decides who is asked for what and when replies are merged; every request and reply is encoded to bytes
and weighed in the ledger, and every reply is checked before it is used: one that is late, missing or wrong is an
incident, and the run goes on without it.

The loop can stop after any round and go on from a checkpoint with the same bits, because nothing is remembered but
`Progress` and the server's state, and all that is random is drawn anew from the plan's seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from weft.core import task_end
from weft.core.checks import Inspector, Refused
from weft.core.engine import Engine, Request
from weft.core.schedule import CLOSING_ATTEMPTS, Place, Schedule, Visit
from weft.core.storage import State
from weft.core.updates import robust
from weft.methods.method import Method
from weft.plan import Plan
from weft.wire.ledger import Direction, Entry, Ledger
from weft.wire.message import Message, encode

SERVER_MEMORY = 64 << 20  # bytes of knowledge base that stay in memory; the rest is read from disk when it is sent
TICK = 1e-6  # seconds; less is rounding

Answer = tuple[Message, Visit]  # what a client said, and what it was asked


@dataclass
class Progress:
    """Where the run is, what the server knows of each client, and what a summary needs."""

    step: int = 0  # the tasks before it are over for everybody
    round: int = 0  # rounds done, counted through the whole run; with async=updates, answers and lost answers
    images: int = 0  # trained on so far
    seconds: float = 0.0  # worked so far, in all sessions
    validation: dict[str, float] = field(default_factory=dict)  # by "client/step", at the task's end
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)  # by client, as last reported
    densities: dict[str, list[float]] = field(default_factory=dict)  # of each client's A's, as last reported
    # by client: the last task that it has begun, met with an exchange, finished and been tested after, as it said
    begun: dict[str, int] = field(default_factory=dict)
    met: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    tested: dict[str, int] = field(default_factory=dict)
    out: dict[str, Visit] = field(default_factory=dict)  # asked and not answered, by request id
    places: dict[str, list[int]] = field(default_factory=dict)  # async=updates: by client, its task and its round
    merges: int = 0  # async=updates: answers that theta_G is made of
    incidents: dict[str, int] = field(default_factory=dict)  # by client, how often something went wrong
    dismissed: list[int] = field(default_factory=list)  # clients that have left in good order
    asked: dict[str, int] = None  # type: ignore[assignment] # by client, the last task that it was asked to learn
    given: dict[str, list[int]] = field(default_factory=dict)  # by client, the tasks of which it has given its A

    def __post_init__(self) -> None:
        """JSON, from which a progress comes back, knows no tuples."""
        self.out = {key: Visit(*words)._replace(ops=tuple(words[3])) for key, words in self.out.items()}
        self.asked = dict(self.begun) if self.asked is None else self.asked  # which an older weft did not write down


class Listener(Protocol):
    """Whoever keeps the record of a run and shows it."""

    def weighed(self, entries: list[Entry]) -> None: ...
    def answered(self, client: int, step: int, round_index: int, seconds: float, numbers: dict[str, Any]) -> None: ...
    def tested(self, client: int, step: int, accuracies: list[float]) -> None: ...
    def incident(self, client: int, step: int, round_index: int, reason: str) -> None: ...
    def round_done(self, progress: Progress) -> None: ...


@dataclass
class Federation:
    """Everything a run is made of."""

    plan: Plan
    schedule: Schedule
    method: Method
    engine: Engine
    server: State
    inspector: Inspector
    ledger: Ledger
    progress: Progress
    listener: Listener

    def run(self) -> None:
        """Algorithm 1, from where `progress` stands. Line 1 (B_c starts as theta_G) is a method's `join`."""
        if self.plan.asynchronous == "updates":
            self.run_as_answers_arrive()
            return
        schedule, progress = self.schedule, self.progress
        for round_index in range(progress.round, schedule.rounds):  # lines 2 and 4; line 3 is the method's, at `first`
            planned = schedule.visits(round_index, progress.begun, progress.met)  # line 5
            answers = self.until_somebody_is_there(planned)
            asked = self.reachable(self.expected(planned))
            task_end.make_up(self, [(visit.client, visit.step) for visit in asked])
            answers += self.exchange(asked, self.plan.quorum)  # lines 6 to 8, and 11
            replies = robust(self.one_of_each(answers), self.inspector.merged, self.plan.aggregation)
            self.method.aggregate(self.server, replies)  # line 9
            task_end.close_tasks(self, schedule.ending(round_index))
            progress.step, progress.round = schedule.lowest_step(round_index + 1), round_index + 1
            self.listener.round_done(progress)
        task_end.settle(self)

    def run_as_answers_arrive(self) -> None:
        """Algorithm 1 without rounds: an answer is merged when it comes, and its client is asked again at once."""
        progress = self.progress
        progress.places = progress.places or {str(client): [0, 0] for client in range(self.plan.clients)}
        while not self.all_is_learned():
            asked = [visit for client in self.idle() if (visit := self.next_visit(client)) is not None]
            answers = list(itertools.islice(self.replies(asked, self.patience()), 1))
            if not answers and self.plan.deadline == "none":  # nothing is on its way any more
                self._note_missing(set(progress.out), for_good=True)
            for reply, visit in answers:
                staleness = progress.merges - visit.at  # answers that came since it was asked
                if staleness > int(self.plan.staleness_bound):
                    self.incident(visit, f"its answer is {staleness} others behind (staleness_bound)")
                elif "send" in visit.ops:
                    self.method.absorb(self.server, reply, staleness_weight(staleness, self.plan.staleness_exponent))
                    progress.merges += 1
                self.take(reply, visit)
            progress.step, progress.round = min(step for step, _ in progress.places.values()), progress.round + 1
            self.listener.round_done(progress)
        task_end.settle(self)

    # ---- in rounds ---------------------------------------------------------------------------------------------------

    def until_somebody_is_there(self, planned: list[Visit]) -> list[Answer]:
        """A round in which nobody could be asked would be lost: it begins when somebody is there."""
        answers: list[Answer] = []
        if any(visit.exchanges for visit in planned):
            while not self.engine.clients() and len(self.progress.dismissed) < self.plan.clients:
                answers += self.exchange([])
        return answers

    def expected(self, asked: list[Visit]) -> list[Visit]:
        """Without those that are not expected back soon: each question to them would wait out a deadline."""
        gone = self.engine.gone()
        return [visit for visit in asked if visit.client not in gone]

    def reachable(self, asked: list[Visit]) -> list[Visit]:
        """Without those that are away, and those that are presumably still at work on what they were asked last."""
        there = set(self.engine.clients())
        there -= {visit.client for visit in self.progress.out.values() if visit.at == self.progress.round - 1}
        return [visit for visit in asked if visit.client in there or not visit.exchanges]

    def exchange(
        self,
        asked: list[Visit],
        quorum: int | Literal["all"] = "all",
        only: bool = False,
        deadline: float | None = None,
    ) -> list[Answer]:
        """Ask, and wait for all, for a quorum or until the deadline; what those sent that exchanged, sorted.

        `only`: what else is on its way comes out of a later exchange; `deadline`: another one than the plan's.
        """
        taken: list[Answer] = []
        missing = {visit.request_id for visit in asked}
        enough = len(asked) if quorum == "all" else min(quorum, len(asked))
        if deadline is None and self.plan.deadline != "none":
            deadline = self.plan.deadline
        for reply, visit in self.replies(asked, deadline, only):
            if visit.at < self.progress.round and self.plan.late == "drop" and "send" in visit.ops:
                self.incident(visit, "its answer came too late and was dropped")
                continue
            taken.append((reply, visit))
            missing.discard(visit.request_id)
            if quorum != "all" and len(asked) - len(missing) >= enough:
                break
        self._note_missing(missing, quorum == "all" and deadline is None)
        taken.sort(key=lambda answer: answer[1][:3])  # in an order that does not depend on who was fastest
        for reply, visit in taken:
            self.take(reply, visit)
        return [(reply, visit) for reply, visit in taken if "send" in visit.ops]

    def one_of_each(self, answers: list[Answer]) -> list[Message]:
        """What is merged: of each client the newest answer. Several that come late would be as many votes.

        Where the votes of others are to bear out each answer, one that is late counts for nothing: it may be of other
        rows than theirs.
        """
        if self.plan.aggregation != "mean":
            answers = [(reply, visit) for reply, visit in answers if visit.at == self.progress.round]
        newest = {visit.client: reply for reply, visit in sorted(answers, key=lambda answer: answer[1][:3])}
        return list(newest.values())

    def _note_missing(self, missing: set[str], for_good: bool) -> None:
        """Who has not answered; `for_good`: everybody was waited for, so it never will."""
        for request_id in sorted(missing & self.progress.out.keys()):
            visit = self.progress.out[request_id]
            about = " about the end of its task" if self.schedule.is_over(visit) else ""
            self.incident(visit, f"no answer{about}" if for_good else f"no answer{about} in time")
            if for_good:
                del self.progress.out[request_id]

    # ---- as answers arrive -------------------------------------------------------------------------------------------

    def all_is_learned(self) -> bool:
        places, lost = self.progress.places, self.engine.lost()
        ends = ((client, len(tasks)) for client, tasks in enumerate(self.schedule.lengths))
        return all(places[str(client)][0] == end or client in lost for client, end in ends)

    def idle(self) -> list[int]:
        """Who is there and waits for nothing; what is overdue is given up."""
        now, deadline = self.engine.now(), self.plan.deadline
        for request_id, visit in list(self.progress.out.items()):
            if deadline != "none" and now >= visit.sent + deadline - TICK:
                self.incident(visit, "no answer in time")
                del self.progress.out[request_id]
        busy = {visit.client for visit in self.progress.out.values()}
        return [client for client in self.engine.clients() if client not in busy]

    def patience(self) -> float | None:
        """Until the next answer is overdue."""
        if self.plan.deadline == "none":
            return None
        sent = min((visit.sent for visit in self.progress.out.values()), default=self.engine.now())
        return max(0.0, sent + self.plan.deadline - self.engine.now())

    def next_visit(self, client: int) -> Visit | None:
        """A client's next round, the closing of its task, or the first round of its next one; None: all is learned."""
        progress, lengths = self.progress, self.schedule.lengths[client]
        step, round_index = progress.places[str(client)]
        while step < len(lengths):
            place = Place(step, round_index, lengths[step])
            last, talks = round_index == place.rounds - 1, self.method.talks
            visit: Visit | None = None
            if round_index < place.rounds:
                visit = self.schedule.lesson(client, place, talks, last, progress.begun, progress.met)
            elif (attempt := round_index - place.rounds) <= CLOSING_ATTEMPTS:
                visit = self.closing(client, place, attempt)
            progress.places[str(client)] = [step, round_index + 1]
            if visit is not None:
                return visit
            self.forget(client, step)
            step, round_index = step + 1, 0
        progress.places[str(client)] = [step, 0]
        return None

    # ---- both ways ---------------------------------------------------------------------------------------------------

    def closing(self, client: int, place: Place, attempt: int) -> Visit | None:
        """What is still to do after a task's last round; after many attempts what needs no wire."""
        progress, by_itself = self.progress, attempt >= CLOSING_ATTEMPTS
        place = Place(place.step, place.rounds + attempt, place.rounds)
        return self.schedule.closing(client, place, progress.begun, progress.finished, progress.tested, by_itself)

    def forget(self, client: int, step: int) -> None:
        """A task is long over: an answer about it will not come, or is of no use."""
        out = self.progress.out
        for request_id in [key for key, visit in out.items() if visit.client == client and visit.step <= step]:
            del out[request_id]

    def dismiss(self, client: int) -> None:
        """It has left in good order: nothing is expected of it, and its A's go from the knowledge base."""
        self.forget(client, self.plan.tasks)
        self.progress.dismissed.append(client)
        self.method.part(self.server, client)

    def replies(self, asked: list[Visit], deadline: float | None, only: bool = False) -> Iterator[Answer]:
        """Ask; every answer that is what it should be, as it comes, also (if not `only`) one to an earlier request."""
        out = self.progress.out
        for client, wire, seconds, request_id in self.engine.exchange(self._requests(asked), deadline, only):
            try:
                reply, visit = self.inspector.open(wire, client, out)
            except Refused as refused:
                answers = None if refused.foreign else refused.visit or self._damaged(client, request_id)
                self.incident(answers or Visit(client, -1, -1, (), True), f"its answer was refused: {refused}")
                if answers is not None:
                    del out[answers.request_id]
                continue
            del out[visit.request_id]
            if visit.exchanges or reply.tensors:
                self._weigh("c2s", visit, wire)
            if reply.error:
                self.incident(visit, f"it failed: {reply.error[:200]}")
                continue
            self.listener.answered(client, visit.step, visit.round, seconds, reply.fields)
            yield reply, visit

    def _damaged(self, client: int, request_id: str) -> Visit | None:
        """What an answer was to that is damaged beyond recognition: the engine knows, or it was asked first."""
        out = self.progress.out
        return out.get(request_id) or next((visit for visit in out.values() if visit.client == client), None)

    def _requests(self, asked: list[Visit]) -> Iterator[Request]:
        arrival = self.plan.asynchronous == "updates"
        for planned in asked:
            at = self.progress.merges if arrival else self.progress.round
            visit = planned._replace(at=at, sent=self.engine.now())
            client, step, round_index, ops, exchanges, first, *_ = visit
            tensors, numbers = self.method.brief(self.server, client, step, first, self.plan) if exchanges else ({}, {})
            visit, request_id = visit._replace(told=numbers), visit.request_id
            request = Message("server", f"client-{client}", request_id, ops, step, round_index, tensors, numbers)
            wire = encode(request, self.plan.wire)
            self.server.archive.spill(SERVER_MEMORY)
            if exchanges:
                self._weigh("s2c", visit, wire)
            self.progress.out[request_id] = visit
            if "train" in ops:
                self.progress.asked[str(client)] = max(step, self.progress.asked.get(str(client), -1))
            work = float("train" in ops)
            yield Request(client, wire, request_id, work, crosses=exchanges and not visit.sure)

    def take(self, reply: Message, visit: Visit) -> None:
        """Note what a client has done and said; and line 11: kb <- kb + {A}."""
        progress, name, step, numbers = self.progress, str(visit.client), visit.step, reply.fields
        progress.images += numbers.get("images", 0)
        if "test" in visit.ops and progress.tested.get(name, -1) < step:  # once, though a late answer may say it again
            self.listener.tested(visit.client, step, numbers["accuracy"])
        done = (("begin", progress.begun), ("finish", progress.finished), ("test", progress.tested))
        for standing in [standing for op, standing in done if op in visit.ops]:
            standing[name] = max(standing.get(name, -1), step)
        here = visit.client not in progress.dismissed  # an answer may be taken after its client has said that it leaves
        if visit.first:
            progress.met[name] = max(progress.met.get(name, -1), step)
        if visit.exchanges and here:
            self.method.confirm(self.server, visit.client, reply, visit.told)
        if "give" in visit.ops:
            progress.given[name] = sorted({*progress.given.get(name, []), step})
        if "give" in visit.ops and here:
            self.method.collect(self.server, visit.client, step, reply)
            self.server.archive.spill(SERVER_MEMORY)
        if numbers.get("task_valid_accuracy") is not None:
            progress.validation[f"{name}/{step}"] = numbers["task_valid_accuracy"]
        if "size" in numbers:
            progress.sizes[name], progress.densities[name] = numbers["size"], numbers.get("density", [])

    def incident(self, visit: Visit, reason: str) -> None:
        """Something went wrong with one client; the run goes on."""
        name = str(visit.client)
        self.progress.incidents[name] = self.progress.incidents.get(name, 0) + 1
        self.listener.incident(visit.client, visit.step, visit.round, reason)

    def _weigh(self, direction: Direction, visit: Visit, wire: bytes) -> None:
        self.listener.weighed(self.ledger.enter(direction, visit.client, visit.step, visit.round, wire))


def staleness_weight(staleness: int, exponent: float) -> float:
    """What an answer counts that was computed from a theta_G so many answers old (Xie et al., 2019).

    >>> staleness_weight(0, 0.5), staleness_weight(3, 0.5), staleness_weight(3, 1.0)
    (1.0, 0.5, 0.25)
    """
    return float((1 + staleness) ** -exponent)
