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
from weft.methods.class_heads import rows_of, with_rows
from weft.methods.context import Download, LocalTraining, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, ServerState, Size, Table, TaskState, empty
from weft.wire import codec, tensors

if TYPE_CHECKING:
    from weft.networks.batches import Batches
    from weft.networks.flat import Layout
    from weft.wire.codec import Precision


class ClassExpertsOptions(MethodOptions):
    biases: Literal["private"] = "private"  # part of what is uploaded once per task
    heads: Literal["private"] = "private"  # the same
    window: int = Field(10, ge=1)  # uploads in the mean of a class set, roughly
    common_window: int = Field(10, ge=1)  # and in the mean of all
    head_window: int = Field(2, ge=1)  # and in the mean of a class's row that goes with it
    unseen: Literal["initial", "common"] = "initial"  # where a task starts whose classes nobody has learned
    dropout: float = Field(0.0, ge=0, lt=1)  # at the input of linear layers and heads


@dataclass
class Expert:
    """A moving mean of uploads."""

    body: torch.Tensor = field(default_factory=empty)  # (layout.head,), the change against theta_0
    head: torch.Tensor = field(default_factory=empty)  # rows of its classes one after another; empty for G
    count: int = 0

    def add(self, body: torch.Tensor, head: torch.Tensor, window: int) -> Expert:
        if not self.count:
            return Expert(body, head, 1)
        weight = 1 / min(self.count + 1, window)
        return Expert(self.body.lerp(body, weight), self.head.lerp(head, weight), self.count + 1)


@dataclass
class ClassExpertsServer(ServerState):
    sets: Table[str, Expert] = field(default_factory=Table)  # by the identifiers of a class set
    common: Expert = field(default_factory=Expert)  # of all tasks
    counts: dict[str, int] = field(default_factory=dict)  # uploads by class; `heads` has the rows

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        self.sets.entry = Expert


@dataclass
class ClassExpertsTask(TaskState):
    body: bytes = b""  # the change against theta_0, quantized; `private` ends with the head
    nonzeros: int = 0
    kept: str = ""  # "own" or "shared", whichever was better on the task's validation images; empty: not known yet


@dataclass
class ClassExpertsClient(ClientState):
    tasks: Table[int, ClassExpertsTask] = field(default_factory=Table)

    def size(self) -> Size:
        tasks = list(self.tasks.values())
        return Size(sum(len(task.body) + task.private.nbytes for task in tasks), sum(4 * task.nonzeros for task in tasks))


