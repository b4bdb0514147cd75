"""Modules that load on first use: `from weft.lazy import np, torch`.

Torch and numpy load slowly. The command line and the creation of a run folder do not wait for them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any


class lazy(ModuleType):  # noqa: N801 - used like a function
    """Placeholder for a module that is imported when an attribute is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:
    import numpy as np
    import torch
else:
    np, torch = lazy("numpy"), lazy("torch")

__all__ = ["lazy", "np", "torch"]
