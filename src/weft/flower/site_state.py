"""A site's state of each run, on disk because each message is handled by a new process: client state and last replies.

A reply is on disk before it is sent. A request that comes again, because a reply was lost, a process was killed or the
server returned to its checkpoint, gets the same bytes, and the client does not train twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from weft.errors import WeftError
from weft.files import sync, write_bytes, write_text
from weft.flower.site_policy import Policy
from weft.plan import Plan, flat_keys
from weft.report.text import utc
from weft.runs.folder import read_manifest, write_manifest
from weft.wire.message import decode, encode, failure

KEPT_REPLIES = 12  # a server goes back by one round and the end of its task at most: five replies
MEMORY = 1 << 14  # megabytes: a process holds one client
RUN_LOCK, START_LOCK, TASKS_LOCK = ".lock", ".start.lock", ".tasks.lock"  # of a run; of all runs; of tasks.json
STATE = ("clients", "answered")  # tables of the manifest by client
FAILED = "the request failed at the site; its log has the reason"
NEW: dict[str, Any] = {"clients": {}, "answered": {}, "replies": {}, "files": {}, "started": -1, "finished": -1}


class TaskNotAvailableError(Exception):
    """The site does not have this task yet."""


class SiteState:
    """One run's folder at a site. A lock keeps a second process out of it."""

    def __init__(self, folder: Path, plan: Plan, client: int, policy: Policy | None = None):
        self._folder, self._plan, self._client, self._policy = folder, plan, client, policy or Policy()

    def answer(self, wire: bytes) -> bytes:
        """The reply to an encoded request; a failure is a reply too."""
        from weft.core.client import Runtime  # loads torch
        from weft.core.engine import EngineState
        from weft.engines.host import ClientHost

        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with filelock.FileLock(self._folder / RUN_LOCK):
            with filelock.FileLock(self._folder.parent / START_LOCK):
                pass  # nobody reads the list of tasks while a task is being removed
            self._pin()
            request = decode(wire)
            manifest = read_manifest(self._folder) or {**NEW, "secret": secrets.randbits(62)}
            if (known := manifest["replies"].get(request.request_id)) is not None:
                reply: bytes = (self._folder / known).read_bytes()
                decode(reply)  # a damaged file is not sent
                return reply
            if request.receiver != f"client-{self._client}":
                raise WeftError(f"a message for {request.receiver} was sent to client-{self._client}")
            clients, answered = ({int(key): value for key, value in manifest[name].items()} for name in STATE)
            saved = EngineState(clients, answered)
            plan, policy = self._policy.limited(self._plan), self._policy
            runtime = Runtime(plan, secret=manifest["secret"], largest_jump=policy.largest_jump)
            host = ClientHost(runtime, self._folder, MEMORY, saved)
            if not host.has_task(self._client, request.task):
                raise TaskNotAvailableError(f"it has no task {request.task} yet (weft site task add)")
            try:
                task = runtime.task(self._client, max(0, request.task))
                if fault := policy.request_fault(plan, request.ops, task):
                    return encode(failure(request, f"the site does not allow it: {fault}"))
                reply = host.answer(self._client, wire)
            except Exception as error:
                traceback.print_exc()  # only to the site's log: it may name files, tasks and classes
                # the state on disk is unchanged
                return encode(failure(request, f"{FAILED} ({type(error).__name__})"))
            manifest["started"] = max(manifest["started"], request.task)
            if "end" in request.ops:
                manifest["finished"] = max(manifest["finished"], request.task)
            self._save(host, request.request_id, reply, manifest)
            return reply

    def _pin(self) -> None:
        """Keep the plan and the client of the first request, and reject others.

        Another network would put private parameters where shared ones are, and upload them. `weft site export` reads
        the plan.
        """
        path, text = self._folder / "plan.toml", f"# client {self._client}\n{self._plan.toml()}"
        if not path.exists():
            write_text(path, text)
            sync(path)
        elif path.read_text(encoding="utf-8") != text:
            raise WeftError(f"the hub sent another plan or client number than {path}; a run cannot change")

    def _save(self, host: Any, request_id: str, reply: bytes, manifest: dict[str, Any]) -> None:
        """Write the files, then the manifest that names them, and remove files that it does not name."""
        from weft.core.storage import files_of

        state = host.save()
        # the hub chose the request's id: it is not a file name
        name = f"reply-{hashlib.sha256(request_id.encode()).hexdigest()[:16]}.message"
        write_bytes(self._folder / name, reply)
        sync(self._folder / name)
        replies = dict(list(manifest["replies"].items())[1 - KEPT_REPLIES :]) | {request_id: name}
        files = {*replies.values()}.union(*map(files_of, state.clients.values()))
        sizes = {name: (self._folder / name).stat().st_size for name in sorted(files)}
        saved = {"clients": state.clients, "answered": state.answered, "replies": replies, "files": sizes}
        write_manifest(self._folder, {**manifest, **saved})
        for pattern in ("*.safetensors", "*.message", ".*.part"):
            for path in self._folder.glob(pattern):
                if path.name not in files:
                    path.unlink(missing_ok=True)


