"""A site that was away when something was asked: what it owes is asked for again, and nothing of it is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from federation import events, outcome
from flwr.app import Error, Message
from loop_grid import LONG, SHORT, Fading, Loop, answers, ask, far, run

from weft.flower import client_app as client
from weft.flower import engine, leaving
from weft.flower.envelope import unpack
from weft.wire.message import decode

pytestmark = pytest.mark.usefixtures("quick")

ALL = ["A 0.0", "A 0.1", "A 1.0", "A 1.1"]


def given(folder: Path) -> list[str]:
    return [key for key in outcome(folder) if key.startswith("A ")]


def after_which_tested(folder: Path) -> set[tuple[int, int]]:
    """Client and task, as the journal has it: a matrix has a row for every task."""
    return {(event["client"], event["task"]) for event in events(folder) if event["event"] == "tested"}


def test_a_dead_site_costs_one_deadline_and_in_the_end_the_time_it_may_need_to_be_back(tmp_path, still, monkeypatch):
    monkeypatch.setattr(engine, "POLL", 0.25)
    grid = Fading(tmp_path, silent_from=1, stays=False)
    folder = run(tmp_path / "run", grid, deadline=LONG, rounds_per_task=4)
    assert len([event for event in events(folder) if event["event"] == "reply" and event["client"] == 0]) == 2 * 4
    incidents = [(event["task"], event["round"]) for event in events(folder) if event["event"] == "incident"]
    assert incidents[0] == (0, 1)
    assert {step for step, _ in incidents} == {0}  # it was asked for nothing of the second task
    assert engine.RETURN <= still.moment < LONG + engine.RETURN + SHORT
    assert given(folder) == ["A 0.0", "A 0.1"]


class Returning(Fading):
    """It is away when a task ends, and back when the other site has begun the next one."""

    def __init__(self, folder: Path, answer_comes: bool):
        super().__init__(folder, silent_from=1, stays=False)
        self.answer_comes = answer_comes

    def push_messages(self, messages: list[Message]) -> list[str]:
        if self.held and (wire := unpack(messages[0]).wire) and decode(wire).step == 1:
            if not self.answer_comes:
                self.held.clear()
            self.silent_from = 99
            self.let_go()
        return super().push_messages(messages)


@pytest.mark.parametrize("answer_comes", [True, False])
def test_a_site_that_was_away_at_the_end_of_a_task_gives_its_a_once_it_is_back(tmp_path, still, answer_comes):
    folder = run(tmp_path / "run", Returning(tmp_path, answer_comes), deadline=LONG, rounds_per_task=2)
    assert given(folder) == ALL
    assert after_which_tested(folder) == {(0, 0), (0, 1), (1, 0), (1, 1)}


class Death(NamedTuple):
    over: int  # which of its messages a site dies over, counted from 1
    listed: float  # seconds for which Flower still lists it; then it says of all that it was sent that it is away
    back: float  # seconds after which it is back


NEVER = Death(99, 0.0, 0.0)


class Killed(Loop):
    """Sites that die, each once, having done what they were asked over which they die."""

    def __init__(self, folder: Path, clock, *deaths: Death):
        super().__init__(folder, ["a", "b"])
        self.clock, self.deaths = clock, deaths
        self.counts, self.died = [0, 0], [float("inf")] * 2
        self.sent: dict[str, tuple[int, Message]] = {}  # and not answered

    def away(self, site: int) -> float:
        return float(self.clock.moment) - self.died[site]

    def get_nodes(self):
        there = []
        for site, death in enumerate(self.deaths):
            if self.away(site) >= death.listed:
                for name, message in [(name, sent) for name, (who, sent) in self.sent.items() if who == site]:
                    self.replies[name] = [Message(Error(engine.AWAY, "it is away"), reply_to=message)]
                    del self.sent[name]
            if not death.listed <= self.away(site) < death.back:
                there.append(SimpleNamespace(node_id=site + 1, name="ab"[site]))
        return there

    def push_messages(self, messages: list[Message]) -> list[str]:
        names, site = super().push_messages(messages), messages[0].metadata.dst_node_id - 1
        self.counts[site] += bool(unpack(messages[0]).wire)  # a knock is none
        if self.counts[site] == self.deaths[site].over:
            self.died[site] = min(self.died[site], self.clock.moment)
        if 0 <= self.away(site) < self.deaths[site].back:
            del self.replies[names[0]]
            self.sent[names[0]] = (site, messages[0])
        return names


@pytest.mark.parametrize("deadline", [5.0, 10.0, 50.0])
@pytest.mark.parametrize("back", [30.0, 60.0, 100.0])
@pytest.mark.parametrize("over", [2, 4], ids=["first task", "last task"])
def test_a_site_that_is_killed_gives_its_a_however_short_the_deadline(
    tmp_path, still, monkeypatch, deadline, back, over
):
    monkeypatch.setattr(engine, "POLL", 0.25)
    grid = Killed(tmp_path, still, NEVER, Death(over, 20.0, back))
    folder = run(tmp_path / "run", grid, deadline=deadline, rounds_per_task=2)
    begun = {event["task"] for event in events(folder) if event["event"] == "reply" and event["client"] == 1}
    assert over // 2 - 1 in begun
    assert set(given(folder)) >= {"A 0.0", "A 0.1", "A 1.0", f"A 1.{over // 2 - 1}"}
    assert after_which_tested(folder) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_first_answer_of_a_task_may_be_the_one_that_is_lost(tmp_path, still, monkeypatch, rounds):
    """Nobody has heard that the task was begun, and what was learned of it is on the site's disk."""
    monkeypatch.setattr(engine, "POLL", 0.25)
    grid = Killed(tmp_path, still, NEVER, Death(rounds + 1, 0.0, 60.0))
    assert given(run(tmp_path / "run", grid, deadline=5.0, rounds_per_task=rounds)) == ALL


