"""Whether a site's SuperNode is in touch with the hub, as its log tells it: Flower says it nowhere else.

Tried with flwr 1.41.0: a hub that refuses a key answers with code 2004, after which the SuperNode ends; one that cannot
be reached is tried again and again by a SuperNode that lives on. A hub that does not believe the moment at which a
question was signed, which may be 5 s ahead of its clock and 305 s behind, answers 401: the SuperNode then ends with
code 0, 'terminated gracefully', and not a word of why.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

Link = Literal["", "in", "refused", "unreachable", "untrusted", "silent"]

START, END = b"Starting Flower SuperNode", b"SuperNode terminated"
SIGNS: tuple[tuple[bytes, Link], ...] = (
    (b"SuperNode ID:", "in"),
    (b"Connection successful", "in"),
    (b"[code: 2004]", "refused"),
    (b"Connection attempt failed", "unreachable"),
    (b"SSL/TLS handshake error", "untrusted"),
)
ENOUGH = 1 << 16  # bytes of a log's end


def state(log: Path, process: dict[str, Any]) -> Link:
    """By the last sign since its last start; one that has said nothing yet is as it was before it ended."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - ENOUGH))
            text = file.read()
    except OSError:
        return ""
    *_, before, now = b"", *text.split(START)
    if found := _last_sign(now):
        return found
    if not process.get("failing"):
        return ""  # it has only just been started
    found = _last_sign(before)
    if START in text and (not found or END in now):
        return "silent"
    return "" if found == "in" else found


def _last_sign(text: bytes) -> Link:
    at, found = max((text.rfind(sign), link) for sign, link in SIGNS)
    return found if at >= 0 else ""


def in_words(link: Link, process: dict[str, Any], log: Path) -> str:
    """What a person at the site should know; nothing if all is well."""
    since = f" since {_moment(process['failing'])}" if process.get("failing") else ""
    if link == "refused":
        return (
            f"the hub does not let it in{since}: it was removed there, or its key is in use elsewhere, "
            f"or it was killed less than a minute ago ({log})"
        )
    if link == "unreachable":
        return f"the hub cannot be reached{since}; last tried {_moment(log.stat().st_mtime)} ({log})"
    if link == "untrusted":
        return (
            f"the hub's certificate is not accepted{since}: it has expired, or belongs to another hub or address; "
            f"ask the hub for a new invitation ({log})"
        )
    if link == "silent":
        return (
            f"it ends again and again without having been let in{since}, and Flower does not say why: most likely this "
            f"machine's clock is more than 5 s ahead of the hub's or 5 minutes behind it (set both by NTP), "
            f"or the site is not invited any more ({log})"
        )
    return ""


def _moment(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