# ---- all runs of a site, without torch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteRun:
    """A run as the site knows it; its id is the name of the hub's run folder and twelve hexadecimal digits."""

    id: str
    plan: str  # the name of the hub's plan
    replies: int
    tasks: int  # finished
    last: str  # the last request: task.round.client
    when: str  # UTC; of the last reply
    damage: str = ""  # which file is damaged, and what to do

    def as_text(self) -> str:
        if self.damage:
            return f"{self.id}: {self.damage}"
        return f"{self.id}: finished tasks: {self.tasks}, replies: {self.replies}, last reply: {self.when} UTC"


def site_runs(site: Path) -> list[SiteRun]:
    """All runs that the site has replied to, by the time of their last reply."""
    found = [(path.stat().st_mtime_ns, path.parent) for path in (site / "state").glob("*/manifest.json")]
    return [_site_run(folder, moment) for moment, folder in sorted(found)]


def _site_run(folder: Path, moment: int) -> SiteRun:
    plan, when = "", utc(moment / 1e9)
    with contextlib.suppress(OSError, ValueError):
        plan = str(flat_keys((folder / "plan.toml").read_text(encoding="utf-8")).get("name", ""))
    try:
        manifest = _checked_manifest(folder)
    except WeftError as error:
        return SiteRun(folder.name, plan, 0, 0, "", when, str(error))
    last = ["", *manifest["replies"]][-1]
    return SiteRun(folder.name, plan, sum(manifest["answered"].values()), manifest["finished"] + 1, last, when)


def _checked_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    with contextlib.suppress(WeftError, OSError):
        manifest = read_manifest(folder) or NEW
        for name, size in manifest["files"].items():
            path = folder / name
            if path.stat().st_size != size:
                raise OSError
        return manifest
    raise WeftError(f"its state is damaged ({path}); restore it from a copy, or move {folder} away after the run")


def find_run(name: str, runs: list[SiteRun]) -> SiteRun:
    """A run by its id or an unambiguous prefix of it; by the name of the run or of its plan, the latest."""
    for matches in (
        [run for run in runs if run.id == name],
        [run for run in runs if run.id.rpartition("-")[0] == name][-1:],
        [run for run in runs if run.plan == name][-1:],
        [run for run in runs if run.id.startswith(name)],
    ):
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise WeftError(f"several runs start with {name}; choose one of {', '.join(run.id for run in matches)}")
    known = f"choose one of {', '.join(run.id for run in runs)}" if runs else "the site has not replied to any run yet"
    raise WeftError(f"no run {name} at this site; {known}")


def run_that_started(site: Path, task: int) -> str | None:
    """A run that has started this task of the site; an error if a damaged one may have."""
    for folder in sorted(path.parent for path in (site / "state").glob("*/manifest.json")):
        try:
            started = _checked_manifest(folder)["started"]
            plan = flat_keys((folder / "plan.toml").read_text(encoding="utf-8"))
        except (WeftError, OSError, ValueError) as error:
            raise WeftError(f"cannot tell whether {folder.name} has started task {task}: {error}") from None
        if plan.get("scenario") == "sites" and started >= task:
            return folder.name
    return None


@contextlib.contextmanager
def no_active_run(site: Path) -> Iterator[None]:
    """Keep all runs, also new ones, from working meanwhile; an error if one is working now."""
    with contextlib.ExitStack() as locks:
        locks.enter_context(filelock.FileLock(site / "state" / START_LOCK))  # first: a run that passed it has its lock
        for folder in filter(Path.is_dir, (site / "state").iterdir()):
            try:
                locks.enter_context(filelock.FileLock(folder / RUN_LOCK, timeout=0))
            except filelock.Timeout:
                raise WeftError(f"the site is working on {folder.name}; try again in a moment") from None
        yield


@contextlib.contextmanager
def changing_tasks(site: Path) -> Iterator[None]:
    """Keep other commands from changing the list of tasks meanwhile."""
    try:
        with filelock.FileLock(site / TASKS_LOCK, timeout=0):
            yield
    except filelock.Timeout:
        raise WeftError("another command is changing the site's tasks; try again when it is done") from None
