"""How a run of a hub stands, as its folder tells it: in numbers, and in one line for a person."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.files import is_taken
from weft.flower.hub.runs import FLOWER, TROUBLE, WAITS, WATCHED
from weft.flower.hub.waiting import Waiting
from weft.report.reading import Event, read_journal
from weft.runs.folder import SITES, read_manifest

State = dict[str, Any]
HUB = "the hub"  # whose incident it is if it is no site's
STARTING = 60.0  # seconds in which a server app that Flower was told to start has the run's lock


def state(folder: Path, is_up: bool = True) -> State:
    """Incidents are those that `weft show` lists, each beside the site that it was with; `is_up`: the hub."""
    place = os.path.relpath(folder)
    if not folder.is_dir():
        return {"folder": place, "problem": "its folder is not there any more"}
    try:
        manifest = read_manifest(folder / "checkpoints")
    except WeftError as problem:
        return {"folder": place, "problem": str(problem)}
    events = read_journal(folder)
    names, run = _members(folder)
    of = Counter(_whose(event, names) for event in events if event.is_incident)
    over = (folder / "summary.json").exists()
    begins = not over and is_taken(folder / WAITS)
    stopped, why = (False, "") if over or begins else _stopped(folder, is_up)
    return {
        "folder": place,
        "run": run,
        "begins": begins,
        "stopped": stopped,
        "why": why,
        "rounds": manifest["progress"]["round"] if manifest else 0,
        "incidents": of.total(),
        "of": dict(of),
        "over": over,
        "left": {str(event.facts.get("site")): event.at for event in events if event.kind == "left"},
        "removed": sorted({str(event.facts.get("site")) for event in events if event.kind == "removed"}),
        "waiting for": [] if over or stopped else Waiting(folder).now(),
    }


def in_words(state: State) -> str:
    """Such as: under way, 4 rounds done, 1 incident (cleo: 1), ben has left, waiting for ada: it has no task 1 yet"""
    if "problem" in state:
        return str(state["problem"])
    whose = ", ".join(f"{site}: {count}" for site, count in state["of"].items())
    words = [
        _how(state),
        f"{state['rounds']} round{'' if state['rounds'] == 1 else 's'} done",
        f"{state['incidents']} incident{'' if state['incidents'] == 1 else 's'} ({whose})" if whose else "no incidents",
        *(f"{site} has left" for site in state["left"]),
        *(f"{site} was taken out" for site in state["removed"]),
        *(f"waiting for {line}" for line in state["waiting for"]),
    ]
    return ", ".join(words)


def _stopped(folder: Path, is_up: bool) -> tuple[bool, str]:
    """Does no process work on a run that is not over? And the last words of the one that did, if it said why."""
    if is_taken(folder / ".lock") or is_taken(folder / WATCHED):
        return False, ""  # or who watches it starts one
    try:
        return True, " ".join((folder / TROUBLE).read_text(encoding="utf-8").split())
    except (OSError, ValueError):
        pass
    try:
        return not is_up or time.time() - (folder / FLOWER).stat().st_mtime > STARTING, ""
    except OSError:
        return True, ""  # `weft hub run` was stopped before


def _how(state: State) -> str:
    if state["over"]:
        return "finished"
    if state["begins"]:
        return "weft hub run waits until its sites are there"
    if not state["stopped"]:
        return "under way"
    why = f" ({state['why']})" if state["why"] else ""
    return f"stopped{why}; weft hub run {state['folder']} goes on"


def _members(folder: Path) -> tuple[list[str], str]:
    """The sites of a run as they were when it began, and the name by which they know it."""
    try:
        words = json.loads((folder / SITES).read_text(encoding="utf-8"))
        return [str(name) for name in words["names"]], str(words["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return [], ""


def _whose(event: Event, names: list[str]) -> str:
    """A number is a place in the run's own list: since then a site may have been removed, and others moved up."""
    client = event.facts.get("client")
    if "site" in event.facts:
        return str(event.facts["site"])
    if not isinstance(client, int):
        return HUB
    return names[client] if 0 <= client < len(names) else f"client {client}"


def left(states: list[State], invited: dict[str, float]) -> set[str]:
    """The sites that said in a run that they have left, unless they were invited again since then."""
    said = [pair for state in states for pair in state.get("left", {}).items()]
    return {site for site, at in said if site in invited and at >= invited[site]}
