"""The methods by name: one file, one method, one name on the command line; `a+b` is a combination of two.

`package.module:Name` and `path/to/file.py:Name` are user-defined methods, which combine like any other.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from weft import registry
from weft.errors import WeftError, nearest
from weft.methods.class_heads import with_class_heads
from weft.methods.combine import combine
from weft.methods.method import Method, MethodOptions

METHODS = {
    "fedweit": "weft.methods.fedweit.fedweit:FedWeIT",
    "apd": "weft.methods.fedweit.apd:APD",
    "ewc": "weft.methods.continual.ewc:EWC",
    "stable-sgd": "weft.methods.continual.stable_sgd:StableSGD",
    "local": "weft.methods.continual.local:Local",
    "fedavg": "weft.methods.federated.fedavg:FedAvg",
    "fedprox": "weft.methods.federated.fedprox:FedProx",
    "scaffold": "weft.methods.federated.scaffold:Scaffold",
    "fedavg-sets": "weft.methods.federated.fedavg_sets:FedAvgSets",
    "class-experts": "weft.methods.federated.class_experts:ClassExperts",
    "fedcurv": "weft.methods.federated.fedcurv:FedCurv",
    "stl": "weft.methods.continual.stl:STL",
    "joint": "weft.methods.continual.joint:Joint",
}

# what people ask for, and where it is
WRITTEN = {
    "fedavgm": "docs/add-a-method.md has it as a file",
    "fedrep": "weft new method FedRep writes a file to fill in, and docs/add-a-method.md shows FedRep",
    "fedbabu": "weft new method FedBABU writes a file to fill in; docs/add-a-method.md shows FedRep, which is close",
    "sgd": "plain training is local; optimizer=sgd chooses the optimizer",
    "finetune": "plain training is local",
    "single-task": "did you mean stl?",
}

# those of the paper and its figures; other pairs work as well, unless `combine` refuses them
COMBINATIONS = ("fedprox+ewc", "fedprox+stable-sgd", "fedprox+apd", "fedavg+ewc", "fedavg+apd")


def class_of(name: str) -> type[Method]:
    """The method's class; `name` may carry a preset, as in fedweit@paper, or be a combination, as in fedprox+ewc."""
    return _resolve(name)[1]


def canonical(name: str) -> str:
    """The name with the parts of a combination in the order that counts."""
    return _resolve(name)[0]


@functools.cache
def _resolve(name: str) -> tuple[str, type[Method]]:
    plain, _, preset = name.partition("@")
    if "+" in preset:
        raise WeftError(f"{name}: a preset stands alone and is no part of a combination")
    names = plain.split("+")
    if len(names) > 1 and "" in names:
        raise WeftError(f"in {name!r} the name of a method is missing; write it as in fedprox+ewc")
    parts = {part: _one(part) for part in names}
    if len(parts) < len(names):
        raise WeftError(f"{plain} names a method twice")
    plain, found = combine(parts) if len(parts) > 1 else (plain, parts[plain])
    if plain in COMBINATIONS:
        found.info = replace(found.info, verified="tests/test_combinations.py: test_a_combination_is_both_of_its_parts")
    if preset and preset not in found.presets:
        hint = nearest(preset, found.presets) if found.presets else "it has none"
        raise WeftError(f"{plain} has no preset {preset!r}; {hint}")
    return (f"{plain}@{preset}" if preset else plain), found


def _one(name: str) -> type[Method]:
    if name.endswith(".py"):
        raise WeftError(f"{name} is a file; name the class in it too, as in {name}:MyMethod")
    if ":" not in name and name not in METHODS:
        known = WRITTEN.get(name.lower()) or nearest(name, METHODS)
        raise WeftError(f"there is no method {name!r}; {known}")
    found = registry.find(METHODS.get(name, name))
    if not isinstance(found, type) or not issubclass(found, Method):
        raise WeftError(f"{name} is no method; it has to be a class derived from weft.methods.method.Method")
    _check_names(found)
    return found


def _check_names(kind: type[Method]) -> None:
    """A misspelled hook would never be called: a user's class has no public names but those of its bases."""
    hooks = [name for name in vars(Method) if not name.startswith("_")]
    for owner in (each for each in kind.__mro__ if issubclass(each, Method) and not _is_ours(each)):
        for name in (each for each in vars(owner) if not each.startswith("_")):
            if not any(hasattr(base, name) for base in owner.__mro__[1:]):
                hint = nearest(name, hooks)
                remedy = hint if hint.startswith("did") else "see docs/add-a-method.md"
                raise WeftError(
                    f"{owner.__name__}.{name} is no hook of a method; {remedy} (a helper's name starts with _)"
                )


def _is_ours(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("weft.")


def state_of(method: Method) -> dict[str, str]:
    """What a method object and its classes hold, to notice a change."""
    found: dict[str, str] = {}
    for each in (method, *getattr(method, "parts", ())):
        found |= {f"{type(each).__name__}.{name}": repr(value) for name, value in vars(each).items()}
        for owner in (owner for owner in type(each).__mro__ if not _is_ours(owner)):
            plain = ((name, value) for name, value in vars(owner).items() if not name.startswith("__"))
            found |= {f"{owner.__name__}.{name}": repr(value) for name, value in plain}
    return found


def check_unchanged(method: Method, before: dict[str, str]) -> None:
    """State in a method object is lost by a resumed run, and is another one in each worker."""
    after = state_of(method)
    for name in (each for each in after if before.get(each) != after[each]):
        raise WeftError(f"{name} changed: a method holds no state; keep it in its Client or Server class")


def parts_of(name: str) -> list[str]:
    """The names of a method's parts, without a preset.

    >>> parts_of("fedprox+ewc"), parts_of("fedweit@paper")
    (['fedprox', 'ewc'], ['fedweit'])
    """
    return name.partition("@")[0].split("+")


def options_of(name: str) -> type[MethodOptions]:
    return class_of(name).Options


def preset_of(name: str, preset: str) -> dict[str, Any]:
    """The plan keys that a preset sets, its method's options among them as `method.NAME`."""
    method = class_of(f"{name}@{preset}" if preset else name)
    return method.presets[preset] if preset else {}


def load(name: str, options: dict[str, Any]) -> Method:
    kind = class_of(name)
    values = kind.Options.model_validate(options)
    return (with_class_heads(kind) if values.heads == "class" else kind)(values)
