"""`weft data`: the public datasets, from their sources into the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from weft.cli.common import AsJson, DataDir, notes, out, print_json, say
from weft.data import cache
from weft.data.sources import SOURCES, source_of
from weft.errors import WeftError
from weft.report import screens

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Get, list and check the public datasets.")


@app.command("list")
def list_command(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """The eight datasets, and which of them are there."""
    entries = [_entry(name) for name in SOURCES]
    if as_json:
        print_json(entries)
        return
    shown = [{**entry, "images": _of_all(entry["images"], entry["whole"])} for entry in entries]
    out.print(screens.listing(shown, ["name", "title", "classes", "there", "images"]))
    say(f"in {cache.folder()}; weft data get NAME brings one")


@app.command("get")
def get_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of `weft data list`, or all.")],
    folder: Annotated[
        Path | None,
        typer.Option("--from", help="Your own copy: one subfolder a person for facescrub, else the original files."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also what is there already.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Bring datasets into the cache: downloaded from their sources, or read from your own copy."""
    from weft.data.fetching import get

    wanted = [name for name in SOURCES if SOURCES[name].files] if names == ["all"] else names
    for name in wanted:
        source_of(name)  # a misspelt name is told before the first download
    if folder is not None and len(wanted) != 1:
        raise WeftError("--from is the copy of one dataset; name that one")
    failed: list[str] = []
    for name in wanted:
        if name in cache.there() and not again and cache.verify(name) is None:
            say(f"{name}: is there" + ("; --again reads it anew from your copy" if folder is not None else ""))
            continue
        try:
            with _bars() as bars:
                packed = get(name, data_dir, folder=folder, progress=bars)
        except WeftError as problem:
            failed.append(str(problem))  # the others may have better luck
            continue
        note = f" ({packed.note})" if packed.note else ""
        say(f"{name}: {len(packed.arrays['y']):,} images in {cache.folder() / name}.npz{note}")
    _fail(failed)


@app.command("verify")
def verify_command(
    names: Annotated[list[str] | None, typer.Argument(help="Datasets; all that are there if none is named.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of the cache, and say what is damaged."""
    found = {source_of(name).name: cache.verify(name) for name in names or cache.there()}
    if not found:
        raise WeftError(f"there is no dataset in {cache.folder()}; weft data get NAME brings one")
    if as_json:
        print_json([{"name": name, "good": said is None, "problem": said} for name, said in found.items()])
    else:
        for name in (name for name, said in found.items() if said is None):
            say(f"{name}: good")
    bad = [said for said in found.values() if said is not None]
    if bad and as_json:
        raise typer.Exit(2)
    _fail(bad)


@app.command("where")
def where_command(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """The folder of the cache."""
    if as_json:
        print_json({"folder": str(cache.folder()), "there": cache.there()})
    else:
        say(str(cache.folder()))


def _entry(name: str) -> dict[str, Any]:
    source = SOURCES[name]
    entry: dict[str, Any] = {
        "name": name,
        "title": source.title,
        "classes": source.classes,
        "there": "no",
        "images": "-",
        "whole": source.images,  # how many the published set has
    }
    if name in cache.there():
        try:
            entry |= {"there": "yes", "images": len(cache.load(name).y)}
        except WeftError:
            entry["there"] = "damaged"
    entry["files"] = [
        {"name": file.name, "urls": list(file.urls), "md5": file.md5, "checksum": _known(file.md5)}
        for file in source.files
    ]
    return entry


def _of_all(images: int | str, whole: int | None) -> str:
    """
    >>> _of_all(6000, 70000), _of_all(70000, 70000), _of_all("-", 70000), _of_all(530, None)
    ('6,000 of 70,000', '70,000', '-', '530')
    """
    if isinstance(images, str):
        return images
    return f"{images:,} of {whole:,}" if whole is not None and images < whole else f"{images:,}"


def _known(md5: str | None) -> str:
    return "published" if md5 else "none is published: recorded at the first download"


class _Bar:
    """What pooch tells its progress to, shown by rich."""

    def __init__(self, bars: Progress, name: str):
        self._bars, self._task = bars, TaskID(-1)
        self._name, self._total = name, 0

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
def _bars() -> Iterator[Any]:
    if not notes.is_terminal:
        yield lambda _: False
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes) as bars:
        yield lambda name: _Bar(bars, name)


def _fail(said: Sequence[str]) -> None:
    """One line for each thing that went wrong, if any, and exit code 2."""
    for line in said[:-1]:
        say(f"weft: {line}", notes)
    if said:
        raise WeftError(said[-1])
