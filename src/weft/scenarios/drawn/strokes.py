"""Families made of strokes: `digits`, `letters` and `numbers` (digits on colored clutter).

Glyphs are polylines in the unit square; `digits` and `numbers` share theirs, so that one can help to learn the other.
"""

from __future__ import annotations

import numpy as np

from weft.scenarios.drawn.canvas import (
    SIDE,
    Array,
    Point,
    arc,
    backdrop,
    blur,
    chance,
    cloud,
    clutter,
    colors,
    distance,
    fit,
    grain,
    grays,
    ink,
    light,
    occlude,
    paint,
    pen,
    place,
    pose,
    stroke,
    uniform,
    warp,
)

DIGITS: tuple[Array, ...] = (
    pen(arc((0.5, 0.5), (0.3, 0.45), 0, 360, 12)),
    pen([(0.3, 0.25), (0.53, 0.05), (0.53, 0.95)]),
    pen([*arc((0.5, 0.31), (0.28, 0.26), 190, 400, 7), (0.22, 0.94), (0.8, 0.94)]),
    pen(arc((0.46, 0.28), (0.27, 0.23), 205, 450, 7), arc((0.46, 0.73), (0.31, 0.22), 270, 515, 7)),
    pen([(0.64, 0.95), (0.64, 0.05), (0.17, 0.66), (0.86, 0.66)]),
    pen([(0.76, 0.06), (0.31, 0.06), (0.27, 0.46), *arc((0.48, 0.67), (0.3, 0.27), 235, 510, 8)]),
    pen([(0.68, 0.06), (0.45, 0.2), (0.3, 0.42), (0.22, 0.66)], arc((0.5, 0.69), (0.28, 0.25), 0, 360, 9)),
    pen([(0.18, 0.06), (0.82, 0.06), (0.4, 0.95)]),
    pen(arc((0.5, 0.28), (0.23, 0.22), 0, 360, 9), arc((0.5, 0.73), (0.29, 0.23), 0, 360, 9)),
    pen([(0.32, 0.94), (0.55, 0.8), (0.7, 0.58), (0.78, 0.34)], arc((0.5, 0.31), (0.28, 0.25), 0, 360, 9)),
)

LETTERS: dict[str, Array] = {
    "A": pen([(0.1, 1), (0.5, 0), (0.9, 1)], [(0.25, 0.64), (0.75, 0.64)]),
    "B": pen(
        [(0.2, 0.5), (0.2, 0), *arc((0.5, 0.25), (0.25, 0.25), 270, 450, 5), (0.2, 0.5)],
        [*arc((0.5, 0.75), (0.32, 0.25), 270, 450, 5), (0.2, 1), (0.2, 0.5)],
    ),
    "C": pen(arc((0.55, 0.5), (0.42, 0.5), 310, 50)),
    "D": pen([(0.18, 0), *arc((0.4, 0.5), (0.46, 0.5), 270, 450, 7), (0.18, 1), (0.18, 0)]),
    "E": pen([(0.8, 0), (0.2, 0), (0.2, 1), (0.8, 1)], [(0.2, 0.5), (0.7, 0.5)]),
    "F": pen([(0.8, 0), (0.2, 0), (0.2, 1)], [(0.2, 0.48), (0.7, 0.48)]),
    "G": pen([*arc((0.52, 0.5), (0.42, 0.5), 310, 40), (0.88, 0.55), (0.56, 0.55)]),
    "H": pen([(0.15, 0), (0.15, 1)], [(0.85, 0), (0.85, 1)], [(0.15, 0.5), (0.85, 0.5)]),
    "I": pen([(0.5, 0), (0.5, 1)], [(0.28, 0), (0.72, 0)], [(0.28, 1), (0.72, 1)]),
    "J": pen([(0.4, 0), (0.75, 0), (0.75, 0.7), *arc((0.47, 0.7), (0.28, 0.3), 0, 160, 5)]),
    "K": pen([(0.2, 0), (0.2, 1)], [(0.85, 0), (0.2, 0.55)], [(0.4, 0.42), (0.88, 1)]),
    "L": pen([(0.22, 0), (0.22, 1), (0.82, 1)]),
    "M": pen([(0.08, 1), (0.14, 0), (0.5, 0.7), (0.86, 0), (0.92, 1)]),
    "N": pen([(0.15, 1), (0.15, 0), (0.85, 1), (0.85, 0)]),
    "O": pen(arc((0.5, 0.5), (0.44, 0.5), 0, 360, 12)),
    "P": pen([(0.2, 1), (0.2, 0), *arc((0.52, 0.27), (0.3, 0.27), 270, 450, 6), (0.2, 0.54)]),
    "Q": pen(arc((0.5, 0.47), (0.43, 0.47), 0, 360, 12), [(0.55, 0.65), (0.95, 1.02)]),
    "R": pen([(0.2, 1), (0.2, 0), *arc((0.5, 0.26), (0.3, 0.26), 270, 450, 6), (0.2, 0.52)], [(0.5, 0.52), (0.86, 1)]),
    "S": pen([*arc((0.5, 0.26), (0.33, 0.26), 325, 100, 6), *arc((0.5, 0.74), (0.35, 0.26), 270, 505, 6)]),
    "T": pen([(0.08, 0), (0.92, 0)], [(0.5, 0), (0.5, 1)]),
    "U": pen([(0.15, 0), *arc((0.5, 0.65), (0.35, 0.35), 180, 0, 7), (0.85, 0)]),
    "V": pen([(0.1, 0), (0.5, 1), (0.9, 0)]),
    "W": pen([(0.02, 0), (0.24, 1), (0.5, 0.25), (0.76, 1), (0.98, 0)]),
    "X": pen([(0.12, 0), (0.88, 1)], [(0.88, 0), (0.12, 1)]),
    "Y": pen([(0.1, 0), (0.5, 0.5), (0.9, 0)], [(0.5, 0.5), (0.5, 1)]),
    "Z": pen([(0.14, 0), (0.86, 0), (0.14, 1), (0.86, 1)]),
}
ALPHABET = "".join(LETTERS)


