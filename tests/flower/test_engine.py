"""The engine and the client app without processes: a stand-in grid that hands messages over by itself."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from federation import events, outcome
from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import weft
from weft.client import World
from weft.engines import Request, Saved
from weft.engines.flower import client, engine, leaving, sharing
from weft.engines.flower.engine import Far
from weft.engines.flower.envelope import Answered, reply, unpack, unpack_reply
from weft.errors import Problem
from weft.hub.server import connect
from weft.message import Message as Words
from weft.message import decode, encode
from weft.record import Record, read_manifest
from weft.running import resume
from weft.state import State
from weft.tensors import dense

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


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine, "ASK_AGAIN", 0.01)
    monkeypatch.setattr(engine, "POLL", 0.01)
    monkeypatch.setattr(engine, "LOOK", 0.0)
    monkeypatch.delenv("WEFT_SITE", raising=False)
    for key, value in {"_run_id": 1, "_node_id": 1, "_task_id": 1}.items():  # a Message asks who sends it
        monkeypatch.setattr(TaskIdentity, key, value, raising=False)


def run(folder: Path, grid: Loop, **more: Any) -> Path:
    Record.create(folder, weft.Plan.merge({**TINY, **more})).close()
    resume(folder, save_every=0, connect=lambda session, saved: connect(grid, ["a", "b"], "run", session, saved))
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return outcome(weft.run(weft.Plan.merge(TINY), tmp_path_factory.mktemp("local") / "run").folder)


def test_equal_to_the_local_engine(tmp_path, local):
    grid = Loop(tmp_path, ["a", "b"])
    assert outcome(run(tmp_path / "run", grid)) == local
    assert grid.asked == 2 * 2 * 2  # clients x tasks x rounds: no message for the knowledge base or for A alone


def test_equal_though_answers_fail_and_are_lost(tmp_path, local):
    """Every fourth message is answered by an error of Flower's; every fifth is answered, but the answer is lost."""
    machine = Error(8, "the app's process died")

    def spoil(place: int, message: Message) -> Message | None:
        if place % 4 == 0:
            return Message(machine, reply_to=message)
        if place % 5 == 0:
            client.on_message(message, grid.context(message))
            return Message(machine, reply_to=message)
        return None

    grid = Loop(tmp_path, ["a", "b"], spoil)
    assert outcome(run(tmp_path / "run", grid)) == local


def test_equal_to_the_local_engine_with_task_clocks(tmp_path):
    clocks = {"async": "tasks", "rounds_spread": 0.5}
    local = weft.run(weft.Plan.merge({**TINY, **clocks}), tmp_path / "local")
    assert outcome(run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), **clocks)) == outcome(local.folder)


@pytest.mark.parametrize("how", [{"async": "arrival"}, {"quorum": 1, "deadline": 60.0}], ids=str)
def test_every_task_is_learned_as_answers_arrive(tmp_path, how):
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), **how)
    assert [key for key in outcome(folder) if key.startswith("A ")] == ["A 0.0", "A 0.1", "A 1.0", "A 1.1"]
    assert [len(rows) for rows in weft.Result(folder).accuracy_matrix] == [2, 2]


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


def test_an_answer_that_comes_twice_is_refused_and_told(tmp_path):
    """A replay on the way to the hub: an old answer in the place of a new one answers nothing that is open."""
    grid, old = Loop(tmp_path, ["a", "b"]), []

    def spoil(place: int, message: Message) -> Message | None:
        if place == 0:
            old.append(client.on_message(message, grid.context(message)))
            return old[0]
        return Message(old[0].content, reply_to=message) if place == 4 else None

    grid.spoil = spoil
    folder = run(tmp_path / "run", grid)
    told = [event for event in events(folder) if event["event"] == "incident"]
    assert "it answers '0.0.0', which was not asked or is answered already" in told[0]["reason"]
    assert told[0]["client"] == 0
    assert len([key for key in outcome(folder) if key.startswith("A ")]) == 4


def test_a_request_that_comes_twice_is_learned_once(tmp_path):
    grid = Loop(tmp_path, ["a", "b"])
    first = [reply.wire for reply in far(grid, tmp_path).exchange([ask(0)])]
    state = {path.name: path.read_bytes() for path in (tmp_path / "a" / "state" / "run").iterdir()}
    assert [reply.wire for reply in far(grid, tmp_path).exchange([ask(0)])] == first
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "state" / "run").iterdir()} == state


def test_a_site_that_is_away_is_waited_for_and_then_not(tmp_path):
    grid = Loop(tmp_path, ["a"])
    found = far(grid, tmp_path)
    assert found.clients() == [0, 1]
    assert [reply.client for reply in found.exchange([ask(0), ask(1)])] == [0]
    assert found.clients() == [0]
    assert ("away", "b") in [(event, facts["site"]) for event, facts in found.told]
    grid.names.append("b")
    assert [reply.client for reply in found.exchange([ask(1)])] == [1]
    assert ("back", "b") in [(event, facts["site"]) for event, facts in found.told]


