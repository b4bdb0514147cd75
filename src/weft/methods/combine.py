"""Combinations: `fedprox+ewc` is FedProx and EWC at once, with no class of its own.

A hook calls `super()` and adds its part, so the class of a combination is just its parts side by side: Python's order
of inheritance calls them in turn. The part that talks to the server stands first, the one that makes theta of several
variables last, since it replaces what the others add to.
"""

from __future__ import annotations

from pydantic import create_model

from weft.errors import WeftError
from weft.methods.method import Method, Options


def combine(parts: dict[str, type[Method]]) -> tuple[str, type[Method]]:
    """The class of a combination and its name in the order that counts; a `WeftError` says why if it makes no sense."""
    _check(parts)
    order = sorted(parts, key=lambda name: (not parts[name].talks, parts[name].composes, name))
    classes = [parts[name] for name in order]
    name = "+".join(order)
    talking, composes = classes[0], classes[-1].composes
    combined = type(
        "".join(kind.__name__ for kind in classes),
        tuple(classes),
        {
            "__doc__": f"{name}, made of its parts.",
            "options_class": _options(name, classes),
            "presets": {},
            "kind": talking.kind,
            "citation": "; ".join(kind.citation for kind in classes),
            "sends": tuple(words.replace("theta", "B") if composes else words for words in talking.sends),
            "talks": talking.talks,
            "verified": "",
        },
    )
    return name, combined


def _options(name: str, classes: list[type[Method]]) -> type[Options]:
    """The options of all parts; where two have the same, the learning part's default wins."""
    found = [kind.options_class for kind in reversed(classes)]
    needed = [one for one in found if not any(issubclass(other, one) and other is not one for other in found)]
    return create_model("Options", __base__=tuple(dict.fromkeys(needed)), __doc__=f"Options of {name}.")


def _check(parts: dict[str, type[Method]]) -> None:
    name = "+".join(parts)
    for part, kind in parts.items():
        if kind.alone:
            raise WeftError(f"{name} makes no sense: {part} combines with nothing, {kind.alone}")
    talking = [part for part, kind in parts.items() if kind.talks]
    if len(talking) > 1:
        raise WeftError(
            f"{name} makes no sense: {' and '.join(talking)} each have a server half; choose one of them, "
            "with ewc, stable-sgd or apd"
        )
    composing = [part for part, kind in parts.items() if kind.composes]
    if len(composing) > 1:
        raise WeftError(f"{name} makes no sense: {' and '.join(composing)} each make theta of parts of their own")
    for part, kind in parts.items():
        if composing and kind.needs_theta:
            raise WeftError(
                f"{name} makes no sense: {kind.needs_theta}, and {composing[0]} makes theta of several parts"
            )
        if composing and kind.optimizer == "sgd":
            raise WeftError(
                f"{name} makes no sense: {part} needs SGD, under which {composing[0]} diverges, "
                "since its drift and l1 terms are scaled for Adam"
            )
    owners: dict[str, str] = {}
    for part, kind in parts.items():
        for option in kind.options_class.model_fields.keys() - Options.model_fields.keys():
            if owners.setdefault(option, part) != part:
                raise WeftError(f"{name} does not work: {owners[option]} and {part} each have an option {option!r}")
