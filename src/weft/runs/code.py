"""A user's code is part of a run: its folder keeps a copy and a hash of each file, and a run resumes with no others."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from weft.errors import WeftError
from weft.plan import Plan


def user_code(plan: Plan) -> dict[str, str]:
    """SHA-256 of each file that a plan names or imports, and of the files beside them that these import, by path."""
    names = [*plan.method.split("+"), plan.network, plan.scenario, plan.loss or "", *(plan.metrics or "").split(",")]
    found: dict[str, str] = {}
    waiting = [file for name in names if (file := _file_of(name.partition("@")[0]))]
    while waiting:
        file = waiting.pop()
        if str(file) not in found:
            found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
            waiting += _neighbors(file)
    return dict(sorted(found.items()))


def _file_of(name: str) -> Path | None:
    """The file of `file.py:Name` or `package.module:Name`; None for what is part of weft."""
    source, colon, _ = name.rpartition(":")
    if not colon or source.startswith("weft."):
        return None
    if source.endswith(".py"):
        return Path(source).expanduser().resolve()
    spec = importlib.util.find_spec(source)
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _neighbors(file: Path) -> list[Path]:
    """Files beside a file that it imports."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            within = f"{node.module}." if node.module else ""  # a name may be a module of a package
            modules |= {node.module or ""} | {f"{within}{alias.name}" for alias in node.names}
    beside = [file.parent / Path(*module.split(".")) for module in sorted(modules) if module]
    return [path for each in beside for path in (each.with_suffix(".py"), each / "__init__.py") if path.is_file()]


def commits(files: Iterable[str]) -> dict[str, str]:
    """The git commit of each folder of these files that is in a repository."""
    found = {}
    for folder in sorted({str(Path(file).parent) for file in files}):
        try:
            words = ["git", "-C", folder, "rev-parse", "HEAD"]
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            found[folder] = done.stdout.strip()
    return found


def code_copy(file: str, digest: str) -> Path:
    """Where a run folder keeps a file."""
    return Path("code") / f"{str(digest)[:8]}-{Path(file).name}"


def check_code(folder: Path) -> None:
    """Raise a WeftError unless all files are those with which the run started."""
    try:
        code = dict(json.loads((folder / "environment.json").read_text(encoding="utf-8")).get("code", {}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return  # reported where the folder is opened
    for file, digest in code.items():
        path = Path(file)
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            change = "was changed" if path.is_file() else "is missing"
            copy = folder / code_copy(file, digest)
            remedy = f"restore it (cp {copy} {file}), or run again in a new folder"
            raise WeftError(f"{file} {change} since the run in {folder} started; {remedy}")
