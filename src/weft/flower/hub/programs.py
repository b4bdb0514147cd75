"""Flower's programs, and an environment in which they contact nobody but the configured hub; files of keys."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from weft.errors import WeftError

FLWR = "1.41.0"
TIMEOUT = 120.0  # seconds for one call of `flwr`
LOOPBACK = ("127.0.0.1", "localhost")
CONNECTION = "weft"  # the name of the hub in Flower's configuration

# names get into paths and onto terminals
SITE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
ADDRESS = re.compile(r"[A-Za-z0-9._-]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}")  # HOST:PORT


def is_address(text: str) -> bool:
    """HOST:PORT

    >>> [is_address(each) for each in ("hub.example.org:9443", "[::1]:80", "http://hub:80", "hub:0", "hub:99999")]
    [True, True, False, False, False]
    """
    return bool(ADDRESS.fullmatch(text)) and 1 <= int(text.rpartition(":")[2]) <= 65535


def check_flower() -> None:
    try:
        found = metadata.version("flwr")
    except metadata.PackageNotFoundError:
        raise WeftError("Flower is not installed: pip install 'weft[flower]'") from None
    if found != FLWR:
        raise WeftError(f"flwr {found} is installed, weft requires {FLWR}: pip install flwr=={FLWR}")


def program(name: str) -> str:
    """The path of one of Flower's commands, next to the running Python."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        raise WeftError(f"the program {name} is not installed: pip install 'weft[flower]'")
    return found


def environment(home: Path, path: str | None = None) -> dict[str, str]:
    """Environment variables of Flower's programs: a separate home, no telemetry, no update check.

    On this machine Flower never uses a proxy, which it would do; for other hosts the environment decides.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    beside = str(Path(sys.executable).parent)
    configured = ",".join(os.environ.get(key, "") for key in ("no_proxy", "NO_PROXY"))
    names = [name.strip() for name in configured.split(",") if name.strip()]
    no_proxy = "*" if "*" in names else ",".join(dict.fromkeys([*names, *LOOPBACK]))  # "*" works only alone
    return kept | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": path or os.pathsep.join([beside, os.environ.get("PATH", os.defpath)]),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; Flower's default is 1
        "PYTHONUNBUFFERED": "1",
        "no_proxy": no_proxy,
        "NO_PROXY": no_proxy,
    }


def write_secret(path: Path, blob: bytes) -> None:
    """Write a new file that only its owner can read, from its first byte on."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(blob)
    except FileExistsError:
        raise WeftError(f"{path} already exists; remove it first") from None


def check_secret(path: Path) -> None:
    """Reject a key that others can read."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        raise WeftError(f"the key {path} is missing; restore it from a copy") from None
    if mode & 0o077:
        raise WeftError(f"others can read the key {path} (mode {mode:o}); chmod 600 {path}")


def flwr(arguments: list[str], home: Path) -> Any:
    """Run `flwr` and return its JSON output; a `WeftError` with its message if it fails."""
    command, env = [program("flwr"), *arguments, "--format", "json"], environment(home)
    title = f"flwr {' '.join(arguments[:2])}"
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        raise WeftError(f"{title} did not finish in {TIMEOUT:.0f} s; see logs/superlink.log") from None
    try:
        output = json.loads(done.stdout)
    except ValueError:
        output = {"success": False, "error-message": (done.stderr or done.stdout).strip()}
    if done.returncode != 0 or (isinstance(output, dict) and output.get("success") is False):
        reason = " ".join(str(output.get("error-message") or done.stderr or output).split())
        raise WeftError(f"{title} failed: {reason[:400]}")
    return output
