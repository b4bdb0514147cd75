"""How figures for a paper look: a column wide, readable at 8 points, in grey and to the colour-blind.

The same runs give the same bytes: nothing here depends on the date, the machine or the user's own settings.
"""

from __future__ import annotations

from typing import Any

COLUMN = 3.4  # inches: a column of a two-column paper
WIDE = 7.0
COLOURS = ("#14609a", "#b8480f", "#22743c", "#7b3fa8", "#b02a62", "#6d5a10", "#3d5566", "#0d7377")
MARKERS = ("o", "s", "D", "^", "P", "*", "X", "v")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
SCALE = "Blues"
RESOLUTION = 300

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "lines.linewidth": 1.4,
    "lines.markersize": 3.8,
    "figure.constrained_layout.use": True,
    "savefig.dpi": RESOLUTION,
    "pdf.fonttype": 42,  # text that can be searched and edited
    "svg.fonttype": "none",
    "svg.hashsalt": "weft",  # else identifiers are drawn anew each time
}
METADATA: dict[str, dict[str, Any]] = {  # no date, no version
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
}


def line_of(place: int) -> dict[str, Any]:
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[place // len(COLOURS) % len(DASHES)],
    }
