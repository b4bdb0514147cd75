"""Image files of users: decode, find in folders and tables, resize once and store in the cache.

    FOLDER/CLIENT/TASK/CLASS/image.png         or, split already,    FOLDER/CLIENT/TASK/train/CLASS/image.png
    TABLE.csv with the columns path, client, task and label, and optionally group and split

A folder below a class is a group: its images (of one patient, of one track) stay in one split. Paths in a table are
relative to the folder of the table. A pack in the cache is named by a hash of the files' names, sizes and times, so
that changed files are read again.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.data import cache
from weft.errors import WeftError
from weft.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

SIDE = 32
MAX_PIXELS = 50_000_000  # of one image: a photo has a tenth of it
MAX_FILE_BYTES = 100_000_000  # of one image file
SUFFIXES = (".png", ".jpg", ".jpeg", ".ppm", ".bmp", ".gif", ".webp", ".tif", ".tiff")
# Only these decoders may run: Pillow starts Ghostscript for EPS data, whatever the name of the file
FORMATS = ("PNG", "JPEG", "PPM", "BMP", "GIF", "WEBP", "TIFF")
SPLITS = ("train", "valid", "test")
COLUMNS = ("path", "client", "task", "label")
VERSION = 2  # of the arrays in a pack
TEXTS = ("client", "task", "label", "group", "split")
KEYS = ("x", *TEXTS, "digest", "sums", "squares", "broken", "highest")


class ImageError(ValueError):
    """An image that cannot be used; the text is the reason, in one line."""


# ---- decoding --------------------------------------------------------------------------------------------------------


def read_image(path: Path, side: int, bits: int) -> NDArray[np.uint8]:
    """An image file in color, (side, side, 3), as it is read for training."""
    try:
        return decode(read_bytes(path), side, bits)[0]
    except ImageError as error:
        raise WeftError(f"{path} cannot be read as an image: {error}") from None


def read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ImageError(f"more than {MAX_FILE_BYTES:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ImageError(error.strerror or type(error).__name__) from None


def decode(blob: bytes, side: int, bits: int) -> tuple[NDArray[np.uint8], int]:
    """Decode any supported file as `from_pillow` does."""
    return from_pillow(_open(blob), side, bits)


def decode_plain(blob: bytes, side: int | None, mode: str) -> NDArray[np.uint8]:
    """Decode an image of 8 bits without rotation; resized if `side` is given."""
    with _decoder_errors():
        return _resize(_open(blob).convert(mode), side)


def from_pillow(image: Image, side: int, bits: int) -> tuple[NDArray[np.uint8], int]:
    """A Pillow image in color, upright and resized, and its highest value if it has more than 8 bits (else 0).

    For images of more than 8 bits 2 ** bits - 1 and all higher values become 255.
    """
    from PIL import Image, ImageOps

    highest = 0
    with _decoder_errors():
        image = ImageOps.exif_transpose(image)
        if image.mode == "F":
            raise ImageError("its pixels are floating-point numbers; save it with 8 or 16 bits")
        if image.mode.startswith("I"):
            values = np.asarray(image).astype(np.int64)
            highest = max(int(values.max()), 1)
            image = Image.fromarray(_to_bytes(values, bits))
        return _resize(image.convert("RGB"), side), highest


def from_values(values: NDArray[Any], side: int, bits: int) -> NDArray[np.uint8]:
    """An image from an array: uint8, uint16 or floats from 0 to 1; grayscale or color, channels first or last."""
    from PIL import Image

    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3, 4):
        values = values.transpose(1, 2, 0)  # (channels, height, width) -> (height, width, channels)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))) or not values.size:
        raise ImageError(f"its shape is {values.shape}; use (height, width), with 3 channels if it is in color")
    if values.dtype.kind == "f":
        if not (values.min() >= 0 and values.max() <= 1):  # also refuses nan
            raise ImageError(f"its values are from {values.min():g} to {values.max():g}; floats must be from 0 to 1")
        values = (values * 255).round().astype(np.uint8)
    elif values.dtype.kind == "b":
        values = values.astype(np.uint8) * 255
    elif values.dtype == np.uint16:
        values = _to_bytes(values.astype(np.int64), bits)
    elif values.dtype != np.uint8:  # 200 may be nearly white or nearly black
        raise ImageError(f"its values are {values.dtype}; use uint8, uint16, or floats from 0 to 1")
    return _resize(Image.fromarray(np.ascontiguousarray(values)).convert("RGB"), side)


@contextlib.contextmanager
def _decoder_errors() -> Iterator[None]:
    """Turn whatever a decoder raises on a damaged file into an ImageError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a file is either read or refused
        try:
            yield
        except ImageError:
            raise
        except Exception as error:
            raise ImageError((str(error).splitlines() or [type(error).__name__])[0]) from None


