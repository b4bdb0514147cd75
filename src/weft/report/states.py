"""Reader of client checkpoints: density of A and m, and attention, by layer. Needs numpy, not torch.

All knowledge of the checkpoint layout is in the section "layout" below. It expects, as core/storage.py writes it:

    manifest.json    {"clients": {client: {"file": [name, checksum], "archive": {key: [name, checksum]}}}}
    archive keys     "adaptive/TASK", "mask/TASK", "attention/TASK" of a finished task; "foreign/CLIENT.TASK"
    archive files    safetensors with one vector: "it" if dense, else "it:indices" and "it:values"; all layers in order
    state file       safetensors whose metadata "numbers" is JSON; "foreign/TASK" lists the foreign A's of a task
    attention        one value for each layer and foreign A: alpha[layer * count + index]
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
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


class TaskFiles(NamedTuple):
    """Where a checkpoint stores one finished task of one client."""

    adaptive: FileMark
    mask: FileMark
    attention: FileMark | None
    foreign: Sequence[tuple[int, int, FileMark]]  # client, task and file of each foreign A, in the order of attention


def task_files(folder: Path, reference: Mapping[str, Any]) -> dict[int, TaskFiles]:
    """The finished tasks of one client; `reference` is the client's entry in the manifest."""
    archive: Mapping[str, FileMark] = reference["archive"]
    tasks = sorted(int(key.partition("/")[2]) for key in archive if key.startswith("adaptive/"))
    attentive = any(f"attention/{task}" in archive for task in tasks)
    numbers = read_numbers(folder / reference["file"][0]) if attentive else {}
    found = {}
    for task in tasks:
        attention = archive.get(f"attention/{task}")
        keys: list[str] = numbers[f"foreign/{task}"] if attention else []
        foreign = [(*map(int, key.split(".")), archive[f"foreign/{key}"]) for key in keys]
        found[task] = TaskFiles(archive[f"adaptive/{task}"], archive[f"mask/{task}"], attention, foreign)  # type: ignore[arg-type]
    return found


class Sparse(NamedTuple):
    """The stored values of a vector and their positions, increasing."""

    indices: NDArray[np.int32]
    values: Vector


def read_vector(path: Path, checksum: int) -> Vector | Sparse:
    import safetensors

    try:
        with safetensors.safe_open(path, "np") as file:
            metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise WeftError(f"the checkpoint is incomplete: {path} cannot be read ({error.strerror or error})") from None
    except safetensors.SafetensorError:
        metadata, tensors = {}, {}
    if checksum_of(tensors, metadata) != checksum:
        raise WeftError(f"the checkpoint is corrupt: {path} does not match its checksum")
    return Sparse(tensors["it:indices"], tensors["it:values"]) if "it:indices" in tensors else tensors["it"]


def read_numbers(path: Path) -> dict[str, Any]:
    """The numbers of a state, from the header of its file; the tensors are not read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))  # a damaged file may claim any length
        numbers: dict[str, Any] = json.loads(header["__metadata__"]["numbers"])
    except (OSError, ValueError, KeyError) as error:
        raise WeftError(f"the checkpoint is incomplete: {path} cannot be read ({error})") from None
    return numbers


# ---- values by layer -------------------------------------------------------------------------------------------------


class StateReader:
    """Reads the states of one run; results are kept by checksum, so an unchanged file is read once."""

    def __init__(self, folder: Path, layers: Sequence[Layer]):
        self._folder = folder
        self._sizes = [layer.size for layer in layers]
        self._ends = np.cumsum(self._sizes)[:-1]
        self._rows = np.cumsum([layer.shape[0] for layer in layers])[:-1]  # m has one value for each output unit
        self._known: dict[tuple[str, str, int], tuple[float, ...]] = {}

    def read(self, manifest: Mapping[str, Any]) -> tuple[tuple[Density, ...], tuple[Attention, ...]]:
        """Density and attention of every finished task of every client."""
        densities, attention = [], []
        clients = manifest.get("clients", {})
        for client in sorted(map(int, clients)):
            for task, files in task_files(self._folder, clients[str(client)]).items():
                adaptive = self._values("density", files.adaptive, self._density)
                mask = self._values("mask", files.mask, self._mask_density)
                mean = self._values("mean", files.mask, self._mask_mean)
                densities.append(Density(client, task, adaptive, mask, mean))
                if files.attention is None:
                    continue
                alphas = self._values("alphas", files.attention, lambda vector: vector)
                count = len(files.foreign)
                for index, (sender, sender_task, mark) in enumerate(files.foreign):
                    norms = self._values("norms", mark, self._norms)
                    own = alphas[index::count]
                    attention.append(Attention(client, task, sender, sender_task, own, norms, count))
        return tuple(densities), tuple(attention)

    def _values(self, what: str, mark: FileMark, compute: Callable[[Any], Any]) -> tuple[float, ...]:
        name, checksum = mark
        key = (what, "" if what == "norms" else name, checksum)  # every client stores the same foreign A
        if key not in self._known:
            self._known[key] = tuple(float(value) for value in compute(read_vector(self._folder / name, checksum)))
        return self._known[key]

    def _by_layer(self, vector: Vector | Sparse) -> list[Vector]:
        """The values of each layer; of a sparse vector those that are stored."""
        if isinstance(vector, Sparse):
            return np.split(vector.values, np.searchsorted(vector.indices, self._ends))
        return np.split(vector, self._ends)

    def _density(self, vector: Vector | Sparse) -> list[float]:
        layers = zip(self._by_layer(vector), self._sizes, strict=True)
        return [np.count_nonzero(values) / size for values, size in layers]

    def _norms(self, vector: Vector | Sparse) -> list[float]:
        return [float(np.linalg.norm(values.astype(np.float64))) for values in self._by_layer(vector)]

    def _mask_density(self, vector: Vector) -> list[float]:
        return [np.count_nonzero(values) / values.size for values in np.split(vector, self._rows)]

    def _mask_mean(self, vector: Vector) -> list[float]:
        return [float(values.mean(dtype=np.float64)) for values in np.split(vector, self._rows)]
