"""docs/many-machines.md without Flower: whatever its commands name is there, or is installed, where the page puts one.

tests/flower/test_many_machines.py runs them.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

from weft.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "many-machines.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line]


def test_every_file_of_the_clone_is_where_the_page_says() -> None:
    """Of the three terminals one is followed; all are in one folder."""
    here, programs = ROOT, 0
    for words in commands():
        if words[0] == "cd":
            here = here / words[1]
        elif words[0] == "python":
            assert (here / words[1]).resolve().is_file(), words
            programs += 1
        elif words[:2] == ["pip", "install"] and "--constraint" in words:
            assert (here / words[words.index("--constraint") + 1]).is_file(), words
    assert (here, programs) == (ROOT / "federation", 1)


def test_what_the_page_installs_is_enough_for_what_it_uses() -> None:
    installed = " ".join(word for words in commands() if words[0] == "pip" for word in words)
    needed = {"onnx": "export", "safetensors": None}
    for words in commands():
        if "export" in words:
            extra = needed[words[words.index("--format") + 1] if "--format" in words else "onnx"]
            assert extra is None or extra in installed, words


def test_every_extra_that_the_page_names_is_pinned() -> None:
    """Also the one that is needed for ONNX alone."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pins = {line.split("==")[0].lower() for line in (ROOT / "constraints-flower.txt").read_text().split()}
    named = {extra for found in re.findall(r'"\.\[([a-z,]+)\]"', PAGE) for extra in found.split(",")}
    assert named == {"flower", "export"}
    for extra in named:
        assert {re.split("[=>]", each)[0] for each in extras[extra]} <= pins, extra


def test_the_plan_of_the_page_is_valid() -> None:
    (plan,) = blocks("toml")
    assert Plan.merge(tomllib.loads(plan)).scenario == "sites"
