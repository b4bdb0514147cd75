"""The options of somebody's own network or scenario, read off the signature of what makes it."""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from weft.errors import WeftError

# an annotation may be the type or, after `from __future__ import annotations`, its name
CHECKED = {"bool": bool, "int": int, "float": float, "str": str}
Statistics = Literal["own", "shared"]
PLANNED = ("clients", "tasks", "seed")


@functools.lru_cache(maxsize=64)
def options_from(maker: Any, part: Literal["network", "scenario"] = "network") -> type[BaseModel]:
    """A model of `maker`'s keyword arguments, and `statistics`, which every network has.

    A scenario is made with the plan's clients, tasks and seed too, which are no options.
    """
    try:
        parameters = dict(inspect.signature(maker).parameters)
    except (TypeError, ValueError):
        raise WeftError(f"{maker!r} is no class or function that makes a {part}") from None
    fields: dict[str, Any] = {"statistics": (Statistics, "own")} if part == "network" else {}
    for name in PLANNED if part == "scenario" else ():
        if name not in parameters:
            raise WeftError(f"it has no argument {name!r}; a scenario is made with {', '.join(PLANNED)}")
        del parameters[name]
    extra: Literal["allow", "forbid"] = "forbid"
    for name, parameter in parameters.items():
        if name in fields:
            raise WeftError(f"its argument {name!r} has the name of an option that every {part} has; rename it")
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY or name.startswith("_"):
            if parameter.default is parameter.empty:
                raise WeftError(f"its argument {name!r} cannot be given as {part}.{name}; give it a default")
        elif parameter.default is parameter.empty or _plain(parameter.default):
            fields[name] = _field(parameter)
    config = ConfigDict(extra=extra, frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an option may be called `copy`, as a method of BaseModel is
        options: type[BaseModel] = create_model("Options", __config__=config, **fields)
    options.__doc__ = inspect.getdoc(maker)  # what `weft list` says of it
    return options


def _field(parameter: inspect.Parameter) -> tuple[Any, Any]:
    default = ... if parameter.default is parameter.empty else parameter.default
    annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
    if isinstance(annotation, str) and annotation in CHECKED:
        return CHECKED[annotation], default
    if isinstance(default, tuple):
        return Annotated[tuple[Any, ...], Field(strict=False)], default  # a plan can only write a list
    return Any, default


def _plain(value: Any) -> bool:
    """Can a plan write it? A default such as nn.GELU stays as it is, and is no option."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
