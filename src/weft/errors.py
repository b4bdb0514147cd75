"""The one kind of error that a user is meant to read.

A `WeftError` is something that a person can mend: a wrong key, a missing file, a full disk. Its text is one line that
says what to do. The command line prints it to stderr and leaves with code 2; anything else that escapes is a bug in
weft and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class WeftError(Exception):
    """Something that the user can mend; the text is one line and says how."""


class RunLockedError(WeftError):
    """Another process is at it: nothing is wrong, and waiting helps."""


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint that names the known word nearest to `word`, or all of them if none is near.

    `prefix` goes before every name that is shown; it is no part of the comparison, since all share it.

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
