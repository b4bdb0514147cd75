"""What a site remembers of a run, on disk since each message is a new process: its client's state and last replies.

A reply is on disk before it leaves. So whoever is asked the same thing again, because an answer was lost, a process was
killed or a server went back to its checkpoint, answers with the same bytes and learns nothing twice.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from weft.core.storage import State, files_of
from weft.engines.host import Host
from weft.errors import WeftError
from weft.files import write_text
from weft.plan import Plan
from weft.runs.folder import read_manifest, write_manifest
from weft.wire.message import Message, decode, encode, failure

REPLIES_KEPT = 12  # a server goes back by a round and the closing of its task at most: five answers
MEMORY = 1 << 14  # megabytes: one client is alone in its process
LOCK = ".lock"
DOOR = ".door"  # beside the runs' folders
FAILED = "it failed at the site, whose log says why"


class NotYet(Exception):  # noqa: N818 - it will be
    """The site has no such task yet."""


class Memory:
    """One run's folder at a site. Two processes never work in it at the same time."""

    def __init__(self, folder: Path, plan: Plan, client: int):
        self._folder, self._plan, self._client = folder, plan, client

    def answer(self, wire: bytes) -> bytes:
        """The reply to an encoded request; a failure is a reply too."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._alone():
            if not (self._folder / "plan.toml").exists():  # without which nobody could take the model home later
                write_text(self._folder / "plan.toml", self._plan.toml())
            asked = decode(wire)
            manifest = read_manifest(self._folder) or {"states": {}, "answers": {}, "replies": {}}
            if (known := manifest["replies"].get(asked.request_id)) is not None:
                return State.load(self._folder, known).reply
            self._check(asked)
            host = Host(self._plan, self._folder, MEMORY)
            host.restore(_by_number(manifest["states"]), _by_number(manifest["answers"]))
            if not host.has_task(self._client, asked.task):
                raise NotYet(f"it has no task {asked.task} yet (weft site task add)")
            try:
                reply = host.answer(self._client, wire)
            except Exception as error:
                traceback.print_exc()  # to the site's log alone: it may name files, tasks and classes
                # the state on disk is the one before
                return encode(failure(asked, f"{FAILED} ({type(error).__name__})"))
            self._keep(host, asked.request_id, reply, manifest["replies"])
            return reply

    def _check(self, asked: Message) -> None:
        if asked.receiver != f"client-{self._client}":
            raise WeftError(f"a message for {asked.receiver} came to client-{self._client}")

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with filelock.FileLock(self._folder / LOCK):
            with filelock.FileLock(self._folder.parent / DOOR):
                pass  # while a task is being removed, nobody who was not at work before reads which there are
            yield

    def _keep(self, host: Host, request_id: str, reply: bytes, replies: dict[str, Any]) -> None:
        """First the files, then the manifest that names them, in one step; what nothing names any more goes."""
        states = host.save()
        kept = dict(list(replies.items())[1 - REPLIES_KEPT :])
        kept[request_id] = State(reply=reply).save(self._folder, f"reply-{request_id}")
        manifest = {"states": states, "answers": host.answers, "replies": kept}
        write_manifest(self._folder, manifest)
        named = set().union(*map(files_of, [*states.values(), *kept.values()]))
        for path in [*self._folder.glob("*.safetensors"), *self._folder.glob(".*.part")]:  # half, after a kill
            if path.name not in named:
                path.unlink(missing_ok=True)


def _by_number(table: dict[str, Any]) -> dict[int, Any]:
    return {int(client): value for client, value in table.items()}
