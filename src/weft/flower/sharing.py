"""What a site gives of its A, by its own choice: it stands in the site's folder, and no plan can ask for more."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from weft.errors import WeftError
from weft.files import write_text

FILE = "share.txt"

Share = int | Literal["all", "nothing"]


def parse(text: str) -> Share:
    """
    >>> parse("nothing"), parse("20")
    ('nothing', 20)
    """
    if text in ("all", "nothing"):
        return "all" if text == "all" else "nothing"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise WeftError(f"what is shared of A is all, nothing, or a number of rows such as 20, not {text!r}")


def shared_at(site: Path) -> Share:
    path = site / FILE
    return parse(path.read_text(encoding="utf-8").strip()) if path.exists() else "all"


def choose(site: Path, share: Share) -> None:
    write_text(site / FILE, f"{share}\n")
