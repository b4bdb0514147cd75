"""Engines: how requests reach clients and replies come back. An engine carries bytes and knows nothing of learning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol


class Request(NamedTuple):
    client: int
    wire: bytes


class Reply(NamedTuple):
    client: int
    wire: bytes
    seconds: float  # that the client worked


class Saved(NamedTuple):
    """Where the clients' states lie, and how often each has moved on."""

    states: dict[int, dict[str, Any]]
    answers: dict[int, int]


class Engine(Protocol):
    def exchange(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """Hand over the requests, give the replies as they come."""
        ...

    def save(self) -> Saved:
        """Put all clients' states on disk."""
        ...

    def close(self) -> None: ...
