"""Heads by class: with heads=class the rows of heads travel too, and are averaged over the clients that have the class.

    h_k = sum over c of (n_c / n) * h_k,c          c: the clients of a round whose task has class k

A row is the weights and the bias of one class. Classes are recognized by identifiers that clients announce when they
start a task. `with_class_heads` extends any federated method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from weft.lazy import torch
from weft.methods.averaging import Average, Tensors, Updates
from weft.methods.context import Download, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.method import Method
from weft.methods.state import ServerState
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout

PREFIX = "head."  # before the identifier of a class, in the name of its row


@dataclass
class HeadsServer(ServerState):
    heads: dict[str, torch.Tensor] = field(default_factory=dict)  # h_k by class


class ClassHeads(Method):
    """What heads=class adds to the hooks of a method."""

    def configure(self, server: Any, client: int, ctx: RoundContext) -> Download:
        download = super().configure(server, client, ctx)
        tasks = ctx.classes.values() if ctx.testing else [ctx.classes.get(ctx.task, [])]
        ids = dict.fromkeys(each for classes in tasks for each in classes)
        download.tensors |= {f"{PREFIX}{each}": server.heads[each] for each in ids if each in server.heads}
        return download

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        row = TensorSpec("dense", layout.features + 1)
        return super().upload_spec(layout, sent) | {f"{PREFIX}{each}": row for each in sent["classes"][-1]}

    def aggregate(self, server: Any, updates: Updates, ctx: ServerContext) -> None:
        super().aggregate(server, updates, ctx)
        by: Average = getattr(self.options, "average", "examples")
        for name in sorted({name for update in updates for name in update.tensors if name.startswith(PREFIX)}):
            key = name.removeprefix(PREFIX)
            known = server.heads.get(key, updates.parts(name)[0])
            server.heads[key] = tensors.dense(updates.merge(name, known, by))

    def receive(self, client: Any, download: Download, ctx: TaskContext) -> None:
        super().receive(client, download, ctx)
        found = ((name.removeprefix(PREFIX), row) for name, row in download.tensors.items() if name.startswith(PREFIX))
        rows = {key: tensors.dense(row) for key, row in found}
        client.private = with_rows(client.private, rows, ctx.classes, ctx.layout)
        for task in client.tasks if ctx.task in client.tasks else ():  # it is over: a test follows
            private = with_rows(client.tasks[task].private, rows, ctx.classes_of(task), ctx.layout)
            client.tasks[task] = replace(client.tasks[task], private=private)

    def upload(self, client: Any, ctx: TaskContext) -> Tensors:
        rows = rows_of(client.private, ctx.classes, ctx.layout)
        return super().upload(client, ctx) | {f"{PREFIX}{each}": row for each, row in rows.items()}


def with_class_heads(method: type[Method]) -> type[Method]:
    """The method with heads by class."""
    server: type[ServerState] = dataclass(type(f"{method.Server.__name__}WithHeads", (HeadsServer, method.Server), {}))
    own = {"Server": server, "traits": replace(method.traits, by_class=True)}
    return type(f"{method.__name__}WithClassHeads", (ClassHeads, method), own)


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
    return "s" + hashlib.sha256(" ".join(sorted(classes)).encode()).hexdigest()[:15]


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
