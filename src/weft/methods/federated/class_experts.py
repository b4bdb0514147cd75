"""Class experts: what clients learned about the same classes is averaged, body and head, and improves all their tasks.

All clients draw the initial weights theta_0 from the seed, so their changes D = theta - theta_0 have one origin and can
be averaged. A client uploads D and the head h of its classes once, at the end of a task. For a task with the class set
S the server then knows

    E_S   the mean of the last uploads of tasks with exactly these classes; n_S: how many there were
    G     the mean of the last uploads of all tasks; n_k: uploads that had class k

and, of the heads that came with them, h_S and h_k. A client starts a task, and answers for it later, with

    theta = theta_0 + lambda * E_S + (1 - lambda) * G,   head = lambda * h_S + (1 - lambda) * h_k
    lambda = n_S / (mean over k in S of n_k)

Where the same sets of classes come back, lambda is 1: a common body for all tasks would cost ten points. Where tasks
share single classes, nearly all that is known of a class comes from other sets, and lambda is close to 0. This is
FedWeIT's Eq. 1 with B = theta_0, m = 1 and an attention that is given by the classes in common, with the heads that
belong to the A's; docs/experiments.md has why A's without heads transfer nothing.

Each mean is kept at two speeds. A new learner starts from the mean of the last few uploads, which is farthest along;
tasks are answered with the mean of many, which is better but would slow down the next learner.

What others learn later improves finished tasks without any image. A client checks twice that sharing pays, on its own
images: a start that is not better than chance is not used, and a task's own result is kept if it beats the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from weft.lazy import np, torch
from weft.methods.averaging import Tensors, Updates
from weft.methods.class_heads import rows_of, set_key, with_rows
from weft.methods.context import Download, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, ServerState, Size, Table, TaskState, empty
from weft.wire import codec, tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout


class ClassExpertsOptions(MethodOptions):
    biases: Literal["private"] = "private"  # they are part of D
    heads: Literal["private"] = "private"  # rows are sent with D, and not each round
    # uploads in a mean, roughly: of a class set and of all tasks, for a new learner's start and for answers;
    # docs/experiments.md has how they were chosen
    start_window: int = Field(3, ge=1)
    window: int = Field(10, ge=1)
    common_start_window: int = Field(5, ge=1)
    common_window: int = Field(40, ge=1)
    unseen: Literal["initial", "common"] = "initial"  # where a task starts whose classes nobody has learned


@dataclass
class Expert:
    """Moving means of uploads, at two speeds: `start` for new learners, `answer` for finished tasks."""

    start: torch.Tensor = field(default_factory=empty)
    answer: torch.Tensor = field(default_factory=empty)
    count: int = 0

    def add(self, upload: torch.Tensor, start_window: int, window: int) -> Expert:
        """The means with one more upload; each counts the last ones only, and the newest as much as any other."""
        count = self.count + 1
        if count == 1:
            return Expert(upload, upload, count)
        start = self.start.lerp(upload, 1 / min(count, start_window))
        answer = self.answer.lerp(upload, 1 / min(count, window))
        return Expert(start, answer, count)


@dataclass
class ClassExpertsServer(ServerState):
    sets: Table[str, Expert] = field(default_factory=Table)  # E_S and h_S by class set: the body, then rows
    common: Expert = field(default_factory=Expert)  # G
    rows: Table[str, Expert] = field(default_factory=Table)  # h_k by class; the count is n_k

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        self.sets.entry = self.rows.entry = Expert


@dataclass
class ClassExpertsTask(TaskState):
    change: bytes = b""  # D, quantized; `private` ends with the head
    nonzeros: int = 0  # of D
    kept: str = ""  # "own" or "shared", whichever was better on the task's validation images; empty: not compared yet


@dataclass
class ClassExpertsClient(ClientState):
    tasks: Table[int, ClassExpertsTask] = field(default_factory=Table)

    def size(self) -> Size:
        tasks = list(self.tasks.values())
        kept = sum(len(task.change) + task.private.nbytes for task in tasks)
        return Size(kept, sum(4 * task.nonzeros for task in tasks))


class ClassExperts(Method):
    Options = ClassExpertsOptions
    Server = ClassExpertsServer
    Client = ClassExpertsClient
    Task = ClassExpertsTask
    info = MethodInfo(
        citation="weft, docs/experiments.md",
        kind="federated",
        uploads="the change of the body and the head, once a task",
        downloads="means of these for the client's classes, at the start of a task and before tests",
        verified="tests/test_class_experts.py: test_a_second_learner_starts_from_the_first",
    )
    traits = Traits(
        federated=True,
        precision="int4",
        shares_tasks="all",
        by_class=True,
        improves_tasks=True,
        asynchronous=True,
        not_combinable="it shares whole results of tasks and nothing each round",
    )
    options: ClassExpertsOptions

    # ---- server half -------------------------------------------------------------------------------------------------

    def configure(self, server: ClassExpertsServer, client: int, ctx: RoundContext) -> Download:
        """The start of a task with its first download, all tasks so far before a test, else nothing."""
        wanted = ctx.classes if ctx.testing else {}
        if ctx.first and ctx.task in ctx.classes:
            wanted = {ctx.task: ctx.classes[ctx.task]}
        download = Download()
        for task, classes in wanted.items():
            download.tensors |= self.mean_for(server, task, classes, "answer" if ctx.testing else "start")
        return download

    def mean_for(
        self, server: ClassExpertsServer, task: int, classes: list[str], speed: Literal["start", "answer"]
    ) -> Tensors:
        """What is known of a task's classes: a body, and rows of the head; nothing if it is nothing."""
        known = {each: server.rows[each] for each in sorted(classes) if each in server.rows}
        common: torch.Tensor = getattr(server.common, speed)
        if not known:
            start_anyway = speed == "start" and self.options.unseen == "common" and server.common.count
            return {f"body.{task}": common} if start_anyway else {}
        rows: dict[str, torch.Tensor] = {each: getattr(expert, speed) for each, expert in known.items()}
        if (key := set_key(classes)) not in server.sets:
            return _named(task, common, rows)
        expert = server.sets[key]
        share = expert.count * len(classes) / sum(each.count for each in known.values())  # lambda
        body, *of_set = getattr(expert, speed).split([len(common), *([len(rows[each]) for each in rows])])
        if share < 1:
            body = common.lerp(body, share)
        rows = {each: rows[each].lerp(row, share) for each, row in zip(rows, of_set, strict=True)}
        return _named(task, body, rows)

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        task, classes = len(sent["classes"]) - 1, sent["classes"][-1]
        rows = {f"head.{task}.{each}": TensorSpec("dense", layout.features + 1, once=True) for each in classes}
        return {f"body.{task}": TensorSpec("dense", layout.head, once=True), **rows}

    def aggregate(self, server: ClassExpertsServer, updates: Updates, ctx: ServerContext) -> None:
        options = self.options
        for update in (update for update in updates if update.task_tensors):
            uploaded = {name: tensors.dense(tensor) for name, tensor in update.task_tensors.items()}
            body, key = uploaded[f"body.{update.task}"], set_key(update.classes)
            rows = {each: uploaded[f"head.{update.task}.{each}"] for each in sorted(update.classes)}
            server.common = server.common.add(body, options.common_start_window, options.common_window)
            expert = server.sets[key] if key in server.sets else Expert()
            server.sets[key] = expert.add(torch.cat([body, *rows.values()]), options.start_window, options.window)
            for each, row in rows.items():
                of_class = server.rows[each] if each in server.rows else Expert()
                # a row has to fit the common body, which moves with every upload: its newest upload counts most
                server.rows[each] = of_class.add(row, 1, 3)

    # ---- client half -------------------------------------------------------------------------------------------------

    def begin_task(self, client: ClassExpertsClient, ctx: TaskContext) -> None:
        client.start(ctx, self.options)  # theta_0, unless a better start is received

    def receive(self, client: ClassExpertsClient, download: Download, ctx: TaskContext) -> None:
        for task in client.tasks if ctx.task in client.tasks else ():
            if f"body.{task}" in download.tensors and client.tasks[task].kept != "own":
                self._improve(client, task, download, ctx)
        if ctx.task not in client.tasks and f"body.{ctx.task}" in download.tensors:
            self._start_from(client, download, ctx)

    def _start_from(self, client: ClassExpertsClient, download: Download, ctx: TaskContext) -> None:
        """Start from what others know of the task's classes, unless it is of no use on this client's images."""
        layout, rows = ctx.layout, _rows(ctx.task, download)
        vector = origin(ctx) + tensors.dense(download.tensors[f"body.{ctx.task}"])  # (layout.head,)
        head = client.private[layout.head - layout.weights :]
        private = with_rows(torch.cat([vector[layout.weights :], head]), rows, ctx.classes, layout)
        if len(rows) == len(ctx.classes):
            ctx.network.vector[: layout.weights], ctx.network.vector[layout.weights :] = (
                vector[: layout.weights],
                private,
            )
            train, chance = ctx.load("train"), 1 / len(ctx.classes)
            accuracy = ctx.network.measure(train)[0]  # its images are new to this model
            if accuracy <= chance + math.sqrt(chance * (1 - chance) / len(train)):
                return
        client.weights, client.private = vector[: layout.weights].clone(), private

    def _improve(self, client: ClassExpertsClient, task: int, download: Download, ctx: TaskContext) -> None:
        """Replace a finished task's result by the mean; the first time, if its own result is not better."""
        own, body = client.tasks[task], tensors.dense(download.tensors[f"body.{task}"])
        private = with_rows(own.private, _rows(task, download), ctx.classes_of(task), ctx.layout)
        shared = replace(own, **_quantized(body, ctx), private=private, kept="shared")
        if task == ctx.task and not own.kept:
            mine, theirs = (self._correct(each, ctx) for each in (own, shared))  # bool (images,)
            wins, losses = int((mine & ~theirs).sum()), int((theirs & ~mine).sum())
            if wins - losses > math.sqrt(wins + losses):  # by more than one standard deviation of a coin's tosses
                shared = replace(own, kept="own")
        client.tasks[task] = shared

    def _correct(self, task: ClassExpertsTask, ctx: TaskContext) -> torch.Tensor:
        _write(task, ctx)
        valid = ctx.load("valid")
        return ctx.network.predictions(valid).argmax(dim=1) == valid.labels

    def end_task(self, client: ClassExpertsClient, ctx: TaskContext) -> None:
        vector = torch.cat([client.weights, client.private[: ctx.layout.head - ctx.layout.weights]])
        client.tasks[ctx.task] = replace(client.tasks[ctx.task], **_quantized(vector - origin(ctx), ctx))

    def share_task(self, client: ClassExpertsClient, ctx: TaskContext) -> Tensors:
        if not client.rate.epochs:  # never trained: there is nothing to share
            return {}
        task = client.tasks[ctx.task]
        return _named(ctx.task, _change(task, ctx), rows_of(task.private, ctx.classes, ctx.layout))

    def load_task(self, client: ClassExpertsClient, task: int, ctx: TaskContext) -> None:
        if task in client.tasks:
            _write(client.tasks[task], ctx)
        else:
            super().load_task(client, task, ctx)


