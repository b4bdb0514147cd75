"""The source files of weft as text: which modules there are, and what each imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import weft

SOURCE = Path(weft.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


class Import(NamedTuple):
    module: str
    when: str  # "load" of the importing module, "use" inside a function, or "types" for the type checker


def name_of(file: Path) -> str:
    parts = ["weft", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def imports(text: str, package: str = "") -> Iterator[Import]:
    """Every module that a text imports; `from weft import methods` names the module weft.methods.

    Relative imports are allowed only within `package`.
    """

    def walk(nodes: list[ast.stmt], when: str) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, when) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 or package, "imports are absolute"
                source = ".".join(filter(None, [package if node.level else "", node.module]))
                for alias in node.names:
                    whole = f"{source}.{alias.name}"
                    yield Import(whole if whole in MODULES else source, when)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from walk(node.body, "use" if when == "load" else when)
            elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                yield from walk(node.body, "types")
                yield from walk(node.orelse, when)
            else:
                for field in ("body", "orelse", "finalbody", "handlers"):
                    yield from walk(getattr(node, field, []), when)

    yield from walk(ast.parse(text).body, "load")


@functools.cache
def all_of(module: str) -> list[Import]:
    return list(imports(MODULES[module].read_text(encoding="utf-8")))


def of(module: str, *whens: str) -> set[str]:
    return {one.module for one in all_of(module) if one.when in (whens or ("load", "use", "types"))}


def under(*prefixes: str) -> list[str]:
    return sorted(named(set(MODULES), *prefixes))


def named(names: set[str], *prefixes: str) -> set[str]:
    return {name for name in names if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)}


def loaded_by(*roots: str, with_packages: bool = True) -> dict[str, list[str]]:
    """Everything that is loaded with some modules, each with the chain of imports that leads to it."""
    chains: dict[str, list[str]] = {}
    waiting = [[root] for root in roots]
    while waiting:
        chain = waiting.pop()
        module = chain[-1]
        if module in chains:
            continue
        chains[module] = chain
        if module in MODULES:
            package = module.rpartition(".")[0]
            names = [*of(module, "load"), *([package] if package and with_packages else [])]
            waiting += [[*chain, name] for name in names]
    return chains
