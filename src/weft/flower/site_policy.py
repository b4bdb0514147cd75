"""What a hub's plan may ask of a site: weft's own parts, the site's own tasks, and no code that the plan names.

To check a plan loads the code that it names, so this looks at its words first. The hub looks too, before it begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

OWN_NAME = re.compile(r"[0-9a-z][0-9a-z@+-]*")  # of a method or network: neither a file nor a module
# no folder that the plan names
SCENARIOS = ("sites", "glyphs", "overlapped-cifar100", "noniid-50", "noniid-35", "interference")
METRICS = ("balanced", "auroc", "recall")
# a site makes room by these numbers before it has seen anything else of the run
MOST = {"clients": 10**5, "tasks": 10**4, "rounds_per_task": 10**6, "epochs_per_round": 10**6, "batch_size": 10**6}
MOST_OF_NETWORK = 8192  # units of a layer, and whatever else is a number there


def fault(words: Mapping[str, Any]) -> str:
    """Why a site refuses a plan, given as the keys of its file; nothing if it does not."""
    if "for" in words:
        return "it has sections for other methods; it should be whole"
    for part in ("method", "network"):
        if not isinstance(words.get(part), str) or not OWN_NAME.fullmatch(words[part]):
            return f"{part}={words.get(part)!r}; a site runs only what comes with weft"
    if words.get("scenario", "glyphs") not in SCENARIOS:
        return f"scenario={words['scenario']!r}; a site learns its own tasks (sites) or weft's benchmarks"
    if words.get("loss") is not None:
        return f"loss={words['loss']!r}; a site runs only what comes with weft"
    for key, value in _flat(words):
        most = MOST_OF_NETWORK if key.startswith("network.") else MOST.get(key)
        if most is not None and isinstance(value, int | float) and value > most:
            return f"{key}={value}; a site takes {most:,} at most"
    asked = words.get("metrics") or ""
    if not isinstance(asked, str) or not set(filter(None, asked.split(","))) <= set(METRICS):
        return f"metrics={asked!r}; a site measures {', '.join(METRICS)}"
    return ""


def _flat(words: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys of a plan as they are written, with a dot or as a table of their own."""
    for key, value in words.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{below}", more) for below, more in value.items())
        else:
            yield key, value
