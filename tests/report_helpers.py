"""Shared by the tests of reports: the data of a page, and the same facts read from the folder in another way."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weft.core import storage
from weft.methods.fedweit.apd import APDTask
from weft.methods.fedweit.fedweit import FedWeITClient
from weft.report.facts import group
from weft.report.page import page
from weft.report.reading import read_runs
from weft.wire.tensors import Payload, dense

Rows = list[dict[str, str]]


def page_of(*folders: Path) -> str:
    return page(group(read_runs(folders)))


def data_of(text: str) -> dict[str, Any]:
    """The data in a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def figure(data: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(data["figures"][name])


def traces(data: dict[str, Any], name: str, **meta: Any) -> list[dict[str, Any]]:
    """The traces of a figure that belong to a group, client or key, without bands."""
    found = [one for one in figure(data, name)["traces"] if not one["meta"].get("band")]
    return [one for one in found if all(one["meta"][key] == value for key, value in meta.items())]


def rows(folder: Path, table: str) -> Rows:
    with (folder / table).open(newline="") as file:
        return list(csv.DictReader(file))


def states(folder: Path) -> Iterator[tuple[int, FedWeITClient]]:
    """Each client's state, loaded as the run itself would."""
    checkpoints = folder / "checkpoints"
    for client, reference in json.loads((checkpoints / "manifest.json").read_text())["clients"].items():
        state = FedWeITClient()
        state.tasks.entry = APDTask
        yield int(client), storage.load(state, checkpoints, reference)


def layers(folder: Path) -> list[tuple[str, slice, slice]]:
    """Each layer's name, the slice of its weights in the vector and of its rows in a mask."""
    found, at, row = [], 0, 0
    for layer in json.loads((folder / "contents.json").read_text())["layers"]:
        size, count = int(np.prod(layer["shape"])), layer["shape"][0]
        found.append((layer["name"], slice(at, at + size), slice(row, row + count)))
        at, row = at + size, row + count
    return found


def vector(payload: Payload) -> np.ndarray:
    return dense(payload).numpy().astype(np.float64)


def attention(state: FedWeITClient, task: int) -> dict[str, np.ndarray]:
    """Alpha of each layer, by foreign A ("CLIENT.TASK") of a task."""
    keys, alphas = state.tasks[task].foreign, vector(state.tasks[task].attention)
    return dict(zip(keys, alphas.reshape(-1, len(keys)).T, strict=True))


def attention_sums(folder: Path, tasks: int) -> dict[tuple[int, int], float]:
    """The sum of |alpha| over tasks and layers, by sender and receiver."""
    sums: dict[tuple[int, int], float] = {}
    for client, state in states(folder):
        for task in range(1, tasks):
            for key, alphas in attention(state, task).items():
                pair = (int(key.split(".")[0]), client)
                sums[pair] = sums.get(pair, 0.0) + float(np.abs(alphas).sum())
    return sums
