"""Who is late, away or silent in rounds: nothing that it owes is lost, and nobody has more than one vote."""

from __future__ import annotations

import itertools

import pytest
from helpers import Run, run, tiny

from weft.engines.clocked import Clocked
from weft.message import Message

COMING_AND_GOING = {"deadline": 1.5, "clock__stay": 3.0, "clock__away": 4.0, "clock__spread": 4.0}
WAYS = {
    "in step": {},
    "own clocks": {"async": "tasks", "tasks": 3, "rounds_per_task": 4},
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
        sent = {reply.request_id for reply in finished.replies if "base" in reply.tensors}
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
    depart = Clocked._depart

    def held_back(self, request):
        flight = depart(self, request)
        if request.client == 2 and request.crosses:
            flight.arrives = max(flight.arrives, 8.5)
        return flight

    monkeypatch.setattr(Clocked, "_depart", held_back)
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
    here = Clocked.clients

    def clients(self):
        return [] if any(start <= self.now() < end for start, end in away) else here(self)

    monkeypatch.setattr(Clocked, "clients", clients)
    monkeypatch.setattr(Clocked, "_wait", lambda self, end: setattr(self, "_now", min(end, self.now() + 1)))
    finished = Watched(tiny(tasks=2, rounds_per_task=3, deadline=1.5)).go()
    assert finished.clock.now() > 60
    assert all(len(replies) == finished.plan.clients for replies in finished.merged)
    assert len(finished.merged) == 6


def test_in_step_nothing_is_late():
    finished = Watched(tiny(tasks=2)).go()
    assert all(len(replies) == finished.plan.clients for replies in finished.merged)
    rounds = [{(reply.step, reply.round) for reply in replies} for replies in finished.merged]
    assert all(len(each) == 1 for each in rounds)
    assert rounds == [{place} for place in itertools.product(range(2), range(finished.plan.rounds_per_task))]
