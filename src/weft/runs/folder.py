"""The run folder: all that a run leaves behind, and all that it needs to go on after being stopped at any moment.

    plan.toml         the whole plan, defaults included                     environment.json   versions, which images
    journal.jsonl     what happened when, a line an event                   run.json           version of this layout
    accuracy.csv      client, after_task, task, accuracy                    ledger.csv         each part of each message
    checkpoints/      manifest.json and the states it names                 summary.json       the result
    contents.json     the layers of the network, the tasks by name          metrics.csv        what `metrics` asks for

A run is written by one process at a time: its lock is the operating system's and dies with the process. Files appear
whole or not at all; the tables only grow, and a run that goes on cuts them back to where its checkpoint left them.
"""

from __future__ import annotations

import csv
import errno
import importlib.metadata
import io
import json
import math
import os
import platform
import shutil
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import filelock

from weft.errors import RunLockedError, WeftError
from weft.files import append, atomic_file, sync, write_text
from weft.plan import Plan

SITES = "sites.json"  # in the run folder of a hub: who takes part
FORMAT = 2
MOST_TASKS = 10_000  # a damaged line may claim any number
COLUMNS = (int, int, int, float)  # of accuracy.csv
TABLES = {
    "accuracy.csv": ("client", "after_task", "task", "accuracy"),
    "ledger.csv": ("direction", "client", "task", "round", "tensor", "bytes", "nonzeros", "dense_bytes"),
}
MEASURES = {"metrics.csv": ("client", "after_task", "task", "metric", "class", "value")}  # where a plan asks for them


