"""What a site may be called and a hub's address be, wherever it comes from: it gets into paths and onto screens."""

from __future__ import annotations

import re

SITE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
HUB_ADDRESS = re.compile(r"[A-Za-z0-9._-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")  # HOST:PORT


def is_address(text: str) -> bool:
    """HOST:PORT

    >>> [is_address(each) for each in ("hub.example.org:9443", "[::1]:80", "http://hub:80", "hub:0", "hub:99999")]
    [True, True, False, False, False]
    """
    return bool(HUB_ADDRESS.fullmatch(text)) and 1 <= int(text.rpartition(":")[2]) <= 65535
