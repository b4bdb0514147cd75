"""`weft report`, `watch`, `figures`, `tensorboard`: run folders for people to look at. What they need comes late."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from weft.cli.common import notes, say
from weft.errors import WeftError

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that hold some.")]


class Format(StrEnum):
    pdf = "pdf"
    svg = "svg"
    png = "png"


def add_to(app: typer.Typer) -> None:
    for name, command in (
        ("report", report_command),
        ("watch", watch_command),
        ("figures", figures_command),
        ("tensorboard", tensorboard_command),
    ):
        app.command(name)(command)


def report_command(
    folders: Folders,
    file: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html"),
) -> None:
    """One page about one or many runs, to look at in a browser; it needs no network: weft report runs/*

    Seeds of one plan are averaged; runs of different plans are compared.
    """
    say(str(write_page(folders, file)))


def write_page(folders: list[Path], file: Path) -> Path:
    from weft.report.facts import group
    from weft.report.page import page
    from weft.report.reading import read_runs

    text = page(group(read_runs(folders)))
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WeftError(f"{file} cannot be written ({error.strerror}); choose another --out") from None
    return file


def watch_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder; it may appear later.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of this machine; 0 takes any that is free.")] = 8765,
) -> None:
    """The same page while a run goes on, for a browser on this machine; Ctrl-C ends it, not the run."""
    from weft.report.watch import Server

    with Server(folder, port) as server:
        try:
            say(f"{server.url}   shows {folder} while it runs; Ctrl-C ends this, not the run")
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nno longer watching; the run goes on", notes)


def figures_command(
    folders: Folders,
    kind: Annotated[Format, typer.Option("--format", help="Of the files.")] = Format.pdf,
    folder: Annotated[Path, typer.Option("--out", help="The folder for them.")] = Path("figures"),
) -> None:
    """Figures for a paper, one file each: weft figures runs/* --format svg"""
    from weft.report.facts import group
    from weft.report.reading import read_runs

    try:
        from weft.report.matplotlib import write_figures
    except ImportError:
        raise WeftError("weft figures needs matplotlib: pip install 'weft[figures]'") from None
    for file in write_figures(group(read_runs(folders)), folder, kind.value):
        say(str(file))


def tensorboard_command(
    folders: Folders,
    folder: Annotated[Path, typer.Option("--out", help="The folder for event files.")] = Path("tensorboard"),
) -> None:
    """Run folders as event files for TensorBoard: weft tensorboard runs/* then tensorboard --logdir tensorboard"""
    from weft.report.reading import read_runs

    try:
        from weft.report.trackers import write_events
    except ImportError:
        raise WeftError("weft tensorboard needs its package: pip install 'weft[tensorboard]'") from None
    for written in write_events(read_runs(folders), folder):
        say(str(written))


def more_about(folder: Path, console: Console) -> list[RenderableType]:
    """For `weft show`: what the page has beside results, matrices and bytes."""
    from weft.report import terminal
    from weft.report.reading import Reader

    return terminal.more_about(Reader(folder).read(), console)
