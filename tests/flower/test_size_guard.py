"""Replies that are too large or damaged, through Flower's own grid over a fake connection."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from federation import events, outcome
from flwr.app import Message
from flwr.common.serde import message_to_proto
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid import http_grid
from loop_grid import Loop, exchange, make_engine, request, run
from test_engine import knowledge

from weft.flower import engine, size_guard
from weft.flower.envelope import SiteReply, SiteRequest, pack, pack_reply
from weft.wire.message import decode

pytestmark = [pytest.mark.attack, pytest.mark.usefixtures("quick")]

MEGABYTE = 1 << 20
BOUND = 12 * MEGABYTE  # of a message, if a test sets one

Tamper = Callable[[dict[str, bytes]], dict[str, bytes]]


class Connection:
    """In place of the SuperLink: one reply as the objects that a site has uploaded, changed by `tamper`."""

    def __init__(self, message: Message, tamper: Tamper | None):
        message.metadata.__dict__["_message_id"] = name = message.object_id
        objects = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
        self.message, self.tree = message, get_object_tree(message)
        self.objects = tamper(objects) if tamper else objects
        for key in self.objects.keys() - objects.keys():
            self.tree.children.add(object_id=key)
        assert name in objects

    def PullMessages(self, _: Any) -> Any:  # noqa: N802 - Flower's name
        proto = message_to_proto(http_grid.remove_content_from_message(self.message))
        return PullAppMessagesResponse(messages_list=[proto], message_object_trees=[self.tree])

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        content = self.objects[request.object_id]
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, _: Any) -> None:  # noqa: N802
        return None


class Wired(Loop):
    """A grid whose replies go through Flower's own code; the second site may tamper with its own."""

    def __init__(self, folder: Path, tamper: Tamper | None, times: float = float("inf")):
        super().__init__(folder, ["a", "b"])
        self.tamper, self.left, self.of_second = tamper, times, set[str]()

    def push_messages(self, messages: list[Message]) -> list[str]:
        names = super().push_messages(messages)
        if messages[0].metadata.dst_node_id == 2:
            self.of_second.update(names)
        return names

    def pull_messages(self, message_ids: list[str]) -> list[Message]:
        found = []
        for name in message_ids:
            for message in self.replies.pop(name, []):
                tamper = self.tamper if name in self.of_second and self.left > 0 else None
                self.left -= tamper is not None
                grid = http_grid.HttpGrid(token="x")
                grid._run = SimpleNamespace(run_id=1)  # type: ignore[assignment]
                grid._client = Connection(message, tamper)  # type: ignore[assignment]
                found += list(grid.pull_messages([name]))
                found[-1].metadata.__dict__["_reply_to_message_id"] = name
        return found


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inflatable_utils, http_grid):
        monkeypatch.setattr(module, "pull_objects", inflatable_utils.pull_objects)


@pytest.fixture
def guarded() -> Callable[..., Any]:
    size_guard.install(lambda: BOUND)
    pull: Callable[..., Any] = inflatable_utils.pull_objects
    return pull


def with_array(**changes: Any) -> Tamper:
    """Change the metadata of the array; its head stays."""

    def tamper(objects: dict[str, bytes]) -> dict[str, bytes]:
        (key,) = [key for key, content in objects.items() if content.startswith(b"Array ")]
        head, _, body = objects[key].partition(b"\0")
        body = json.dumps(json.loads(body) | changes).encode()
        return {**objects, key: re.sub(rb"\d+$", str(len(body)).encode(), head) + b"\0" + body}

    return tamper


def indices(*found: int) -> Tamper:
    return with_array(arraychunk_ids=list(found))


def large_chunk(objects: dict[str, bytes]) -> dict[str, bytes]:
    """One chunk of a megabyte, listed 64 times."""
    (key,) = [key for key, content in objects.items() if content.startswith(b"ArrayChunk ")]
    chunk = b"ArrayChunk  %d\0" % MEGABYTE + bytes(MEGABYTE)
    return indices(*[0] * 64)({**objects, key: chunk})


def more_chunks(count: int, size: int) -> Tamper:
    """That no array lists."""
    chunk = b"ArrayChunk  %d\0" % size + bytes(size)
    return lambda objects: {**objects, **{f"{index:064x}": chunk for index in range(count)}}


