"""Reader of run folders: journal, ledger, accuracy, plan, summary and checkpoints as plain dataclasses.

The run may be in progress, killed or finished. The reader takes every complete line and reports what it cannot read in
`Run.notes`. It reads the plan as plain TOML, so the method or network of a run need not be installed here. Importing
this module loads neither numpy nor torch.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError
from weft.files import checksum as checksum_of
from weft.files import is_held
from weft.lazy import np
from weft.metrics import Matrix, Measure
from weft.runs.folder import accuracy_matrices, check_layout, load_summary, read_keys, read_measures, read_rows
from weft.runs.journal import ROUTINE, Event, Journal, Round, read_kept, read_rounds
from weft.wire.ledger import Entry

if TYPE_CHECKING:
    from numpy.typing import NDArray

ATTEMPTS = 3  # a run in progress may replace its checkpoint while it is read


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One weight tensor of the network; its first dimension counts the output units."""

    name: str
    shape: tuple[int, ...]


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


States = tuple[tuple[Density, ...], tuple[Attention, ...]]


class StateReader:
    """Reads the client checkpoints of one run; results are kept by checksum, so an unchanged file is read once.

    It expects, as core/storage.py writes it:

    manifest.json     {"clients": {client: {"file": mark, "tables": {"tasks": {task: mark}, "knowledge": {key: mark}}}}}
                      a mark is [file name, checksum]; a key is "CLIENT.TASK", a foreign A
    files             safetensors; a sparse vector NAME is stored as NAME:indices and NAME:values; layers in order
    a task's file     tensors "adaptive" (A), "mask" (m, one value for each output unit) and "attention";
                      metadata "values" is JSON, in which "foreign" lists the keys of the A's that the task uses
    attention         one value for each layer and foreign A: alpha[layer * count + index]
    a foreign A       one tensor, "it"
    """

    def __init__(self, folder: Path, layers: Sequence[Layer]):
        self._folder = folder
        self._sizes = [math.prod(layer.shape) for layer in layers]
        self._ends = np.cumsum(self._sizes)[:-1]
        self._rows = np.cumsum([layer.shape[0] for layer in layers])[:-1]
        self._known: dict[int, Any] = {}

    def read(self, manifest: Mapping[str, Any]) -> States:
        """Density and attention of every finished task of every client."""
        densities, attention = [], []
        clients = manifest.get("clients", {})
        for client in sorted(map(int, clients)):
            tables = clients[str(client)]["tables"]
            for task in sorted(map(int, tables["tasks"])):
                found = self._once(tables["tasks"][str(task)], self._task)
                if found is None:
                    continue
                shares, alphas, foreign = found
                densities.append(Density(client, task, *shares))
                for index, key in enumerate(foreign):
                    sender, sender_task = map(int, key.split("."))
                    own, norms = tuple(alphas[index :: len(foreign)]), self._once(tables["knowledge"][key], self._norms)
                    attention.append(Attention(client, task, sender, sender_task, own, norms, len(foreign)))
        return tuple(densities), tuple(attention)

    def _once(self, mark: Sequence[Any], compute: Callable[[dict[str, Any], dict[str, str]], Any]) -> Any:
        import safetensors

        name, checksum = mark
        if checksum in self._known:
            return self._known[checksum]
        path = self._folder / name
        try:
            with safetensors.safe_open(path, "np") as file:
                metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except OSError as error:
            reason = error.strerror or error
            raise WeftError(f"the checkpoint is incomplete: {path} cannot be read ({reason})") from None
        except safetensors.SafetensorError:
            metadata, tensors = {}, {}
        if checksum_of(tensors, metadata) != checksum:
            raise WeftError(f"the checkpoint is corrupt: {path} does not match its checksum")
        return self._known.setdefault(checksum, compute(tensors, metadata))

    def _task(self, tensors: dict[str, Any], metadata: dict[str, str]) -> Any:
        """Densities, alphas and keys of foreign A's; None for a method without A and m."""
        if "mask" not in tensors or not tensors["mask"].size:
            return None
        masks = np.split(tensors["mask"], self._rows)
        layers = zip(self._by_layer(tensors, "adaptive"), self._sizes, strict=True)
        shares = (
            tuple(int(np.count_nonzero(values)) / size for values, size in layers),
            tuple(int(np.count_nonzero(values)) / values.size for values in masks),
            tuple(float(values.mean(dtype=np.float64)) for values in masks),
        )
        alphas = tensors["attention"].tolist() if "attention" in tensors else []
        return shares, alphas, json.loads(metadata["values"])["foreign"]

    def _norms(self, tensors: dict[str, Any], _: dict[str, str]) -> tuple[float, ...]:
        return tuple(float(np.linalg.norm(each.astype(np.float64))) for each in self._by_layer(tensors, "it"))

    def _by_layer(self, tensors: dict[str, Any], name: str) -> list[NDArray[np.float32]]:
        """The values of each layer; of a sparse vector those that are stored."""
        if name in tensors:
            return np.split(tensors[name], self._ends)
        return np.split(tensors[f"{name}:values"], np.searchsorted(tensors[f"{name}:indices"], self._ends))


