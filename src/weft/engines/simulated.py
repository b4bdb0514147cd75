"""SimulatedEngine: clients of this machine on a virtual clock, with fault injection as the plan says.

Results must not depend on how busy a machine is, so time is drawn and not measured: one virtual second is what a client
of full speed needs for a round. Durations, availability and faults are functions of seed, client and request; nothing
is remembered, so a resumed run meets the same clients at the same times.

The order of replies is decided by these draws, never by which worker was fastest. The work itself is done when the
first reply is due that is not computed yet: then all waiting requests go to the workers at once. So many clients work
at the same time, and still each request was made from what the server knew at its virtual moment.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

from weft.core.engine import Availability, EngineState, Reply, Request
from weft.core.storage import load_wire, save_wire
from weft.plan import ClockOptions, FaultOptions, Plan
from weft.randomness import generator
from weft.wire.message import PREFIX, decode, encode, failure

Fault = Literal["none", "crash", "drop", "corrupt", "delay"]
FAULTS: tuple[Fault, ...] = ("crash", "drop", "corrupt", "delay")
HEADER_ONLY = 1024  # bytes; a smaller reply has no tensors


class Carrier(Protocol):
    """Runs clients: `LocalEngine` or `WorkerEngine`."""

    def submit(self, request: Request) -> None: ...
    def ready(self) -> Reply | None: ...
    def replies(self) -> Iterator[Reply]: ...
    def save(self) -> EngineState: ...


@dataclass
class InFlight:
    """A request on its way, and then its reply."""

    client: int
    request_id: str
    fault: Fault
    done: float  # when the client finishes its work
    arrives: float  # when the server has the reply
    wire: bytes  # the request until it is computed, then the reply
    computed: bool = False
    seconds: float = 0.0  # of real work


class SimulatedEngine:
    remote, patience = False, 0.0

    def __init__(self, plan: Plan, carrier: Carrier, folder: Path, saved: EngineState):
        """`folder`: where replies that are on their way are saved."""
        self._plan, self._carrier, self._folder = plan, carrier, folder
        self._clock = Clock(plan.clock, plan.seed)
        # where all replies are waited for and none can fail, their order does not matter: nothing is held back
        self._ordered = (
            plan.asynchronous == "updates" or plan.quorum != "all" or plan.deadline != "none" or plan.faults.any
        )
        self._now: float = saved.transit.get("now", 0.0)
        self._flights = [
            InFlight(**{**flight, "wire": load_wire(folder, flight["wire"])})
            for flight in saved.transit.get("flights", [])
        ]
        self._last, self._submitted = self._now, False  # of requests since the last call of `replies`

    def clients(self) -> Availability:
        available = (c for c in range(self._plan.clients) if self._clock.is_available(c, self._now))
        return Availability(frozenset(available), busy=frozenset(flight.client for flight in self._flights))

    def now(self) -> float:
        return self._now

    def submit(self, request: Request) -> None:
        flight, self._submitted = self._depart(request), True
        self._last = max(self._last, flight.arrives)
        if self._ordered:
            self._flights.append(flight)
        else:
            self._carrier.submit(request)

    def ready(self) -> Reply | None:
        return None if self._ordered else self._carrier.ready()

    def replies(self, timeout: float | None = None, only: Collection[str] | None = None) -> Iterator[Reply]:
        submitted, self._submitted = self._submitted, False
        if not self._ordered:
            yield from self._carrier.replies()
            self._now = self._last  # all replies are in
            if not submitted:
                self._wait(math.inf)
            self._last = self._now
            return
        end = math.inf if timeout is None else self._now + timeout
        dropped, quiet = False, True  # was a reply lost? did none arrive?
        while coming := [flight for flight in self._flights if only is None or flight.request_id in only]:
            first = min(coming, key=lambda flight: flight.arrives)  # the earliest requested, if several are due
            if first.arrives > end:
                self._now = end
                return
            if not first.computed:
                self._compute()
            self._flights.remove(first)
            if first.fault == "drop":
                dropped = True
                continue
            self._now, quiet = max(self._now, first.arrives), False
            yield Reply(first.client, first.wire, first.seconds, first.request_id)
        if dropped and timeout is not None:
            self._now = end  # waiting for a reply that was lost lasts until the end
        elif quiet:
            self._wait(end)

    def _wait(self, end: float) -> None:
        """With nothing on its way, until another client becomes available, or until the end, if there is one."""
        coming = [self._clock.available_from(client, self._now) for client in range(self._plan.clients)]
        moment = min([end, *(moment for moment in coming if moment > self._now)])
        self._now = moment if moment < math.inf else self._now

    def _depart(self, request: Request) -> InFlight:
        client, wire, request_id, work, crosses = request
        if not crosses:
            return InFlight(client, request_id, "none", self._now, self._now, wire)
        busy = max((flight.done for flight in self._flights if flight.client == client), default=self._now)
        done = max(self._now, busy) + work * self._clock.duration(client, request_id)
        fault = fault_of(self._plan.faults, self._plan.seed, request_id)
        arrives = done + (self._plan.faults.delay_seconds if fault == "delay" else 0.0)
        return InFlight(client, request_id, fault, done, self._clock.available_from(client, arrives), wire)

    def _compute(self) -> None:
        """Let all clients work whose requests wait."""
        waiting = {flight.request_id: flight for flight in self._flights if not flight.computed}
        for flight in waiting.values():
            if flight.fault == "crash":
                flight.wire = encode(failure(decode(flight.wire), "crashed by fault injection"))
                flight.computed = True
            else:
                self._carrier.submit(Request(flight.client, flight.wire, flight.request_id))
        for reply in self._carrier.replies():
            flight = waiting[reply.request_id]
            damaged = flight.fault == "corrupt"
            flight.wire = corrupted(reply.wire, self._plan.seed, flight.request_id) if damaged else reply.wire
            flight.computed, flight.seconds = True, reply.seconds

    def save(self) -> EngineState:
        self._compute()  # a request lives in memory only; a reply can be saved
        state = self._carrier.save()
        flights = [
            {**asdict(flight), "wire": save_wire(flight.wire, self._folder, f"flight-{flight.request_id}")}
            for flight in self._flights
        ]
        state.transit = {"now": self._now, "flights": flights}
        return state

    def close(self) -> None:
        """Nothing outside this process to release: a worker pool is its owner's to close."""


