"""Robust aggregation, by hand and against liars."""

import dataclasses

import pytest
import torch
from helpers import Run, tiny, vector
from methods_helpers import updates_of

from weft.methods.robust import clip, coordinate_median, median, robust
from weft.wire.message import decode, encode
from weft.wire.tensors import Rows, Sparse, dense

SEGMENTS = ((2, 1), (1, 2))


def rows(kept, *values):
    return Rows(SEGMENTS, torch.tensor(kept), vector(*values))


def test_the_median_is_over_those_that_sent_a_row():
    parts = [rows([True, False, True], 1, 5, 6), rows([True, True, False], 3, 7), rows([True, False, False], 100)]
    assert coordinate_median(parts).tolist() == [3, 7, 5, 6]
    assert [dense(part).tolist() for part in median(parts)] == [[3, 0, 5, 6], [3, 7, 0, 0], [3, 0, 0, 0]]


def test_of_two_the_median_is_the_mean():
    assert coordinate_median([vector(1, -2), vector(2, 5)]).tolist() == [1.5, 1.5]


def test_single_values():
    parts = [Sparse.of(vector(0, 2, 4)), Sparse.of(vector(9, 0, 6)), Sparse.of(vector(0, 0, 50))]
    assert coordinate_median(parts).tolist() == [9, 2, 6]
    assert [part.indices.tolist() for part in median(parts)] == [[1, 2], [0, 2], [2]]


def test_clipping_by_hand():
    """Distances from the median 0: 1, 2 and 30; the typical one is 2, and only the farthest is drawn in."""
    parts = [vector(0, 1), vector(-2, 0), vector(30, 0)]
    assert coordinate_median(parts).tolist() == [0, 0]
    assert [part.tolist() for part in clip(parts)] == [[0, 1], [-2, 0], [2, 0]]


def test_equal_answers_stay_as_they_are():
    for part in clip([vector(1, 2), vector(1, 2), vector(1, 2)]):
        assert part.tolist() == [1, 2]


def test_only_what_is_merged_is_changed():
    updates = list(updates_of(*({"weights": vector(c)} for c in range(3))))
    updates = [dataclasses.replace(each, task_tensors={"adaptive": vector(each.client)}) for each in updates]
    changed = robust(updates, "median")
    assert [update.tensors["weights"].item() for update in changed] == [1, 1, 1]
    assert [update.task_tensors["adaptive"].item() for update in changed] == [0, 1, 2]
    assert [update.tensors["weights"].item() for update in updates] == [0, 1, 2]


def test_nobody_makes_its_own_vote_heavier():
    """How many images it has is a client's own word, and FedAvg weighs by it."""
    tensors, claims = [{"weights": vector(c)} for c in range(3)], (10, 20, 10**9)
    assert updates_of(*tensors, examples=claims, rule="clip").weights("weights", "examples") == [1, 1, 1]
    assert updates_of(*tensors, examples=claims).weights("weights", "examples") == list(claims)


class Liar(Run):
    """One of five clients sends the opposite of what it has learned, tenfold: nothing that a check could refuse."""

    def replies(self):
        for reply in super().replies():
            if reply.client == 0:
                lie = decode(reply.wire)
                for name, value in lie.tensors.items():
                    lie.tensors[name] = -10 * value
                reply = reply._replace(wire=encode(lie))
            yield reply


@pytest.mark.parametrize("rule", ["median", "clip"])
def test_a_liar_moves_theta_g_less(rule):
    def distance(aggregation, kind):
        words = {"method": "fedavg", "clients": 5, "tasks": 1, "aggregation": aggregation}
        return kind(tiny(**words)).go().server.weights

    honest = distance("mean", Run)
    fooled, guarded = ((distance(one, Liar) - honest).norm() for one in ("mean", rule))
    assert guarded < fooled / 3
