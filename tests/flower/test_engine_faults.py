"""What sites can do to a run: leave, send anything, fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from federation import events, outcome
from flwr.app import Message
from loop_grid import Loop, exchange, make_engine, request, run
from test_engine import knowledge

import weft
from weft.core import storage
from weft.core.client import Runtime
from weft.errors import WeftError
from weft.flower import site_policy
from weft.flower.envelope import SiteReply, pack_reply, unpack_reply
from weft.runs.folder import read_manifest
from weft.wire.message import decode, encode
from weft.wire.tensors import dense

pytestmark = pytest.mark.usefixtures("quick")


def second_site(change: Callable[[int, Message], Message | None]) -> Callable[[int, Message], Message | None]:
    return lambda count, message: change(count, message) if message.metadata.dst_node_id == 2 else None


@pytest.mark.parametrize("how", ["none", "task_clocks", "updates"])
def test_a_run_finishes_though_a_site_leaves(tmp_path, how):
    leaves = second_site(lambda count, message: pack_reply(SiteReply(left=True), message) if count >= 3 else None)
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"], leaves), **{"async": how})
    assert weft.Result(folder).accuracy > 0
    assert knowledge(folder) == ["A 0.0", "A 0.1"]
    found = [event["event"] for event in events(folder)]
    assert (found.count("left"), found.count("incident")) == (1, 0)


@pytest.mark.parametrize("name", ["client", "task", "round", "seconds", "event", "at", "self", "name"])
def test_fields_of_any_name_are_harmless(tmp_path, name):
    def rewrite(_: int, message: Message) -> Message:
        reply = unpack_reply(grid.answer(message))
        words = decode(reply.wire)
        changed = dataclasses.replace(words, fields={**words.fields, name: 7})
        return pack_reply(reply._replace(wire=encode(changed)), message)

    grid = Loop(tmp_path, ["a", "b"], second_site(rewrite))
    folder = run(tmp_path / "run", grid, precision="float32")
    replies = [event for event in events(folder) if event["event"] == "reply"]
    assert {event["client"] for event in replies} == {0, 1}
    assert all(event["at"] > 1e9 for event in replies)


@pytest.mark.parametrize("how", ["none", "updates"])
def test_a_broken_envelope_is_an_incident(tmp_path, how):
    broken = second_site(lambda _, message: pack_reply(SiteReply(b"", float("nan")), message))
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"], broken), **{"async": how})
    assert {event["client"] for event in events(folder) if event["event"] == "incident"} == {1}


@pytest.mark.parametrize(("share", "most"), [("all", 10**9), ("2", 2), ("nothing", 0)])
def test_a_site_shares_no_more_of_a_than_it_allows(tmp_path, share, most):
    (tmp_path / "b").mkdir()
    site_policy.change_policy(tmp_path / "b", [f"share={share}"])
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"]))
    shared = [key for key in outcome(folder) if key.startswith("A 1.")]
    assert shared == (["A 1.0", "A 1.1"] if most else [])
    runtime = Runtime(weft.Plan.load(folder))
    server, manifest = runtime.method.Server(), read_manifest(folder / "checkpoints")
    storage.load(server, folder / "checkpoints", manifest["server"])
    for key in shared:
        adaptive = dense(server.knowledge[key.removeprefix("A ")])
        rows = [part.any(dim=1).sum() for _, part in runtime.context(0, 0).network.layout.by_layer(adaptive)]
        assert sum(rows) <= most


def test_the_hub_learns_nothing_of_an_error_at_a_site(tmp_path, monkeypatch):
    def fail(*_: Any) -> bytes:
        raise WeftError("task secret-name: /home/someone/patient.png is no image")

    monkeypatch.setattr("weft.engines.host.ClientHost.answer", fail)
    (reply,) = exchange(make_engine(Loop(tmp_path, ["a", "b"]), tmp_path), request(0))
    assert "WeftError" in decode(reply.wire).error
    assert "secret-name" not in decode(reply.wire).error
    assert "patient" not in decode(reply.wire).error