# ---- the virtual clock -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """How long clients take and when they are available, drawn from the plan's seed."""

    options: ClockOptions
    seed: int

    def duration(self, client: int, request_id: str) -> float:
        """The seconds that a client works on a request."""
        slowness = self.options.spread ** generator(self.seed, "speed", client).random()
        jitter = self.options.jitter * generator(self.seed, "jitter", request_id).standard_normal()
        return float(slowness * math.exp(jitter))

    def available_from(self, client: int, moment: float) -> float:
        """The first moment, from this one on, at which the client is available."""
        for arrives, leaves in self._stays(client):
            if moment < leaves:
                return max(arrives, moment)
        raise AssertionError("a client always comes back")

    def is_available(self, client: int, moment: float) -> bool:
        return self.available_from(client, moment) == moment

    def _stays(self, client: int) -> Iterator[tuple[float, float]]:
        """When the client arrives and leaves, over and over; drawn one after another, so always the same."""
        options = self.options
        arrives = float(options.late * generator(self.seed, "late", client).random())
        if not options.stay:
            yield arrives, math.inf
            return
        for index in itertools.count():
            rng = generator(self.seed, "presence", client, index)
            leaves = arrives + float(rng.exponential(options.stay))
            yield arrives, leaves
            arrives = leaves + float(rng.exponential(options.away))


# ---- fault injection -------------------------------------------------------------------------------------------------


def fault_of(options: FaultOptions, seed: int, request_id: str) -> Fault:
    """The fault of a request, if any; it depends on the seed and the request's id alone."""
    drawn = generator(seed, "fault", request_id).random()
    for kind in FAULTS:
        drawn -= options.rates[kind]
        if drawn < 0:
            return kind
    return "none"


def corrupted(wire: bytes, seed: int, request_id: str) -> bytes:
    """A damaged reply: noise on the line, or a well-formed message of values that no training gives."""
    rng = generator(seed, "corrupt", request_id)
    kind = rng.integers(4 if len(wire) > HEADER_ONLY else 2)  # what has no tensors can only be damaged
    if kind == 0:
        return wire[: int(rng.integers(len(wire)))]
    if kind == 1:
        damaged = bytearray(wire)
        for index in rng.integers(len(wire), size=8):
            damaged[index] ^= int(rng.integers(1, 256))
        return bytes(damaged)
    # a valid checksum over random bits, or over values close to the largest there are
    _, _, header, size = PREFIX.unpack_from(wire)
    payload = rng.bytes(size) if kind == 2 else b"\xff\xff\x7f\x7f" * (size // 4 + 1)
    body = wire[: PREFIX.size + header] + payload[:size]
    return body + zlib.crc32(body).to_bytes(4, "little")
