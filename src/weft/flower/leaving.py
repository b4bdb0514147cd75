"""A site that leaves: from then on every question is answered with that, and it is written down when the hub was told.

`leaving` in the site's folder is empty until the hub has asked, and then has a line for each run: when, and which.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import NamedTuple

import filelock

from weft.files import write_text

FILE, LOCK = "leaving", ".leaving.lock"


class Told(NamedTuple):
    when: str  # UTC
    run: str


def leave(site: Path) -> None:
    if not has_left(site):
        write_text(site / FILE, "")


def has_left(site: Path) -> bool:
    return (site / FILE).exists()


def note(site: Path, run: str) -> None:
    """The hub asked in this run and is being told; once for each run, though it may ask again."""
    with filelock.FileLock(site / LOCK):  # two runs may ask at the same time
        if run not in [one.run for one in told(site)]:
            when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
            write_text(site / FILE, (site / FILE).read_text(encoding="utf-8") + f"{when}\t{run}\n")


def told(site: Path) -> list[Told]:
    if not has_left(site):
        return []
    lines = (site / FILE).read_text(encoding="utf-8").splitlines()
    return [Told(when, run) for when, _, run in (line.partition("\t") for line in lines)]
