"""`weft new`: files to fill in."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from weft import methods
from weft.cli.common import say
from weft.errors import WeftError
from weft.files import write_text

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Write a file to fill in.")


@app.callback()
def any_command() -> None:
    """Write a file to fill in."""


@app.command("method")
def method_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The class, such as FedRep.")],
    file: Annotated[Path | None, typer.Option("--out", help="The new file. Default: NAME in lower case.")] = None,
) -> None:
    """Write a method that works as it is, to be changed: weft new method FedRep"""
    if not re.fullmatch("[A-Za-z][A-Za-z0-9]*", name) or keyword.iskeyword(name):
        raise WeftError(f"{name!r} is no name of a class; write it as in FedRep")
    path = file or Path(f"{name.lower()}.py")
    if path.exists():
        raise WeftError(f"{path} already exists; choose another --out")
    template = Path(methods.__file__).with_name("template.py").read_text(encoding="utf-8")
    write_text(path, template.replace("NewMethod", name))
    say(f"{path}: fill it in (docs/add-a-method.md), and try it with: weft run demo method={path}:{name}")
