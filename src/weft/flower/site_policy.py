"""What a site decides for itself: which plans it accepts, how much of A it shares, and whether it has left.

Validating a plan loads the code that it names, so `rejection` looks at the text of a plan first. The hub calls it too,
before a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError
from weft.files import append, write_text
from weft.plan import Plan
from weft.report.text import utc

BUILT_IN = re.compile(r"[0-9a-z][0-9a-z@+-]*")  # a method or network of weft: neither a file nor a module
# none of these reads a folder that the plan names
SCENARIOS = ("sites", "glyphs", "overlapped-cifar100", "noniid-50", "noniid-35", "interference")
METRICS = ("balanced", "auroc", "recall")
# a site allocates memory by these numbers
LIMITS = {"clients": 10**5, "tasks": 10**4, "rounds_per_task": 10**6, "epochs_per_round": 10**6, "batch_size": 10**6}
NETWORK_LIMIT = 8192  # units of a layer, and every other number of a network
SHARE_FILE, LEAVE_FILE, LEAVE_LOCK = "share.txt", "leaving", ".leaving.lock"  # in the site's folder

Share = int | str  # rows, "all" or "nothing"


def rejection(plan: Mapping[str, Any]) -> str:
    """Why a site rejects a plan, given as `weft.plan.flat_keys` of its text; empty if it accepts it."""
    if "for" in plan:
        return "it has sections for several methods; send the plan of one method"
    for key in ("method", "network"):
        if not isinstance(plan.get(key), str) or not BUILT_IN.fullmatch(plan[key]):
            return f"{key}={plan.get(key)!r}; a site runs only the methods and networks of weft"
    if plan.get("scenario", "glyphs") not in SCENARIOS:
        return f"scenario={plan['scenario']!r}; a site accepts {', '.join(SCENARIOS)}"
    if plan.get("scenario.folder"):
        return f"scenario.folder={plan['scenario.folder']!r}; a site uses its own folder"
    if plan.get("loss") is not None:
        return f"loss={plan['loss']!r}; a site runs only the losses of weft"
    for key, value in plan.items():
        limit = NETWORK_LIMIT if key.startswith("network.") else LIMITS.get(key)
        if limit is not None and isinstance(value, int | float) and value > limit:
            return f"{key}={value}; a site accepts {limit:,} at most"
    metrics = plan.get("metrics") or ""
    if not isinstance(metrics, str) or not set(filter(None, metrics.split(","))) <= set(METRICS):
        return f"metrics={metrics!r}; a site accepts {', '.join(METRICS)}"
    return ""


# ---- how much of A it shares -----------------------------------------------------------------------------------------


def parse_share(text: str) -> Share:
    """
    >>> parse_share("nothing"), parse_share("20")
    ('nothing', 20)
    """
    if text in ("all", "nothing"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise WeftError(f"{text!r} is not a share of A; use all, nothing, or a number of rows such as 20")


def read_share(site: Path) -> Share:
    path = site / SHARE_FILE
    return parse_share(path.read_text(encoding="utf-8").strip()) if path.exists() else "all"


def write_share(site: Path, text: str) -> None:
    write_text(site / SHARE_FILE, f"{parse_share(text)}\n")


def limit_share(plan: Plan, site: Path) -> Plan:
    """Reduce what a plan requests of A to what the site shares."""
    allowed, requested = read_share(site), plan.method_options.get("share")
    if requested is None or allowed == "all" or requested == "nothing":
        return plan
    less = allowed if allowed == "nothing" or requested == "all" else min(int(allowed), int(requested))
    return plan.model_copy(update={"method_options": {**plan.method_options, "share": less}})


# ---- leaving: the file is empty until the hub is notified, then has a line for each run ------------------------------


def leave(site: Path) -> None:
    if not has_left(site):
        write_text(site / LEAVE_FILE, "")


def has_left(site: Path) -> bool:
    return (site / LEAVE_FILE).exists()


def record_leave_notice(site: Path, run: str) -> None:
    """Record once per run that the hub is notified."""
    with filelock.FileLock(site / LEAVE_LOCK):  # requests of two runs may come at the same time
        if run not in [notice["run"] for notice in leave_notices(site)]:
            append(site / LEAVE_FILE, f"{utc()}\t{run}\n")


def leave_notices(site: Path) -> list[dict[str, str]]:
    """When (UTC) and in which runs."""
    lines = (site / LEAVE_FILE).read_text(encoding="utf-8").splitlines() if has_left(site) else []
    return [dict(zip(("when", "run"), line.split("\t"), strict=False)) for line in lines]
