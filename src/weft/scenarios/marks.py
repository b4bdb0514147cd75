"""Which images of a dataset a run had, and how they were cut into parts: a mark that stands in its folder and results.

A mark is the fingerprint of what the cache has, and behind a dot which cut of it this is, unless it is the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.data.sources import SOURCES
from weft.lazy import lazy

if TYPE_CHECKING:
    from weft.data import cache
else:
    cache = lazy("weft.data.cache")

CUTS = {"notmnist": 1, "traffic_signs": 1}  # how often a dataset's cut was changed: results of two cuts do not compare


def mark_of(dataset: str) -> str:
    return cache.fingerprint(dataset) + _cut_of(dataset)


def has_changed(dataset: str, mark: str) -> bool:
    """Are the images that were marked so, or their cut, others than here? What is not in the cache is not known of."""
    if dataset not in SOURCES:
        return False
    is_here = dataset in cache.there()
    return is_cut_otherwise(dataset, mark) or (is_here and fingerprint_in(mark) != cache.fingerprint(dataset))


def is_cut_otherwise(dataset: str, mark: str) -> bool:
    return mark.removeprefix(fingerprint_in(mark)) != _cut_of(dataset)


def fingerprint_in(mark: str) -> str:
    return mark.partition(".")[0]


def _cut_of(dataset: str) -> str:
    return f".{CUTS[dataset]}" if dataset in CUTS else ""