def origin(ctx: TaskContext) -> torch.Tensor:
    """theta_0, with the initial statistics where each task has its own: (layout.head,)."""
    return torch.cat([ctx.initial(), ctx.network.initial_statistics])


def _named(task: int, body: torch.Tensor, rows: Mapping[str, torch.Tensor]) -> Tensors:
    return {f"body.{task}": body, **{f"head.{task}.{each}": row for each, row in rows.items()}}


def _rows(task: int, download: Download) -> dict[str, torch.Tensor]:
    prefix = f"head.{task}."
    found = ((name.removeprefix(prefix), row) for name, row in download.tensors.items() if name.startswith(prefix))
    return {key: tensors.dense(row) for key, row in found}


def _quantized(change: torch.Tensor, ctx: TaskContext) -> dict[str, Any]:
    wire = np.concatenate([chunk.view(np.uint8) for chunk in codec.values_out("body", change, ctx.plan.wire)])
    return {"change": wire.tobytes(), "nonzeros": codec.count_nonzeros(wire, change.numel(), ctx.plan.wire)}


def _change(task: ClassExpertsTask, ctx: TaskContext) -> torch.Tensor:
    return codec.values_in(np.frombuffer(task.change, dtype=np.uint8), ctx.layout.head, ctx.plan.wire)


def _write(task: ClassExpertsTask, ctx: TaskContext) -> None:
    """Put a finished task's weights into the network."""
    layout = ctx.layout
    ctx.network.vector[: layout.head] = origin(ctx) + _change(task, ctx)
    ctx.network.vector[layout.head :] = task.private[len(task.private) - (layout.size - layout.head) :]
