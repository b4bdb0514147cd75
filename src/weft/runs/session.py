"""A session of work on a run folder: the federation built from the last checkpoint, and saved again.

A session continues where the checkpoint ends and repeats what came after it, to the bit. How often it saves changes
nothing but the time that a kill costs.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from weft import methods
from weft.core import storage
from weft.core.checks import ReplyChecks
from weft.core.client import Runtime, begin
from weft.core.engine import Engine, EngineState
from weft.core.exchange import Exchange
from weft.core.loop import Federation
from weft.core.loop_async import AsynchronousFederation
from weft.core.progress import ClientProgress, Progress
from weft.core.schedule import Assignment, Schedule
from weft.core.task_end import TaskEnd
from weft.core.training import make_optimizer, train_step
from weft.engines.host import ClientHost, LocalEngine
from weft.engines.simulated import SimulatedEngine
from weft.engines.workers import WorkerEngine, WorkerPool
from weft.errors import WeftError
from weft.methods.context import LocalTraining, ServerContext, initial_body
from weft.methods.state import OptimizerState
from weft.runs.folder import RunFolder, read_rows
from weft.runs.run import Display
from weft.wire.ledger import Entry, Ledger

SAVE_SHARE = 60  # saving may take one part in so many of the time
WARM_UP = 5  # images
TESTED = ("accuracy", "validation", "size", "metrics")  # fields of a reply that have a table, or the summary


# makes an engine other than the local one, from the run folder, the engine's saved state and the checks of replies
Connect = Callable[[RunFolder, EngineState, ReplyChecks], Engine]


class Session:
    """Builds a federation, records its events, and saves it."""

    def __init__(
        self,
        folder: RunFolder,
        runtime: Runtime,
        pool: WorkerPool | None,
        memory: int,
        save_every: float,
        display: Display | None,
        connect: Connect | None = None,
    ):
        self.folder, self._display, self._save_every = folder, display, save_every
        plan, method, network = folder.plan, runtime.method, runtime.context(0, 0).network
        initial = initial_body(network, plan.seed)
        ctx = ServerContext(plan, network.layout, initial)
        server, saved, manifest = method.Server(), EngineState(), folder.manifest()
        if manifest is None:
            self.progress = Progress([ClientProgress() for _ in range(plan.clients)])
            server.start(ctx, method.options)
            storage.attach(server, folder.checkpoints)
        else:
            if manifest["plan"] != zlib.crc32(plan.toml().encode()):
                raise WeftError(f"{folder.path / 'plan.toml'} was changed since the run started; restore it")
            self.progress = Progress.from_json(manifest["progress"])
            storage.load(server, folder.checkpoints, manifest["server"])
            saved = EngineState.of(manifest["clients"], manifest["answered"], manifest["transit"])
        folder.truncate(manifest["lengths"] if manifest else {})
        folder.write_contents(network.layout.layers, runtime.scenario.sequences)
        checks = ReplyChecks.of(method, network.layout, initial, plan)
        self.engine = connect(folder, saved, checks) if connect else local_engine(folder, runtime, saved, memory, pool)
        self.ledger = Ledger(network.layout.body)
        self.ledger.entries = [Entry.from_row(row) for row in read_rows(folder.path, "ledger.csv")]
        exchange = Exchange(plan, method, server, self.engine, checks, self.ledger, self.progress, self, ctx)
        schedule = Schedule(plan, runtime.scenario, method)
        kind = AsynchronousFederation if plan.asynchronous == "updates" else Federation
        self.federation = kind(schedule, exchange, TaskEnd(schedule, exchange))
        self._scenario, self._server = runtime.scenario, server
        self._method, self._options = method, methods.state_of(method)
        self._rows: dict[str, list[Sequence[Any]]] = {name: [] for name in folder.tables}  # not written yet
        self._metrics: dict[tuple[int, int], list[dict[str, list[float | None]]]] = {}  # by client and task
        self._began = self._saved_at = time.perf_counter()
        self._save_cost = 0.0
        if display is not None:
            done, total = _work_units(schedule, self.progress)
            left = estimate(runtime, 1 if pool is None else len(pool)) * (total - done) / total
            display.started(plan, done, total, left)

    # ---- events of the loop

    def counted(self, entries: list[Entry]) -> None:
        self._rows["ledger.csv"] += [entry.to_row() for entry in entries]

    def replied(self, assignment: Assignment, seconds: float, fields: dict[str, Any]) -> None:
        client, task, round_index = assignment.client, assignment.task, assignment.round
        known = {key: value for key, value in fields.items() if key not in TESTED}
        if "metrics" in fields:
            self._metrics[client, task] = fields["metrics"]
        where = {"client": client, "task": task, "round": round_index, "seconds": round(seconds, 4)}
        self.folder.journal("reply", **{**where, **known, **where})  # a client's fields replace none of these
        if self._display is not None:
            self._display.answered(client, task, round_index, fields)

    def tested(self, client: int, task: int, accuracies: list[float], validation: list[float]) -> None:
        for table, row in (("accuracy.csv", accuracies), ("validation.csv", validation)):
            self._rows[table] += [(client, task, tested, accuracy) for tested, accuracy in enumerate(row)]
        moment = {"time": round(self.engine.now(), 6), "images": self.progress.images}
        self.folder.journal("tested", client=client, task=task, **moment, accuracy=accuracies, validation=validation)
        for tested, measures in enumerate(self._metrics.pop((client, task), ())):
            classes = self._scenario.sequences[client][tested].classes
            for metric, values in measures.items():
                pairs = zip(_labels(classes, len(values)), values, strict=True)
                self._rows["metrics.csv"] += [(client, task, tested, metric, *pair) for pair in pairs]

    def incident(self, client: int, task: int, round_index: int, reason: str) -> None:
        moment = round(self.engine.now(), 6)
        self.folder.journal("incident", client=client, task=task, round=round_index, time=moment, reason=reason)

    def warned(self, text: str) -> None:
        self.folder.journal("warning", about=text)
        if self._display is not None:
            self._display.warned(text)

    def round_done(self, progress: Progress) -> None:
        methods.check_unchanged(self._method, self._options)
        self._rows["ledger.csv"].sort(key=lambda row: (int(row[1]), row[0]))  # not in the order of who was fastest
        for name, rows in self._rows.items():
            self.folder.add_rows(name, rows)
            rows.clear()
        waited = time.perf_counter() - self._saved_at
        if self._save_every == 0 or waited >= max(self._save_every, SAVE_SHARE * self._save_cost):
            self.save()

    # ---- saving

    def save(self) -> None:
        """Write a checkpoint: every state to disk, then the manifest that names them, in one step."""
        began = time.perf_counter()
        self.progress.seconds += began - self._began
        self.progress.saves += 1
        self._began = began
        checkpoints = self.folder.checkpoints
        server = storage.save(self._server, checkpoints, f"server@{self.progress.saves}", owner="server")
        engine = self.engine.save()
        manifest = {
            **vars(engine),
            "progress": self.progress.to_json(),
            "server": server,
            "lengths": self.folder.lengths(),
            "plan": zlib.crc32(self.folder.plan.toml().encode()),
        }
        references = [server, *engine.clients.values(), *(each["wire"] for each in engine.transit.get("flights", []))]
        self.folder.commit(manifest, set().union(*map(storage.files_of, references)))
        self._saved_at = time.perf_counter()
        self._save_cost = self._saved_at - began

    def close(self) -> None:
        self.engine.close()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute as clients do, for any number of workers; afterwards the calling program gets its threads back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def local_engine(
    folder: RunFolder, runtime: Runtime, saved: EngineState, memory: int, pool: WorkerPool | None
) -> Engine:
    plan, checkpoints = folder.plan, folder.checkpoints
    if pool is None:
        carrier: LocalEngine | WorkerEngine = LocalEngine(ClientHost(runtime, checkpoints, memory, saved))
    else:
        carrier = WorkerEngine(plan, checkpoints, saved, memory, pool)
    return SimulatedEngine(plan, carrier, checkpoints, saved)


def _work_units(schedule: Schedule, progress: Progress) -> tuple[int, int]:
    """Rounds of one client, done and in all: the length of a progress bar."""
    if schedule.plan.asynchronous == "updates":
        return progress.turns, sum(map(sum, schedule.lengths))
    each = [len(schedule.training(round_index)) for round_index in range(schedule.rounds)]
    return sum(each[: progress.round]), sum(each)


def _labels(classes: Sequence[str], count: int) -> Sequence[str]:
    """What so many values of a metric are of: the whole task, its classes by name, or, at a hub, by number.

    >>> _labels(("cat", "dog"), 1), _labels(("cat", "dog"), 2), _labels(("?", "?"), 3)
    (('',), ('cat', 'dog'), ('class 0', 'class 1', 'class 2'))
    """
    if count == 1:
        return ("",)
    return classes if len(set(classes)) == count else tuple(f"class {index}" for index in range(count))


def estimate(runtime: Runtime, workers: int) -> float:
    """Seconds that the whole plan will take, from a small step to warm up and a whole one of a throw-away client.

    Rough, since everybody waits for it. Exchange, validation and tests take about 15 % on top of the steps.
    """
    plan, scenario, method = runtime.plan, runtime.scenario, runtime.method
    ctx, client = runtime.context(0, 0), runtime.new_client()
    client.start(ctx, method.options)
    begin(runtime, client, ctx)
    training = LocalTraining.plain(client, ctx)
    method.prepare(training, client, ctx)
    batches = runtime.batches(0, 0, "train")
    chosen = torch.arange(min(plan.batch_size, len(batches)), device=runtime.device)
    optimizer = make_optimizer(plan, training, OptimizerState())
    train_step(training, optimizer, *batches.take(chosen[:WARM_UP]), client.rate.rate)
    began = time.perf_counter()
    train_step(training, optimizer, *batches.take(chosen), client.rate.rate)
    one = (time.perf_counter() - began) / len(chosen)  # image
    images = sum(task.sizes["train"] for sequence in scenario.sequences for task in sequence)
    share = 1.0
    if method.traits.federated and not plan.train_unchosen and plan.clients_per_round != "all":
        share = plan.clients_per_round / plan.clients
    return 1.15 * one * images * share * plan.rounds_per_task * plan.epochs_per_round / min(workers, plan.clients)
