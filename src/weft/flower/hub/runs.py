"""A run at the hub: make its folder, submit it to Flower, watch it, and submit it again if its server app dies."""

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
from weft.files import is_taken, read_json, write_json, write_text
from weft.flower.hub import status
from weft.flower.hub.hub import Hub
from weft.flower.hub.programs import CONNECTION, flwr
from weft.flower.hub.status import ERROR_FILE, FLOWER_RUN, Waiting, finished_rounds, members
from weft.flower.site_policy import rejection
from weft.plan import Plan, flat_keys
from weft.runs.folder import SITES, RunFolder, read_manifest, read_plan
from weft.runs.result import Result
from weft.runs.run import is_over, new_path

ABSENT, REMOVED = "absent.json", "removed.json"  # sites that the run starts without; sites that the hub has removed
LOOK = 0.5  # seconds between two looks at the folder
ASK = 5.0  # seconds between two calls of Flower
MAX_STARTS = 20  # of one server app
SAME_CAUSE = 3  # deaths of one cause at one round: another start would end the same way

Say = Callable[[str], None]


def prepare(hub: Hub, plan: Plan, out: Path | None) -> Path:
    """A new run folder for the sites of the hub."""
    names = hub.sites()
    if plan.clients != len(names):
        raise WeftError(f"the plan has {plan.clients} clients, the hub {len(names)} sites; add clients={len(names)}")
    if plan.faults.any or plan.clock != Plan().clock:
        raise WeftError("clock.* and faults.* simulate clients of one machine; remove them from a plan for a hub")
    if reason := rejection(flat_keys(plan.toml())):
        raise WeftError(f"every site would reject this plan: {reason}")
    scenario = scenarios.of(plan)  # reports a missing dataset before there is a folder
    folder = (out or new_path(plan)).absolute()
    RunFolder.create(folder, plan, scenario.images).close()
    write_json(folder / SITES, {"names": names, "run": name_at_sites(folder)})
    hub.add_run(folder)
    return folder


def name_at_sites(folder: Path) -> str:
    """The name of the folder and twelve digits, because several folders may have one name."""
    return f"{re.sub('[^0-9A-Za-z]+', '-', folder.name).strip('-')[:80] or 'run'}-{uuid.uuid4().hex[:12]}"


def is_run(path: str) -> bool:
    """Is it the folder of a run of a hub?"""
    return (Path(path) / SITES).is_file() and (Path(path) / "run.json").is_file()


def work(hub: Hub, folder: Path, say: Say, wait: float) -> Result:
    """Start or resume a run and watch it until it is finished. Stopping this does not stop the run."""
    read_plan(folder)
    if not is_over(folder) and not active_run(hub, folder):
        try:
            with filelock.FileLock(folder / status.WAITS, timeout=0):
                write_absent(folder, wait_for_sites(hub, folder, say, wait))
        except filelock.Timeout:
            raise WeftError(f"another weft hub run is already waiting for the sites of {folder}; stop that") from None
    say(f"name of this run at sites: {members(folder)[1]}")
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(filelock.Timeout):  # another process watches it too
            lock.enter_context(filelock.FileLock(folder / status.WATCHED, timeout=0))
        return _supervise(hub, folder, say)


def _supervise(hub: Hub, folder: Path, say: Say) -> Result:
    """Start the server app, and start it again if it dies, until the run is finished."""
    waiting, log = Waiting(folder), folder / status.SERVER_LOG
    deaths: Counter[tuple[str, int]] = Counter()
    for _ in range(MAX_STARTS):
        if is_over(folder):
            return Result(folder)
        size = log.stat().st_size if log.exists() else 0
        run_id = active_run(hub, folder) or submit(hub, folder)
        say(f"the hub works on {folder} (Flower's run {run_id}); weft watch {folder} shows it")
        watch(hub, folder, run_id, waiting, say)
        if is_over(folder):
            continue
        if (folder / ERROR_FILE).exists():
            raise WeftError((folder / ERROR_FILE).read_text(encoding="utf-8").strip())
        lines = log.read_bytes()[size:].decode(errors="replace").split("\n") if log.exists() else []
        reason = next((line for line in reversed(lines) if line.strip()), "")
        rounds = finished_rounds(folder)
        deaths[reason, rounds] += 1
        if reason and deaths[reason, rounds] >= SAME_CAUSE:
            raise WeftError(f"the server app died {SAME_CAUSE} times after round {rounds}: {reason}; see {log}")
        cause = f": {reason} (see {log})" if reason else " without an error message, probably killed"
        say(f"the server app died{cause}; it is restarted from its last checkpoint")
        if before := set(absent(folder)):
            with contextlib.suppress(WeftError):  # the SuperLink may be restarting
                write_absent(folder, set(members(folder)[0]) - (before - set(hub.online())))
    raise WeftError(f"the server app of {folder} died {MAX_STARTS} times; see {hub.folder / 'logs' / 'superexec.log'}")


