"""What the states of clients say about A, m and attention, layer by layer: read from checkpoints, without torch.

A state's archive has one safetensors file for each thing that a task left behind (core/storage.py writes them). Each is
read once, whichever page asks for it again: a file is known by its checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import WeftError
from weft.files import checksum as checksum_of

Vector = NDArray[np.float32]
Mark = Sequence[Any]  # [file name, checksum]


@dataclass(frozen=True)
class Layer:
    """One weight matrix; `rows` are its output units, `width` the values of each."""

    name: str
    rows: int
    width: int


@dataclass(frozen=True)
class Density:
    """What one task of one client keeps: shares of values that are not zero, for each layer."""

    client: int
    step: int
    adaptive: tuple[float, ...]  # of A
    mask: tuple[float, ...]  # of m
    mask_mean: tuple[float, ...]  # m itself: a sigmoid is never zero, so its share of nonzeros says nothing


@dataclass(frozen=True)
class Attention:
    """How one task of one client uses one foreign A."""

    client: int
    step: int
    giver: int
    given_step: int
    alphas: tuple[float, ...]  # for each layer
    norms: tuple[float, ...]  # Euclidean, of the foreign A in each layer: alpha * A is what theta gets
    among: int  # so many foreign A's the task was given


class StateReader:
    """Reads states of one run folder; remembers what it computed of each file."""

    def __init__(self, folder: Path, layers: Sequence[Layer]):
        self._folder, self._layers = folder, layers
        self._known: dict[tuple[str, str, int], tuple[float, ...]] = {}
        self._sizes = [layer.rows * layer.width for layer in layers]
        self._rows = [layer.rows for layer in layers]

    def read(self, client: int, reference: Mapping[str, Any]) -> tuple[list[Density], list[Attention]]:
        """All that the tasks learned so far left behind."""
        archive: Mapping[str, Mark] = reference["archive"]
        steps = sorted(int(key.partition("/")[2]) for key in archive if key.startswith("adaptive/"))
        densities = [
            Density(
                client,
                step,
                self._of(archive[f"adaptive/{step}"], "density", self._adaptive_density),
                self._of(archive[f"mask/{step}"], "density", self._mask_density),
                self._of(archive[f"mask/{step}"], "mean", self._mask_mean),
            )
            for step in steps
        ]
        used = [step for step in steps if f"attention/{step}" in archive]
        numbers = read_numbers(self._folder / reference["file"][0]) if used else {}
        attention = []
        for step in used:
            keys = numbers[f"foreign/{step}"]
            alphas = self._of(archive[f"attention/{step}"], "values", lambda vector: vector)
            for place, key in enumerate(keys):
                giver, given_step = map(int, key.split("."))
                norms = self._of(archive[f"foreign/{key}"], "norms", self._norms)
                own = alphas[place :: len(keys)]  # layer by layer, as Eq. 1 is computed
                attention.append(Attention(client, step, giver, given_step, own, norms, len(keys)))
        return densities, attention

    def _of(self, mark: Mark, what: str, compute: Callable[[Any], Any]) -> tuple[float, ...]:
        name, checksum = mark
        key = (what, "" if what == "norms" else name, checksum)  # a foreign A is the same file at every client
        if key not in self._known:
            found = compute(read_vector(self._folder / name, checksum))
            self._known[key] = tuple(float(value) for value in found)
        return self._known[key]

    def _by_layer(self, vector: Vector | Sparse) -> list[Vector]:
        """The values of each layer; of a sparse vector those that are stored."""
        if isinstance(vector, Sparse):
            return np.split(vector.values, np.searchsorted(vector.indices, np.cumsum(self._sizes)[:-1]))
        return np.split(vector, np.cumsum(self._sizes)[:-1])

    def _adaptive_density(self, vector: Vector | Sparse) -> list[float]:
        parts = zip(self._by_layer(vector), self._sizes, strict=True)
        return [np.count_nonzero(values) / size for values, size in parts]

    def _norms(self, vector: Vector | Sparse) -> list[float]:
        return [float(np.linalg.norm(values.astype(np.float64))) for values in self._by_layer(vector)]

    def _masks(self, vector: Vector) -> list[Vector]:
        return np.split(vector, np.cumsum(self._rows)[:-1])

    def _mask_density(self, vector: Vector) -> list[float]:
        return [np.count_nonzero(values) / values.size for values in self._masks(vector)]

    def _mask_mean(self, vector: Vector) -> list[float]:
        return [float(values.mean(dtype=np.float64)) for values in self._masks(vector)]


@dataclass(frozen=True)
class Sparse:
    """Some values of a vector and where they stand; the indices increase."""

    indices: NDArray[np.int32]
    values: Vector


def read_vector(path: Path, checksum: int) -> Vector | Sparse:
    """The one payload of an archive's file."""
    import safetensors

    try:
        with safetensors.safe_open(path, "np") as file:
            metadata, parts = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise WeftError(f"the checkpoint is incomplete: {path} cannot be read ({error.strerror or error})") from None
    except safetensors.SafetensorError:
        metadata, parts = {}, {}
    if checksum_of(parts, metadata) != checksum:
        raise WeftError(f"the checkpoint is corrupt: {path} is not what was written")
    return Sparse(parts["it:indices"], parts["it:values"]) if "it:indices" in parts else parts["it"]


def read_numbers(path: Path) -> dict[str, Any]:
    """The numbers of a state, which stand in its file's header: the tensors behind it are not read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))  # a damaged one claims any length
        numbers: dict[str, Any] = json.loads(header["__metadata__"]["numbers"])
    except (OSError, ValueError, KeyError) as error:
        raise WeftError(f"the checkpoint is incomplete: {path} cannot be read ({error})") from None
    return numbers
