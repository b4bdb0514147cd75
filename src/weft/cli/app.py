"""The `weft` command: it parses arguments, calls the library and shows what it returns.

Errors that a user can fix are one line on stderr with exit code 2. With --json, stdout has only JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, NoReturn

import click
import typer
import typer.core

from weft.cli import data, hub, new, report, run, show, site, tools
from weft.errors import WeftError, printable

typer.core.HAS_RICH = False  # typer 0.20 escapes brackets for rich in help that rich does not show: \[required]
app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Federated continual learning: clients learn sequences of tasks and share knowledge without sharing data.\n\n"
    "Start with `weft demo`. Then: weft run demo method=fedavg clients=3 seed=1",
)
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": run.demo_command,
    "run": run.run_command,
    "resume": run.resume_command,
    "show": show.show_command,
    "compare": show.compare_command,
    "list": show.list_command,
    "repro": tools.repro_command,
    "report": report.report_command,
    "watch": report.watch_command,
    "figures": report.figures_command,
    "tensorboard": report.tensorboard_command,
    "export": tools.export_command,
    "predict": tools.predict_command,
    "bench": tools.bench_command,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(new.app, name="new")
app.add_typer(data.app, name="data")
app.add_typer(hub.app, name="hub")
app.add_typer(site.app, name="site")


@app.callback(invoke_without_command=True)
def any_command(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"weft {metadata.version('weft')}\n")
        raise typer.Exit


def main() -> None:
    """Run the `weft` command."""
    try:
        code = app(standalone_mode=False)
    except WeftError as error:
        _fail(str(error))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has closed: weft list ... | head
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str) -> NoReturn:
    sys.stderr.write(f"weft: {printable(' '.join(text.split()))}\n")
    sys.exit(2)
