"""What a command makes of a table and what of a figure: where it is kept, how it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from weft.repro import Figure, Table, writing
from weft.repro.desk import Desk
from weft.repro.figures import style
from weft.repro.figures import writing as drawing
from weft.repro.screens import rows
from weft.repro.store import Results


@dataclass(frozen=True)
class Outcome:
    desk: Desk[Any]
    shown: Callable[[Results[Any], str], RenderableType]  # in a terminal that has this sign for plus or minus
    as_object: Callable[[Results[Any]], dict[str, Any]]  # for a program


def outcome_of(experiment: Table | Figure, folder: Path) -> Outcome:
    if isinstance(experiment, Figure):
        style.check()
        desk = drawing.FigureDesk(experiment, folder)
        return Outcome(desk, lambda results, sign: "\n\n".join(drawing.told(results)), drawing.as_object)
    return Outcome(
        writing.TableDesk(experiment, folder),
        lambda results, sign: rows(writing.entries_of(results), sign),
        writing.as_object,
    )