def test_a_site_that_was_waited_for_already_is_not_waited_for_again(tmp_path):
    """But it counts when it comes, and is had patience with from then on."""
    grid = Loop(tmp_path, ["a"])
    found = far(grid, tmp_path, patience=60, lost={1})
    assert found.clients() == [0]
    assert [reply.client for reply in found.exchange([ask(0), ask(1)])] == [0]
    grid.names = ["a", "b"]
    assert found.clients() == [0, 1]
    grid.names = ["a"]
    assert found.clients() == [0, 1]


@pytest.mark.parametrize("how", [{}, {"async": "tasks"}, {"async": "arrival"}, {"deadline": 60.0}], ids=str)
def test_a_run_without_a_site_that_is_not_there(tmp_path, still, how):
    folder = tmp_path / "run"
    Record.create(folder, weft.Plan.merge({**TINY, **how})).close()
    far_away = partial(connect, Loop(tmp_path, ["a"]), ["a", "b"], "run", absent=["b"])
    resume(folder, save_every=0, connect=far_away)
    assert [key for key in outcome(folder) if key.startswith("A ")] == ["A 0.0", "A 0.1"]
    assert still.moment < LONG


def test_what_is_out_is_asked_again_after_a_restart(tmp_path):
    grid = Loop(tmp_path, ["a"])
    found = far(grid, tmp_path, patience=60)
    assert [reply.client for reply in itertools.islice(found.exchange([ask(0), ask(1)]), 1)] == [0]
    saved = found.save()
    grid.names.append("b")
    again = far(grid, tmp_path, saved)
    assert again.now() >= saved.clock["now"]
    assert [reply.client for reply in again.exchange([])] == [1]


def test_a_deadline_ends_it(tmp_path):
    found = far(Loop(tmp_path, ["a"]), tmp_path, patience=60)
    assert [reply.client for reply in found.exchange([ask(0), ask(1)], deadline=0.5)] == [0]


# ---- a deadline is for who may still answer --------------------------------------------------------------------------

SHORT, LONG = 1.0, 50.0  # seconds of a clock that moves while the engine sleeps, and else stands still


@pytest.fixture
def still(monkeypatch):
    turns = itertools.count()
    clock = SimpleNamespace(moment=0.0, monotonic=lambda: clock.moment)

    def sleep(seconds: float) -> None:
        assert next(turns) < 10**6, "it never ends"
        clock.moment += seconds

    clock.sleep = sleep
    monkeypatch.setattr(engine, "time", clock)
    return clock


class Fading(Loop):
    """The second site takes its messages from some moment on and says nothing; then it is not there either."""

    def __init__(self, folder: Path, silent_from: int, stays: bool):
        super().__init__(folder, ["a", "b"])
        self.silent_from, self.stays, self.to_second = silent_from, stays, 0
        self.held: dict[str, Message] = {}

    def push_messages(self, messages: list[Message]) -> list[str]:
        names = super().push_messages(messages)
        if messages[0].metadata.dst_node_id == 2:
            self.to_second += 1
            if self.to_second > self.silent_from:
                self.held[names[0]] = self.replies.pop(names[0])[0]
                self.names = ["a", "b"] if self.stays else ["a"]
        return names

    def let_go(self) -> None:
        self.names = ["a", "b"]
        for name in list(self.held):
            self.replies[name] = [self.held.pop(name)]


def answers(found: Far, requests: list[Request], deadline: float) -> list[str]:
    return [decode(reply.wire).request_id for reply in found.exchange(requests, deadline)]


def test_a_dead_site_costs_one_deadline_and_no_more(tmp_path, still):
    grid = Fading(tmp_path, silent_from=1, stays=False)
    folder = run(tmp_path / "run", grid, deadline=LONG, rounds_per_task=4)
    assert len([event for event in events(folder) if event["event"] == "answer" and event["client"] == 0]) == 2 * 4
    assert [event["round"] for event in events(folder) if event["event"] == "incident"] == [1]
    assert LONG <= still.moment < LONG + SHORT


def test_a_lost_site_that_is_back_in_time_still_answers(tmp_path, still):
    """Nobody waits for it, and nothing of it is thrown away."""
    grid = Fading(tmp_path, silent_from=0, stays=False)
    found = far(grid, tmp_path, deadline=LONG)
    assert answers(found, [ask(0), ask(1)], SHORT) == ["0.0.0"]
    assert found.gone() == {1}
    assert answers(found, [ask(0, 1)], LONG) == ["0.1.0"]
    grid.let_go()
    assert sorted(answers(found, [ask(0, 2)], LONG)) == ["0.0.1", "0.2.0"]
    assert still.moment < 2 * SHORT


def test_nobody_there_lasts_a_deadline(tmp_path, still):
    """Else the rounds of a run would be over before a site is back."""
    grid = Fading(tmp_path, silent_from=0, stays=False)
    found = far(grid, tmp_path, deadline=LONG)
    assert answers(found, [ask(0), ask(1)], SHORT) == ["0.0.0"]
    grid.names = []
    assert answers(found, [], LONG) == []
    assert still.moment >= LONG


