"""Class experts: what clients learned about the same classes is averaged, body and head, and improves all their tasks.

All clients draw the initial weights theta_0 from the seed, so their changes D = theta - theta_0 have one origin and can
be averaged. A client uploads D and the head h of its classes once, at the end of a task. For a task with the class set
S the server then knows

    E_S   the mean of uploads of tasks with exactly these classes; n_S: how many there were
    G     the mean of uploads of all tasks; n_k: uploads that had class k

and, of the heads that came with them, h_S and h_k. A client starts a task, and answers for it later, with

    theta = theta_0 + lambda * E_S + (1 - lambda) * G,   head = lambda * h_S + (1 - lambda) * h_k
    lambda = n_S / (mean over k in S of n_k)

Where the same sets of classes come back, lambda is 1: a common body for all tasks would cost ten points. Where tasks
share single classes, nearly all that is known of a class comes from other sets, and lambda is close to 0. This is
FedWeIT's Eq. 1 with B = theta_0, m = 1 and an attention that is given by the classes in common, with the heads that
belong to the A's; docs/experiments.md has why A's without heads transfer nothing.

A mean takes the newest half of the uploads, since each learner starts where earlier ones ended, and no more than a
window: few for the start of a new learner, more for the answer to finished tasks. With aggregation=median or clip the
means are robust.

What others learn later improves finished tasks without any image. A client checks twice that sharing pays, on its own
images: a start that is not better than chance is not used, and a task's own result is kept if it beats the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from weft.lazy import np, torch
from weft.methods.averaging import Tensors, Updates
from weft.methods.class_heads import rows_of, set_key, split_model, with_rows
from weft.methods.context import Download, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.robust import center
from weft.methods.state import ClientState, ServerState, Size, Table, TaskState
from weft.wire import codec, tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout
    from weft.plan import Plan


ALL = "all"  # beside identifiers of classes and names of class sets
CACHED = 24  # means of the server that are kept until they are sent again; each as large as the network


class ClassExpertsOptions(MethodOptions):
    biases: Literal["private"] = "private"  # they are part of D
    heads: Literal["private"] = "private"  # rows are sent with D, and not each round
    # how many uploads a mean takes at most: of a class set, of all tasks for the body, and of a class for its row; for
    # a new learner's start and for answers. docs/experiments.md has how they were chosen
    start_window: int = Field(3, ge=1)
    window: int = Field(10, ge=1)
    common_start_window: int = Field(5, ge=1)
    common_window: int = Field(40, ge=1)
    row_start_window: int = Field(1, ge=1)  # a row has to fit the common body, which moves with every upload
    row_window: int = Field(3, ge=1)
    unseen: Literal["initial", "common"] = "initial"  # where a task starts whose classes nobody has learned


@dataclass
class Expert:
    """An upload, as it arrived."""

    change: bytes = b""  # D, quantized
    rows: dict[str, torch.Tensor] = field(default_factory=dict)  # by class


@dataclass
class ClassExpertsServer(ServerState):
    experts: Table[str, Expert] = field(default_factory=lambda: Table(Expert))  # by "client.task"
    newest: dict[str, list[str]] = field(default_factory=dict)  # experts of a class, a class set, ALL; oldest first
    counts: dict[str, int] = field(default_factory=dict)  # n_k and n_S: all uploads so far
    size: int = 0  # of D
    width: int = 0  # of a row

    def __post_init__(self) -> None:
        self.means: dict[tuple[str, ...], torch.Tensor] = {}  # to be sent again; derived, and therefore not saved

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        self.size, self.width = ctx.layout.head, ctx.layout.features + 1

    def remove_client(self, client: int) -> None:
        gone = [name for name in self.experts if name.partition(".")[0] == str(client)]
        self.newest = {key: [name for name in names if name not in gone] for key, names in self.newest.items()}
        self.drop_unused()

    def add(self, name: str, expert: Expert, windows: Mapping[str, int]) -> None:
        """Store an upload; forget those that are among the newest of nothing any more."""
        self.experts[name] = expert
        for key, window in windows.items():
            self.newest[key] = [*self.newest.get(key, []), name][-window:]
            self.counts[key] = self.counts.get(key, 0) + 1
        self.drop_unused()

    def drop_unused(self) -> None:
        used = {name for names in self.newest.values() for name in names}
        for name in [each for each in self.experts if each not in used]:
            del self.experts[name]

    def mean(self, key: str, window: int, plan: Plan, classes: Sequence[str] = ()) -> torch.Tensor:
        """The mean of the newest changes, followed by the means of the rows of these classes."""
        names = self.recent(key, window)
        if (place := (*names, *classes)) not in self.means:
            found = (np.frombuffer(self.experts[name].change, np.uint8) for name in names)
            body = center([codec.values_in(change, self.size, plan.wire) for change in found], plan.aggregation)
            self.means[place] = torch.cat([body, *(self.row(names, each, plan) for each in classes)])
            while len(self.means) > CACHED:
                del self.means[next(iter(self.means))]
        return self.means[place]

    def recent(self, key: str, window: int) -> list[str]:
        """The newest half of the uploads, at most `window` of them."""
        return self.newest[key][-min(window, (self.counts[key] + 1) // 2) :]

    def row(self, names: Sequence[str], each: str, plan: Plan) -> torch.Tensor:
        """The mean of the rows of one class."""
        return center([self.experts[name].rows[each] for name in names], plan.aggregation)


@dataclass
class ClassExpertsTask(TaskState):
    change: bytes = b""  # D, quantized; `private` ends with the head
    nonzeros: int = 0  # of D
    kept: str = ""  # "own" or "shared", whichever was better on the task's validation images; empty: not compared yet

    def choice(self) -> str:
        return self.kept or "own"


@dataclass
class ClassExpertsClient(ClientState):
    tasks: Table[int, ClassExpertsTask] = field(default_factory=Table)

    def size(self) -> Size:
        tasks = list(self.tasks.values())
        kept = sum(len(task.change) + task.private.nbytes for task in tasks)
        return Size(kept, 4 * sum(task.nonzeros for task in tasks))


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
        means = {task: self.mean_for(server, classes, not ctx.testing, ctx.plan) for task, classes in wanted.items()}
        return Download({f"model.{task}": mean for task, mean in means.items() if mean is not None})

    def mean_for(
        self, server: ClassExpertsServer, classes: list[str], starting: bool, plan: Plan
    ) -> torch.Tensor | None:
        """What is known of a task: a body, then rows sorted by class, 0 where a class is unknown; None: nothing."""
        options, key, counts = self.options, set_key(classes), server.counts
        windows = (options.start_window, options.common_start_window, options.row_start_window)
        of_set, of_all, of_class = windows if starting else (options.window, options.common_window, options.row_window)
        if not any(server.newest.get(each) for each in classes):
            if starting and options.unseen == "common" and server.newest.get(ALL):
                return torch.cat([server.mean(ALL, of_all, plan), torch.zeros(len(classes) * server.width)])
            return None
        share, order = 0.0, sorted(classes)
        if server.newest.get(key):
            of_this_set = server.mean(key, of_set, plan, order)
            share = counts[key] * len(classes) / sum(counts[each] for each in classes)  # lambda
            if share == 1:
                return of_this_set  # the very object, so that it is encoded once for all clients
        rows = [torch.zeros(server.width)] * len(order)
        for index, each in enumerate(order):
            if server.newest.get(each):
                rows[index] = server.row(server.recent(each, of_class), each, plan)
        mean = torch.cat([server.mean(ALL, of_all, plan), *rows])
        return mean.lerp(of_this_set, share) if share else mean

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        task, classes = len(sent["classes"]) - 1, sent["classes"][-1]
        return {f"model.{task}": TensorSpec("dense", layout.head + len(classes) * (layout.features + 1), once=True)}

    def aggregate(self, server: ClassExpertsServer, updates: Updates, ctx: ServerContext) -> None:
        options = self.options
        for update in updates:
            name, model = f"{update.client}.{update.task}", update.task_tensors.get(f"model.{update.task}")
            if model is None or name in server.experts:
                continue
            body, rows = split_model(tensors.dense(model), update.classes, ctx.layout)
            windows = {ALL: max(options.common_window, options.common_start_window)}
            windows |= {set_key(update.classes): max(options.window, options.start_window)}
            windows |= dict.fromkeys(update.classes, max(options.row_window, options.row_start_window))
            server.add(name, Expert(quantized(body, ctx.plan), rows), windows)

    # ---- client half -------------------------------------------------------------------------------------------------

    def begin_task(self, client: ClassExpertsClient, ctx: TaskContext) -> None:
        client.start(ctx, self.options)  # theta_0, unless a better start is received

    def receive(self, client: ClassExpertsClient, download: Download, ctx: TaskContext) -> None:
        models = {name: tensors.dense(model) for name, model in download.tensors.items()}
        if ctx.task in client.tasks:
            for task in client.tasks:
                if (model := models.get(f"model.{task}")) is not None and client.tasks[task].kept != "own":
                    self._improve(client, task, model, ctx)
        elif (model := models.get(f"model.{ctx.task}")) is not None:
            self._start_from(client, model, ctx)

    def _start_from(self, client: ClassExpertsClient, model: torch.Tensor, ctx: TaskContext) -> None:
        """Start from what others know of the task's classes, unless it is of no use on this client's images."""
        layout, (change, rows) = ctx.layout, received(model, ctx.classes, ctx.layout)
        body = origin(ctx) + change  # (layout.head,)
        head = client.private[layout.head - layout.weights :]
        private = with_rows(torch.cat([body[layout.weights :], head]), rows, ctx.classes, layout)
        if len(rows) == len(ctx.classes):
            train, chance = ctx.load("train"), 1 / len(ctx.classes)  # the images are new to what was received
            ctx.network.vector[:] = torch.cat([client.weights, client.private])
            _, initial_loss = ctx.network.measure(train)
            ctx.network.vector[:] = torch.cat([body[: layout.weights], private])
            accuracy, loss = ctx.network.measure(train)
            # what has seen few images gains little accuracy at first, and what has seen many may be too sure of itself
            if loss >= initial_loss and accuracy <= chance + math.sqrt(chance * (1 - chance) / len(train)):
                return
        client.weights, client.private = body[: layout.weights].clone(), private

    def _improve(self, client: ClassExpertsClient, task: int, model: torch.Tensor, ctx: TaskContext) -> None:
        """Replace a finished task's result by the mean; the first time, if its own result is not better."""
        own, classes = client.tasks[task], ctx.classes_of(task)
        change, rows = received(model, classes, ctx.layout)
        private = with_rows(own.private, rows, classes, ctx.layout)
        shared = replace(own, **stored(change, ctx.plan), private=private, kept="shared")
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
        body = torch.cat([client.weights, client.private[: ctx.layout.head - ctx.layout.weights]])
        client.tasks[ctx.task] = replace(client.tasks[ctx.task], **stored(body - origin(ctx), ctx.plan))

    def share_task(self, client: ClassExpertsClient, ctx: TaskContext) -> Tensors:
        if not client.rate.epochs:  # never trained: there is nothing to share
            return {}
        task, layout = client.tasks[ctx.task], ctx.layout
        change = _change(task, ctx)
        rows = rows_of(task.private, ctx.classes, layout)
        return {f"model.{ctx.task}": torch.cat([change, *(rows[each] for each in sorted(rows))])}

    def load_task(self, client: ClassExpertsClient, task: int, ctx: TaskContext) -> None:
        if task in client.tasks:
            _write(client.tasks[task], ctx)
        else:
            super().load_task(client, task, ctx)


