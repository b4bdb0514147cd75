"""Run folders as plain dataclasses: everything that is shown anywhere comes through here and through states.py.

A folder may belong to a run that is going on, was killed, or ended long ago: whatever whole lines there are is read,
and what cannot be read is said in `notes`. A plan is read as words, so that a method or network that only another
machine has does no harm.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import WeftError
from weft.files import is_held
from weft.metrics import Matrix
from weft.plan import flat_keys
from weft.report.states import Attention, Density, Layer, StateReader
from weft.runs.folder import Measured, accuracy_matrices, check_layout, load_summary, read_measures, read_rows

USUAL = ("created", "finished")
# what a site may do: it has no task yet, wants to take part no more or is taken out, is back, is asked once more
ORDERLY = ("waiting", "left", "removed", "back", "retry")
DAILY = ("reply", "tested")  # events of every round or task; all others are told one by one
TRIES = 3  # a run that goes on may replace its checkpoint while it is being read


class Sent(NamedTuple):
    """One line of the ledger, a part of a message: `foreign` stands for all A's that came along."""

    direction: str  # c2s or s2c
    client: int
    step: int
    round: int
    part: str
    bytes: int
    nonzeros: int
    dense_bytes: int


class Round(NamedTuple):
    """What a client answered in a round."""

    client: int
    step: int
    round: int
    at: float  # seconds since 1970
    valid_accuracy: float | None
    valid_loss: float | None
    train_loss: float | None


class Event(NamedTuple):
    """A line of the journal that is no everyday answer."""

    at: float
    event: str
    facts: dict[str, Any]

    @property
    def is_incident(self) -> bool:
        return self.event not in (*USUAL, *ORDERLY)

    @property
    def words(self) -> str:
        facts = (f"{key}={_in_words(value)}" for key, value in self.facts.items())
        return " ".join([self.event, *facts])