def test_a_site_without_a_task_has_one_request_and_holds_up_nobody_else(tmp_path, still):
    pushed: list[str] = []

    def spoil(_: int, message: Message) -> Message | None:
        if message.metadata.dst_node_id == 1:
            return None
        pushed.append(decode(unpack(message).wire).request_id)
        return reply(Answered(waiting="it has no task 0 yet"), message)

    found = far(Loop(tmp_path, ["a", "b"], spoil), tmp_path, deadline=LONG)
    for round_index in (0, 2, 4):  # as the loop does: whoever was asked in the round before is left alone
        pushed.clear()
        own, other = ask(0, round_index), ask(1, round_index)
        assert answers(found, [own, other], SHORT) == [own.request_id]
        assert set(pushed) == {other.request_id}
        assert answers(found, [ask(0, round_index + 1)], LONG) == [f"0.{round_index + 1}.0"]
        assert [flight["request_id"] for flight in found.save().clock["flights"]] == [other.request_id]
    assert still.moment < 4 * SHORT
    assert answers(found, [], SHORT) == []  # where there is nothing else to do, a task is waited for
    assert still.moment >= 4 * SHORT


def test_a_slow_site_gets_its_late_answers_in(tmp_path, still):
    """It is at work on what it was asked first: to take that back would leave it behind for ever."""
    grid = Fading(tmp_path, silent_from=0, stays=True)
    found = far(grid, tmp_path, deadline=LONG)
    assert answers(found, [ask(0), ask(1)], SHORT) == ["0.0.0"]
    assert answers(found, [ask(0, 2), ask(1, 2)], SHORT) == ["0.2.0"]
    grid.let_go()
    assert sorted(answers(found, [], LONG)) == ["0.0.1", "0.2.1"]
    assert still.moment < 3 * SHORT


def test_a_site_that_left_is_asked_no_more(tmp_path):
    grid = Loop(tmp_path, ["a", "b"], lambda _, message: reply(Answered(left=True), message))
    found = far(grid, tmp_path)
    assert list(found.exchange([ask(1)])) == []
    assert found.clients() == [0]
    assert [event for event, _ in found.told] == ["left", "removed"]
    assert far(grid, tmp_path, found.save()).clients() == [0]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 6, 7, 8])
def test_an_app_that_breaks_or_dies_every_time_is_an_answer_in_the_end(tmp_path, still, code):
    """Also without a deadline: one that runs out of memory would be asked for ever."""

    def spoil(place: int, message: Message) -> Message:
        assert place < 50, "it is asked for ever"
        return Message(Error(code, "it died"), reply_to=message)

    grid = Loop(tmp_path, ["a", "b"], spoil)
    found = far(grid, tmp_path)
    (got,) = found.exchange([ask(0)])
    assert decode(got.wire).error == f"Flower's error {code}: it died"
    assert grid.asked == engine.FAILURES
    assert [event for event, _ in found.told] == ["asked-again"] * (engine.FAILURES - 1)


def test_a_site_that_is_away_again_and_again_is_asked_when_it_is_back(tmp_path, still):
    def spoil(place: int, message: Message) -> Message | None:
        return Message(Error(engine.AWAY, "it is away"), reply_to=message) if place < 2 * engine.FAILURES else None

    (got,) = far(Loop(tmp_path, ["a", "b"], spoil), tmp_path).exchange([ask(0)])
    assert not decode(got.wire).error


@pytest.mark.parametrize(
    "line",
    [
        'method = "/tmp/x.py:Evil"',
        'network = "os:path"',
        'method = {name = "a.py:B"}',
        "[for.fedavg]\nseed = 1",
        'loss = "os:system"',
        'metrics = "balanced,os:system"',
        'scenario = "os:system"',
        'scenario = "folders"\n"scenario.path" = "/etc"',
    ],
)
def test_a_plan_that_names_code_is_refused_before_it_is_loaded(line):
    base = 'method = "fedweit"\nnetwork = "mlp"\n'
    key = line.split(" ")[0]
    text = "\n".join([row for row in base.splitlines() if not row.startswith(key)] + [line])
    with pytest.raises(Problem, match="the hub's plan"):
        client.read_plan(text)


# ---- what sites may do to a run --------------------------------------------------------------------------------------


def gone_from(when: int) -> Callable[[int, Message], Message | None]:
    """From the so-manyth message on, the second site says that it has left."""

    def spoil(number: int, message: Message) -> Message | None:
        left = number >= when and message.metadata.dst_node_id == 2
        return reply(Answered(left=True), message) if left else None

    return spoil


@pytest.mark.parametrize("how", ["none", "tasks", "arrival"])
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
    told = [event for event in events(folder) if event["event"] == "answer"]
    assert {event["client"] for event in told} == {0, 1}
    assert all(event["at"] > 1e9 for event in told)


@pytest.mark.parametrize("how", ["none", "arrival"])
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
        raise Problem("task secret-name: /home/someone/patient.png is no image")

    monkeypatch.setattr("weft.engines.host.Host.answer", fail)
    (got,) = far(Loop(tmp_path, ["a", "b"]), tmp_path).exchange([ask(0)])
    assert decode(got.wire).error == "it failed at the site, whose log says why (Problem)"
