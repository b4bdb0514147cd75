"""A run at the hub: make its folder, hand it to Flower, watch it, and hand it over again if its server app dies."""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import filelock

from weft import scenarios
from weft.errors import WeftError
from weft.files import is_taken, write_text
from weft.flower.hub.hub import Hub
from weft.flower.hub.programs import NAME, ask
from weft.flower.hub.waiting import Waiting, printable
from weft.flower.site_policy import fault
from weft.plan import Plan, flat_keys
from weft.runs.folder import Record, read_manifest, read_plan
from weft.runs.result import Result
from weft.runs.run import fresh_folder, is_over

SITES, TROUBLE = "sites.json", "problem.txt"  # in the run folder: who takes part; why it cannot go on
LOG = "server.log"  # why a server app died
ABSENT = "absent.json"  # of its sites, those that it begins or goes on without
REMOVED = "removed.json"  # of its sites, those that the hub has taken out since it began
WATCHED = ".watched"  # held as a lock by who watches a run and starts its server app again
WAITS = ".waits"  # held as a lock by who waits for the sites of a run before handing it over
FLOWER = "flower.txt"  # the number of the last run that Flower made of it
LOOK = 0.5  # seconds between two looks at the folder
ASK = 5.0  # seconds between two questions to Flower
STARTS = 20  # of one server app
SAME = 3  # deaths of the same cause at the same round: another start would end in the same way
OVER = "finished"

Say = Callable[[str], None]


def prepare(hub: Hub, plan: Plan, out: Path | None) -> Path:
    """A new run folder for the sites of the hub."""
    names = hub.sites()
    if plan.clients != len(names):
        raise WeftError(
            f"the plan has {plan.clients} clients, the hub has {len(names)} sites; add clients={len(names)}"
        )
    if plan.faults.any or plan.clock != Plan().clock:
        raise WeftError(
            "clock.* and faults.* are drawn for clients of one machine; a hub has real ones: leave them out"
        )
    if why := fault(flat_keys(plan.toml())):
        raise WeftError(f"every site would refuse this plan: {why}")
    scenario = scenarios.of(plan)  # a dataset that is missing is told before there is a folder
    folder = (out or fresh_folder(plan)).absolute()
    Record.create(folder, plan, scenario.images).close()
    write_text(folder / SITES, json.dumps({"names": names, "run": name_for_sites(folder)}) + "\n")
    hub.note(folder)
    return folder


def name_for_sites(folder: Path) -> str:
    """Sites know a run by the name of its folder; letters behind it tell runs apart that were called the same."""
    return f"{re.sub('[^0-9A-Za-z]+', '-', folder.name).strip('-')[:80] or 'run'}-{uuid.uuid4().hex[:12]}"


def is_run(place: str) -> bool:
    """Is it the folder of a run that a hub began?"""
    return (Path(place) / SITES).is_file() and (Path(place) / "run.json").is_file()


def work(hub: Hub, folder: Path, say: Say, wait: float) -> Result:
    """Until the run is over. Whoever stops this does not stop the run."""
    read_plan(folder)
    if not is_over(folder) and not at_work(hub, folder):
        try:
            with filelock.FileLock(folder / WAITS, timeout=0):
                note_absent(folder, wait_for_sites(hub, folder, say, wait))
        except filelock.Timeout:
            raise WeftError(f"another weft hub run waits for the sites of {folder} already") from None
    say(f"sites know this run as {json.loads((folder / SITES).read_text(encoding='utf-8'))['run']}")
    with contextlib.ExitStack() as watched:
        with contextlib.suppress(filelock.Timeout):  # somebody else watches it too
            watched.enter_context(filelock.FileLock(folder / WATCHED, timeout=0))
        return _watch_over(hub, folder, say)


def _watch_over(hub: Hub, folder: Path, say: Say) -> Result:
    """Until the run is over: its server app is started, and started again if it dies."""
    waiting = Waiting(folder)
    deaths: Counter[tuple[str, int]] = Counter()
    for _ in range(STARTS):
        if is_over(folder):
            return Result(folder)
        written = _size(folder / LOG)
        run_id = at_work(hub, folder) or submit(hub, folder)
        say(f"the hub works on {folder}; weft watch {folder} shows it (Flower's run {run_id})")
        watch(hub, folder, run_id, waiting, say)
        if not is_over(folder):
            if (folder / TROUBLE).exists():
                raise WeftError((folder / TROUBLE).read_text(encoding="utf-8").strip())
            why, at = last_words(folder / LOG, written), rounds(folder)
            deaths[why, at] += 1
            if why and deaths[why, at] >= SAME:
                raise WeftError(
                    f"the server app died {SAME} times after round {at}: {why}; {folder / LOG} has all of it"
                )
            how = f": {why} ({folder / LOG} has all of it)" if why else " without a word, as if it was killed"
            say(f"the server app died{how}; it is started again from its last checkpoint")
            if was := set(absent(folder)):
                with contextlib.suppress(WeftError):  # the SuperLink may be on its way up again
                    note_absent(folder, set(members(folder)) - (was - set(hub.online())))
    raise WeftError(f"the server app of {folder} died {STARTS} times; see {hub.folder / 'logs' / 'superexec.log'}")