class ClassExperts(Method):
    Options = ClassExpertsOptions
    Server = ClassExpertsServer
    Client = ClassExpertsClient
    Task = ClassExpertsTask
    info = MethodInfo(
        citation="weft; docs/experiments.md",
        kind="federated",
        uploads="the change of the body and the head, once a task",
        downloads="means of these for the client's classes, at the start of a task and before tests",
        verified="tests/test_class_experts.py: test_the_second_learner_of_a_class_set_starts_from_the_first",
    )
    traits = Traits(
        federated=True,
        precision="int4",
        shares_tasks="all",
        by_class=True,
        improves_tasks=True,
        asynchronous=True,
        not_combinable="it shares whole results of tasks; there is no round-by-round part to combine",
    )
    options: ClassExpertsOptions

    # ---- server half -------------------------------------------------------------------------------------------------

    def configure(self, server: ClassExpertsServer, client: int, ctx: RoundContext) -> Download:
        """The start of a task with its first download; all tasks so far before a test; else nothing."""
        download, wanted = Download(), ctx.classes if ctx.testing else {}
        if ctx.first and ctx.task in ctx.classes:
            wanted = {ctx.task: ctx.classes[ctx.task]}
        for task, classes in wanted.items():
            download.tensors |= self.known(server, task, classes, starting=ctx.first)
        return download

    def known(self, server: ClassExpertsServer, task: int, classes: list[str], starting: bool) -> Tensors:
        """The mean for a class set, as far as its classes are known."""
        key, order = set_key(classes)
        counts = [server.counts.get(each, 0) for each in classes]
        if not any(counts):
            unseen = starting and self.options.unseen == "common" and server.common.count
            return {f"body.{task}": server.common.body} if unseen else {}
        expert = server.sets[key] if key in server.sets else Expert()
        share = expert.count * len(classes) / sum(counts)  # lambda
        rows = {each: server.heads[each] for each in classes if each in server.heads}
        if share == 0:
            body = server.common.body
        elif share == 1:
            body = expert.body  # the very object, so that it is encoded once for all clients
        else:
            body = server.common.body.lerp(expert.body, share)
        if expert.count:
            of_set = dict(zip(order, expert.head.view(len(order), -1), strict=True))
            rows = {each: rows[each].lerp(of_set[each], share) for each in classes}
        return {f"body.{task}": body, **{f"head.{task}.{each}": row for each, row in rows.items()}}

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        task, classes = len(sent["classes"]) - 1, sent["classes"][-1]
        rows = {f"head.{task}.{each}": TensorSpec("dense", layout.features + 1, once=True) for each in classes}
        return {f"body.{task}": TensorSpec("dense", layout.head, once=True), **rows}

    def aggregate(self, server: ClassExpertsServer, updates: Updates, ctx: ServerContext) -> None:
        options = self.options
        for update in updates:
            body = update.task_tensors.get(f"body.{update.task}")
            if body is None:
                continue
            body, (key, order) = tensors.dense(body), set_key(update.classes)
            rows = {each: tensors.dense(update.task_tensors[f"head.{update.task}.{each}"]) for each in order}
            expert = server.sets[key] if key in server.sets else Expert()
            server.sets[key] = expert.add(body, torch.cat([rows[each] for each in order]), options.window)
            server.common = server.common.add(body, empty(), options.common_window)
            for each, row in rows.items():
                server.counts[each] = count = server.counts.get(each, 0) + 1
                weight = 1 / min(count, options.head_window)
                server.heads[each] = server.heads[each].lerp(row, weight) if count > 1 else row

    # ---- client half -------------------------------------------------------------------------------------------------

    def begin_task(self, client: ClassExpertsClient, ctx: TaskContext) -> None:
        client.start(ctx, self.options)  # theta_0, until a better start is received

    def receive(self, client: ClassExpertsClient, download: Download, ctx: TaskContext) -> None:
        if ctx.task not in client.tasks:
            self._start_from(client, download, ctx)
            return
        for task in client.tasks:
            if f"body.{task}" in download.tensors and client.tasks[task].kept != "own":
                self._improve(client, task, download, ctx)

    def _start_from(self, client: ClassExpertsClient, download: Download, ctx: TaskContext) -> None:
        """Take what others know of the task's classes as a start, unless it is of no use on this client's images."""
        if (body := download.tensors.get(f"body.{ctx.task}")) is None:
            return
        vector, rows = origin(ctx) + tensors.dense(body), rows_for(ctx.task, download)
        private = torch.cat([vector[ctx.layout.weights :], client.private[ctx.layout.head - ctx.layout.weights :]])
        private = with_rows(private, rows, ctx.classes, ctx.layout)
        if len(rows) == len(ctx.classes):
            ctx.network.vector[:] = torch.cat([vector[: ctx.layout.weights], private])
            train = ctx.load("train")
            accuracy, chance = ctx.network.measure(train)[0], 1 / len(ctx.classes)
            if accuracy <= chance + math.sqrt(chance * (1 - chance) / len(train)):
                return
        client.weights, client.private = vector[: ctx.layout.weights].clone(), private

    def _improve(self, client: ClassExpertsClient, task: int, download: Download, ctx: TaskContext) -> None:
        """Replace a finished task's result by the mean; the first time only if that is not worse."""
        own = client.tasks[task]
        statistics = ctx.layout.head - ctx.layout.body  # body's own share of `private`
        body = tensors.dense(download.tensors[f"body.{task}"])
        private = with_rows(own.private, rows_for(task, download), ctx.classes_of(task), ctx.layout)
        shared = replace(own, **quantized(body, ctx.plan.wire), private=private, kept="shared")
        if not own.kept and task == ctx.task:
            valid = ctx.load("valid")
            right = [self._right(client, task, each, valid, ctx) for each in (own, shared)]
            better, worse = int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())
            if better - worse > math.sqrt(better + worse):
                shared = replace(own, kept="own")
        del statistics
        client.tasks[task] = shared

    def _right(
        self, client: ClassExpertsClient, task: int, state: ClassExpertsTask, valid: Batches, ctx: TaskContext
    ) -> torch.Tensor:
        """Which validation images a result answers correctly, bool (images,)."""
        write(state, ctx)
        return ctx.network.predictions(valid).argmax(dim=1) == valid.labels

    def prepare(self, training: LocalTraining, client: ClassExpertsClient, ctx: TaskContext) -> None:
        training.dropout = self.options.dropout

    def end_task(self, client: ClassExpertsClient, ctx: TaskContext) -> None:
        layout = ctx.layout
        vector = torch.cat([client.weights, client.private[: layout.head - layout.weights]])
        stored = quantized(vector - origin(ctx), ctx.plan.wire)
        client.tasks[ctx.task] = replace(client.tasks[ctx.task], **stored)

    def share_task(self, client: ClassExpertsClient, ctx: TaskContext) -> Tensors:
        if not client.rate.epochs:  # never trained: nothing to share
            return {}
        found, task = client.tasks[ctx.task], ctx.task
        rows = rows_of(found.private, ctx.classes, ctx.layout)
        named = {f"head.{task}.{name.partition('.')[2]}": row for name, row in rows.items()}
        return {f"body.{task}": change(found, ctx), **named}

    def load_task(self, client: ClassExpertsClient, task: int, ctx: TaskContext) -> None:
        if task in client.tasks:
            write(client.tasks[task], ctx)
        else:
            super().load_task(client, task, ctx)


