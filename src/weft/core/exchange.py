"""Exchange: the only server code that encodes, decodes, counts bytes or waits.

A request is configured by the method, encoded, counted in the ledger and remembered as pending. A reply is decoded,
checked and counted before any of it is used. A reply that is late, missing or wrong is an incident, and the run
continues without it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from weft.core.checks import RejectedReply, ReplyChecks
from weft.core.engine import Availability, Engine, Reply, Request
from weft.core.progress import Pending, Progress
from weft.core.schedule import Assignment
from weft.core.storage import spill
from weft.errors import WeftError, printable
from weft.methods.averaging import LARGEST_JUMP, Update, Updates
from weft.methods.context import KNOWLEDGE, RoundContext, ServerContext
from weft.methods.method import Method
from weft.methods.robust import robust
from weft.methods.state import ServerState
from weft.plan import Plan
from weft.wire.ledger import Direction, Entry, Ledger
from weft.wire.message import Cached, Message, encode

SERVER_MEMORY = 64 << 20  # bytes of knowledge base that stay in memory; the rest is read from disk when it is sent
EPSILON = 1e-6  # seconds; less is rounding


class RunEvents(Protocol):
    """Keeps the record of a run and displays it."""

    def counted(self, entries: list[Entry]) -> None: ...
    def replied(self, assignment: Assignment, seconds: float, fields: dict[str, Any]) -> None: ...
    def tested(self, client: int, task: int, accuracies: list[float], validation: list[float]) -> None: ...
    def incident(self, client: int, task: int, round_index: int, reason: str) -> None: ...
    def warned(self, text: str) -> None: ...
    def round_done(self, progress: Progress) -> None: ...


@dataclass
class Accepted:
    """A reply that passed all checks, and the request that it answers."""

    message: Message
    pending: Pending
    noted: bool = False  # the method has stored its task knowledge

    @property
    def assignment(self) -> Assignment:
        return self.pending.assignment


@dataclass
class Exchange:
    plan: Plan
    method: Method
    server: ServerState
    engine: Engine
    checks: ReplyChecks
    ledger: Ledger
    progress: Progress
    events: RunEvents
    ctx: ServerContext
    _encoded: dict[str, Cached] = field(default_factory=dict)  # tensors that go to several clients of one batch
    _early: list[Accepted] = field(default_factory=list)  # arrived while others were still being requested
    _unusable: list[str] = field(default_factory=list)  # why: of the training replies of this round

    # ---- in rounds ---------------------------------------------------------------------------------------------------

    def available(self, assignments: list[Assignment]) -> tuple[list[Assignment], list[Accepted]]:
        """The assignments of clients that can be asked, and replies that arrived while nobody was available.

        A round that nobody could take part in would be lost: it starts when a client is available.
        """
        arrived: list[Accepted] = []
        if any(assignment.exchanges for assignment in assignments):
            while not self._clients().available and not all(client.left for client in self.progress.clients):
                arrived += (late := self.collect([]))
                self.aggregate(late, merged=False)
        # a client that has not answered the last round's request is presumably still at work on it
        at_work = {
            pending.assignment.client
            for pending in self.progress.pending.values()
            if pending.issued_round == self.progress.round - 1 and not pending.released
        }
        usable = self._clients().available - at_work
        expected = self.expected(assignments)
        return [each for each in expected if each.client in usable or not each.exchanges], arrived

    def expected(self, assignments: list[Assignment]) -> list[Assignment]:
        """Without clients that are not expected back soon: each request to them would wait for a deadline."""
        away = self._clients().away
        return [assignment for assignment in assignments if assignment.client not in away]

    def collect(
        self, assignments: list[Assignment], quorum: int | Literal["all"] = "all", only: bool = False
    ) -> list[Accepted]:
        """Request, and wait for all replies, for a quorum or until the deadline; replies sorted by client.

        `only`: other replies that are on their way are left to a later call.
        """
        taken: list[Accepted] = []
        missing = {assignment.request_id for assignment in assignments}
        deadline = None if self.plan.deadline == "none" else self.plan.deadline
        for accepted in self.replies(assignments, deadline, only):
            if self._late(accepted.pending) and self.plan.late == "drop" and "upload" in accepted.assignment.ops:
                self.incident(accepted.assignment, "the reply arrived too late and was dropped")
                continue
            taken.append(accepted)
            missing.discard(accepted.assignment.request_id)
            if quorum != "all" and len(assignments) - len(missing) >= min(quorum, len(assignments)):
                break
        self.note_missing(missing, for_good=quorum == "all" and deadline is None)
        taken.sort(key=lambda accepted: accepted.assignment)  # not by which client was fastest
        for accepted in taken:
            self.note(accepted)
        return taken

    def _late(self, pending: Pending) -> bool:
        return pending.released or pending.issued_round < self.progress.round

    def updates(self, taken: list[Accepted], merged: bool = True) -> Updates:
        """What the method aggregates: of each client the newest reply, since several late ones would be several votes.

        Under a robust rule late replies count for nothing: they may have other rows than the replies of this round.
        `merged`: False for replies about the end of a task, of which only task knowledge is stored.
        """
        rule = self.plan.aggregation
        usable = [each for each in taken if merged and (rule == "mean" or not self._late(each.pending))]
        usable = [each for each in usable if "upload" in each.assignment.ops]
        newest = {each.assignment.client: each for each in sorted(usable, key=lambda each: each.assignment)}
        found = [self.update(each, each is newest.get(each.assignment.client)) for each in taken]
        guarded = rule != "mean" and len(newest) > 1
        return Updates(robust(found, rule) if guarded else found, equal=guarded, most=self.largest_jump)

    @property
    def largest_jump(self) -> float:
        """Clients on this machine do not lie; sites might."""
        return LARGEST_JUMP if self.engine.remote else math.inf

    def aggregate(self, taken: list[Accepted], merged: bool) -> None:
        self.method.aggregate(self.server, self.updates(taken, merged), self.ctx)

    # ---- asynchronous ------------------------------------------------------------------------------------------------

    def arrival(self, assignments: list[Assignment]) -> Accepted | None:
        """Request, and wait for the next reply, or until the oldest request is overdue."""
        timeout = None
        if self.plan.deadline != "none":
            issued = [pending.issued_at for pending in self.progress.pending.values()]
            timeout = max(0.0, min(issued, default=self.engine.now()) + self.plan.deadline - self.engine.now())
        accepted = next(self.replies(assignments, timeout), None)
        if accepted is None and timeout is None:  # nothing is on its way any more
            self.note_missing(set(self.progress.pending), for_good=True)
        if accepted is not None:
            self.note(accepted)
        return accepted

    def idle(self) -> list[int]:
        """Clients that are available and have no request; overdue requests expire."""
        now, deadline = self.engine.now(), self.plan.deadline
        for request_id, pending in list(self.progress.pending.items()):
            if deadline != "none" and now >= pending.issued_at + deadline - EPSILON:
                self.incident(pending.assignment, "no reply in time")
                del self.progress.pending[request_id]
        busy = {pending.assignment.client for pending in self.progress.pending.values()}
        return sorted(self._clients().available - busy)

    # ---- both --------------------------------------------------------------------------------------------------------

    def replies(
        self, assignments: Iterable[Assignment], timeout: float | None, only: bool = False
    ) -> Iterator[Accepted]:
        """Request; every reply that passes the checks, as it arrives, to earlier requests too unless `only`."""
        requested: set[str] = set()
        self._encoded.clear()
        for assignment in assignments:
            self._request(assignment)
            requested.add(assignment.request_id)
            while (reply := self.engine.ready()) is not None:  # so that replies do not pile up, and are displayed
                self._early += self._accept(reply)
        while self._early:
            yield self._early.pop(0)
        for reply in self.engine.replies(timeout, requested if only else None):
            yield from self._accept(reply)
        self._clients()

    def _request(self, assignment: Assignment) -> None:
        """Configure, encode, count and submit one request."""
        client, progress, tensors, fields = assignment.client, self.progress, {}, {}
        known = progress.clients[client]
        classes = {int(task): ids for task, ids in known.classes.items() if int(task) <= assignment.task}
        if assignment.exchanges and assignment.kind != "announce":
            repeats = known.first_download if known.first_task == assignment.task else {}
            testing = "test" in assignment.ops and "train" not in assignment.ops
            ctx = RoundContext(
                self.plan, assignment.task, assignment.first, repeats, classes, testing, assignment.round
            )
            download = self.method.configure(self.server, client, ctx)
            fields = download.fields
            tensors = download.tensors | {f"{KNOWLEDGE}{key}": value for key, value in download.once.items()}
            if assignment.first:
                known.first_task, known.first_download = assignment.task, fields
        what = assignment.request_id, assignment.ops, assignment.task, assignment.round
        message = Message("server", f"client-{client}", *what, tensors, fields)
        wire = encode(message, self.plan.wire, self._encoded)
        spill(self.server, SERVER_MEMORY, "server")
        if assignment.exchanges:
            self._count("s2c", assignment, wire)
        announced = [classes.get(task, []) for task in range(assignment.task + 1)]
        progress.pending[assignment.request_id] = Pending(
            assignment, progress.round, progress.version, self.engine.now(), fields, announced
        )
        if "train" in assignment.ops:
            known.advance("assigned", assignment.task)
        crosses = assignment.exchanges and not assignment.lossless
        work = float("train" in assignment.ops)
        self.engine.submit(Request(client, wire, assignment.request_id, work, crosses))

    def _accept(self, reply: Reply) -> list[Accepted]:
        """Decode, check, count; an empty list if the reply cannot be used."""
        requests = self.progress.pending
        try:
            message, pending = self.checks.open(reply.wire, reply.client, requests)
        except RejectedReply as rejected:
            answered = None if rejected.unrelated else rejected.pending or self._damaged(reply)
            assignment = answered.assignment if answered else None
            self._unused(reply.client, assignment, f"the reply was rejected: {rejected}")
            if answered is not None:
                del requests[answered.assignment.request_id]
            if rejected.bug and self._must_work:
                raise WeftError(f"method {self.plan.method}: {rejected}") from None
            return []
        assignment = pending.assignment
        del requests[assignment.request_id]
        if assignment.exchanges or message.tensors:
            self._count("c2s", assignment, reply.wire)
        if message.error:
            self._unused(reply.client, assignment, f"the client failed: {message.error[:200]}")
            return []
        self.events.replied(assignment, reply.seconds, message.fields)
        return [Accepted(message, pending)]

    @property
    def _must_work(self) -> bool:
        """Whether an unusable reply is a bug: all clients are here, and no fault is injected."""
        return not self.engine.remote and not self.plan.faults.any

    def _unused(self, client: int, assignment: Assignment | None, reason: str) -> None:
        reason = self._incident(client, assignment, reason)
        if assignment is not None and "train" in assignment.ops:
            self._unusable.append(f"client {client}: {reason}")

    def check_round(self, taken: list[Accepted]) -> None:
        """Notice a round in which somebody replied and nothing can be used: nobody would notice a run of them."""
        reasons, self._unusable = self._unusable, []
        if not reasons or any("train" in accepted.assignment.ops for accepted in taken):
            return
        text = f"somebody replied and nothing was merged ({reasons[0]})"
        if self._must_work:
            raise WeftError(f"method {self.plan.method}: {text}")
        self.progress.rounds_without_update += 1
        self.events.warned(text)

    def _damaged(self, reply: Reply) -> Pending | None:
        """The request of a reply that cannot be read: the engine knows it, or it is the client's oldest one."""
        pending = self.progress.pending
        own = (each for each in pending.values() if each.assignment.client == reply.client)
        return pending.get(reply.request_id) or next(own, None)

    def note(self, accepted: Accepted) -> None:
        """Record what a client has done and reported."""
        assignment, fields = accepted.assignment, accepted.message.fields
        known, task = self.progress.clients[assignment.client], assignment.task
        self.progress.images += fields.get("images", 0)
        if "test" in assignment.ops and known.tested < task:  # once, though a late reply may repeat it
            self.events.tested(assignment.client, task, fields["accuracy"], fields["validation"])
        for op, name in (("begin", "started"), ("end", "finished"), ("test", "tested")):
            if op in assignment.ops:
                known.advance(name, task)
        if assignment.first:
            known.advance("contacted", task)
        if "announce" in assignment.ops:
            known.classes.setdefault(str(task), fields["classes"])
        if "share" in assignment.ops:
            known.uploaded = sorted({*known.uploaded, task})
        if fields.get("task_valid_accuracy") is not None:
            known.validation[str(task)] = fields["task_valid_accuracy"]
        if "size" in fields:
            known.size, known.density = fields["size"], fields.get("density", [])

    def update(self, accepted: Accepted, merged: bool) -> Update:
        """A reply as the method sees it; of a client that has left only what is merged now."""
        assignment, message, once = accepted.assignment, accepted.message, self.checks.once(accepted.pending)
        here = not self.progress.clients[assignment.client].left and not accepted.noted
        accepted.noted = True
        now = {name: tensor for name, tensor in message.tensors.items() if name not in once}
        later = {name: tensor for name, tensor in message.tensors.items() if name in once}
        return Update(
            assignment.client,
            assignment.task,
            now if merged else {},
            later if here else {},
            message.fields,
            accepted.pending.sent if assignment.exchanges and here else None,
            received=bool(now),
            classes=tuple(self.progress.clients[assignment.client].classes.get(str(assignment.task), ())),
        )

    def note_missing(self, missing: Collection[str], for_good: bool) -> None:
        """Record who has not replied; `for_good`: all replies were waited for, so none will come."""
        for request_id in sorted(set(missing) & self.progress.pending.keys()):
            assignment = self.progress.pending[request_id].assignment
            about = " about the end of its task" if assignment.kind != "train" else ""
            self.incident(assignment, f"no reply{about}" if for_good else f"no reply{about} in time")
            if for_good:
                del self.progress.pending[request_id]

    def forget(self, client: int, task: int) -> None:
        """Drop requests up to this task: a reply will not come, or is of no use."""
        pending = self.progress.pending
        for key, each in list(pending.items()):
            if each.assignment.client == client and each.assignment.task <= task:
                del pending[key]

    def incident(self, assignment: Assignment, reason: str) -> None:
        self._incident(assignment.client, assignment, reason)

    def _incident(self, client: int, assignment: Assignment | None, reason: str) -> str:
        """Something went wrong with one client; the run continues. The reason, as one printable line."""
        reason = printable(" ".join(reason.split()))
        self.progress.clients[client].incidents += 1
        task, round_index = (-1, -1) if assignment is None else (assignment.task, assignment.round)
        self.events.incident(client, task, round_index, reason)
        return reason

    def _clients(self) -> Availability:
        """Who is available; a client that has left is removed from the server's state."""
        clients = self.engine.clients()
        for client in sorted(clients.left):
            if not self.progress.clients[client].left:
                self.forget(client, self.plan.tasks)
                self.progress.clients[client].left = True
                self.server.remove_client(client)
        return clients

    def _count(self, direction: Direction, assignment: Assignment, wire: bytes) -> None:
        entries = self.ledger.enter(direction, assignment.client, assignment.task, assignment.round, wire)
        self.events.counted(entries)


def staleness_weight(staleness: int, exponent: float) -> float:
    """The weight of an update that was computed from a theta_G so many merges old (Xie et al., 2019).

    >>> staleness_weight(0, 0.5), staleness_weight(3, 0.5), staleness_weight(3, 1.0)
    (1.0, 0.5, 0.25)
    """
    return float((1 + staleness) ** -exponent)
