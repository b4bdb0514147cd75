"""Folders and tables of small images, as a user would have them."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from PIL import Image

CLIENTS = {"lisbon": ("1-leaves", "2-shells"), "oslo": ("1-leaves", "2-stones")}
CLASSES = {"1-leaves": ("beech", "oak"), "2-shells": ("cone", "snail", "whelk"), "2-stones": ("flint", "slate")}
IMAGES = 20  # of a class


def values(kind: int, seed: int, side: int = 40) -> np.ndarray:
    """A bright bar on noise, at a position given by the kind; (side, side, 3), different for each seed."""
    rng = np.random.default_rng(1000 * kind + seed)
    image = rng.integers(0, 80, size=(side, side, 3), dtype=np.uint8)
    image[:, kind * side // 4 : (kind + 1) * side // 4] += 120
    return image


def write_image(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def write_classes(folder: Path, *labels: str, images: int = IMAGES, side: int = 40, seed: int = 0) -> Path:
    """A subfolder of images for each label."""
    for kind, label in enumerate(labels):
        for index in range(images):
            write_image(folder / label / f"{index}.png", values(kind % 4, seed + index, side))
    return folder


def write_folder(folder: Path, images: int = IMAGES, side: int = 40) -> Path:
    for client, tasks in CLIENTS.items():
        for task in tasks:
            write_classes(folder / client / task, *CLASSES[task], images=images, side=side)
    return folder


def write_table(folder: Path, name: str = "photos.csv") -> Path:
    """Images beside a table of them; those of one visitor are a group."""
    table = folder / name
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "client", "task", "label", "group"])
        for client in ("a", "b"):
            for kind, label in enumerate(("flat", "round")):
                for index in range(IMAGES):
                    path = write_image(folder / "scans" / f"{client}-{label}-{index}.png", values(kind, index))
                    writer.writerow([path.relative_to(folder), client, "1", label, f"visitor {index % 10}"])
    return table
