"""What an answer must be before anything of it is used.

`decode` has settled that the bytes are one well-formed message: version, checksum, sizes, indices in range and sorted,
finite values. Here is what only the server can know: that it asked for this, that nobody has answered it yet, and that
the tensors are those of the method and of the network. Whoever fails is refused with a reason, and none of it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.headers import show
from weft.message import BadMessage, Message, decode
from weft.methods.base import Form, Method
from weft.networks.flat import Layout
from weft.schedule import Visit
from weft.tensors import Payload, Rows, Sparse, size

EXAMPLES = 10**9  # more images than any client has


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
    forms: dict[str, Form] | None  # None: the method does not say
    largest_norm: float

    @staticmethod
    def of(method: Method, layout: Layout, initial: torch.Tensor, norm_bound: float) -> Inspector:
        return Inspector(layout, forms_of(method, layout), norm_bound * float(initial.norm()))

    @property
    def merged(self) -> set[str] | None:
        """The names of the tensors that are merged in every round."""
        return None if self.forms is None else {name for name, form in self.forms.items() if not form.once}

    def open(self, wire: bytes, client: int, out: Mapping[str, Visit]) -> tuple[Message, Visit]:
        """The answer of this client and what it was asked for; `out`: all that is asked and not answered, by id."""
        try:
            reply = decode(wire)
        except BadMessage as reason:
            raise Refused(str(reason).removeprefix("message refused: ")) from None
        visit = out.get(reply.request_id)
        if visit is None or visit.client != client:
            words = f"it answers {show(reply.request_id)}, which was not asked or is answered already"
            raise Refused(words, foreign=True)
        if (fault := self.fault(reply, visit)) and not reply.error:
            raise Refused(fault, visit)
        return reply, visit

    def fault(self, reply: Message, visit: Visit) -> str:
        """What is wrong with an answer to this request; nothing if nothing is."""
        if (reply.sender, reply.receiver) != (f"client-{visit.client}", "server"):
            return f"it says that it goes from {show(reply.sender)} to {show(reply.receiver)}"
        if (reply.step, reply.round) != (visit.step, visit.round) or reply.ops:
            return f"it is about task {reply.step}, round {reply.round}, and not what was asked"
        return self._tensors_fault(reply.tensors, visit) or numbers_fault(reply.numbers, visit)

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
                return (
                    f"tensor {name!r} has the norm {norm:.3g}, at most {self.largest_norm:.3g} is let in (norm_bound)"
                )
        return ""

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


# ---- the numbers that are used; others go to the journal and nowhere else --------------------------------------------


def numbers_fault(numbers: Mapping[str, Any], visit: Visit) -> str:
    for name, is_right in _NUMBERS.items():
        if name in numbers and not is_right(numbers[name], visit):
            return f"its {name} cannot be {show(numbers[name])}"
    for op, name in (("train", "examples"), ("test", "accuracy"), ("finish", "size")):
        if op in visit.ops and name not in numbers:
            return f"its {name} is missing"
    return ""


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_count(value: Any, least: int = 0, most: int = 2**53) -> bool:
    return type(value) is int and least <= value <= most


def _are_shares(value: Any, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(map(_is_share, value))


def _are_metrics(value: Any, tasks: int) -> bool:
    """For each task some named lists of numbers; a number may be missing."""
    if not isinstance(value, list) or len(value) != tasks or not all(isinstance(each, dict) for each in value):
        return False
    lists = [values for each in value for values in each.values()]
    return all(isinstance(values, list) and all(map(_is_number_or_none, values)) for values in lists)


def _is_number_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


_NUMBERS: dict[str, Callable[[Any, Visit], bool]] = {
    "examples": lambda value, _: _is_count(value, 1, EXAMPLES),
    "images": lambda value, _: _is_count(value),
    "stopped": lambda value, _: type(value) is bool,
    "task_valid_accuracy": lambda value, _: value is None or _is_share(value),
    "accuracy": lambda value, visit: _are_shares(value, visit.step + 1) and len(value) == visit.step + 1,
    "metrics": lambda value, visit: _are_metrics(value, visit.step + 1),
    "density": lambda value, visit: _are_shares(value, visit.step + 1),
    "size": lambda value, _: (
        isinstance(value, dict) and value.keys() == {"bytes", "paper_bytes"} and all(map(_is_count, value.values()))
    ),
}
