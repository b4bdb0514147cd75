"""`weft export` and `weft predict`: a task's model out of a run, and a try of it. What they need comes late."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.common import AsJson, DataDir, print_json, say
from weft.errors import WeftError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from weft.export.model import ExportedTask


class Kind(StrEnum):
    safetensors = "safetensors"
    onnx = "onnx"


def add_to(app: typer.Typer) -> None:
    app.command("export")(export_command)
    app.command("predict")(predict_command)


def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    client: Annotated[int, typer.Option(min=0, help="Whose model, counted from 0.")] = 0,
    task: Annotated[int, typer.Option(min=0, help="For which of its tasks, counted from 0.")] = 0,
    kind: Annotated[Kind, typer.Option("--format", help="Of the file.")] = Kind.onnx,
    file: Annotated[Path | None, typer.Option("--out", help="The file; else client0-task0.onnx.")] = None,
    data_dir: DataDir = None,
) -> None:
    """A task's model as one file that needs no weft: weft export runs/demo-fedweit-s0 --client 0 --task 1

    Images in as bytes, logits and probabilities out. The file is held against the run on test images before it is kept.
    """
    from weft.export.model import task_from_run

    write_out(task_from_run(folder, client, task), file or Path(f"client{client}-task{task}.{kind.value}"), kind)


def write_out(exported: ExportedTask, path: Path, kind: Kind) -> None:
    from weft.export.files import write

    difference = write(exported, path, kind.value)
    names = ", ".join(exported.metadata["classes"])
    say(f"{path}: {exported.metadata['task']} ({names}); checked on {len(exported.images)} test images")
    say(f"largest difference of a logit: {difference:.1e}; weft predict {path} IMAGE... tries it")


def predict_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What weft export wrote.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures of any size.")],
    trust: Annotated[bool, typer.Option("--trust", help="You know who wrote FILE: it may name code to run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Try an exported model on pictures: weft predict client0-task0.onnx a.png b.png"""
    import numpy as np

    from weft.export.files import open_model

    predict, facts = open_model(file, trusted=trust)
    _, answers = predict(np.stack([_picture(path, facts) for path in images]))
    found = [dict(zip(facts["classes"], map(float, row), strict=True)) for row in answers]
    if as_json:
        told = [{"image": str(path), facts["predictions"]: row} for path, row in zip(images, found, strict=True)]
        print_json(told)
        return
    for path, row in zip(images, found, strict=True):
        say(f"{path}: {_in_words(row, facts)}")


def _picture(path: Path, facts: dict[str, Any]) -> NDArray[np.uint8]:
    """As the images of a folder are read for training."""
    from weft.data.pictures import BAD_PICTURE, own_picture

    try:
        return own_picture(path.read_bytes(), facts["image"][0], facts["bits"])[0]
    except BAD_PICTURE as error:
        why = getattr(error, "strerror", None)
        raise WeftError(f"{path} cannot be read as a picture{f': {why}' if why else ''}") from None


def _in_words(row: dict[str, float], facts: dict[str, Any]) -> str:
    if facts["predictions"] != "probabilities":
        return ", ".join(f"{name} {value:.3f}" for name, value in row.items())
    best, *others = sorted(row, key=lambda name: -row[name])
    return f"{best} {100 * row[best]:.1f} %" + (f", then {others[0]} {100 * row[others[0]]:.1f} %" if others else "")
