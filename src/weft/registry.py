"""User-defined classes and functions by name, and the options that a plan can give them.

A name is "package.module:Name", "path/to/file.py:Name" or an entry point of an installed package. Plans and worker
processes pass names only: nothing is pickled, each process imports what it needs.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from weft.errors import WeftError, nearest

FILE_MODULE = "weft_file_"  # followed by a digest of the path: two files called net.py are two modules
Statistics = Literal["own", "shared"]  # of batch norm: kept per task, or averaged by the server
SCENARIO_ARGUMENTS = ("clients", "tasks", "seed")
# an annotation may be the type or, after `from __future__ import annotations`, its name
_CHECKED_TYPES = {"bool": bool, "int": int, "float": float, "str": str}
_loading: set[str] = set()


class StrictModel(BaseModel):
    """Base of a plan and its options: no unknown key, no conversion of types, no NaN, no change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)


def find(reference: str) -> Any:
    """Load what a reference names; a module or file is loaded once per process.

    >>> find("weft.errors:WeftError").__name__
    'WeftError'
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise WeftError(f"{reference!r} is not a reference; write package.module:Name or path/to/file.py:Name")
    try:
        module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except WeftError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (source == missing or source.startswith(f"{missing}.")):
            remedy = f"install it, or name its file: path/to/file.py:{name}"
            raise WeftError(f"there is no module {source} on Python's path; {remedy}") from None
        raise WeftError(f"{source} cannot be loaded: {error_line(error)}") from error
    value: Any = module
    for attribute in name.split("."):
        if not hasattr(value, attribute):
            public = {key: item for key, item in vars(module).items() if not key.startswith("_")}
            defined = [key for key in public if getattr(public[key], "__module__", None) == module.__name__]
            hint = f"; {nearest(attribute, defined)}" if defined else ", and defines nothing else"
            raise WeftError(f"{source} has no {name}{hint}")
        value = getattr(value, attribute)
    return value


def reference(value: Any) -> str:
    """Return the name by which `find` loads a class or function, in this process or another.

    >>> reference(WeftError)
    'weft.errors:WeftError'
    """
    name, home = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(home, str) or "<" in name:  # <lambda>, f.<locals>.g
        raise WeftError(f"{name or value!r} has no name in a module; define it at the top of a module")
    module = sys.modules.get(home)
    defined: Any = module
    for attribute in name.split("."):
        defined = getattr(defined, attribute, None)
    if defined is not value:
        raise WeftError(f"{home}:{name} is a different object; define it at the top of a module")
    if home != "__main__" and not home.startswith(FILE_MODULE):
        return f"{home}:{name}"
    file = getattr(module, "__file__", None)
    if file is None:  # defined in a notebook or a prompt, which no other process can import
        raise WeftError(f"{name} is defined interactively; move it to a file, so that other processes can import it")
    return f"{Path(file).resolve()}:{name}"


@functools.cache
def installed(group: str) -> dict[str, str]:
    """Entry points of installed packages in a group such as weft.methods, each with its reference.

    >>> installed("weft.nothing")
    {}
    """
    return {point.name: point.value for point in importlib.metadata.entry_points(group=group)}


def full_name(name: str, group: str) -> str:
    """Replace an entry point by its reference, and the path of a file by its absolute path; keep any other name."""
    name = installed(group).get(name, name)
    file, colon, attribute = name.rpartition(":")
    return f"{Path(file).resolve()}:{attribute}" if colon and file.endswith(".py") else name


def short(method: str) -> str:
    """Strip paths and modules from a method's name.

    >>> short("fedavg+/home/me/mine.py:Mine")
    'fedavg+Mine'
    """
    return "+".join(part.rpartition(":")[2] for part in method.split("+"))


def error_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _load_file(path: Path) -> ModuleType:
    file = path.expanduser().resolve()
    main = sys.modules.get("__main__")
    if main is not None and Path(getattr(main, "__file__", None) or "/").resolve() == file:
        return main  # the running script: a second copy would run it again and define its classes twice
    name = FILE_MODULE + hashlib.blake2b(str(file).encode(), digest_size=8).hexdigest()
    if name in _loading:  # a script that starts a run, loaded by the workers of that run
        raise WeftError(f'{path} runs itself while it is imported; put that code under if __name__ == "__main__":')
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise WeftError(f"there is no file {file}; give a path relative to the current folder, or an absolute one")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # a file can import its neighbors, as a script can
    sys.modules[name] = module
    _loading.add(name)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # it may be repaired and loaded again
        raise
    finally:
        _loading.discard(name)
    return module


# ---- options from a signature ----------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def options_from(maker: Any, kind: Literal["network", "scenario"] = "network") -> type[BaseModel]:
    """Build a pydantic model of `maker`'s keyword arguments.

    Every network has the option `statistics` as well. A scenario gets the plan's clients, tasks and seed, which are
    not options.
    """
    try:
        parameters = dict(inspect.signature(maker).parameters)
    except (TypeError, ValueError):
        raise WeftError(f"{maker!r} is not a class or function that makes a {kind}") from None
    fields: dict[str, Any] = {"statistics": (Statistics, "own")} if kind == "network" else {}
    for name in SCENARIO_ARGUMENTS if kind == "scenario" else ():
        if name not in parameters:
            raise WeftError(f"it has no argument {name!r}; a scenario takes {', '.join(SCENARIO_ARGUMENTS)}")
        del parameters[name]
    extra: Literal["allow", "forbid"] = "forbid"
    for name, parameter in parameters.items():
        if name in fields or name == "name":  # `name` in the section of a plan names the component
            raise WeftError(f"its argument {name!r} has the name of an option that every {kind} has; rename it")
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = "allow"
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is parameter.POSITIONAL_ONLY or name.startswith("_"):
            if parameter.default is parameter.empty:
                raise WeftError(f"its argument {name!r} cannot be given as {kind}.{name}; give it a default")
        elif _is_json(parameter.default):
            fields[name] = _field(parameter)  # a default such as nn.GELU, which no plan can spell, is not an option
    config = ConfigDict(extra=extra, frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an option may be called `copy`, like a method of BaseModel
        options: type[BaseModel] = create_model("Options", __config__=config, **fields)
    options.__doc__ = inspect.getdoc(maker)  # shown by `weft list`
    return options


def _field(parameter: inspect.Parameter) -> tuple[Any, Any]:
    default = ... if parameter.default is parameter.empty else parameter.default
    annotation = getattr(parameter.annotation, "__name__", parameter.annotation)
    if isinstance(annotation, str) and annotation in _CHECKED_TYPES:
        return _CHECKED_TYPES[annotation], default
    if isinstance(default, tuple):
        return Annotated[tuple[Any, ...], Field(strict=False)], default  # TOML has lists only
    return Any, default


def _is_json(default: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        return default is inspect.Parameter.empty or bool(json.dumps(default, allow_nan=False))
    return False
