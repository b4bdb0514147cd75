"""A small renderer: strokes and filled outlines, drawn for a batch of images at once with numpy.

A shape is an array of segments `(S, 2, 2)`: S pairs of end points (x, y) in the unit square, x to the right and y down.
`place` turns it into pixels, one affine pose for each image `(count, S, 2, 2)`; `stroke` and `fill` turn that into
coverage `(count, 32, 32)` between 0 and 1; `paint` lays a color through a coverage over a canvas `(count, 3, 32, 32)`,
whose values run from 0 to 1. Canvases are planar until `finish`, because coverage then multiplies whole rows of memory.

Every random choice comes from the generator that is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SIDE = 32
FINE = 4  # rows sampled within a pixel when an outline is filled; along a row the area is exact

Array = NDArray[np.float32]
Point = tuple[float, float]
Span = tuple[float, float]

RIGHT: Array = np.array([1, 0], dtype=np.float32)
PIXELS: Array = np.arange(SIDE, dtype=np.float32) + np.float32(0.5)  # the centers


# --- random numbers ---------------------------------------------------------------------------------------------------


def uniform(rng: np.random.Generator, span: Span, *shape: int) -> Array:
    """Numbers spread evenly over a span.

    >>> uniform(np.random.default_rng(0), (2.0, 2.0), 3)
    array([2., 2., 2.], dtype=float32)
    """
    low, high = span
    return rng.random(shape, dtype=np.float32) * np.float32(high - low) + np.float32(low)


def chance(rng: np.random.Generator, probability: float, count: int) -> Array:
    """1 for the images that were chosen, 0 for the others, to be multiplied with a coverage or an amount."""
    return (rng.random(count, dtype=np.float32) < probability).astype(np.float32)


def hsv(hue: Array, saturation: Array, value: Array) -> Array:
    """Colors (count, 3) in red, green, blue; hue is counted in turns and wraps.

    >>> one = np.ones(1, dtype=np.float32)
    >>> hsv(one / 3, one, one).round(3).tolist()
    [[0.0, 1.0, 0.0]]
    """
    offsets = np.array([5, 3, 1], dtype=np.float32)
    sector: Array = (hue[:, None] * 6 + offsets) % 6  # (count, 3)
    ramp = np.clip(np.minimum(sector, 4 - sector), 0, 1)
    mixed: Array = value[:, None] * (1 - saturation[:, None] * ramp)
    return mixed


def colors(rng: np.random.Generator, count: int, hue: Span, saturation: Span, value: Span) -> Array:
    """Random colors (count, 3) out of a box in hue, saturation and value."""
    return hsv(uniform(rng, hue, count), uniform(rng, saturation, count), uniform(rng, value, count))


def grays(rng: np.random.Generator, count: int, value: Span) -> Array:
    """Random colors (count, 3) without hue."""
    return np.repeat(uniform(rng, value, count, 1), 3, axis=1)


# --- shapes in the unit square ----------------------------------------------------------------------------------------


def arc(center: Point, radii: Point, start: float, stop: float, pieces: int = 8) -> list[Point]:
    """Points along an ellipse; degrees, 0 is right and 90 is down, since y points down.

    >>> [(round(x, 3), round(y, 3)) for x, y in arc((0.5, 0.5), (0.5, 0.5), 0, 90, pieces=1)]
    [(1.0, 0.5), (0.5, 1.0)]
    """
    angles = np.radians(np.linspace(start, stop, pieces + 1))
    return [(center[0] + radii[0] * float(np.cos(a)), center[1] + radii[1] * float(np.sin(a))) for a in angles]


def box(left: float, top: float, right: float, bottom: float) -> list[Point]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def oval(center: Point, radii: Point, pieces: int = 14) -> list[Point]:
    return arc(center, radii, 0, 360, pieces)[:-1]


def mirror(half: Sequence[Point]) -> list[Point]:
    """A symmetric outline out of its left half, listed from the middle to the middle."""
    return [*half, *((1 - x, y) for x, y in reversed(half))]


def pen(*polylines: Sequence[Point]) -> Array:
    """Segments (S, 2, 2) of open polylines.

    >>> pen([(0, 0), (1, 0), (1, 1)]).shape
    (2, 2, 2)
    """
    return np.array([pair for line in polylines for pair in pairwise(line)], dtype=np.float32)


def ring(*outlines: Sequence[Point]) -> Array:
    """Segments (S, 2, 2) of closed outlines, all turned the same way round so that overlaps add up to a union."""
    return pen(*([*line, line[0]] if _turn(line) >= 0 else [*line[::-1], line[-1]] for line in outlines))


def hole(lines: Array) -> Array:
    """The same outlines the other way round: concatenated with a larger `ring` they cut a hole."""
    return np.ascontiguousarray(lines[::-1, ::-1])


def fit(lines: Array, left: float, top: float, right: float, bottom: float) -> Array:
    """The unit square squeezed into a box of the unit square."""
    scale = np.array([right - left, bottom - top], dtype=np.float32)
    return lines * scale + np.array([left, top], dtype=np.float32)


def _turn(line: Sequence[Point]) -> float:
    following = [*line[1:], line[0]]
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(line, following, strict=True))


# --- from the unit square to pixels -----------------------------------------------------------------------------------


def pose(
    rng: np.random.Generator,
    count: int,
    size: Span,
    *,
    shift: float = 2.0,
    turn: float = 10.0,
    shear: float = 0.1,
    stretch: float = 0.1,
    flip: float = 0.0,
) -> Array:
    """Random affine maps (count, 2, 3) that send the center of the unit square near the center of the image.

    size is the side of the unit square in pixels, shift is in pixels, turn in degrees, shear and stretch are shares,
    flip is the probability of left and right being exchanged.
    """
    side = uniform(rng, size, count)
    wide = uniform(rng, (1 - stretch, 1 + stretch), count) * side
    tall = uniform(rng, (1 - stretch, 1 + stretch), count) * side
    wide = wide * (1 - 2 * chance(rng, flip, count))
    angle = np.radians(uniform(rng, (-turn, turn), count))
    slant = uniform(rng, (-shear, shear), count)
    cosine, sine = np.cos(angle), np.sin(angle)
    middle = SIDE / 2 + uniform(rng, (-shift, shift), 2, count)
    across = [cosine * wide, (cosine * slant - sine) * tall, middle[0]]  # turn * shear * scale
    down = [sine * wide, (sine * slant + cosine) * tall, middle[1]]
    return np.stack([np.stack(across, 1), np.stack(down, 1)], 1)


def place(lines: Array, poses: Array) -> Array:
    """Shapes (S, 2, 2) or (count, S, 2, 2) in the unit square, to (count, S, 2, 2) in pixels."""
    x, y = lines[..., 0] - 0.5, lines[..., 1] - 0.5  # (S, 2) or (count, S, 2)
    m = poses[:, :, :, None, None]  # (count, 2, 3, 1, 1)
    return np.stack([m[:, r, 0] * x + m[:, r, 1] * y + m[:, r, 2] for r in range(2)], axis=-1)


def warp(lines: Array, rng: np.random.Generator, count: int, amount: float) -> Array:
    """Bend a shape by a smooth random field, one for each image: (count, S, 2, 2).

    The displacement depends on the position only, so strokes that touch keep touching.
    """
    frequency = uniform(rng, (-7.0, 7.0), 2, 2, count, 1, 1)  # (wave, axis, count, 1, 1), in radians
    phase = uniform(rng, (0.0, 2 * np.pi), 2, 2, count, 1, 1)
    x, y = lines[..., 0], lines[..., 1]
    waves = np.sin(frequency[:, :1] * x + frequency[:, 1:] * y + phase)  # (wave, axis, count, S, 2)
    moved = waves.sum(axis=0) * np.float32(amount)  # (axis, count, S, 2)
    return np.stack([x + moved[0], y + moved[1]], axis=-1)


# --- coverage ---------------------------------------------------------------------------------------------------------


def distance(lines: Array) -> Array:
    """Pixels from each pixel's center to the nearest of the segments: (count, S, 2, 2) -> (count, 32, 32)."""
    start, step = lines[:, :, 0], lines[:, :, 1] - lines[:, :, 0]  # (count, S, 2)
    length = np.sqrt((step * step).sum(-1))  # (count, S)
    # a segment without length is a dot, in any direction
    towards = np.where(length[..., None] > 1e-6, step / np.maximum(length, 1e-6)[..., None], RIGHT)
    from_x = PIXELS - start[:, :, :1]  # (count, S, 32)
    from_y = PIXELS - start[:, :, 1:]
    dx, dy = towards[:, :, :1], towards[:, :, 1:]  # (count, S, 1)
    # along and across are each a term of x plus a term of y, so that a pixel costs one addition for either
    along_x, along_y, across_x, across_y = from_x * dx, from_y * dy, from_x * -dy, from_y * dx
    nearest = np.full((len(lines), SIDE, SIDE), np.inf, dtype=np.float32)
    for s in range(lines.shape[1]):
        along = along_y[:, s, :, None] + along_x[:, s, None, :]  # (count, 32, 1) + (count, 1, 32)
        along -= np.minimum(np.maximum(along, 0), length[:, s, None, None])
        across = across_y[:, s, :, None] + across_x[:, s, None, :]
        along *= along
        across *= across
        along += across
        np.minimum(nearest, along, out=nearest)
    return np.sqrt(nearest, out=nearest)


