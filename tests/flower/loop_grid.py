"""A fake of Flower's grid that calls the client app directly: engine and client app without processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from federation import TINY
from flwr.app import Context, Message, RecordDict

import weft
from weft.core.engine import EngineState, Reply, Request
from weft.files import write_json
from weft.flower import client_app
from weft.flower.engine import FlowerEngine
from weft.flower.hub.runs import ABSENT
from weft.flower.server_app import connect
from weft.runs.folder import SITES, RunFolder
from weft.runs.run import resume
from weft.wire.message import Message as WeftMessage
from weft.wire.message import encode

SHORT, LONG = 1.0, 50.0  # seconds of a clock that advances only while the engine sleeps


class Loop:
    """A grid whose sites are folders. `spoil` may replace the reply to a message."""

    def __init__(self, folder: Path, names: list[str], spoil: Callable[[int, Message], Message | None] | None = None):
        self.folder, self.names, self.spoil = folder, list(names), spoil
        self.replies: dict[str, list[Message]] = {}
        self.sent = 0

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=index + 1, name=name) for index, name in enumerate(self.names)]

    def push_messages(self, messages: list[Message]) -> list[str]:
        (message,) = messages
        message.metadata.__dict__["_message_id"] = name = f"message-{self.sent}"
        (self.folder / self.names[message.metadata.dst_node_id - 1]).mkdir(exist_ok=True)
        self.sent += 1
        spoiled = self.spoil(self.sent - 1, message) if self.spoil else None
        self.replies[name] = [spoiled or self.answer(message)]
        return [name]

    def answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        config = {"site": str(self.folder / self.names[node - 1]), "hub": "hub:1"}
        return client_app.on_message(message, Context(1, node, config, RecordDict(), {}))

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        return [message for name in message_ids for message in self.replies.pop(name, [])]


class Fading(Loop):
    """The second site takes messages but is silent after the first `silent_from`; unless it `stays` it is away then."""

    def __init__(self, folder: Path, silent_from: int, stays: bool):
        super().__init__(folder, ["a", "b"])
        self.silent_from, self.stays, self.to_second = silent_from, stays, 0
        self.held: dict[str, Message] = {}
        self.unanswered: dict[str, Message] = {}

    def push_messages(self, messages: list[Message]) -> list[str]:
        names = super().push_messages(messages)
        if messages[0].metadata.dst_node_id == 2:
            self.to_second += 1
            if self.to_second > self.silent_from:
                self.held[names[0]] = self.replies.pop(names[0])[0]
                self.unanswered[names[0]] = messages[0]
                self.names = ["a", "b"] if self.stays else ["a"]
        return names

    def release(self) -> None:
        """The second site is back, and its replies arrive."""
        self.names = ["a", "b"]
        for name in list(self.held):
            self.replies[name] = [self.held.pop(name)]


def run(folder: Path, grid: Loop, absent: tuple[str, ...] = (), **more: Any) -> Path:
    """A whole run over the sites a and b."""
    RunFolder.create(folder, weft.Plan.merge({**TINY, **more})).close()
    write_json(folder / SITES, {"names": ["a", "b"], "run": "run"})
    write_json(folder / ABSENT, absent)
    resume(folder, save_every=0, connect=partial(connect, grid))
    return folder


class Engine(FlowerEngine):
    events: list[tuple[str, int]]  # of the journal, with the client of each


def make_engine(
    grid: Loop, folder: Path, saved: EngineState | None = None, deadline: float | str = "none", **more: Any
) -> Engine:
    events: list[tuple[str, int]] = []
    plan = weft.Plan.merge({**TINY, "deadline": deadline})
    more = {"patience": 0.2, **more}

    def journal(event: str, **facts: Any) -> None:
        assert facts["site"] == "ab"[facts["client"]]
        events.append((event, facts["client"]))

    engine = Engine(plan, grid, ["a", "b"], "run", folder, saved or EngineState(), journal, **more)
    engine.events = events
    return engine


def request(client: int, round_index: int = 0) -> Request:
    name, ops = f"0.{round_index}.{client}", ("train",) if round_index else ("begin", "train")
    message = WeftMessage("server", f"client-{client}", name, ops, 0, round_index)
    return Request(client, encode(message), name)


def exchange(engine: FlowerEngine, *requests: Request, deadline: float | None = None) -> list[Reply]:
    for each in requests:
        engine.submit(each)
    return list(engine.replies(deadline))


def replied(engine: FlowerEngine, *requests: Request, deadline: float | None = None) -> list[str]:
    """The ids of the requests whose replies arrive."""
    return [reply.request_id for reply in exchange(engine, *requests, deadline=deadline)]
