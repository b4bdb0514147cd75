"""A client: `answer` updates its state and returns the reply. It sees its own data and the server's messages only.

What a request can ask for, in this order:

    announce  reply with identifiers of the task's classes
    begin     start a new task: head, task-specific parameters, learning rate
    receive   take in the tensors that came along
    train     one round on the task's training images
    upload    reply with the update of the round
    end       end the task: store what it needs later
    share     reply with what is uploaded once per task
    test      accuracy of every task so far, on test and on validation images (of the model as it is, or as theta_G
              would make it)

The same request twice gives the same reply and does not train twice. A server that has lost a reply may request the
start or end of a task again: what was done is not repeated. A client that was away for whole tasks catches up when it
starts the next one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from weft import methods, metrics, networks, scenarios
from weft.core.checks import forms_fault, request_fault
from weft.core.training import train_round
from weft.errors import WeftError
from weft.methods.averaging import Tensors, jump, limited
from weft.methods.context import KNOWLEDGE, Download, TaskContext
from weft.methods.method import Method
from weft.methods.state import ClientState, OptimizerState, RateSchedule
from weft.networks.batches import Batches
from weft.networks.flat import Layout
from weft.plan import Plan
from weft.randomness import generator
from weft.scenarios import Scenario, SplitName, Task
from weft.wire.message import Message, MessageError, decode, encode, failure
from weft.wire.tensors import Payload, Sparse

TRAINING_SETS = 16  # kept in memory, of the tasks in training
EVALUATION_SETS = 256  # small uint8 images: some hundred kilobytes each


class Runtime:
    """What all clients of a process share: the plan and what is built from it. No client's state is in here."""

    def __init__(
        self,
        plan: Plan,
        scenario: Scenario | None = None,
        secret: int | None = None,
        largest_jump: float = math.inf,
    ):
        """`secret` draws heads that will leave their site, in place of the plan's seed, which the hub knows;
        `largest_jump`: see `bounded`."""
        self.plan, self.largest_jump = plan, largest_jump
        self.scenario = scenarios.of(plan) if scenario is None else scenario
        self.method: Method = methods.load(plan.method, plan.method_options)
        self.head_seed = secret if secret is not None and self.method.traits.by_class else plan.seed
        self.device = pick_device(plan.device)
        # training images are needed again in every round of a task, the others after every later task too
        self._training = functools.lru_cache(maxsize=TRAINING_SETS)(self._load)
        self._evaluation = functools.lru_cache(maxsize=EVALUATION_SETS)(self._load)

    def new_client(self) -> ClientState:
        state = self.method.Client()
        state.tasks.entry = self.method.Task
        return state

    def task(self, client: int, task: int) -> Task:
        return self.scenario.sequences[client][task]

    def context(self, client: int, task: int) -> TaskContext:
        """A context without images, for evaluation."""
        plan, heads = self.plan, self._heads(client, task)
        network = networks.build(plan.network, plan.network_options, heads, self.device, plan.loss)
        names = tuple(self.task(client, task).classes)
        return TaskContext(client, task, plan, network, functools.partial(self.class_ids, client), class_names=names)

    def class_ids(self, client: int, task: int) -> tuple[str, ...]:
        return scenarios.class_ids(self.task(client, task), self.plan)

    def training_context(self, client: int, task: int) -> TaskContext:
        """The context of the task in training: its images are available, those of other tasks are not."""
        sees_all = self.method.traits.sees_all_tasks
        load = functools.partial(self.pooled if sees_all else self.batches, client, task)
        return dataclasses.replace(self.context(client, task), load=load)

    def _heads(self, client: int, task: int) -> tuple[int, ...]:
        """The number of classes of each head: one head for the task, or those of all tasks if all are seen at once."""
        sees_all = self.method.traits.sees_all_tasks
        tasks = self.scenario.sequences[client] if sees_all else (self.task(client, task),)
        return tuple(len(each.classes) for each in tasks)

    def batches(self, client: int, task: int, split: SplitName) -> Batches:
        return (self._training if split == "train" else self._evaluation)(client, task, split)

    def pooled(self, client: int, task: int, split: SplitName) -> Batches:
        """The images of all tasks of a client; an epoch takes as many of them as the current task has."""
        parts = [self.batches(client, each, split) for each in range(len(self.scenario.sequences[client]))]
        return Batches.pool(parts, epoch=len(parts[task]))

    def _load(self, client: int, task: int, split: SplitName) -> Batches:
        found = self.task(client, task)
        return Batches(found.load(split), found.mean, found.deviation, self.device, self._first_label(client, task))

    def head_span(self, client: int, task: int) -> tuple[int, int]:
        """Where a task's classes begin among those of all heads, and how many they are."""
        return self._first_label(client, task), len(self.task(client, task).classes)

    def _first_label(self, client: int, task: int) -> int:
        """Labels count through all heads."""
        return sum(self._heads(client, task)[:task]) if self.method.traits.sees_all_tasks else 0


