"""Processes of the benchmark: parts that compute, and real `weft run` commands that are watched.

A part runs as `python -m weft.benchmarks.processes NAME`. It reads its settings as JSON from stdin and writes JSON
lines: its progress, and finally its result.
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

import psutil

from weft.errors import WeftError

from .internals import WORKER_ENVIRONMENT, prepare_process
from .timing import Progress

PARTS = ("steps", "engine", "server", "wire")
INTERVAL = 0.05  # seconds between two samples of a process
LIMIT = 600.0  # seconds for a run that is expected to take less than a minute
ORPHAN_LIMIT = 10.0  # seconds to wait for workers whose parent has ended


def measure_part(
    name: str, settings: dict[str, Any], progress: Progress, started: list[subprocess.Popen[str]] | None = None
) -> dict[str, Any]:
    """Measure a part in a process with a worker's environment. The process is added to `started`, to be killed."""
    with subprocess.Popen(
        [sys.executable, "-m", "weft.benchmarks.processes", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **WORKER_ENVIRONMENT},
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
                message = json.loads(line)
                if "result" in message:
                    result: dict[str, Any] = message["result"]
                    return result
                if "error" in message:
                    raise WeftError(message["error"])
                progress(*message["progress"])
        except BaseException:
            process.kill()
            raise
    raise WeftError(f"part {name} of the benchmark ended with code {process.returncode}; see its output above")


@contextlib.contextmanager
def weft_run(arguments: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `weft run` in `folder` as a user does; it is killed at the end of the block if it still runs."""
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", "run", *arguments], cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            workers = family(process.pid)[1:]
            if process.poll() is None:
                process.kill()
            process.wait()
            psutil.wait_procs(workers, timeout=ORPHAN_LIMIT)  # each ends soon after its parent


def watch(process: subprocess.Popen[bytes], folder: Path, done: Callable[[], bool], limit: float = LIMIT) -> None:
    """Sample until `done` or the process ends; a failure or more than `limit` seconds is a `WeftError`."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        ended = process.poll() is not None
        if done() or ended:
            if ended and process.returncode != 0:
                raise WeftError(f"weft run ended with code {process.returncode}: {last_line(folder / 'output.txt')}")
            return
        time.sleep(INTERVAL)
    raise WeftError(f"a run took more than {limit:.0f} s; use a faster or idle machine for weft bench")


def last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def journal(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's journal so far."""
    try:
        text = (folder / "journal.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def check_memory_info() -> None:
    if not hasattr(psutil.Process().memory_full_info(), "pss"):
        raise WeftError("weft bench measures shared memory (PSS), which this system does not report; use Linux")


def memory_of(pid: int) -> int:
    """Bytes of a process and its descendants; a page that several share is divided among them (PSS)."""
    total = 0
    for each in family(pid):
        with contextlib.suppress(psutil.Error):  # it may have ended
            total += each.memory_full_info().pss
    return total


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, itself first."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def main() -> None:
    """Measure one part in this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills this process
    settings = json.load(sys.stdin)
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the messages

    def send(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    prepare_process()
    name = sys.argv[1]
    assert name in PARTS
    try:
        part = importlib.import_module(f"weft.benchmarks.{name}")
        send(result=part.measure(**settings, progress=lambda done, total: send(progress=[done, total])))
    except WeftError as error:
        send(error=str(error))


if __name__ == "__main__":
    main()
