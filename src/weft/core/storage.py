"""Save and load typed state: tensors as safetensors, the rest as JSON in the file's header, field by field.

A state's file holds everything but its tables. Each entry of a `Table` has a separate file, written when it changed.
A file's checksum is in the reference that names it, and references are in the manifest of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch

from weft.errors import WeftError
from weft.files import atomic_file
from weft.files import checksum as checksum_of
from weft.methods.state import Table
from weft.wire.tensors import Payload, Rows, Sparse, flatten, nbytes, unflatten

Reference = dict[str, Any]  # JSON: the files of a state, with their checksums
FileMark = list[Any]  # [file name, checksum]
S = TypeVar("S")
WHOLE = "it"  # name of an entry that is one tensor


def save(state: Any, folder: Path, prefix: str, owner: str = "") -> Reference:
    """Write a state and what changed in its tables. `owner`: the name before the files of its entries."""
    attach(state, folder)
    tables = {}
    for name, table in _tables(state).items():
        save_table(table, f"{owner or prefix}.{name}")
        tables[name] = {str(key): mark for key, mark in table.files.items()}
    return {"file": _write(folder, f"{prefix}.safetensors", state), "tables": tables}


def load(state: S, folder: Path, reference: Reference) -> S:
    """Fill a new state from its files; entries of tables are read when they are needed."""
    _fill(state, folder, reference["file"])
    for name, files in reference["tables"].items():
        table = getattr(state, name)
        table.files = {_key(key): mark for key, mark in files.items()}
    attach(state, folder)
    return state


def attach(state: Any, folder: Path) -> None:
    """Set the folder from which a state's tables are read and to which they spill."""
    for table in _tables(state).values():
        table.folder, table.read = folder, functools.partial(_read_entry, folder, table)


def _tables(state: Any) -> dict[str, Table[Any, Any]]:
    found = {each.name: getattr(state, each.name) for each in dataclasses.fields(state)}
    return {name: value for name, value in found.items() if isinstance(value, Table)}


def save_table(table: Table[Any, Any], prefix: str) -> None:
    assert table.folder is not None
    for key in sorted(table.changed):
        name = f"{prefix}.{key}.safetensors"
        entry = table.memory[key]
        table.files[key] = _write(table.folder, name, entry if table.entry is not None else {WHOLE: entry})
    table.changed.clear()


def spill(state: Any, limit: int, owner: str) -> None:
    """Keep at most `limit` bytes of each table in memory; entries must never change once they are stored."""
    for name, table in _tables(state).items():
        if table.folder is not None and state_bytes(table) > limit:
            save_table(table, f"{owner}.{name}")
            table.memory.clear()


def files_of(reference: Reference) -> set[str]:
    tables = reference["tables"].values()
    return {reference["file"][0], *(mark[0] for files in tables for mark in files.values())}


def state_bytes(value: Any) -> int:
    """What a state holds in memory."""
    if isinstance(value, torch.Tensor | Rows | Sparse):
        return nbytes(value)
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict | Table):
        return sum(map(state_bytes, (value.memory if isinstance(value, Table) else value).values()))
    if dataclasses.is_dataclass(value):
        return sum(state_bytes(getattr(value, each.name)) for each in dataclasses.fields(value))
    return 0


# ---- one file --------------------------------------------------------------------------------------------------------


