"""Small pictures in folders, to try `scenario=folders` with: python examples/make_photos.py photos

Two clients with two tasks each: photos/lisbon/1-leaves/oak/0.png and so on. A class is where a bright bar stands.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

TASKS = {
    "lisbon/1-leaves": ("beech", "oak"),
    "lisbon/2-shells": ("cone", "snail", "whelk"),
    "oslo/1-leaves": ("beech", "oak"),
    "oslo/2-stones": ("flint", "slate"),
}
IMAGES, SIDE = 20, 40  # of a class; of a picture


def picture(rng: np.random.Generator, kind: int) -> Image.Image:
    pixels = rng.integers(0, 80, size=(SIDE, SIDE, 3), dtype=np.uint8)
    pixels[:, kind * SIDE // 4 : (kind + 1) * SIDE // 4] += 120
    return Image.fromarray(pixels)


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for task, classes in TASKS.items():
        for kind, name in enumerate(classes):
            place = folder / task / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(IMAGES):
                picture(rng, kind).save(place / f"{number}.png")
    print(f"{folder}: {sum(map(len, TASKS.values())) * IMAGES} pictures")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
