"""FedWeIT with parts of it left out, as in the paper's table of ablations."""

import pytest
import torch
from helpers import Run, differences, tiny
from methods_helpers import (
    adaptives,
    fresh_weit,
    learned_bits,
    start_of_a,
    weit,
)

from weft.wire.tensors import dense


@pytest.mark.parametrize(
    ("ablate", "up", "down"),
    [
        ((), {"weights", "adaptive"}, {"weights", "foreign"}),
        ("b_comm", {"adaptive"}, {"foreign"}),
        ("a_comm", {"weights"}, {"weights"}),
        ("a", {"weights"}, {"weights"}),
    ],
)
def test_what_travels(ablate, up, down):
    for biases in ("private", "shared") if ablate == "b_comm" else ("private",):
        finished = weit(tasks=3, ablate=ablate, biases=biases)
        assert (finished.names("c2s"), finished.names("s2c")) == (up, down)
        assert bool(finished.server.knowledge) == ("adaptive" in up)
    if ablate == "b_comm":
        assert not torch.equal(*(finished.clients[client].weights for client in (0, 1)))
    if ablate == "a_comm":
        assert all(value.count_nonzero() for value in adaptives(finished).values())  # it is there, at home


@pytest.mark.parametrize("past", ["frozen", "closed", "joint"])
def test_without_a_it_is_zero_everywhere(past):
    finished = weit(tasks=3, ablate="a", past=past)
    for client in range(3):
        assert len(adaptives(finished, client)) == 3
        for key, value in adaptives(finished, client).items():
            assert value.count_nonzero() == 0, (client, key)


def test_without_m_every_row_is_sent_as_it_is():
    finished = weit(ablate="m", send="product", keep=0.3)
    for step in range(2):
        assert (finished.clients[0].tasks[step].mask == 1).all()
    for key, value in finished.parts("c2s").items():
        if key[-1] == "weights":
            assert value.kept.all(), key
    theta, state = finished.theta(0, 0), finished.clients[0]
    wanted = state.weights + start_of_a(finished) + dense(state.tasks[0].adaptive)
    assert torch.equal(theta[: finished.layout.weights], wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sparsify", "past"),
    [("proximal", "frozen"), ("gradient", "frozen"), ("gradient", "joint"), ("proximal", "closed")],
)
def test_without_l1_nothing_is_shrunk(sparsify, past, held):
    """lambda_1 means nothing any more, to A, to m, or to past A; and no value of A is 0."""
    first, second = (
        fresh_weit(ablate="l1", sparsify=sparsify, past=past, adaptive_origin="zero", **words)  # all of A is learned
        for words in ({}, {"lambda_sparsity": 3.0, "lambda_mask": 1.0})
    )
    assert differences(learned_bits(first), learned_bits(second)) == []
    assert held[0]["adaptive"].count_nonzero() == first.layout.weights


def test_with_l1_values_of_a_are_zero():
    kept = []
    for weight in (1.0, 3.0):
        found = weit(lambda_sparsity=weight, adaptive_keep=1)
        kept.append([int(value.count_nonzero()) for value in adaptives(found).values()])
    assert max(kept[0]) < 0.9 * found.layout.weights
    assert all(map(int.__lt__, kept[1], kept[0]))


def test_adaptive_keep_is_the_largest_share_of_a(held):
    finished = fresh_weit(adaptive_keep=0.25, adaptive_rank="size")
    given = finished.parts("c2s")[0, 1, 1, "adaptive"]
    learned, kept = held[0]["adaptive"], given.dense() != 0
    assert 0.24 * finished.layout.weights < given.nonzeros <= 0.25 * finished.layout.weights
    assert learned[kept].abs().min() >= learned[~kept].abs().max()
    assert torch.equal(given.dense()[kept], learned[kept])


@pytest.mark.parametrize("past", ["frozen", "closed", "joint"])
def test_without_l2_nothing_pulls_at_b(past):
    first, second = (weit(ablate="l2", past=past, lambda_drift=value) for value in (100.0, 1.0))
    assert differences(learned_bits(first), learned_bits(second)) == []


def test_with_l2_b_stays_nearer_to_where_it_was(held):
    """No theta_G in between: the pull alone."""
    moved = {}
    for words in ("b_comm", "b_comm,l2"):
        Run(tiny(method="fedweit", method__ablate=words, rounds_per_task=4)).go()
        moved[words] = (held[0]["weights"] - held[0]["reference"]).norm().item()
    assert moved["b_comm"] < 0.8 * moved["b_comm,l2"]


@pytest.mark.parametrize("word", ["b_comm", "a_comm", "a", "m", "l1", "l2"])
def test_each_ablation_changes_the_run(word):
    assert learned_bits(weit(ablate=word)) != learned_bits(weit())
