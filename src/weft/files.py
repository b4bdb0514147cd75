"""Files that are whole or absent, locks of running processes, checksums.

A lock is the operating system's and dies with its process. Looking at one must not take it, not even for a moment:
a process that starts just then would be told that another one is at work.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError


def append(path: Path, text: str) -> None:
    """Whole lines at the end of a file, or nothing if they cannot be written."""
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
                file.truncate(before)  # half a line would spoil the next one
                raise
    except OSError as error:
        raise write_error(path, error) from None


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, blob: bytes) -> None:
    """A file that is there whole or not at all, also after a kill at any moment."""
    with atomic_file(path) as partial:
        partial.write_bytes(blob)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A path to write to, whose file takes its place when the block is over; none does if writing fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise write_error(path, error) from None


def sync(path: Path) -> None:
    """Of a file its bytes, of a folder its names: no longer in the memory of the system alone."""
    if os.name == "nt":  # where folders cannot be opened, and files only to be written
        return
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def checksum(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> int:
    """Of all that a file of tensors says, given as numpy arrays.

    It is taken from where they lie: to put the file together in memory first took longer than writing it.
    """
    parts = [[key, str(arrays[key].dtype), list(arrays[key].shape)] for key in sorted(arrays)]
    found = zlib.crc32(json.dumps([parts, dict(metadata)], sort_keys=True).encode())
    for key in sorted(arrays):
        found = zlib.crc32(arrays[key].data, found)
    return found


def write_error(path: Path, error: OSError) -> WeftError:
    return WeftError(f"{path} cannot be written ({error.strerror}); nothing saved is lost, weft resume goes on from it")


def is_held(lock: Path) -> bool | None:
    """Does a process hold the lock? Looked up where Linux lists them; None: this system cannot tell."""
    try:
        with lock.open("rb") as file:
            place = f"{_device(file.fileno())}:{os.fstat(file.fileno()).st_ino}"
        listed = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return None
    return any(place in line.split() for line in listed.splitlines())


def is_taken(lock: Path) -> bool:
    """The same where an answer is needed: on a system without that list the lock is tried."""
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
    """Of the mounted filesystem, as the list of locks writes it; stat has another number on some (btrfs)."""
    facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").split()
    mount = facts[facts.index("mnt_id:") + 1]
    for line in Path("/proc/self/mountinfo").read_text(encoding="ascii", errors="replace").splitlines():
        number, _, device, *_ = line.split()
        if number == mount:
            major, minor = device.split(":")
            return f"{int(major):02x}:{int(minor):02x}"
    raise OSError("its filesystem is not listed")
