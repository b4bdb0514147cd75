"""From the points of a figure to NAME.csv, NAME.md and its pictures as PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.repro import Figure, Row
from weft.repro.describing import commands_of, endings, heading
from weft.repro.desk import Desk
from weft.repro.figures import points, style
from weft.repro.figures.points import Panels, Plotted
from weft.repro.store import Key, Results


class FigureDesk(Desk[Plotted]):
    def __init__(self, figure: Figure, folder: Path):
        super().__init__(figure, folder)
        self._figure = figure

    def read(self, row: Row, seed: int, folder: Path) -> Plotted:
        return points.read_run(self._figure, row, seed, folder)

    def read_csv(self, path: Path) -> dict[Key, Plotted]:
        return points.read_csv(self._figure, path)

    def csv_text(self, results: Results[Plotted]) -> str:
        return points.csv_text(self._figure, results.lines.values())

    def others(self, results: Results[Plotted], more_to_come: bool) -> Mapping[str, str | bytes]:
        if more_to_come:  # a second for each picture: they are drawn at the end, and whenever the command starts
            return {}
        panels = panels_of(results)
        if not panels:
            return {".md": markdown(results, [])}
        with style.drawing():
            pictures = self._figure.draw(panels)
            found: dict[str, str | bytes] = {".md": markdown(results, list(pictures))}
            for suffix, picture in pictures.items():
                found |= style.files(picture, suffix)
        return found


def panels_of(results: Results[Plotted]) -> Panels:
    return points.panels_of(results.experiment.rows, results.current())


def told(results: Results[Plotted]) -> list[str]:
    """What is seen, in paragraphs."""
    figure, panels = results.experiment, panels_of(results)
    assert isinstance(figure, Figure)
    return figure.tell(panels) if panels else ["Nothing has been run yet."]


def markdown(results: Results[Plotted], pictures: list[str]) -> str:
    figure = results.experiment
    text = heading(results)
    for suffix in pictures:
        text += [f"![{figure.title}]({figure.stem}{suffix}.svg)", ""]
    text += ["\n\n".join(told(results))]
    seeds = sorted({run.seed for run in results.current()})
    if seeds:
        text += ["", "Means over seeds, bands: ± sample deviation." if len(seeds) > 1 else "One seed."]
    return "\n".join([*text, *endings(results)]) + "\n"


def as_object(results: Results[Plotted]) -> dict[str, Any]:
    """The figure for a program: its curves, as means over seeds."""
    return {
        "figure": results.experiment.name,
        "title": results.experiment.title,
        "commands": commands_of(results),
        "panels": {
            panel: {series: [[x, *found] for x, found in curve] for series, curve in curves.items()}
            for panel, curves in panels_of(results).items()
        },
        "failed": [
            {"row": label, "seed": seed, "problem": said} for (label, seed), said in sorted(results.failures.items())
        ],
    }
