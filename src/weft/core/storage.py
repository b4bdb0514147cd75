"""State: the memory of a client or of the server, as named tensors and numbers that can be saved, moved and resumed.

`tensors` change in every round and are written whole. `archive` is cold storage: what a task leaves behind (its own
parameters, its head, a foreign A) is written once when it changed and read when somebody needs it, so that a hundred
clients with ten tasks each neither fill the memory nor make every checkpoint larger than the last.

On disk everything is safetensors and JSON; each file's checksum stands in the reference that names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from weft.errors import WeftError
from weft.files import atomic_file
from weft.files import checksum as checksum_of
from weft.wire.tensors import Payload, flatten, nbytes, unflatten

Reference = dict[str, Any]  # JSON: which files hold a state, with their checksums
FileMark = list[Any]  # [file name, checksum]


class Archive(MutableMapping[str, Payload]):
    """Named payloads, in memory when touched, on disk when saved."""

    def __init__(self, folder: Path | None = None, files: dict[str, FileMark] | None = None, owner: str = ""):
        self._folder = folder
        self.owner = owner
        self._files: dict[str, FileMark] = dict(files or {})
        self._memory: dict[str, Payload] = {}
        self._changed: set[str] = set()

    def __getitem__(self, key: str) -> Payload:
        if key not in self._memory:
            if key not in self._files or self._folder is None:
                raise KeyError(key)
            self._memory[key] = read_tensors(self._folder, self._files[key])[0]["it"]
        return self._memory[key]

    def __setitem__(self, key: str, payload: Payload) -> None:
        self._memory[key] = payload
        self._changed.add(key)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._memory.pop(key, None)
        self._files.pop(key, None)
        self._changed.discard(key)

    def __contains__(self, key: object) -> bool:
        return key in self._memory or key in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._memory, *self._files}))

    def __len__(self) -> int:
        return len({*self._memory, *self._files})

    @property
    def nbytes(self) -> int:
        """What is held in memory."""
        return sum(map(nbytes, self._memory.values()))

    def save(self, folder: Path, prefix: str) -> dict[str, FileMark]:
        """Write what changed; says in which file each entry lies."""
        for key in sorted(self._changed):
            name = f"{prefix}.{key.replace('/', '-')}.safetensors"
            self._files[key] = write_tensors(folder, name, {"it": self._memory[key]}, {})
        self._changed.clear()
        self._folder = folder
        return dict(self._files)

    def spill(self, limit: int) -> None:
        """Keep no more than `limit` bytes in memory; for an archive whose entries never change once they are in."""
        if self._folder is not None and self.nbytes > limit:
            self.save(self._folder, self.owner)
            self._memory.clear()


@dataclass
class State:
    tensors: dict[str, Payload] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    archive: Archive = field(default_factory=Archive)
    reply: bytes = b""  # the last answer, word for word, in case it is asked for again

    def tensor(self, key: str) -> torch.Tensor:
        """A dense tensor by name."""
        value = self.tensors[key]
        assert isinstance(value, torch.Tensor), (
            f"{key!r} is {type(value).__name__}; weft.wire.tensors.dense gives it whole"
        )
        return value

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes, self.tensors.values())) + self.archive.nbytes + len(self.reply)

    def save(self, folder: Path, prefix: str) -> Reference:
        hot = write_tensors(folder, f"{prefix}.safetensors", self.tensors, self.numbers, self.reply)
        return {"file": hot, "archive": self.archive.save(folder, self.archive.owner or prefix)}

    @staticmethod
    def load(folder: Path, reference: Reference, owner: str = "") -> State:
        tensors, numbers, reply = read_tensors(folder, reference["file"])
        return State(tensors, numbers, Archive(folder, reference["archive"], owner), reply)


def files_of(reference: Reference) -> set[str]:
    return {reference["file"][0], *(mark[0] for mark in reference["archive"].values())}


def write_tensors(
    folder: Path, name: str, tensors: dict[str, Payload], numbers: dict[str, Any], reply: bytes = b""
) -> FileMark:
    flat: dict[str, torch.Tensor] = {}
    described = {}
    if reply:
        flat["reply"] = torch.frombuffer(bytearray(reply), dtype=torch.uint8)
    for key, payload in tensors.items():
        pieces, described[key] = flatten(key, payload)
        flat.update(pieces)
    metadata = {"described": json.dumps(described), "numbers": json.dumps(numbers)}
    with atomic_file(folder / name) as path:
        try:
            safetensors.torch.save_file(flat, path, metadata)
        except safetensors.SafetensorError as error:
            # "... I/O error: No space left on device (os error 28)"
            raise OSError(None, str(error).rpartition("error: ")[2].partition(" (os error")[0]) from None
    return [name, checksum(flat, metadata)]


def read_tensors(folder: Path, mark: FileMark) -> tuple[dict[str, Payload], dict[str, Any], bytes]:
    name, expected = mark
    path = folder / name
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
            # cloned: what safetensors gives lies at any address, and sums depend on alignment in their last bits
            flat = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - it is no dict
    except OSError as error:
        raise WeftError(f"the checkpoint is incomplete: {path} cannot be read ({error.strerror or error})") from None
    except safetensors.SafetensorError:
        metadata, flat = {}, {}
    if checksum(flat, metadata) != expected:
        raise WeftError(
            f"the checkpoint is corrupt: {path} is not what was written; start the run again in a new folder"
        )
    described = json.loads(metadata["described"])
    reply = flat["reply"].numpy().tobytes() if "reply" in flat else b""
    return {key: unflatten(key, flat, how) for key, how in described.items()}, json.loads(metadata["numbers"]), reply


def checksum(flat: dict[str, torch.Tensor], metadata: dict[str, str]) -> int:
    return checksum_of({key: tensor.contiguous().numpy() for key, tensor in flat.items()}, metadata)
