"""Whom the engine waits for: a deadline is for who may still answer, and failures have an end."""

from __future__ import annotations

import pytest
from flwr.app import Error, Message, RecordDict
from loop_grid import LONG, SHORT, Fading, Loop, answers, ask, far

from weft.flower import engine, leaving
from weft.flower.envelope import Answered, reply, unpack
from weft.wire.message import decode

pytestmark = pytest.mark.usefixtures("quick")


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
    assert [event for event, _ in found.told] == ["retry"] * (engine.FAILURES - 1)


def test_a_site_that_is_away_again_and_again_is_asked_when_it_is_back(tmp_path, still):
    def spoil(place: int, message: Message) -> Message | None:
        return Message(Error(engine.AWAY, "it is away"), reply_to=message) if place < 2 * engine.FAILURES else None

    (got,) = far(Loop(tmp_path, ["a", "b"], spoil), tmp_path).exchange([ask(0)])
    assert not decode(got.wire).error
