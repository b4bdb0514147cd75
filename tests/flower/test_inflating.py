"""What a site's answer may do while Flower puts it together: Flower's own grid does, over a stand-in connection."""

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
from loop_grid import Loop, ask, far, run

from weft.flower import engine
from weft.flower import size_guard as inflating
from weft.flower.envelope import Answered, Asked, pack, reply
from weft.wire.message import decode

pytestmark = pytest.mark.usefixtures("quick")

MEGABYTE = 1 << 20
BOUND = 12 * MEGABYTE  # of a message, where a test sets one

Tamper = Callable[[dict[str, bytes]], dict[str, bytes]]


class Connection:
    """Where the SuperLink would answer: one reply, as the objects that a site has sent, and any that it likes."""

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
    """A grid whose replies go through Flower's own pulling and inflating; the second site may tamper with its own."""

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
def as_flower_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inflatable_utils, http_grid):
        monkeypatch.setattr(module, "pull_objects", inflatable_utils.pull_objects)


@pytest.fixture
def guarded() -> Callable[..., Any]:
    inflating.guard(lambda: BOUND)
    pull: Callable[..., Any] = inflatable_utils.pull_objects
    return pull


def with_array(objects: dict[str, bytes], change: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    """The array's words are changed, its head stays."""
    (key,) = [key for key, content in objects.items() if content.startswith(b"Array ")]
    head, _, body = objects[key].partition(b"\0")
    words = json.loads(body)
    change(words)
    body = json.dumps(words).encode()
    return {**objects, key: re.sub(rb"\d+$", str(len(body)).encode(), head) + b"\0" + body}


def places(*found: int) -> Tamper:
    return lambda objects: with_array(objects, lambda words: words.update(arraychunk_ids=list(found)))


def large_chunk(objects: dict[str, bytes]) -> dict[str, bytes]:
    """One megabyte in the place of the chunk, named 64 times."""
    (key,) = [key for key, content in objects.items() if content.startswith(b"ArrayChunk ")]
    chunk = b"ArrayChunk  %d\0" % MEGABYTE + bytes(MEGABYTE)
    return places(*[0] * 64)({**objects, key: chunk})


def much(objects: dict[str, bytes]) -> dict[str, bytes]:
    """Chunks that nothing names."""
    chunk = b"ArrayChunk  %d\0" % MEGABYTE + bytes(MEGABYTE)
    return {**objects, **{f"{count:064x}": chunk for count in range(64)}}


def many(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {**objects, **{f"{count:064x}": b"ArrayChunk  0\0" for count in range(inflating.OBJECTS)}}


def wordy(objects: dict[str, bytes]) -> dict[str, bytes]:
    return with_array(objects, lambda words: words.update(shape=[1] * (inflating.WORDS // 2)))


def no_head(objects: dict[str, bytes]) -> dict[str, bytes]:
    return dict.fromkeys(objects, b"?")


BAD: dict[str, Tamper] = {
    "a place that is not there": places(99),
    "no chunk": places(),
    "one chunk often": large_chunk,
    "chunks that nothing names": much,
    "many parts": many,
    "many words": wordy,
    "no head": no_head,
}


@pytest.mark.parametrize("tamper", BAD.values(), ids=BAD)
def test_an_answer_that_cannot_be_put_together_is_its_sites_failure(
    tmp_path: Path, guarded: Callable[..., Any], tamper: Tamper
) -> None:
    """It is asked again, then that is its answer; and memory does not grow by what it claims."""
    grid = Wired(tmp_path, tamper)
    grid.spoil = lambda _, message: reply(Answered(b"wire"), message)
    found = far(grid, tmp_path)
    tracemalloc.start()
    try:
        (got,) = found.exchange([ask(1)])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decode(got.wire).error.startswith("its answer cannot be read: ")
    told = [(event, facts["site"]) for event, facts in found.told]  # type: ignore[attr-defined]
    assert told == [("retry", "b")] * (engine.FAILURES - 1)
    assert peak < 3 * BOUND


@pytest.mark.parametrize("name", ["a place that is not there", "one chunk often"])
def test_a_run_goes_on_without_it_and_says_whose_it_was(tmp_path: Path, name: str) -> None:
    folder = run(tmp_path / "run", Wired(tmp_path, BAD[name]))
    told = events(folder)
    assert {event["site"] for event in told if event["event"] == "retry"} == {"b"}
    assert {event["client"] for event in told if event["event"] == "incident"} == {1}
    assert [key for key in outcome(folder) if key.startswith("A ")] == ["A 0.0", "A 0.1"]


def test_one_that_comes_whole_when_asked_again_counts(tmp_path: Path, local: Any) -> None:
    assert outcome(run(tmp_path / "run", Wired(tmp_path, places(99), times=2))) == local


def test_the_hubs_own_connection_is_no_sites_failure(tmp_path: Path) -> None:
    grid = Loop(tmp_path, ["a", "b"])

    def broken(_: list[str]) -> list[Message]:
        raise httpx.ConnectError("the SuperLink is away")

    grid.pull_messages = broken  # type: ignore[method-assign]
    with pytest.raises(httpx.ConnectError):
        list(far(grid, tmp_path).exchange([ask(0)]))


def test_an_answer_counts_as_that_of_whom_was_asked(tmp_path: Path) -> None:
    """Whatever it says of itself: Flower takes that from the site."""
    grid = Loop(tmp_path, ["a", "b"])
    claims = iter(["message-1", "message-0"])
    pulled = grid.pull_messages

    def claiming(names: list[str]) -> list[Message]:
        found = pulled(names)
        for message in found:
            message.metadata.__dict__["_reply_to_message_id"] = next(claims)
        return found

    grid.pull_messages = claiming  # type: ignore[method-assign]
    answered = {got.client: decode(got.wire).sender for got in far(grid, tmp_path).exchange([ask(1), ask(0)])}
    assert answered == {0: "client-0", 1: "client-1"}


def test_a_site_looks_too(guarded: Callable[..., Any], tmp_path: Path) -> None:
    """Where it takes a message in Flower calls the same function, by the same name."""
    content = large_chunk(Connection(reply_of(tmp_path), None).objects)
    with pytest.raises(inflating.TooMuch, match="its arrays would take 67,"):
        guarded(list(content), content.__getitem__)


def test_a_message_of_equal_chunks_is_let_in(guarded: Callable[..., Any], tmp_path: Path) -> None:
    """An array of zeros is one chunk, named twice: honest, and as large as it says."""
    content = Connection(reply_of(tmp_path, bytes(10 * MEGABYTE)), None).objects  # Flower cuts every 5 MiB
    assert len([each for each in content.values() if each.startswith(b"ArrayChunk ")]) == 1
    assert guarded(list(content), content.__getitem__) == content


def reply_of(folder: Path, wire: bytes = b"wire") -> Message:
    grid = Loop(folder, ["a", "b"], lambda _, message: reply(Answered(wire), message))
    (name,) = grid.push_messages([pack(Asked(b"", "run", "", 0), 1, 60.0)])
    (found,) = grid.pull_messages([name])
    return found
