"""Clients that are late, away or silent: nothing that they owe is lost, and none has more than one vote in a round."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers import Run, Watched, differences, run, state_bits, tiny

from weft import WeftError
from weft.core.engine import Availability
from weft.engines.simulated import SimulatedEngine

COMING_AND_GOING = {"deadline": 1.5, "clock__stay": 3.0, "clock__away": 4.0, "clock__spread": 4.0}
WAYS = {
    "synchronous": {},
    "task clocks": {"async": "task_clocks", "tasks": 3, "rounds_per_task": 4},
    "quorum": {"quorum": 2, "rounds_per_task": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_clients_that_come_and_go_are_tested_after_every_task(way):
    for seed in range(12):
        finished = run(seed=seed, **COMING_AND_GOING, **WAYS[way])
        assert len(finished.matrices) == finished.plan.clients, seed
        for matrix in finished.matrices.values():
            assert [len(row) for row in matrix] == list(range(1, finished.plan.tasks + 1)), seed
        assert not finished.progress.pending


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_late_update_is_merged_unless_a_newer_one_is(way):
    """`late=next`: an update counts in the round in which it arrives, also at the end of a task."""
    merged = passed_over = 0
    for seed in range(6):
        finished = Watched(tiny(seed=seed, **COMING_AND_GOING, **WAYS[way])).go()
        sent = {reply.request_id for reply in finished.answers if "weights" in reply.tensors}
        counted = {(each.client, each.task, each.round) for each in finished.merged}
        left_out = {_place(name) for name in finished.heard & sent} - counted
        for client, *when in left_out:  # several of one client arrived in one round
            assert any(other == client and later > when for other, *later in counted), (seed, client, when)
        merged, passed_over = merged + len(counted), passed_over + len(left_out)
    assert merged > 10 * passed_over


def _place(request_id: str) -> tuple[int, int, int]:
    task, round_index, client = map(int, request_id.split("."))
    return client, task, round_index


def one_vote_each(finished: Watched) -> bool:
    return len({(each.at, each.client) for each in finished.merged}) == len(finished.merged)


def changing(monkeypatch, change) -> None:
    """Let `change(request, flight)` decide how a request travels."""
    depart = SimulatedEngine._depart

    def changed(self, request):
        flight = depart(self, request)
        change(request, flight)
        return flight

    monkeypatch.setattr(SimulatedEngine, "_depart", changed)


def test_a_client_that_holds_back_replies_has_one_vote(monkeypatch):
    def hold_back(request, flight):
        if request.client == 2 and request.crosses:
            flight.arrives = max(flight.arrives, 8.5)

    changing(monkeypatch, hold_back)
    finished = Watched(tiny(clients=3, tasks=1, rounds_per_task=12, deadline=1.5, method="fedavg")).go()
    assert any(each.client == 2 for each in finished.merged)
    assert one_vote_each(finished)
    assert sum(client == 2 and "images" in fields for client, _, _, fields in finished.reports) > 2  # all were heard


@pytest.mark.parametrize("rule", ["median", "clip"])
def test_under_a_robust_rule_late_updates_are_not_merged(rule):
    words = {"deadline": 2.0, "tasks": 1, "rounds_per_task": 4, "clock__spread": 4.0, "clients": 5}
    mean, robust = (Watched(tiny(aggregation=each, **words)).go().merged for each in ("mean", rule))
    assert any(each.round < each.at for each in mean)
    assert robust
    assert not any(each.round < each.at for each in robust)


def test_a_round_starts_when_a_client_is_available(monkeypatch):
    """All are away for long after the first round: no round is lost."""
    clients = SimulatedEngine.clients

    def often_away(self):
        return Availability(frozenset()) if 2.0 <= self.now() < 60.0 else clients(self)

    monkeypatch.setattr(SimulatedEngine, "clients", often_away)
    monkeypatch.setattr(SimulatedEngine, "_wait", lambda self, end: setattr(self, "_now", min(end, self.now() + 1)))
    finished = Watched(tiny(tasks=2, rounds_per_task=3, deadline=1.5)).go()
    assert finished.engine.now() > 60
    assert [each[:2] for each in finished.merged] == list(itertools.product(range(6), range(3)))


def test_in_synchronous_rounds_nothing_is_late():
    finished = Watched(tiny(tasks=2)).go()
    rounds = itertools.product(range(2), range(finished.plan.rounds_per_task))
    expected = [(at, client, *place) for at, place in enumerate(rounds) for client in range(finished.plan.clients)]
    assert [each[:4] for each in finished.merged] == expected


def test_a_request_to_train_a_task_that_is_over_changes_nothing():
    """Of two requests that were long on their way the later one may arrive first."""
    running = Run(tiny(tasks=2, clients=1))

    assert not running.ask("begin train end", 0, 0).error
    before = state_bits(running.clients[0])
    assert "over" in running.ask("train upload", 0, 1).error
    assert differences(state_bits(running.clients[0]), before) == []
    assert not running.ask("begin train", 1, 0).error
    assert "over" in running.ask("begin train end", 0, 2).error
    assert not running.ask("end test", 0, 3).error  # which changes nothing


# ---- many small plans ------------------------------------------------------------------------------------------------

SMALL = {"network__hidden": 4, "network__features": 4, "scenario__train": 10, "scenario__test": 10}
SOMETIMES = {
    "async": ["task_clocks"],
    "deadline": [0.5, 1.5, 4.0],
    "quorum": [1, 2],
    "clients_per_round": [1, 2],
    "train_unchosen": [True],
    "late": ["drop"],
    "aggregation": ["median", "clip"],
    "measured_model": ["global"],
    "clock__spread": [2.0, 10.0],
    "clock__stay": [3.0],
    "clock__late": [4.0],
    "faults__crash": [0.2],
    "faults__drop": [0.2],
    "faults__corrupt": [0.2],
    "faults__delay": [0.2],
}


def some_plan(number: int) -> dict[str, object]:
    rng = random.Random(number)
    words = {key: rng.choice(values) for key, values in SOMETIMES.items() if rng.random() < 0.4}
    method = rng.choice(["fedweit", "fedweit", "fedavg", "scaffold", "fedcurv", "stl", "fedprox+apd"])
    sizes = {"clients": rng.choice([2, 3, 4]), "tasks": rng.choice([1, 2, 3]), "rounds_per_task": rng.choice([1, 2, 4])}
    return {"seed": number, "method": method, **sizes, **SMALL, **words}


@pytest.mark.slow
def test_whatever_goes_wrong_clients_are_tested_after_every_task_and_merged_once_a_round():
    tried = 0
    for number in range(150):
        try:
            plan = tiny(**some_plan(number))
        except WeftError:
            continue  # options that exclude each other
        finished = Watched(plan).go()
        tried += 1
        for client, known in enumerate(finished.progress.clients):
            rows = [len(row) for row in finished.matrices.get(client, [])]
            assert known.assigned < 0 or rows == list(range(1, plan.tasks + 1)), (number, client)
        assert one_vote_each(finished), number
        assert not finished.progress.pending
    assert tried > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_late_reply_about_one_task_confirms_nothing_of_the_next(seed):
    """Otherwise a client would be told to use A's that it was never sent."""
    words = {"clients": 4, "tasks": 4, "rounds_per_task": 3, "method__kb_size": 1, "deadline": 1.2}
    faults = {"faults__crash": 0.3, "faults__delay": 0.3, "faults__delay_seconds": 3.0}
    finished = run(seed=seed, **SMALL, **words, **faults)
    assert any(finished.server.has_foreign.values())
    for client, state in finished.clients.items():
        assert set(finished.server.has_foreign.get(client, [])) <= set(state.knowledge)