def last_words(log: Path, before: int) -> str:
    """The last line of what was written since the log had so many bytes; nothing if nothing was."""
    if _size(log) <= before:
        return ""
    lines = log.read_bytes()[before:].decode(errors="replace").split("\n")
    return printable(next(line for line in reversed(lines) if line.strip()))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def rounds(folder: Path) -> int:
    """How many are over, by the checkpoint."""
    manifest = read_manifest(folder / "checkpoints")
    return int(manifest["progress"]["round"]) if manifest else 0


def submit(hub: Hub, folder: Path) -> str:
    (folder / TROUBLE).unlink(missing_ok=True)
    said = ask(["run", str(hub.folder / "app"), NAME, "-c", f"folder={json.dumps(str(folder))}"], hub.home)
    run_id = str(said["run-id"])
    write_text(folder / FLOWER, run_id + "\n")
    return run_id


def at_work(hub: Hub, folder: Path) -> str:
    """Flower's run that works on the folder already, if there is one: two would be one too many."""
    with contextlib.suppress(OSError, WeftError):
        run_id = (folder / FLOWER).read_text(encoding="utf-8").strip()
        return "" if status_of(hub, run_id).startswith(OVER) else run_id
    return ""


def watch(hub: Hub, folder: Path, run_id: str, waiting: Waiting, say: Say) -> None:
    """Until Flower says that this run is over, in whatever way; says meanwhile which sites have no task yet.

    To ask Flower costs seconds of a processor. While the server app holds the run's lock it is alive, and need not be
    asked for.
    """
    asked = time.monotonic()
    while not (folder / "summary.json").exists():
        time.sleep(LOOK)
        for line in waiting.new():
            say(line)
        if is_taken(folder / ".lock"):
            continue
        if time.monotonic() - asked >= ASK:
            with contextlib.suppress(WeftError):  # the SuperLink may be on its way up again
                if status_of(hub, run_id).startswith(OVER):
                    return
            asked = time.monotonic()


def status_of(hub: Hub, run_id: str) -> str:
    said = ask(["list", NAME, "--run-id", run_id], hub.home)
    return str(said["runs"][0]["status"])


def members(folder: Path) -> list[str]:
    """The sites of a run as they were when it began, in the order of the plan's clients."""
    names: list[str] = json.loads((folder / SITES).read_text(encoding="utf-8"))["names"]
    return names


def counted_on(hub: Hub, folder: Path) -> list[str]:
    """Those that have not left the run and are still sites of the hub."""
    manifest, now = read_manifest(folder / "checkpoints"), hub.sites()
    left = manifest["clock"].get("left", []) if manifest else []
    out = removed(folder)  # also if it was invited anew
    return [
        name for client, name in enumerate(members(folder)) if client not in left and name in now and name not in out
    ]


def begins_with_some(folder: Path) -> bool:
    """Can it do without a site that is not there? Only the first round of a plan without a deadline needs them all."""
    plan = read_plan(folder)
    return rounds(folder) > 0 or plan.deadline != "none" or plan.quorum != "all"


def wait_for_sites(hub: Hub, folder: Path, say: Say, patience: float) -> set[str]:
    """Until all that the run counts on are there, or patience is over; who is there then."""
    names, some, missing = counted_on(hub, folder), begins_with_some(folder), [""]
    if not names:
        raise WeftError(f"every site of {folder} has left it or was removed; there is nobody to go on with")
    end = time.monotonic() + patience
    while missing:
        if not hub.is_up():
            raise WeftError(f"the hub in {hub.folder} is not up; weft hub start starts it")
        before, missing = missing, names
        with contextlib.suppress(WeftError):  # the SuperLink may be on its way up
            online = hub.online()
            missing = [name for name in names if name not in online]
        who = ", ".join(missing)
        if missing and time.monotonic() >= end:
            break
        if missing and missing != before:
            say(f"waiting for {who}" + (f", {patience:.0f} s at most" if some else ""))
        time.sleep(1.0 if missing else 0.0)
    if missing and (missing == names or not some):
        raise WeftError(
            f"not there after {patience:.0f} s: {who}; ask there for weft site start, then weft hub run {folder} goes "
            "on; or take a site out with weft hub remove NAME, and the run does without it"
        )
    if missing:
        say(f"WARNING: not there after {patience:.0f} s: {who}; the run goes on without, and asks again who comes back")
    return set(names) - set(missing)


def note_absent(folder: Path, there: set[str]) -> None:
    """For the server app, which would have patience with them once more."""
    write_text(folder / ABSENT, json.dumps([name for name in members(folder) if name not in there]) + "\n")


def absent(folder: Path) -> list[str]:
    names: list[str] = json.loads((folder / ABSENT).read_text(encoding="utf-8")) if (folder / ABSENT).exists() else []
    return names


def note_removed(folder: Path, name: str) -> None:
    """For the server app, which would wait for a site that cannot come any more; nothing for a run without it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, WeftError):  # whatever became of that run
        if name in members(folder) and not is_over(folder):
            write_text(folder / REMOVED, json.dumps(sorted({*removed(folder), name})) + "\n")


def removed(folder: Path) -> list[str]:
    path = folder / REMOVED
    names: list[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return names
