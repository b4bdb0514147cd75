"""Readers of the original formats that are arrays: idx (MNIST), CIFAR's binary format, and MATLAB files (SVHN).

Each gives uint8 images (count, height, width[, channels]) and int16 labels from 0. A file that is cut or not what its
name says raises `Damaged`; whoever called knows which file it was and what can be done.
"""

from __future__ import annotations

import gzip
import math
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError

MOST_BYTES = 1 << 30  # of one unpacked file: the largest of these sets has a fifth of it, anything above is a bomb
MOST_MEMBERS = 200_000  # of an archive

Images = NDArray[np.uint8]
Labels = NDArray[np.int16]


class Damaged(Exception):  # noqa: N818 - becomes a WeftError where file and source are known
    """The file is not what it should be; the text says how."""


def read_idx(path: Path) -> NDArray[np.uint8]:
    """A gzipped idx file of bytes: magic 0, 0, 8 (unsigned byte), number of dimensions, the dimensions, the values."""
    try:
        with gzip.open(path) as file:
            header = file.read(4)
            if len(header) < 4 or header[:3] != b"\0\0\x08":
                raise Damaged("it is no idx file of bytes")
            sizes = file.read(4 * header[3])
            if len(sizes) < 4 * header[3]:
                raise Damaged("it ends within its header")
            shape = struct.unpack(f">{header[3]}I", sizes)
            return _exactly(file, math.prod(shape)).reshape(shape)
    except (OSError, EOFError, zlib.error) as error:
        raise Damaged(str(error)) from None


def read_cifar(path: Path, members: Sequence[str], label_bytes: int) -> tuple[Images, Labels]:
    """Records of `label_bytes` labels (the last one counts) and 3 x 32 x 32 bytes, from files within a tar.gz."""
    record = label_bytes + 3 * 32 * 32
    images, labels = [], []
    try:
        with tarfile.open(path) as archive:
            for name in members:
                rows = _member(archive, name)
                if not len(rows) or len(rows) % record:
                    raise Damaged(f"{name} in it has {len(rows)} bytes, no multiple of {record}")
                rows = rows.reshape(-1, record)
                labels.append(rows[:, label_bytes - 1].astype(np.int16))
                # (count, channel, row, column) -> channels last
                images.append(rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise Damaged(str(error)) from None
    return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)


def read_cifar_coarse(path: Path, member: str) -> NDArray[np.int16]:
    """For each of CIFAR-100's 100 classes its superclass, the other label of each record."""
    with tarfile.open(path) as archive:
        pairs = np.unique(_member(archive, member).reshape(-1, 2 + 3 * 32 * 32)[:, :2], axis=0)  # (coarse, fine)
    if len(np.unique(pairs[:, 1])) != len(pairs):
        raise Damaged("one of its classes has two superclasses")
    coarse = np.zeros(pairs[:, 1].max() + 1, dtype=np.int16)
    coarse[pairs[:, 1]] = pairs[:, 0]
    return coarse


def read_lines(path: Path, member: str) -> list[str]:
    """The lines of a small text file within a tar.gz, such as the names of classes."""
    with tarfile.open(path) as archive:
        text = _member(archive, member).tobytes().decode("utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


def check_mat() -> None:
    """Can MATLAB files be read? To be asked before hundreds of megabytes are downloaded."""
    try:
        import scipy.io  # noqa: F401
    except ImportError:
        raise WeftError('svhn comes as MATLAB files, which need scipy: pip install "weft[data]"') from None


def read_mat(path: Path) -> tuple[Images, Labels]:
    """SVHN's cropped digits: X (row, column, channel, count) and y, in which the digit 0 is called 10."""
    check_mat()
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=["X", "y"])
        images, labels = found["X"], found["y"].reshape(-1)
    except Exception as error:  # scipy raises what it likes on a file that is cut
        raise Damaged(f"it is no MATLAB file with X and y: {error}") from None
    if images.dtype != np.uint8 or images.shape[:3] != (32, 32, 3) or images.shape[-1] != len(labels):
        raise Damaged(f"X in it is {images.dtype} {images.shape}, for {len(labels)} labels")
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), (labels.astype(np.int16) % 10)


def _member(archive: tarfile.TarFile, name: str) -> NDArray[np.uint8]:
    """A file within an archive, read and never written to disk, so its path can lead nowhere."""
    try:
        info = archive.getmember(name)
    except KeyError:
        raise Damaged(f"{name} is not in it") from None
    file = archive.extractfile(info)
    if file is None:
        raise Damaged(f"{name} in it is no file")
    return _exactly(file, info.size)


def _exactly(file: IO[bytes] | gzip.GzipFile, count: int) -> NDArray[np.uint8]:
    if count > MOST_BYTES:
        raise Damaged(f"it claims to hold {count} bytes")
    blob = file.read(count)
    if len(blob) != count:
        raise Damaged(f"it ends after {len(blob)} of {count} bytes")
    return np.frombuffer(blob, dtype=np.uint8)
