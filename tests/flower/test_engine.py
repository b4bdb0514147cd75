"""The engine and the client app without processes: equal to the local engine, and nothing is trained twice."""

from __future__ import annotations

import secrets

import pytest
from federation import TINY, events, outcome
from flwr.app import Error, Message
from loop_grid import LONG, Loop, make_engine, replied, request, run

import weft
from weft.errors import WeftError
from weft.flower import site_policy

pytestmark = pytest.mark.usefixtures("quick")

ALL = ["A 0.0", "A 0.1", "A 1.0", "A 1.1"]


def knowledge(folder) -> list[str]:
    return [key for key in outcome(folder) if key.startswith("A ")]


def test_equal_to_the_local_engine(tmp_path, local):
    grid = Loop(tmp_path, ["a", "b"])
    assert outcome(run(tmp_path / "run", grid)) == local
    assert grid.sent == 2 * 2 * 2  # clients x tasks x rounds: no extra message for the knowledge base or for A


def test_equal_to_the_local_engine_despite_failed_and_lost_replies(tmp_path, local):
    error = Error(8, "the app's process died")

    def spoil(count: int, message: Message) -> Message | None:
        if count % 4 == 0:
            return Message(error, reply_to=message)
        if count % 5 == 0:
            grid.answer(message)  # the site has trained, its reply is lost
            return Message(error, reply_to=message)
        return None

    grid = Loop(tmp_path, ["a", "b"], spoil)
    assert outcome(run(tmp_path / "run", grid)) == local


def test_equal_to_the_local_engine_with_task_clocks(tmp_path):
    clocks = {"async": "task_clocks", "rounds_spread": 0.5}
    local = weft.run(weft.Plan.merge({**TINY, **clocks}), tmp_path / "local")
    assert outcome(run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), **clocks)) == outcome(local.folder)


def test_sharing_by_class_equals_the_local_engine(tmp_path, monkeypatch):
    # a site starts heads from a secret of its own, which no other run can equal: here they start as the plan says
    monkeypatch.setattr(secrets, "randbits", lambda _: weft.Plan.merge(TINY).seed)
    for site in ("a", "b"):
        (tmp_path / site).mkdir()
        site_policy.change_policy(tmp_path / site, ["heads=task-end", "least_images=1"])
    shared = {"method": "class-experts", "scenario.sharing": "rotating"}
    local = weft.run(weft.Plan.merge({**TINY, **shared}), tmp_path / "local")
    assert outcome(run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), **shared)) == outcome(local.folder)


@pytest.mark.parametrize(("method", "remedy"), [("class-experts", "heads=task-end"), ("fedavg-sets", "class-experts")])
def test_a_site_shares_no_head_by_default_and_says_what_to_do(tmp_path, method, remedy):
    with pytest.raises(WeftError, match=rf"no head leaves it.*{remedy}"):
        run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), method=method, **{"scenario.sharing": "rotating"})


@pytest.mark.parametrize("how", [{"async": "updates"}, {"quorum": 1, "deadline": 60.0}], ids=str)
def test_asynchronous_runs_learn_every_task(tmp_path, how):
    folder = run(tmp_path / "run", Loop(tmp_path, ["a", "b"]), **how)
    assert knowledge(folder) == ALL
    assert [len(rows) for rows in weft.Result(folder).accuracy_matrix] == [2, 2]


def test_a_replayed_reply_is_rejected(tmp_path):
    grid, old = Loop(tmp_path, ["a", "b"]), []

    def spoil(count: int, message: Message) -> Message | None:
        if count == 0:
            old.append(grid.answer(message))
            return old[0]
        return Message(old[0].content, reply_to=message) if count == 4 else None

    grid.spoil = spoil
    folder = run(tmp_path / "run", grid)
    incidents = [event for event in events(folder) if event["event"] == "incident"]
    assert "0.0.0" in incidents[0]["reason"]
    assert incidents[0]["client"] == 0
    assert knowledge(folder) == ALL


def test_the_engine_waits_for_a_site_that_is_away_and_then_continues(tmp_path):
    grid = Loop(tmp_path, ["a"])
    engine = make_engine(grid, tmp_path)
    assert engine.clients().available == {0, 1}
    assert replied(engine, request(0), request(1)) == ["0.0.0"]
    assert engine.clients().available == {0}
    grid.names.append("b")
    assert replied(engine, request(1)) == ["0.0.1"]
    assert engine.events == [("away", 1), ("back", 1)]


def test_the_engine_does_not_wait_for_an_absent_site_until_it_has_been_available(tmp_path):
    grid = Loop(tmp_path, ["a"])
    engine = make_engine(grid, tmp_path, patience=60, absent={1})
    assert engine.clients().available == {0}
    assert replied(engine, request(0), request(1)) == ["0.0.0"]
    for names in (["a", "b"], ["a"]):
        grid.names = names
        assert engine.clients().available == {0, 1}


@pytest.mark.parametrize("how", [{}, {"async": "task_clocks"}, {"async": "updates"}, {"deadline": 60.0}], ids=str)
def test_a_run_without_an_absent_site(tmp_path, still, how):
    folder = run(tmp_path / "run", Loop(tmp_path, ["a"]), ("b",), **how)
    assert knowledge(folder) == ["A 0.0", "A 0.1"]
    assert still.moment < LONG


def test_requests_in_flight_are_sent_again_after_a_restart(tmp_path):
    grid = Loop(tmp_path, ["a"])
    engine = make_engine(grid, tmp_path, patience=60)
    for client in (0, 1):
        engine.submit(request(client))
    assert next(engine.replies()).client == 0
    saved = engine.save()
    grid.names.append("b")
    again = make_engine(grid, tmp_path, saved)
    assert again.now() >= saved.transit["now"]
    assert replied(again) == ["0.0.1"]
