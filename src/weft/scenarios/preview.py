"""Preview of a scenario: its tasks as plain data, and a contact sheet of sample images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError
from weft.scenarios import Scenario, Task

SIDE, GAP, LABEL = 32, 2, 14  # pixels: of an image, between two images, and of a line of text
SAMPLES = 2  # images per class
MAX_CLIENTS = 10  # on a contact sheet


def contents(scenario: Scenario) -> dict[str, Any]:
    sequences = [
        [{"name": t.name, "dataset": t.group, "classes": list(t.classes), "sizes": t.sizes} for t in sequence]
        for sequence in scenario.sequences
    ]
    warnings = {"warnings": list(scenario.warnings)} if scenario.warnings else {}
    size = {"clients": scenario.clients, "tasks": scenario.tasks}
    return {"scenario": scenario.name, **size, **warnings, "sequences": sequences}


def draw_sheet(scenario: Scenario, path: Path) -> None:
    """Write a PNG with a row per client and a block per task: its name and two train images of every class."""
    from PIL import Image, ImageDraw

    shown = scenario.sequences[:MAX_CLIENTS]
    most = max(len(task.classes) for sequence in shown for task in sequence)
    width, height = most * (SIDE + GAP) + 4 * GAP, LABEL + SAMPLES * (SIDE + GAP) + 4 * GAP
    sheet = Image.new("RGB", (scenario.tasks * width, len(shown) * height), "white")
    draw = ImageDraw.Draw(sheet)
    letters = max(4, width // 7 - 4)
    for row, sequence in enumerate(shown):
        for column, task in enumerate(sequence):
            left, top = column * width + GAP, row * height + GAP
            name = task.name if len(task.name) <= letters else task.name[: letters - 2] + ".."
            draw.text((left, top), f"{row}.{column} {name}", fill="black")
            sheet.paste(Image.fromarray(_block(task)), (left, top + LABEL))
    try:
        sheet.save(path, format="PNG")
    except OSError as error:
        raise WeftError(f"{path} cannot be written: {error.strerror or error}; choose another --picture") from None


def _block(task: Task) -> NDArray[np.uint8]:
    """(rows of samples, columns of classes) on white."""
    split = task.load("train")
    pitch = SIDE + GAP
    block = np.full((SAMPLES * pitch, len(task.classes) * pitch, 3), 255, dtype=np.uint8)
    for label in range(len(task.classes)):
        mine = split.labels == label if split.labels.ndim == 1 else split.labels[:, label] > 0
        for row, index in enumerate(np.flatnonzero(mine)[:SAMPLES]):
            block[row * pitch : row * pitch + SIDE, label * pitch : label * pitch + SIDE] = split.images[index]
    return block