def _open(blob: bytes) -> Image:
    from PIL import Image, UnidentifiedImageError

    with _decoder_errors():
        try:
            with Image.open(io.BytesIO(blob), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ImageError(f"{image.width} x {image.height} pixels are too many")
                image.load()
                return image
        except UnidentifiedImageError:  # its text names an object in memory
            if _is_dicom(blob):
                raise ImageError("a DICOM file; export it to PNG first") from None
            raise ImageError(f"not a {', '.join(FORMATS)} file" if blob else "the file is empty") from None


def _to_bytes(values: NDArray[np.int64], bits: int) -> NDArray[np.uint8]:
    white = 2**bits - 1
    return np.asarray(values.clip(0, white) * 255 // white, dtype=np.uint8)


def _resize(image: Image, side: int | None) -> NDArray[np.uint8]:
    from PIL.Image import Resampling

    if side is not None and image.size != (side, side):
        image = image.resize((side, side), Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8)


def _is_dicom(start: bytes) -> bool:
    return start[128:132] == b"DICM"


# ---- finding ---------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One image file; `group` and `split` may be empty."""

    file: Path
    client: str
    task: str
    label: str
    group: str
    split: str


def natural(name: str) -> tuple[Any, ...]:
    """A sort key that compares numbers within names by their values.

    >>> sorted(["site10", "site9", "Site2"], key=natural)
    ['Site2', 'site9', 'site10']
    """
    pieces = [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in re.split(r"(\d+)", name.lower())]
    return (*pieces, name)


def find(path: Path) -> list[Row]:
    """List the images of a folder or a table without opening them."""
    if path.is_dir():
        layout = f"CLIENT/TASK/CLASS/image.png below {path}"
        tasks = [(client.name, task) for client in _folders(path) for task in _folders(client)]
        rows = [row for client, task in tasks for row in _find_in_task(client, task, layout)]
        if not rows:
            raise WeftError(f"{path} has no images; put them into {layout}")
    elif path.is_file():
        rows = list(_find_in_table(path))
        if not rows:
            raise WeftError(f"{path} has no lines below its header {','.join(COLUMNS)}")
    else:
        raise WeftError(f"{path} does not exist; set scenario.path to a folder of images or a table")
    return rows


def find_task(folder: Path) -> list[Row]:
    """List the images of one task, in CLASS/image.png or CLASS/GROUP/image.png, without opening them."""
    if not folder.is_dir():
        raise WeftError(f"{folder} is not a folder; name one with a subfolder of images per class")
    layout = f"CLASS/image.png below {folder}"
    rows = list(_find_in_task("", folder, layout))
    if not rows and (dicom := other_files(folder)[1]):
        raise WeftError(
            f"{folder} has no images but {len(dicom)} DICOM file{'s' if len(dicom) > 1 else ''}, such as {dicom[0]}; "
            "export them to PNG first, with 16 bits if they have more than 8"
        )
    if not rows:
        raise WeftError(f"{folder} has no images; put them into {layout}")
    return rows


def empty_classes(folder: Path) -> list[str]:
    """Class folders of a task that have no image."""
    below = _folders(folder)
    parents = below if below and all(each.name in SPLITS for each in below) else [folder]
    labels = [label for parent in parents for label in _folders(parent)]
    return [str(label.relative_to(folder)) for label in labels if not any(map(_is_image, label.rglob("*")))]


def other_files(folder: Path) -> tuple[list[str], list[str]]:
    """Files below a folder that have no image suffix, and the DICOM files among them."""
    others, dicom = [], []
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if _is_image(file) or any(piece.startswith(".") for piece in name.parts) or not file.is_file():
            continue
        others.append(str(name))
        with contextlib.suppress(OSError):
            if file.suffix.lower() in (".dcm", ".dicom"):
                dicom.append(str(name))
            else:
                with file.open("rb") as opened:  # DICOM files often have no suffix
                    dicom += [str(name)] if _is_dicom(opened.read(132)) else []
    return others, dicom


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def _find_in_task(client: str, task: Path, layout: str) -> Iterator[Row]:
    below = _folders(task)
    names = {each.name for each in below}
    is_split = bool(names & {"train", "test"}) and names <= set(SPLITS)
    for parent in below if is_split else [task]:
        for label in _folders(parent):
            for file in sorted(label.rglob("*")):
                # a broken link is kept here, and reported as a file that cannot be read
                if _is_image(file) and not file.name.startswith(".") and not file.is_dir():
                    within = file.relative_to(label).parts
                    group = within[0] if len(within) > 1 else ""
                    yield Row(file, client, task.name, label.name, group, parent.name if is_split else "")
        if stray := next(filter(_is_image, sorted(parent.iterdir())), None):
            raise WeftError(f"{stray} is not in the folder of a class; put images into {layout}")


def _folders(parent: Path) -> list[Path]:
    try:
        found = [path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        raise WeftError(f"{parent} cannot be read: {error.strerror}") from None
    return sorted(found, key=lambda path: natural(path.name))


def _find_in_table(table: Path) -> Iterator[Row]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise WeftError(f"{table} has no column {missing[0]!r}; its header must have {','.join(COLUMNS)}")
            for number, line in enumerate(reader, start=2):
                if empty := next((column for column in COLUMNS if not (line[column] or "").strip()), None):
                    raise WeftError(f"line {number} of {table} has no {empty}")
                path, client, task, label = (line[column].strip() for column in COLUMNS)
                group, split = ((line.get(column) or "").strip() for column in ("group", "split"))
                if split.lower() not in ("", *SPLITS):
                    raise WeftError(f"line {number} of {table} has the split {split!r}; use {', '.join(SPLITS)}")
                yield Row(table.parent / path, client, task, label, group, split.lower())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WeftError(f"{table} cannot be read as a CSV table: {error}") from None


# ---- packing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserImages:
    """All images that could be read, in the order of their rows, and what is known of each."""

    x: NDArray[np.uint8]  # (count, 32, 32, 3)
    client: NDArray[np.str_]
    task: NDArray[np.str_]
    label: NDArray[np.str_]
    group: NDArray[np.str_]
    split: NDArray[np.str_]
    digest: NDArray[np.str_]  # of each image's pixels
    sums: NDArray[np.int64]  # (count, 3), of each image's pixels per channel
    squares: NDArray[np.int64]
    broken: NDArray[np.str_]  # files that cannot be read, each with the reason
    highest: NDArray[np.int64]  # the highest value of all images of more than 8 bits; 0: there are none


def load(path: Path, bits: int) -> UserImages:
    """The images of a folder or table, from the cache if they were packed and have not changed since."""
    rows = find(path)
    key = hashlib.blake2b(repr((VERSION, SIDE, bits, str(path.resolve()))).encode(), digest_size=12)
    for row in rows:
        try:
            facts = row.file.stat()
        except OSError:
            raise WeftError(f"the image {row.file}, listed in {path}, does not exist") from None
        key.update(repr((row[1:], str(row.file), facts.st_size, facts.st_mtime_ns)).encode())
    return _load(path, bits, key.hexdigest(), tuple(rows))


@functools.lru_cache(maxsize=2)
def _load(path: Path, bits: int, key: str, rows: tuple[Row, ...]) -> UserImages:
    packed = cache.folder() / "own" / f"{key}.npz"
    try:
        return UserImages(**cache.read_arrays(packed, KEYS))
    except ValueError:  # missing, or damaged: it is only a copy
        cache.write(None, f"own/{key}", pack(path, bits, rows), private=True)
        return UserImages(**cache.read_arrays(packed, KEYS))


def pack(path: Path, bits: int, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """The fields of `UserImages`: every image is read and resized."""
    images: list[NDArray[np.uint8]] = []
    good: list[Row] = []
    broken: list[str] = []
    highest = 0
    for row in rows:
        try:
            image, top = decode(read_bytes(row.file), SIDE, bits)
        except ImageError as error:
            broken.append(f"{row.file} ({error})")
            continue
        images.append(image)
        good.append(row)
        highest = max(highest, top)
    if not images:
        raise WeftError(f"none of the {len(rows)} images of {path} can be read, such as {broken[0]}")
    x = np.stack(images)
    texts = {key: np.array([getattr(row, key) for row in good], dtype=np.str_) for key in TEXTS}
    sums, squares = channel_sums(x)
    rest = {"broken": np.array(broken, dtype=np.str_), "highest": np.array([highest])}
    return {"x": x, **texts, "digest": digests(x), "sums": sums, "squares": squares, **rest}


def digests(images: NDArray[np.uint8]) -> NDArray[np.str_]:
    return np.array([hashlib.blake2b(image.tobytes(), digest_size=8).hexdigest() for image in images], dtype=np.str_)


def channel_sums(images: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sums of the values and of their squares per image and channel, (count, channels) each."""
    found = [(image.sum((0, 1), dtype=np.int64), (image.astype(np.int64) ** 2).sum((0, 1))) for image in images]
    return np.array([one for one, _ in found]), np.array([other for _, other in found])
