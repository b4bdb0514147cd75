"""What a scenario is made of, as plain data, and as a sheet of sample pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError
from weft.scenarios import Scenario, Task

SIDE, GAP, LABEL = 32, 2, 14  # pixels: of a picture, between two, and of a line of text
SAMPLES = 2  # pictures of each class
MOST_CLIENTS = 10  # on a sheet


def contents(scenario: Scenario) -> dict[str, Any]:
    return {
        "scenario": scenario.name,
        "clients": scenario.clients,
        "tasks": scenario.steps,
        **({"warnings": list(scenario.warnings)} if scenario.warnings else {}),
        "sequences": [
            [
                {"name": task.name, "dataset": task.group, "classes": list(task.classes), "sizes": dict(task.sizes)}
                for task in sequence
            ]
            for sequence in scenario.sequences
        ],
    }


def draw_sheet(scenario: Scenario, path: Path) -> None:
    """A row for each client and a block for each task: under its name two training images of every class."""
    from PIL import Image, ImageDraw

    shown = scenario.sequences[:MOST_CLIENTS]
    widest = max(len(task.classes) for sequence in shown for task in sequence)
    width, height = widest * (SIDE + GAP) + 4 * GAP, LABEL + SAMPLES * (SIDE + GAP) + 4 * GAP
    sheet = Image.new("RGB", (scenario.steps * width, len(shown) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, sequence in enumerate(shown):
        for column, task in enumerate(sequence):
            left, top = column * width + GAP, row * height + GAP
            draw.text((left, top), f"{row}.{column} {_short(task.name, width)}", fill="black")
            sheet.paste(Image.fromarray(_block(task)), (left, top + LABEL))
    try:
        sheet.save(path, format="PNG")
    except OSError as error:
        raise WeftError(f"the picture {path} cannot be written: {error.strerror or error}") from None


def _short(name: str, width: int) -> str:
    letters = max(4, width // 7 - 4)
    return name if len(name) <= letters else name[: letters - 2] + ".."


def _block(task: Task) -> NDArray[np.uint8]:
    """(rows of samples, columns of classes) on white."""
    split = task.load("train")
    step = SIDE + GAP
    block = np.full((SAMPLES * step, len(task.classes) * step, 3), 255, dtype=np.uint8)
    for label in range(len(task.classes)):
        mine = split.labels == label if split.labels.ndim == 1 else split.labels[:, label] > 0
        for place, index in enumerate(np.flatnonzero(mine)[:SAMPLES]):
            block[place * step : place * step + SIDE, label * step : label * step + SIDE] = split.images[index]
    return block
