"""Whether a site's SuperNode is in touch with the hub, as its log tells it: Flower says it nowhere else.

Tried with flwr 1.41.0: a hub that refuses a key answers with code 2004, after which the SuperNode ends; one that cannot
be reached is tried again and again by a SuperNode that lives on.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

Link = Literal["", "in", "refused", "unreachable"]

SIGNS: tuple[tuple[bytes, Link], ...] = (
    (b"SuperNode ID:", "in"),
    (b"Connection successful", "in"),
    (b"[code: 2004]", "refused"),
    (b"Connection attempt failed", "unreachable"),
    (b"SSL/TLS handshake error", "unreachable"),
)
ENOUGH = 1 << 16  # bytes of a log's end


def state(log: Path) -> Link:
    """By the last sign of one or the other; nothing if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - ENOUGH))
            text = file.read()
    except OSError:
        return ""
    places = [(text.rfind(sign), link) for sign, link in SIGNS]
    at, found = max(places)
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
    return ""


def _moment(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
