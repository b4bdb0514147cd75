"""Readers of the original formats: idx (MNIST), CIFAR binary, MATLAB (SVHN), archives and folders of images.

`pack` reads a dataset into the arrays of the cache: uint8 images (count, height, width[, channels]) and int16 labels
from 0. A file that is truncated or in another format raises `FormatError`. Archive members are read, never extracted,
so their paths cannot lead anywhere.
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data import cache
from weft.data.images import MAX_FILE_BYTES, SIDE, SUFFIXES, ImageError, decode_plain, read_bytes
from weft.errors import WeftError

MAX_BYTES = 1 << 30  # of one unpacked file, against decompression bombs: the largest real one has a fifth of it
MAX_MEMBERS = 200_000  # of an archive
MAX_PEOPLE = 100  # of FaceScrub: those with the most images
LETTERS = "ABCDEFGHIJ"
ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, zlib.error)
READ_ERRORS = (*ARCHIVE_ERRORS, OSError, EOFError, NotImplementedError, RuntimeError, UnicodeError)

Images = NDArray[np.uint8]
Labels = NDArray[np.int16]
Files = Mapping[str, Path]  # original files by name
Arrays = dict[str, NDArray[Any]]


class FormatError(Exception):
    """The file is not in the expected format; becomes a WeftError where its source is known."""


class Packed(NamedTuple):
    arrays: Arrays
    note: str = ""  # shown to the user


def pack(name: str, files: Files) -> Packed:
    """The arrays of a dataset, read from its original files."""
    try:
        return PACKERS[name](files)
    except READ_ERRORS as error:
        raise FormatError(str(error)) from None


# ---- idx, CIFAR and MATLAB -------------------------------------------------------------------------------------------


def read_idx(path: Path) -> NDArray[np.uint8]:
    """A gzipped idx file of bytes: magic 0, 0, 8 (unsigned byte), number of dimensions, the dimensions, the values."""
    with gzip.open(path) as file:
        header = file.read(4)
        if len(header) < 4 or header[:3] != b"\0\0\x08":
            raise FormatError(f"{path.name} is not an idx file of bytes")
        shape = struct.unpack(f">{header[3]}I", _read_exactly(file, 4 * header[3]).tobytes())
        return _read_exactly(file, math.prod(shape)).reshape(shape)


def _pack_idx(files: Files) -> Packed:
    splits = []
    for split in ("train", "t10k"):
        images, labels = (read_idx(files[f"{split}-{kind}-ubyte.gz"]) for kind in ("images-idx3", "labels-idx1"))
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise FormatError(f"{split}: images are {images.shape} and labels {labels.shape}")
        splits.append((images, labels.astype(np.int16)))
    return Packed(_join(*splits))


def read_cifar(path: Path, members: Sequence[str], label_bytes: int) -> tuple[Images, NDArray[np.uint8]]:
    """Images and label bytes (count, label_bytes) of records of label_bytes + 3 x 32 x 32 bytes."""
    record = label_bytes + 3 * 32 * 32
    with tarfile.open(path) as archive:
        blobs = [(name, _read_member(archive, name)) for name in members]
    for name, blob in blobs:
        if not len(blob) or len(blob) % record:
            raise FormatError(f"{name} has {len(blob)} bytes, not a multiple of {record}")
    rows = np.concatenate([blob for _, blob in blobs]).reshape(-1, record)
    images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)  # channels last
    return np.ascontiguousarray(images), rows[:, :label_bytes]


def _pack_cifar10(files: Files) -> Packed:
    path, folder = files["cifar-10-binary.tar.gz"], "cifar-10-batches-bin"
    train, labels = read_cifar(path, [f"{folder}/data_batch_{batch}.bin" for batch in range(1, 6)], 1)
    test, test_labels = read_cifar(path, [f"{folder}/test_batch.bin"], 1)
    arrays = _join((train, labels[:, 0].astype(np.int16)), (test, test_labels[:, 0].astype(np.int16)))
    return Packed({**arrays, "names": _read_lines(path, f"{folder}/batches.meta.txt")})


def _pack_cifar100(files: Files) -> Packed:
    path, folder = files["cifar-100-binary.tar.gz"], "cifar-100-binary"
    (train, labels), (test, test_labels) = (read_cifar(path, [f"{folder}/{name}.bin"], 2) for name in ("train", "test"))
    arrays = _join((train, labels[:, 1].astype(np.int16)), (test, test_labels[:, 1].astype(np.int16)))
    pairs = np.unique(labels, axis=0)  # (coarse, fine)
    if len(np.unique(pairs[:, 1])) != len(pairs):
        raise FormatError("a class has two superclasses")
    coarse = np.zeros(pairs[:, 1].max() + 1, dtype=np.int16)
    coarse[pairs[:, 1]] = pairs[:, 0]
    fine_names, coarse_names = (_read_lines(path, f"{folder}/{kind}_label_names.txt") for kind in ("fine", "coarse"))
    return Packed({**arrays, "names": fine_names, "coarse_of_fine": coarse, "coarse_names": coarse_names})


def check_scipy() -> None:
    try:
        import scipy.io  # noqa: F401
    except ImportError:
        raise WeftError('svhn consists of MATLAB files, which need scipy: pip install "weft[data]"') from None


def read_mat(path: Path) -> tuple[Images, Labels]:
    """SVHN's cropped digits: X (row, column, channel, count) and y, where 10 stands for the digit 0."""
    check_scipy()
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=["X", "y"])
        images, labels = found["X"], found["y"].reshape(-1)
    except Exception as error:  # scipy raises many types on a truncated file
        raise FormatError(f"{path.name} is not a MATLAB file with X and y: {error}") from None
    if images.dtype != np.uint8 or images.shape[:3] != (32, 32, 3) or images.shape[-1] != len(labels):
        raise FormatError(f"X of {path.name} is {images.dtype} {images.shape}, for {len(labels)} labels")
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), (labels.astype(np.int16) % 10)


