"""Atomic files, appended lines, checksums, and locks of running processes.

Locks belong to the operating system and end with their process. A check never acquires a lock, not even for a moment:
a process that starts just then would find its folder locked.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import filelock

from weft.errors import WeftError

RESUME = "weft resume continues from the last checkpoint"
T = TypeVar("T")


def append(path: Path, text: str) -> None:
    """Append whole lines to a file, or nothing if they cannot be written."""
    if not text:
        return
    try:
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            blob = text.encode("utf-8")
            try:
                while blob:
                    blob = blob[file.write(blob) :]
            except OSError:
                file.truncate(before)  # half a line would damage the next one
                raise
    except OSError as error:
        raise write_error(path, error) from None


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    write_text(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path, default: T) -> T:
    """The value in a file; `default` if there is no file."""
    value: T = json.loads(path.read_text(encoding="utf-8")) if path.exists() else default
    return value


def write_bytes(path: Path, blob: bytes) -> None:
    """Write a file atomically: after a kill at any moment it is complete or unchanged."""
    with atomic_file(path) as partial:
        partial.write_bytes(blob)


@contextmanager
def atomic_file(path: Path, remedy: str = RESUME) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end of the block, unless writing fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise write_error(path, error, remedy) from None
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    if os.name == "nt":  # Windows cannot open folders, and syncs only files opened for writing
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> int:
    """CRC32 of a tensor file's contents, given as numpy arrays.

    It reads the arrays in place: building the file in memory first takes longer than writing it.
    """
    shapes = [[key, str(arrays[key].dtype), list(arrays[key].shape)] for key in sorted(arrays)]
    crc = zlib.crc32(json.dumps([shapes, dict(metadata)], sort_keys=True).encode())
    for key in sorted(arrays):
        crc = zlib.crc32(arrays[key].data, crc)
    return crc


def write_error(path: Path, error: OSError, remedy: str = RESUME) -> WeftError:
    return WeftError(f"{path} cannot be written ({error.strerror}); {remedy}")


def is_held(lock: Path) -> bool | None:
    """Whether a process holds the lock, according to Linux's list of locks; None where there is no such list."""
    try:
        with lock.open("rb") as file:
            identity = f"{_device(file.fileno())}:{os.fstat(file.fileno()).st_ino}"
        listed = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    return any(identity in line.split() for line in listed.splitlines())


def is_taken(lock: Path) -> bool:
    """Whether a process holds the lock; a system without a list of locks has to try to acquire it."""
    held = is_held(lock)
    if held is None and lock.exists():  # it may have been created just now: its owner is not to be disturbed
        held = is_held(lock)
    if held is not None or not lock.exists():
        return bool(held)
    trial = filelock.FileLock(lock)
    try:
        trial.acquire(timeout=0)
    except filelock.Timeout:
        return True
    trial.release()
    return False


def _device(descriptor: int) -> str:
    """Device number of a file's mount, as in the list of locks; stat gives a different one on btrfs."""
    facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").split()
    mount = facts[facts.index("mnt_id:") + 1]
    for line in Path("/proc/self/mountinfo").read_text(encoding="ascii", errors="replace").splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, minor = device.split(":")
            return f"{int(major):02x}:{int(minor):02x}"
    raise OSError("the filesystem is not in mountinfo")
