"""The virtual clock: a function of seed, client and moment; and the engine that lives by it."""

from __future__ import annotations

import itertools

import pytest
from helpers import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.engine import EngineState, Reply, Request
from weft.engines.clock import Clock
from weft.engines.simulated import SimulatedEngine
from weft.plan import ClockOptions as Options

OPTIONS = st.builds(
    Options,
    spread=st.floats(1, 20),
    jitter=st.floats(0, 1),
    late=st.floats(0, 20),
    stay=st.sampled_from([0.0, 0.5, 5.0, 50.0]),
    away=st.floats(0.1, 20),
)
CLOCKS = st.builds(Clock, OPTIONS, st.integers(0, 5))
MOMENTS = st.floats(0, 200)


@given(CLOCKS, st.integers(0, 30), MOMENTS)
def test_who_is_away_comes_back(clock, client, moment):
    there = clock.there_from(client, moment)
    assert there >= moment
    assert clock.is_there(client, there)
    assert clock.there_from(client, there) == there
    assert clock.is_there(client, moment) == (there == moment)


@given(CLOCKS, st.integers(0, 30), st.lists(MOMENTS, min_size=2, max_size=6))
def test_nobody_comes_back_before_earlier_ones(clock, client, moments):
    moments.sort()
    assert [clock.there_from(client, m) for m in moments] == sorted(clock.there_from(client, m) for m in moments)


@given(CLOCKS, st.integers(0, 30), st.text(max_size=8))
def test_a_duration_is_positive_and_always_the_same(clock, client, request_id):
    assert clock.duration(client, request_id) == Clock(clock.options, clock.seed).duration(client, request_id) > 0
    if not clock.options.jitter:
        assert 1 <= clock.duration(client, request_id) <= clock.options.spread


def test_clients_differ_only_where_the_plan_says_so():
    even, uneven = (Clock(Options(spread=spread), 0) for spread in (1.0, 4.0))
    assert {even.duration(client, "x") for client in range(9)} == {1.0}
    assert len({uneven.duration(client, "x") for client in range(9)}) == 9
    assert all(even.is_there(client, moment) for client in range(9) for moment in (0.0, 99.0))


class Echo:
    """A carrier whose clients answer with the bytes that they were sent; it notes how many it was asked at once."""

    def __init__(self):
        self.waves: list[list[str]] = []

    def exchange(self, requests):
        asked = list(requests)
        self.waves.append([request.request_id for request in asked])
        for request in sorted(asked, key=lambda one: one.client % 3):  # some other order than that of the asking
            yield Reply(request.client, request.wire, 0.5)

    def save(self):
        return EngineState({}, {})

    def close(self):
        pass


def request(client: int, number: int, crosses: bool = True) -> Request:
    return Request(client, f"{client}/{number}".encode(), f"0.{number}.{client}", crosses=crosses)


def clocked(**words) -> tuple[SimulatedEngine, Echo]:
    carrier = Echo()
    return SimulatedEngine(tiny(clients=6, **words), carrier), carrier


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=6),
    st.sampled_from([None, 0.5, 1.0, 3.0]),
    st.sampled_from([1.0, 4.0]),
)
def test_every_answer_comes_once_and_in_the_order_of_time(asked, deadline, spread):
    engine, _ = clocked(quorum=1, **{"clock__spread": spread, "clock__jitter": 0.3})
    numbers = itertools.count()
    sent, came, moments = [], [], []
    for clients in asked:
        requests = [request(client, next(numbers)) for client in clients]
        sent += [one.wire for one in requests]
        began = engine.now()
        for reply in engine.exchange(requests, deadline):
            came.append(reply.wire)
            moments.append(engine.now())
            assert deadline is None or engine.now() <= began + deadline + 1e-9
    came += [reply.wire for reply in engine.exchange([])]
    moments.append(engine.now())
    assert sorted(came) == sorted(sent)
    assert moments == sorted(moments)
    for client in range(6):  # a client answers in the order in which it was asked
        of_client = [wire for wire in came if wire.startswith(f"{client}/".encode())]
        assert of_client == [wire for wire in sent if wire.startswith(f"{client}/".encode())]


def test_a_late_answer_comes_out_of_a_later_exchange():
    engine, _ = clocked(deadline=1.5, clock__spread=4.0)
    durations = {client: Clock(engine._plan.clock, 0).duration(client, f"0.0.{client}") for client in range(6)}
    fast = [client for client in range(6) if durations[client] <= 1.5]
    assert 0 < len(fast) < 6
    first = [reply.client for reply in engine.exchange([request(client, 0) for client in range(6)], 1.5)]
    assert first == sorted(fast, key=durations.__getitem__)
    assert engine.now() == 1.5
    rest = [reply.client for reply in engine.exchange([], None)]
    assert sorted(first + rest) == list(range(6))
    assert engine.now() == max(durations.values())


def test_all_that_waits_is_computed_at_once():
    engine, carrier = clocked(**{"async": "updates"})
    replies = engine.exchange([request(client, 0) for client in range(6)])
    assert next(replies).client == 0
    assert [len(wave) for wave in carrier.waves] == [6]
    again = engine.exchange([request(0, 1)])
    assert [next(again).client for _ in range(5)] == [1, 2, 3, 4, 5]
    assert [len(wave) for wave in carrier.waves] == [6]  # nobody waits for the new one yet
    assert next(again).wire == b"0/1"
    assert [len(wave) for wave in carrier.waves] == [6, 1]


def test_what_crosses_no_wire_is_there_at_once():
    engine, _ = clocked(faults__crash=0.9)
    assert len(list(engine.exchange([request(client, 0, crosses=False) for client in range(6)], 1.0))) == 6
    assert engine.now() == 0.0


@pytest.mark.parametrize("when", [0, 1, 3])
def test_what_is_on_its_way_survives_a_stop(tmp_path, when):
    def engine(saved=None):
        return SimulatedEngine(tiny(clients=6, deadline=0.5, clock__spread=3.0), Echo(), tmp_path, saved)

    whole, stopped = engine(), engine()
    for one in (whole, stopped):
        for _ in range(when + 1):
            list(one.exchange([request(client, one.now()) for client in range(6)] if one.now() == 0 else [], 0.5))
    again = engine(stopped.save())
    assert again.now() == whole.now() > 0
    assert list(again.exchange([])) == list(whole.exchange([]))
    assert again.now() == whole.now()


def test_time_goes_on_to_the_next_arrival():
    engine, _ = clocked(**{"async": "updates", "clock__late": 10.0})
    moments = []
    while len(engine.clients()) < 6:
        assert list(engine.exchange([])) == []
        moments.append(engine.now())
    assert moments == sorted(set(moments))
    assert len(moments) == 6
