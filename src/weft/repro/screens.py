"""The rows of a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table as Grid

from weft.report.text import spread_text
from weft.repro.writing import Entry


def rows(entries: Sequence[Entry], sign: str) -> Grid:
    """The table in eighty columns: the files have it whole."""
    with_paper = any("accuracy" in entry.published for entry in entries)
    grid = Grid(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    grid.add_column("row", overflow="fold")
    headings = [
        "accuracy (%)",
        *(["paper's"] if with_paper else []),
        "forgets",
        "up (MB)",
        "down (MB)",
        "model",
        "seeds",
    ]
    for heading in headings:
        grid.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        found = entry.found
        means = {key: None if value is None else (value.mean, None) for key, value in found.items()}
        published = entry.published.get("accuracy")
        grid.add_row(
            entry.row.label,
            spread_text(found["accuracy"], 1, sign),
            *([spread_text(published and (published[0], None), 2, sign)] if with_paper else []),  # as printed
            spread_text(means["forgetting"], 3, sign),
            *(spread_text(means[key], 1, sign) for key in ("up", "down", "model")),
            str(entry.seeds),
        )
    return grid
