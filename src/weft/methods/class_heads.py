"""Heads by class: with heads=class the rows of heads travel too, and are averaged over the clients that have the class.

    h_k = sum over c of (n_c / n) * h_k,c          c: the clients of a round whose task has class k

A row is the weights and the bias of one class. Classes are recognized by identifiers that clients announce when they
start a task. `ClassHeads` wraps any federated method: its other hooks are unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.lazy import torch
from weft.methods.averaging import Average, Tensors, Updates
from weft.methods.context import Download, LocalTraining, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.method import Method
from weft.methods.state import ClientState
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout

PREFIX = "head."  # before the identifier of a class, in the name of its row


class ClassHeads(Method):
    def __init__(self, method: Method):
        super().__init__(method.options)
        self.method = method
        self.Server, self.Client, self.Task = method.Server, method.Client, method.Task  # type: ignore[misc]
        self.traits = replace(method.traits, by_class=True)

    def configure(self, server: Any, client: int, ctx: RoundContext) -> Download:
        download = self.method.configure(server, client, ctx)
        tasks = ctx.classes.values() if ctx.testing else [ctx.classes.get(ctx.task, [])]
        ids = dict.fromkeys(each for classes in tasks for each in classes)
        download.tensors |= {f"{PREFIX}{each}": server.heads[each] for each in ids if each in server.heads}
        return download

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        return self.method.upload_spec(layout, sent) | head_spec(layout, sent["classes"][-1])

    def aggregate(self, server: Any, updates: Updates, ctx: ServerContext) -> None:
        self.method.aggregate(server, updates, ctx)
        by: Average = getattr(self.options, "average", "examples")
        for name in sorted({name for update in updates for name in update.tensors if name.startswith(PREFIX)}):
            key = name.removeprefix(PREFIX)
            known = server.heads.get(key, updates.parts(name)[0])
            server.heads[key] = tensors.dense(updates.merge(name, known, by))

    def begin_task(self, client: Any, ctx: TaskContext) -> None:
        self.method.begin_task(client, ctx)

    def receive(self, client: Any, download: Download, ctx: TaskContext) -> None:
        self.method.receive(client, download, ctx)
        rows = received_rows(download)
        client.private = with_rows(client.private, rows, ctx.classes, ctx.layout)
        for task in client.tasks if ctx.task in client.tasks else ():  # it is over: a test follows
            found = client.tasks[task]
            private = with_rows(found.private, rows, ctx.classes_of(task), ctx.layout)
            client.tasks[task] = replace(found, private=private)

    def prepare(self, training: LocalTraining, client: Any, ctx: TaskContext) -> None:
        self.method.prepare(training, client, ctx)

    def upload(self, client: Any, ctx: TaskContext) -> Tensors:
        rows = rows_of(client.private, ctx.classes, ctx.layout)
        return self.method.upload(client, ctx) | {f"{PREFIX}{each}": row for each, row in rows.items()}

    def end_task(self, client: Any, ctx: TaskContext) -> None:
        self.method.end_task(client, ctx)

    def share_task(self, client: Any, ctx: TaskContext) -> Tensors:
        return self.method.share_task(client, ctx)

    def load_task(self, client: ClientState, task: int, ctx: TaskContext) -> None:
        self.method.load_task(client, task, ctx)


def head_spec(layout: Layout, classes: Sequence[str], once: bool = False) -> dict[str, TensorSpec]:
    """One row for each class."""
    return {f"{PREFIX}{each}": TensorSpec("dense", layout.features + 1, once=once) for each in classes}


def received_rows(download: Download) -> dict[str, torch.Tensor]:
    """Rows of heads by class."""
    found = ((name.removeprefix(PREFIX), row) for name, row in download.tensors.items() if name.startswith(PREFIX))
    return {key: tensors.dense(row) for key, row in found}


def rows_of(private: torch.Tensor, classes: Sequence[str], layout: Layout) -> dict[str, torch.Tensor]:
    """The rows of the head of a task, by class."""
    weights, biases = _head(private, len(classes), layout)
    rows = torch.cat([weights, biases[:, None]], dim=1)  # (classes, features + 1)
    return {each: row.clone() for each, row in zip(classes, rows, strict=True)}


def with_rows(
    private: torch.Tensor, rows: Mapping[str, torch.Tensor], classes: Sequence[str], layout: Layout
) -> torch.Tensor:
    """A copy of `private` with the rows of those classes replaced that are among `rows`."""
    private = private.clone()
    weights, biases = _head(private, len(classes), layout)
    for index, each in enumerate(classes):
        if each in rows:
            weights[index], biases[index] = rows[each][:-1], rows[each][-1]
    return private


def set_key(classes: Collection[str]) -> str:
    """A name for a set of classes, in any order."""
    return hashlib.sha256(" ".join(sorted(classes)).encode()).hexdigest()[:16]


def model_of(weights: torch.Tensor, private: torch.Tensor, classes: Sequence[str], layout: Layout) -> torch.Tensor:
    """A task's whole model as one vector that means the same at any client: the body, then rows by class."""
    rows = rows_of(private, classes, layout)
    return torch.cat([weights, private[: layout.head - layout.weights], *(rows[each] for each in sorted(rows))])


def split_model(
    model: torch.Tensor, classes: Collection[str], layout: Layout
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The body (layout.head,) and the rows by class of such a vector."""
    rows = model[layout.head :].view(len(classes), -1)
    return model[: layout.head], dict(zip(sorted(classes), rows, strict=True))


def _head(private: torch.Tensor, classes: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the weights (classes, features) and biases (classes,) of the head, with which `private` ends."""
    head = private[len(private) - classes * (layout.features + 1) :]
    return head[:-classes].view(classes, layout.features), head[-classes:]
