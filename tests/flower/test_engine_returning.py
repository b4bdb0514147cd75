"""A site that was away: what it owes is requested again, and nothing of it is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from federation import events
from flwr.app import Error, Message
from loop_grid import LONG, SHORT, Fading, Loop, make_engine, replied, request, run
from test_engine import ALL, knowledge

from weft.flower import engine, site_policy
from weft.flower.envelope import unpack
from weft.wire.message import decode

pytestmark = pytest.mark.usefixtures("quick")


def journal_tests(folder: Path) -> set[tuple[int, int]]:
    """Client and task of each test in the journal: an accuracy matrix has a row for every task."""
    return {(event["client"], event["task"]) for event in events(folder) if event["event"] == "tested"}


def test_a_dead_site_costs_one_deadline_and_at_the_end_the_time_of_a_restart(tmp_path, still):
    grid = Fading(tmp_path, silent_from=1, stays=False)
    folder = run(tmp_path / "run", grid, deadline=LONG, rounds_per_task=4)
    assert len([event for event in events(folder) if event["event"] == "reply" and event["client"] == 0]) == 2 * 4
    incidents = [(event["task"], event["round"]) for event in events(folder) if event["event"] == "incident"]
    assert incidents[0] == (0, 1)
    assert {task for task, _ in incidents} == {0}  # it got no request of the second task
    assert engine.RETURN <= still.moment < LONG + engine.RETURN + SHORT
    assert knowledge(folder) == ["A 0.0", "A 0.1"]


class Returning(Fading):
    """It is away when a task ends, and back when the other site has started the next one."""

    def __init__(self, folder: Path, reply_arrives: bool):
        super().__init__(folder, silent_from=1, stays=False)
        self.reply_arrives = reply_arrives

    def push_messages(self, messages: list[Message]) -> list[str]:
        if self.held and (wire := unpack(messages[0]).wire) and decode(wire).task == 1:
            if not self.reply_arrives:
                self.held.clear()
            self.silent_from = 99
            self.release()
        return super().push_messages(messages)


@pytest.mark.parametrize("reply_arrives", [True, False])
def test_a_site_that_was_away_at_the_end_of_a_task_shares_its_a_when_it_is_back(tmp_path, still, reply_arrives):
    folder = run(tmp_path / "run", Returning(tmp_path, reply_arrives), deadline=LONG, rounds_per_task=2)
    assert knowledge(folder) == ALL
    assert journal_tests(folder) == {(0, 0), (0, 1), (1, 0), (1, 1)}


class Death(NamedTuple):
    over: int  # the message during which a site dies, counted from 1
    listed: float  # seconds for which Flower still lists it; then its messages get an error
    back: float  # seconds after which it is back


NEVER = Death(99, 0.0, 0.0)


class Killed(Loop):
    """Sites that die once, after they have handled the message."""

    def __init__(self, folder: Path, clock, *deaths: Death):
        super().__init__(folder, ["a", "b"])
        self.clock, self.deaths = clock, deaths
        self.counts, self.died = [0, 0], [float("inf")] * 2
        self.unanswered: dict[str, tuple[int, Message]] = {}

    def away(self, site: int) -> float:
        return float(self.clock.moment) - self.died[site]

    def get_nodes(self):
        there = []
        for site, death in enumerate(self.deaths):
            if self.away(site) >= death.listed:
                for name, message in [(name, sent) for name, (who, sent) in self.unanswered.items() if who == site]:
                    self.replies[name] = [Message(Error(engine.NODE_UNAVAILABLE, "it is away"), reply_to=message)]
                    del self.unanswered[name]
            if not death.listed <= self.away(site) < death.back:
                there.append(SimpleNamespace(node_id=site + 1, name="ab"[site]))
        return there

    def push_messages(self, messages: list[Message]) -> list[str]:
        names, site = super().push_messages(messages), messages[0].metadata.dst_node_id - 1
        self.counts[site] += bool(unpack(messages[0]).wire)  # not a ping
        if self.counts[site] == self.deaths[site].over:
            self.died[site] = min(self.died[site], self.clock.moment)
        if 0 <= self.away(site) < self.deaths[site].back:
            del self.replies[names[0]]
            self.unanswered[names[0]] = (site, messages[0])
        return names


@pytest.mark.parametrize("deadline", [5.0, 10.0, 50.0])
@pytest.mark.parametrize("back", [30.0, 60.0, 100.0])
@pytest.mark.parametrize("over", [2, 4], ids=["first task", "last task"])
def test_a_killed_site_shares_its_a_for_any_deadline(tmp_path, still, deadline, back, over):
    grid = Killed(tmp_path, still, NEVER, Death(over, 20.0, back))
    folder = run(tmp_path / "run", grid, deadline=deadline, rounds_per_task=2)
    started = {event["task"] for event in events(folder) if event["event"] == "reply" and event["client"] == 1}
    assert over // 2 - 1 in started
    assert set(knowledge(folder)) >= {"A 0.0", "A 0.1", "A 1.0", f"A 1.{over // 2 - 1}"}
    assert journal_tests(folder) == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_first_reply_of_a_task_may_be_lost(tmp_path, still, rounds):
    """The hub does not know that the task was started; the state is on the site's disk."""
    grid = Killed(tmp_path, still, NEVER, Death(rounds + 1, 0.0, 60.0))
    assert knowledge(run(tmp_path / "run", grid, deadline=5.0, rounds_per_task=rounds)) == ALL


