"""Whom the engine waits for: a deadline is for who may still answer, and failures have an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from federation import events, outcome
from flwr.app import Error, Message, RecordDict
from loop_grid import LONG, SHORT, Loop, ask, far, run

import weft
from weft.engines import Request
from weft.engines.flower import engine, leaving
from weft.engines.flower.engine import Far
from weft.engines.flower.envelope import Answered, reply, unpack
from weft.message import decode

pytestmark = pytest.mark.usefixtures("quick")


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


def test_a_dead_site_costs_one_deadline_and_in_the_end_the_time_it_may_need_to_be_back(tmp_path, still):
    grid = Fading(tmp_path, silent_from=1, stays=False)
    folder = run(tmp_path / "run", grid, deadline=LONG, rounds_per_task=4)
    assert len([event for event in events(folder) if event["event"] == "answer" and event["client"] == 0]) == 2 * 4
    incidents = [(event["step"], event["round"]) for event in events(folder) if event["event"] == "incident"]
    assert incidents[0] == (0, 1)
    assert {step for step, _ in incidents[1:]} == {1}  # it is asked for its last A, for which there is no later moment
    assert engine.RETURN <= still.moment < LONG + engine.RETURN + SHORT


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
    assert [key for key in outcome(folder) if key.startswith("A ")] == ["A 0.0", "A 0.1", "A 1.0", "A 1.1"]
    assert [len(rows) for rows in weft.Result(folder).accuracy_matrix] == [2, 2]


def test_where_nothing_is_under_way_a_site_that_may_be_back_is_waited_for(tmp_path, still):
    """Else a loop would go round and round while the last site, whose tasks are all that is left, is started again."""
    grid = Loop(tmp_path, ["a"])
    found = far(grid, tmp_path, deadline=LONG)
    assert answers(found, [], SHORT) == []
    assert SHORT <= still.moment < 2 * SHORT
    assert found.gone() == set()
    still.moment += engine.RETURN
    assert found.gone() == {1}
    moment = still.moment
    assert answers(found, [], LONG) == []
    assert still.moment < moment + SHORT


def test_a_lost_site_that_is_back_in_time_still_answers(tmp_path, still):
    """Nobody waits for it, and nothing of it is thrown away."""
    grid = Fading(tmp_path, silent_from=0, stays=False)
    found = far(grid, tmp_path, deadline=LONG)
    assert answers(found, [ask(0), ask(1)], SHORT) == ["0.0.0"]
    assert found.clients() == [0]
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


def test_a_site_that_is_asked_for_nothing_is_heard_when_it_leaves(tmp_path, still):
    """The second is at work for long; meanwhile the first, which has learned all its tasks, leaves."""
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = far(grid, tmp_path, deadline=10 * engine.KNOCK)
    assert len(answers(found, [ask(0), ask(1)], SHORT)) == 2
    asked = grid.asked
    assert answers(found, [ask(1, 1)], 2.5 * engine.KNOCK) == []
    assert grid.asked - asked == 1 + 2  # the request, and two knocks at the first
    assert found.clients() == [0, 1]
    leaving.leave(tmp_path / "a")
    assert answers(found, [], 1.5 * engine.KNOCK) == []
    assert [event for event, facts in found.told if facts["client"] == 0] == ["left", "removed"]
    assert found.clients() == [1]
    assert [told.run for told in leaving.told(tmp_path / "a")] == ["run"]


def test_a_site_that_answers_a_knock_with_nonsense_is_no_matter(tmp_path, still):
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = far(grid, tmp_path, deadline=10 * engine.KNOCK)
    assert len(answers(found, [ask(0), ask(1)], SHORT)) == 2
    nonsense = [Error(2, "it broke"), RecordDict({})]
    grid.spoil = lambda place, message: Message(nonsense[place % 2], reply_to=message)
    assert answers(found, [ask(1, 1)], 3.5 * engine.KNOCK) == []
    assert found.clients() == [0, 1]


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
