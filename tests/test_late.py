"""Who is late, away or silent in rounds: nothing that it owes is lost, and nobody has more than one vote."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers import Run, differences, run, state_bits, tiny

from weft import WeftError
from weft.engines.simulated import SimulatedEngine
from weft.wire.message import Message, decode, encode

COMING_AND_GOING = {"deadline": 1.5, "clock__stay": 3.0, "clock__away": 4.0, "clock__spread": 4.0}
WAYS = {
    "in step": {},
    "own clocks": {"async": "task_clocks", "tasks": 3, "rounds_per_task": 4},
    "quorum": {"quorum": 2, "rounds_per_task": 4},
}


class Watched(Run):
    """Notes what is merged in each round, and all that was answered."""

    def go(self):
        self.merged: list[list[Message]] = []
        aggregate = self.method.aggregate

        def noted(server, replies):
            self.merged.append(list(replies))
            self.heard = [place[:3] for place in self.reports]  # by the last merge
            aggregate(server, replies)

        self.method.aggregate = noted
        return super().go()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_everybody_is_tested_after_every_task_however_it_comes_and_goes(way):
    for seed in range(12):
        finished = run(seed=seed, **COMING_AND_GOING, **WAYS[way])
        assert len(finished.matrices) == finished.plan.clients, seed
        for matrix in finished.matrices.values():
            assert [len(row) for row in matrix] == list(range(1, finished.plan.tasks + 1)), seed
        assert not finished.progress.out


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_late_answers_are_merged_or_told_of(way):
    """`late=next`: what was learned and arrived counts in the round in which it comes, also at the end of a task."""
    merged = passed_over = 0
    for seed in range(6):
        finished = Watched(tiny(seed=seed, **COMING_AND_GOING, **WAYS[way])).go()
        sent = {reply.request_id for reply in finished.answers if "weights" in reply.tensors}
        counted = {reply.request_id for replies in finished.merged for reply in replies}
        left_out = ({f"{step}.{round_index}.{client}" for client, step, round_index in finished.heard} & sent) - counted
        for request_id in left_out:  # several of one client came in one round
            assert any(_is_newer(other, request_id) for other in counted), (seed, request_id)
        merged, passed_over = merged + len(counted), passed_over + len(left_out)
    assert merged > 10 * passed_over


def _is_newer(one: str, other: str) -> bool:
    (step, place, client), (before, earlier, who) = (map(int, name.split(".")) for name in (one, other))
    return client == who and (step, place) > (before, earlier)


def test_who_holds_back_answers_has_one_vote_all_the_same(monkeypatch):
    depart = SimulatedEngine._depart

    def held_back(self, request):
        flight = depart(self, request)
        if request.client == 2 and request.crosses:
            flight.arrives = max(flight.arrives, 8.5)
        return flight

    monkeypatch.setattr(SimulatedEngine, "_depart", held_back)
    words = {"clients": 3, "tasks": 1, "rounds_per_task": 12, "deadline": 1.5, "method": "fedavg"}
    finished = Watched(tiny(**words)).go()
    votes = [[reply.sender for reply in replies] for replies in finished.merged]
    assert sum("client-2" in names for names in votes) >= 1
    assert all(len(set(names)) == len(names) for names in votes)
    assert sum(client == 2 and "images" in numbers for client, _, _, numbers in finished.reports) > 2  # all were heard


@pytest.mark.parametrize("rule", ["median", "clip"])
def test_where_votes_are_compared_late_ones_count_for_nothing(rule):
    words = {"deadline": 2.0, "tasks": 1, "rounds_per_task": 4, "clock__spread": 4.0, "clients": 5}
    late = {
        aggregation: [
            reply.round
            for place, replies in enumerate(Watched(tiny(aggregation=aggregation, **words)).go().merged)
            for reply in replies
            if reply.round < place
        ]
        for aggregation in ("mean", rule)
    }
    assert late["mean"]
    assert not late[rule]


def test_a_round_begins_when_somebody_is_there(monkeypatch):
    """All are away for long after the first round: no round is used up by that."""
    away = [(2.0, 60.0)]
    here = SimulatedEngine.clients

    def clients(self):
        return [] if any(start <= self.now() < end for start, end in away) else here(self)

    monkeypatch.setattr(SimulatedEngine, "clients", clients)
    monkeypatch.setattr(SimulatedEngine, "_wait", lambda self, end: setattr(self, "_now", min(end, self.now() + 1)))
    finished = Watched(tiny(tasks=2, rounds_per_task=3, deadline=1.5)).go()
    assert finished.clock.now() > 60
    assert all(len(replies) == finished.plan.clients for replies in finished.merged)
    assert len(finished.merged) == 6


def test_in_step_nothing_is_late():
    finished = Watched(tiny(tasks=2)).go()
    assert all(len(replies) == finished.plan.clients for replies in finished.merged)
    rounds = [{(reply.task, reply.round) for reply in replies} for replies in finished.merged]
    assert all(len(each) == 1 for each in rounds)
    assert rounds == [{place} for place in itertools.product(range(2), range(finished.plan.rounds_per_task))]


def test_a_lesson_that_comes_when_its_task_is_over_teaches_nothing():
    """Of two requests that were long on their way the later one may come first."""
    running = Run(tiny(tasks=2, clients=1))

    def ask(name: str, ops: str, step: int) -> Message:
        words = ("server", "client-0", name, tuple(ops.split()), step, 0)
        ((_, wire, _),) = running.exchange([(0, encode(Message(*words)), name, True)])
        return decode(wire)

    assert not ask("a", "begin train finish", 0).error
    before = state_bits(running.clients[0])
    assert ask("b", "train send", 0).error == "that task is over here"
    assert differences(state_bits(running.clients[0]), before) == []
    assert not ask("c", "begin train", 1).error
    assert ask("d", "begin train finish", 0).error == "that task is over here"
    assert not ask("e", "finish test", 0).error  # which changes nothing


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
    "measured_model": ["weights"],
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
def test_whatever_goes_wrong_who_was_asked_is_tested_after_every_task_and_merged_once_a_round():
    tried = 0
    for number in range(150):
        try:
            plan = tiny(**some_plan(number))
        except WeftError:
            continue  # what makes no sense together
        finished = Watched(plan).go()
        tried += 1
        for client in map(int, finished.progress.asked):
            rows = [len(row) for row in finished.matrices.get(client, [])]
            assert rows == list(range(1, plan.tasks + 1)), (number, client)
        for replies in finished.merged:
            senders = [reply.sender for reply in replies]
            assert len(set(senders)) == len(senders), number
        assert not finished.progress.out
    assert tried > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_a_late_answer_about_one_task_confirms_nothing_of_the_next(seed):
    """Else a client is told to use A's that it was never sent."""
    words = {"clients": 4, "tasks": 4, "rounds_per_task": 3, "method__kb_size": 1, "deadline": 1.2}
    faults = {"faults__crash": 0.3, "faults__delay": 0.3, "faults__delay_seconds": 3.0}
    finished = run(seed=seed, **SMALL, **words, **faults)
    for client, state in finished.clients.items():
        held = {f"foreign/{key}" for key in finished.server.numbers["held"].get(str(client), [])}
        assert held <= set(state.archive)


