"""The status of a run and of a site's connection, read from run folders and logs.

Flower reports the state of a SuperNode's connection in its log only. Observed with flwr 1.41.0: a hub that rejects a
key replies with code 2004, after which the SuperNode ends; while a hub is unreachable the SuperNode keeps trying. If
the time of a signed request is more than 5 s ahead of the hub's clock or 305 s behind, the hub replies 401: the
SuperNode then ends with code 0, 'terminated gracefully', and does not log why.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from weft.errors import WeftError, printable
from weft.files import is_taken
from weft.report.text import utc
from weft.runs.folder import SITES, read_manifest
from weft.runs.journal import Event, Journal, read_journal

# in a run folder
ERROR_FILE, SERVER_LOG = "error.txt", "server.log"  # why the run cannot continue; why its server app died
WATCHED, WAITS = ".watched", ".waits"  # locks: of the command that restarts the server app, or waits for sites first
FLOWER_RUN = "flower.txt"  # the number of its last run in Flower
STARTING = 60.0  # seconds in which a submitted server app takes the run's lock

State = Literal["finished", "waiting for sites", "running", "stopped"]

# ---- runs of a hub ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStatus:
    folder: str
    error: str = ""  # its folder cannot be read
    run: str = ""  # its name at sites
    state: State = "stopped"
    reason: str = ""  # why it stopped
    rounds: int = 0
    incidents: dict[str, int] = field(default_factory=dict)  # by site
    left: dict[str, float] = field(default_factory=dict)  # by site, when, in seconds since 1970
    removed: list[str] = field(default_factory=list)
    waiting_for: list[str] = field(default_factory=list)  # sites without a task

    def as_text(self) -> str:
        if self.error:
            return self.error
        state: str = self.state
        if self.state == "stopped":
            state += f"{f' ({self.reason})' if self.reason else ''}; weft hub run {self.folder} resumes it"
        incidents = "".join(f" ({site}: {count})" for site, count in self.incidents.items())
        parts = [state, f"rounds: {self.rounds}", f"incidents: {sum(self.incidents.values())}{incidents}"]
        parts += [f"{site} has left" for site in self.left] + [f"{site} was removed" for site in self.removed]
        return ", ".join([*parts, *(f"waiting for {line}" for line in self.waiting_for)])


def run_status(folder: Path, is_up: bool = True) -> RunStatus:
    """`is_up`: the hub runs. Incidents are those that `weft show` lists, with the site of each."""
    path, names, run = os.path.relpath(folder), list[str](), ""
    if not folder.is_dir():
        return RunStatus(path, error="its folder does not exist any more")
    try:
        rounds = finished_rounds(folder)
    except WeftError as error:
        return RunStatus(path, error=str(error))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        names, run = members(folder)
    events = read_journal(folder)
    state, reason = _state(folder, is_up)
    return RunStatus(
        path,
        run=run,
        state=state,
        reason=reason,
        rounds=rounds,
        incidents=dict(Counter(_site_of(event, names) for event in events if event.is_incident)),
        left={str(event.facts.get("site")): event.at for event in events if event.kind == "left"},
        removed=sorted({str(event.facts.get("site")) for event in events if event.kind == "removed"}),
        waiting_for=Waiting(folder).now() if state in ("running", "waiting for sites") else [],
    )


def _state(folder: Path, is_up: bool) -> tuple[State, str]:
    """And the reason if it stopped with one."""
    if (folder / "summary.json").exists():
        return "finished", ""
    if is_taken(folder / WAITS):
        return "waiting for sites", ""
    if is_taken(folder / ".lock") or is_taken(folder / WATCHED):
        return "running", ""
    with contextlib.suppress(OSError, ValueError):
        return "stopped", " ".join((folder / ERROR_FILE).read_text(encoding="utf-8").split())
    with contextlib.suppress(OSError):
        if is_up and time.time() - (folder / FLOWER_RUN).stat().st_mtime <= STARTING:
            return "running", ""
    return "stopped", ""


def members(folder: Path) -> tuple[list[str], str]:
    """The sites of a run when it started, in the order of the plan's clients; and the run's name at sites."""
    content = json.loads((folder / SITES).read_text(encoding="utf-8"))
    return [str(name) for name in content["names"]], str(content["run"])


def finished_rounds(folder: Path) -> int:
    manifest = read_manifest(folder / "checkpoints")
    return int(manifest["progress"]["round"]) if manifest else 0


def _site_of(event: Event, names: list[str]) -> str:
    """A client's number is an index of the run's own list: the hub's list may have changed since."""
    client = event.facts.get("client")
    if "site" in event.facts:
        return str(event.facts["site"])
    if not isinstance(client, int):
        return "the hub"
    return names[client] if 0 <= client < len(names) else f"client {client}"


