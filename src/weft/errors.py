"""Errors for the user.

A `WeftError` is something that the user can fix: a wrong key, a missing file, a full disk. Its text is one line that
names the cause and the remedy. The command line prints it to stderr and exits with code 2. Any other exception is a
bug in weft and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class WeftError(Exception):
    """An error that the user can fix; the text is one line that says how."""


class RunLockedError(WeftError):
    """Another process is using the folder; retry when it has finished."""


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the known word most similar to `word`, or list all known words.

    `prefix` is put before every word that is shown; it takes no part in the comparison, because all words share it.

    >>> nearest("round_per_task", ["rounds_per_task", "seed"])
    'did you mean rounds_per_task?'
    >>> nearest("x", ["a", "b"])
    'choose one of: a, b'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return f"choose one of: {', '.join(prefix + name for name in names)}"


def show(value: Any) -> str:
    """An untrusted value, for an error of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """Untrusted text for a terminal: without escape codes and other control characters, except for line breaks.

    >>> printable("\\x1b[2Ja\\rb\\nc")
    ' [2Ja b\\nc'
    """
    return "".join(letter if letter.isprintable() or letter == "\n" else " " for letter in text)
