"""`weft data`: download, list and verify the public datasets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weft.cli.common import AsJson, DataDir, notes, out, print_json, say
from weft.data import cache
from weft.data.sources import SOURCES, source_of
from weft.errors import WeftError
from weft.report import terminal

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Download, list and verify the public datasets.")


@app.command("list")
def list_command(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """List the eight datasets and which of them are in the cache."""
    entries = [_entry(name) for name in SOURCES]
    if as_json:
        print_json(entries)
        return
    shown = [{**entry, "images": _image_count(entry["images"], entry["published_images"])} for entry in entries]
    out.print(terminal.listing(shown, ["name", "title", "classes", "cached", "images"]))
    say(f"cache: {cache.folder()}; add a dataset with: weft data get NAME")


@app.command("get")
def get_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of `weft data list`, or all.")],
    folder: Annotated[
        Path | None,
        typer.Option("--from", help="A local copy: one subfolder per person for facescrub, else the original files."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace datasets that are in the cache.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Add datasets to the cache: downloaded from their sources, or read from a local copy."""
    from weft.data.download import get

    wanted = [name for name in SOURCES if SOURCES[name].files] if names == ["all"] else names
    for name in wanted:
        source_of(name)  # report a misspelled name before the first download
    if folder is not None and len(wanted) != 1:
        raise WeftError("--from is the copy of one dataset; name exactly one")
    failed: list[str] = []
    for name in wanted:
        if name in cache.available() and not force and cache.verify(name) is None:
            say(f"{name}: is in the cache" + ("; --force replaces it by your copy" if folder is not None else ""))
            continue
        try:
            with _download_bars() as bars:
                packed = get(name, data_dir, folder=folder, progress=bars)
        except WeftError as error:
            failed.append(str(error))  # the others may succeed
            continue
        note = f" ({packed.note})" if packed.note else ""
        say(f"{name}: {len(packed.arrays['y']):,} images in {cache.folder() / name}.npz{note}")
    _fail(failed)


@app.command("verify")
def verify_command(
    names: Annotated[list[str] | None, typer.Argument(help="Datasets. Default: all in the cache.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the cache and report damaged datasets."""
    errors = {source_of(name).name: cache.verify(name) for name in names or cache.available()}
    if not errors:
        raise WeftError(f"no dataset in {cache.folder()}; add one with: weft data get NAME")
    if as_json:
        print_json([{"name": name, "valid": error is None, "error": error} for name, error in errors.items()])
        raise typer.Exit(2 if any(errors.values()) else 0)
    for name, error in errors.items():
        if error is None:
            say(f"{name}: valid")
    _fail([error for error in errors.values() if error is not None])


@app.command("path")
def path_command(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Print the folder of the cache."""
    if as_json:
        print_json({"folder": str(cache.folder()), "cached": cache.available()})
    else:
        say(str(cache.folder()))


def _entry(name: str) -> dict[str, Any]:
    source, cached = SOURCES[name], "no"
    images: int | str = "-"
    if name in cache.available():
        try:
            cached, images = "yes", len(cache.load(name).y)
        except WeftError:
            cached = "damaged"
    recorded = "none published: recorded at the first download"
    files = [
        {"name": one.name, "urls": list(one.urls), "md5": one.md5, "checksum": "published" if one.md5 else recorded}
        for one in source.files
    ]
    facts = {"name": name, "title": source.title, "classes": source.classes}
    return {**facts, "cached": cached, "images": images, "published_images": source.images, "files": files}


def _image_count(images: int | str, published: int | None) -> str:
    """
    >>> _image_count(6000, 70000), _image_count(70000, 70000), _image_count("-", 70000), _image_count(530, None)
    ('6,000 of 70,000', '70,000', '-', '530')
    """
    if isinstance(images, str):
        return images
    return f"{images:,} of {published:,}" if published is not None and images < published else f"{images:,}"


class _Bar:
    """A progress bar with the interface that pooch expects."""

    def __init__(self, bars: Progress, name: str):
        self._bars, self._name = bars, name
        self._total, self._task = 0, TaskID(-1)

    @property
    def total(self) -> int:
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = total
        self._task = self._bars.add_task(self._name, total=total or None)

    def update(self, count: int) -> None:
        self._bars.advance(self._task, count)

    def reset(self) -> None:
        self._bars.reset(self._task, total=self._total or None)

    def close(self) -> None: ...


@contextmanager
def _download_bars() -> Iterator[Any]:
    if not notes.is_terminal:
        yield lambda _: False
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes) as bars:
        yield lambda name: _Bar(bars, name)


def _fail(errors: list[str]) -> None:
    """Print one line per error, if any, and exit with code 2."""
    for line in errors[:-1]:
        say(f"weft: {line}", notes)
    if errors:
        raise WeftError(errors[-1])