def sites_that_left(runs: list[RunStatus], invited: dict[str, float]) -> set[str]:
    """The sites that have left in a run and were not invited again since then."""
    left = [pair for run in runs for pair in run.left.items()]
    return {site for site, when in left if site in invited and when >= invited[site]}


class Waiting:
    """Progress of a run, and the sites without a task, read from its journal; reads only new events each time."""

    def __init__(self, folder: Path):
        self._journal = Journal(folder)
        self._reasons: dict[int, str] = {}  # by client, until it replies or leaves
        self._tested: dict[int, set[int]] = {}  # by task, the clients that have finished it
        self._warnings: list[str] = []
        self._shown: set[str] = set()

    def now(self) -> list[str]:
        """Each waiting site and its reason."""
        for _, kind, facts in self._journal.new_events():
            if kind == "waiting":
                self._reasons[facts["client"]] = printable(f"{facts['site']}: {facts['reason']}").replace("\n", " ")
            elif kind in ("reply", "left", "removed"):
                self._reasons.pop(facts["client"], None)
            elif kind == "warning":
                self._warnings.append(printable(f"warning: {facts['about']}").replace("\n", " "))
            elif kind == "tested":
                self._tested.setdefault(facts["task"], set()).add(facts["client"])
        return [self._reasons[client] for client in sorted(self._reasons)]

    def new(self) -> list[str]:
        """Lines that were not returned before: a restarted server app repeats events."""
        waiting = [f"waiting for {line}" for line in self.now()]
        finished = [f"task {task}: sites that have finished: {len(who)}" for task, who in sorted(self._tested.items())]
        found = [line for line in [*finished, *waiting, *self._warnings] if line not in self._shown]
        self._shown.update(found)
        return found


# ---- a site's connection to its hub ----------------------------------------------------------------------------------

Connection = Literal["", "connected", "rejected", "unreachable", "untrusted", "silent"]

START, END = b"Starting Flower SuperNode", b"SuperNode terminated"
SIGNS: dict[bytes, Connection] = {
    b"SuperNode ID:": "connected",
    b"Connection successful": "connected",
    b"[code: 2004]": "rejected",
    b"Connection attempt failed": "unreachable",
    b"SSL/TLS handshake error": "untrusted",
}
LOG_TAIL = 1 << 16  # bytes
CAUSES: dict[Connection, str] = {
    "rejected": "the hub rejects it{since}: it was removed there, or its key is used elsewhere, or it was killed less "
    "than a minute ago",
    "unreachable": "the hub cannot be reached{since}; last attempt {last} UTC",
    "untrusted": "the hub's certificate is not accepted{since}: it has expired, or belongs to another hub or address; "
    "ask the hub for a new invitation",
    "silent": "it ends after each start without a connection{since}, and Flower gives no reason: most likely this "
    "machine's clock is more than 5 s ahead of the hub's or 5 minutes behind it (set both by NTP), or the site is no "
    "longer invited",
}


def connection(log: Path, process: dict[str, Any]) -> Connection:
    """By the last sign since the last start of the SuperNode; before the first sign, by those of the start before."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL))
            text = file.read()
    except OSError:
        return ""
    *_, before, now = b"", *text.split(START)
    if found := _last_sign(now):
        return found
    if not process.get("failing"):
        return ""  # it was just started
    found = _last_sign(before)
    if START in text and (not found or END in now):
        return "silent"
    return "" if found == "connected" else found


def _last_sign(text: bytes) -> Connection:
    position, found = max((text.rfind(sign), name) for sign, name in SIGNS.items())
    return found if position >= 0 else ""


def connection_text(found: Connection, process: dict[str, Any], log: Path) -> str:
    """The cause and the remedy; empty if nothing is wrong."""
    if found not in CAUSES:
        return ""
    since = f" since {utc(process['failing'])} UTC" if process.get("failing") else ""
    return f"{CAUSES[found].format(since=since, last=utc(log.stat().st_mtime))} ({log})"
