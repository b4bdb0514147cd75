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

import numpy as np

from weft.data.readers import MOST_MEMBERS, Damaged, Images, Labels
from weft.errors import Problem

SIDE = 32
MOST_PIXELS = 50_000_000  # of one picture: a photo has a tenth of it
MOST_FILE_BYTES = 100_000_000  # of one picture's file
SUFFIXES = (".png", ".jpg", ".jpeg", ".ppm", ".bmp", ".gif", ".webp", ".tif", ".tiff")
BAD_PICTURE = (OSError, SyntaxError, ValueError, EOFError, zlib.error)  # what Pillow raises on files that are none


def picture(blob: bytes, side: int | None, mode: str) -> Images:
    """One picture as an array; resized if a side is given."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it grumbles about is either read or refused below
        try:
            with Image.open(io.BytesIO(blob)) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels are too many")
                ready = image.convert(mode)
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from None
    if side is not None and ready.size != (side, side):
        ready = ready.resize((side, side), Image.Resampling.BILINEAR)
    return np.asarray(ready, dtype=np.uint8)


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
        raise Problem(f"{folder} is no folder; --from names one that has a subfolder of pictures for each person")
    files = {
        person.name: sorted(file for file in person.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        for person in sorted(folder.iterdir())
        if person.is_dir()
    }
    files = {person: found for person, found in files.items() if found}
    if not files:
        raise Problem(f"{folder} has no subfolders with pictures in them; it needs one for each person")
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
        raise Problem(f"none of the pictures in {folder} can be read")
    labels = np.repeat(np.arange(len(chosen), dtype=np.int16), [len(read[person]) for person in chosen])
    return np.concatenate([np.stack(read[person]) for person in chosen]), labels, chosen, broken
