"""Metrics: values by hand, properties of every accuracy matrix, slow references for AUROC and recall."""

import itertools
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import metrics
from weft.errors import WeftError
from weft.metrics import average_accuracy, backward_transfer, forgetting, over_clients

accuracies = st.floats(0, 1)
MEASURES = (average_accuracy, forgetting, backward_transfer)
NEAR = 1e-9
quick = settings(max_examples=40, deadline=None)


@st.composite
def matrices(draw, least=1, most=6):
    tasks = draw(st.integers(least, most))
    return [[draw(accuracies) for _ in range(after + 1)] for after in range(tasks)]


# ---- by hand

THREE = [[0.9], [0.95, 0.8], [0.6, 0.7, 0.5]]


def test_three_tasks_by_hand():
    assert average_accuracy(THREE) == pytest.approx(0.6)  # (0.6 + 0.7 + 0.5) / 3
    # task 0 was best after task 1, 0.95 - 0.6; task 1 0.8 - 0.7; task 2 cannot be forgotten yet
    assert forgetting(THREE) == pytest.approx(0.225)
    assert backward_transfer(THREE) == pytest.approx(-0.2)  # (0.6 - 0.9 + 0.7 - 0.8) / 2


def test_the_last_row_is_not_among_those_that_are_compared():
    """A task that got better at the very end has negative forgetting: max is over t < T."""
    assert forgetting([[0.25], [0.75, 0.5]]) == -0.5
    assert backward_transfer([[0.25], [0.75, 0.5]]) == 0.5


def test_clients_are_averaged_not_tasks():
    long, short = [[1.0], [1.0, 1.0], [1.0, 1.0, 1.0]], [[0.0]]
    assert over_clients(average_accuracy, [long, short]) == 0.5  # over all tasks it would be 0.75
    assert over_clients(forgetting, [[[0.8], [0.4, 0.5]], [[0.8], [0.6, 0.5]]]) == pytest.approx(0.3)


# ---- where a measure is not defined


def test_undefined_is_none():
    assert [measure([]) for measure in MEASURES] == [None] * 3
    assert [measure([[0.5]]) for measure in MEASURES] == [0.5, None, None]
    assert [over_clients(measure, []) for measure in MEASURES] == [None] * 3
    assert over_clients(forgetting, [[[0.5]], []]) is None


# ---- for every matrix


@quick
@given(matrices(least=2))
def test_forgetting_is_no_more_than_there_was_to_forget(matrix):
    best = [max(matrix[t][i] for t in range(i, len(matrix) - 1)) for i in range(len(matrix) - 1)]
    assert forgetting(matrix) <= fmean(best) + NEAR
    assert forgetting(matrix) >= -max(matrix[-1]) - NEAR


@quick
@given(matrices(least=2))
def test_forgetting_is_at_least_what_backward_transfer_lost(matrix):
    """The best a task ever was is no less than what it was when it was learned."""
    assert forgetting(matrix) >= -backward_transfer(matrix) - NEAR


@quick
@given(matrices(least=2))
def test_they_are_one_as_long_as_no_task_gets_better_later(matrix):
    falling = [
        [min(matrix[t][i] for t in range(i, after + 1)) for i in range(after + 1)] for after in range(len(matrix))
    ]
    assert forgetting(falling) == pytest.approx(-backward_transfer(falling), abs=NEAR)
    assert forgetting(falling) >= -NEAR


@quick
@given(matrices(least=2), accuracies)
def test_the_newest_task_counts_in_accuracy_alone(matrix, value):
    changed = [*matrix[:-1], [*matrix[-1][:-1], value]]
    assert forgetting(changed) == forgetting(matrix)
    assert backward_transfer(changed) == backward_transfer(matrix)
    wanted = average_accuracy(matrix) + (value - matrix[-1][-1]) / len(matrix)
    assert average_accuracy(changed) == pytest.approx(wanted)


@quick
@given(st.lists(matrices(), min_size=1, max_size=4), st.sampled_from(MEASURES))
def test_over_clients_is_the_mean_of_those_that_have_a_value(found, measure):
    values = [value for value in map(measure, found) if value is not None]
    assert over_clients(measure, found) == (pytest.approx(fmean(values)) if values else None)
    assert over_clients(measure, iter(found)) == over_clients(measure, found)
    if values:
        assert over_clients(measure, [*found, *found]) == pytest.approx(fmean(values))


# ---- of predictions --------------------------------------------------------------------------------------------------


def random_case(seed, count=40, classes=3, ties=False):
    rng = np.random.default_rng(seed)
    given = rng.random((count, classes))
    if ties:
        given = given.round(1) + 0.1
    return rng.integers(0, classes, count), given / given.sum(1, keepdims=True)


def slow_area(positive, values):
    """Every pair of one that is and one that is not."""
    pairs = list(itertools.product(values[positive], values[~positive]))
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_auroc_counts_pairs(seed, ties):
    labels, given = random_case(seed, ties=ties)
    slow = np.mean([slow_area(labels == label, given[:, label]) for label in range(3)])
    assert metrics.auroc(labels, given) == pytest.approx(slow)
    labels, given = random_case(seed, classes=2, ties=ties)
    assert metrics.auroc(labels, given) == pytest.approx(slow_area(labels == 1, given[:, 1]))


def test_the_ends_of_auroc():
    labels, right = np.array([0, 1, 2]), np.eye(3)
    assert metrics.auroc(labels, right) == 1.0
    assert metrics.auroc(labels, 1 - right) == 0.0
    assert metrics.auroc(labels, np.full((3, 3), 1 / 3)) == 0.5
    assert math.isnan(metrics.auroc(np.array([1, 1]), np.full((2, 2), 0.5)))
    constant = np.tile([0.9, 0.1], (100, 1))
    assert metrics.recall(np.array([0] * 95 + [1] * 5), constant) == [1.0, 0.0]


def test_a_class_without_images_is_left_out():
    labels, given = np.array([0, 1]), np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    assert metrics.measure_all(["recall", "balanced"], labels, given) == {"recall": [1.0, 1.0, None], "balanced": [1.0]}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["balance"], "did you mean balanced"),
        (["auroc", "auroc"], "twice"),
        (["test_metrics:fails"], "the metric fails fails: KeyError"),
        (["test_metrics:wrong_shape"], r"returned shape \(7,\)"),
        (["test_metrics:math"], "is not a function"),
    ],
)
def test_what_is_wrong_with_a_metric(names, said):
    with pytest.raises(WeftError, match=said):
        metrics.measure_all(names, np.array([0, 1]), np.eye(2))


def wrong_shape(labels, given):
    return [0.0] * 7


def fails(labels, given):
    raise KeyError