def test_a_site_that_never_returns_does_not_affect_others(tmp_path, still):
    grid = Killed(tmp_path, still, Death(4, 0.0, 10.0), Death(2, 0.0, 1e9))
    assert set(knowledge(run(tmp_path / "run", grid, deadline=5.0, rounds_per_task=2))) >= {"A 0.0", "A 0.1"}


@pytest.mark.parametrize(("rounds", "seconds"), [(1, 8.0), (2, 12.0)])
def test_replies_of_a_site_that_never_meets_the_deadline_count(tmp_path, still, rounds, seconds):

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
    assert knowledge(folder) == ["A 0.0", "A 1.0"]


def test_a_site_whose_a_is_rejected_is_still_tested(tmp_path, still):
    """It is killed during its last message, and the A that it sends after its return fails."""

    def spoil(_: int, message: Message) -> Message | None:
        wire = unpack(message).wire
        if message.metadata.dst_node_id != 2 or not wire or decode(wire).task == 0 or "share" not in decode(wire).ops:
            return None
        grid.answer(message)
        return Message(Error(2, "it broke"), reply_to=message)

    grid = Killed(tmp_path, still, NEVER, Death(4, 0.0, 20.0))
    grid.spoil = spoil
    folder = run(tmp_path / "run", grid, deadline=5.0, rounds_per_task=2)
    assert knowledge(folder) == ["A 0.0", "A 0.1", "A 1.0"]
    assert journal_tests(folder) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_the_engine_does_not_wait_when_all_sites_are_removed(tmp_path, still):
    removed = {True: ["a", "b"], False: []}
    found = make_engine(Loop(tmp_path, []), tmp_path, patience=600, removed=lambda: removed[still.moment > 700])
    still.moment = 650.0
    assert replied(found) == []
    assert 700 < still.moment < 800


def test_a_site_that_leaves_twice_leaves_once(tmp_path, still):
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = make_engine(grid, tmp_path, deadline=LONG)
    assert len(replied(found, request(0), request(1), deadline=SHORT)) == 2
    for round_index in (1, 2):
        assert replied(found, request(1, round_index), deadline=SHORT) == []
    assert len(grid.held) == 2
    site_policy.leave(tmp_path / "b")
    for name, message in grid.unanswered.items():
        grid.held[name] = grid.answer(message)
    grid.release()
    assert replied(found, deadline=SHORT) == []
    assert found.events == [("left", 1)]


def test_no_round_passes_while_no_site_is_available(tmp_path, still):
    """The hub is cut off for five minutes after the first round."""

    class Outage(Loop):
        def get_nodes(self):
            self.names = [] if 1 <= still.moment < 300 and self.sent >= 2 else ["a", "b"]
            return super().get_nodes()

        def push_messages(self, messages):
            if self.sent == 2:
                still.moment = max(still.moment, 1.0)
            return super().push_messages(messages)

    folder = run(tmp_path / "run", Outage(tmp_path, ["a", "b"]), deadline=10.0, rounds_per_task=4)
    replies = [event for event in events(folder) if event["event"] == "reply"]
    assert len(replies) >= 2 * 2 * 4
    assert knowledge(folder) == ALL
    assert still.moment >= 300


def test_with_nothing_in_flight_the_engine_waits_for_a_site_that_may_return(tmp_path, still):
    """Otherwise the loop would spin while the last site with open tasks restarts."""
    grid = Loop(tmp_path, ["a"])
    found = make_engine(grid, tmp_path, deadline=LONG)
    assert replied(found, deadline=SHORT) == []
    assert SHORT <= still.moment < 2 * SHORT
    assert not found.clients().gone
    still.moment += engine.RETURN
    assert found.clients().gone == {1}
    moment = still.moment
    assert replied(found, deadline=LONG) == []
    assert still.moment < moment + SHORT


def test_without_any_site_the_hub_itself_may_be_offline(tmp_path, still):
    found = make_engine(Loop(tmp_path, []), tmp_path, deadline=LONG)
    still.moment += engine.RETURN + SHORT
    assert not found.clients().gone
    still.moment = engine.OUTAGE + SHORT
    assert found.clients().gone == {0, 1}


def test_a_slow_upload_delays_nobody_else(tmp_path, still):
    """Flower waits for all objects of a reply, for hours if it has to."""
    sent = threading.Event()

    class Slow(Loop):
        def pull_messages(self, message_ids):
            if message_ids == ["message-1"]:
                assert sent.wait(60)
            return super().pull_messages(message_ids)

    found = make_engine(Slow(tmp_path, ["a", "b"]), tmp_path, deadline=LONG)
    assert replied(found, request(0), request(1), deadline=SHORT) == ["0.0.0"]
    assert still.moment < 2 * SHORT
    sent.set()
    assert replied(found, deadline=LONG) == ["0.0.1"]


def test_the_engine_does_not_wait_for_a_removed_site(tmp_path, still):
    """Also without a deadline."""
    removed: list[str] = []
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = make_engine(grid, tmp_path, patience=600, removed=lambda: removed)
    assert len(replied(found, request(0), request(1))) == 2
    found.submit(request(0, 1))
    found.submit(request(1, 1))
    replies = found.replies()
    assert decode(next(replies).wire).request_id == "0.1.0"
    grid.names = ["a"]
    removed.append("b")
    assert list(replies) == []
    assert still.moment < SHORT
    assert found.events == [("removed", 1)]
    assert found.clients().available == {0}
    assert found.save().transit["left"] == [1]
