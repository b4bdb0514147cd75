"""Flower's programs: where they are, and the surroundings in which they call nobody but the configured hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from weft.errors import WeftError

FLWR = "1.41.0"
UP = "the hub is up"
PATIENCE = 120.0  # seconds for one answer of `flwr`
OWN = ("127.0.0.1", "localhost")  # this machine: no proxy has anything to do between its processes
NAME = "weft"  # of the connection in Flower's own configuration


def check_flower() -> None:
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise WeftError("this needs Flower: pip install 'weft[flower]'") from None
    if found != FLWR:
        raise WeftError(f"flwr {found} is installed, weft works with {FLWR}: pip install flwr=={FLWR}")


def program(name: str) -> str:
    """The whole path of one of Flower's commands, beside the Python that runs this."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise WeftError(f"{name} is not there; pip install 'weft[flower]'")
    return found


def surroundings(home: Path, path: str | None = None) -> dict[str, str]:
    """The environment of Flower's programs: a home of their own, no telemetry, no look for updates."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    beside = str(Path(sys.executable).parent)
    return kept | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": path or os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds until it sees that there is work; 1 else
        "PYTHONUNBUFFERED": "1",
        **no_proxy(),
    }


def no_proxy() -> dict[str, str]:
    """Flower takes a proxy out of the environment even to this machine: never there, all else as it is set."""
    asked = [os.environ.get(key, "") for key in ("no_proxy", "NO_PROXY")]
    named = [name.strip() for words in asked for name in words.split(",") if name.strip()]
    # a lone * is known as "never a proxy", among others it is not
    words = "*" if "*" in named else ",".join(dict.fromkeys([*named, *OWN]))
    return {"no_proxy": words, "NO_PROXY": words}


def ask(words: list[str], home: Path) -> Any:
    """What `flwr` says, as JSON; a `WeftError` with its own words if it says no."""
    command = [program("flwr"), *words, "--format", "json"]
    try:
        done = subprocess.run(
            command, env=surroundings(home), capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise WeftError(f"flwr {' '.join(words[:2])} said nothing for {PATIENCE:.0f} s") from None
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = {"success": False, "error-message": (done.stderr or done.stdout).strip()}
    if done.returncode != 0 or (isinstance(said, dict) and said.get("success") is False):
        why = " ".join(str(said.get("error-message") or done.stderr or said).split())
        raise WeftError(f"flwr {' '.join(words[:2])} failed: {why[:400]}")
    return said