def _pack_svhn(files: Files) -> Packed:
    return Packed(_join(read_mat(files["train_32x32.mat"]), read_mat(files["test_32x32.mat"])))


def _read_lines(path: Path, member: str) -> NDArray[np.str_]:
    """The lines of a small text file in a tar.gz, such as class names."""
    with tarfile.open(path) as archive:
        text = _read_member(archive, member).tobytes().decode("utf-8")
    return np.array([line.strip() for line in text.splitlines() if line.strip()])


def _read_member(archive: tarfile.TarFile, name: str) -> NDArray[np.uint8]:
    found = name in archive.getnames() and archive.extractfile(name)
    if not found:
        raise FormatError(f"the archive has no file {name}")
    return _read_exactly(found, archive.getmember(name).size)


def _read_exactly(file: IO[bytes] | gzip.GzipFile, count: int) -> NDArray[np.uint8]:
    if count > MAX_BYTES:
        raise FormatError(f"a file claims to have {count} bytes")
    blob = file.read(count)
    if len(blob) != count:
        raise FormatError(f"a file ends after {len(blob)} of {count} bytes")
    return np.frombuffer(blob, dtype=np.uint8)


# ---- archives and folders of images ----------------------------------------------------------------------------------


def _pack_notmnist(files: Files) -> Packed:
    """A tar of folders A to J with 28x28 grayscale PNGs, some of which are broken."""
    images, labels, broken = [], [], 0
    with tarfile.open(files["notMNIST_small.tar.gz"]) as archive:
        for count, info in enumerate(archive):
            if count > MAX_MEMBERS:
                raise FormatError(f"the archive has more than {MAX_MEMBERS} members")
            found = re.search(r"(?:^|/)([A-J])/[^/.][^/]*\.png$", info.name)
            if not found or not info.isfile() or info.size > MAX_FILE_BYTES:
                continue
            file = archive.extractfile(info)
            assert file is not None
            try:
                image = decode_plain(file.read(), None, "L")
            except ImageError:
                broken += 1
                continue
            if image.shape != (28, 28):
                raise FormatError(f"{info.name} is not an image of 28x28")
            images.append(image)
            labels.append(LETTERS.index(found[1]))
    if not images:
        raise FormatError("the archive has no folders A to J with images")
    arrays = _without_test_split(np.stack(images), np.array(labels, dtype=np.int16), list(LETTERS))
    return Packed(arrays, f"{broken} broken images skipped" if broken else "")


def _pack_signs(files: Files) -> Packed:
    """GTSRB: a zip of CLASS/TRACK_FRAME.ppm (tracks count within a class); test: NUMBER.ppm, and a table of classes."""
    images, labels, tracks = [], [], []
    for name, blob in _zip_members(files["GTSRB_Final_Training_Images.zip"], r"(?:^|/)\d{5}/\d{5}_\d{5}\.ppm$"):
        folder, file = name.split("/")[-2:]
        images.append(_decode_sign(name, blob))
        labels.append(int(folder))
        tracks.append(int(file.split("_")[0]))
    class_of = _read_sign_classes(files["GTSRB_Final_Test_GT.zip"])
    for name, blob in _zip_members(files["GTSRB_Final_Test_Images.zip"], r"(?:^|/)\d{5}\.ppm$"):
        file = name.rpartition("/")[2]
        if file not in class_of:
            raise FormatError(f"the table of classes does not list {file}")
        images.append(_decode_sign(name, blob))
        labels.append(class_of[file])
    train, test = len(tracks), len(images) - len(tracks)
    if not train or not test:
        raise FormatError("an archive has no images CLASS/TRACK_FRAME.ppm or NUMBER.ppm")
    x, y = np.stack(images), np.array(labels, dtype=np.int16)
    arrays = _join((x[:train], y[:train]), (x[train:], y[train:]))
    return Packed({**arrays, "track": np.array(tracks + [-1] * test, dtype=np.int16)})


