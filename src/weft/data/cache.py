"""The cache: a folder with one NAME.npz for each dataset. A scenario reads it; `weft data get` writes it.

    x      uint8 images, (count, 32, 32, 3), or (count, 28, 28) for the grey sets
    y      int16 classes from 0            split   uint8, 0 for the set's own train images and 1 for its test images
    names  of the classes, if they have any
    coarse_of_fine, coarse_names    cifar100: the 20 superclasses
    track                           traffic_signs: frames of one sign share a track within a class, -1 if unknown
    mean, deviation                 facescrub: by channel, for there is no table of them

Images are mapped, not read: the workers of a machine share them, and a task touches its own pages alone.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.data.sources import NORMALISATION, SOURCES, Channels, source_of
from weft.errors import WeftError
from weft.lazy import lazy, np

if TYPE_CHECKING:
    from numpy.lib import format as npy
    from numpy.typing import NDArray
else:
    npy = lazy("numpy.lib.format")

EXTRAS = {
    "cifar100": ("coarse_of_fine", "coarse_names"),
    "traffic_signs": ("track",),
    "facescrub": ("mean", "deviation"),
}
OPTIONAL = ("names",)
LOCAL_HEADER = 30  # bytes of a zip's local header before the name


@dataclass(frozen=True)
class Dataset:
    name: str
    x: NDArray[np.uint8]
    y: NDArray[np.int16]
    split: NDArray[np.uint8]
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def class_name(self, index: int) -> str:
        names = self.extra.get("names")
        return str(names[index]) if names is not None else str(index)

    def images(self, chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Some of its images in colour, (count, 32, 32, 3): grey ones are padded to 32 and repeated to 3 channels."""
        return in_colour(self.x[chosen])

    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if self.name in NORMALISATION:
            return NORMALISATION[self.name]
        mean, deviation = (tuple(map(float, self.extra[key])) for key in ("mean", "deviation"))
        return mean, deviation


