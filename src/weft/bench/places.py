"""Where files of benchmarks/ lie: inside an installed package, or at the top of a source tree."""

from __future__ import annotations

from pathlib import Path

from weft.errors import WeftError


def file_of(name: str) -> Path:
    here = Path(__file__).resolve().parent.parent
    for folder in (here / "benchmarks", here.parent.parent / "benchmarks"):
        if (folder / name).is_file():
            return folder / name
    raise WeftError(f"benchmarks/{name} is missing, which weft bench compares with; install weft anew")