def test_a_site_that_is_dead_for_good_keeps_nobody_elses_a_away(tmp_path, still, monkeypatch):
    monkeypatch.setattr(engine, "POLL", 0.25)
    grid = Killed(tmp_path, still, Death(4, 0.0, 10.0), Death(2, 0.0, 1e9))
    assert set(given(run(tmp_path / "run", grid, deadline=5.0, rounds_per_task=2))) >= {"A 0.0", "A 0.1"}


@pytest.mark.parametrize(("rounds", "seconds"), [(1, 8.0), (2, 12.0)])
def test_a_slow_site_is_heard_though_it_never_meets_the_deadline(tmp_path, still, monkeypatch, rounds, seconds):
    monkeypatch.setattr(engine, "POLL", 0.25)

    class Slow(Loop):
        def __init__(self):
            super().__init__(tmp_path, ["a", "b"])
            self.free, self.due = 0.0, {}

        def push_messages(self, messages):
            names = super().push_messages(messages)
            if messages[0].metadata.dst_node_id == 2:
                self.free = max(self.free, still.moment) + seconds
                self.due[names[0]] = self.free
            return names

        def pull_messages(self, message_ids):
            return [] if self.due.get(message_ids[0], 0.0) > still.moment else super().pull_messages(message_ids)

    folder = run(tmp_path / "run", Slow(), deadline=5.0, rounds_per_task=rounds, tasks=1)
    assert given(folder) == ["A 0.0", "A 1.0"]


def test_a_site_whose_a_is_refused_in_the_end_is_tested_all_the_same(tmp_path, still, monkeypatch):
    """It is killed over its last message, and what it gives when it is back cannot be put together."""
    monkeypatch.setattr(engine, "POLL", 0.25)

    class Spoilt(Killed):
        def pull_messages(self, message_ids):
            pulled = super().pull_messages(message_ids)
            asked = self.wires.get(message_ids[0])
            if (
                pulled
                and asked is not None
                and asked.receiver == "client-1"
                and "give" in asked.ops
                and asked.task == 1
            ):
                return [Message(Error(2, "it broke"), reply_to=self.messages[message_ids[0]])]
            return pulled

        def push_messages(self, messages):
            names = super().push_messages(messages)
            wire = unpack(messages[0]).wire
            self.wires[names[0]] = decode(wire) if wire else None
            self.messages[names[0]] = messages[0]
            return names

    grid = Spoilt(tmp_path, still, NEVER, Death(4, 0.0, 20.0))
    grid.wires, grid.messages = {}, {}
    folder = run(tmp_path / "run", grid, deadline=5.0, rounds_per_task=2)
    assert given(folder) == ["A 0.0", "A 0.1", "A 1.0"]
    assert after_which_tested(folder) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_nobody_is_waited_for_when_all_are_removed(tmp_path, still):
    """Also if they were waited for without end, since nobody at all was there."""
    found = far(Loop(tmp_path, []), tmp_path, patience=600, removed=lambda: ["a", "b"] if still.moment > 700 else [])
    still.moment = 650.0
    assert list(found.exchange([])) == []
    assert 700 < still.moment < 800


