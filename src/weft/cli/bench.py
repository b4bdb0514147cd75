"""`weft bench`: what this machine gives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.common import ProgressDisplay, notes, out
from weft.errors import WeftError

PARTS = {
    "steps": "training steps",
    "wire": "encoding and decoding",
    "server": "the server's work",
    "start": "from command to first step",
    "workers": "one and two workers",
    "memory": "few and many clients",
    "engine": "the default FedWeIT plan",
    "paired": "the same with all rows of B",
    "peers": "FedAvg on Flower",
}


def bench_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, in some minutes; all ratios.")] = False,
    peers: Annotated[
        bool, typer.Option("--peers", help="Beside Flower's simulation, which make peers sets up.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit code 1 if a bar is missed.")] = False,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Write bench.json, .md and -growth.png there.")
    ] = None,
) -> None:
    """Measure this machine: training steps, the engine, server, wire and memory, as ratios within one run.

    Let nothing else run meanwhile; it takes a quarter of an hour or more, some minutes with --quick.
    """
    from weft.bench import figure, report
    from weft.bench.whole import bench

    parts = PartsFile(out_folder)
    if out_folder is not None:
        figure.check()
        parts.check()
    try:
        with ProgressDisplay() as display:
            found = bench(quick, peers, lambda part, *count: display.part(PARTS[part], *count), parts.keep)
    except KeyboardInterrupt:
        notes.print(f"\nstopped; {parts.told()}", soft_wrap=True)
        raise typer.Exit(130) from None
    except Exception:
        if parts.kept:
            notes.print(parts.told(), soft_wrap=True)
        raise
    files: list[Path] = []
    if out_folder is not None:
        files = report.write(found, out_folder)
        parts.drop()
        figure.draw(found, out_folder / "bench-growth.png")
        files.append(out_folder / "bench-growth.png")
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        for sheet in report.sheets(found):
            out.print(report.in_terminal(sheet))
        for file in files:
            out.print(str(file), highlight=False, markup=False, soft_wrap=True)
    if check and any(bar["met"] is False for bar in found["bars"]):
        raise typer.Exit(1)


class PartsFile:
    """What is measured so far, beside the results of an earlier benchmark, until this one is whole."""

    def __init__(self, folder: Path | None):
        self._file = None if folder is None else folder / "bench-parts.json"
        self.kept: list[str] = []

    def check(self) -> None:
        """That nothing can be written there is told before anything is measured."""
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.touch()
                self._file.unlink()
            except OSError as error:
                folder = self._file.parent
                raise WeftError(f"nothing can be written to {folder} ({error.strerror}); name another --out") from None

    def keep(self, found: dict[str, Any]) -> None:
        if self._file is not None:
            from weft.files import write_text

            write_text(self._file, json.dumps(found, indent=2) + "\n")
            self.kept = list(found["part_seconds"])

    def told(self) -> str:
        if not self.kept:
            return "nothing was written"
        return f"the parts measured until then ({', '.join(self.kept)}) are in {self._file}"

    def drop(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