def _in_words(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Run:
    folder: Path
    plan: dict[str, Any]
    summary: dict[str, Any] | None  # None: not over
    environment: dict[str, Any]
    layers: tuple[Layer, ...]
    tasks: tuple[tuple[str, ...], ...]  # names, by client and step
    matrices: dict[int, Matrix]
    measures: tuple[Measured, ...]  # beside accuracy, where the plan asks for any
    rounds: tuple[Round, ...]
    sent: tuple[Sent, ...]
    densities: tuple[Density, ...]
    attention: tuple[Attention, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...]  # what could not be read
    held: bool | None  # is a process working on it? None: this system cannot tell

    @property
    def seed(self) -> int:
        return int(self.plan["seed"])

    @property
    def clients(self) -> int:
        return int(self.plan["clients"])

    @property
    def steps(self) -> int:
        return int(self.plan["tasks"])

    @property
    def rounds_per_task(self) -> int:
        return int(self.plan["rounds_per_task"])

    @functools.cached_property
    def _longest(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for item in self.rounds:
            found[item.step] = max(item.round + 1, found.get(item.step, 0))
        return found

    def rounds_of(self, step: int) -> int:
        """Rounds of a task; with task clocks of their own some clients take more than the plan's number for it."""
        return max(self.rounds_per_task, self._longest.get(step, 0))

    def task_name(self, client: int, step: int) -> str:
        named = client < len(self.tasks) and step < len(self.tasks[client])
        return self.tasks[client][step] if named else f"task {step}"


@dataclass
class Reader:
    """Reads one folder again and again; what did not change since is not computed anew."""

    folder: Path
    _states: StateReader | None = field(default=None, repr=False)

    def read(self) -> Run:
        folder = self.folder
        check_layout(folder)
        notes: list[str] = []
        layers, tasks = _contents(folder, notes)
        rounds, events = read_journal(folder, notes)
        densities, attention = self._read_states(layers, notes)
        try:
            summary = load_summary(folder)
        except WeftError as problem:
            summary = None
            notes.append(str(problem))
        return Run(
            folder=folder,
            plan=_plan(folder),
            summary=summary,
            environment=_json(folder / "environment.json", {}),
            layers=layers,
            tasks=tasks,
            matrices=dict(accuracy_matrices(folder)),
            measures=tuple(read_measures(folder)),
            rounds=rounds,
            sent=tuple(read_ledger(folder)),
            densities=densities,
            attention=attention,
            events=events,
            notes=tuple(notes),
            held=is_held(folder / ".lock"),
        )

    def _read_states(
        self, layers: tuple[Layer, ...], notes: list[str]
    ) -> tuple[tuple[Density, ...], tuple[Attention, ...]]:
        checkpoints = self.folder / "checkpoints"
        if not layers:
            return (), ()
        if self._states is None:
            self._states = StateReader(checkpoints, layers)
        said = ""
        for _ in range(TRIES):
            densities: list[Density] = []
            attention: list[Attention] = []
            try:
                clients = _json(checkpoints / "manifest.json", {}).get("clients", {})
                for client in sorted(clients, key=int):
                    dense, foreign = self._states.read(int(client), clients[client])
                    densities += dense
                    attention += foreign
                return tuple(densities), tuple(attention)
            except WeftError as problem:
                said = str(problem)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                said = f"the checkpoint in {checkpoints} cannot be understood ({error!r})"
        notes.append(f"{said}; density and attention are left out")
        return (), ()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in some folders: each a run folder itself, or one that holds run folders."""
    return [Reader(folder).read() for folder in find_runs(folders)]


def find_runs(folders: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/run.json")) if not is_run(folder) else []
        if not inside:
            check_layout(folder)
        found += inside or [folder]
    return list(dict.fromkeys(found))


def is_run(folder: Path) -> bool:
    return (folder / "run.json").exists()


def read_ledger(folder: Path) -> list[Sent]:
    found = []
    for row in read_rows(folder, "ledger.csv"):
        try:
            direction, client, step, round_index, part, size, nonzeros, dense = row
            name = part.partition("/")[0]
            place = (int(client), int(step), int(round_index))
            found.append(Sent(direction, *place, name, int(size), int(nonzeros), int(dense)))
        except ValueError:
            line = ",".join(row)
            raise WeftError(f"{folder / 'ledger.csv'} is damaged at {line[:80]!r}; run again in a new folder") from None
    return found


def read_journal(folder: Path, notes: list[str]) -> tuple[tuple[Round, ...], tuple[Event, ...]]:
    """The rounds that count, and all other events. A run that goes on repeats what came after its checkpoint: the first
    answer of a client after `resumed` takes back everything of that client from its round on."""
    rounds: dict[tuple[int, int, int], Round] = {}
    events: list[Event] = []
    repeating: set[int] = set()  # clients that have not answered since the run went on
    for line in _whole_lines(folder / "journal.jsonl"):
        try:
            facts = json.loads(line)
            at, event = float(facts.pop("at")), str(facts.pop("event"))
            if event not in DAILY:
                events.append(Event(at, event, facts))
                repeating |= {client for _, _, client in rounds} if event == "resumed" else set()
                continue
            if event == "tested":  # what it says stands in accuracy.csv
                continue
            client, step, place = int(facts["client"]), int(facts["task"]), int(facts["round"])
            if client in repeating:
                rounds = {key: value for key, value in rounds.items() if key[2] != client or key[:2] < (step, place)}
                repeating.discard(client)
            if "images" in facts:  # a round of training, not a test alone
                measured = (_measured(facts, key) for key in ("valid_accuracy", "valid_loss", "train_loss"))
                rounds[step, place, client] = Round(client, step, place, at, *measured)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            notes.append(f"a line of {folder / 'journal.jsonl'} is damaged and left out: {line[:80]!r}")
    return tuple(rounds[key] for key in sorted(rounds)), tuple(events)


def _measured(facts: dict[str, Any], key: str) -> float | None:
    value = facts.get(key)
    if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
        raise ValueError
    return value


def _contents(folder: Path, notes: list[str]) -> tuple[tuple[Layer, ...], tuple[tuple[str, ...], ...]]:
    path = folder / "contents.json"
    if not path.exists():
        return (), ()  # the run has only just begun, or was made before this file was
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        layers = []
        for layer in contents["layers"]:
            rows, *rest = layer["shape"]
            width = 1
            for size in rest:
                width *= int(size)
            layers.append(Layer(str(layer["name"]), int(rows), width))
        tasks = tuple(tuple(str(task["name"]) for task in sequence) for sequence in contents["tasks"])
    except (OSError, ValueError, KeyError, TypeError):
        notes.append(f"{path} cannot be read; what is shown layer by layer is left out")
        return (), ()
    return tuple(layers), tasks


def _plan(folder: Path) -> dict[str, Any]:
    path = folder / "plan.toml"
    try:
        plan = flat_keys(path.read_text(encoding="utf-8"))
        for key in ("seed", "clients", "tasks", "rounds_per_task"):
            int(plan[key])
        if not isinstance(plan["method"], str):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):  # a TOMLDecodeError is a ValueError
        raise WeftError(f"{path} cannot be read; put it back, or run again in a new folder") from None
    return plan


def _json(path: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return otherwise
    return found if isinstance(found, dict) else otherwise


def _whole_lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return []
    return text[: text.rfind("\n") + 1].splitlines()
