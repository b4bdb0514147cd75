"""Readers of the sets that come as picture files, in folders, tars and zips. Members are read, never extracted."""

from __future__ import annotations

import io
import re
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.data.readers import MOST_MEMBERS, Damaged, Images, Labels
from weft.errors import WeftError

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 32
MOST_PIXELS = 50_000_000  # of one picture: a photo has a tenth of it
MOST_FILE_BYTES = 100_000_000  # of one picture's file
SUFFIXES = (".png", ".jpg", ".jpeg", ".ppm", ".bmp", ".gif", ".webp", ".tif", ".tiff")
BAD_PICTURE = (OSError, SyntaxError, ValueError, EOFError, zlib.error)  # what Pillow raises on files that are none


def picture(blob: bytes, side: int | None, mode: str) -> Images:
    """One picture as an array; resized if a side is given."""
    return _resized(_opened(blob).convert(mode), side)


def own_picture(blob: bytes, side: int, bits: int) -> tuple[Images, int]:
    """Any picture file in colour, upright and resized, and the highest value of one that is deeper than 8 bits."""
    return from_pillow(_opened(blob), side, bits)


def from_pillow(image: Image, side: int, bits: int) -> tuple[Images, int]:
    """Any of Pillow's images in colour, upright and resized, and its highest value if deeper than 8 bits (else 0).

    Of a deep picture 2 ** bits - 1 becomes 255, and what is above it too.
    """
    from PIL import Image, ImageOps

    image, highest = ImageOps.exif_transpose(image), 0
    if image.mode == "F":
        raise ValueError("its pixels are floating numbers; save it with 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        highest = max(int(values.max()), 1)
        image = Image.fromarray(_to_bytes(values, bits))
    return _resized(image.convert("RGB"), side), highest


def from_values(values: NDArray[Any], side: int, bits: int) -> Images:
    """A picture from its values: uint8, uint16 or floats from 0 to 1; grey or in colour, channels anywhere."""
    from PIL import Image

    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[2] not in (1, 3, 4):
        values = values.transpose(1, 2, 0)  # (channels, height, width) -> (height, width, channels)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if not (values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))) or not values.size:
        raise ValueError(f"its shape is {values.shape}; wanted is (height, width), with 3 channels if it is in colour")
    if values.dtype.kind == "f":
        if not (values.min() >= 0 and values.max() <= 1):  # not a number is not either
            raise ValueError(f"its values go from {values.min():g} to {values.max():g}; floats go from 0 to 1")
        values = (values * 255).round().astype(np.uint8)
    elif values.dtype.kind == "b":
        values = values.astype(np.uint8) * 255
    elif values.dtype == np.uint16:
        values = _to_bytes(values.astype(np.int64), bits)
    elif values.dtype != np.uint8:  # 200 may be nearly white or nearly black
        raise ValueError(f"its values are {values.dtype}; give uint8, uint16, or floats from 0 to 1")
    return _resized(Image.fromarray(np.ascontiguousarray(values)).convert("RGB"), side)


def _to_bytes(values: NDArray[np.int64], bits: int) -> Images:
    white = 2**bits - 1
    return np.asarray(values.clip(0, white) * 255 // white, dtype=np.uint8)


def is_dicom(start: bytes) -> bool:
    """By the first bytes of a file: DICOM's often have no suffix."""
    return start[128:132] == b"DICM"


def _what_it_is(blob: bytes) -> str:
    """Of bytes that are no picture."""
    if is_dicom(blob):
        return "a DICOM file; export it to PNG first"
    return "of another kind than its name says" if blob else "empty"


def _opened(blob: bytes) -> Image:
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it grumbles about is either read or refused below
        try:
            with Image.open(io.BytesIO(blob)) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels are too many")
                image.load()
                return image
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from None
        except UnidentifiedImageError:  # Pillow's words name an object in memory
            raise ValueError(_what_it_is(blob)) from None


def _resized(image: Image, side: int | None) -> Images:
    from PIL.Image import Resampling

    if side is not None and image.size != (side, side):
        image = image.resize((side, side), Resampling.BILINEAR)
    return np.asarray(image, dtype=np.uint8)


def read_letters(path: Path) -> tuple[Images, Labels, list[str], int]:
    """notMNIST: a tar of folders A to J with 28x28 grey PNGs. Also how many of them were broken and left out."""
    images, labels, broken = [], [], 0
    try:
        with tarfile.open(path) as archive:
            for place, info in enumerate(archive):
                if place > MOST_MEMBERS:
                    raise Damaged(f"it has more than {MOST_MEMBERS} members")
                found = re.search(r"(?:^|/)([A-J])/[^/.][^/]*\.png$", info.name)
                if not found or not info.isfile() or info.size > MOST_FILE_BYTES:
                    continue
                file = archive.extractfile(info)
                assert file is not None
                try:
                    image = picture(file.read(), None, "L")
                except BAD_PICTURE:
                    broken += 1
                    continue
                if image.shape != (28, 28):
                    raise Damaged(f"{info.name} in it is no picture of 28x28")
                images.append(image)
                labels.append(ord(found[1]) - ord("A"))
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise Damaged(str(error)) from None
    if not images:
        raise Damaged("there are no folders A to J of pictures in it")
    return np.stack(images), np.array(labels, dtype=np.int16), list("ABCDEFGHIJ"), broken


def read_signs(path: Path) -> tuple[Images, Labels, Labels]:
    """GTSRB's training images: a zip of folders 00000 to 00042 with TRACK_FRAME.ppm; tracks count within a class."""
    images, labels, tracks = [], [], []
    for name, blob in _zipped(path, r"(?:^|/)\d{5}/\d{5}_\d{5}\.ppm$"):
        folder, file = name.split("/")[-2:]
        images.append(_sign(name, blob))
        labels.append(int(folder))
        tracks.append(int(file.split("_")[0]))
    if not images:
        raise Damaged("there are no pictures CLASS/TRACK_FRAME.ppm in it")
    return np.stack(images), np.array(labels, dtype=np.int16), np.array(tracks, dtype=np.int16)


def read_test_signs(pictures: Path, answers: Path) -> tuple[Images, Labels]:
    """GTSRB's test images: a zip of NUMBER.ppm, and another with a table of their classes."""
    (table,) = [blob for _, blob in _zipped(answers, r"(?:^|/)GT-final_test\.csv$")] or [b""]
    lines = [line.split(";") for line in table.decode("ascii", "replace").split()]
    try:
        head, rows = lines[0], lines[1:]
        file, label = head.index("Filename"), head.index("ClassId")
        known = {row[file]: int(row[label]) for row in rows}
    except (ValueError, IndexError):
        raise Damaged(f"{answers.name} has no table with Filename and ClassId") from None
    images, labels = [], []
    for name, blob in _zipped(pictures, r"(?:^|/)\d{5}\.ppm$"):
        own = name.rpartition("/")[2]
        if own not in known:
            raise Damaged(f"{answers.name} does not name {own}")
        images.append(_sign(name, blob))
        labels.append(known[own])
    if not images:
        raise Damaged("there are no pictures NUMBER.ppm in it")
    return np.stack(images), np.array(labels, dtype=np.int16)


def _sign(name: str, blob: bytes) -> Images:
    try:
        return picture(blob, SIDE, "RGB")
    except BAD_PICTURE as error:
        raise Damaged(f"{name} in it cannot be read: {error}") from None


def _zipped(path: Path, wanted: str) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            if len(infos) > MOST_MEMBERS:
                raise Damaged(f"it has more than {MOST_MEMBERS} members")
            for info in sorted(infos, key=lambda info: info.filename):
                if re.search(wanted, info.filename):
                    if info.file_size > MOST_FILE_BYTES:
                        raise Damaged(f"{info.filename} in it claims {info.file_size} bytes")
                    yield info.filename, archive.read(info)
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError, zlib.error) as error:
        raise Damaged(str(error)) from None


def read_people(
    folder: Path, most: int, advance: Callable[[], None] = lambda: None
) -> tuple[Images, Labels, list[str], int]:
    """FaceScrub from a user's folder, one subfolder a person: the people with the most pictures, ties by name.

    Also how many files were broken and left out. People are chosen by their readable pictures.
    """
    if not folder.is_dir():
        raise WeftError(f"{folder} is no folder; --from names one that has a subfolder of pictures for each person")
    files = {
        person.name: sorted(file for file in person.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        for person in sorted(folder.iterdir())
        if person.is_dir()
    }
    files = {person: found for person, found in files.items() if found}
    if not files:
        raise WeftError(f"{folder} has no subfolders with pictures in them; it needs one for each person")
    if len(files) == 1:  # people lie a level deeper
        (only,) = files
        raise WeftError(f"{folder} has pictures in one subfolder alone; it needs one for each person: {folder / only}?")
    read: dict[str, list[Images]] = {}
    broken = 0
    for person in sorted(files, key=lambda person: (-len(files[person]), person)):
        # most files first: who has fewer files than the hundredth has pictures is not among them
        if len(read) >= most and len(files[person]) < sorted(map(len, read.values()), reverse=True)[most - 1]:
            break
        read[person] = []
        for file in files[person]:
            try:
                if file.stat().st_size > MOST_FILE_BYTES:
                    raise ValueError("too large")
                read[person].append(picture(file.read_bytes(), SIDE, "RGB"))
            except BAD_PICTURE:
                broken += 1
        advance()
    chosen = sorted(sorted((person for person in read if read[person]), key=lambda p: (-len(read[p]), p))[:most])
    if not chosen:
        raise WeftError(f"none of the pictures in {folder} can be read")
    labels = np.repeat(np.arange(len(chosen), dtype=np.int16), [len(read[person]) for person in chosen])
    return np.concatenate([np.stack(read[person]) for person in chosen]), labels, chosen, broken
