"""What all commands share: consoles, lines, JSON, common options, what Ctrl-C does."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from weft.errors import printable
from weft.runs.result import Result


class SafeConsole(Console):
    """Texts of sites, hubs and received folders reach the terminal without their escape codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


out = SafeConsole()
notes = SafeConsole(stderr=True)

MOST_WORKERS = 8  # by default: each takes about 300 MB for torch alone


def say(text: str, console: Console = out) -> None:
    """Print one line unchanged: a path is not wrapped, colored or read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def say_lines(lines: Iterable[str]) -> None:
    """Print indented lines, without empty ones."""
    for line in filter(None, lines):
        say(f"  {line}")


def say_incidents(result: Result) -> None:
    """The last line of a run in which something went wrong."""
    found = {key.replace("_", " "): result.summary[key] for key in ("incidents", "rounds_without_update")}
    if counts := ", ".join(f"{key}: {count}" for key, count in found.items() if count):
        say(f"{counts} (weft show {result.folder} lists them)", notes)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


@contextmanager
def interruptible(advice: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C, print how to proceed and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt as stop:
        say(f"\nstopped; {str(stop) or advice()}", notes)
        raise typer.Exit(130) from None


def worker_count(wanted: int | None, clients: int) -> int:
    count = wanted if wanted is not None else max(1, min(os.cpu_count() or 1, MOST_WORKERS))
    return min(count, clients)  # more would be idle


def use_data_dir(folder: Path | None) -> Path | None:
    """Make `folder` the dataset cache of this process and of its workers."""
    if folder is not None:
        os.environ["WEFT_DATA"] = str(folder.expanduser().absolute())
    return folder


AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", callback=use_data_dir, help="Dataset cache. Default: WEFT_DATA, or the system's cache folder."
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Plan keys, such as seed=5.")]
Workers = Annotated[
    int | None, typer.Option(help="Processes that train the clients; the result does not depend on their number.")
]
