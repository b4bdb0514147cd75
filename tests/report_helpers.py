"""What the tests of reports share: a page's data, and the same facts read from the folder by other means."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.storage import State
from weft.report.facts import group
from weft.report.page import page
from weft.report.reading import read_runs
from weft.wire.tensors import dense

Rows = list[dict[str, str]]


def page_of(*folders: Path) -> str:
    return page(group(read_runs(folders)))


def data_of(text: str) -> dict[str, Any]:
    """The data that stands in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def figure(data: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(data["figures"][name])


def traces(data: dict[str, Any], name: str, **meta: Any) -> list[dict[str, Any]]:
    """The traces of a figure that belong to a group, client, part ..., without veils."""
    found = [one for one in figure(data, name)["traces"] if not one["meta"].get("veil")]
    return [one for one in found if all(one["meta"][key] == value for key, value in meta.items())]


def rows(folder: Path, table: str) -> Rows:
    with (folder / table).open(newline="") as file:
        return list(csv.DictReader(file))


def states(folder: Path) -> Iterator[tuple[int, State]]:
    """Every client's state, as the run itself would load it."""
    checkpoints = folder / "checkpoints"
    clients = json.loads((checkpoints / "manifest.json").read_text())["clients"]
    for client, reference in clients.items():
        yield int(client), State.load(checkpoints, reference)


def layers(folder: Path) -> list[tuple[str, slice, slice]]:
    """Each layer's name, where its weights lie in the vector and where its rows lie in a mask."""
    found, at, row = [], 0, 0
    for layer in json.loads((folder / "contents.json").read_text())["layers"]:
        size, count = int(np.prod(layer["shape"])), layer["shape"][0]
        found.append((layer["name"], slice(at, at + size), slice(row, row + count)))
        at, row = at + size, row + count
    return found


def vector(state: State, key: str) -> np.ndarray:
    return dense(state.archive[key]).numpy().astype(np.float64)
