"""The family `textures`: a class is a kind of pattern, a scale and a range of directions; the colors vary freely."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.scenarios.drawn.canvas import (
    PIXELS,
    SIDE,
    Array,
    Span,
    backdrop,
    blur,
    chance,
    cloud,
    grain,
    light,
    occlude,
    paint,
    uniform,
)

# A pattern takes two coordinates (count, 32, 32), in periods, and gives a height whose sign divides the two colors.
Pattern = Callable[[Array, Array], Array]


def wave(phase: Array) -> Array:
    """A triangle wave between -1 and 1, of period 1."""
    height: Array = np.abs((phase % 1) - np.float32(0.5)) * 4 - 1
    return height


def stripes(u: Array, v: Array) -> Array:
    return wave(u)


def checks(u: Array, v: Array) -> Array:
    return np.clip(wave(u) * 3, -1, 1) * np.clip(wave(v) * 3, -1, 1)


def dots(u: Array, v: Array) -> Array:
    return np.float32(0.32) - np.sqrt((u % 1 - np.float32(0.5)) ** 2 + (v % 1 - np.float32(0.5)) ** 2)


def waves(u: Array, v: Array) -> Array:
    return wave(u + np.float32(0.3) * np.sin(v * np.float32(2 * np.pi * 0.6)))


def bricks(u: Array, v: Array) -> Array:
    row = np.floor(v)
    return np.minimum(wave(v + np.float32(0.5)), wave((u + row + 1) * np.float32(0.5)) * 2 + 1) * -1 - np.float32(0.55)


def grid(u: Array, v: Array) -> Array:
    return np.maximum(wave(u), wave(v)) - np.float32(0.55)


def zigzag(u: Array, v: Array) -> Array:
    return wave(u + np.float32(0.35) * wave(v * np.float32(0.8)))


def rings(u: Array, v: Array) -> Array:
    return wave(np.sqrt(u * u + v * v))


def triangles(u: Array, v: Array) -> Array:
    half = np.float32(0.5)
    return wave(u) * wave(u * half + v * np.float32(0.866)) * wave(u * half - v * np.float32(0.866)) * 4


def diamonds(u: Array, v: Array) -> Array:
    return np.abs(wave(u)) - np.abs(wave(v * np.float32(0.5)))


PATTERNS: dict[str, Pattern] = {
    f.__name__: f for f in (stripes, checks, dots, waves, bricks, grid, zigzag, rings, triangles, diamonds)
}


class Texture(NamedTuple):
    name: str
    pattern: str
    period: Span  # pixels
    turn: Span  # degrees


TEXTURES: tuple[Texture, ...] = (
    Texture("stripes", "stripes", (5.0, 8.0), (-25, 25)),
    Texture("checks", "checks", (9.0, 14.0), (-25, 25)),
    Texture("dots", "dots", (6.0, 9.0), (-25, 25)),
    Texture("waves", "waves", (6.5, 10.0), (-25, 25)),
    Texture("bricks", "bricks", (5.0, 8.0), (-18, 18)),
    Texture("noise", "noise", (2.5, 8.0), (0, 0)),
    Texture("rings", "rings", (5.0, 9.0), (-90, 90)),
    Texture("grid", "grid", (6.0, 9.0), (-25, 25)),
    Texture("zigzag", "zigzag", (7.0, 10.0), (70, 110)),
    Texture("beams", "stripes", (5.0, 8.0), (65, 115)),
)


def texture(class_index: int, look: np.random.Generator) -> Texture:
    """One of the ten, or a pattern with a random scale and direction."""
    if class_index < len(TEXTURES):
        return TEXTURES[class_index]
    kinds = [*PATTERNS, "noise"]
    pattern = kinds[class_index % len(kinds)]  # in turn: classes that follow one another are of different kinds
    period, turn = float(look.uniform(3.5, 11.0)), float(look.uniform(-90, 90))
    return Texture(f"{pattern} {class_index}", pattern, (period * 0.85, period * 1.2), (turn - 18, turn + 18))


def _noise(rng: np.random.Generator, count: int, period: Span) -> Array:
    """Blots at two scales, of which one weighs more from image to image."""
    fine, coarse = (max(2, round(SIDE / p)) for p in period)
    weight = uniform(rng, (0.0, 1.0), count)[:, None, None]
    return (cloud(rng, count, fine) * weight + cloud(rng, count, coarse) * (1 - weight) - np.float32(0.5)) * 2


def textures(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """Two free colors, divided by a pattern that is turned, scaled, bent a little, lit and worn."""
    chosen = texture(class_index, look)
    period = uniform(rng, chosen.period, count)[:, None, None]
    if chosen.pattern == "noise":
        height = _noise(rng, count, chosen.period)
    else:
        angle = np.radians(uniform(rng, chosen.turn, count))[:, None, None]
        middle = uniform(rng, (4.0, SIDE - 4.0), 2, count, 1, 1)
        bend = (cloud(rng, count, 3) - np.float32(0.5)) * uniform(rng, (0.0, 3.0), count)[:, None, None]  # in pixels
        x, y = PIXELS - middle[0] + bend, PIXELS[:, None] - middle[1] - bend  # (count, 32, 32)
        u = (np.cos(angle) * x + np.sin(angle) * y) / period
        v = (np.cos(angle) * y - np.sin(angle) * x) / period
        height = PATTERNS[chosen.pattern](u, v)
    coverage = np.clip(height * uniform(rng, (1.2, 4.5), count)[:, None, None] + np.float32(0.5), 0, 1)
    swap = chance(rng, 0.3, count)[:, None]
    dark, bright = uniform(rng, (0.0, 0.55), count, 3), uniform(rng, (0.4, 1.0), count, 3)
    one, other = dark + (bright - dark) * swap, bright + (dark - bright) * swap
    canvas = paint(backdrop(rng, one, np.clip(one + uniform(rng, (-0.2, 0.2), count, 3), 0, 1)), coverage, other)
    canvas = occlude(rng, canvas, 0.1, (3.0, 9.0))
    canvas = light(rng, canvas, (0.6, 1.1), 0.35)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.5), count)), (0.0, 0.03))
