"""What a reply must be before any of it is used; and, at the client, a request.

`decode` has settled that the bytes are one well-formed message: version, checksum, sizes, indices in range and sorted,
finite values. Here is what only the receiver can know: that it requested this, that it has no reply yet, and that the
tensors are those that the method declares for this network. A message that fails is rejected with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from weft.core.progress import Pending
from weft.errors import show
from weft.methods.context import KNOWLEDGE, TensorSpec
from weft.methods.method import Method
from weft.networks.flat import Layout
from weft.registry import short
from weft.wire.message import Message, MessageError, decode
from weft.wire.tensors import Payload, Rows, Sparse, size

if TYPE_CHECKING:
    from weft.plan import Plan

MAX_EXAMPLES = 10**9  # more images than any client has
MAX_CLASSES = 10**4  # more than any task has
MAX_OTHER_FIELDS = 4096  # bytes of JSON: fields that weft does not know
OPS = ("announce", "begin", "receive", "train", "upload", "end", "share", "test")
SHAPES = {torch.Tensor: "dense", Rows: "rows", Sparse: "sparse"}


class RejectedReply(Exception):  # noqa: N818 - the run continues
    """A reply that is not used; the text says why."""

    def __init__(self, reason: str, pending: Pending | None = None, unrelated: bool = False, bug: bool = False):
        """`pending`: the request that it answers, if that is clear; `unrelated`: it answers no request to this client;
        `bug`: what the method uploads is not what it declares."""
        super().__init__(reason)
        self.pending, self.unrelated, self.bug = pending, unrelated, bug


@dataclass(frozen=True)
class ReplyChecks:
    """What all replies of a run are checked against."""

    layout: Layout
    method: Method
    max_norm: float
    metrics: frozenset[str]  # the names of what is measured besides accuracy

    @staticmethod
    def of(method: Method, layout: Layout, initial: torch.Tensor, plan: Plan) -> ReplyChecks:
        metrics = frozenset(map(short, plan.metrics.split(","))) if plan.metrics is not None else frozenset()
        return ReplyChecks(layout, method, plan.max_update_norm * float(initial.norm()), metrics)

    def once(self, pending: Pending) -> set[str]:
        """The tensors that are stored and not merged."""
        return {name for name, spec in self._spec(pending).items() if spec.once}

    def _spec(self, pending: Pending) -> dict[str, TensorSpec]:
        return self.method.upload_spec(self.layout, pending.sent | {"classes": pending.classes})

    def open(self, wire: bytes, client: int, requests: Mapping[str, Pending]) -> tuple[Message, Pending]:
        """The reply of this client and the request that it answers, out of those without a reply."""
        try:
            reply = decode(wire)
        except MessageError as error:
            raise RejectedReply(str(error).removeprefix("message rejected: ")) from None
        pending = requests.get(reply.request_id)
        if pending is None or pending.assignment.client != client:
            reason = f"it answers {show(reply.request_id)}, which was not requested or is answered already"
            raise RejectedReply(reason, unrelated=True)
        if fault := self._fault(reply, pending):
            raise RejectedReply(fault, pending)
        return reply, pending

    def _fault(self, reply: Message, pending: Pending) -> str:
        request, spec = pending.assignment, self._spec(pending)
        if reply.error:
            return "it reports a failure but has tensors or fields" if reply.tensors or reply.fields else ""
        if (reply.sender, reply.receiver) != (f"client-{request.client}", "server"):
            return f"it is addressed from {show(reply.sender)} to {show(reply.receiver)}"
        if (reply.task, reply.round) != (request.task, request.round) or reply.ops:
            return f"it is about task {reply.task}, round {reply.round}, which was not requested"
        fault = forms_fault(reply.tensors, spec, self.layout)
        for name in reply.tensors if not fault else ():
            if ("share" if spec[name].once else "upload") not in request.ops:
                return f"tensor {show(name)} was not requested"
        if fault := fault or self._missing(reply, spec, request.ops):
            raise RejectedReply(fault, pending, bug=True)
        fault = self._norm_fault(reply.tensors)
        return fault or fields_fault(reply.fields, request.ops, request.task, self.metrics)

    def _missing(self, reply: Message, spec: Mapping[str, TensorSpec], ops: Collection[str]) -> str:
        merged = {name for name, each in spec.items() if not each.once}
        trained = "upload" in ops and reply.fields.get("images", 0)  # a client that has stopped uploads nothing
        missing = sorted(merged - reply.tensors.keys()) if trained or merged & reply.tensors.keys() else []
        return f"tensor {missing[0]!r} is missing" if missing else ""

    def _norm_fault(self, tensors: Mapping[str, Payload]) -> str:
        for name, tensor in tensors.items():
            values = tensor if isinstance(tensor, torch.Tensor) else tensor.values
            norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
            if not norm <= self.max_norm:
                return f"tensor {name!r} has the norm {norm:.3g}, above {self.max_norm:.3g} (max_update_norm)"
        return ""


def forms_fault(tensors: Mapping[str, Payload], spec: Mapping[str, TensorSpec], layout: Layout) -> str:
    """What is wrong with the forms of a reply's tensors: checked by the client before they leave, and by the server."""
    for name, tensor in tensors.items():
        if name not in spec:
            declared = ", ".join(sorted(spec)) or "nothing"
            return f"tensor {show(name)} is uploaded, and upload_spec does not declare it (but {declared})"
        if fault := _form_fault(tensor, spec[name], layout):
            return f"tensor {name!r} {fault}"
    return ""


