"""Reader of client checkpoints: density of A and m, and attention, by layer. Needs numpy, not torch.

All knowledge of the checkpoint layout is in the section "layout" below. It expects, as core/storage.py writes it:

    manifest.json     {"clients": {client: {"file": mark, "tables": {"tasks": {task: mark}, "knowledge": {key: mark}}}}}
                      a mark is [file name, checksum]; a key is "CLIENT.TASK", a foreign A
    files             safetensors; a sparse vector NAME is stored as NAME:indices and NAME:values; layers in order
    a task's file     tensors "adaptive" (A), "mask" (m, one value for each output unit) and "attention";
                      metadata "values" is JSON, in which "foreign" lists the keys of the A's that the task uses
    attention         one value for each layer and foreign A: alpha[layer * count + index]
    a foreign A       one tensor, "it"
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import WeftError
from weft.files import checksum as checksum_of
from weft.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

FileMark = Sequence[Any]  # [file name, checksum]


@dataclass(frozen=True)
class Layer:
    """One weight tensor of the network; its first dimension counts the output units."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Density:
    """Shares of nonzero values in A and m of one finished task, for each layer."""

    client: int
    task: int
    adaptive: tuple[float, ...]  # A
    mask: tuple[float, ...]  # m
    mask_mean: tuple[float, ...]  # mean of m: a sigmoid is never zero, so its density says nothing


@dataclass(frozen=True)
class Attention:
    """How one task of one client uses the A of another client's task."""

    client: int
    task: int
    sender: int
    sender_task: int
    alphas: tuple[float, ...]  # for each layer
    norms: tuple[float, ...]  # Euclidean norm of the foreign A in each layer
    count: int  # foreign A's that the task received; alpha starts at 1 / count


# ---- layout ----------------------------------------------------------------------------------------------------------


class Sparse(NamedTuple):
    """The stored values of a vector and their positions, increasing."""

    indices: NDArray[np.int32]
    values: Vector


class StoredTask(NamedTuple):
    """A finished task of one client."""

    adaptive: Vector | Sparse
    mask: Vector
    attention: Vector
    foreign: Sequence[str]  # keys of the A's that attention is for


def read_task(folder: Path, mark: FileMark) -> StoredTask | None:
    """None for a method without A and m."""
    tensors, metadata = _read_file(folder, mark)
    if "mask" not in tensors or not tensors["mask"].size:
        return None
    attention = tensors.get("attention", np.empty(0, np.float32))
    return StoredTask(
        _vector(tensors, "adaptive"), tensors["mask"], attention, json.loads(metadata["values"])["foreign"]
    )


def read_foreign(folder: Path, mark: FileMark) -> Vector | Sparse:
    return _vector(_read_file(folder, mark)[0], "it")


def _vector(tensors: Mapping[str, Any], name: str) -> Vector | Sparse:
    if name in tensors:
        found: Vector = tensors[name]
        return found
    return Sparse(tensors[f"{name}:indices"], tensors[f"{name}:values"])


def _read_file(folder: Path, mark: FileMark) -> tuple[dict[str, Any], dict[str, str]]:
    import safetensors

    name, checksum = mark
    try:
        with safetensors.safe_open(folder / name, "np") as file:
            metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except OSError as error:
        reason = error.strerror or error
        raise WeftError(f"the checkpoint is incomplete: {folder / name} cannot be read ({reason})") from None
    except safetensors.SafetensorError:
        metadata, tensors = {}, {}
    if checksum_of(tensors, metadata) != checksum:
        raise WeftError(f"the checkpoint is corrupt: {folder / name} does not match its checksum")
    return tensors, metadata


# ---- values by layer -------------------------------------------------------------------------------------------------


class TaskFacts(NamedTuple):
    adaptive: list[float]
    mask: list[float]
    mask_mean: list[float]
    alphas: list[float]
    foreign: Sequence[str]


class StateReader:
    """Reads the states of one run; results are kept by checksum, so an unchanged file is read once."""

    def __init__(self, folder: Path, layers: Sequence[Layer]):
        self._folder = folder
        self._sizes = [layer.size for layer in layers]
        self._ends = np.cumsum(self._sizes)[:-1]
        self._rows = np.cumsum([layer.shape[0] for layer in layers])[:-1]
        self._tasks: dict[str, TaskFacts | None] = {}
        self._norms: dict[int, tuple[float, ...]] = {}  # by checksum: every client stores the same foreign A

    def read(self, manifest: Mapping[str, Any]) -> tuple[tuple[Density, ...], tuple[Attention, ...]]:
        """Density and attention of every finished task of every client."""
        densities, attention = [], []
        clients = manifest.get("clients", {})
        for client in sorted(map(int, clients)):
            tables = clients[str(client)]["tables"]
            for task in sorted(map(int, tables["tasks"])):
                found = self._task(tables["tasks"][str(task)])
                if found is None:
                    continue
                adaptive, mask, mean = map(tuple, found[:3])
                densities.append(Density(client, task, adaptive, mask, mean))
                count = len(found.foreign)
                for index, key in enumerate(found.foreign):
                    sender, sender_task = map(int, key.split("."))
                    alphas, norms = tuple(found.alphas[index::count]), self._norm(tables["knowledge"][key])
                    attention.append(Attention(client, task, sender, sender_task, alphas, norms, count))
        return tuple(densities), tuple(attention)

    def _task(self, mark: FileMark) -> TaskFacts | None:
        key = repr(mark)
        if key not in self._tasks:
            task = read_task(self._folder, mark)
            self._tasks[key] = None if task is None else self._facts(task)
        return self._tasks[key]

    def _facts(self, task: StoredTask) -> TaskFacts:
        layers = zip(self._by_layer(task.adaptive), self._sizes, strict=True)
        masks = np.split(task.mask, self._rows)
        return TaskFacts(
            [int(np.count_nonzero(values)) / size for values, size in layers],
            [int(np.count_nonzero(values)) / values.size for values in masks],
            [float(values.mean(dtype=np.float64)) for values in masks],
            task.attention.tolist(),
            task.foreign,
        )

    def _norm(self, mark: FileMark) -> tuple[float, ...]:
        if mark[1] not in self._norms:
            layers = self._by_layer(read_foreign(self._folder, mark))
            self._norms[mark[1]] = tuple(float(np.linalg.norm(values.astype(np.float64))) for values in layers)
        return self._norms[mark[1]]

    def _by_layer(self, vector: Vector | Sparse) -> list[Vector]:
        """The values of each layer; of a sparse vector those that are stored."""
        if isinstance(vector, Sparse):
            return np.split(vector.values, np.searchsorted(vector.indices, self._ends))
        return np.split(vector, self._ends)