def _split(value: Any, path: str, tensors: dict[str, Payload]) -> Any:
    """The JSON of a value; its tensors go into `tensors` under their path."""
    if isinstance(value, torch.Tensor | Rows | Sparse):
        tensors[path] = value
        return None
    if isinstance(value, bytes):
        if value:
            tensors[path] = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return None
    if isinstance(value, dict):
        if any(isinstance(each, dict | list | tuple) and _has_tensor(each) for each in value.values()):
            raise WeftError(f"state field {path.partition('/')[0]!r} nests tensors; use a dictionary of tensors")
        return {str(key): _split(each, f"{path}/{key}", tensors) for key, each in value.items()}
    if isinstance(value, list | tuple) and _has_tensor(value):
        raise WeftError(f"state field {path!r} is a list of tensors; use a dictionary of tensors")
    if dataclasses.is_dataclass(value):
        return {
            each.name: _split(getattr(value, each.name), f"{path}/{each.name}" if path else each.name, tensors)
            for each in dataclasses.fields(value)
            if not isinstance(getattr(value, each.name), Table)
        }
    return value


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(map(_has_tensor, value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor | Rows | Sparse)


def _write(folder: Path, name: str, value: Any) -> FileMark:
    tensors: dict[str, Payload] = {}
    values = _split(value, "", tensors)
    flat: dict[str, torch.Tensor] = {}
    described: dict[str, Any] = {}
    for path, payload in tensors.items():
        path = path.removeprefix("/")
        if isinstance(payload, torch.Tensor) and payload.dtype == torch.uint8:
            flat[path], described[path] = payload, {"shape": "bytes"}
        else:
            pieces, described[path] = flatten(path, payload)
            flat.update(pieces)
    seen: set[int] = set()
    for key, tensor in flat.items():  # safetensors refuses tensors that share memory
        pointer = tensor.untyped_storage().data_ptr()
        flat[key] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    metadata = {"described": json.dumps(described), "values": json.dumps(values)}
    with atomic_file(folder / name) as path_to:
        try:
            safetensors.torch.save_file(flat, path_to, metadata)
        except safetensors.SafetensorError as error:
            # "... I/O error: No space left on device (os error 28)"
            raise OSError(None, str(error).rpartition("error: ")[2].partition(" (os error")[0]) from None
    return [name, checksum(flat, metadata)]


def _read(folder: Path, mark: FileMark) -> tuple[dict[str, Any], Any]:
    name, expected = mark
    path = folder / name
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata()
            # cloned: what safetensors gives lies at any address, and sums depend on alignment in their last bits
            flat = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118 - not a dict
    except OSError as error:
        raise WeftError(f"the checkpoint is incomplete: {path} cannot be read ({error.strerror or error})") from None
    except safetensors.SafetensorError:
        metadata, flat = {}, {}
    if checksum(flat, metadata) != expected:
        raise WeftError(f"the checkpoint is corrupt: {path} has changed; start the run again in a new folder")
    tensors: dict[str, Any] = {}
    for key, how in json.loads(metadata["described"]).items():
        tensors[key] = flat[key].numpy().tobytes() if how["shape"] == "bytes" else unflatten(key, flat, how)
    return tensors, json.loads(metadata["values"])


def _fill(state: Any, folder: Path, mark: FileMark) -> None:
    """Overwrite the fields of a new state, except its tables."""
    tensors, values = _read(folder, mark)
    _join(state, values, "", tensors)


def _join(state: Any, values: dict[str, Any], path: str, tensors: dict[str, Any]) -> None:
    """The inverse of `_split` for a dataclass: overwrite the fields of a new one."""
    for each in dataclasses.fields(state):
        if each.name not in values:
            continue
        where, old = f"{path}{each.name}", getattr(state, each.name)
        if dataclasses.is_dataclass(old) and not isinstance(old, Rows | Sparse):
            _join(old, values[each.name], f"{where}/", tensors)
        elif where in tensors:
            setattr(state, each.name, tensors[where])
        elif isinstance(values[each.name], dict):
            found = values[each.name].items()
            setattr(state, each.name, {_key(key): tensors.get(f"{where}/{key}", value) for key, value in found})
        elif values[each.name] is not None or not isinstance(old, torch.Tensor | bytes):
            setattr(state, each.name, values[each.name])


def _key(key: str) -> Any:
    """JSON knows no numbers as keys; a key of ours that looks like one is one."""
    return int(key) if key.isdigit() else key


def _read_entry(folder: Path, table: Table[Any, Any], mark: FileMark) -> Any:
    if table.entry is None:
        return _read(folder, mark)[0][WHOLE]
    entry = table.entry()
    _fill(entry, folder, mark)
    return entry


def checksum(flat: dict[str, torch.Tensor], metadata: dict[str, str]) -> int:
    return checksum_of({key: tensor.contiguous().numpy() for key, tensor in flat.items()}, metadata)


# ---- encoded messages ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Encoded:
    """Bytes of a message, kept like a state."""

    wire: bytes = b""


def save_wire(wire: bytes, folder: Path, prefix: str) -> Reference:
    return save(Encoded(wire), folder, prefix)


def load_wire(folder: Path, reference: Reference) -> bytes:
    return load(Encoded(), folder, reference).wire
