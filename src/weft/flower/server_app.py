"""The server app: the server loop at the hub, in a process that Flower starts for each run.

`weft hub run` has made the run folder. If this process dies it is started again and resumes from the last checkpoint,
which is made after each round; sites that have replied since then send the same replies again. The reason of its death
is written to the run folder, unless it was killed.
"""

from __future__ import annotations

import datetime
import json
import traceback
from collections.abc import Collection
from functools import partial
from pathlib import Path

import flwr.serverapp
from flwr.app import Context

from weft.core.checks import ReplyChecks
from weft.core.engine import Engine, EngineState
from weft.errors import WeftError
from weft.files import write_text
from weft.flower import size_guard
from weft.flower.engine import FlowerEngine, Grid
from weft.flower.hub.runs import absent, removed
from weft.flower.hub.status import ERROR_FILE, SERVER_LOG
from weft.runs.folder import SITES, RunFolder
from weft.runs.run import resume
from weft.wire.message import LONGEST_HEADER

PATIENCE = 600.0  # seconds to wait for a site that is away, if the plan has no deadline
VALUE_BYTES = 16  # of a value and its index, at most


def work(grid: Grid, folder: Path) -> None:
    """Resume the run in a folder over the sites of a grid."""
    try:
        sites = json.loads((folder / SITES).read_text(encoding="utf-8"))
        resume(folder, save_every=0, connect=partial(connect, grid, sites["names"], sites["run"], absent(folder)))
    except WeftError as error:
        write_text(folder / ERROR_FILE, f"{error}\n")
        raise
    except Exception:
        when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with (folder / SERVER_LOG).open("a", encoding="utf-8") as log:
            log.write(f"{when}\n{traceback.format_exc()}\n")
        raise


def connect(
    grid: Grid,
    sites: list[str],
    run: str,
    absent: Collection[str],
    folder: RunFolder,
    saved: EngineState,
    checks: ReplyChecks,
) -> Engine:
    """The engine of a run; `absent` sites have been waited for already."""
    size_guard.install(lambda: largest_reply(checks))
    return FlowerEngine(
        folder.plan,
        grid,
        sites,
        run,
        folder.checkpoints,
        saved,
        folder.journal,
        PATIENCE,
        absent={client for client, name in enumerate(sites) if name in absent},
        removed=lambda: removed(folder.path),
    )


def largest_reply(checks: ReplyChecks) -> int:
    """Bytes of the largest reply that the run can use."""
    values = sum(spec.size for spec in checks.method.upload_spec(checks.layout, {}).values())
    return min(size_guard.MAX_BYTES, LONGEST_HEADER + VALUE_BYTES * values)


def main(grid: flwr.serverapp.Grid, context: Context) -> None:
    work(grid, Path(str(context.run_config["folder"])))  # the run's configuration names the folder


app = flwr.serverapp.ServerApp()
app.main()(main)
