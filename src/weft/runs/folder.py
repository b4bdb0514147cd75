"""The run folder: everything that a run writes, and everything that it needs to resume after a stop at any moment.

    plan.toml         the whole plan, defaults included            environment.json   versions; fingerprints of images
    journal.jsonl     events with their time, one per line         run.json           version of this layout
    accuracy.csv      client, after_task, task, accuracy           ledger.csv         each tensor of each message
    validation.csv    the same, on validation images
    checkpoints/      manifest.json and the states it names        summary.json       the result
    contents.json     layers of the network, names of the tasks    metrics.csv        the plan's `metrics`

One process at a time writes a run. Its lock belongs to the operating system and ends with the process. Files are
written atomically. Tables only grow; a resumed run truncates them to their length at its checkpoint.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, Self

import filelock

from weft.errors import RunLockedError, WeftError
from weft.files import append, atomic_file, sync, write_text
from weft.metrics import Measure
from weft.plan import Plan, flat_keys, read_toml
from weft.runs.code import code_copy, commits, user_code

SITES = "sites.json"  # in the run folder of a hub: the participating sites
FORMAT = 2
MOST_TASKS = 10_000  # a damaged line may claim any number
PACKAGES = ("weft", "torch", "numpy", "safetensors", "pydantic")  # whose versions are recorded
COLUMNS = (int, int, int, float)  # of accuracy.csv and validation.csv
TABLES = {
    "accuracy.csv": ("client", "after_task", "task", "accuracy"),  # on test images
    "validation.csv": ("client", "after_task", "task", "accuracy"),  # on validation images, by which one may choose
    "ledger.csv": ("direction", "client", "task", "round", "tensor", "bytes", "nonzeros", "dense_bytes"),
}
METRICS = {"metrics.csv": ("client", "after_task", "task", "metric", "class", "value")}  # of a plan with `metrics`


class RunFolder:
    """A run folder, locked by this process until `close`."""

    def __init__(self, path: Path, plan: Plan, lock: filelock.BaseFileLock):
        self.path, self.plan, self._lock = path, plan, lock
        self.checkpoints, self.tables = path / "checkpoints", tables_of(plan)
        self.started = False  # a round is done: there is something to keep
        self.replaced: Path | None = None  # where a run that was in this folder waits until then

    @classmethod
    def create(cls, path: Path, plan: Plan, images: Mapping[str, str] | None = None, force: bool = False) -> Self:
        """Create a run folder with its plan and the fingerprints of its images; with `force` replace another run."""
        path = path.absolute() if path.name in ("", "..") else path  # "." has no name
        replaced = path.with_name(f".{path.name}.{os.getpid()}.old") if force and (path / "run.json").exists() else None
        if replaced is not None:
            _lock(path).release()  # nobody works on it
        elif (path / "run.json").exists():
            remedy = f"{resume_command(path)} continues it, --force replaces it, or choose another --out"
            raise WeftError(f"{path} already holds a run; {remedy}")
        partial = path.with_name(f".{path.name}.{os.getpid()}.part")
        environment = {
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
            "images": dict(images or {}),
            "code": (code := user_code(plan)),
            "commits": commits(code),
        }
        layout = {"format": FORMAT, "weft": importlib.metadata.version("weft")}
        try:
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same id
            partial.mkdir(mode=0o700, parents=True)  # images and models may be confidential
            (partial / "checkpoints").mkdir()
            for file, digest in code.items():
                (partial / "code").mkdir(exist_ok=True)
                shutil.copyfile(file, partial / code_copy(file, digest))
            write_text(partial / "plan.toml", plan.toml())
            write_text(partial / "environment.json", json.dumps(environment, indent=2) + "\n")
            write_text(partial / "journal.jsonl", "")
            for name, header in tables_of(plan).items():
                write_text(partial / name, ",".join(header) + "\n")
            write_text(partial / "run.json", json.dumps(layout) + "\n")
            if replaced is not None:
                path.rename(replaced)
            partial.rename(path)  # atomic; fails unless the target is missing or an empty folder
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if replaced is not None and replaced.exists():
                replaced.rename(path)
            if path.exists() and not path.is_dir():
                raise WeftError(f"{path} is a file; choose another --out") from None
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise WeftError(f"{path} is not empty; choose another --out") from None
            raise WeftError(f"the run folder {path} cannot be created: {error.strerror}") from None
        folder = cls(path, plan, _lock(path))
        folder.replaced = replaced
        folder.journal("created")
        return folder

    @classmethod
    def open(cls, path: Path) -> Self:
        """Lock an existing run folder to resume its run."""
        folder = cls(path, read_plan(path), _lock(path))
        journal = path / "journal.jsonl"
        if journal.exists():
            os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)  # a kill may leave half a line
        return folder

    def close(self) -> None:
        self._lock.release()

    def remove(self) -> None:
        """Remove a folder before its run's first round is done, and put back the run that it was to replace."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)
        if self.replaced is not None:
            self.replaced.rename(self.path)

    def journal(self, event: str, /, **facts: Any) -> None:
        line = {"at": round(time.time(), 3), "event": event}
        append(self.path / "journal.jsonl", json.dumps({**line, **facts, **line}) + "\n")

    def add_rows(self, table: str, rows: Iterable[Sequence[Any]]) -> None:
        self.started = True
        if self.replaced is not None:
            shutil.rmtree(self.replaced, ignore_errors=True)
            self.replaced = None
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        append(self.path / table, text.getvalue())

    def lengths(self) -> dict[str, int]:
        return {name: (self.path / name).stat().st_size for name in self.tables}

    def truncate(self, lengths: dict[str, int]) -> None:
        """Remove the rows that were written after the checkpoint."""
        for name, header in self.tables.items():
            path, length = self.path / name, lengths.get(name, len(",".join(header)) + 1)
            if not path.exists() or path.stat().st_size < length:  # os.truncate would fill the gap with zeros
                raise WeftError(f"{path} has lost lines that its checkpoint needs; run again in a new folder")
            os.truncate(path, length)

    def manifest(self) -> dict[str, Any] | None:
        return read_manifest(self.checkpoints)

    def commit(self, manifest: dict[str, Any], files: set[str]) -> None:
        """Replace the checkpoint, and remove the files that it does not name."""
        for table in self.tables:  # the manifest contains their lengths
            sync(self.path / table)
        write_manifest(self.checkpoints, manifest)
        for path in self.checkpoints.iterdir():
            if path.name not in files and path.name != "manifest.json":
                path.unlink(missing_ok=True)

    def write_contents(self, layers: Iterable[Any], sequences: Iterable[Iterable[Any]]) -> None:
        """Write the names of layers and tasks, for readers that have neither the network nor the scenario."""
        tasks = [[{"name": task.name, "classes": list(task.classes)} for task in sequence] for sequence in sequences]
        contents = {"layers": [{"name": layer.name, "shape": list(layer.shape)} for layer in layers], "tasks": tasks}
        write_text(self.path / "contents.json", json.dumps(contents) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_text(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def tables_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Names of the tables and their columns."""
    return TABLES if plan.metrics is None else {**TABLES, **METRICS}


def has_sites(path: Path) -> bool:
    """Whether the clients of this run are sites of a hub."""
    return (path / SITES).is_file()


def resume_command(path: Path) -> str:
    return f"weft hub run {path}" if has_sites(path) else f"weft resume {path}"


def read_plan(path: Path) -> Plan:
    check_layout(path)
    return Plan.load(path / "plan.toml")


def read_keys(path: Path) -> dict[str, Any]:
    """Keys of a run's plan, without loading what it names."""
    check_layout(path)
    try:
        return flat_keys((path / "plan.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, RecursionError):  # TOMLDecodeError is a ValueError
        raise WeftError(f"{path / 'plan.toml'} cannot be read; restore it, or run again in a new folder") from None


def check_layout(path: Path) -> None:
    """Raise a WeftError unless this is a run folder of this version."""
    try:
        layout = json.loads((path / "run.json").read_text(encoding="utf-8"))
        version = layout["format"]
    except (OSError, ValueError, KeyError, TypeError):
        raise WeftError(f"{path} is not a run folder; weft run creates one") from None
    if version != FORMAT:
        writer = f"weft {layout.get('weft', '?')} (layout {version}; this version reads {FORMAT})"
        raise WeftError(f"{path} was written by {writer}; use that version")


def read_summary(path: Path) -> dict[str, Any] | None:
    """Result of a run; None if it is not finished. No code that the plan names is loaded."""
    check_layout(path)
    read_toml(path / "plan.toml")
    return load_summary(path)


def load_summary(path: Path) -> dict[str, Any] | None:
    """The same without a look at the plan."""
    try:
        summary: dict[str, Any] = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        if "traffic" not in summary or "seconds" not in summary:
            raise ValueError
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        raise WeftError(f"{path / 'summary.json'} cannot be read; {resume_command(path)} writes it again") from None
    return summary


def read_manifest(checkpoints: Path) -> dict[str, Any] | None:
    """The last checkpoint: references to its states, and the progress. None if there is no checkpoint."""
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
    """Write a manifest atomically, with a checksum, after syncing the files it names: safe against loss of power.

    Files that the last manifest names, with their checksums, are on disk already. Times are no sign of that: a clock
    may go back.
    """
    path, before = checkpoints / "manifest.json", set[tuple[str, int]]()
    with contextlib.suppress(WeftError):
        before = _files_in(read_manifest(checkpoints))
    for name, _ in sorted(_files_in(manifest) - before):
        sync(checkpoints / name)
    sync(checkpoints)
    checksum = zlib.crc32(json.dumps(manifest).encode())
    with atomic_file(path) as partial:
        partial.write_text(json.dumps({**manifest, "checksum": checksum}), encoding="utf-8")
        sync(partial)
    sync(checkpoints)


def _files_in(value: Any) -> set[tuple[str, int]]:
    """The names and checksums of the files in a manifest: what `core.storage` calls marks."""
    if isinstance(value, dict):
        return set().union(*map(_files_in, value.values()))
    if not isinstance(value, list | tuple):
        return set()
    if len(value) == 2 and isinstance(value[0], str) and value[0].endswith(".safetensors"):
        return {(value[0], value[1])}
    return set().union(*map(_files_in, value))


def read_images(path: Path) -> dict[str, str]:
    """Fingerprint of each dataset of a run; empty if its images are drawn."""
    try:
        images = json.loads((path / "environment.json").read_text(encoding="utf-8"))["images"]
        return {str(name): str(fingerprint) for name, fingerprint in images.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise WeftError(f"{path / 'environment.json'} cannot be read; run again in a new folder") from None


def read_rows(path: Path, table: str) -> list[list[str]]:
    """Complete rows of a table; a line that is still being written is left out."""
    try:
        text = (path / table).read_text(encoding="utf-8")
        return list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))[1:]
    except OSError:
        raise WeftError(f"{path / table} cannot be read") from None
    except (UnicodeDecodeError, csv.Error):
        raise WeftError(f"{path / table} is damaged; run again in a new folder") from None


def accuracy_matrices(path: Path, table: str = "accuracy.csv") -> dict[int, list[list[float]]]:
    """Accuracy matrix of each client: row t, column i is task i after learning task t. Or that of validation.csv.

    A row is NaN if a site never replied to the test after that task, since it may have replied to later ones.
    """
    found: dict[int, list[list[float]]] = {}
    for row in read_rows(path, table):
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
            where = f"{path / table} is damaged at {','.join(row)[:80]!r}"
            raise WeftError(f"{where}; run again in a new folder") from None
    return dict(sorted(found.items()))


def read_measures(path: Path) -> list[Measure]:
    """Rows of metrics.csv; none for a plan without `metrics`."""
    if not (path / "metrics.csv").exists():
        return []
    try:
        return [
            Measure(int(client), int(after), int(task), metric, label, float(value) if value else None)
            for client, after, task, metric, label, value in read_rows(path, "metrics.csv")
        ]
    except ValueError:
        raise WeftError(f"{path / 'metrics.csv'} is damaged; run again in a new folder") from None


def _lock(path: Path) -> filelock.BaseFileLock:
    lock = filelock.FileLock(path / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise RunLockedError(f"another process is working on {path}; wait for it or stop it") from None
    return lock
