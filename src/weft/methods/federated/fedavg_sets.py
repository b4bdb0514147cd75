"""FedAvg within a class set: tasks with the same classes share a whole model, other tasks share nothing.

    theta_S = sum over c of (n_c / n) * theta_c          c: the clients of a round whose task has the class set S

The trivial way to share by classes, and the baseline for methods that share in a more refined way. A task starts from
theta_S, which may come from earlier rounds of other clients, and a finished task is answered with the newest theta_S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from weft.lazy import torch
from weft.methods.averaging import Average, Tensors, Updates
from weft.methods.class_heads import model_of, set_key, split_model, with_rows
from weft.methods.context import Download, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.continual.stl import STL, STLClient, STLOptions
from weft.methods.method import MethodInfo, Traits
from weft.methods.state import ServerState
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.networks.flat import Layout

PREFIX = "model."  # before the key of a class set, in the name of its theta_S


class FedAvgSetsOptions(STLOptions):
    average: Average = "examples"  # as FedAvg


@dataclass
class FedAvgSetsServer(ServerState):
    models: dict[str, torch.Tensor] = field(default_factory=dict)  # theta_S by name: the body, then rows by class


class FedAvgSets(STL):
    Options = FedAvgSetsOptions
    Server = FedAvgSetsServer
    info = MethodInfo(
        citation="McMahan et al., AISTATS 2017, for each set of classes",
        kind="federated",
        uploads="theta and the head",
        downloads="theta_S and its head; before tests those of all tasks so far",
        verified="tests/test_class_experts.py: test_fedavg_within_class_sets_by_hand",
    )
    traits = Traits(
        federated=True,
        by_class=True,
        improves_tasks=True,
        asynchronous=True,
        not_combinable="each of its tasks has a separate network, which nothing else may change",
    )
    options: FedAvgSetsOptions

    # ---- server half

    def configure(self, server: FedAvgSetsServer, client: int, ctx: RoundContext) -> Download:
        tasks = ctx.classes.values() if ctx.testing else [ctx.classes.get(ctx.task, [])]
        names = {name_of(classes) for classes in tasks}
        return Download({name: server.models[name] for name in sorted(names) if name in server.models})

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        classes = sent["classes"][-1]
        return {name_of(classes): TensorSpec("dense", layout.head + len(classes) * (layout.features + 1))}

    def aggregate(self, server: FedAvgSetsServer, updates: Updates, ctx: ServerContext) -> None:
        for name in sorted({name for update in updates for name in update.tensors}):
            known = server.models.get(name, updates.parts(name)[0])
            server.models[name] = tensors.dense(updates.merge(name, known, self.options.average))

    # ---- client half

    def receive(self, client: STLClient, download: Download, ctx: TaskContext) -> None:
        models = {name: tensors.dense(model) for name, model in download.tensors.items()}
        if ctx.task not in client.tasks:
            if (model := models.get(name_of(ctx.classes))) is not None:
                client.weights, client.private = _changed(model, client.private, ctx.classes, ctx.layout)
            return
        for task in client.tasks:  # a test follows
            classes = ctx.classes_of(task)
            if (model := models.get(name_of(classes))) is not None:
                weights, private = _changed(model, client.tasks[task].private, classes, ctx.layout)
                client.tasks[task] = replace(client.tasks[task], weights=weights, private=private)

    def upload(self, client: STLClient, ctx: TaskContext) -> Tensors:
        return {name_of(ctx.classes): model_of(client.weights, client.private, ctx.classes, ctx.layout)}


def name_of(classes: list[str] | tuple[str, ...]) -> str:
    return PREFIX + set_key(classes)


def _changed(
    model: torch.Tensor, private: torch.Tensor, classes: tuple[str, ...], layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights, and the biases and head, of a task with this model."""
    body, rows = split_model(model, classes, layout)
    head = private[layout.head - layout.weights :]
    private = torch.cat([body[layout.weights :], head])
    return body[: layout.weights].clone(), with_rows(private, rows, classes, layout)