def test_a_damaged_answer_is_taken_for_that_to_its_own_request(monkeypatch):
    """The first client's answer to round 0 is late and good; that to round 2 comes before it, damaged."""
    depart, damage = SimulatedEngine._depart, {"0.2.0"}

    def changed(self, request):
        flight = depart(self, request)
        if request.request_id == "0.0.0":
            flight.arrives = 4.9
        flight.fate = "corrupt" if request.request_id in damage else flight.fate
        return flight

    monkeypatch.setattr(SimulatedEngine, "_depart", changed)
    finished = Watched(tiny(clients=2, tasks=1, rounds_per_task=8, deadline=1.5)).go()
    refused = [incident[:3] for incident in finished.incidents if "refused" in incident[3]]
    assert refused == [(0, 0, 2)]
    assert (0, 0, 0) in [report[:3] for report in finished.reports]  # heard, though a newer one counted


def test_what_is_measured_is_the_clients_own_model_also_when_theta_g_comes_with_the_question():
    """A client whose last answer was lost is asked for its A, for which theta_G goes along, and tested."""
    for seed in range(6):
        finished = run(seed=seed, tasks=1, rounds_per_task=2, faults__drop=0.4, deadline=3.0)
        for client, state in finished.clients.items():
            (accuracy,) = finished.matrices[client][0]
            lesson = finished.runtime.context(client, 0)
            finished.method.load_task(state, 0, lesson)
            assert lesson.network.measure(finished.runtime.batches(client, 0, "test"))[0] == accuracy