def _form_fault(tensor: Payload, spec: TensorSpec, layout: Layout) -> str:
    shape = SHAPES[type(tensor)]
    if shape != spec.shape:
        return f"is {shape} and not {spec.shape}"
    if size(tensor) != spec.size or (isinstance(tensor, Rows) and tensor.segments != layout.segments):
        return f"has {size(tensor):,} values in another order or number than the {spec.size:,} of the network"
    if isinstance(tensor, Rows) and spec.rows is not None and not torch.equal(tensor.kept, spec.rows):
        return "has other rows than those of this round"
    if isinstance(tensor, Rows) and spec.most_rows is not None:
        for layer, most in zip(layout.layers, spec.most_rows, strict=True):
            if (count := int(tensor.kept[layer.row_span].sum())) > most:
                return f"has {count} rows of {layer.name}, at most {most} are accepted (method.keep)"
    return ""


# ---- a request, at the client ----------------------------------------------------------------------------------------


def request_fault(request: Message, client: int, method: Method, layout: Layout, classes: list[list[str]]) -> str:
    """What is wrong with a request, before anything is allocated by what it claims; empty if nothing is.

    `classes`: identifiers of the classes of each task up to the request's.
    """
    if (request.sender, request.receiver) != ("server", f"client-{client}"):
        return f"it is addressed from {show(request.sender)} to {show(request.receiver)}"
    if strange := [op for op in request.ops if op not in OPS or request.ops.count(op) > 1]:
        return f"it requests {show(strange[0])}, which is unknown or named twice"
    if request.request_id != (expected := f"{request.task}.{request.round}.{client}"):
        return f"its id is {show(request.request_id)} and not {expected}"
    spec = method.upload_spec(layout, {"classes": classes})
    once = next((each for each in spec.values() if each.once), None)
    if method.traits.by_class and "test" in request.ops:  # what is sent for finished tasks
        for task in range(len(classes)):
            spec |= method.upload_spec(layout, {"classes": classes[: task + 1]})
    for name, tensor in request.tensors.items():
        declared = once if name.startswith(KNOWLEDGE) else spec.get(name)
        if declared is None:
            return f"tensor {show(name)} is not one of this method"
        if isinstance(tensor, Rows) and tensor.segments != layout.segments:
            return f"tensor {name!r} has other rows than the network"
        if size(tensor) != declared.size:
            return f"tensor {name!r} has {size(tensor):,} values, for this network it has {declared.size:,}"
    return ""


# ---- the fields of a reply -------------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=0, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]


def _one_number_of_classes(task: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    if len({len(values) for values in task.values()} - {1}) > 1:
        raise ValueError
    return task


Values = Annotated[list[float | None], Field(min_length=1, max_length=MAX_CLASSES)]
TaskMetrics = Annotated[dict[str, Values], AfterValidator(_one_number_of_classes)]


class _Fields(BaseModel):
    """Fields that are read, now or from the journal. None is NaN: a client that diverged replies that it failed."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class SizeFields(_Fields):
    bytes: Count
    paper_bytes: Count


class AnnounceFields(_Fields):
    classes: Annotated[
        list[Annotated[str, Field(pattern="^c[0-9a-f]{15}$")]], Field(min_length=1, max_length=MAX_CLASSES)
    ]

    @field_validator("classes")
    @classmethod
    def _each_once(cls, classes: list[str]) -> list[str]:
        if len(set(classes)) < len(classes):
            raise ValueError
        return classes


class TrainFields(_Fields):
    examples: Annotated[int, Field(ge=1, le=MAX_EXAMPLES)]
    images: Count = 0
    rate: Annotated[float, Field(ge=0)] = 0.0
    stopped: bool = False
    train_loss: float = 0.0
    valid_loss: float = 0.0
    valid_accuracy: Share = 0.0


class EndFields(_Fields):
    task_valid_accuracy: Share | None = None
    density: list[Share] = []
    size: SizeFields


class EvaluationFields(_Fields):
    accuracy: list[Share]
    validation: list[Share]
    metrics: list[TaskMetrics] = []
    kept: list[Literal["own", "shared"]] = []


BY_OP: dict[str, type[_Fields]] = {
    "announce": AnnounceFields,
    "train": TrainFields,
    "end": EndFields,
    "test": EvaluationFields,
}
KNOWN = {name for model in BY_OP.values() for name in model.model_fields}


def fields_fault(fields: Mapping[str, Any], ops: Collection[str], task: int, metrics: Collection[str]) -> str:
    """What is wrong with the fields of a reply; `metrics`: what the plan measures besides accuracy."""
    if ("metrics" in fields) != ("test" in ops and bool(metrics)):
        return "its metrics was not requested" if "metrics" in fields else "its metrics is missing"
    for op, model in BY_OP.items():
        given = {name: fields[name] for name in model.model_fields if name in fields}
        if given and op not in ops:
            return f"its {next(iter(given))} was not requested"
        try:
            if op in ops:
                model.model_validate(given)
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
            return f"its {name} cannot be {show(given[name])}" if name in given else f"its {name} is missing"
    exactly = ("accuracy", "validation", "metrics", "kept")
    for name, exact in (("density", False), *((name, True) for name in exactly)):
        count = len(fields.get(name, ()))
        if name in fields and (count > task + 1 or (exact and count != task + 1)):
            return f"its {name} is of {count} tasks, not of {task + 1}"
    if any(each.keys() != set(metrics) for each in fields.get("metrics", ())):
        return f"its metrics are not {', '.join(sorted(metrics))}"
    others = len(json.dumps({name: fields[name] for name in fields.keys() - KNOWN}))
    if others > MAX_OTHER_FIELDS:
        return f"its unknown fields take {others:,} bytes, at most {MAX_OTHER_FIELDS:,} are accepted"
    return ""
