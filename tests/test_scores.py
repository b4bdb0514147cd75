"""Measures beside accuracy, against slow twins and by hand."""

import itertools
import math

import numpy as np
import pytest

from weft import scores
from weft.errors import WeftError


def random_case(seed, count=40, classes=3, ties=False):
    rng = np.random.default_rng(seed)
    given = rng.random((count, classes))
    if ties:
        given = given.round(1) + 0.1
    return rng.integers(0, classes, count), given / given.sum(1, keepdims=True)


def slow_area(positive, values):
    """Every pair of one that is and one that is not."""
    pairs = [(a, b) for a, b in itertools.product(values[positive], values[~positive])]
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ties", [False, True])
def test_auroc_counts_pairs(seed, ties):
    labels, given = random_case(seed, ties=ties)
    slow = np.mean([slow_area(labels == label, given[:, label]) for label in range(3)])
    assert scores.auroc(labels, given) == pytest.approx(slow)
    labels, given = random_case(seed, classes=2, ties=ties)
    assert scores.auroc(labels, given) == pytest.approx(slow_area(labels == 1, given[:, 1]))


def test_the_ends_of_auroc():
    labels, right = np.array([0, 1, 2]), np.eye(3)
    assert scores.auroc(labels, right) == 1.0
    assert scores.auroc(labels, 1 - right) == 0.0
    assert scores.auroc(labels, np.full((3, 3), 1 / 3)) == 0.5
    assert math.isnan(scores.auroc(np.array([1, 1]), np.full((2, 2), 0.5)))


def test_balanced_is_not_fooled_by_the_commonest():
    labels = np.array([0] * 95 + [1] * 5)
    always = np.tile([0.9, 0.1], (100, 1))
    assert scores.balanced(labels, always) == 0.5
    assert scores.recall(labels, always) == [1.0, 0.0]


def test_a_class_without_images_is_left_out():
    labels, given = np.array([0, 1]), np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    assert scores.measure_all(["recall", "balanced"], labels, given) == {"recall": [1.0, 1.0, None], "balanced": [1.0]}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["balance"], "did you mean balanced"),
        (["auroc", "auroc"], "twice"),
        (["test_scores:fails"], "the metric fails fails: KeyError"),
        (["test_scores:wrong_shape"], r"gave shape \(7,\)"),
        (["test_scores:math"], "is no function"),
    ],
)
def test_what_is_wrong_with_a_metric(names, said):
    with pytest.raises(WeftError, match=said):
        scores.measure_all(names, np.array([0, 1]), np.eye(2))


def wrong_shape(labels, given):
    return [0.0] * 7


def fails(labels, given):
    raise KeyError
