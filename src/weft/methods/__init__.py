"""The methods by name: one file, one method, one name on the command line."""

from __future__ import annotations

import importlib
from typing import Any

from weft.errors import Problem, nearest
from weft.methods.base import Method, Options

METHODS = {
    "fedweit": "weft.methods.fedweit:FedWeIT",
    "fedavg": "weft.methods.fedavg:FedAvg",
    "stl": "weft.methods.stl:STL",
}


def class_of(name: str) -> type[Method]:
    """The method's class; `name` may carry a preset, as in fedweit@paper."""
    plain, _, preset = name.partition("@")
    if plain not in METHODS:
        raise Problem(f"there is no method {plain!r}; {nearest(plain, METHODS)}")
    module, _, attribute = METHODS[plain].partition(":")
    found: type[Method] = getattr(importlib.import_module(module), attribute)
    if preset and preset not in found.presets:
        hint = nearest(preset, found.presets) if found.presets else "it has none"
        raise Problem(f"{plain} has no preset {preset!r}; {hint}")
    return found


def options_of(name: str) -> type[Options]:
    return class_of(name).options_class


def preset_of(name: str, preset: str) -> dict[str, Any]:
    """The plan keys that a preset sets, its method's options among them as `method.NAME`."""
    method = class_of(f"{name}@{preset}" if preset else name)
    return method.presets[preset] if preset else {}


def load(name: str, options: dict[str, Any]) -> Method:
    method = class_of(name)
    return method(method.options_class.model_validate(options))