def number(value: int) -> Array:
    """The strokes of a number, its digits side by side within the unit square.

    >>> len(number(14)) == len(DIGITS[1]) + len(DIGITS[4])
    True
    """
    text = str(value)
    if len(text) == 1:
        return DIGITS[value]
    wide = 1.2 / len(text)  # glyphs leave a margin of a fifth at both sides, so the row may stick out a little
    tall = 0.2 if len(text) > 2 else 0.08
    places = [(-0.1 + i * wide, -0.1 + (i + 1) * wide) for i in range(len(text))]
    parts = [fit(DIGITS[int(d)], a, tall, b, 1 - tall) for d, (a, b) in zip(text, places, strict=True)]
    return np.concatenate(parts)


def invented(rng: np.random.Generator) -> Array:
    """An invented letter: three or four strokes, each of them starting on the grid points already used."""
    grid: list[Point] = [(x, y) for y in (0.0, 0.35, 0.65, 1.0) for x in (0.12, 0.5, 0.88)]
    used = [grid[int(rng.integers(len(grid)))]]
    strokes: list[list[Point]] = []
    for _ in range(int(rng.integers(3, 5))):
        start = used[int(rng.integers(len(used)))]
        far = [p for p in grid if p not in used and abs(p[0] - start[0]) + abs(p[1] - start[1]) > 0.5]
        if not far:
            break
        stop = far[int(rng.integers(len(far)))]
        bend = float(rng.choice([-0.35, 0.0, 0.0, 0.35]))
        strokes.append(_bow(start, stop, bend))
        used.append(stop)
    return _spread(pen(*strokes))


def _spread(lines: Array) -> Array:
    """Stretch a shape over the unit square, up to twice: small letters would differ too little."""
    low, high = lines.min(axis=(0, 1)), lines.max(axis=(0, 1))  # (2,)
    scale = np.minimum(np.float32(0.9) / np.maximum(high - low, np.float32(0.1)), 2)
    spread: Array = (lines - (low + high) / 2) * scale + np.float32(0.5)
    return spread


def _bow(start: Point, stop: Point, bend: float) -> list[Point]:
    """A straight stroke, or one that leaves the straight line by a share of its length."""
    if bend == 0:
        return [start, stop]
    (x0, y0), (x1, y1) = start, stop
    steps = [i / 5 for i in range(6)]
    lift = [4 * t * (1 - t) * bend for t in steps]
    return [
        (x0 + t * (x1 - x0) - b * (y1 - y0), y0 + t * (y1 - y0) + b * (x1 - x0))
        for t, b in zip(steps, lift, strict=True)
    ]


def letter(class_index: int, look: np.random.Generator) -> Array:
    return LETTERS[ALPHABET[class_index]] if class_index < len(ALPHABET) else invented(look)


