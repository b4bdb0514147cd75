"""Engines: how requests reach clients and replies come back. An engine carries bytes and knows nothing of learning.

Neither a client that fails nor one that is silent stops an engine: the first gives an error reply (a message whose
`error` says why), the second misses the deadline. Its reply may still come out of a later exchange. On one machine a
fault in somebody's own method is no accident of a far-away site but a thing to mend: there it ends the run, in a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol


class Request(NamedTuple):
    client: int
    wire: bytes
    request_id: str
    work: float = 1.0  # how much of a round's training is asked for
    crosses: bool = True  # the wire; if not, it is the client's own business, which cannot be late or lost


class Reply(NamedTuple):
    client: int
    wire: bytes
    seconds: float  # that the client worked


class Arrival(NamedTuple):
    """A reply as an engine hands it over."""

    client: int
    wire: bytes
    seconds: float
    request_id: str = ""  # which request it is the answer to, if that is known: it may be damaged


class Saved(NamedTuple):
    """Where the clients' states lie, how often each has moved on, and what is on its way on a virtual clock."""

    states: dict[int, dict[str, Any]]
    answers: dict[int, int]
    clock: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Carrier(Protocol):
    """What takes requests to clients and brings all their replies."""

    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]: ...
    def save(self) -> Saved: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """What the loop works with."""

    apart: bool  # are clients elsewhere, so that whatever they are asked has to reach them?
    patience: float  # seconds within which who was killed is presumably back

    def clients(self) -> list[int]:
        """Who is there now."""
        ...

    def gone(self) -> set[int]:
        """Who is away and not expected back soon: no round waits for them."""
        ...

    def lost(self) -> set[int]:
        """Who is not expected back at all."""
        ...

    def busy(self) -> set[int]:
        """Who has not answered what it was asked, and may still do so."""
        ...

    def now(self) -> float:
        """Seconds since the beginning, virtual or real."""
        ...

    def exchange(
        self, requests: Iterable[Request], deadline: float | None = None, only: bool = False
    ) -> Iterator[Arrival]:
        """Hand over the requests; give replies as they come, also to earlier requests, for `deadline` seconds at most.

        Without a deadline it ends when no reply is on its way any more. Whoever has enough may stop listening; what is
        on its way then comes out of the next exchange. `only`: so do replies to earlier requests.
        """
        ...

    def save(self) -> Saved:
        """Put all clients' states on disk."""
        ...

    def close(self) -> None: ...