BAD: dict[str, Tamper] = {
    "index out of range": indices(99),
    "no chunk": indices(),
    "repeated chunk": large_chunk,
    "unlisted chunks": more_chunks(64, MEGABYTE),
    "many objects": more_chunks(size_guard.MAX_OBJECTS, 0),
    "large metadata": with_array(shape=[1] * (size_guard.MAX_METADATA // 2)),
    "no head": lambda objects: dict.fromkeys(objects, b"?"),
}


@pytest.mark.parametrize("tamper", BAD.values(), ids=BAD)
def test_an_unreadable_reply_is_a_failure_of_its_site(
    tmp_path: Path, guarded: Callable[..., Any], tamper: Tamper
) -> None:
    """The request is sent again, then the failure is its reply; memory does not grow by the claimed size."""
    grid = Wired(tmp_path, tamper)
    grid.spoil = lambda _, message: pack_reply(SiteReply(b"wire"), message)
    found = make_engine(grid, tmp_path)
    tracemalloc.start()
    try:
        (reply,) = exchange(found, request(1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "cannot be read" in decode(reply.wire).error
    assert found.events == [("retry", 1)] * (engine.MAX_FAILURES - 1)
    assert peak < 3 * BOUND


@pytest.mark.parametrize("name", ["index out of range", "repeated chunk"])
def test_a_run_continues_without_an_unreadable_reply_and_names_its_site(tmp_path: Path, name: str) -> None:
    folder = run(tmp_path / "run", Wired(tmp_path, BAD[name]))
    found = events(folder)
    assert {event["site"] for event in found if event["event"] == "retry"} == {"b"}
    assert {event["client"] for event in found if event["event"] == "incident"} == {1}
    assert knowledge(folder) == ["A 0.0", "A 0.1"]


def test_a_reply_that_is_readable_after_a_retry_counts(tmp_path: Path, local: Any) -> None:
    assert outcome(run(tmp_path / "run", Wired(tmp_path, indices(99), times=2))) == local


def test_a_broken_connection_of_the_hub_is_not_a_failure_of_a_site(tmp_path: Path) -> None:
    grid = Loop(tmp_path, ["a", "b"])

    def broken(_: list[str]) -> list[Message]:
        raise httpx.ConnectError("the SuperLink is away")

    grid.pull_messages = broken  # type: ignore[method-assign]
    with pytest.raises(httpx.ConnectError):
        exchange(make_engine(grid, tmp_path), request(0))


def test_a_reply_belongs_to_the_client_of_its_request(tmp_path: Path) -> None:
    """Whatever it claims: Flower does not check that."""
    grid = Loop(tmp_path, ["a", "b"])
    claims = iter(["message-1", "message-0"])
    pulled = grid.pull_messages

    def claiming(names: list[str]) -> list[Message]:
        found = pulled(names)
        for message in found:
            message.metadata.__dict__["_reply_to_message_id"] = next(claims)
        return found

    grid.pull_messages = claiming  # type: ignore[method-assign]
    replies = exchange(make_engine(grid, tmp_path), request(1), request(0))
    assert {reply.client: decode(reply.wire).sender for reply in replies} == {0: "client-0", 1: "client-1"}


def test_a_site_has_the_guard_too(guarded: Callable[..., Any], tmp_path: Path) -> None:
    """Flower calls the same function there."""
    content = large_chunk(Connection(reply_of(tmp_path), None).objects)
    with pytest.raises(size_guard.MessageTooLargeError, match="67,"):
        guarded(list(content), content.__getitem__)


def test_a_message_of_equal_chunks_is_accepted(guarded: Callable[..., Any], tmp_path: Path) -> None:
    """An array of zeros is one chunk, listed twice."""
    content = Connection(reply_of(tmp_path, bytes(10 * MEGABYTE)), None).objects  # Flower splits every 5 MiB
    assert len([each for each in content.values() if each.startswith(b"ArrayChunk ")]) == 1
    assert guarded(list(content), content.__getitem__) == content


def reply_of(folder: Path, wire: bytes = b"wire") -> Message:
    grid = Loop(folder, ["a", "b"], lambda _, message: pack_reply(SiteReply(wire), message))
    (name,) = grid.push_messages([pack(SiteRequest(b"", "run", "", 0), 1, 60.0)])
    (found,) = grid.pull_messages([name])
    return found
