"""The server app: the server loop at the hub, in a process that Flower starts for each run.

`weft hub run` has made the run folder. If this process dies it is started again and resumes from the last checkpoint,
which is made after each round; sites that have replied since then send the same replies again. The reason of its death
is written to the run folder, unless it was killed.
"""

from __future__ import annotations

import traceback
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from weft.core.checks import ReplyChecks
from weft.core.engine import Engine, EngineState
from weft.errors import WeftError
from weft.files import append, write_text
from weft.flower import size_guard
from weft.flower.engine import FlowerEngine
from weft.flower.hub.runs import absent, removed
from weft.flower.hub.status import ERROR_FILE, SERVER_LOG, members
from weft.report.text import utc
from weft.runs.folder import RunFolder
from weft.runs.run import resume
from weft.wire.message import LONGEST_HEADER

PATIENCE = 600.0  # seconds to wait for a site that is away, if the plan has no deadline
VALUE_BYTES = 16  # of a value and its index, at most


def work(grid: Grid, folder: Path) -> None:
    """Resume the run in a folder over the sites of a grid."""
    try:
        resume(folder, save_every=0, connect=partial(connect, grid))
    except WeftError as error:
        write_text(folder / ERROR_FILE, f"{error}\n")
        raise
    except Exception:
        append(folder / SERVER_LOG, f"{utc()} UTC\n{traceback.format_exc()}\n")
        raise


def connect(grid: Grid, folder: RunFolder, saved: EngineState, checks: ReplyChecks) -> Engine:
    """The engine of a run."""
    size_guard.install(lambda: largest_reply(checks))
    names, run = members(folder.path)
    waited_for = absent(folder.path)
    return FlowerEngine(
        folder.plan,
        grid,
        names,
        run,
        folder.checkpoints,
        saved,
        folder.journal,
        PATIENCE,
        absent={client for client, name in enumerate(names) if name in waited_for},
        removed=lambda: removed(folder.path),
    )


def largest_reply(checks: ReplyChecks) -> int:
    """Bytes of the largest reply that the run can use."""
    values = sum(spec.size for spec in checks.method.upload_spec(checks.layout, {}).values())
    return min(size_guard.MAX_BYTES, LONGEST_HEADER + VALUE_BYTES * values)


def main(grid: Grid, context: Context) -> None:
    work(grid, Path(str(context.run_config["folder"])))  # the run's configuration names the folder


app = ServerApp()
app.main()(main)
