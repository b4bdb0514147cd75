"""Combinations: `fedprox+ewc` is FedProx and EWC at once, without code for the pair.

Each hook calls the parts in turn: first the one that composes theta, then other local parts, last the one with a server
half. Options and states of a combination are dataclasses made of those of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from pydantic import create_model

from weft.errors import WeftError
from weft.methods.averaging import Tensors, Updates
from weft.methods.context import Download, LocalTraining, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, TaskState

T = TypeVar("T")


class Combined(Method):
    """Several methods whose hooks are called in turn."""

    part_types: ClassVar[list[type[Method]]] = []

    def __init__(self, options: MethodOptions):
        super().__init__(options)
        self.parts = [kind(options) for kind in self.part_types]
        self._server_half = next((part for part in self.parts if part.traits.federated), Method(options))
        self._composing = next((part for part in self.parts if part.traits.composes_theta), Method(options))

    def configure(self, server: Any, client: int, ctx: RoundContext) -> Download:
        return self._server_half.configure(server, client, ctx)

    def upload_spec(self, layout: Any, sent: Any) -> dict[str, TensorSpec]:
        return self._server_half.upload_spec(layout, sent)

    def aggregate(self, server: Any, updates: Updates, ctx: ServerContext) -> None:
        self._server_half.aggregate(server, updates, ctx)

    def begin_task(self, client: Any, ctx: TaskContext) -> None:
        for part in self.parts:
            part.begin_task(client, ctx)

    def receive(self, client: Any, download: Download, ctx: TaskContext) -> None:
        for part in self.parts:
            part.receive(client, download, ctx)

    def prepare(self, training: LocalTraining, client: Any, ctx: TaskContext) -> None:
        for part in self.parts:
            part.prepare(training, client, ctx)

    def upload(self, client: Any, ctx: TaskContext) -> Tensors:
        return {name: tensor for part in self.parts for name, tensor in part.upload(client, ctx).items()}

    def end_task(self, client: Any, ctx: TaskContext) -> None:
        for part in self.parts:
            part.end_task(client, ctx)

    def share_task(self, client: Any, ctx: TaskContext) -> Tensors:
        return {name: tensor for part in self.parts for name, tensor in part.share_task(client, ctx).items()}

    def load_task(self, client: Any, task: int, ctx: TaskContext) -> None:
        self._composing.load_task(client, task, ctx)


def combine(parts: dict[str, type[Method]]) -> tuple[str, type[Method]]:
    """The class of a combination and its canonical name; a `WeftError` says why if the parts do not fit."""
    _check(parts)
    order = sorted(parts, key=lambda name: (not parts[name].traits.federated, parts[name].traits.composes_theta, name))
    classes = [parts[name] for name in order]
    name, info, composes = "+".join(order), classes[0].info, classes[-1].traits.composes_theta
    uploads, downloads = (
        words.replace("theta", "B") if composes else words for words in (info.uploads, info.downloads)
    )
    combined = type(
        "".join(kind.__name__ for kind in classes),
        (Combined,),
        {
            "__doc__": f"{name}, made of its parts.",
            "part_types": list(reversed(classes)),
            # where two parts have the same option, the local part's default wins
            "Options": create_model(
                "Options", __base__=_bases(kind.Options for kind in reversed(classes)), __doc__=f"Options of {name}."
            ),
            **{kind: _state(getattr(part, kind) for part in classes) for kind in ("Server", "Client", "Task")},
            "info": MethodInfo("; ".join(kind.info.citation for kind in classes), info.kind, uploads, downloads),
            "traits": _traits(classes),
        },
    )
    return name, combined


def _traits(classes: list[type[Method]]) -> Traits:
    """Those of the server half, and what any part needs."""
    needy = [kind.traits for kind in classes if kind.traits.sgd_only]
    rate = needy[0].sgd_rate if needy else classes[0].traits.sgd_rate
    composes = any(kind.traits.composes_theta for kind in classes)
    return replace(classes[0].traits, sgd_only=bool(needy), sgd_rate=rate, composes_theta=composes)


def _bases(kinds: Iterable[type[T]]) -> tuple[type[T], ...]:
    """Each class once, without those that another one extends already."""
    found = dict.fromkeys(kinds)
    return tuple(one for one in found if not any(issubclass(other, one) and other is not one for other in found))


def _state(kinds: Iterable[type[Any]]) -> type[Any]:
    """One dataclass with the fields of all."""
    bases = _bases(kinds)
    return bases[0] if len(bases) == 1 else dataclass(type("".join(kind.__name__ for kind in bases), bases, {}))


def _check(parts: dict[str, type[Method]]) -> None:
    name, traits = "+".join(parts), {part: kind.traits for part, kind in parts.items()}
    for part, its in traits.items():
        if its.not_combinable:
            raise WeftError(f"{name}: {part} cannot be combined: {its.not_combinable}")
    federated = [part for part, its in traits.items() if its.federated]
    if len(federated) > 1:
        raise WeftError(
            f"{name}: {' and '.join(federated)} each have a server half; use one of them with ewc, stable-sgd or apd"
        )
    composing = [part for part, its in traits.items() if its.composes_theta]
    if len(composing) > 1:
        raise WeftError(f"{name}: {' and '.join(composing)} each compose theta; use one of them")
    for part, its in traits.items():
        if composing and its.needs_theta:
            raise WeftError(f"{name}: {its.needs_theta}, and {composing[0]} composes theta of several variables")
        if composing and its.sgd_only:
            raise WeftError(
                f"{name}: {part} needs SGD, under which {composing[0]} diverges: its drift and l1 terms are scaled "
                "for Adam"
            )
    owners: dict[str, str] = {}
    for part, kind in parts.items():
        for option in kind.Options.model_fields.keys() - MethodOptions.model_fields.keys():
            if owners.setdefault(option, part) != part:
                raise WeftError(f"{name}: {owners[option]} and {part} both have an option {option!r}; rename one")
    for state, base in (("Client", ClientState), ("Task", TaskState)):
        fields: dict[str, tuple[str, type]] = {}  # by name: the part that has it and the class that declares it
        for part, kind in parts.items():
            for name_of_field, owner in _declared(getattr(kind, state), base).items():
                other, its_owner = fields.setdefault(name_of_field, (part, owner))
                if owner is not its_owner:
                    raise WeftError(f"{name}: {other} and {part} both have a state field {name_of_field!r}; rename one")


def _declared(state: type, base: type) -> dict[str, type]:
    """The fields that a state adds to its base class, with the class that declares each."""
    classes = reversed(state.__mro__[: state.__mro__.index(base)])
    found = {each: owner for owner in classes for each in vars(owner).get("__annotations__", {})}
    return {each: owner for each, owner in found.items() if each not in vars(base)["__dataclass_fields__"]}
