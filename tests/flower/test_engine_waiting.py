"""How long the engine waits: a deadline is for sites that may still reply, and failures have an end."""

from __future__ import annotations

import pytest
from flwr.app import Error, Message, RecordDict
from loop_grid import LONG, SHORT, Fading, Loop, exchange, make_engine, replied, request

from weft.flower import engine, site_policy
from weft.flower.envelope import SiteReply, pack_reply, unpack
from weft.wire.message import decode

pytestmark = pytest.mark.usefixtures("quick")


def test_the_reply_of_a_site_that_was_gone_still_counts(tmp_path, still):
    grid = Fading(tmp_path, silent_from=0, stays=False)
    found = make_engine(grid, tmp_path, deadline=LONG)
    assert replied(found, request(0), request(1), deadline=SHORT) == ["0.0.0"]
    assert found.clients().away == {1}
    assert replied(found, request(0, 1), deadline=LONG) == ["0.1.0"]
    grid.release()
    assert sorted(replied(found, request(0, 2), deadline=LONG)) == ["0.0.1", "0.2.0"]
    assert still.moment < 2 * SHORT


def test_an_exchange_without_any_site_lasts_its_deadline(tmp_path, still):
    """Otherwise all rounds would pass before a site is back."""
    grid = Fading(tmp_path, silent_from=0, stays=False)
    found = make_engine(grid, tmp_path, deadline=LONG)
    assert replied(found, request(0), request(1), deadline=SHORT) == ["0.0.0"]
    grid.names = []
    assert replied(found, deadline=LONG) == []
    assert still.moment >= LONG


def test_a_site_without_a_task_has_one_request_and_delays_nobody(tmp_path, still):
    pushed: list[str] = []

    def spoil(_: int, message: Message) -> Message | None:
        if message.metadata.dst_node_id == 1:
            return None
        pushed.append(decode(unpack(message).wire).request_id)
        return pack_reply(SiteReply(waiting="it has no task 0 yet"), message)

    found = make_engine(Loop(tmp_path, ["a", "b"], spoil), tmp_path, deadline=LONG)
    for round_index in (0, 2, 4):  # the loop skips a client that was selected in the round before
        pushed.clear()
        first, second = request(0, round_index), request(1, round_index)
        assert replied(found, first, second, deadline=SHORT) == [first.request_id]
        assert set(pushed) == {second.request_id}
        assert replied(found, request(0, round_index + 1), deadline=LONG) == [f"0.{round_index + 1}.0"]
        assert [flight["request_id"] for flight in found.save().transit["flights"]] == [second.request_id]
    assert still.moment < 4 * SHORT
    assert replied(found, deadline=SHORT) == []  # with nothing else to do the engine waits for a task
    assert still.moment >= 4 * SHORT


def test_the_late_replies_of_a_slow_site_arrive(tmp_path, still):
    """A request that the site works on is not replaced, or the site would stay behind for ever."""
    grid = Fading(tmp_path, silent_from=0, stays=True)
    found = make_engine(grid, tmp_path, deadline=LONG)
    assert replied(found, request(0), request(1), deadline=SHORT) == ["0.0.0"]
    assert replied(found, request(0, 2), request(1, 2), deadline=SHORT) == ["0.2.0"]
    grid.release()
    assert sorted(replied(found, deadline=LONG)) == ["0.0.1", "0.2.1"]
    assert still.moment < 3 * SHORT


def test_a_site_that_left_gets_no_requests(tmp_path):
    grid = Loop(tmp_path, ["a", "b"], lambda _, message: pack_reply(SiteReply(left=True), message))
    found = make_engine(grid, tmp_path)
    assert replied(found, request(1)) == []
    assert found.clients().available == {0}
    assert found.events == [("left", 1)]
    assert make_engine(grid, tmp_path, found.save()).clients().left == {1}


def test_an_idle_site_is_pinged_and_can_leave(tmp_path, still):
    """The second site works for long; meanwhile the first, which has finished, leaves."""
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = make_engine(grid, tmp_path, deadline=10 * engine.PING)
    assert len(replied(found, request(0), request(1), deadline=SHORT)) == 2
    sent = grid.sent
    assert replied(found, request(1, 1), deadline=2.5 * engine.PING) == []
    assert grid.sent - sent == 1 + 2  # the request, and two pings to the first
    assert found.clients().available == {0, 1}
    site_policy.leave(tmp_path / "a")
    assert replied(found, deadline=1.5 * engine.PING) == []
    assert found.events == [("left", 0)]
    assert found.clients().available == {1}
    assert [notice["run"] for notice in site_policy.leave_notices(tmp_path / "a")] == ["run"]


def test_an_unreadable_reply_to_a_ping_is_ignored(tmp_path, still):
    grid = Fading(tmp_path, silent_from=1, stays=True)
    found = make_engine(grid, tmp_path, deadline=10 * engine.PING)
    assert len(replied(found, request(0), request(1), deadline=SHORT)) == 2
    nonsense = [Error(2, "it broke"), RecordDict({})]
    grid.spoil = lambda count, message: Message(nonsense[count % 2], reply_to=message)
    assert replied(found, request(1, 1), deadline=3.5 * engine.PING) == []
    assert found.clients().available == {0, 1}


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 6, 7, 8])
def test_a_request_that_always_fails_ends_as_a_failure(tmp_path, still, code):
    """Also without a deadline: an app that runs out of memory would be retried for ever."""

    def spoil(count: int, message: Message) -> Message:
        assert count < 50, "it is retried for ever"
        return Message(Error(code, "it died"), reply_to=message)

    grid = Loop(tmp_path, ["a", "b"], spoil)
    found = make_engine(grid, tmp_path)
    (reply,) = exchange(found, request(0))
    assert str(code) in decode(reply.wire).error
    assert "it died" in decode(reply.wire).error
    assert grid.sent == engine.MAX_FAILURES
    assert found.events == [("retry", 0)] * (engine.MAX_FAILURES - 1)


def test_a_site_that_is_away_repeatedly_is_retried_without_limit(tmp_path, still):
    def spoil(count: int, message: Message) -> Message | None:
        error = Error(engine.NODE_UNAVAILABLE, "it is away")
        return Message(error, reply_to=message) if count < 2 * engine.MAX_FAILURES else None

    (reply,) = exchange(make_engine(Loop(tmp_path, ["a", "b"], spoil), tmp_path), request(0))
    assert not decode(reply.wire).error
