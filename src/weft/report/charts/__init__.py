"""The charts as data, each with a sentence that states what it shows; plotly.py and matplotlib.py draw them."""

from __future__ import annotations

from weft.report.charts import learning, sharing
from weft.report.charts.model import Axis, Chart, Groups, HeatMap, Section, Series

__all__ = ["Axis", "Chart", "HeatMap", "Section", "Series", "sections"]

BUILDERS = (
    learning.accuracy,
    learning.matrices,
    learning.forgetting,
    learning.adaptation,
    learning.gain,
    sharing.helping,
    sharing.traffic,
    sharing.density,
)


def sections(groups: Groups) -> list[Section]:
    """The sections of the page, in order."""
    return [build(groups) for build in BUILDERS] if groups else []
