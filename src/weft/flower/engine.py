"""Far: an engine whose clients are sites on other machines, behind Flower's grid.

Flower tells of a site that died within a minute, lets it in again within another, and forgets nothing that its database
holds. What is left to do here: ask again whoever did not answer, for as long as there is patience, since a site answers
the same request with the same bytes; and tell the journal.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
from flwr.app import Message

from weft.core.engine import Arrival, Request, Saved
from weft.core.storage import State
from weft.flower.envelope import Answered, Asked, BadEnvelope, pack, unpack_reply
from weft.plan import Plan
from weft.wire.message import decode, encode, failure

POLL = 0.25  # seconds between two looks for replies
ASK_AGAIN = 3.0  # seconds until a site is asked again after a failure, or after it had no task yet
LOOK = 1.0  # seconds for which the list of who is there is good
KNOCK = 30.0  # seconds after which a site that is asked for nothing is asked whether it is still a member
LIFETIME = 86_400.0  # seconds that Flower keeps a message
RETURN = 120.0  # seconds within which a site that was killed is back: Flower keeps it out for up to 60
OUTAGE = 600.0  # the same where nobody is there: it may be the hub that cannot be reached
FAILURES = 3  # so often a request may fail at a site before that is its answer
AWAY = 5  # Flower's code for a site that is not there: patience or the deadline bounds that. All others are failures
SHOWN = 300  # letters of a reason

Tell = Callable[..., None]


class Node(Protocol):
    node_id: int
    name: str


class Grid(Protocol):
    """The part of Flower's grid that is used."""

    def get_nodes(self) -> Iterable[Node]: ...
    def push_messages(self, messages: list[Message]) -> Iterable[str]: ...
    def pull_messages(self, message_ids: list[str]) -> Iterable[Message]: ...


@dataclass
class Flight:
    """A request on its way."""

    client: int
    request_id: str
    wire: bytes
    message_id: str = ""  # Flower's; none while the site is not there
    due: float = 0.0  # not to be sent before
    failures: int = 0
    answered: Answered | None = None  # it is here, and nobody has taken it yet
    pulling: Future[list[Message]] | None = None  # it is being looked for, and put together if it is there


