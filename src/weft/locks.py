"""Is a process at work in a folder? Its lock is the operating system's; to look must not take it, not for a moment.

Whoever starts just then would be told that somebody else is at work.
"""

from __future__ import annotations

import os
from pathlib import Path

import filelock


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
