"""Engines: how requests reach clients and replies come back. An engine carries bytes and knows nothing of learning.

Neither a client that fails nor one that is silent stops an engine: the first gives an error reply (a message whose
`error` says why), the second misses the deadline, and its reply may still arrive later. On one machine a fault in a
user's method is not an accident of a remote site but a bug to fix: there it ends the run with one line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self


class Request(NamedTuple):
    client: int
    wire: bytes
    request_id: str
    work: float = 1.0  # how much of a round's training is requested
    crosses: bool = True  # the network; if not, the request can be neither late nor lost


class Reply(NamedTuple):
    client: int
    wire: bytes
    seconds: float  # that the client worked
    request_id: str = ""  # the request that it answers, if that is known: the message may be damaged


@dataclass(frozen=True)
class Availability:
    """Which clients can get requests, by number."""

    available: frozenset[int]
    busy: frozenset[int] = frozenset()  # have not answered a request, and may still do so
    away: frozenset[int] = frozenset()  # not expected back soon: no round waits for them
    gone: frozenset[int] = frozenset()  # not expected back at all
    left: frozenset[int] = frozenset()  # have left for good: what they shared is removed


@dataclass
class EngineState:
    """What a checkpoint keeps of an engine: files of the clients' states, and JSON of what is on its way."""

    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    answered: dict[int, int] = field(default_factory=dict)  # requests that each client has answered
    transit: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, clients: dict[str, Any], answered: dict[str, int], transit: dict[str, Any] | None = None) -> Self:
        """From JSON, whose keys are strings."""
        files = {int(client): reference for client, reference in clients.items()}
        return cls(files, {int(client): count for client, count in answered.items()}, transit or {})


class Engine(Protocol):
    """What the server loop works with."""

    remote: bool  # clients are elsewhere: an unanswered request may be answered after a restart
    patience: float  # seconds within which a client that was killed is presumably back

    def clients(self) -> Availability: ...

    def now(self) -> float:
        """Seconds since the start, virtual or real."""
        ...

    def submit(self, request: Request) -> None:
        """Hand over a request. May compute its reply at once, or block while the queue of a worker is full."""
        ...

    def ready(self) -> Reply | None:
        """A reply that has arrived already; never waits and never computes."""
        ...

    def replies(self, timeout: float | None = None, only: Collection[str] | None = None) -> Iterator[Reply]:
        """Replies as they arrive, to earlier requests too, for at most `timeout` seconds.

        Without a timeout it ends when no reply is on its way any more; with nothing on its way it waits until another
        client becomes available. The caller may stop at any reply. `only`: just the replies to these requests.
        """
        ...

    def save(self) -> EngineState:
        """Write the states of all clients to disk."""
        ...

    def close(self) -> None: ...