# ---- Flower's run ----------------------------------------------------------------------------------------------------


def submit(hub: Hub, folder: Path) -> str:
    (folder / ERROR_FILE).unlink(missing_ok=True)
    arguments = ["run", str(hub.folder / "app"), CONNECTION, "-c", f"folder={json.dumps(str(folder))}"]
    run_id = str(flwr(arguments, hub.home)["run-id"])
    write_text(folder / FLOWER_RUN, run_id + "\n")
    return run_id


def active_run(hub: Hub, folder: Path) -> str:
    """Flower's run that already works on the folder; empty if there is none."""
    with contextlib.suppress(OSError, WeftError):
        run_id = (folder / FLOWER_RUN).read_text(encoding="utf-8").strip()
        return "" if has_ended(hub, run_id) else run_id
    return ""


def has_ended(hub: Hub, run_id: str) -> bool:
    found = flwr(["list", CONNECTION, "--run-id", run_id], hub.home)["runs"][0]
    return str(found["status"]).startswith("finished")


def watch(hub: Hub, folder: Path, run_id: str, waiting: Waiting, say: Say) -> None:
    """Return when Flower reports that the run has ended in any way; print progress meanwhile.

    A call of Flower costs seconds of a core. While the server app holds the run's lock it is alive.
    """
    asked = time.monotonic()
    while not (folder / "summary.json").exists():
        time.sleep(LOOK)
        for line in waiting.new():
            say(line)
        if not is_taken(folder / ".lock") and time.monotonic() - asked >= ASK:
            with contextlib.suppress(WeftError):  # the SuperLink may be restarting
                if has_ended(hub, run_id):
                    return
            asked = time.monotonic()


# ---- its sites -------------------------------------------------------------------------------------------------------


def expected_sites(hub: Hub, folder: Path) -> list[str]:
    """The sites that have not left the run and are still sites of the hub."""
    manifest, names = read_manifest(folder / "checkpoints"), members(folder)[0]
    left = manifest["transit"].get("left", []) if manifest else []
    staying = {name for client, name in enumerate(names) if client not in left} - set(removed(folder))
    return [name for name in names if name in staying and name in hub.sites()]


def wait_for_sites(hub: Hub, folder: Path, say: Say, patience: float) -> set[str]:
    """Wait until all expected sites are connected, at most `patience` seconds; return those that are.

    Only the first round of a plan without a deadline or a quorum needs all of them.
    """
    plan, names, missing = read_plan(folder), expected_sites(hub, folder), [""]
    needs_all = finished_rounds(folder) == 0 and plan.deadline == "none" and plan.quorum == "all"
    if not names:
        raise WeftError(f"every site of {folder} has left or was removed; start a new run with weft hub run")
    end = time.monotonic() + patience
    while missing:
        if not hub.is_up():
            raise WeftError(f"the hub in {hub.folder} is not running; weft hub start starts it")
        before, missing = missing, names
        with contextlib.suppress(WeftError):  # the SuperLink may be starting
            online = hub.online()
            missing = [name for name in names if name not in online]
        if missing and time.monotonic() >= end:
            break
        if missing and missing != before:
            say(f"waiting for {', '.join(missing)}, {patience:.0f} s at most")
        time.sleep(1.0 if missing else 0.0)
    if missing and (missing == names or needs_all):
        raise WeftError(
            f"not connected after {patience:.0f} s: {', '.join(missing)}; run weft site start there and then weft hub "
            f"run {folder}, or continue without a site by weft hub remove NAME"
        )
    if missing:
        say(f"WARNING: not connected after {patience:.0f} s: {', '.join(missing)}; the run continues without them")
    return set(names) - set(missing)


def write_absent(folder: Path, available: set[str]) -> None:
    """For the server app, which would wait for them again."""
    write_json(folder / ABSENT, [name for name in members(folder)[0] if name not in available])


def absent(folder: Path) -> list[str]:
    return read_json(folder / ABSENT, list[str]())


def write_removed(folder: Path, name: str) -> None:
    """For the server app, which would wait for a site that cannot return; does nothing for a run without it."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, WeftError):  # that run may be damaged
        if name in members(folder)[0] and not is_over(folder):
            write_json(folder / REMOVED, sorted({*removed(folder), name}))


def removed(folder: Path) -> list[str]:
    return read_json(folder / REMOVED, list[str]())
