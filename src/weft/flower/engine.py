"""FlowerEngine: the clients of a run are sites on other machines, reached through Flower's grid.

Flower reports a killed site within a minute, accepts it again within another, and loses nothing that its database
holds. This engine adds retries: a request is sent again until its site replies, and a site replies to the same request
with the same bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

from weft.core.engine import Availability, EngineState, Reply, Request
from weft.core.storage import load_wire, save_wire
from weft.errors import printable
from weft.flower.envelope import SiteReply, SiteRequest, pack, unpack_reply
from weft.plan import Plan
from weft.wire.message import decode, encode, failure

POLL = 0.25  # seconds between two polls for replies
RETRY = 3.0  # seconds until a request is sent again after a failure, or because the site had no task yet
REFRESH = 1.0  # seconds for which the list of available sites is valid
PING = 30.0  # seconds after which an idle site is asked whether it is still a member
LIFETIME = 86_400.0  # seconds that Flower keeps a message
RETURN = 120.0  # seconds within which a killed site is back: Flower rejects it for up to 60
OUTAGE = 600.0  # the same while no site is available: the hub's own connection may be down
MAX_FAILURES = 3  # of one request; then the failure is its reply
NODE_UNAVAILABLE = 5  # Flower's code for a site that is away: it is bounded by patience or deadline, not by failures
MAX_REASON = 300  # characters


@dataclass
class InFlight:
    """A request without a delivered reply."""

    client: int
    request_id: str
    wire: bytes
    message_id: str = ""  # Flower's; empty while it is not sent
    due: float = 0.0  # it is not sent before
    failures: int = 0
    reply: SiteReply | None = None  # received and not delivered yet
    pulling: Future[list[Message]] | None = None


class FlowerEngine:
    remote = True

    def __init__(
        self,
        plan: Plan,
        grid: Grid,
        sites: list[str],
        run: str,
        folder: Path,
        saved: EngineState,
        journal: Callable[..., None],
        patience: float,
        absent: Collection[int] = (),
        removed: Callable[[], Collection[str]] = tuple,
    ):
        """`sites` are the names by which the hub registered them, in the order of the plan's clients.

        Without a deadline in the plan the engine waits `patience` seconds for a site that is away: for `absent` ones
        only after they have been available, and never for those that the hub has `removed`.
        """
        self._plan, self._grid, self._sites, self._run, self._folder = plan, grid, sites, run, folder
        self._plan_text = plan.toml()
        self._journal, self._removed = journal, removed
        self._wait = patience if plan.deadline == "none" else 0.0  # for a site that is away
        self.patience = max(self._wait, RETURN)
        self._start = time.monotonic() - float(saved.transit.get("now", 0.0))
        self._left: set[int] = set(saved.transit.get("left", []))
        self._nodes: dict[int, int] = {}  # available clients, and Flower's number of each
        self._last_seen = {client: -math.inf if client in absent else self.now() for client in range(len(sites))}
        self._away: set[int] = set()  # recorded as such in the journal
        self._refreshed = -math.inf
        self._without_task: dict[int, str] = {}  # and the site's reason
        self._in_flight = [
            InFlight(entry["client"], entry["request_id"], load_wire(folder, entry["wire"]))
            for entry in saved.transit.get("flights", [])
        ]
        self._pings: dict[int, InFlight] = {}
        self._submitted: set[str] = set()  # since the last call of `replies`

    def clients(self) -> Availability:
        """A client that was available a short while ago counts as available: it is probably back soon."""
        self._refresh()
        everyone = frozenset(range(len(self._sites)))
        away = frozenset(client for client in everyone if self._is_away(client, self._wait))
        limit = max(self._wait, RETURN if self._nodes else OUTAGE)  # longer than a restart takes
        gone = frozenset(client for client in everyone if self._is_away(client, limit))
        busy = frozenset(flight.client for flight in self._in_flight)
        return Availability(everyone - away, busy, away, gone, frozenset(self._left))

    def now(self) -> float:
        return time.monotonic() - self._start

    def submit(self, request: Request) -> None:
        self._in_flight = [flight for flight in self._in_flight if not self._replaces(request, flight)]
        self._in_flight.append(InFlight(request.client, request.request_id, request.wire))
        self._submitted.add(request.request_id)
        self._send()

    def ready(self) -> Reply | None:
        return None  # `replies` polls the grid

    def replies(self, timeout: float | None = None, only: Collection[str] | None = None) -> Iterator[Reply]:
        """With a timeout it may end earlier, when all sites that still owe a reply are gone or have no task."""
        end = math.inf if timeout is None else self.now() + timeout
        ids, self._submitted = self._submitted, set()
        before = self.clients().available
        idle = not self._awaited(ids, timeout, only)
        while self.now() <= end:
            self._advance()
            while (reply := self._next_reply(only)) is not None:
                yield reply
            if not self._awaited(ids, timeout, only) and not (idle and self._may_return(before)):
                return
            time.sleep(POLL)

    def save(self) -> EngineState:
        """Sites keep their own states. Requests without a reply are sent again after a restart."""
        flights = [
            {
                "client": flight.client,
                "request_id": flight.request_id,
                "wire": save_wire(flight.wire, self._folder, f"flight-{flight.request_id}"),
            }
            for flight in self._in_flight
        ]
        return EngineState(transit={"now": self.now(), "flights": flights, "left": sorted(self._left)})

    def close(self) -> None:
        """Flower closes the grid."""

    # ---- availability ------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        if self.now() - self._refreshed < REFRESH:
            return
        nodes = {node.name: node.node_id for node in self._grid.get_nodes()}
        self._refreshed = self.now()
        self._nodes = {client: nodes[name] for client, name in enumerate(self._sites) if name in nodes}
        removed = self._removed()
        for client, name in enumerate(self._sites):
            if name in removed:
                self._leave(client, "removed")
            if client in self._nodes:
                self._last_seen[client] = self._refreshed
                if client in self._away:
                    self._away.discard(client)
                    self._record("back", client)
            elif client not in self._away and client not in self._left:
                self._away.add(client)
                self._record("away", client)

    def _is_away(self, client: int, seconds: float) -> bool:
        """Has it left, or is it away for at least so many seconds?"""
        is_missing = client not in self._nodes and self.now() - self._last_seen[client] >= seconds
        return is_missing or client in self._left

    def _leave(self, client: int, event: str = "left") -> None:
        if client not in self._left:  # a site may say so in reply to several requests
            self._left.add(client)
            self._record(event, client)

    def _may_return(self, before: frozenset[int]) -> bool:
        """With nothing in flight: is a site missing that may return, and has none returned yet?"""
        now = self.clients()
        if not now.available:
            return len(self._left) < len(self._sites)
        return now.available <= before and len(now.gone | now.available) < len(self._sites)

    # ---- what is in flight -------------------------------------------------------------------------------------------

    def _replaces(self, request: Request, flight: InFlight) -> bool:
        """Does a request replace an earlier one? Not if the site is working on that: its reply still counts."""
        if flight.request_id == request.request_id:
            return True
        working = bool(flight.message_id) and flight.client not in self._without_task
        return flight.client == request.client and flight.reply is None and not working

    def _awaited(self, ids: Collection[str], timeout: float | None, only: Collection[str] | None) -> bool:
        """Is a reply expected: to the last requests, or of sites that work on earlier ones?

        A request to a site that is gone stays in flight: its reply still counts if the site returns. Without new
        requests, sites without a task are expected to get one.
        """
        if only is not None:
            return any(flight.request_id in only for flight in self._in_flight)
        if timeout is None:
            return bool(self._in_flight)
        idle = {*self.clients().away, *(self._without_task if ids else ())}
        return any(flight.request_id in ids or flight.client not in idle for flight in self._in_flight)

    def _next_reply(self, only: Collection[str] | None) -> Reply | None:
        for flight in self._in_flight:
            if flight.reply is not None and (only is None or flight.request_id in only):
                self._in_flight.remove(flight)
                return Reply(flight.client, flight.reply.wire, flight.reply.seconds, flight.request_id)
        return None

    def _advance(self) -> None:
        """One turn: refresh, drop what nobody will answer, ping, send and pull."""
        now = self.clients()
        gone = now.away if self._plan.deadline == "none" else now.left
        self._in_flight = [each for each in self._in_flight if each.reply is not None or each.client not in gone]
        self._ping()
        self._send()
        self._pull()

    def _ping(self) -> None:
        """Send an empty request to idle sites, above all to those that have finished: they may have left."""
        idle = self._nodes.keys() - {flight.client for flight in self._in_flight} - self._left
        self._pings = {client: ping for client, ping in self._pings.items() if client in idle}
        for client in idle:
            ping = self._pings.get(client)
            found = self._receive(ping) if ping and ping.message_id else None
            if isinstance(found, SiteReply) and found.left:
                self._leave(client)
            if ping is None or found is not None:  # any reply will do: a fault will show in the next request
                self._pings[client] = InFlight(client, "", b"", due=self.now() + PING)

    def _send(self) -> None:
        for flight in [*self._in_flight, *self._pings.values()]:
            node = self._nodes.get(flight.client)
            if flight.message_id or node is None or self.now() < flight.due:
                continue
            request = SiteRequest(flight.wire, self._run, self._plan_text, flight.client)
            (message_id,) = list(self._grid.push_messages([pack(request, node, LIFETIME)])) or [""]
            flight.message_id, flight.due = message_id or "", self.now() + RETRY

    def _pull(self) -> None:
        """Receive replies. Flower delivers each once, so they are kept until `_next_reply` takes them."""
        for flight in [flight for flight in self._in_flight if flight.message_id and flight.reply is None]:
            found = self._receive(flight)
            if found is None:
                continue
            if isinstance(found, str) and flight.failures >= MAX_FAILURES:
                found = SiteReply(encode(failure(decode(flight.wire), found)))
            if isinstance(found, str):
                self._record("retry", flight.client, request=flight.request_id, reason=found)
            elif found.left:
                self._leave(flight.client)
            elif found.waiting:
                if self._without_task.get(flight.client) != found.waiting:
                    self._record("waiting", flight.client, reason=found.waiting)
                self._without_task[flight.client] = found.waiting
            else:
                self._without_task.pop(flight.client, None)
                flight.reply = found
                continue
            flight.message_id, flight.due = "", self.now() + RETRY

    def _receive(self, flight: InFlight) -> SiteReply | str | None:
        """The reply to a request, or its failure; None if there is none yet.

        Flower builds a reply, and waits for objects that are still being uploaded. It waits in a thread: a site that
        uploads slowly, or died meanwhile, delays nobody else. A reply belongs to the client of the request, whatever
        it claims, and a fault in it does not affect others.
        """
        if flight.pulling is None:
            flight.pulling = Future()
            arguments = (self._grid, flight.message_id, flight.pulling)
            threading.Thread(target=_pull_into, args=arguments, daemon=True).start()
        wait([flight.pulling], timeout=POLL)
        if not flight.pulling.done():
            return None
        pulling, flight.pulling = flight.pulling, None
        try:
            message = next(iter(pulling.result()), None)
            if message is None or not message.has_error():
                return message and unpack_reply(message)
            flight.failures += message.error.code != NODE_UNAVAILABLE
            reason = f"Flower's error {message.error.code}: {(message.error.reason or '').strip()}"
        except httpx.HTTPError:  # the hub's own SuperLink, not a fault of the site
            raise
        except Exception as error:
            flight.failures += 1
            reason = f"its reply cannot be read: {type(error).__name__}: {error}"
        return printable(" ".join(reason.split()))[:MAX_REASON]

    def _record(self, event: str, client: int, **facts: Any) -> None:
        self._journal(event, client=client, site=self._sites[client], time=round(self.now(), 3), **facts)


def _pull_into(grid: Grid, message_id: str, result: Future[list[Message]]) -> None:
    try:
        result.set_result(list(grid.pull_messages([message_id])))
    except BaseException as error:
        result.set_exception(error)
