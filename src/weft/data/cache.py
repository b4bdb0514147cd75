"""The cache: a folder with one NAME.npz per dataset, written by `weft data get` and read by scenarios.

    x      uint8 images, (count, 32, 32, 3), or (count, 28, 28) for grayscale datasets
    y      int16 classes from 0            split   uint8, 0 for the dataset's train images and 1 for its test images
    names  class names, if there are any
    coarse_of_fine, coarse_names    cifar100: the 20 superclasses
    track                           traffic_signs: frames of one sign share a track within a class, -1 if unknown
    mean, deviation                 facescrub: per channel, since no published values exist

Images are memory-mapped: all workers of a machine share them, and a task reads only the pages that it needs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft import files
from weft.data.sources import NORMALIZATION, SOURCES, Channels, source_of
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

    def images(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Selected images in color, (count, 32, 32, 3)."""
        return to_color(self.x[indices])

    def normalization(self) -> tuple[Channels, Channels]:
        if self.name in NORMALIZATION:
            return NORMALIZATION[self.name]
        return tuple(map(float, self.extra["mean"])), tuple(map(float, self.extra["deviation"]))


def to_color(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pad grayscale images to 32x32 and repeat them to three channels; color images stay as they are."""
    if images.ndim == 4:
        return images
    rows, columns = ((32 - side) // 2 for side in images.shape[1:])
    padded = np.pad(images, ((0, 0), (rows, rows), (columns, columns)))
    return np.repeat(padded[..., None], 3, axis=-1)  # (count, 32, 32) -> (count, 32, 32, 3)


def measure(images: NDArray[np.uint8]) -> tuple[Channels, Channels]:
    """Mean and deviation per channel, in 0..255; of grayscale images after padding."""
    total, square, count = np.zeros(3), np.zeros(3), 0
    for start in range(0, len(images), 1000):  # as floats a whole dataset would take gigabytes
        pixels = to_color(images[start : start + 1000]).reshape(-1, 3).astype(np.float64)
        total, square, count = total + pixels.sum(0), square + (pixels**2).sum(0), count + len(pixels)
    return mean_and_deviation(total, square, count)


def mean_and_deviation(total: NDArray[Any], square: NDArray[Any], count: int) -> tuple[Channels, Channels]:
    """Mean and deviation per channel from sums over `count` pixels; the deviation is a divisor, so never 0."""
    mean = total / count
    deviation = np.sqrt(np.maximum(square / count - mean**2, 1e-6))
    return tuple(map(float, mean)), tuple(map(float, deviation))


def folder(data_dir: Path | None = None) -> Path:
    """The folder of the cache: --data-dir if given, else WEFT_DATA, else the cache folder of the system."""
    chosen = data_dir or os.environ.get("WEFT_DATA")
    if not chosen:
        import pooch

        return Path(pooch.os_cache("weft"))
    path = Path(chosen).expanduser()
    if path.exists() and not path.is_dir():
        raise WeftError(f"{path} is not a folder; set WEFT_DATA or --data-dir to the folder of the datasets")
    return path


def path_of(name: str, data_dir: Path | None = None) -> Path:
    return folder(data_dir) / f"{source_of(name).name}.npz"


def available(data_dir: Path | None = None) -> list[str]:
    """Names of the datasets in the cache."""
    return [name for name in SOURCES if path_of(name, data_dir).is_file()]


def load(name: str, data_dir: Path | None = None) -> Dataset:
    path = path_of(name, data_dir)
    if not path.is_file():
        raise _missing(name, path)
    return _load(name, path.absolute(), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2 * len(SOURCES))
def _load(name: str, path: Path, changed: int) -> Dataset:  # `changed`: a file that was replaced is loaded again
    try:
        arrays = read_arrays(path, ("x", "y", "split", *EXTRAS.get(name, ())), OPTIONAL)
        dataset = Dataset(name, arrays.pop("x"), arrays.pop("y"), arrays.pop("split"), arrays)
        _check(dataset)
    except ValueError as error:
        raise _damaged(name, path, error) from None
    return dataset


def fingerprint(name: str, data_dir: Path | None = None) -> str:
    """Identify the images of a dataset: a hash of the CRCs that the zip index stores for the arrays that are used.

    This reads only the index, whatever the size of the file, and does not depend on where and when it was packed.
    """
    path = path_of(name, data_dir)
    used = {f"{key}.npy" for key in ("x", "y", "split", *EXTRAS.get(name, ()), *OPTIONAL)}
    try:
        with zipfile.ZipFile(path) as archive:
            index = sorted((one.filename, one.CRC, one.file_size) for one in archive.infolist() if one.filename in used)
    except FileNotFoundError:
        raise _missing(name, path) from None
    except (OSError, zipfile.BadZipFile) as error:
        raise _damaged(name, path, error) from None
    return hashlib.sha256(repr(index).encode()).hexdigest()[:16]


def verify(name: str, data_dir: Path | None = None) -> str | None:
    """Read every byte of a dataset; returns an error message that names the remedy, or None."""
    path = path_of(name, data_dir)
    try:
        load(name, data_dir)
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except WeftError as error:
        return str(error)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        return str(_damaged(name, path, error))
    return str(_damaged(name, path, f"wrong checksum of {bad}")) if bad else None


def _missing(name: str, path: Path) -> WeftError:
    remedy = f"run weft data get {name}"
    if not SOURCES[name].files:
        remedy = f"it has no public source: use scenario=noniid-35 tasks=7, or {remedy} --from FOLDER"
    return WeftError(f"dataset {name} is not in the cache ({path}); {remedy}, or set WEFT_DATA or --data-dir")


def _damaged(name: str, path: Path, error: object) -> WeftError:
    command = f"weft data get {name} --force" + ("" if SOURCES[name].files else " --from FOLDER")
    return WeftError(f"{path} is damaged ({error}); run {command}")


def _check(dataset: Dataset) -> None:
    x, y, split = dataset.x, dataset.y, dataset.split
    if x.dtype != np.uint8 or x.shape[1:] not in ((32, 32, 3), (28, 28)):
        raise ValueError(f"x is {x.dtype} {x.shape}")
    if y.dtype.kind not in "iu" or y.shape != (len(x),) or split.shape != (len(x),) or not len(x):
        raise ValueError("y and split do not have one value per image")
    if y.min() < 0:
        raise ValueError("y has classes below 0")
    for key in ("names", "coarse_of_fine"):
        if key in dataset.extra and len(dataset.extra[key]) < dataset.classes:
            raise ValueError(f"{key} has {len(dataset.extra[key])} values for {dataset.classes} classes")
    if "track" in dataset.extra and dataset.extra["track"].shape != y.shape:
        raise ValueError("track does not have one value per image")


def read_arrays(path: Path, keys: Iterable[str], optional: Iterable[str] = ()) -> dict[str, NDArray[Any]]:
    """Arrays of an .npz, `x` memory-mapped; ValueError if the file is missing or damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {key: _read_array(archive, path, key) for key in keys}
            present = archive.namelist()
            return found | {key: _read_array(archive, path, key) for key in optional if f"{key}.npy" in present}
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None
    except (OSError, EOFError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error)) from None


def _read_array(archive: zipfile.ZipFile, path: Path, key: str) -> NDArray[Any]:
    """An array of an .npz: memory-mapped if it is `x` and not compressed, else read. Object arrays are refused."""
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
            raise ValueError("Object arrays are refused")
        return np.memmap(path, dtype, "r", raw.tell(), shape, "F" if fortran else "C")


def write(data_dir: Path | None, name: str, arrays: Mapping[str, NDArray[Any]], private: bool = False) -> Path:
    """Write NAME.npz. `private`: only the user can read the file and its folder."""
    path = folder(data_dir) / f"{name}.npz"
    with atomic_file(path, private) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **dict(arrays))
    return path


@contextlib.contextmanager
def atomic_file(path: Path, private: bool = False) -> Iterator[Path]:
    """Create the folder of a file, then yield a temporary file that replaces it at the end of the block."""
    with files.atomic_file(path, "choose another folder with --data-dir") as partial:
        path.parent.mkdir(0o700 if private else 0o777, parents=True, exist_ok=True)
        if private:
            path.parent.chmod(0o700)
        partial.touch(0o600 if private else 0o666)
        yield partial