def test_a_damaged_reply_answers_its_own_request(monkeypatch):
    """The first client's reply to round 0 is late and good; that to round 2 arrives before it, damaged."""

    def change(request, flight):
        if request.request_id == "0.0.0":
            flight.arrives = 4.9
        elif request.request_id == "0.2.0":
            flight.fault = "corrupt"

    changing(monkeypatch, change)
    finished = Watched(tiny(clients=2, tasks=1, rounds_per_task=8, deadline=1.5)).go()
    rejected = [incident[:3] for incident in finished.incidents if "rejected" in incident[3]]
    assert rejected == [(0, 0, 2)]
    assert (0, 0, 0) in [report[:3] for report in finished.reports]  # heard, though a newer one counted


def test_the_clients_model_is_tested_even_if_theta_g_comes_with_the_request():
    """A client whose last reply was lost is requested its A, for which theta_G is sent along, and tested."""
    for seed in range(6):
        finished = run(seed=seed, tasks=1, rounds_per_task=2, faults__drop=0.4, deadline=3.0)
        for client, state in finished.clients.items():
            (accuracy,) = finished.matrices[client][0]
            ctx = finished.runtime.context(client, 0)
            finished.method.load_task(state, 0, ctx)
            assert ctx.network.measure(finished.runtime.batches(client, 0, "test"))[0] == accuracy
