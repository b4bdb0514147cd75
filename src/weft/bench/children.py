"""Processes of the benchmark: parts of it that compute, and real `weft run` commands that are watched.

A part is started as `python -m weft.bench.children NAME`, gets its settings as JSON on stdin, and says JSON lines:
how far it is, and at last what it found.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weft.bench.timing import Tell
from weft.engines.workers import ENVIRONMENT
from weft.errors import WeftError

PARTS = ("steps", "engine", "server", "wire")
SAMPLED = 0.05  # seconds between two looks at a process
PATIENCE = 10.0  # seconds until an orphan is left to itself


def ask_part(
    name: str, settings: dict[str, Any], tell: Tell, started: list[subprocess.Popen[str]] | None = None
) -> dict[str, Any]:
    """What a part measured, in a process with a worker's environment, which joins `started` for others to end."""
    with subprocess.Popen(
        [sys.executable, "-m", "weft.bench.children", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **ENVIRONMENT},
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if started is not None:
            started.append(process)
        try:
            process.stdin.write(json.dumps(settings))
            process.stdin.close()
            for line in process.stdout:
                words = json.loads(line)
                if "found" in words:
                    found: dict[str, Any] = words["found"]
                    return found
                if "problem" in words:
                    raise WeftError(words["problem"])
                tell(*words["done"])
        except BaseException:
            process.kill()
            raise
    raise WeftError(f"the part {name} of the benchmark ended with code {process.returncode}; what it said stands above")


@contextlib.contextmanager
def running(words: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`weft run` as a person starts it, in `folder`; ended with the block if it is not over by then."""
    with (folder / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", "run", *words], cwd=folder, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            workers = family(process.pid)[1:]
            if process.poll() is None:
                process.kill()
            process.wait()
            end = time.monotonic() + PATIENCE
            while any(map(is_alive, workers)) and time.monotonic() < end:  # each ends with its parent, soon
                time.sleep(SAMPLED)


def is_alive(process: int) -> bool:
    """Not one that has ended and that nobody has asked for its end yet, as happens to orphans in a container."""
    try:
        return Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def watch(process: subprocess.Popen[bytes], folder: Path, limit: float, look: Callable[[], bool]) -> bool:
    """Look again and again until `look` is content or the process is over; False if `limit` seconds came first."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        over = process.poll() is not None
        if look() or over:
            if over and process.returncode != 0:
                raise WeftError(f"weft run ended with code {process.returncode}: {last_line(folder / 'said.txt')}")
            return True
        time.sleep(SAMPLED)
    return False


def last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def journal(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's journal so far; none if there is no run yet."""
    try:
        text = (folder / "journal.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def resident(process: int) -> int:
    """Bytes in memory of a process and all that it started; a page that several share is divided among them (PSS)."""
    total = 0
    for one in family(process):
        with contextlib.suppress(OSError):  # it may be over by now
            found = Path("/proc", str(one), "smaps_rollup").read_text()
            total += 1024 * sum(int(line.split()[1]) for line in found.splitlines() if line.startswith("Pss:"))
    return total


def family(process: int) -> list[int]:
    """A process and all that it started, it first."""
    found = [process]
    for one in found:  # which grows meanwhile
        with contextlib.suppress(OSError):
            for task in Path("/proc", str(one), "task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def main() -> None:
    """One part, in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    import torch

    from weft.engines.host import keep_memory

    settings = json.load(sys.stdin)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not get between the lines

    def say(**words: Any) -> None:
        replies.write(json.dumps(words) + "\n")
        replies.flush()

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as in a worker
    keep_memory()
    name = sys.argv[1]
    assert name in PARTS
    try:
        part = importlib.import_module(f"weft.bench.{name}")
        say(found=part.measure(**settings, tell=lambda done, total: say(done=[done, total])))
    except WeftError as problem:
        say(problem=str(problem))


if __name__ == "__main__":
    main()
