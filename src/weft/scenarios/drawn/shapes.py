"""Families made of filled outlines: `silhouettes`, `signs` and `objects`.

The first ten classes of each are drawn by hand, the others are composed by a generator that the class number seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.scenarios.drawn.canvas import (
    Array,
    Point,
    Span,
    arc,
    backdrop,
    blur,
    box,
    chance,
    cloud,
    clutter,
    colors,
    fill,
    fit,
    grain,
    grays,
    hole,
    light,
    mirror,
    occlude,
    oval,
    paint,
    pen,
    place,
    pose,
    ring,
    slope,
    stroke,
    uniform,
    warp,
)
from weft.scenarios.drawn.strokes import LETTERS, invented, number

# --- silhouettes ------------------------------------------------------------------------------------------------------


def _star(points: int, inner: float) -> list[Point]:
    tips, dents = (arc((0.5, 0.52), (r, r), a, a + 360, points) for r, a in ((0.5, -90.0), (inner, 180 / points - 90)))
    return [p for pair in zip(tips[:-1], dents[:-1], strict=True) for p in pair]


OUTLINES: dict[str, Array] = {
    "shirt": ring(
        mirror([(0.5, 0.17), (0.37, 0.08), (0.1, 0.2), (0, 0.43), (0.14, 0.5), (0.25, 0.38), (0.26, 0.95), (0.5, 0.95)])
    ),
    "trousers": ring(mirror([(0.5, 0.02), (0.27, 0.02), (0.2, 0.98), (0.41, 0.98), (0.5, 0.32)])),
    "pullover": ring(
        mirror(
            [(0.5, 0.1), (0.38, 0.06), (0.18, 0.15), (0.06, 0.5), (0, 0.88), (0.14, 0.91), (0.26, 0.45), (0.25, 0.95)]
        )
    ),
    "dress": ring(mirror([(0.5, 0.17), (0.41, 0.0), (0.34, 0.0), (0.3, 0.22), (0.38, 0.42), (0.16, 0.98), (0.5, 1.0)])),
    "shoe": ring(
        [(0, 0.76), (0.02, 0.6), (0.22, 0.53), (0.42, 0.34), (0.56, 0.46), (0.94, 0.3), (1, 0.55), (1, 0.76)],
    ),
    "boot": ring(
        [(0.42, 0.02), (0.82, 0.02), (0.84, 0.5), (0.9, 0.95), (0.04, 0.95), (0.04, 0.76), (0.3, 0.62), (0.42, 0.48)]
    ),
    "bag": np.concatenate(
        [
            ring(box(0.04, 0.4, 0.96, 0.95), [*arc((0.5, 0.45), (0.3, 0.4), 180, 360), (0.7, 0.45), (0.3, 0.45)]),
            hole(ring([*arc((0.5, 0.4), (0.2, 0.26), 180, 360, 6)])),
        ]
    ),
    "hat": ring(
        mirror(
            [(0.5, 0.2), (0.36, 0.14), (0.27, 0.24), (0.23, 0.56), (0, 0.64), (0.06, 0.76), (0.3, 0.84), (0.5, 0.86)]
        )
    ),
    "mitten": ring(
        [*arc((0.6, 0.32), (0.24, 0.3), 180, 360), (0.84, 0.7), (0.8, 0.98), (0.4, 0.98), (0.38, 0.74)],
        [(0.4, 0.76), (0.12, 0.56), (0.1, 0.44), (0.2, 0.38), (0.4, 0.52)],
    ),
    "star": ring(_star(5, 0.21)),
}


def outline(class_index: int, look: np.random.Generator) -> Array:
    """A hand-drawn outline, or beyond those a closed curve of a few random waves around a circle."""
    if class_index < len(OUTLINES):
        return list(OUTLINES.values())[class_index]
    angles = np.linspace(0, 2 * np.pi, 29)[:-1]
    radius = np.full_like(angles, 0.38)
    for waves in look.choice(np.arange(1, 7), 3, replace=False):
        radius += look.uniform(0.07, 0.16) * np.cos(waves * angles + look.uniform(0, 2 * np.pi))
    tall = look.uniform(0.7, 1.3)
    across, down = 0.5 + radius * np.cos(angles) / tall, 0.5 + radius * np.sin(angles) * tall
    return ring([(float(x), float(y)) for x, y in zip(across, down, strict=True)])


def silhouettes(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """Gray cloth on dark ground: one outline with folds, stripes at times, and light from one side."""
    shape = warp(outline(class_index, look), rng, count, 0.045)
    flip = 0.5 if class_index < len(OUTLINES) else 0.0  # cloth may be mirrored, an invented blot may not
    poses = pose(rng, count, (18.0, 27.0), shift=3.0, turn=16.0, shear=0.2, stretch=0.2, flip=flip)
    tone = uniform(rng, (0.35, 1.0), count)[:, None, None]
    folds = (cloud(rng, count, 6) - 0.5) * uniform(rng, (0.1, 0.7), count)[:, None, None]
    stripes = np.sin(slope(rng, count) * uniform(rng, (8.0, 30.0), count)[:, None, None])
    stripes *= uniform(rng, (0.0, 0.3), count)[:, None, None] * chance(rng, 0.4, count)[:, None, None]
    shade = tone * (1 + slope(rng, count) * np.float32(0.25) + folds + stripes)
    ground = grays(rng, count, (0.0, 0.22))
    canvas = paint(backdrop(rng, ground, ground * 0.4), fill(place(shape, poses)), np.repeat(shade[:, None], 3, axis=1))
    canvas = occlude(rng, canvas, 0.1, (3.0, 8.0), gray=True)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.5), count)), (0.01, 0.03), gray=True)


# --- signs ------------------------------------------------------------------------------------------------------------

PLATES: dict[str, Array] = {
    "triangle": ring([(0.5, 0.04), (0.98, 0.88), (0.02, 0.88)]),
    "circle": ring(oval((0.5, 0.5), (0.48, 0.48), 18)),
    "octagon": ring(arc((0.5, 0.5), (0.5, 0.5), 22.5, 382.5, 8)[:-1]),
    "diamond": ring([(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)]),
    "square": ring(box(0.06, 0.06, 0.94, 0.94)),
    "yield": ring([(0.5, 0.96), (0.02, 0.12), (0.98, 0.12)]),
}
MIDDLES: dict[str, float] = {"triangle": 0.6, "yield": 0.4}  # the height of a plate's center, where it is not one half

Box = tuple[Span, Span, Span]  # hue, saturation, value
PAINTS: dict[str, Box] = {
    "red": ((-0.03, 0.03), (0.75, 1.0), (0.6, 0.9)),
    "white": ((0.0, 1.0), (0.0, 0.08), (0.8, 1.0)),
    "blue": ((0.56, 0.64), (0.7, 1.0), (0.5, 0.8)),
    "yellow": ((0.12, 0.16), (0.75, 1.0), (0.8, 1.0)),
    "green": ((0.36, 0.45), (0.6, 0.9), (0.35, 0.6)),
    "black": ((0.0, 1.0), (0.0, 0.2), (0.0, 0.2)),
}


class Sign(NamedTuple):
    name: str
    plate: str
    rim: str
    face: str
    symbol: Array
    ink: str
    pen_width: float  # in shares of the plate's side


def _word(text: str, left: float, top: float, right: float, bottom: float) -> Array:
    wide = (right - left) / len(text)
    spots = [left + i * wide for i in range(len(text))]
    return np.concatenate(
        [fit(LETTERS[c], x + 0.1 * wide, top, x + 0.9 * wide, bottom) for c, x in zip(text, spots, strict=True)]
    )


ARROW = pen([(0.5, 0.85), (0.5, 0.12)], [(0.2, 0.45), (0.5, 0.12), (0.8, 0.45)])
NOTHING: Array = np.zeros((0, 2, 2), dtype=np.float32)

SIGNS: tuple[Sign, ...] = (
    Sign("stop", "octagon", "white", "red", _word("STOP", 0.14, 0.36, 0.86, 0.64), "white", 0.05),
    Sign("yield", "yield", "red", "white", NOTHING, "black", 0.0),
    Sign("no entry", "circle", "white", "red", pen([(0.27, 0.5), (0.73, 0.5)]), "white", 0.17),
    Sign("limit 30", "circle", "red", "white", fit(number(30), 0.27, 0.28, 0.73, 0.72), "black", 0.08),
    Sign("ahead", "circle", "white", "blue", fit(ARROW, 0.26, 0.24, 0.74, 0.78), "white", 0.1),
    Sign("priority", "diamond", "white", "yellow", NOTHING, "black", 0.0),
    Sign("bend", "triangle", "red", "white", fit(LETTERS["S"], 0.38, 0.42, 0.62, 0.76), "black", 0.08),
    Sign("limit 80", "circle", "red", "white", fit(number(80), 0.27, 0.28, 0.73, 0.72), "black", 0.08),
    Sign("parking", "square", "white", "blue", fit(LETTERS["P"], 0.28, 0.24, 0.74, 0.78), "white", 0.11),
    Sign("danger", "triangle", "red", "white", pen([(0.5, 0.38), (0.5, 0.6)], [(0.5, 0.75)] * 2), "black", 0.1),
)
SCHEMES = (
    ("red", "white", "black"),
    ("white", "red", "white"),
    ("white", "blue", "white"),
    ("black", "yellow", "black"),
    ("white", "green", "white"),
    ("red", "yellow", "black"),
)


def sign(class_index: int, look: np.random.Generator) -> Sign:
    """One of the ten, or a plate, a scheme of colors and an invented symbol."""
    if class_index < len(SIGNS):
        return SIGNS[class_index]
    plate = str(look.choice(list(PLATES)))
    rim, face, color = SCHEMES[int(look.integers(len(SCHEMES)))]
    middle = MIDDLES.get(plate, 0.5)
    reach = 0.24 if plate in ("circle", "octagon", "square") else 0.18
    symbol = fit(invented(look), 0.5 - reach, middle - reach, 0.5 + reach, middle + reach)
    return Sign(f"{plate} {class_index}", plate, rim, face, symbol, color, 0.09)


def signs(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """A plate before sky and trees, in bright and in poor light."""
    chosen = sign(class_index, look)
    sky = colors(rng, count, (0.5, 0.65), (0.05, 0.6), (0.4, 1.0))
    earth = colors(rng, count, (0.05, 0.4), (0.1, 0.7), (0.1, 0.6))
    canvas = paint(backdrop(rng, sky, sky * 0.8), np.clip(cloud(rng, count, 4) * 4 - 1.5, 0, 1), earth)
    canvas = clutter(rng, canvas, 2, (4.0, 12.0), strength=0.6)
    poses = pose(rng, count, (16.0, 28.0), shift=3.5, turn=12.0, shear=0.18, stretch=0.15)
    middle = np.array([0.5, MIDDLES.get(chosen.plate, 0.5)], dtype=np.float32)
    plate = PLATES[chosen.plate]
    inside = (plate - middle) * np.float32(0.78 if chosen.rim == "red" else 0.88) + middle
    canvas = paint(canvas, fill(place(plate, poses)), colors(rng, count, *PAINTS[chosen.rim]))
    canvas = paint(canvas, fill(place(inside, poses)), colors(rng, count, *PAINTS[chosen.face]))
    if len(chosen.symbol):
        side = np.sqrt(np.abs(poses[:, 0, 0] * poses[:, 1, 1] - poses[:, 0, 1] * poses[:, 1, 0]))  # in pixels
        coverage = stroke(place(chosen.symbol, poses), side * np.float32(chosen.pen_width))
        canvas = paint(canvas, coverage, colors(rng, count, *PAINTS[chosen.ink]))
    canvas = occlude(rng, canvas, 0.1, (3.0, 8.0))
    canvas = light(rng, canvas, (0.3, 1.15), 0.5)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.5), count)), (0.0, 0.03))


# --- objects ----------------------------------------------------------------------------------------------------------

STUFFS: dict[str, Box] = {
    "any": ((0.0, 1.0), (0.3, 1.0), (0.3, 1.0)),
    "warm": ((-0.1, 0.2), (0.3, 1.0), (0.4, 1.0)),
    "wood": ((0.03, 0.11), (0.3, 0.8), (0.2, 0.6)),
    "leaf": ((0.15, 0.45), (0.3, 1.0), (0.25, 0.8)),
    "pale": ((0.0, 1.0), (0.0, 0.3), (0.65, 1.0)),
    "dark": ((0.0, 1.0), (0.0, 0.5), (0.02, 0.3)),
}
Part = tuple[Array, str]


def _parts(*parts: tuple[str, Sequence[Sequence[Point]]]) -> tuple[Part, ...]:
    return tuple((ring(*outlines), stuff) for stuff, outlines in parts)


_PETALS = [oval((0.5 + 0.2 * x, 0.32 + 0.2 * y), (0.15, 0.15), 8) for x, y in arc((0, 0), (1, 1), -90, 270, 5)[:-1]]
OBJECTS: dict[str, tuple[Part, ...]] = {
    "house": _parts(
        ("any", [box(0.14, 0.45, 0.86, 0.95)]),
        ("warm", [[(0.5, 0.06), (1.0, 0.5), (0.0, 0.5)]]),
        ("dark", [box(0.42, 0.62, 0.6, 0.95)]),
    ),
    "car": _parts(
        ("any", [box(0.0, 0.48, 1.0, 0.75), [(0.2, 0.5), (0.32, 0.24), (0.68, 0.24), (0.82, 0.5)]]),
        ("pale", [[(0.3, 0.47), (0.37, 0.3), (0.63, 0.3), (0.72, 0.47)]]),
        ("dark", [oval((0.24, 0.76), (0.13, 0.13), 10), oval((0.76, 0.76), (0.13, 0.13), 10)]),
    ),
    "tree": _parts(
        ("wood", [box(0.42, 0.6, 0.58, 1.0)]),
        ("leaf", [oval((0.5, 0.3), (0.3, 0.28)), oval((0.3, 0.48), (0.24, 0.2)), oval((0.7, 0.48), (0.24, 0.2))]),
    ),
    "boat": _parts(
        ("any", [[(0.0, 0.68), (1.0, 0.68), (0.8, 0.95), (0.2, 0.95)]]),
        ("wood", [box(0.47, 0.05, 0.53, 0.7)]),
        ("pale", [[(0.55, 0.06), (0.95, 0.6), (0.55, 0.6)], [(0.44, 0.18), (0.44, 0.6), (0.14, 0.6)]]),
    ),
    "cup": (
        (np.concatenate([ring(oval((0.76, 0.5), (0.22, 0.22))), hole(ring(oval((0.76, 0.5), (0.12, 0.12))))]), "any"),
        *_parts(
            ("any", [[(0.1, 0.2), (0.76, 0.2), (0.68, 0.86), (0.18, 0.86)]]),
            ("dark", [oval((0.43, 0.2), (0.33, 0.08), 12)]),
        ),
    ),
    "flower": _parts(
        (
            "leaf",
            [
                box(0.46, 0.4, 0.54, 1.0),
                [(0.5, 0.9), (0.22, 0.66), (0.3, 0.86)],
                [(0.5, 0.9), (0.78, 0.7), (0.7, 0.88)],
            ],
        ),
        ("any", _PETALS),
        ("warm", [oval((0.5, 0.32), (0.12, 0.12), 10)]),
    ),
    "fish": _parts(
        ("any", [[(0.66, 0.5), (1.0, 0.2), (0.92, 0.5), (1.0, 0.8)], [(0.3, 0.3), (0.5, 0.1), (0.6, 0.32)]]),
        ("any", [oval((0.4, 0.5), (0.4, 0.25))]),
        ("dark", [oval((0.18, 0.44), (0.055, 0.055), 8)]),
    ),
    "mushroom": _parts(
        ("pale", [[(0.4, 0.45), (0.6, 0.45), (0.68, 0.96), (0.32, 0.96)]]),
        ("warm", [[*arc((0.5, 0.52), (0.46, 0.42), 180, 360, 10)]]),
        ("pale", [oval(at, (0.08, 0.06), 8) for at in ((0.34, 0.34), (0.62, 0.26), (0.73, 0.42))]),
    ),
    "plane": _parts(
        ("any", [oval((0.5, 0.52), (0.5, 0.12))]),
        (
            "any",
            [
                [(0.4, 0.5), (0.56, 0.5), (0.78, 0.94), (0.66, 0.94)],
                [(0.42, 0.46), (0.56, 0.46), (0.7, 0.12), (0.62, 0.12)],
            ],
        ),
        ("any", [[(0.84, 0.5), (0.98, 0.5), (1.02, 0.24), (0.94, 0.24)]]),
    ),
    "rocket": _parts(
        ("any", [[(0.34, 0.6), (0.12, 0.92), (0.36, 0.84)], [(0.66, 0.6), (0.88, 0.92), (0.64, 0.84)]]),
        ("pale", [mirror([(0.5, 0.0), (0.38, 0.16), (0.33, 0.4), (0.36, 0.84)])]),
        ("warm", [[(0.4, 0.86), (0.6, 0.86), (0.5, 1.04)], oval((0.5, 0.38), (0.09, 0.09), 10)]),
    ),
}


def thing(class_index: int, look: np.random.Generator) -> tuple[Part, ...]:
    """A hand-drawn object, or two or three simple solids that overlap, each of a different material."""
    if class_index < len(OBJECTS):
        return list(OBJECTS.values())[class_index]
    solids: tuple[list[Point], ...] = (
        box(0, 0, 1, 1),
        oval((0.5, 0.5), (0.5, 0.5)),
        [(0.5, 0.0), (1.0, 1.0), (0.0, 1.0)],
        [(0.0, 0.0), (1.0, 0.0), (0.75, 1.0), (0.25, 1.0)],
        [(0.5, 0.0), (1.0, 0.5), (0.5, 1.0), (0.0, 0.5)],
        arc((0.5, 1.0), (0.5, 1.0), 180, 360, 10),
        _star(5, 0.22),
    )
    chosen = look.choice(len(solids), 3, replace=False)
    stuffs = look.choice(list(STUFFS), 3, replace=False)
    wide, tall, beside = look.uniform(0.5, 0.95), look.uniform(0.35, 0.6), look.uniform(0.0, 1.0)
    small = look.uniform(0.3, 0.45)
    spots = (
        (0.5 - wide / 2, 1 - tall, 0.5 + wide / 2, 1.0),  # the body below,
        (beside * 0.45, 0.0, beside * 0.45 + 0.55, 1.08 - tall),  # a second one on top of it,
        ((1 - beside) * (1 - small), 0.9 - small, (1 - beside) * (1 - small) + small, 0.9),  # and a detail in front
    )
    parts = int(look.integers(2, 4))
    pieces = [(fit(ring(solids[int(c)]), *spot), str(s)) for c, spot, s in zip(chosen, spots, stuffs, strict=True)]
    return tuple(pieces[:parts])


def objects(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """Two or three colored parts before a colored scene."""
    ground = colors(rng, count, (0.0, 1.0), (0.05, 0.7), (0.2, 1.0))
    canvas = backdrop(rng, ground, colors(rng, count, (0.0, 1.0), (0.05, 0.7), (0.2, 1.0)))
    canvas = clutter(rng, canvas, 2, (4.0, 12.0), strength=0.35)
    poses = pose(rng, count, (21.0, 29.0), shift=2.5, turn=10.0, shear=0.12, stretch=0.15, flip=0.5)
    # one seed for all parts: they must bend together
    bend = int(rng.integers(2**32))
    for lines, stuff in thing(class_index, look):
        shape = warp(lines, np.random.default_rng(bend), count, 0.03)
        color = colors(rng, count, *STUFFS[stuff])
        shaded = np.clip(color[:, :, None, None] * (1 + np.float32(0.25) * slope(rng, count)[:, None]), 0, 1)
        canvas = paint(canvas, fill(place(shape, poses)), shaded)
    canvas = occlude(rng, canvas, 0.1, (3.0, 8.0))
    canvas = light(rng, canvas, (0.6, 1.1), 0.3)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.5), count)), (0.0, 0.03))