def ink(distances: Array, width: Array) -> Array:
    """Coverage of a round pen of some width (count,) in pixels, with an edge one pixel soft."""
    return np.clip(width[:, None, None] / 2 + np.float32(0.5) - distances, 0, 1)


def stroke(lines: Array, width: Array) -> Array:
    return ink(distance(lines), width)


def fill(lines: Array) -> Array:
    """Coverage of closed outlines (count, S, 2, 2) by winding number.

    Where a sampled row crosses an edge, the winding changes by one from there to the right; these changes are scattered
    into pixels, shared between two neighbors by area, and summed along the row. Only crossings cost anything.
    """
    count = len(lines)
    heights = (np.arange(SIDE * FINE, dtype=np.float32) + np.float32(0.5)) / FINE
    above = lines[..., 1, None] <= heights  # (count, S, 2, rows)
    image, edge, row = np.nonzero(above[:, :, 0] != above[:, :, 1])
    x0, y0, x1, y1 = lines.reshape(count, -1, 4)[image, edge].T  # (crossings,) each
    x = np.clip(x0 + (heights[row] - y0) * (x1 - x0) / (y1 - y0), 0, SIDE)
    cell = x.astype(np.int64)
    share = np.where(y1 > y0, -1 / FINE, 1 / FINE)
    width = SIDE + 2  # one cell for crossings at the right border, one for their neighbor
    at = (image * SIDE + row // FINE) * width + cell
    right = share * (x - cell)
    cells = count * SIDE * width
    change = np.bincount(at, share - right, cells) + np.bincount(at + 1, right, cells)
    winding = np.cumsum(change.reshape(count, SIDE, width), axis=-1)[:, :, :SIDE]
    return np.minimum(np.abs(winding), 1).astype(np.float32)


# --- canvases ---------------------------------------------------------------------------------------------------------


def paint(canvas: Array, coverage: Array, color: Array) -> Array:
    """Lay a color, (count, 3) or a whole canvas, through a coverage (count, 32, 32) over a canvas."""
    if color.ndim == 2:
        color = color[:, :, None, None]
    mixed = color - canvas
    mixed *= coverage[:, None]
    mixed += canvas
    return mixed


def slope(rng: np.random.Generator, count: int) -> Array:
    """A plane of random direction over each image, from -1 to 1: (count, 32, 32)."""
    angle = uniform(rng, (0.0, 2 * np.pi), count)
    centerd = PIXELS / (SIDE / 2) - 1
    plane: Array = np.sin(angle)[:, None, None] * centerd[:, None] + np.cos(angle)[:, None, None] * centerd
    return plane


def cloud(rng: np.random.Generator, count: int, cells: int) -> Array:
    """Smooth noise between 0 and 1, about `cells` bumps across: (count, 32, 32)."""
    knots = uniform(rng, (0.0, 1.0), count, cells + 1, cells + 1)
    at: Array = PIXELS * np.float32(cells / SIDE)
    cell = at.astype(np.int64)
    part: Array = at - cell.astype(np.float32)
    part *= part * (3 - 2 * part)  # smooth steps, otherwise the cells show
    rows: Array = knots[:, cell] * (1 - part)[:, None] + knots[:, cell + 1] * part[:, None]  # (count, 32, cells + 1)
    return rows[:, :, cell] * (1 - part) + rows[:, :, cell + 1] * part


def backdrop(rng: np.random.Generator, one: Array, other: Array) -> Array:
    """A gradient between two colors (count, 3), in a random direction: a canvas."""
    mix = slope(rng, len(one)) * np.float32(0.5) + np.float32(0.5)
    return paint(np.broadcast_to(one[:, :, None, None], (len(one), 3, SIDE, SIDE)), np.clip(mix, 0, 1), other)


def light(rng: np.random.Generator, canvas: Array, level: Span, tilt: float) -> Array:
    """Change the brightness as a whole, and more on one side than on the other."""
    count = len(canvas)
    lean = uniform(rng, (0, tilt), count)[:, None, None] * slope(rng, count)
    gain = uniform(rng, level, count)[:, None, None] * (1 + lean)
    return canvas * gain[:, None]


def clutter(rng: np.random.Generator, canvas: Array, pieces: int, size: Span, strength: float = 1.0) -> Array:
    """Lay random quadrilaterals of random colors over a canvas."""
    count = len(canvas)
    for _ in range(pieces):
        middle = uniform(rng, (0, SIDE), count, 1, 2)
        angle = uniform(rng, (0, np.pi / 2), count, 4) + np.arange(4, dtype=np.float32) * np.float32(np.pi / 2)
        radius = uniform(rng, size, count, 4)
        corners = middle + radius[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)  # (count, 4, 2)
        edges = np.stack([corners, np.roll(corners, -1, axis=1)], axis=2)
        canvas = paint(canvas, fill(edges) * np.float32(strength), uniform(rng, (0, 1), count, 3))
    return canvas


def occlude(rng: np.random.Generator, canvas: Array, probability: float, depth: Span, gray: bool = False) -> Array:
    """Cover one side of some images by a plain color, `depth` pixels deep and with a slanting edge."""
    count = len(canvas)
    reach = uniform(rng, depth, count) * chance(rng, probability, count)
    rise = uniform(rng, (-0.5, 0.5), count)
    edge = reach[:, None, None] + rise[:, None, None] * (PIXELS[:, None] - SIDE / 2) * (reach > 0)[:, None, None]
    coverage = np.clip(edge - PIXELS + np.float32(0.5), 0, 1)  # a band at the left ...
    side = rng.integers(0, 4, count)
    coverage = np.where((side % 2 == 1)[:, None, None], coverage[:, :, ::-1], coverage)  # ... or at the right ...
    coverage = np.where((side >= 2)[:, None, None], coverage.transpose(0, 2, 1), coverage)  # ... or above or below
    return paint(canvas, coverage, grays(rng, count, (0, 1)) if gray else uniform(rng, (0, 1), count, 3))


def blur(canvas: Array, amount: Array) -> Array:
    """Mix each image with its blurred self (a binomial 3x3, twice); amount (count,) is 0 for sharp and 1 for soft."""
    soft = canvas
    for axis in (2, 3, 2, 3):
        padded = np.concatenate([soft.take([0], axis), soft, soft.take([-1], axis)], axis)
        before, after = (slice(None),) * axis + (slice(None, -2),), (slice(None),) * axis + (slice(2, None),)
        soft = (padded[before] + padded[after]) * np.float32(0.25) + soft * np.float32(0.5)
    return canvas + amount[:, None, None, None] * (soft - canvas)


def grain(rng: np.random.Generator, canvas: Array, amount: Span, gray: bool = False) -> Array:
    """Add pixel noise, its deviation drawn for each image."""
    count = len(canvas)
    noise = rng.standard_normal((count, 1 if gray else 3, SIDE, SIDE), dtype=np.float32)
    return canvas + noise * uniform(rng, amount, count)[:, None, None, None]


def finish(canvas: Array) -> NDArray[np.uint8]:
    """A canvas as the images that leave this module: uint8 (count, 32, 32, 3)."""
    levels = np.clip(canvas * 255 + np.float32(0.5), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(levels.transpose(0, 2, 3, 1))