def in_colour(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    if images.ndim == 4:
        return images
    rows, columns = ((32 - side) // 2 for side in images.shape[1:])
    padded = np.pad(images, ((0, 0), (rows, rows), (columns, columns)))
    return np.repeat(padded[..., None], 3, axis=-1)  # (count, 32, 32) -> (count, 32, 32, 3)


def measure(images: NDArray[np.uint8]) -> tuple[Channels, Channels]:
    """Mean and deviation by channel, in 0..255; of grey images after padding."""
    total, square, count = np.zeros(3), np.zeros(3), 0
    for start in range(0, len(images), 1000):  # as floats a whole set would take gigabytes
        pixels = in_colour(images[start : start + 1000]).reshape(-1, 3).astype(np.float64)
        total, square, count = total + pixels.sum(0), square + (pixels**2).sum(0), count + len(pixels)
    mean, deviation = mean_and_deviation(total, square, count)
    return (mean[0], mean[1], mean[2]), (deviation[0], deviation[1], deviation[2])


def mean_and_deviation(
    total: NDArray[Any], square: NDArray[Any], count: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """By channel, out of the sums of so many pixels and of their squares; never 0, for it is divided by."""
    mean = total / count
    deviation = np.sqrt(np.maximum(square / count - mean**2, 1e-6))
    return tuple(map(float, mean)), tuple(map(float, deviation))


def folder(given: Path | None = None) -> Path:
    """Where the cache is: as given (--data-dir), else WEFT_DATA, else where this system keeps such things."""
    named = given or os.environ.get("WEFT_DATA")
    if not named:
        import pooch

        return Path(pooch.os_cache("weft"))
    place = Path(named).expanduser()
    if place.exists() and not place.is_dir():
        raise WeftError(f"{place} is not a folder; WEFT_DATA or --data-dir names the one with the datasets")
    return place


def there(given: Path | None = None) -> list[str]:
    """The datasets that the cache holds."""
    place = folder(given)
    return [name for name in SOURCES if (place / f"{name}.npz").is_file()]


def load(name: str, given: Path | None = None) -> Dataset:
    path = folder(given) / f"{source_of(name).name}.npz"
    try:
        changed = path.stat().st_mtime_ns
    except OSError:
        raise WeftError(missing(name, path)) from None
    return _load(name, path.absolute(), changed)


def fingerprint(name: str, given: Path | None = None) -> str:
    """Which images these are: a hash of the checksums that the zip's index has of the arrays that are read.

    It costs one read of the index, whatever the size of the file, and is the same wherever and whenever it was packed.
    """
    path = folder(given) / f"{source_of(name).name}.npz"
    read = {f"{key}.npy" for key in ("x", "y", "split", *EXTRAS.get(name, ()), *OPTIONAL)}
    try:
        with zipfile.ZipFile(path) as archive:
            marks = sorted((one.filename, one.CRC, one.file_size) for one in archive.infolist() if one.filename in read)
    except FileNotFoundError:
        raise WeftError(missing(name, path)) from None
    except (OSError, zipfile.BadZipFile) as error:
        raise WeftError(damaged(name, path, error)) from None
    return hashlib.sha256(repr(marks).encode()).hexdigest()[:16]


def missing(name: str, path: Path) -> str:
    command = f"weft data get {name}"
    if not SOURCES[name].files:
        command = f"it has no public home: scenario=noniid-35 tasks=7 does without it, or {command} --from FOLDER"
    return f"the dataset {name} is not there ({path}); {command} brings it, and WEFT_DATA or --data-dir names the cache"


@functools.lru_cache(maxsize=2 * len(SOURCES))
def _load(name: str, path: Path, changed: int) -> Dataset:  # `changed`: a file that was replaced is another one
    try:
        with zipfile.ZipFile(path) as archive:
            there = {member.removesuffix(".npy") for member in archive.namelist()}
            wanted = ("x", "y", "split", *EXTRAS.get(name, ()))
            if absent := [key for key in wanted if key not in there]:
                raise ValueError(f"it has no {absent[0]}")
            arrays = {key: _array(archive, path, key) for key in (*wanted, *OPTIONAL) if key in there}
        dataset = Dataset(name, arrays.pop("x"), arrays.pop("y"), arrays.pop("split"), arrays)
        _check(dataset)
    except (OSError, ValueError, EOFError, KeyError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise WeftError(damaged(name, path, error)) from None
    return dataset


def damaged(name: str, path: Path, error: object) -> str:
    command = f"weft data get {name} --force" + ("" if SOURCES[name].files else " --from FOLDER")
    return f"{path} is damaged ({error}); {command} makes it anew"


def _check(dataset: Dataset) -> None:
    x, y, split = dataset.x, dataset.y, dataset.split
    if x.dtype != np.uint8 or x.shape[1:] not in ((32, 32, 3), (28, 28)):
        raise ValueError(f"x is {x.dtype} {x.shape}")
    if y.dtype.kind not in "iu" or y.shape != (len(x),) or split.shape != (len(x),) or not len(x):
        raise ValueError("y and split do not have one value for each image")
    if y.min() < 0:
        raise ValueError("y has classes below 0")
    names = dataset.extra.get("names")
    if names is not None and len(names) < dataset.classes:
        raise ValueError(f"{len(names)} names for {dataset.classes} classes")
    if "track" in dataset.extra and dataset.extra["track"].shape != y.shape:
        raise ValueError("track does not have one value for each image")
    if "coarse_of_fine" in dataset.extra and len(dataset.extra["coarse_of_fine"]) < dataset.classes:
        raise ValueError("coarse_of_fine does not have one value for each class")


def read_arrays(path: Path, keys: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Arrays of an .npz, `x` mapped; OSError, ValueError, KeyError or BadZipFile if it is damaged."""
    with zipfile.ZipFile(path) as archive:
        return {key: _array(archive, path, key) for key in keys}


def _array(archive: zipfile.ZipFile, path: Path, key: str) -> NDArray[Any]:
    """An array of an .npz: mapped if it lies there as it is, read if it is compressed. Never an object."""
    info = archive.getinfo(f"{key}.npy")
    if key != "x" or info.compress_type != zipfile.ZIP_STORED:
        with archive.open(info) as file:
            return np.asarray(npy.read_array(file, allow_pickle=False))
    with path.open("rb") as raw:
        raw.seek(info.header_offset)
        header = raw.read(LOCAL_HEADER)
        name, extra = struct.unpack("<HH", header[26:30])
        raw.seek(info.header_offset + LOCAL_HEADER + name + extra)
        version = npy.read_magic(raw)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(raw)
        if dtype.hasobject:
            raise ValueError("it holds objects, which are not read")
        return np.memmap(path, dtype, "r", raw.tell(), shape, "F" if fortran else "C")


def write(given: Path | None, name: str, arrays: Mapping[str, NDArray[Any]]) -> Path:
    """Pack a dataset into the cache; the file is there whole or not at all."""
    path = folder(given) / f"{name}.npz"
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **dict(arrays))
        partial.replace(path)
    except OSError as error:
        raise WeftError(f"{path} cannot be written ({error.strerror}); choose another place with --data-dir") from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def verify(name: str, given: Path | None = None) -> str | None:
    """What is wrong with a packed dataset: nothing, or a line that says what helps. Every byte of it is read."""
    path = folder(given) / f"{name}.npz"
    try:
        load(name, given)
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except WeftError as problem:
        return str(problem)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        return damaged(name, path, error)
    return damaged(name, path, f"{bad} in it fails its checksum") if bad else None