def digits(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """Light strokes on dark ground, gray, as if written by hand."""
    # several digits are smaller and neater, to stay readable
    neat = min(len(str(class_index)), 3)
    bend, shift, turn, thin = ((0.05, 3.5, 18.0, 1.0), (0.03, 2.0, 10.0, 0.8), (0.02, 2.0, 8.0, 0.6))[neat - 1]
    shape = warp(number(class_index), rng, count, bend)
    size = (16.0, 24.0) if neat == 1 else (20.0, 26.0)
    drawn = place(shape, pose(rng, count, size, shift=shift, turn=turn, shear=0.3, stretch=0.2))
    coverage = stroke(drawn, uniform(rng, (1.4 * thin, 4.0 * thin), count))
    ground = grays(rng, count, (0.0, 0.15))
    canvas = backdrop(rng, ground, ground * 0.5)
    canvas = paint(canvas, coverage, grays(rng, count, (0.5, 1.0)))
    canvas = worn(rng, canvas)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.5), count)), (0.01, 0.03), gray=True)


def worn(rng: np.random.Generator, canvas: Array) -> Array:
    """A smudge that takes away some of the ink, as worn paper does."""
    gone = np.clip(cloud(rng, len(canvas), 4) * 4 - 2.5, 0, 1)
    kept: Array = 1 - gone * np.float32(0.8)  # (count, 32, 32)
    return canvas * kept[:, None]


def letters(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """Letters of many fonts: thin and fat, upright and slanted, solid and hollow, dark on light and light on dark."""
    shape = warp(letter(class_index, look), rng, count, 0.035)
    poses = pose(rng, count, (15.0, 25.0), shift=3.0, turn=14.0, shear=0.4, stretch=0.22)
    away = distance(place(shape, poses))
    width = uniform(rng, (1.2, 5.5), count)
    coverage = ink(away, width) - ink(away, width - 2.5) * chance(rng, 0.2, count)[:, None, None]
    paper = grays(rng, count, (0.65, 1.0))
    black = grays(rng, count, (0.0, 0.4))
    swap = chance(rng, 0.5, count)[:, None]
    ground, color = paper + (black - paper) * swap, black + (paper - black) * swap
    canvas = paint(backdrop(rng, ground, ground * np.float32(0.9)), coverage, color)
    canvas = occlude(rng, canvas, 0.1, (2.0, 8.0), gray=True)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.5), count)), (0.0, 0.03), gray=True)


def numbers(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """House numbers: colored, at times low in contrast, with neighbors that the frame cuts off."""
    single = class_index < 10  # longer numbers are smaller and have fewer neighbors, to stay readable
    ground = colors(rng, count, (0.0, 1.0), (0.0, 0.7), (0.15, 0.9))
    canvas = backdrop(rng, ground, np.clip(ground + uniform(rng, (-0.2, 0.2), count, 3), 0, 1))
    canvas = clutter(rng, canvas, 2, (4.0, 14.0), strength=0.3)
    side = np.where(ground.mean(axis=1) > 0.5, np.float32(-1), np.float32(1))  # darker than a light wall, or lighter
    contrast = uniform(rng, (0.25, 0.7) if single else (0.4, 0.8), count) * side
    color = np.clip(ground + contrast[:, None] + uniform(rng, (-0.12, 0.12), count, 3), 0, 1)

    if single:
        poses = pose(rng, count, (19.5, 26.5), shift=2.5, turn=10.0, shear=0.2, stretch=0.15)
    else:
        poses = pose(rng, count, (20.0, 25.0), shift=1.6, turn=7.0, shear=0.15, stretch=0.12)
    middle = warp(number(class_index), rng, count, 0.03 if single else 0.02)
    beside = neighbors(rng, uniform(rng, (0.72, 0.95) if single else (0.95, 1.15), count), 0.65 if single else 0.4)
    drawn = place(np.concatenate([middle, beside], axis=1), poses)
    width = uniform(rng, (2.0, 4.2) if single else (1.6, 3.0), count)
    canvas = light(rng, paint(canvas, stroke(drawn, width), color), (0.7, 1.15), 0.35)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.7 if single else 0.5), count)), (0.01, 0.03))


def neighbors(rng: np.random.Generator, apart: Array, probability: float) -> Array:
    """A digit at the left and one at the right, `apart` (count,) from the middle: (count, S, 2, 2).

    Those that are not to be seen are far out of the frame, so that all images have as many segments.
    """
    count, sides = len(apart), []
    for sign in (-1, 1):
        chosen = PADDED[rng.integers(0, 10, count)]  # (count, S, 2, 2)
        away = apart + SIDE * (1 - chance(rng, probability, count))
        offset = np.stack([sign * away, np.zeros_like(away)], axis=-1)  # (count, 2)
        sides.append(chosen + offset[:, None, None, :])
    return np.concatenate(sides, axis=1)


def _padded() -> Array:
    """The digits, their last segment repeated until all have as many, to be chosen image by image: (10, S, 2, 2)."""
    most = max(len(d) for d in DIGITS)
    return np.stack([np.concatenate([d, np.repeat(d[-1:], most - len(d), axis=0)]) for d in DIGITS])


PADDED = _padded()