def set_key(classes: Any) -> tuple[str, list[str]]:
    """A name for a set of classes, and its classes in a fixed order."""
    order = sorted(classes)
    return codec_key(order), order


def codec_key(order: list[str]) -> str:
    import hashlib

    return hashlib.sha256(",".join(order).encode()).hexdigest()[:16]


def rows_for(task: int, download: Download) -> dict[str, torch.Tensor]:
    prefix = f"head.{task}."
    found = ((name.removeprefix(prefix), row) for name, row in download.tensors.items() if name.startswith(prefix))
    return {key: tensors.dense(row) for key, row in found}


def origin(ctx: TaskContext) -> torch.Tensor:
    """theta_0, with the initial statistics where each task has its own: (layout.head,)."""
    return torch.cat([ctx.initial(), ctx.network.initial_statistics])


def quantized(body: torch.Tensor, precision: Precision) -> dict[str, Any]:
    wire = np.concatenate([chunk.view(np.uint8) for chunk in codec.values_out("body", body, precision)])
    return {"body": wire.tobytes(), "nonzeros": codec.count_nonzeros(wire, body.numel(), precision)}


def change(task: ClassExpertsTask, ctx: TaskContext) -> torch.Tensor:
    wire = np.frombuffer(task.body, dtype=np.uint8)
    return codec.values_in(wire, ctx.layout.head, ctx.plan.wire)


def write(task: ClassExpertsTask, ctx: TaskContext) -> None:
    layout = ctx.layout
    vector, network = origin(ctx) + change(task, ctx), ctx.network
    network.vector[: layout.head] = vector
    network.vector[layout.head :] = task.private[len(task.private) - (layout.size - layout.head) :]