def _read_sign_classes(path: Path) -> dict[str, int]:
    (table,) = [blob for _, blob in _zip_members(path, r"(?:^|/)GT-final_test\.csv$")] or [b""]
    lines = [line.split(";") for line in table.decode("ascii", "replace").split()]
    try:
        file, label = lines[0].index("Filename"), lines[0].index("ClassId")
        return {line[file]: int(line[label]) for line in lines[1:]}
    except (ValueError, IndexError):
        raise FormatError(f"{path.name} has no table with Filename and ClassId") from None


def _decode_sign(name: str, blob: bytes) -> Images:
    try:
        return decode_plain(blob, SIDE, "RGB")
    except ImageError as error:
        raise FormatError(f"{name} cannot be read: {error}") from None


def _zip_members(path: Path, pattern: str) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if len(infos) > MAX_MEMBERS:
            raise FormatError(f"{path.name} has more than {MAX_MEMBERS} members")
        for info in sorted(infos, key=lambda info: info.filename):
            if re.search(pattern, info.filename):
                if info.file_size > MAX_FILE_BYTES:
                    raise FormatError(f"{info.filename} claims to have {info.file_size} bytes")
                yield info.filename, archive.read(info)


def pack_people(folder: Path, most: int = MAX_PEOPLE) -> Packed:
    """FaceScrub from a user's folder with one subfolder per person: the people with the most readable images."""
    read, broken = _read_people(folder, most)
    people = sorted(sorted((person for person in read if read[person]), key=lambda p: (-len(read[p]), p))[:most])
    if not people:
        raise WeftError(f"no image in {folder} can be read; --from needs PNG, JPEG or similar files")
    labels = np.repeat(np.arange(len(people), dtype=np.int16), [len(read[person]) for person in people])
    arrays = _without_test_split(np.stack([image for person in people for image in read[person]]), labels, people)
    arrays["mean"], arrays["deviation"] = map(np.array, cache.measure(arrays["x"][arrays["split"] == 0]))
    notes = [f"{len(people)} people"]
    notes += [f"{broken} broken images skipped"] if broken else []
    notes += [f"fewer than {most}, which the scenarios may need"] if len(people) < most else []
    return Packed(arrays, "; ".join(notes))


def _read_people(folder: Path, most: int) -> tuple[dict[str, list[Images]], int]:
    """Images by person, and the number of broken files. People with too few files are not read."""
    if not folder.is_dir():
        raise WeftError(f"{folder} is not a folder; --from needs one with a subfolder of images per person")
    files = {
        person.name: sorted(file for file in person.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        for person in sorted(folder.iterdir())
        if person.is_dir()
    }
    files = {person: found for person, found in files.items() if found}
    if not files:
        raise WeftError(f"{folder} has no subfolders with images; --from needs one per person")
    if len(files) == 1:
        (only,) = files
        raise WeftError(f"{folder} has only one subfolder with images, and needs one per person; try {folder / only}")
    read: dict[str, list[Images]] = {}
    broken = 0
    for person in sorted(files, key=lambda person: (-len(files[person]), person)):
        # most files first: a person with fewer files than the last selected one has images cannot be selected
        if len(read) >= most and len(files[person]) < sorted(map(len, read.values()), reverse=True)[most - 1]:
            break
        read[person] = []
        for file in files[person]:
            try:
                read[person].append(decode_plain(read_bytes(file), SIDE, "RGB"))
            except ImageError:
                broken += 1
    return read, broken


PACKERS: dict[str, Callable[[Files], Packed]] = {
    "cifar10": _pack_cifar10,
    "cifar100": _pack_cifar100,
    "mnist": _pack_idx,
    "fashion_mnist": _pack_idx,
    "svhn": _pack_svhn,
    "notmnist": _pack_notmnist,
    "traffic_signs": _pack_signs,
}


def _join(train: tuple[Images, Labels], test: tuple[Images, Labels]) -> Arrays:
    split = np.repeat(np.array([0, 1], dtype=np.uint8), [len(train[1]), len(test[1])])
    return {"x": np.concatenate([train[0], test[0]]), "y": np.concatenate([train[1], test[1]]), "split": split}


def _without_test_split(images: Images, labels: Labels, names: list[str]) -> Arrays:
    """Arrays of a dataset without a test split: every tenth image becomes a test image."""
    split = np.zeros(len(labels), dtype=np.uint8)
    split[9::10] = 1
    return {"x": images, "y": labels, "split": split, "names": np.array(names)}
