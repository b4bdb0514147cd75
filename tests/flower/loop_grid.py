"""A stand-in for Flower's grid that hands messages over by itself: engine and client app without processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Message, RecordDict

import weft
from weft.core.engine import Request, Saved
from weft.flower import client_app as client
from weft.flower.engine import Far
from weft.flower.server_app import connect
from weft.runs.folder import Record
from weft.runs.run import resume
from weft.wire.message import Message as Words
from weft.wire.message import decode, encode

TINY = {
    "clients": 2,
    "tasks": 2,
    "network": "mlp",
    "rounds_per_task": 2,
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}


class Loop:
    """A grid whose sites are folders here. `spoil` may put another message in the place of an answer."""

    def __init__(self, folder: Path, names: list[str], spoil: Callable[[int, Message], Message | None] | None = None):
        self.folder, self.names, self.spoil = folder, list(names), spoil
        self.replies: dict[str, list[Message]] = {}
        self.asked = 0

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=place + 1, name=name) for place, name in enumerate(self.names)]

    def push_messages(self, messages: list[Message]) -> list[str]:
        (message,) = messages
        message.metadata.__dict__["_message_id"] = name = f"message-{self.asked}"
        site = self.folder / self.names[message.metadata.dst_node_id - 1]
        site.mkdir(exist_ok=True)
        self.asked += 1
        spoilt = self.spoil(self.asked - 1, message) if self.spoil else None
        self.replies[name] = [spoilt or client.on_message(message, self.context(message))]
        return [name]

    def context(self, message: Message) -> Context:
        node = message.metadata.dst_node_id
        config = {"site": str(self.folder / self.names[node - 1]), "hub": "here"}
        return Context(1, node, config, RecordDict(), {})

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        return [message for name in message_ids for message in self.replies.pop(name, [])]


def run(folder: Path, grid: Loop, **more: Any) -> Path:
    Record.create(folder, weft.Plan.merge({**TINY, **more})).close()
    resume(folder, save_every=0, connect=lambda session, saved: connect(grid, ["a", "b"], "run", session, saved))
    return folder


def far(grid: Loop, tmp_path: Path, saved: Saved | None = None, deadline: float | str = "none", **more: Any) -> Far:
    told: list[tuple[str, dict[str, Any]]] = []
    more = {"patience": 0.2, "on_leave": lambda client: told.append(("removed", {"client": client})), **more}
    found = Far(
        weft.Plan.merge({**TINY, "deadline": deadline}),
        grid,
        ["a", "b"],
        "run",
        tmp_path,
        saved or Saved({}, {}),
        lambda event, **facts: told.append((event, facts)),
        **more,
    )
    found.told = told  # type: ignore[attr-defined]
    return found


def ask(client_index: int, round_index: int = 0) -> Request:
    name, ops = f"0.{round_index}.{client_index}", ("train",) if round_index else ("begin", "train")
    words = Words("server", f"client-{client_index}", name, ops, 0, round_index)
    return Request(client_index, encode(words), name)


SHORT, LONG = 1.0, 50.0  # seconds of a clock that moves while the engine sleeps, and else stands still


class Fading(Loop):
    """The second site takes its messages from some moment on and says nothing; then it is not there either."""

    def __init__(self, folder: Path, silent_from: int, stays: bool):
        super().__init__(folder, ["a", "b"])
        self.silent_from, self.stays, self.to_second = silent_from, stays, 0
        self.held: dict[str, Message] = {}
        self.asked_of_second: dict[str, Message] = {}  # what it said nothing to

    def push_messages(self, messages: list[Message]) -> list[str]:
        names = super().push_messages(messages)
        if messages[0].metadata.dst_node_id == 2:
            self.to_second += 1
            if self.to_second > self.silent_from:
                self.held[names[0]] = self.replies.pop(names[0])[0]
                self.asked_of_second[names[0]] = messages[0]
                self.names = ["a", "b"] if self.stays else ["a"]
        return names

    def let_go(self) -> None:
        self.names = ["a", "b"]
        for name in list(self.held):
            self.replies[name] = [self.held.pop(name)]


def answers(found: Far, requests: list[Request], deadline: float) -> list[str]:
    return [decode(reply.wire).request_id for reply in found.exchange(requests, deadline)]
