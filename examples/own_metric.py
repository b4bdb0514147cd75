"""A metric of your own: a function of the labels (count,) and the scores (count, classes), which gives a number.

    weft run demo metrics=balanced,examples/own_metric.py:sure_and_wrong

One for each class may be given instead; what is undefined is NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def sure_and_wrong(labels: NDArray[np.int64], scores: NDArray[np.float64]) -> float:
    """The share of images that got a wrong class with more than nine tenths of the probability."""
    wrong = scores.argmax(1) != labels
    return float((wrong & (scores.max(1) > 0.9)).mean())
