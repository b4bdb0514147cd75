"""Torch and numpy take long to load, and a run folder must be there before: so they are named without being loaded."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class lazy(ModuleType):  # noqa: N801 - used like a function
    """A stand-in for a module that is loaded when something of it is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)
