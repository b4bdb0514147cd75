"""The server's side of Flower: what makes an app out of a function that works on a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp


def server_app(work: Callable[[Grid, Path], None]) -> ServerApp:
    """The run's configuration names the folder of the run."""

    def main(grid: Grid, context: Context) -> None:
        work(grid, Path(str(context.run_config["folder"])))

    app = ServerApp()
    app.main()(main)
    return app
