"""The drawn families: shapes, reproducible bits, any number of classes, classes that differ."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.scenarios.drawn import CHUNK, FAMILIES, NORMALIZATION, canvas, class_name, draw

every_family = pytest.mark.parametrize("family", FAMILIES)


def small(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Images as 8x8 greys of zero mean and unit length, so that neither brightness nor color matters: (count, 64)."""
    grey = images.astype(np.float64).mean(axis=-1).reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4)).reshape(-1, 64)
    grey -= grey.mean(axis=1, keepdims=True)
    return unit(grey)


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale every row to length 1."""
    scaled: NDArray[np.float64] = vectors / np.sqrt((vectors * vectors).sum(axis=1, keepdims=True) + 1e-9)
    return scaled


def sample(family: str, count: int, seed: int, classes: range = range(10)) -> list[NDArray[np.uint8]]:
    return [draw(family, c, count, np.random.default_rng([seed, c])) for c in classes]


def test_the_eight_families() -> None:
    assert FAMILIES == ("digits", "letters", "silhouettes", "signs", "numbers", "objects", "textures", "faces")
    assert tuple(NORMALIZATION) == FAMILIES


@every_family
@pytest.mark.parametrize("count", [0, 1, CHUNK + 3])
def test_images_are_bytes_of_32_by_32_in_three_channels(family: str, count: int) -> None:
    images = draw(family, 2, count, np.random.default_rng(0))
    assert images.shape == (count, 32, 32, 3)
    assert images.dtype == np.uint8


@every_family
def test_the_seed_alone_decides_the_bits(family: str) -> None:
    one, same, other = (draw(family, 3, 5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
    assert len(np.unique(one.reshape(5, -1), axis=0)) == 5  # all images differ


@every_family
def test_any_number_of_classes(family: str) -> None:
    names = {class_name(family, c) for c in range(140)}
    assert len(names) == 140
    assert all(name.startswith(f"{family} ") for name in names)
    far, next_one = (draw(family, c, 2, np.random.default_rng(0)) for c in (137, 138))
    assert far.std() > 5
    assert not np.array_equal(far, next_one)
    assert draw(family, 123_456, 1, np.random.default_rng(0)).shape == (1, 32, 32, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "group"), [(f, g) for f in FAMILIES for g in (0, 20)])
def test_classes_differ_more_than_their_images_do(family: str, group: int) -> None:
    """1-NN beats chance by far, for hand-drawn and for generated classes."""
    classes = range(group, group + 5)
    features = spectrum if family == "textures" else small
    known = np.concatenate([features(images) for images in sample(family, 60, 1, classes)])
    queries = np.concatenate([features(images) for images in sample(family, 30, 2, classes)])
    distances = ((queries[:, None] - known[None]) ** 2).sum(axis=-1)  # (150, 300)
    guesses = distances.argmin(axis=1) // 60
    accuracy = (guesses == np.repeat(np.arange(5), 30)).mean()
    assert accuracy > 0.35, f"{family} {classes}: 1-NN accuracy {accuracy:.2f}, chance 0.20"


def spectrum(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Strength by frequency, since textures are shifted at random: (count, 16 * 9)."""
    grey = images.astype(np.float64).mean(axis=-1)
    strength = np.abs(np.fft.rfft2(grey - grey.mean(axis=(1, 2), keepdims=True)))
    low = np.concatenate([strength[:, :8, :9], strength[:, -8:, :9]], axis=1).reshape(len(images), -1)
    return unit(low)


@pytest.mark.slow
@every_family
def test_normalization_matches_the_images(family: str) -> None:
    pixels = np.concatenate(sample(family, 60, 5)).reshape(-1, 3).astype(np.float64)
    mean, deviation = NORMALIZATION[family]
    np.testing.assert_allclose(pixels.mean(axis=0), mean, atol=8)
    np.testing.assert_allclose(pixels.std(axis=0), deviation, atol=6)


def test_unknown_families_and_classes() -> None:
    with pytest.raises(ValueError, match="no family 'cats'; choose one of digits"):
        draw("cats", 0, 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="class_index is -1"):
        draw("digits", -1, 1, np.random.default_rng(0))


def test_a_filled_square_covers_its_area_and_a_hole_is_subtracted() -> None:
    square = canvas.ring([(4.25, 8.0), (12.25, 8.0), (12.25, 20.5), (4.25, 20.5)])
    inner = canvas.hole(canvas.ring(canvas.box(6.0, 10.0, 8.0, 14.0)))
    coverage = canvas.fill(np.stack([square, square]))
    np.testing.assert_allclose(coverage.sum(axis=(1, 2)), 8 * 12.5, rtol=1e-5)
    assert coverage[0, 10, 4] == pytest.approx(0.75)
    assert coverage[0, 20, 6] == pytest.approx(0.5)
    cut = canvas.fill(np.concatenate([square, inner])[None])
    assert cut.sum() == pytest.approx(8 * 12.5 - 2 * 4, rel=1e-5)


def test_a_stroke_is_as_wide_as_its_pen() -> None:
    line = canvas.pen([(-10.0, 16.0), (42.0, 16.0)])[None]
    coverage = canvas.stroke(line, np.array([4.0], dtype=np.float32))
    np.testing.assert_allclose(coverage[0].sum(axis=0), 4.0, atol=1e-4)
    dot = canvas.pen([(16.0, 16.0)] * 2)[None]
    area = canvas.stroke(dot, np.array([10.0], dtype=np.float32)).sum()
    assert area == pytest.approx(np.pi * 25, rel=0.02)
