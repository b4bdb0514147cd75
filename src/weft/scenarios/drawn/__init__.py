"""Eight families of small images drawn by code: the built-in benchmark, which needs no download.

They differ as the public datasets of the papers do: MNIST (`digits`), notMNIST (`letters`), Fashion-MNIST
(`silhouettes`), traffic signs (`signs`), SVHN (`numbers`), CIFAR-10 (`objects`), CIFAR-100 (`textures`), `faces`.
A family has any number of classes: the appearance of a class is fixed by its index alone, and the generator that is
passed in varies its images.

>>> images = draw("signs", 1, 3, np.random.default_rng(0))
>>> images.shape, images.dtype
((3, 32, 32, 3), dtype('uint8'))
>>> class_name("signs", 1)
'signs yield'
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from weft.scenarios.drawn import faces, patterns, shapes, strokes
from weft.scenarios.drawn.canvas import SIDE, Array, finish

CHUNK = 32  # images drawn together: their coverage (128 kB) and canvas (384 kB) stay in the cache of a core

Recipe = Callable[[int, int, np.random.Generator, np.random.Generator], Array]
RECIPES: dict[str, Recipe] = {
    "digits": strokes.digits,
    "letters": strokes.letters,
    "silhouettes": shapes.silhouettes,
    "signs": shapes.signs,
    "numbers": strokes.numbers,
    "objects": shapes.objects,
    "textures": patterns.textures,
    "faces": faces.faces,
}
FAMILIES: tuple[str, ...] = tuple(RECIPES)


def draw(family: str, class_index: int, count: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Images of one class, uint8 (count, 32, 32, 3).

    The bits depend on the generator and on the count: random numbers are drawn for a chunk at a time, so the first
    images of a longer call differ from those of a shorter one.
    """
    _check(family, class_index)
    images = np.empty((count, SIDE, SIDE, 3), dtype=np.uint8)
    for start in range(0, count, CHUNK):
        part = images[start : start + CHUNK]
        part[...] = finish(RECIPES[family](class_index, len(part), rng, _look(family, class_index)))
    return images


def class_name(family: str, class_index: int) -> str:
    """A readable name of a class, starting with its family.

    >>> class_name("letters", 10), class_name("letters", 30), class_name("numbers", 42)
    ('letters K', 'letters invented 30', 'numbers 42')
    """
    _check(family, class_index)
    look = _look(family, class_index)
    if family == "signs":
        return f"signs {shapes.sign(class_index, look).name}"
    if family == "textures":
        return f"textures {patterns.texture(class_index, look).name}"
    names: tuple[str, ...] = {
        "letters": tuple(strokes.ALPHABET),
        "silhouettes": tuple(shapes.OUTLINES),
        "objects": tuple(shapes.OBJECTS),
    }.get(family, ())
    if class_index < len(names):
        return f"{family} {names[class_index]}"
    return f"{family} invented {class_index}" if names else f"{family} {class_index}"


def _look(family: str, class_index: int) -> np.random.Generator:
    """The generator that fixes the appearance of a class that is not drawn by hand."""
    return np.random.default_rng([FAMILIES.index(family), class_index])


def _check(family: str, class_index: int) -> None:
    if family not in RECIPES:
        raise ValueError(f"there is no family {family!r}; choose one of {', '.join(FAMILIES)}")
    if class_index < 0:
        raise ValueError(f"class_index is {class_index}; classes are counted from 0")


Channels = tuple[float, float, float]
# mean and deviation of each family per channel, in 0..255, over 200 images of each of its first ten classes
NORMALIZATION: dict[str, tuple[Channels, Channels]] = {
    "digits": ((31.1, 31.1, 31.1), (47.9, 47.9, 47.9)),
    "letters": ((124.1, 124.1, 124.1), (75.5, 75.5, 75.5)),
    "silhouettes": ((56.1, 56.1, 56.1), (66.4, 66.4, 66.4)),
    "signs": ((84.6, 84.3, 82.7), (55.4, 52.0, 56.2)),
    "numbers": ((108.2, 108.8, 108.0), (57.9, 57.4, 57.5)),
    "objects": ((105.8, 105.1, 101.4), (49.8, 48.9, 50.0)),
    "textures": ((104.8, 104.1, 104.4), (55.2, 55.4, 56.2)),
    "faces": ((95.0, 81.7, 75.3), (54.0, 47.3, 45.7)),
}
