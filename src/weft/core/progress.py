"""Progress: where the run is and what the server knows of each client. All of it is in every checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from weft.core.schedule import Assignment


@dataclass
class Pending:
    """A request without a reply."""

    assignment: Assignment
    issued_round: int  # the run's round
    issued_version: int  # merges by then (async=updates)
    issued_at: float  # on the engine's clock
    sent: dict[str, Any] = field(default_factory=dict)  # the fields of the request
    classes: list[list[str]] = field(default_factory=list)  # of each task up to the assignment's, as far as announced
    released: bool = False  # its task is over: the client is requested other things meanwhile


@dataclass
class ClientProgress:
    """What the server knows of one client; tasks are the last ones that got so far, as the client reported."""

    assigned: int = -1  # requested to train
    announced: int = -1  # async=updates: requested to announce the classes of
    started: int = -1
    contacted: int = -1  # has received the first download of
    finished: int = -1
    tested: int = -1
    uploaded: list[int] = field(default_factory=list)  # tasks whose knowledge has been uploaded
    first_download: dict[str, Any] = field(default_factory=dict)  # fields of `contacted`'s successor, to repeat it
    first_task: int = -1  # ... and its task
    position: list[int] = field(default_factory=lambda: [0, 0])  # async=updates: its next task and round
    incidents: int = 0
    left: bool = False
    size: dict[str, int] = field(default_factory=dict)
    density: list[float] = field(default_factory=list)  # of A, by task
    validation: dict[str, float] = field(default_factory=dict)  # accuracy at a task's end, by task
    classes: dict[str, list[str]] = field(default_factory=dict)  # identifiers that it announced, by task; never changed

    def advance(self, name: str, task: int) -> None:
        """Move one of the marks forward; late replies never move it back."""
        setattr(self, name, max(task, getattr(self, name)))


@dataclass
class Progress:
    clients: list[ClientProgress]
    task: int = 0  # the tasks before it are over for all clients
    round: int = 0  # rounds that are done, counted through the whole run
    version: int = 0  # async=updates: merges
    turns: int = 0  # async=updates: passes of the loop
    rounds_without_update: int = 0  # somebody replied, and nothing could be used
    images: int = 0  # trained on so far
    seconds: float = 0.0  # worked so far, in all sessions
    saves: int = 0  # checkpoints
    pending: dict[str, Pending] = field(default_factory=dict)  # by request id

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Self:
        progress = cls(**saved)
        progress.clients = [ClientProgress(**client) for client in saved["clients"]]
        progress.pending = {}
        for key, words in saved["pending"].items():
            given = words["assignment"]
            assignment = Assignment(**{**given, "ops": tuple(given["ops"])})
            progress.pending[key] = Pending(**{**words, "assignment": assignment})
        return progress
