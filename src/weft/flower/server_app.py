"""The server app: the loop at the hub, in a process that Flower starts for each run; it goes on with a run folder.

`weft hub run` has made the folder. If this process dies it is started again and goes on from the last checkpoint, which
is made after each round; sites that had answered since then give the same answers again. Why it died stands in the run
folder, unless it was killed.
"""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Collection
from functools import partial
from pathlib import Path

from weft.core.checks import Inspector
from weft.core.engine import Engine, Saved
from weft.errors import WeftError
from weft.files import write_text
from weft.flower import size_guard
from weft.flower.engine import Far, Grid
from weft.flower.hub.runs import LOG, SITES, TROUBLE, absent, removed
from weft.flower.server import server_app
from weft.runs.run import resume
from weft.runs.session import Session
from weft.wire.message import LONGEST_HEADER

PATIENCE = 600.0  # seconds for which a site that is away is waited for, where the plan has no deadline
VALUE = 16  # bytes of a value and its index, at their widest


def work(grid: Grid, folder: Path) -> None:
    try:
        sites = json.loads((folder / SITES).read_text(encoding="utf-8"))
        far = partial(connect, grid, sites["names"], sites["run"], absent=absent(folder))
        resume(folder, save_every=0, connect=far)
    except WeftError as problem:
        write_text(folder / TROUBLE, f"{problem}\n")
        raise
    except Exception:
        when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with (folder / LOG).open("a", encoding="utf-8") as log:
            log.write(f"{when}\n{traceback.format_exc()}\n")
        raise


def connect(
    grid: Grid, sites: list[str], run: str, session: Session, saved: Saved, absent: Collection[str] = ()
) -> Engine:
    """`absent`: the sites that have been waited for already."""

    def remove(client: int) -> None:
        session.federation.dismiss(client)

    size_guard.guard(lambda: largest_answer(session.federation.inspector))
    record = session.record
    lost = {client for client, name in enumerate(sites) if name in absent}
    words = (record.plan, grid, sites, run, record.checkpoints, saved, record.journal, PATIENCE, remove)
    return Far(*words, lost=lost, removed=lambda: removed(record.folder))


def largest_answer(inspector: Inspector) -> int:
    """In bytes, of those that a run can use."""
    if inspector.forms is None:
        return size_guard.MOST
    values = sum(form.size for form in inspector.forms.values())
    return min(size_guard.MOST, LONGEST_HEADER + VALUE * values)


app = server_app(work)
