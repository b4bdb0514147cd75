"""The virtual clock, a function of seed, client and moment; and the engine that runs on it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.engine import EngineState, Reply, Request
from weft.engines.simulated import Clock, SimulatedEngine
from weft.plan import ClockOptions

STAYS = st.sampled_from([0.0, 0.5, 5.0, 50.0])
RANGES = {"spread": st.floats(1, 20), "jitter": st.floats(0, 1), "late": st.floats(0, 20), "away": st.floats(0.1, 20)}
CLOCKS = st.builds(Clock, st.builds(ClockOptions, stay=STAYS, **RANGES), st.integers(0, 5))
MOMENTS = st.floats(0, 200)


@given(CLOCKS, st.integers(0, 30), st.lists(MOMENTS, min_size=2, max_size=6))
def test_a_client_that_is_away_comes_back(clock, client, moments):
    moments.sort()
    returns = [clock.available_from(client, moment) for moment in moments]
    assert returns == sorted(returns)
    for moment, back in zip(moments, returns, strict=True):
        assert back >= moment
        assert clock.is_available(client, back)
        assert clock.available_from(client, back) == back
        assert clock.is_available(client, moment) == (back == moment)


@given(CLOCKS, st.integers(0, 30), st.text(max_size=8))
def test_a_duration_is_positive_and_always_the_same(clock, client, request_id):
    assert clock.duration(client, request_id) == Clock(clock.options, clock.seed).duration(client, request_id) > 0
    if not clock.options.jitter:
        assert 1 <= clock.duration(client, request_id) <= clock.options.spread


def test_clients_differ_only_where_the_plan_says_so():
    even, uneven = (Clock(ClockOptions(spread=spread), 0) for spread in (1.0, 4.0))
    assert {even.duration(client, "x") for client in range(9)} == {1.0}
    assert len({uneven.duration(client, "x") for client in range(9)}) == 9
    assert all(even.is_available(client, moment) for client in range(9) for moment in (0.0, 99.0))


class Echo:
    """A carrier whose clients reply with the bytes of the request; `batches` notes how many are computed at once."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self._requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self._requests.append(request)

    def ready(self) -> None:
        return None

    def replies(self) -> Iterator[Reply]:
        requests, self._requests = self._requests, []
        self.batches.append(len(requests))
        for client, wire, request_id, *_ in sorted(requests, key=lambda one: one.client % 3):  # not in request order
            yield Reply(client, wire, 0.5, request_id)

    def save(self) -> EngineState:
        return EngineState()


def simulated(**words) -> tuple[SimulatedEngine, Echo]:
    carrier = Echo()
    return SimulatedEngine(tiny(clients=6, **words), carrier, Path(), EngineState()), carrier


def request(client: int, number: int = 0, crosses: bool = True) -> Request:
    return Request(client, f"{client}/{number}".encode(), f"0.{number}.{client}", crosses=crosses)


def exchange(
    engine: SimulatedEngine, requests: Iterable[Request] = (), timeout: float | None = None
) -> Iterator[Reply]:
    for each in requests:
        engine.submit(each)
    return engine.replies(timeout)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=6),
    st.sampled_from([None, 0.5, 1.0, 3.0]),
    st.sampled_from([1.0, 4.0]),
)
def test_every_reply_arrives_once_and_in_the_order_of_time(selected, deadline, spread):
    engine, _ = simulated(quorum=1, clock__spread=spread, clock__jitter=0.3)
    numbers = itertools.count()
    sent, arrived, moments = [], [], []
    for clients in selected:
        requests = [request(client, next(numbers)) for client in clients]
        sent += [each.wire for each in requests]
        began = engine.now()
        for reply in exchange(engine, requests, deadline):
            arrived.append(reply.wire)
            moments.append(engine.now())
            assert deadline is None or engine.now() <= began + deadline + 1e-9
    arrived += [reply.wire for reply in exchange(engine)]
    assert sorted(arrived) == sorted(sent)
    assert [*moments, engine.now()] == sorted([*moments, engine.now()])
    for client in range(6):  # a client replies in the order of its requests
        first, second = ([wire for wire in one if wire.startswith(b"%d/" % client)] for one in (arrived, sent))
        assert first == second


def test_a_late_reply_arrives_in_a_later_call():
    engine, _ = simulated(deadline=1.5, clock__spread=4.0)
    durations = {client: Clock(engine._plan.clock, 0).duration(client, f"0.0.{client}") for client in range(6)}
    fast = [client for client in range(6) if durations[client] <= 1.5]
    assert 0 < len(fast) < 6
    first = [reply.client for reply in exchange(engine, map(request, range(6)), 1.5)]
    assert first == sorted(fast, key=durations.__getitem__)
    assert engine.now() == 1.5
    rest = [reply.client for reply in exchange(engine)]
    assert sorted(first + rest) == list(range(6))
    assert engine.now() == max(durations.values())


def test_all_waiting_requests_are_computed_at_once():
    engine, carrier = simulated(**{"async": "updates"})
    assert next(exchange(engine, map(request, range(6)))).client == 0
    assert carrier.batches == [6]
    replies = exchange(engine, [request(0, 1)])
    assert [next(replies).client for _ in range(5)] == [1, 2, 3, 4, 5]
    assert carrier.batches == [6]  # the reply to the new request is not due yet
    assert next(replies).wire == b"0/1"
    assert carrier.batches == [6, 1]


def test_a_request_that_does_not_cross_the_network_is_answered_at_once():
    engine, _ = simulated(faults__crash=0.9)
    assert len(list(exchange(engine, [request(client, crosses=False) for client in range(6)], 1.0))) == 6
    assert engine.now() == 0.0


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_replies_on_their_way_survive_a_stop(tmp_path, calls):
    plan = tiny(clients=6, deadline=0.5, clock__spread=3.0)
    whole, stopped = (SimulatedEngine(plan, Echo(), tmp_path, EngineState()) for _ in range(2))
    for engine, call in itertools.product((whole, stopped), range(calls)):
        list(exchange(engine, () if call else map(request, range(6)), 0.5))
    saved = EngineState(transit=json.loads(json.dumps(stopped.save().transit)))
    resumed = SimulatedEngine(plan, Echo(), tmp_path, saved)
    assert resumed.now() == whole.now() > 0
    assert list(exchange(resumed)) == list(exchange(whole))
    assert resumed.now() == whole.now()


def test_time_advances_until_the_next_client_is_available():
    engine, _ = simulated(**{"async": "updates", "clock__late": 10.0})
    moments = []
    while len(engine.clients().available) < 6:
        assert list(exchange(engine)) == []
        moments.append(engine.now())
    assert moments == sorted(set(moments))
    assert len(moments) == 6