def pick_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present[wanted]:
        name = {"cuda": "CUDA", "mps": "MPS"}[wanted]
        raise WeftError(f"device={wanted}: {name} is not available on this machine; use device=auto or device=cpu")
    return wanted


def answer(runtime: Runtime, client: int, state: ClientState, wire: bytes) -> bytes:
    """The encoded reply to an encoded request; `state` is updated in place."""
    request, tasks = decode(wire), len(runtime.scenario.sequences[client])
    if state.reply and state.request_id == request.request_id:
        return state.reply
    if not 0 <= request.task < tasks:
        raise MessageError(f"message rejected: it is about task {request.task}, of {tasks}")
    ctx = dataclasses.replace(runtime.training_context(client, request.task), round=request.round)
    classes = [list(runtime.class_ids(client, task)) for task in range(request.task + 1)]
    if fault := request_fault(request, client, runtime.method, ctx.layout, classes):
        raise MessageError(f"message rejected: {fault}")
    # a request that was long on its way would train a later task with the images of this one
    if "train" in request.ops and (state.finished >= request.task or state.started > request.task):
        return encode(failure(request, "that task is over here"))
    before = methods.state_of(runtime.method)
    tensors, fields = _act(runtime, state, request, ctx)
    methods.check_unchanged(runtime.method, before)
    spec = runtime.method.upload_spec(ctx.layout, request.fields | {"classes": classes})
    if fault := forms_fault(tensors, spec, ctx.layout):  # nothing leaves that nobody declared
        raise WeftError(f"method {runtime.plan.method}: {fault}")
    addresses, where = (request.receiver, request.sender), (request.task, request.round)
    reply = Message(*addresses, request.request_id, (), *where, tensors, fields)
    state.request_id, state.reply = request.request_id, encode(reply, runtime.plan.wire)
    return state.reply


def _act(runtime: Runtime, state: ClientState, request: Message, ctx: TaskContext) -> tuple[Tensors, dict[str, Any]]:
    """Do what is requested, in a fixed order; the tensors and fields of the reply."""
    method, client, task = runtime.method, ctx.client, ctx.task
    tensors: Tensors = {}
    fields: dict[str, Any] = {}
    if "announce" in request.ops:
        fields["classes"] = list(ctx.classes)
    if request.ops == ("announce",):
        return tensors, fields
    if not state.weights.numel():
        state.start(ctx, method.options)
    if "begin" in request.ops and state.started < task:
        for missed in range(state.finished + 1, task):  # so that every task can be evaluated
            begin(runtime, state, runtime.training_context(client, missed))
            end(runtime, state, runtime.training_context(client, missed))
        begin(runtime, state, ctx)
    stopped = state.rate.stopped  # its rate has reached the floor: it keeps what it has and waits
    if "receive" in request.ops:
        download = _download(request, functools.partial(bounded, runtime, state, ctx.layout))
        state.knowledge.update(download.once)
        if not stopped:
            method.receive(state, download, ctx)
    if "train" in request.ops:
        fields |= train_round(state, method, ctx, request.round)
    if "upload" in request.ops and not stopped:
        tensors |= method.upload(state, ctx)
    if "end" in request.ops:
        end(runtime, state, ctx)
        if state.rate.epochs:  # of the model as it is stored
            method.load_task(state, task, ctx)
            fields["task_valid_accuracy"] = ctx.network.measure(runtime.batches(client, task, "valid"))[0]
        fields["size"] = state.size()._asdict()
        densities = (state.tasks[each].density() for each in state.tasks if each <= task)
        fields["density"] = [density for density in densities if density is not None]
    if "share" in request.ops:
        tensors |= method.share_task(state, ctx)
    if "test" in request.ops:
        fields |= evaluate(runtime, state, request, ctx)
    return tensors, fields


