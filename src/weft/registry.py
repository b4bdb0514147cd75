"""Things by name: "package.module:Name" or "path/to/file.py:Name".

A plan is plain words, and so is what a worker process is told: this is how both can name a class or function that
somebody wrote. Nothing is pickled; whoever needs the thing imports it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.errors import WeftError, nearest

PRIVATE = "weft_file_"  # with a digest of the path behind it: two files called net.py are two modules
_loading: set[str] = set()


def find(reference: str) -> Any:
    """What a reference names; a module or file is loaded once in a process.

    >>> find("weft.errors:WeftError").__name__
    'WeftError'
    """
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise WeftError(f"{reference!r} cannot be looked up; write package.module:Name or path/to/file.py:Name")
    module = _file(Path(place)) if place.endswith(".py") else _module(place, name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise WeftError(f"{place} has no {name}{_hint(part, module)}")
        found = getattr(found, part)
    return found


def reference(thing: Any) -> str:
    """The words by which `find` gets a class or function again, in this process or another.

    >>> reference(WeftError)
    'weft.errors:WeftError'
    """
    name, home = getattr(thing, "__qualname__", None), getattr(thing, "__module__", None)
    if not isinstance(name, str) or not isinstance(home, str) or "<" in name:  # <lambda>, f.<locals>.g
        raise WeftError(f"{name or thing!r} cannot be named; define it with class or def at the top of a module")
    module = sys.modules.get(home)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not thing:
        raise WeftError(f"{home}:{name} is something else than what was given; define it at the top of a module")
    if home != "__main__" and not home.startswith(PRIVATE):
        return f"{home}:{name}"
    file = getattr(module, "__file__", None)
    if file is None:  # a notebook or a prompt: no other process can read what was typed there
        raise WeftError(f"{name} was typed in; put it into a file, which other processes can load")
    return f"{Path(file).resolve()}:{name}"


@functools.cache
def installed(group: str) -> dict[str, str]:
    """What installed packages offer: the names of an entry point group such as weft.methods, each with its reference.

    >>> installed("weft.nothing")
    {}
    """
    return {point.name: point.value for point in importlib.metadata.entry_points(group=group)}


def spelled_out(name: str, group: str) -> str:
    """The reference of an entry point, by which any process finds it; any other name as it is."""
    return installed(group).get(name, name)


def told(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _module(place: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except WeftError:
        raise
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (place == missing or place.startswith(f"{missing}.")):
            raise WeftError(
                f"there is no module {place} on Python's path; install it, or name its file: path/to/file.py:{name}"
            ) from None
        raise WeftError(f"{place} cannot be imported: {told(error)}") from error


def _file(path: Path) -> ModuleType:
    whole = path.expanduser().resolve()
    main = sys.modules.get("__main__")
    if main is not None and Path(getattr(main, "__file__", None) or "/").resolve() == whole:
        return main  # the running script: a second copy would run it again, and its classes would be other classes
    name = PRIVATE + hashlib.blake2b(str(whole).encode(), digest_size=8).hexdigest()
    if name in _loading:  # a script that starts a run, loaded by the workers of that run
        raise WeftError(f'{path} runs itself while it is being loaded; put that under if __name__ == "__main__":')
    if name in sys.modules:
        return sys.modules[name]
    if not whole.is_file():
        raise WeftError(f"there is no file {whole}; a path is from the current folder, or absolute")
    specification = importlib.util.spec_from_file_location(name, whole)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    if str(whole.parent) not in sys.path:
        sys.path.append(str(whole.parent))  # what lies beside the file can be imported, as beside a script
    sys.modules[name] = module
    _loading.add(name)
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, WeftError):
            raise
        raise WeftError(f"{path} cannot be loaded: {told(error)}") from error
    finally:
        _loading.discard(name)
    return module


def _hint(word: str, module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    return f"; {nearest(word, own)}" if own else ", and defines nothing else"


def short(method: str) -> str:
    """A method's name without the path of the file that it is in.

    >>> short("fedavg+/home/me/mine.py:Mine")
    'fedavg+Mine'
    """
    return "+".join(part.rpartition(":")[2] for part in method.split("+"))