def origin(ctx: TaskContext) -> torch.Tensor:
    """theta_0, with the initial statistics where each task has its own: (layout.head,)."""
    return torch.cat([ctx.initial(), ctx.network.initial_statistics])


def received(
    model: torch.Tensor, classes: tuple[str, ...], layout: Layout
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The change of the body, and the rows of the classes that are known."""
    change, rows = split_model(model, classes, layout)
    return change, {each: row for each, row in rows.items() if row.any()}


def quantized(change: torch.Tensor, plan: Plan) -> bytes:
    return b"".join(chunk.tobytes() for chunk in codec.values_out("change", change, plan.wire))


def stored(change: torch.Tensor, plan: Plan) -> dict[str, Any]:
    """What a finished task keeps of its D."""
    return {"change": quantized(change, plan), "nonzeros": int(change.count_nonzero())}


def _change(task: ClassExpertsTask, ctx: TaskContext) -> torch.Tensor:
    return codec.values_in(np.frombuffer(task.change, np.uint8), ctx.layout.head, ctx.plan.wire)


def _write(task: ClassExpertsTask, ctx: TaskContext) -> None:
    """Put a finished task's weights into the network."""
    layout = ctx.layout
    ctx.network.vector[: layout.head] = origin(ctx) + _change(task, ctx)
    ctx.network.vector[layout.head :] = task.private[len(task.private) - (layout.size - layout.head) :]