def _download(request: Message, near: Callable[[str, Payload], Payload] = lambda _, tensor: tensor) -> Download:
    download = Download(fields=request.fields)
    for name, sent in request.tensors.items():
        tensor = near(name, sent)
        if not name.startswith(KNOWLEDGE):
            download.tensors[name] = tensor
        elif isinstance(tensor, Sparse):
            download.once[name.removeprefix(KNOWLEDGE)] = tensor
    return download


def bounded(runtime: Runtime, state: ClientState, layout: Layout, name: str, received: Payload) -> Payload:
    """What a site takes of a tensor of the hub: no layer moves farther than so many times the norm of the site's own.

    Weights and biases replace the site's own; A's of others are added to them, and are themselves bounded.
    """
    if (most := runtime.largest_jump) == math.inf:
        return received
    if name == "biases":
        own, spans = state.private[: layout.biases], [slice(0, layout.biases)]
        base = own
    elif name == "weights" or name.startswith(KNOWLEDGE):
        own, spans = state.weights, [layer.span for layer in layout.layers]
        base = own if name == "weights" else torch.zeros_like(own)
    else:
        return received
    return limited(received, base, [(span, jump(name, most) * float(own[span].norm())) for span in spans])


def begin(runtime: Runtime, state: ClientState, ctx: TaskContext) -> None:
    """Start a task, once: a new head, new biases unless they are shared, the initial learning rate."""
    if state.started >= ctx.task:
        return
    method, plan, layout = runtime.method, runtime.plan, ctx.layout
    if not (method.traits.sees_all_tasks and state.private.numel()):  # else the heads of all tasks exist already
        biases = ctx.initial()[layout.weights :]
        if method.options.biases == "shared" and state.private.numel():
            biases = state.private[: len(biases)]
        head = ctx.network.initial_head(generator(runtime.head_seed, "head", ctx.client, ctx.task))
        state.private = torch.cat([biases, head])
        state.shared_biases = len(biases) if method.options.biases == "shared" else 0
    state.rate = RateSchedule(plan.learning_rate if plan.optimizer == "adam" else float(plan.sgd_rate))
    method.begin_task(state, ctx)
    state.started = ctx.task


def end(runtime: Runtime, state: ClientState, ctx: TaskContext) -> None:
    """End a task, once."""
    if state.finished >= ctx.task:
        return
    if not runtime.method.traits.sees_all_tasks:  # else no task is ever over
        state.tasks[ctx.task] = runtime.method.Task(private=state.private[state.shared_biases :].clone())
    runtime.method.end_task(state, ctx)
    state.optimizer = OptimizerState()
    state.finished = ctx.task


def evaluate(runtime: Runtime, state: ClientState, request: Message, ctx: TaskContext) -> dict[str, list[Any]]:
    """Accuracy of every task up to this one on test and on validation images, and the metrics of the plan.

    With measured_model=global theta_G comes along and is tested. It is kept by methods that improve finished tasks.
    """
    tested = state
    if runtime.plan.measured_model == "global" and request.tensors and "train" not in request.ops:
        download = _download(request, functools.partial(bounded, runtime, state, ctx.layout))
        state.knowledge.update(download.once)  # kept: the server does not send it again
        if not runtime.method.traits.improves_tasks:
            tested = copy.copy(state)
            tested.tasks = state.tasks.copy()
        runtime.method.receive(tested, download, ctx)
    found: dict[str, list[Any]] = {"accuracy": [], "validation": []}
    for task in range(ctx.task + 1):
        its = runtime.context(ctx.client, task)
        runtime.method.load_task(tested, task, its)
        batches = runtime.batches(ctx.client, task, "test")
        found["accuracy"].append(its.network.measure(batches)[0])
        found["validation"].append(its.network.measure(runtime.batches(ctx.client, task, "valid"))[0])
        if runtime.plan.metrics is not None:
            first, classes = runtime.head_span(ctx.client, task)
            outputs = its.network.predictions(batches)[:, first : first + classes].double().cpu().numpy()
            labels = batches.labels.cpu().numpy() - first
            measured = metrics.measure_all(runtime.plan.metrics.split(","), labels, outputs)
            found.setdefault("metrics", []).append(measured)
    if any(choices := [tested.tasks[task].choice() for task in tested.tasks if task <= ctx.task]):
        found["kept"] = choices
    return found
