"""The family `faces`: a class is a person; an image is that person in some pose, mood and light."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.scenarios.drawn.canvas import (
    Array,
    arc,
    backdrop,
    blur,
    box,
    chance,
    clutter,
    colors,
    fill,
    grain,
    grays,
    hsv,
    light,
    mirror,
    oval,
    paint,
    pen,
    place,
    pose,
    ring,
    stroke,
    uniform,
)

HAIR_STYLES = ("bald", "short", "fringe", "long", "curly", "parted")


class Person(NamedTuple):
    """What stays the same from image to image; lengths in shares of the image of a face."""

    wide: float  # half the width of the head
    jaw: float  # 0 is pointed, 1 is square
    eye_apart: float
    eye_size: float
    eye_height: float
    brow_tilt: float
    brow_width: float
    nose_long: float
    nose_wide: float
    mouth_wide: float
    mouth_height: float
    skin: tuple[float, float, float]  # hue, saturation, value
    hair: tuple[float, float, float]
    style: str
    beard: bool
    ears: float


def person(look: np.random.Generator) -> Person:
    def among(low: float, high: float) -> float:
        return float(look.uniform(low, high))

    dark = among(0.0, 1.0)
    return Person(
        wide=among(0.29, 0.42),
        jaw=among(0.0, 1.0),
        eye_apart=among(0.11, 0.21),
        eye_size=among(0.035, 0.07),
        eye_height=among(0.42, 0.52),
        brow_tilt=among(-0.05, 0.05),
        brow_width=among(0.02, 0.07),
        nose_long=among(0.1, 0.22),
        nose_wide=among(0.03, 0.09),
        mouth_wide=among(0.08, 0.2),
        mouth_height=among(0.77, 0.84),
        skin=(among(0.03, 0.09), 0.3 + 0.35 * dark, 0.95 - 0.5 * dark),
        hair=(among(0.0, 0.14), among(0.1, 0.8), among(0.05, 0.9)),
        style=str(look.choice(HAIR_STYLES)),
        beard=bool(look.random() < 0.25),
        ears=among(0.05, 0.1),
    )


def head(who: Person) -> Array:
    """The outline of the head: half an ellipse above, a jaw between pointed and square below."""
    jaw = [
        (0.5 - who.wide, 0.45),
        (0.5 - who.wide * (0.78 + 0.2 * who.jaw), 0.72),
        (0.5 - who.wide * (0.3 + 0.35 * who.jaw), 0.95),
    ]
    return ring([*arc((0.5, 0.45), (who.wide, 0.4), 180, 360, 10), *((1 - x, y) for x, y in jaw), *reversed(jaw)])


def hair_behind(who: Person) -> Array:
    """Hair that the head partly covers: a cap larger than the skull, with hanging sides for long hair."""
    reach = who.wide + 0.06
    cap = arc((0.5, 0.42), (reach, 0.44), 180, 360, 10)
    if who.style == "long":
        return ring([*cap, (0.5 + reach + 0.04, 1.0), (0.5 - reach - 0.04, 1.0)])
    if who.style == "curly":
        return ring(*(oval((x, y), (0.15, 0.15), 9) for x, y in arc((0.5, 0.4), (reach, 0.36), 170, 370, 6)))
    if who.style == "bald":
        return ring(box(0.5, 0.3, 0.5, 0.3))  # nothing: an outline without area
    return ring([*cap, (0.5 + reach, 0.5), (0.5 - reach, 0.5)])


def hair_before(who: Person) -> Array:
    """Hair on the forehead."""
    w = who.wide
    skull = arc((0.5, 0.42), (w, 0.4), 180, 360, 8)
    if who.style == "fringe":
        return ring([*skull, (0.5 + w, 0.36), (0.5 - w, 0.36)])
    if who.style in ("parted", "long"):
        return ring(
            [*arc((0.5, 0.42), (w, 0.4), 180, 360, 8), (0.5 + 0.7 * w, 0.3), (0.5 + 0.2 * w, 0.14), (0.5 - w, 0.42)]
        )
    if who.style == "bald":
        return ring(box(0.5, 0.3, 0.5, 0.3))  # nothing: an outline without area
    return ring([*arc((0.5, 0.42), (w, 0.4), 190, 350, 8), (0.5 + 0.5 * w, 0.2), (0.5 - 0.5 * w, 0.2)])


def _near(rng: np.random.Generator, count: int, hsv_center: tuple[float, float, float], spread: float) -> Array:
    h, s, v = hsv_center
    return hsv(
        uniform(rng, (h - 0.02, h + 0.02), count),
        np.clip(uniform(rng, (s - spread, s + spread), count), 0, 1),
        np.clip(uniform(rng, (v - spread, v + spread), count), 0, 1),
    )


def _mouth(rng: np.random.Generator, who: Person, count: int) -> Array:
    """A mouth between sad and glad, a curve of six strokes: (count, 6, 2, 2)."""
    across = np.linspace(-1, 1, 7, dtype=np.float32)
    mood = uniform(rng, (-0.06, 0.09), count)[:, None]
    x = np.broadcast_to(0.5 + who.mouth_wide * across, (count, 7))
    y = who.mouth_height + mood * (0.5 - across * across)
    points = np.stack([x, y], axis=-1).astype(np.float32)
    return np.stack([points[:, :-1], points[:, 1:]], axis=2)


def faces(class_index: int, count: int, rng: np.random.Generator, look: np.random.Generator) -> Array:
    """A person before some room, looking about, glad or sad, at times with glasses, a hat or a scarf."""
    who = person(look)
    ground = colors(rng, count, (0.0, 1.0), (0.0, 0.6), (0.15, 0.95))
    canvas = clutter(rng, backdrop(rng, ground, ground * 0.6), 2, (5.0, 14.0), strength=0.5)
    poses = pose(rng, count, (20.0, 29.0), shift=3.2, turn=15.0, shear=0.1, stretch=0.12, flip=0.5)
    # looking to a side moves the features, not the head
    gaze = np.zeros((count, 2, 3), dtype=np.float32)
    gaze[:, :, 2] = uniform(rng, (-1.6, 1.6), count, 2)
    skin, hair = _near(rng, count, who.skin, 0.12), _near(rng, count, who.hair, 0.15)
    canvas = _skull(canvas, who, poses, skin, hair)
    canvas = _features(rng, canvas, who, poses + gaze, skin, hair)
    canvas = _accessories(rng, canvas, who, poses, poses + gaze)
    canvas = light(rng, canvas, (0.5, 1.15), 0.45)
    return grain(rng, blur(canvas, uniform(rng, (0.0, 0.5), count)), (0.0, 0.03))


def _skull(canvas: Array, who: Person, poses: Array, skin: Array, hair: Array) -> Array:
    """From the back to the front: hair, ears and head, beard, hair again."""
    w = who.wide
    ears = ring(*(oval((0.5 + s * w, 0.52), (who.ears, 0.09), 8) for s in (-1, 1)))
    canvas = paint(canvas, fill(place(hair_behind(who), poses)), hair)
    canvas = paint(canvas, fill(place(np.concatenate([ears, head(who)]), poses)), skin)
    if who.beard:
        beard = ring(mirror([(0.5, 0.7), (0.5 - w, 0.62), (0.5 - w * 0.6, 0.97)]))
        canvas = paint(canvas, fill(place(beard, poses)), hair)
    return paint(canvas, fill(place(hair_before(who), poses)), hair)


def _features(rng: np.random.Generator, canvas: Array, who: Person, poses: Array, skin: Array, hair: Array) -> Array:
    """Eyes, brows, nose and mouth."""
    count, e, h = len(canvas), who.eye_apart, who.eye_height
    side = np.abs(poses[:, 0, 0])  # pixels to the unit
    eyes = ring(*(oval((0.5 + s * e, h), (who.eye_size * 1.3, who.eye_size), 8) for s in (-1, 1)))
    canvas = paint(canvas, fill(place(eyes, poses)), grays(rng, count, (0.85, 1.0)))
    pupils = pen(*([(0.5 + s * e, h)] * 2 for s in (-1, 1)))
    canvas = paint(canvas, stroke(place(pupils, poses), side * np.float32(who.eye_size * 1.3)), skin * np.float32(0.15))
    inner, outer = (e - 0.07, h - 0.1 - who.brow_tilt), (e + 0.07, h - 0.1 + who.brow_tilt)
    brows = pen(*([(0.5 + s * x, y) for x, y in (inner, outer)] for s in (-1, 1)))
    canvas = paint(canvas, stroke(place(brows, poses), side * np.float32(who.brow_width)), hair * np.float32(0.6))
    tip = h + who.nose_long
    nose = pen([(0.5, h), (0.5 - who.nose_wide, tip), (0.5 + who.nose_wide, tip)])
    canvas = paint(canvas, stroke(place(nose, poses), side * np.float32(0.02)), skin * np.float32(0.55))
    lips = stroke(place(_mouth(rng, who, count), poses), side * uniform(rng, (0.03, 0.09), count))
    return paint(canvas, lips, colors(rng, count, (-0.03, 0.03), (0.4, 0.8), (0.35, 0.75)))


def _accessories(rng: np.random.Generator, canvas: Array, who: Person, poses: Array, turned: Array) -> Array:
    """Glasses, a hat or a scarf on some images; they do not identify a person."""
    count, e, h = len(canvas), who.eye_apart, who.eye_height
    rims = pen(*([*oval((0.5 + s * e, h), (0.1, 0.08), 7), (0.5 + s * e + 0.1, h)] for s in (-1, 1)))
    frame = np.abs(poses[:, 0, 0]) * np.float32(0.03)
    glasses = stroke(place(rims, turned), frame) * chance(rng, 0.2, count)[:, None, None]
    canvas = paint(canvas, glasses, colors(rng, count, (0.0, 1.0), (0.0, 0.6), (0.0, 0.4)))
    w = who.wide
    hat = ring([(0.45 - w, 0.26), (0.5 - w, -0.08), (0.5 + w, -0.08), (0.55 + w, 0.26)])
    worn = fill(place(hat, poses)) * chance(rng, 0.3, count)[:, None, None]
    canvas = paint(canvas, worn, colors(rng, count, (0.0, 1.0), (0.2, 1.0), (0.2, 0.9)))
    scarf = fill(place(ring(box(0.05, 0.9, 0.95, 1.2)), poses)) * chance(rng, 0.4, count)[:, None, None]
    return paint(canvas, scarf, colors(rng, count, (0.0, 1.0), (0.2, 1.0), (0.2, 0.9)))