class RunFolder:
    """A run folder, held by this process until `close`."""

    def __init__(self, folder: Path, plan: Plan, lock: filelock.BaseFileLock):
        self.path, self.plan, self._lock = folder, plan, lock

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tables(self) -> dict[str, tuple[str, ...]]:
        return tables_of(self.plan)

    @classmethod
    def create(cls, folder: Path, plan: Plan, images: Mapping[str, str] | None = None) -> Self:
        """A new run folder with its plan in it, and which images it uses; an existing run is never written over."""
        folder = folder.absolute() if folder.name in ("", "..") else folder  # . has no name of its own
        if (folder / "run.json").exists():
            raise WeftError(f"{folder} already holds a run; {resume_command(folder)} goes on, or choose another --out")
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a process that had the same id and was killed here
            (partial / "checkpoints").mkdir(parents=True)
            write_text(partial / "plan.toml", plan.toml())
            facts = {**environment(), "images": dict(images or {})}
            write_text(partial / "environment.json", json.dumps(facts, indent=2) + "\n")
            write_text(partial / "journal.jsonl", "")
            for name, header in tables_of(plan).items():
                write_text(partial / name, ",".join(header) + "\n")
            layout = {"format": FORMAT, "weft": importlib.metadata.version("weft")}
            write_text(partial / "run.json", json.dumps(layout) + "\n")
            partial.rename(folder)  # all of it at once; onto an empty folder, or not at all
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if folder.exists() and not folder.is_dir():
                raise WeftError(f"{folder} is a file; choose another --out") from None
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise WeftError(f"{folder} is not empty; choose another --out") from None
            raise WeftError(f"the run folder {folder} cannot be made: {error.strerror}") from None
        record = cls(folder, plan, _take_lock(folder))
        record.journal("created")
        return record

    @classmethod
    def open(cls, folder: Path) -> Self:
        """An existing run folder, to go on with it."""
        record = cls(folder, read_plan(folder), _take_lock(folder))
        journal = folder / "journal.jsonl"
        if journal.exists():
            os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)  # a kill may have cut its last line
        return record

    def close(self) -> None:
        self._lock.release()

    def journal(self, event: str, /, **facts: Any) -> None:
        line = {"at": round(time.time(), 3), "event": event}
        self._append("journal.jsonl", json.dumps({**line, **facts, **line}) + "\n")

    def add_rows(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        self._append(table, text.getvalue())

    def lengths(self) -> dict[str, int]:
        return {name: (self.path / name).stat().st_size for name in self.tables}

    def truncate(self, lengths: dict[str, int]) -> None:
        """Take back what was written after the checkpoint."""
        for name, header in self.tables.items():
            path, length = self.path / name, lengths.get(name, len(",".join(header)) + 1)
            if not path.exists() or path.stat().st_size < length:  # truncate would fill it up with zeros
                raise WeftError(f"{path} has lost lines that its checkpoint counts on; run again in a new folder")
            os.truncate(path, length)

    def manifest(self) -> dict[str, Any] | None:
        """The last checkpoint, if there is one."""
        return read_manifest(self.checkpoints)

    def commit(self, manifest: dict[str, Any], files: set[str]) -> None:
        """From now on the run goes on from here; files that no checkpoint names any more are removed."""
        for table in self.tables:  # how long they are stands in the manifest
            sync(self.path / table)
        write_manifest(self.checkpoints, manifest)
        for path in self.checkpoints.iterdir():
            if path.name not in files and path.name != "manifest.json":
                path.unlink(missing_ok=True)

    def write_contents(self, layers: Iterable[Any], sequences: Iterable[Iterable[Any]]) -> None:
        """What the states and tables speak of by number: whoever reads the folder has neither network nor scenario."""
        contents = {
            "layers": [{"name": layer.name, "shape": list(layer.shape)} for layer in layers],
            "tasks": [
                [{"name": task.name, "classes": list(task.classes)} for task in sequence] for sequence in sequences
            ],
        }
        write_text(self.path / "contents.json", json.dumps(contents) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _append(self, name: str, text: str) -> None:
        append(self.path / name, text)


def tables_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The tables of a run folder, each with its columns."""
    return TABLES if plan.metrics is None else {**TABLES, **MEASURES}


def has_sites(folder: Path) -> bool:
    """Are the clients of this run sites of a hub?"""
    return (folder / SITES).is_file()


def resume_command(folder: Path) -> str:
    """The command that goes on with a run."""
    return f"weft hub run {folder}" if has_sites(folder) else f"weft resume {folder}"


def read_plan(folder: Path) -> Plan:
    """The plan of a run folder; a `WeftError` if it is no run folder of this version."""
    check_layout(folder)
    return Plan.load(folder / "plan.toml")


def check_layout(folder: Path) -> None:
    """A `WeftError` if it is no run folder of this version."""
    try:
        layout = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        version = layout["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise WeftError(f"{folder} is not a run folder; weft run makes one") from None
    if version != FORMAT:
        raise WeftError(
            f"{folder} was written by weft {layout.get('weft', '?')} (layout {version}; this one reads {FORMAT}); "
            "use that version for it"
        )


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The result of a run folder; None if the run is not over."""
    read_plan(folder)
    return load_summary(folder)


def load_summary(folder: Path) -> dict[str, Any] | None:
    """The same where the plan does not matter: it may name a method that only another machine has."""
    path = folder / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "traffic" not in summary or "seconds" not in summary:
            raise ValueError
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise WeftError(f"{path} cannot be read; {resume_command(folder)} writes it again") from None
    return summary


def read_manifest(checkpoints: Path) -> dict[str, Any] | None:
    """What the last checkpoint of a run consists of; None if there is none yet."""
    path = checkpoints / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest.pop("checksum") != zlib.crc32(json.dumps(manifest).encode()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WeftError(f"the checkpoint is corrupt: {path} cannot be read; run again in a new folder") from None
    return manifest


def write_manifest(checkpoints: Path, manifest: dict[str, Any]) -> None:
    """In one step, with a checksum of its own, and after all that it names: also a loss of power leaves one whole.

    What was written before the last manifest is on disk already, and states that come and go between two need never be.
    """
    path = checkpoints / "manifest.json"
    last = path.stat().st_mtime_ns if path.exists() else 0
    for written in [file for file in checkpoints.glob("*.safetensors") if file.stat().st_mtime_ns >= last]:
        sync(written)
    sync(checkpoints)
    checksum = zlib.crc32(json.dumps(manifest).encode())
    with atomic_file(path) as partial:
        partial.write_text(json.dumps({**manifest, "checksum": checksum}), encoding="utf-8")
        sync(partial)
    sync(checkpoints)


def read_images(folder: Path) -> dict[str, str]:
    """The mark of each dataset that a run uses; empty if its images are drawn, or if it is of an older weft."""
    path = folder / "environment.json"
    try:
        images = json.loads(path.read_text(encoding="utf-8")).get("images", {})
        return {str(name): str(mark) for name, mark in images.items()}
    except (OSError, ValueError, AttributeError):
        raise WeftError(f"{path} cannot be read; run again in a new folder") from None


def read_rows(folder: Path, table: str) -> list[list[str]]:
    """The whole lines of a table; a line that is still being written is left out."""
    try:
        text = (folder / table).read_text(encoding="utf-8")
    except OSError:
        raise WeftError(f"{folder / table} cannot be read") from None
    return list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))[1:]


def accuracy_matrices(folder: Path) -> dict[int, list[list[float]]]:
    """For each client its accuracy matrix: row t, column i is task i after learning task t.

    A site that never answered its test after a task leaves a row of NaN, since later rows may be there.
    """
    found: dict[int, list[list[float]]] = {}
    for row in read_rows(folder, "accuracy.csv"):
        try:
            client, after_task, task, accuracy = (kind(value) for kind, value in zip(COLUMNS, row, strict=True))
            matrix = found.setdefault(client, [])
            if task == 0 and after_task < MOST_TASKS:
                matrix += [[math.nan] * (missed + 1) for missed in range(len(matrix), after_task)]
                matrix.append([])
            if (len(matrix) - 1, len(matrix[-1])) != (after_task, task):
                raise ValueError
            matrix[-1].append(accuracy)
        except (ValueError, IndexError):
            line = ",".join(row)
            raise WeftError(
                f"{folder / 'accuracy.csv'} is damaged at {line[:80]!r}; run again in a new folder"
            ) from None
    return dict(sorted(found.items()))


class Measured(NamedTuple):
    """A line of metrics.csv."""

    client: int
    after_task: int
    task: int
    metric: str
    label: str  # the class that it is about; empty: it is one number for the task
    value: float | None  # None: it is not defined, as the recall of a class without test images


def read_measures(folder: Path) -> list[Measured]:
    """What was measured beside accuracy; empty if nothing was asked for."""
    if not (folder / "metrics.csv").exists():
        return []
    try:
        return [
            Measured(int(client), int(after), int(task), metric, label, float(value) if value else None)
            for client, after, task, metric, label, value in read_rows(folder, "metrics.csv")
        ]
    except ValueError:
        raise WeftError(f"{folder / 'metrics.csv'} is damaged; run again in a new folder") from None


def environment() -> dict[str, Any]:
    """Versions and processor: what a reader needs to judge times, and to repeat the run."""
    packages = ("weft", "torch", "numpy", "safetensors", "pydantic")
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def _take_lock(folder: Path) -> filelock.BaseFileLock:
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RunLockedError(f"another process is working on {folder}; wait for it or stop it") from None
    return lock
