"""Folders and tables of small pictures, as a person would have them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

CLIENTS = {"lisbon": ("1-leaves", "2-shells"), "oslo": ("1-leaves", "2-stones")}
CLASSES = {"1-leaves": ("beech", "oak"), "2-shells": ("cone", "snail", "whelk"), "2-stones": ("flint", "slate")}
IMAGES = 20  # of a class


def values(kind: int, place: int, side: int = 40) -> np.ndarray:
    """A bright bar on noise, where the kind says; (side, side, 3), different for each place."""
    rng = np.random.default_rng(1000 * kind + place)
    image = rng.integers(0, 80, size=(side, side, 3), dtype=np.uint8)
    image[:, kind * side // 4 : (kind + 1) * side // 4] += 120
    return image


def write_image(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def write_folder(folder: Path, images: int = IMAGES, side: int = 40) -> Path:
    for client, tasks in CLIENTS.items():
        for task in tasks:
            for kind, label in enumerate(CLASSES[task]):
                for place in range(images):
                    write_image(folder / client / task / label / f"{place}.png", values(kind, place, side))
    return folder


def write_table(folder: Path, name: str = "photos.csv") -> Path:
    """Pictures beside a table of them; those of one visitor are a group."""
    table = folder / name
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "client", "task", "label", "group"])
        for client in ("a", "b"):
            for kind, label in enumerate(("flat", "round")):
                for place in range(IMAGES):
                    path = write_image(folder / "scans" / f"{client}-{label}-{place}.png", values(kind, place))
                    writer.writerow([path.relative_to(folder), client, "1", label, f"visitor {place % 10}"])
    return table
