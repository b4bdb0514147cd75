"""Somebody's own images, from a folder or a table: found, resized once and packed into the cache.

    FOLDER/CLIENT/TASK/CLASS/image.png         or, cut already,    FOLDER/CLIENT/TASK/train/CLASS/image.png
    TABLE.csv with the columns path, client, task and label; if wanted also group and split

A folder below a class is a group: its images (of one patient, of one track) belong together. In a table a path is from
the table's own folder. The pack is named by the files' names, sizes and times: whatever changes is read again.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import re
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data import cache
from weft.data.pictures import BAD_PICTURE, MOST_FILE_BYTES, SIDE, SUFFIXES, is_dicom, own_picture
from weft.errors import WeftError

PARTS = ("train", "valid", "test")
COLUMNS = ("path", "client", "task", "label")
VERSION = 1  # of what a pack holds
WORDS = ("client", "task", "label", "group", "part")
KEYS = ("x", *WORDS, "digest", "sums", "squares", "broken", "highest")


class Row(NamedTuple):
    """One image; `group` and `part` may be empty."""

    file: Path
    client: str
    task: str
    label: str
    group: str
    part: str


@dataclass(frozen=True)
class Pictures:
    """All images that could be read, in the order of their rows, and what each of them is."""

    x: NDArray[np.uint8]  # (count, 32, 32, 3)
    client: NDArray[np.str_]
    task: NDArray[np.str_]
    label: NDArray[np.str_]
    group: NDArray[np.str_]
    part: NDArray[np.str_]
    digest: NDArray[np.str_]  # of each image's pixels
    sums: NDArray[np.int64]  # (count, 3), of each image's pixels by channel
    squares: NDArray[np.int64]
    broken: NDArray[np.str_]  # files that are no pictures, each with the reason
    highest: NDArray[np.int64]  # the highest value of all pictures of more than 8 bits; 0: there are none


def natural(name: str) -> tuple[Any, ...]:
    """A key that sorts numbers within names by their size.

    >>> sorted(["site10", "site9", "Site2"], key=natural)
    ['Site2', 'site9', 'site10']
    """
    pieces = [(0, int(piece), "") if piece.isdecimal() else (1, 0, piece) for piece in re.split(r"(\d+)", name.lower())]
    return (*pieces, name)


def find(place: Path) -> list[Row]:
    """The images of a folder or a table, without a look into them."""
    if place.is_dir():
        rows = list(_in_folder(place))
        if not rows:
            raise WeftError(f"{place} has no images; they lie in CLIENT/TASK/CLASS/image.png below it")
    elif place.is_file():
        rows = list(_in_table(place))
        if not rows:
            raise WeftError(f"{place} has no lines below its header {','.join(COLUMNS)}")
    else:
        raise WeftError(f"there is no folder or table {place}; scenario.path names yours")
    return rows


def find_task(folder: Path) -> list[Row]:
    """The images of one task, which lie in CLASS/image.png or CLASS/GROUP/image.png, without a look into them."""
    if not folder.is_dir():
        raise WeftError(f"{folder} is no folder")
    rows = list(_in_task("", folder, f"CLASS/image.png below {folder}"))
    if not rows and (dicom := others(folder)[1]):
        raise WeftError(
            f"{folder} has no images but {len(dicom)} DICOM file{'s' if len(dicom) > 1 else ''}, such as {dicom[0]}; "
            "export them to PNG first, with 16 bits if they are deep"
        )
    if not rows:
        raise WeftError(f"{folder} has no images; they lie in CLASS/image.png below it")
    return rows


def empty_classes(folder: Path) -> list[str]:
    """Folders where a class of a task should be that have no image."""
    parts = [part for part in _folders(folder) if part.name in PARTS]
    places = parts if parts and len(parts) == len(_folders(folder)) else [folder]
    return [
        str(label.relative_to(folder))
        for place in places
        for label in _folders(place)
        if not any(file.suffix.lower() in SUFFIXES for file in label.rglob("*"))
    ]


def others(folder: Path) -> tuple[list[str], list[str]]:
    """Files below a folder that are no pictures by their names, and those among them that are DICOM."""
    found = [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() not in SUFFIXES and not _is_hidden(file.relative_to(folder)) and file.is_file()
    ]
    dicom = [file for file in found if _is_dicom(file)]
    return [str(file.relative_to(folder)) for file in found], [str(file.relative_to(folder)) for file in dicom]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_dicom(file: Path) -> bool:
    if file.suffix.lower() in (".dcm", ".dicom"):
        return True
    try:
        with file.open("rb") as opened:
            return is_dicom(opened.read(132))
    except OSError:
        return False


def _in_folder(folder: Path) -> Iterator[Row]:
    for client in _folders(folder):
        for task in _folders(client):
            yield from _in_task(client.name, task, f"CLIENT/TASK/CLASS/image.png below {folder}")


def _in_task(client: str, task: Path, wanted: str) -> Iterator[Row]:
    below = _folders(task)
    names = {part.name for part in below}
    if names & {"train", "test"} and names <= set(PARTS):
        yield from (row for part in below for row in _in_classes(client, task.name, part, part.name, wanted))
    else:
        yield from _in_classes(client, task.name, task, "", wanted)


def _in_classes(client: str, task: str, place: Path, part: str, wanted: str) -> Iterator[Row]:
    for label in _folders(place):
        for file in sorted(label.rglob("*")):
            # a link that leads nowhere is one that cannot be read, and is told of
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and not file.is_dir():
                within = file.relative_to(label).parts
                yield Row(file, client, task, label.name, within[0] if len(within) > 1 else "", part)
    if stray := next((file for file in sorted(place.iterdir()) if file.suffix.lower() in SUFFIXES), None):
        raise WeftError(f"{stray} lies in no class; images lie in {wanted}")


def _folders(place: Path) -> list[Path]:
    try:
        found = [path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")]
    except OSError as error:
        raise WeftError(f"{place} cannot be read: {error.strerror}") from None
    return sorted(found, key=lambda path: natural(path.name))


def _in_table(table: Path) -> Iterator[Row]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise WeftError(f"{table} has no column {missing[0]!r}; its first line is {','.join(COLUMNS)}")
            for number, line in enumerate(reader, start=2):
                if empty := next((column for column in COLUMNS if not (line[column] or "").strip()), None):
                    raise WeftError(f"line {number} of {table} has no {empty}")
                part = (line.get("split") or "").strip().lower()
                if part not in ("", *PARTS):
                    raise WeftError(f"line {number} of {table} has the split {part!r}; it is one of {', '.join(PARTS)}")
                path, client, task, label = (line[column].strip() for column in COLUMNS)
                yield Row(table.parent / path, client, task, label, (line.get("group") or "").strip(), part)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WeftError(f"{table} cannot be read as a table: {error}") from None


def load(place: Path, bits: int) -> Pictures:
    """The images of a folder or table, out of the cache if they were packed and have not changed since."""
    rows = find(place)
    return _load(place, bits, _key(place, bits, rows), tuple(rows))


@functools.lru_cache(maxsize=2)
def _load(place: Path, bits: int, key: str, rows: tuple[Row, ...]) -> Pictures:
    path = cache.folder() / "own" / f"{key}.npz"
    if path.is_file():
        try:
            return Pictures(**cache.read_arrays(path, KEYS))
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            path.unlink()  # damaged: it is only a copy
    cache.write(None, f"own/{key}", pack(place, bits, rows))
    return Pictures(**cache.read_arrays(path, KEYS))


def _key(place: Path, bits: int, rows: Sequence[Row]) -> str:
    found = hashlib.blake2b(repr((VERSION, SIDE, bits, str(place.resolve()))).encode(), digest_size=12)
    for row in rows:
        try:
            facts = row.file.stat()
        except OSError:
            raise WeftError(f"there is no image {row.file}, which {place} names") from None
        found.update(repr((row[1:], str(row.file), facts.st_size, facts.st_mtime_ns)).encode())
    return found.hexdigest()


def pack(place: Path, bits: int, rows: Sequence[Row]) -> dict[str, NDArray[Any]]:
    """The fields of `Pictures`: every image is read and resized."""
    images: list[NDArray[np.uint8]] = []
    good: list[Row] = []
    broken: list[str] = []
    highest = 0
    for row in rows:
        try:
            if row.file.stat().st_size > MOST_FILE_BYTES:
                raise ValueError(f"more than {MOST_FILE_BYTES:,} bytes")
            image, deepest = own_picture(row.file.read_bytes(), SIDE, bits)
        except BAD_PICTURE as error:
            why = (str(error).splitlines() or ["no picture"])[0]
            broken.append(f"{row.file} ({why})")
            continue
        images.append(image)
        good.append(row)
        highest = max(highest, deepest)
    if not images:
        raise WeftError(f"none of the {len(rows)} images of {place} can be read, such as {broken[0]}")
    x = np.stack(images)
    words = {key: np.array([getattr(row, key) for row in good], dtype=np.str_) for key in WORDS}
    sums, squares = sums_of(x)
    others = {"broken": np.array(broken, dtype=np.str_), "highest": np.array([highest])}
    return {"x": x, **words, "digest": digests(x), "sums": sums, "squares": squares, **others}


def digests(images: NDArray[np.uint8]) -> NDArray[np.str_]:
    return np.array([hashlib.blake2b(image.tobytes(), digest_size=8).hexdigest() for image in images], dtype=np.str_)


def sums_of(images: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each image (height, width, channels) the sum of its values and of their squares, by channel."""
    found = [(image.sum((0, 1), dtype=np.int64), (image.astype(np.int64) ** 2).sum((0, 1))) for image in images]
    return np.array([one for one, _ in found]), np.array([other for _, other in found])
