"""What sites may do to a run: leave, say what they like, break."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from federation import events, outcome
from flwr.app import Context, Message, RecordDict
from loop_grid import Loop, ask, far, run

import weft
from weft.core.client import World
from weft.core.storage import State
from weft.errors import WeftError
from weft.flower import client_app as client
from weft.flower import leaving, sharing
from weft.flower.envelope import Answered, reply, unpack_reply
from weft.runs.folder import read_manifest
from weft.wire.message import Message as Words
from weft.wire.message import decode, encode
from weft.wire.tensors import dense

pytestmark = pytest.mark.usefixtures("quick")


def gone_from(when: int) -> Callable[[int, Message], Message | None]:
    """From the so-manyth message on, the second site says that it has left."""

    def spoil(number: int, message: Message) -> Message | None:
        left = number >= when and message.metadata.dst_node_id == 2
        return reply(Answered(left=True), message) if left else None

    return spoil


@pytest.mark.parametrize("how", ["none", "task_clocks", "updates"])
def test_a_run_ends_though_a_site_leaves(tmp_path, how):
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"], gone_from(3)), **{"async": how})
    assert weft.Result(folder).accuracy > 0
    assert [key for key in outcome(folder) if key.startswith("A 1.")] == []
    assert [key for key in outcome(folder) if key.startswith("A 0.")] == ["A 0.0", "A 0.1"]
    told = [event["event"] for event in events(folder)]
    assert (told.count("left"), told.count("incident")) == (1, 0)  # it said so: nobody waits for an answer of it


def test_a_site_writes_down_that_the_hub_was_told(tmp_path):
    (tmp_path / "b").mkdir()
    leaving.leave(tmp_path / "b")
    run(tmp_path / "run", Loop(tmp_path, ["a", "b"]))
    assert [told.run for told in leaving.told(tmp_path / "b")] == ["run"]


def rewritten(message: Message, folder: Path, change: Callable[[Words], Words]) -> Message:
    """The site's own answer with other words in it."""
    context = Context(1, 2, {"site": str(folder / "b"), "hub": "here"}, RecordDict(), {})
    answered = unpack_reply(client.on_message(message, context))
    return reply(answered._replace(wire=encode(change(decode(answered.wire)))), message)


@pytest.mark.parametrize("name", ["client", "step", "round", "seconds", "event", "at", "self", "name"])
def test_numbers_of_any_name_do_no_harm(tmp_path, name):
    def add(words: Words) -> Words:
        return dataclasses.replace(words, numbers={**words.numbers, name: 7})

    def spoil(_: int, message: Message) -> Message | None:
        return rewritten(message, tmp_path, add) if message.metadata.dst_node_id == 2 else None

    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"], spoil), precision="float32")
    told = [event for event in events(folder) if event["event"] == "reply"]
    assert {event["client"] for event in told} == {0, 1}
    assert all(event["at"] > 1e9 for event in told)


@pytest.mark.parametrize("how", ["none", "updates"])
def test_a_site_whose_envelopes_are_broken_is_an_incident(tmp_path, how):
    def spoil(_: int, message: Message) -> Message | None:
        bad = Answered(b"", float("nan"))
        return reply(bad, message) if message.metadata.dst_node_id == 2 else None

    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"], spoil), **{"async": how})
    told = [event for event in events(folder) if event["event"] == "incident"]
    assert told
    assert {event["client"] for event in told} == {1}


@pytest.mark.parametrize(("share", "most"), [("all", 10**9), ("2", 2), ("nothing", 0)])
def test_a_site_gives_no_more_than_it_chose(tmp_path, share, most):
    """Whatever the plan asks for."""
    (tmp_path / "b").mkdir()
    sharing.choose(tmp_path / "b", sharing.parse(share))
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"]))
    given = [key for key in outcome(folder) if key.startswith("A 1.")]
    assert given == (["A 1.0", "A 1.1"] if most else [])
    manifest = read_manifest(folder / "checkpoints")
    server = State.load(folder / "checkpoints", manifest["server"])
    layout = World(weft.Plan.load(folder)).lesson(0, 0).layout
    for key in given:
        rows = [part.any(dim=1).sum() for _, part in layout.by_layer(dense(server.archive[key.removeprefix("A ")]))]
        assert sum(rows) <= most


def test_what_goes_wrong_at_a_site_stays_there(tmp_path, monkeypatch):
    def fail(*_: Any) -> bytes:
        raise WeftError("task secret-name: /home/someone/patient.png is no image")

    monkeypatch.setattr("weft.engines.host.Host.answer", fail)
    (got,) = far(Loop(tmp_path, ["a", "b"]), tmp_path).exchange([ask(0)])
    assert decode(got.wire).error == "it failed at the site, whose log says why (WeftError)"
