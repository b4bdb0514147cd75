"""The engine and the client app without processes: equal to the local engine, and nothing learned twice."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from federation import events, outcome
from flwr.app import Error, Message
from loop_grid import LONG, TINY, Loop, ask, far, run

import weft
from weft.errors import WeftError
from weft.flower import client_app as client
from weft.flower.server_app import connect
from weft.runs.folder import Record
from weft.runs.run import resume

pytestmark = pytest.mark.usefixtures("quick")


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
    clocks = {"async": "task_clocks", "rounds_spread": 0.5}
    local = weft.run(weft.Plan.merge({**TINY, **clocks}), tmp_path / "local")
    assert outcome(run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), **clocks)) == outcome(local.folder)


@pytest.mark.parametrize("how", [{"async": "updates"}, {"quorum": 1, "deadline": 60.0}], ids=str)
def test_every_task_is_learned_as_answers_arrive(tmp_path, how):
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), **how)
    assert [key for key in outcome(folder) if key.startswith("A ")] == ["A 0.0", "A 0.1", "A 1.0", "A 1.1"]
    assert [len(rows) for rows in weft.Result(folder).accuracy_matrix] == [2, 2]


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


@pytest.mark.parametrize("how", [{}, {"async": "task_clocks"}, {"async": "updates"}, {"deadline": 60.0}], ids=str)
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
        'scenario = {name = "folders", path = "/etc"}',
        "clients = 500000000",
        'network = {name = "mlp", hidden = 65536}',
        "tasks = 1000000000",
    ],
)
def test_a_plan_that_names_code_is_refused_before_it_is_loaded(line):
    base = 'method = "fedweit"\nnetwork = "mlp"\n'
    key = line.split(" ")[0]
    text = "\n".join([row for row in base.splitlines() if not row.startswith(key)] + [line])
    with pytest.raises(WeftError, match="the hub's plan"):
        client.read_plan(text)