# ---- the whole folder ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    folder: Path
    plan: dict[str, Any]
    summary: dict[str, Any] | None  # None: not finished
    environment: dict[str, Any]
    layers: tuple[Layer, ...]
    task_names: tuple[tuple[str, ...], ...]  # by client and task
    matrices: dict[int, Matrix]
    measures: tuple[Measure, ...]  # other metrics than accuracy
    rounds: tuple[Round, ...]
    kept: dict[int, tuple[str, ...]]  # by client and task: whose result, own or shared; of methods with a choice
    sent: tuple[Entry, ...]
    densities: tuple[Density, ...]
    attention: tuple[Attention, ...]
    events: tuple[Event, ...]  # without replies and tests
    notes: tuple[str, ...]  # what could not be read
    held: bool | None  # does a process hold the lock? None: unknown on this system

    @property
    def seed(self) -> int:
        return int(self.plan["seed"])

    @property
    def clients(self) -> int:
        return int(self.plan["clients"])

    @property
    def tasks(self) -> int:
        return int(self.plan["tasks"])

    @property
    def rounds_per_task(self) -> int:
        return int(self.plan["rounds_per_task"])

    @functools.cached_property
    def _last_round(self) -> dict[int, int]:
        last: dict[int, int] = {}
        for item in self.rounds:
            last[item.task] = max(item.round, last.get(item.task, 0))
        return last

    def rounds_of(self, task: int) -> int:
        """Rounds of a task: with per-client task clocks, some clients take more than the plan says."""
        return max(self.rounds_per_task, self._last_round.get(task, -1) + 1)

    def task_name(self, client: int, task: int) -> str:
        named = client < len(self.task_names) and task < len(self.task_names[client])
        return self.task_names[client][task] if named else f"task {task}"


@dataclass
class Reader:
    """Reads one folder repeatedly; checkpoint files that did not change are not read again."""

    folder: Path
    _states: StateReader | None = field(default=None, repr=False)

    def read(self) -> Run:
        folder, summary = self.folder, None
        check_layout(folder)
        journal = Journal(folder)
        notes = journal.notes
        layers, task_names = _contents(folder, notes)
        events = journal.new_events()
        rounds, kept = read_rounds(events, journal), read_kept(events, journal)
        densities, attention = self._read_states(layers, notes)
        try:
            summary = load_summary(folder)
        except WeftError as error:
            notes.append(str(error))
        return Run(
            folder=folder,
            plan=_plan(folder),
            summary=summary,
            environment=_json(folder / "environment.json"),
            layers=layers,
            task_names=task_names,
            matrices=dict(accuracy_matrices(folder)),
            measures=tuple(read_measures(folder)),
            rounds=rounds,
            kept=kept,
            sent=tuple(read_ledger(folder)),
            densities=densities,
            attention=attention,
            events=tuple(event for event in events if event.kind not in ROUTINE),
            notes=tuple(notes),
            held=is_held(folder / ".lock"),
        )

    def _read_states(self, layers: tuple[Layer, ...], notes: list[str]) -> States:
        if not layers:
            return (), ()
        checkpoints = self.folder / "checkpoints"
        self._states = self._states or StateReader(checkpoints, layers)
        for _ in range(ATTEMPTS):
            try:
                return self._states.read(_json(checkpoints / "manifest.json"))
            except WeftError as error:
                problem = str(error)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problem = f"the checkpoint in {checkpoints} has an unknown layout ({error!r})"
        notes.append(f"{problem}; density and attention are left out")
        return (), ()


def read_run(folder: Path) -> Run:
    return Reader(folder).read()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    return [read_run(folder) for folder in find_runs(folders)]


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The run folders in some folders: each is a run folder or contains run folders."""
    found: list[Path] = []
    for folder in folders:
        inside = [] if is_run(folder) else sorted(path.parent for path in folder.glob("*/run.json"))
        if not inside:
            check_layout(folder)
        found += inside or [folder]
    return list(dict.fromkeys(found))


def is_run(folder: Path) -> bool:
    return (folder / "run.json").exists()


def read_ledger(folder: Path) -> list[Entry]:
    try:
        return [Entry.from_row(row) for row in read_rows(folder, "ledger.csv")]
    except WeftError as error:
        raise WeftError(f"{folder / 'ledger.csv'}: {error}; run again in a new folder") from None


def _contents(folder: Path, notes: list[str]) -> tuple[tuple[Layer, ...], tuple[tuple[str, ...], ...]]:
    """The layers of the network and the names of the tasks; empty if the run has just started."""
    path = folder / "contents.json"
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        layers = tuple(Layer(str(item["name"]), tuple(map(int, item["shape"]))) for item in contents["layers"])
        return layers, tuple(tuple(str(task["name"]) for task in sequence) for sequence in contents["tasks"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not isinstance(error, FileNotFoundError):
            notes.append(f"{path} cannot be read; everything by layer is left out")
        return (), ()


def _plan(folder: Path) -> dict[str, Any]:
    plan = read_keys(folder)
    try:
        for key in ("seed", "clients", "tasks", "rounds_per_task"):
            int(plan[key])
        if not isinstance(plan["method"], str):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise WeftError(f"{folder / 'plan.toml'} cannot be read; restore it, or run again in a new folder") from None
    return plan


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
