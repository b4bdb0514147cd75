"""Clocked: clients of this machine on a virtual clock, where answers are late, lost or damaged as the plan says.

The order in which replies come is decided by drawn durations (clock.py) and fates (faults.py), never by which worker
was fastest. The work itself is done when the first reply is due that is not computed yet: then all requests that wait
are handed to the workers at once. So many clients work at the same time, and still each request was made from what the
server knew at its virtual moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core.engine import Arrival, Carrier, Request, Saved
from weft.core.storage import State
from weft.engines.clock import Clock
from weft.engines.faults import Fate, corrupted, fate
from weft.plan import Plan
from weft.wire.message import decode, encode, failure


@dataclass
class Flight:
    """A request on its way, and then its reply."""

    client: int
    request_id: str
    fate: Fate
    done: float  # when the client has finished its work
    arrives: float  # when the reply is there
    wire: bytes  # the request until it is computed, then the reply
    computed: bool = False
    seconds: float = 0.0  # that the client really worked


class Clocked:
    apart, patience = False, 0.0

    def __init__(self, plan: Plan, carrier: Carrier, folder: Path | None = None, saved: Saved | None = None):
        """`folder` is where replies that are on their way are saved."""
        self._plan, self._carrier, self._folder = plan, carrier, folder
        self._clock = Clock(plan.clock, plan.seed)
        # where all answers are waited for and none can fail, it does not matter who is first: nothing is held back
        self._ordered = (
            plan.asynchronous == "updates" or plan.quorum != "all" or plan.deadline != "none" or plan.faults.any
        )
        state = saved.clock if saved is not None else {}
        self._now: float = state.get("now", 0.0)
        self._flights = [_load(folder, described) for described in state.get("flights", [])]

    def clients(self) -> list[int]:
        return [client for client in range(self._plan.clients) if self._clock.is_there(client, self._now)]

    def gone(self) -> set[int]:
        return set()  # whoever is away comes back

    def lost(self) -> set[int]:
        return set()

    def busy(self) -> set[int]:
        return {flight.client for flight in self._flights}

    def now(self) -> float:
        return self._now

    def exchange(
        self, requests: Iterable[Request], deadline: float | None = None, only: bool = False
    ) -> Iterator[Arrival]:
        if not self._ordered:
            yield from self._stream(requests)
            return
        end = math.inf if deadline is None else self._now + deadline
        asked: set[str] = set()
        for request in requests:
            self._flights.append(self._depart(request))
            asked.add(request.request_id)
        silent, quiet = False, True  # was an answer lost? did none come?
        while coming := [flight for flight in self._flights if not only or flight.request_id in asked]:
            first = min(coming, key=lambda flight: flight.arrives)  # the earliest asked, if several are due
            if first.arrives > end:
                self._now = end
                return
            if not first.computed:
                self._compute()
            self._flights.remove(first)
            if first.fate == "drop":
                silent = True
                continue
            self._now, quiet = max(self._now, first.arrives), False
            yield Arrival(first.client, first.wire, first.seconds, first.request_id)
        if silent and deadline is not None:
            self._now = end  # who waits for an answer that was lost waits until the end
        elif quiet:
            self._wait(end)

    def _stream(self, requests: Iterable[Request]) -> Iterator[Arrival]:
        """All replies, as they come; the clock moves on to the last one's moment."""
        last, asked = self._now, False

        def noted() -> Iterator[Request]:
            nonlocal last, asked
            for request in requests:
                last, asked = max(last, self._depart(request).arrives), True
                yield request

        yield from (Arrival(*reply) for reply in self._carrier.exchange(noted()))
        self._now = last
        if not asked:
            self._wait(math.inf)

    def _wait(self, end: float) -> None:
        """With nothing on its way, until somebody comes who is not there now, or until the end, if there is one."""
        coming = [self._clock.there_from(client, self._now) for client in range(self._plan.clients)]
        moment = min([end, *(moment for moment in coming if moment > self._now)])
        self._now = moment if moment < math.inf else self._now

    def _depart(self, request: Request) -> Flight:
        client, wire, request_id, work, crosses = request
        if not crosses:
            return Flight(client, request_id, "fine", self._now, self._now, wire)
        busy = max((flight.done for flight in self._flights if flight.client == client), default=self._now)
        done = max(self._now, busy) + work * self._clock.duration(client, request_id)
        becomes = fate(self._plan.faults, self._plan.seed, request_id)
        arrives = done + (self._plan.faults.delay_seconds if becomes == "delay" else 0.0)
        return Flight(client, request_id, becomes, done, self._clock.there_from(client, arrives), wire)

    def _compute(self) -> None:
        waiting = [flight for flight in self._flights if not flight.computed]
        for flight in waiting:
            if flight.fate == "crash":
                crashed = failure(decode(flight.wire), "it crashed, as the plan wants some to")
                flight.wire, flight.computed = encode(crashed), True
        waiting = [flight for flight in waiting if not flight.computed]
        of_client: dict[int, list[Flight]] = {}
        for flight in waiting:
            of_client.setdefault(flight.client, []).append(flight)
        asked = (Request(flight.client, flight.wire, flight.request_id) for flight in waiting)
        for client, wire, seconds in self._carrier.exchange(asked):
            flight = of_client[client].pop(0)  # a client answers in the order in which it was asked
            if flight.fate == "corrupt":
                wire = corrupted(wire, self._plan.seed, flight.request_id)
            flight.wire, flight.computed, flight.seconds = wire, True, seconds

    def save(self) -> Saved:
        self._compute()  # a request lives in memory only; a reply can be saved
        flights = [_described(self._folder, flight) for flight in self._flights]
        return self._carrier.save()._replace(clock={"now": self._now, "flights": flights})

    def close(self) -> None:
        self._carrier.close()


def _described(folder: Path | None, flight: Flight) -> dict[str, Any]:
    assert folder is not None
    return {**asdict(flight), "wire": State(reply=flight.wire).save(folder, f"flight-{flight.request_id}")}


def _load(folder: Path | None, described: dict[str, Any]) -> Flight:
    assert folder is not None
    return Flight(**{**described, "wire": State.load(folder, described["wire"]).reply})