class Far:
    apart = True

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        sites: list[str],
        run: str,
        folder: Path,
        saved: Saved,
        tell: Tell,
        patience: float,
        on_leave: Callable[[int], None],
        lost: Collection[int] = (),
        removed: Callable[[], Collection[str]] = tuple,
    ):
        """`sites` are the names by which the hub registered them, in the order of the plan's clients.

        Without a deadline in the plan a site that is away is waited for, for `patience` seconds; those that are `lost`
        only once they have been there; and those that the hub has `removed` by now never.
        """
        self._plan, self._grid, self._sites, self._run, self._folder = plan, grid, sites, run, folder
        self._text = plan.toml()
        self._tell, self._on_leave, self._removed = tell, on_leave, removed
        self._patience = patience if plan.deadline == "none" else 0.0
        self.patience = max(self._patience, RETURN)
        self._began = time.monotonic() - float(saved.clock.get("now", 0.0))
        self._left: set[int] = set(saved.clock.get("left", []))
        # when each site was last there
        self._seen = {client: -math.inf if client in lost else self.now() for client in range(len(sites))}
        self._away: set[int] = set()
        self._waiting: dict[int, str] = {}
        self._nodes: dict[int, int] = {}
        self._looked = -math.inf
        self._flights = [_load(folder, described) for described in saved.clock.get("flights", [])]
        self._knocks: dict[int, Flight] = {}

    def clients(self) -> list[int]:
        """Who is there, and who was there a short while ago and will presumably be back."""
        self._look()
        return [client for client in range(len(self._sites)) if client not in self._left and not self._lost(client)]

    def gone(self) -> set[int]:
        """Who has left, and who has been away for longer than a round waits for a site."""
        return set(range(len(self._sites))) - set(self.clients())

    def lost(self) -> set[int]:
        """Who has left, and who has been away for so long that it was not just started again."""
        self._look()
        patience = max(self._patience, RETURN if self._nodes else OUTAGE)
        return {client for client in range(len(self._sites)) if client in self._left or self._lost(client, patience)}

    def busy(self) -> set[int]:
        return {flight.client for flight in self._flights}

    def now(self) -> float:
        return time.monotonic() - self._began

    def exchange(
        self, requests: Iterable[Request], deadline: float | None = None, only: bool = False
    ) -> Iterator[Arrival]:
        """With a deadline it may end sooner: nobody waits for an old answer of a site that is lost or has no task."""
        end = math.inf if deadline is None else self.now() + deadline
        asked: set[str] = set()
        for request in requests:
            self._flights = [flight for flight in self._flights if not self._replaces(request, flight)]
            self._flights.append(Flight(request.client, request.request_id, request.wire))
            asked.add(request.request_id)
            self._send()
        there = set(self.clients())
        idle = not self._awaited(asked, deadline, only)
        while self.now() <= end:
            self._look()
            self._give_up()
            self._knock()
            self._send()
            self._pull()
            for flight in [each for each in self._flights if each.answered and (not only or each.request_id in asked)]:
                assert flight.answered is not None
                self._flights.remove(flight)
                yield Arrival(flight.client, flight.answered.wire, flight.answered.seconds, flight.request_id)
            if not self._awaited(asked, deadline, only) and not (idle and self._may_come(there)):
                return
            time.sleep(POLL)

    def save(self) -> Saved:
        """Sites keep their own states. What they were asked and did not answer is asked again after a restart."""
        flights = [
            {
                "client": flight.client,
                "request_id": flight.request_id,
                "wire": State(reply=flight.wire).save(self._folder, f"flight-{flight.request_id}"),
            }
            for flight in self._flights
        ]
        return Saved({}, {}, {"now": self.now(), "flights": flights, "left": sorted(self._left)})

    def close(self) -> None:
        """The grid is Flower's to close."""

    # ---- who is there ------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self.now() - self._looked < LOOK:
            return
        there = {node.name: node.node_id for node in self._grid.get_nodes()}
        self._looked = self.now()
        self._nodes = {client: there[name] for client, name in enumerate(self._sites) if name in there}
        out = self._removed()
        for client in [client for client, name in enumerate(self._sites) if name in out and client not in self._left]:
            self._depart(client, "removed")
        for client in range(len(self._sites)):
            if client in self._nodes:
                self._seen[client] = self._looked
                if client in self._away:
                    self._away.discard(client)
                    self._say("back", client)
            elif client not in self._away and client not in self._left:
                self._away.add(client)
                self._say("away", client)

    def _lost(self, client: int, patience: float | None = None) -> bool:
        """Has it been away for so long, or else for longer than a round waits for a site?"""
        patience = self._patience if patience is None else patience
        return client not in self._nodes and self.now() - self._seen[client] >= patience

    def _may_come(self, there: set[int]) -> bool:
        """Where nothing is under way: is somebody missing whom to wait for, who has not come back since?"""
        now = set(self.clients())
        if not now:
            return len(self._left) < len(self._sites)
        return now <= there and len(self.lost() | now) < len(self._sites)

    def _awaited(self, asked: set[str], deadline: float | None, only: bool) -> list[Flight]:
        """What an exchange lasts for: all that was asked in it, and earlier requests to sites that are at work on them.

        The flight of a site that is lost stays: it may be back, with an answer that still counts. Where nothing was
        asked, everybody is at work or has no task, and a task may come.
        """

        def is_at_work(client: int) -> bool:
            return not self._lost(client) and not (asked and client in self._waiting)

        flights = self._flights
        if only:
            return [flight for flight in flights if flight.request_id in asked]
        if deadline is None:
            return flights
        return [flight for flight in flights if flight.request_id in asked or is_at_work(flight.client)]

    def _replaces(self, request: Request, flight: Flight) -> bool:
        """Is a request asked in place of an earlier one? What a site works on is not taken back: its answer counts."""
        if flight.request_id == request.request_id:
            return True
        at_work = bool(flight.message_id) and flight.client not in self._waiting
        return flight.client == request.client and flight.answered is None and not at_work

    def _give_up(self) -> None:
        """What nobody will answer is on its way no more: the loop goes on without it."""
        for flight in [flight for flight in self._flights if self._hopeless(flight)]:
            self._flights.remove(flight)

    def _hopeless(self, flight: Flight) -> bool:
        if flight.answered is not None:
            return False
        return flight.client in self._left or (self._plan.deadline == "none" and self._lost(flight.client))

    # ---- to and fro --------------------------------------------------------------------------------------------------

    def _knock(self) -> None:
        """Ask for nothing whoever is asked for nothing else, a site that has learned all its tasks above all.

        It would not be heard when it leaves, and its A's would be given on.
        """
        busy = {flight.client for flight in self._flights}
        idle = self._nodes.keys() - busy - self._left
        self._knocks = {client: knock for client, knock in self._knocks.items() if client in idle}
        for client in idle:
            knock = self._knocks.get(client)
            if knock is None or (knock.message_id and self._is_heard(knock)):
                self._knocks[client] = Flight(client, "", b"", due=self.now() + KNOCK)

    def _is_heard(self, knock: Flight) -> bool:
        """Whatever it says, unless it has left: what it does wrong will show when it is asked for something."""
        try:
            pulled = self._pulled(knock)
            if pulled is not None and not pulled.has_error() and unpack_reply(pulled).left:
                self._depart(knock.client)
        except httpx.HTTPError:  # the way to the hub's own SuperLink, no site's fault
            raise
        except Exception:
            return True
        return pulled is not None

    def _depart(self, client: int, how: str = "left") -> None:
        if client in self._left:  # it may say so in answer to several requests
            return
        self._left.add(client)
        self._say(how, client)
        self._on_leave(client)

    def _send(self) -> None:
        for flight in [*self._flights, *self._knocks.values()]:
            node = self._nodes.get(flight.client)
            if flight.message_id or node is None or self.now() < flight.due:
                continue
            asked = Asked(flight.wire, self._run, self._text, flight.client)
            (message_id,) = list(self._grid.push_messages([pack(asked, node, LIFETIME)])) or [""]
            flight.message_id, flight.due = message_id or "", self.now() + ASK_AGAIN

    def _pull(self) -> None:
        """Flower gives each reply once, and whoever listens may stop after any: so all are kept until taken.

        What is wrong with one is nothing to the others, and whose it is is what was asked, whatever it says itself.
        """
        for flight in [flight for flight in self._flights if flight.message_id and not flight.answered]:
            try:
                pulled = self._pulled(flight)
            except httpx.HTTPError:  # the way to the hub's own SuperLink, no site's fault
                raise
            except Exception as fault:
                why = f"its answer cannot be read: {type(fault).__name__}: {fault}"
                flight.answered = self._failed(flight, why)
                continue
            if pulled is not None:
                flight.answered = self._open(pulled, flight)

    def _pulled(self, flight: Flight) -> Message | None:
        """What has come, put together by Flower, which waits for parts that are still being sent.

        So in a thread of its own: a site that sends slowly, or died while it did, holds up nobody else.
        """
        if flight.pulling is None:
            flight.pulling = Future()
            words = (self._grid, flight.message_id, flight.pulling)
            threading.Thread(target=_pull_into, args=words, daemon=True).start()
        wait([flight.pulling], timeout=POLL)
        if not flight.pulling.done():
            return None
        pulling, flight.pulling = flight.pulling, None
        return next(iter(pulling.result()), None)

    def _open(self, message: Message, flight: Flight) -> Answered | None:
        """The answer, if it is one; else it is noted why not, and the site is asked again."""
        if message.has_error():
            why = f"Flower's error {message.error.code}: {(message.error.reason or '').strip()}"
            if message.error.code != AWAY:
                return self._failed(flight, why)
            self._ask_again(flight, why)
            return None
        try:
            answered = unpack_reply(message)
        except BadEnvelope as fault:
            return self._failed(flight, f"its answer is none: {fault}")
        if answered.left:
            self._depart(flight.client)
            return None
        if answered.waiting:
            if self._waiting.get(flight.client) != answered.waiting:
                self._say("waiting", flight.client, reason=answered.waiting)
            self._waiting[flight.client] = answered.waiting
            flight.message_id, flight.due = "", self.now() + ASK_AGAIN
            return None
        self._waiting.pop(flight.client, None)
        return answered

    def _failed(self, flight: Flight, reason: str) -> Answered | None:
        """It is asked again; when that has failed too often, the failure is its answer."""
        flight.failures += 1
        if flight.failures >= FAILURES:
            return Answered(encode(failure(decode(flight.wire), reason[:SHOWN])))
        self._ask_again(flight, reason)
        return None

    def _ask_again(self, flight: Flight, reason: str) -> None:
        flight.message_id, flight.due = "", self.now() + ASK_AGAIN
        self._say("retry", flight.client, request=flight.request_id, reason=reason[:SHOWN])

    def _say(self, event: str, client: int, **facts: Any) -> None:
        self._tell(event, client=client, site=self._sites[client], time=round(self.now(), 3), **facts)


def _pull_into(grid: Grid, message_id: str, found: Future[list[Message]]) -> None:
    try:
        found.set_result(list(grid.pull_messages([message_id])))
    except BaseException as fault:
        found.set_exception(fault)


def _load(folder: Path, described: dict[str, Any]) -> Flight:
    wire = State.load(folder, described["wire"]).reply
    return Flight(described["client"], described["request_id"], wire)