def test_a_site_that_says_twice_that_it_leaves_leaves_once(tmp_path, still):
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = far(grid, tmp_path, deadline=LONG)
    assert len(answers(found, [ask(0), ask(1)], SHORT)) == 2
    for round_index in (1, 2):
        assert answers(found, [ask(1, round_index)], SHORT) == []
    assert len(grid.held) == 2
    leaving.leave(tmp_path / "b")
    for name, asked in grid.asked_of_second.items():
        grid.held[name] = client.on_message(asked, grid.context(asked))
    grid.let_go()
    assert answers(found, [], SHORT) == []
    assert [event for event, _ in found.told] == ["left", "removed"]


def test_rounds_are_not_used_up_while_nobody_is_there(tmp_path, still, monkeypatch):
    """The hub is cut off for five minutes after the first round."""
    monkeypatch.setattr(engine, "POLL", 0.25)

    class Outage(Loop):
        def get_nodes(self):
            self.names = [] if 1 <= still.moment < 300 and self.asked >= 2 else ["a", "b"]
            return super().get_nodes()

        def push_messages(self, messages):
            if self.asked == 2:
                still.moment = max(still.moment, 1.0)
            return super().push_messages(messages)

    folder = run(tmp_path / "run", Outage(tmp_path, ["a", "b"]), deadline=10.0, rounds_per_task=4)
    answered = [event for event in events(folder) if event["event"] == "reply"]
    assert len(answered) >= 2 * 2 * 4
    assert given(folder) == ALL
    assert still.moment >= 300


def test_where_nothing_is_under_way_a_site_that_may_be_back_is_waited_for(tmp_path, still):
    """Else a loop would go round and round while the last site, whose tasks are all that is left, is started again."""
    grid = Loop(tmp_path, ["a"])
    found = far(grid, tmp_path, deadline=LONG)
    assert answers(found, [], SHORT) == []
    assert SHORT <= still.moment < 2 * SHORT
    assert found.lost() == set()
    still.moment += engine.RETURN
    assert found.lost() == {1}
    moment = still.moment
    assert answers(found, [], LONG) == []
    assert still.moment < moment + SHORT


def test_where_nobody_is_there_it_may_be_the_hub_that_cannot_be_reached(tmp_path, still):
    found = far(Loop(tmp_path, []), tmp_path, deadline=LONG)
    still.moment += engine.RETURN + SHORT
    assert found.lost() == set()
    still.moment = engine.OUTAGE + SHORT
    assert found.lost() == {0, 1}


def test_a_site_that_sends_slowly_holds_up_nobody_else(tmp_path, still):
    """Flower waits for all parts of an answer, and would do so for hours."""
    sent = threading.Event()

    class Slow(Loop):
        def pull_messages(self, message_ids):
            if message_ids == ["message-1"]:
                assert sent.wait(60)
            return super().pull_messages(message_ids)

    found = far(Slow(tmp_path, ["a", "b"]), tmp_path, deadline=LONG)
    assert answers(found, [ask(0), ask(1)], SHORT) == ["0.0.0"]
    assert still.moment < 2 * SHORT
    sent.set()
    assert answers(found, [], LONG) == ["0.0.1"]


def test_a_site_that_the_hub_removes_is_not_waited_for(tmp_path, still):
    """Also without a deadline, where a site that is away has ten minutes."""
    removed: list[str] = []
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = far(grid, tmp_path, patience=600, removed=lambda: removed)
    assert len(list(found.exchange([ask(0), ask(1)]))) == 2
    replies = found.exchange([ask(0, 1), ask(1, 1)])
    assert decode(next(replies).wire).request_id == "0.1.0"
    grid.names = ["a"]
    removed.append("b")
    assert list(replies) == []
    assert still.moment < SHORT
    assert [event for event, _ in found.told] == ["removed", "removed"]  # the journal, and the knowledge base
    assert found.clients() == [0]
    assert found.save().clock["left"] == [1]
