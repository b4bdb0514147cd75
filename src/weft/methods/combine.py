"""Combinations: `fedprox+ewc` is FedProx and EWC at once, with no class of its own.

A hook calls `super()` and adds its part, so the class of a combination is just its parts side by side: Python's order
of inheritance calls them in turn. The part that talks to the server stands first, the one that makes theta of several
variables last, since it replaces what the others add to.
"""

from __future__ import annotations

from pydantic import create_model

from weft.errors import Problem
from weft.methods.base import Method


def combine(parts: dict[str, type[Method]]) -> tuple[str, type[Method]]:
    """The class of a combination and its name in the order that counts; a `Problem` says why if it makes no sense."""
    _check(parts)
    order = sorted(parts, key=lambda name: (not parts[name].talks, parts[name].composes, name))
    classes = [parts[name] for name in order]
    name = "+".join(order)
    options = create_model(
        "Options",
        __base__=tuple(kind.options_class for kind in reversed(classes)),  # the learning part's defaults win
        __doc__=f"Options of {name}.",
    )
    talking = classes[0]
    combined = type(
        "".join(kind.__name__ for kind in classes),
        tuple(classes),
        {
            "__doc__": f"{name}, made of its parts.",
            "options_class": options,
            "presets": {},
            "kind": talking.kind,
            "citation": "; ".join(kind.citation for kind in classes),
            "sends": talking.sends,
            "talks": talking.talks,
            "verified": "tests/test_baselines.py: test_a_combination_is_both_of_its_parts",
        },
    )
    return name, combined


def _check(parts: dict[str, type[Method]]) -> None:
    name = "+".join(parts)
    for part, kind in parts.items():
        if kind.alone:
            raise Problem(f"{name} makes no sense: {part} combines with nothing, {kind.alone}")
    talking = [part for part, kind in parts.items() if kind.talks]
    if len(talking) > 1:
        raise Problem(
            f"{name} makes no sense: {' and '.join(talking)} each have a server half; choose one of them, "
            "with ewc, stable-sgd or apd"
        )
    composing = [part for part, kind in parts.items() if kind.composes]
    for kind in parts.values():
        if composing and kind.needs_theta:
            raise Problem(f"{name} makes no sense: {kind.needs_theta}, and {composing[0]} makes theta of several parts")
