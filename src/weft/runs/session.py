"""One session of work on a run folder: the federation put together from the last checkpoint, and saved again.

A session starts where the checkpoint stands and repeats what came after it, to the bit; how often it saves changes
nothing but the time that a kill costs.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from weft.core.checks import Inspector
from weft.core.client import World
from weft.core.engine import Carrier, Engine, Saved
from weft.core.loop import Federation, Progress
from weft.core.optimizers import make_optimizer
from weft.core.schedule import Schedule
from weft.core.storage import Archive, State, files_of
from weft.core.training import train_step
from weft.engines.local import Pool, Serial
from weft.engines.simulated import Clocked
from weft.engines.workers import Crew
from weft.errors import WeftError
from weft.methods.method import initial_body
from weft.plan import Plan
from weft.runs.folder import Record, read_rows
from weft.wire.ledger import Entry, Ledger

SAVE_SHARE = 60  # saving may take one part in so many of the time
WARMING_UP = 5  # images


class Screen(Protocol):
    """Whoever shows a run while it goes on."""

    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None: ...
    def answered(self, client: int, task: int, round_index: int, numbers: dict[str, Any]) -> None: ...


Connect = Callable[["Session", Saved], Engine]


class Session:
    """Listens to the loop, keeps the record, and knows how to save."""

    def __init__(
        self,
        record: Record,
        crew: Crew | None,
        memory: int,
        save_every: float,
        screen: Screen | None,
        connect: Connect | None = None,
    ):
        """`connect` gives another engine than the local one."""
        self.record, self.screen = record, screen
        self._save_every = save_every
        plan = record.plan
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the server computes as its clients do, however many workers there are
        torch.set_flush_denormal(True)
        world = World(plan)
        network = world.lesson(0, 0).network
        manifest = record.manifest()
        saved = Saved({}, {})
        self.progress = Progress()
        server = State(archive=Archive(record.checkpoints, owner="server"))
        if manifest is None:
            world.method.open_server(server, initial_body(network, plan.seed), network.layout, plan)
        else:
            if manifest["plan"] != zlib.crc32(plan.toml().encode()):
                raise WeftError(f"{record.folder / 'plan.toml'} was changed since this run began; put it back")
            self.progress = Progress(**manifest["progress"])
            server = State.load(record.checkpoints, manifest["server"], owner="server")
            saved = Saved(_by_number(manifest["clients"]), _by_number(manifest["answers"]), manifest["clock"])
        self._engine = local_engine(record, saved, memory, crew) if connect is None else connect(self, saved)
        record.cut(manifest["lengths"] if manifest else {})
        record.write_contents(network.layout.layers, world.scenario.sequences)
        ledger = Ledger(network.layout.body)
        ledger.entries = [Entry.from_row(row) for row in read_rows(record.folder, "ledger.csv")]
        self._rows: list[list[str]] = []
        self._accuracies: list[tuple[int, int, int, float]] = []
        self._scenario = world.scenario
        self._measures: dict[tuple[int, int], list[dict[str, list[float | None]]]] = {}  # by client and step, as said
        self._measured: list[tuple[int, int, int, str, str, float | None]] = []
        schedule = Schedule(plan, world.scenario, world.method)
        inspector = Inspector.of(world.method, network.layout, initial_body(network, plan.seed), plan)
        self.federation = Federation(
            plan, schedule, world.method, self._engine, server, inspector, ledger, self.progress, listener=self
        )
        self._began = time.perf_counter()
        self._saved_at, self._save_cost = self._began, 0.0
        if screen is not None:
            done, total = _work_units(schedule, self.progress)
            screen.started(
                plan, done, total, estimate(world, 1 if crew is None else len(crew)) * (total - done) / total
            )

    # ---- what the loop tells

    def weighed(self, entries: list[Entry]) -> None:
        self._rows += [entry.to_row() for entry in entries]

    def answered(self, client: int, step: int, round_index: int, seconds: float, numbers: dict[str, Any]) -> None:
        known = {key: value for key, value in numbers.items() if key not in ("accuracy", "size", "metrics")}
        if "metrics" in numbers:
            self._measures[client, step] = numbers["metrics"]
        place = {"client": client, "task": step, "round": round_index, "seconds": round(seconds, 4)}
        self.record.journal("reply", **{**place, **known, **place})  # a client's words replace none of these
        if self.screen is not None:
            self.screen.answered(client, step, round_index, numbers)

    def tested(self, client: int, step: int, accuracies: list[float]) -> None:
        self._accuracies += [(client, step, task, accuracy) for task, accuracy in enumerate(accuracies)]
        moment = {"time": round(self._engine.now(), 6), "images": self.progress.images}
        self.record.journal("tested", client=client, task=step, **moment, accuracy=accuracies)
        for task, measures in enumerate(self._measures.pop((client, step), ())):
            classes = self._scenario.sequences[client][task].classes
            for metric, values in measures.items():
                pairs = zip(_labels(classes, len(values)), values, strict=True)
                self._measured += [(client, step, task, metric, *pair) for pair in pairs]

    def incident(self, client: int, step: int, round_index: int, reason: str) -> None:
        moment = round(self._engine.now(), 6)
        self.record.journal("incident", client=client, task=step, round=round_index, time=moment, reason=reason)

    def round_done(self, progress: Progress) -> None:
        self.record.add_rows("ledger.csv", sorted(self._rows, key=_place))  # not in the order of who was fastest
        self.record.add_rows("accuracy.csv", self._accuracies)
        if self._measured:
            self.record.add_rows("metrics.csv", self._measured)
        self._rows, self._accuracies, self._measured = [], [], []
        waited = time.perf_counter() - self._saved_at
        if self._save_every == 0 or waited >= max(self._save_every, SAVE_SHARE * self._save_cost):
            self.save()

    # ---- saving

    def save(self) -> None:
        """A checkpoint: every state on disk, then the manifest that names them, in one step."""
        began = time.perf_counter()
        self.progress.seconds += began - self._began
        self._began = began
        server = self.federation.server.save(
            self.record.checkpoints, f"server@{self.progress.step}.{self.progress.round}"
        )
        states, answers, clock = self._engine.save()
        manifest = {
            "progress": dataclasses.asdict(self.progress),
            "server": server,
            "clients": states,
            "answers": answers,
            "clock": clock,
            "lengths": self.record.lengths(),
            "plan": zlib.crc32(self.record.plan.toml().encode()),
        }
        references = [*states.values(), *(flight["wire"] for flight in clock["flights"])]
        named = files_of(server).union(*map(files_of, references))
        self.record.commit(manifest, named)
        self._saved_at = time.perf_counter()
        self._save_cost = self._saved_at - began

    def close(self) -> None:
        self._engine.close()
        torch.set_num_threads(self._threads)  # a program that calls weft.run gets its threads back
        torch.set_flush_denormal(False)


def local_engine(record: Record, saved: Saved, memory: int, crew: Crew | None) -> Engine:
    plan, folder = record.plan, record.checkpoints
    carrier: Carrier = Serial(plan, folder, saved, memory) if crew is None else Pool(plan, folder, saved, memory, crew)
    return Clocked(plan, carrier, folder, saved)


def _place(row: Sequence[str]) -> tuple[int, str]:
    direction, client = row[:2]
    return int(client), direction


def _by_number(table: dict[str, Any]) -> dict[int, Any]:
    return {int(client): value for client, value in table.items()}


def _work_units(schedule: Schedule, progress: Progress) -> tuple[int, int]:
    """Rounds of one client, done and in all: the length of a progress bar."""
    if schedule.plan.asynchronous == "updates":
        return progress.round, sum(map(sum, schedule.lengths))
    each = [len(schedule.working(round_index)) for round_index in range(schedule.rounds)]
    return sum(each[: progress.round]), sum(each)


def _labels(classes: Sequence[str], count: int) -> Sequence[str]:
    """What so many values of a metric are of: the whole task, its classes by name, or, at a hub, by number.

    >>> _labels(("cat", "dog"), 1), _labels(("cat", "dog"), 2), _labels(("?", "?"), 3)
    (('',), ('cat', 'dog'), ('class 0', 'class 1', 'class 2'))
    """
    if count == 1:
        return ("",)
    return classes if len(set(classes)) == count else tuple(f"class {place}" for place in range(count))


def estimate(world: World, workers: int) -> float:
    """Seconds that the whole plan will take, from a small step to warm up and a whole one of a client that is then
    thrown away: rough, since everybody waits for it.

    Exchange, validation and tests take about 15 % on top of the steps.
    """
    plan, scenario = world.plan, world.scenario
    lesson = world.lesson(0, 0)
    trial = State()
    world.method.join(trial, lesson)
    world.method.begin(trial, lesson)
    work = world.method.open(trial, lesson)
    batches = world.batches(0, 0, "train")
    chosen = torch.arange(min(plan.batch_size, len(batches)), device=world.device)
    optimizer, rate = make_optimizer(plan, work, None), world.method.first_rate(plan, 0)
    train_step(world.method, work, optimizer, *batches.take(chosen[:WARMING_UP]), rate)
    began = time.perf_counter()
    train_step(world.method, work, optimizer, *batches.take(chosen), rate)
    one = (time.perf_counter() - began) / len(chosen)  # an image
    images = sum(task.sizes["train"] for sequence in scenario.sequences for task in sequence)
    share = 1.0
    if world.method.talks and not plan.train_unchosen and plan.clients_per_round != "all":
        share = plan.clients_per_round / plan.clients
    return 1.15 * one * images * share * plan.rounds_per_task * plan.epochs_per_round / min(workers, plan.clients)
