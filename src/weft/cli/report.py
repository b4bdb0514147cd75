"""`weft report`, `watch`, `figures` and `tensorboard`: show run folders. Heavy imports are local."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.common import notes, say
from weft.errors import WeftError

Folders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders that contain some.")]
Format = StrEnum("Format", ["pdf", "svg", "png"])


def report_command(
    folders: Folders, file: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html")
) -> None:
    """Write one HTML page about one or more runs; it works offline: weft report runs/*

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
        raise WeftError(f"cannot write {file} ({error.strerror}); choose another --out") from None
    return file


def watch_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder; it may be created later.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Local port; 0 takes any free one.")] = 8765,
) -> None:
    """Serve the page on this machine while a run is running; Ctrl-C stops the server, not the run."""
    from weft.report.watch import Server

    with Server(folder, port) as server:
        try:
            say(f"{server.url}   shows {folder} while it runs; Ctrl-C stops the server, not the run")
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nserver stopped; the run continues", notes)


def figures_command(
    folders: Folders,
    kind: Annotated[Format, typer.Option("--format", help="File format.")] = Format.pdf,
    folder: Annotated[Path, typer.Option("--out", help="Output folder.")] = Path("figures"),
) -> None:
    """Write figures for a paper, one file each: weft figures runs/* --format svg"""
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
    folder: Annotated[Path, typer.Option("--out", help="Folder for event files.")] = Path("tensorboard"),
) -> None:
    """Write event files for TensorBoard: weft tensorboard runs/* then tensorboard --logdir tensorboard"""
    from weft.report.reading import read_runs

    try:
        from weft.report.trackers import write_events
    except ImportError:
        raise WeftError("weft tensorboard needs tensorboard: pip install 'weft[tensorboard]'") from None
    for written in write_events(read_runs(folders), folder):
        say(str(written))
