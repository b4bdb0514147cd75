"""What a site may be called and a hub's address be, wherever it comes from: it gets into paths and onto screens."""

from __future__ import annotations

import re

SITE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
HUB_ADDRESS = re.compile(r"[A-Za-z0-9._-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")  # HOST:PORT
