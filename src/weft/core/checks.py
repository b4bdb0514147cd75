"""What an answer must be before anything of it is used; and, at the other end, a request.

`decode` has settled that the bytes are one well-formed message: version, checksum, sizes, indices in range and sorted,
finite values. Here is what only the server can know: that it asked for this, that nobody has answered it yet, and that
the tensors are those of the method and of the network. Whoever fails is refused with a reason, and none of it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.core.schedule import Visit
from weft.errors import show
from weft.methods.method import Form, Method
from weft.networks.flat import Layout
from weft.registry import short
from weft.wire.message import Message, MessageError, decode
from weft.wire.tensors import Payload, Rows, Sparse, size

if TYPE_CHECKING:
    from weft.plan import Plan

EXAMPLES = 10**9  # more images than any client has
CLASSES = 10**4  # more than any task has
OTHERS = 4096  # bytes of JSON: numbers of other names than weft's


class Refused(Exception):  # noqa: N818 - the run goes on
    """An answer that is not used; the text says why."""

    def __init__(self, reason: str, visit: Visit | None = None, foreign: bool = False):
        """`visit`: what it answers, if that is clear; `foreign`: it answers nothing that this client was asked."""
        super().__init__(reason)
        self.visit, self.foreign = visit, foreign


@dataclass(frozen=True)
class Inspector:
    """What all answers of a run are held against."""

    layout: Layout
    method: Method
    forms: dict[str, Form] | None  # None: the method does not say
    largest_norm: float
    metrics: frozenset[str]  # the names of what is measured beside accuracy

    @staticmethod
    def of(method: Method, layout: Layout, initial: torch.Tensor, plan: Plan) -> Inspector:
        metrics = frozenset(map(short, plan.metrics.split(","))) if plan.metrics is not None else frozenset()
        return Inspector(
            layout, method, forms_of(method, layout), plan.max_update_norm * float(initial.norm()), metrics
        )

    @property
    def merged(self) -> set[str] | None:
        """The names of the tensors that are merged in every round."""
        return None if self.forms is None else {name for name, form in self.forms.items() if not form.once}

    def open(self, wire: bytes, client: int, out: Mapping[str, Visit]) -> tuple[Message, Visit]:
        """The answer of this client and what it was asked for; `out`: all that is asked and not answered, by id."""
        try:
            reply = decode(wire)
        except MessageError as reason:
            raise Refused(str(reason).removeprefix("message rejected: ")) from None
        visit = out.get(reply.request_id)
        if visit is None or visit.client != client:
            words = f"it answers {show(reply.request_id)}, which was not asked or is answered already"
            raise Refused(words, foreign=True)
        if reply.error and (reply.tensors or reply.fields):
            raise Refused("it says that it failed, and brings tensors or numbers all the same", visit)
        if not reply.error and (fault := self.fault(reply, visit)):
            raise Refused(fault, visit)
        return reply, visit

    def fault(self, reply: Message, visit: Visit) -> str:
        """What is wrong with an answer to this request; nothing if nothing is."""
        if (reply.sender, reply.receiver) != (f"client-{visit.client}", "server"):
            return f"it says that it goes from {show(reply.sender)} to {show(reply.receiver)}"
        if (reply.task, reply.round) != (visit.step, visit.round) or reply.ops:
            return f"it is about task {reply.task}, round {reply.round}, and not what was asked"
        return self._tensors_fault(reply.tensors, visit) or numbers_fault(reply.fields, visit, self.metrics)

    def _tensors_fault(self, tensors: Mapping[str, Payload], visit: Visit) -> str:
        merged = self.merged or set()
        if tensors and not {"send", "give"} & set(visit.ops):
            return "it has tensors that nobody asked for"
        if merged & tensors.keys() and (missing := sorted(merged - tensors.keys())):
            return f"tensor {missing[0]!r} is missing"
        for name, tensor in tensors.items():
            form = Form("dense", self.layout.body) if self.forms is None else self.forms.get(name)
            if form is None or (self.forms is not None and ("give" if form.once else "send") not in visit.ops):
                return f"tensor {show(name)} was not asked for"
            if fault := self._form_fault(tensor, form):
                return f"tensor {name!r} {fault}"
            values = tensor if isinstance(tensor, torch.Tensor) else tensor.values
            norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
            if not norm <= self.largest_norm:
                return f"tensor {name!r} has the norm {norm:.3g}, above {self.largest_norm:.3g} (max_update_norm)"
        fault = "" if self.forms is None else self.method.fault(tensors, visit.told, self.layout)
        return f"what it sends {fault}" if fault else ""

    def _form_fault(self, tensor: Payload, form: Form) -> str:
        if self.forms is None:
            return "" if size(tensor) <= form.size else f"has {size(tensor):,} values, the network has {form.size:,}"
        shape = {torch.Tensor: "dense", Rows: "rows", Sparse: "sparse"}[type(tensor)]
        if shape != form.shape:
            return f"is {shape} and not {form.shape}"
        if size(tensor) != form.size or (isinstance(tensor, Rows) and tensor.segments != self.layout.segments):
            return f"has {size(tensor):,} values in another order or number than the {form.size:,} of the network"
        return ""


def forms_of(method: Method, layout: Layout) -> dict[str, Form] | None:
    """What the method says of its answers; nothing, if what it sends was changed further down than where it says so."""
    order = type(method).__mro__
    sends, says = (next(place for place, kind in enumerate(order) if name in vars(kind)) for name in _HALVES)
    return method.expected(layout) if says <= sends else None


_HALVES = ("contribute", "expected")


# ---- a request, at the client ----------------------------------------------------------------------------------------

OPS = ("begin", "receive", "train", "send", "finish", "give", "test")
_SENT_AS = {"global": "base", "foreign": "adaptive"}  # what a client is sent was sent by clients under this name


def request_fault(request: Message, client: int, method: Method, layout: Layout) -> str:
    """What is wrong with a request, before anything is allocated by what it claims; nothing if nothing is."""
    if (request.sender, request.receiver) != ("server", f"client-{client}"):
        return f"it says that it goes from {show(request.sender)} to {show(request.receiver)}"
    if strange := [op for op in request.ops if op not in OPS or request.ops.count(op) > 1]:
        return f"it asks for {show(strange[0])}, which is unknown or named twice"
    forms = forms_of(method, layout) or {}
    for name, tensor in request.tensors.items():
        kind = name.partition("/")[0]
        form = forms.get(_SENT_AS.get(kind, name))
        count = size(tensor)
        if isinstance(tensor, Rows) and tensor.segments != layout.segments:
            return f"tensor {name!r} has other rows than the network"
        if count > layout.body or (form is not None and count != form.size):
            wanted = f"at most {layout.body:,}" if form is None else f"{form.size:,}"
            return f"tensor {name!r} has {count:,} values, for this network it has {wanted}"
    if not _is_count(request.fields.get("turn", 0)):
        return f"its turn cannot be {show(request.fields['turn'])}"
    return ""


# ---- the numbers that anything reads, now or from the journal; a few of other names stand there and are not read -----


def numbers_fault(numbers: Mapping[str, Any], visit: Visit, metrics: Collection[str]) -> str:
    """`metrics`: the names of what the plan has measured beside accuracy."""
    for name, number in _NUMBERS.items():
        asked = number.op in visit.ops and (name != "metrics" or bool(metrics))
        if name in numbers and not asked:
            return f"its {name} was not asked for"
        if name in numbers and not number.is_right(numbers[name], visit.step + 1):
            return f"its {name} cannot be {show(numbers[name])}"
        if asked and name not in numbers and number.always:
            return f"its {name} is missing"
    if (others := len(json.dumps({name: numbers[name] for name in numbers.keys() - _NUMBERS.keys()}))) > OTHERS:
        return f"its numbers of other names than weft's take {others:,} bytes, at most {OTHERS:,} are let in"
    if any(task.keys() != set(metrics) for task in numbers.get("metrics", [])):
        return f"its metrics are not {', '.join(sorted(metrics))}"
    return ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_count(value: Any, least: int = 0, most: int = 2**53) -> bool:
    return type(value) is int and least <= value <= most


def _are_shares(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(map(_is_share, value))


def _are_metrics(value: Any, tasks: int) -> bool:
    """For each task some named lists of numbers: one, or one for each class; a number may be missing."""
    if not isinstance(value, list) or len(value) != tasks or not all(isinstance(each, dict) for each in value):
        return False
    for task in value:
        lists = list(task.values())
        if not all(isinstance(one, list) and 0 < len(one) <= CLASSES for one in lists):
            return False
        if not all(map(_is_number_or_none, chain.from_iterable(lists))):
            return False
        if len({len(one) for one in lists} - {1}) > 1:  # a task has one number of classes
            return False
    return True


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"bytes", "paper_bytes"} and all(map(_is_count, value.values()))


class _Number(NamedTuple):
    """What a number of an answer has to be."""

    op: str  # what it tells of
    is_right: Callable[[Any, int], bool]  # of its value and how many tasks there are by now
    always: bool = False


# a client whose training diverged says that it failed, and sends no number: there is no NaN among them
_NUMBERS = {
    "examples": _Number("train", lambda value, _: _is_count(value, 1, EXAMPLES), always=True),
    "images": _Number("train", lambda value, _: _is_count(value)),
    "rate": _Number("train", lambda value, _: _is_number(value) and value >= 0),
    "stopped": _Number("train", lambda value, _: type(value) is bool),
    "train_loss": _Number("train", lambda value, _: _is_number(value)),
    "valid_loss": _Number("train", lambda value, _: _is_number(value)),
    "valid_accuracy": _Number("train", lambda value, _: _is_share(value)),
    "task_valid_accuracy": _Number("finish", lambda value, _: value is None or _is_share(value)),
    "density": _Number("finish", _are_shares),
    "size": _Number("finish", lambda value, _: _is_size(value), always=True),
    "accuracy": _Number("test", lambda value, tasks: _are_shares(value, tasks) and len(value) == tasks, always=True),
    "metrics": _Number("test", _are_metrics, always=True),
}
