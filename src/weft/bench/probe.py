"""Where the time of a run goes, measured from outside: functions of the engine are wrapped while a run lasts.

All that is wrapped stands in POINTS. A wrapped function's time, without that of wrapped functions which it calls, is
its part's; what the loop does besides is `rest`. Validation is part of training, so a measure inside of it stays there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

WHOLE = "weft.core.loop:Federation.run"
HOOKS = "weft.methods.fedweit.fedweit:FedWeIT"
POINTS: dict[str, tuple[str, ...]] = {
    "training": ("weft.core.client:train_round",),
    "encoding": (
        "weft.core.client:encode",
        "weft.core.client:decode",
        "weft.core.loop:encode",
        "weft.core.checks:decode",
        "weft.wire.ledger:weigh",
    ),
    # also a round's copy from the state into fast memory and back (open, close), though it happens within training
    "state": (
        *(f"{HOOKS}.{hook}" for hook in ("join", "begin", "receive", "open", "close", "contribute", "finish", "give")),
        "weft.core.storage:State.save",
        "weft.core.storage:State.load",
        "weft.core.storage:Archive.spill",
        "weft.runs.session:Session.save",
        "weft.engines.host:give_back_memory",
    ),
    "evaluation": ("weft.core.client:test", "weft.networks.flat:Network.measure"),
    "aggregation": tuple(f"{HOOKS}.{hook}" for hook in ("aggregate", "brief", "collect")),
    "images": ("weft.scenarios.glyphs:_load",),  # drawn when a task begins
}
KEEPS = {"training": ("evaluation",), "evaluation": ()}  # what stays part of it when it happens inside


class Probe:
    """Seconds and calls of each part."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys([*POINTS, "rest"], 0.0)
        self.calls: dict[str, int] = dict.fromkeys(
            [WHOLE, *(point for points in POINTS.values() for point in points)], 0
        )
        self._open: list[str] = []  # the parts we are in, innermost last
        self._since = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(patched(WHOLE, functools.partial(self._wrap, "rest", WHOLE)))
            for part, points in POINTS.items():
                for point in points:
                    stack.enter_context(patched(point, functools.partial(self._wrap, part, point)))
            yield

    def _wrap(self, part: str, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **words: Any) -> Any:
            self.calls[point] += 1
            inside = self._open[-1] if self._open else None
            if inside is None and part != "rest":  # before or after the loop
                return function(*arguments, **words)
            self._switch()
            self._open.append(inside if inside in KEEPS and part in KEEPS[inside] else part)
            try:
                return function(*arguments, **words)
            finally:
                self._switch()
                self._open.pop()

        return timed

    def _switch(self) -> None:
        """The time since the last switch goes to the innermost part."""
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def patched(point: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """`module:name` or `module:Class.name` replaced by what `wrap` makes of it, and put back."""
    module, _, path = point.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    found = inspect.getattr_static(owner, name)
    own = name in vars(owner)  # a method may be inherited; then nothing of it is left behind
    static = isinstance(found, staticmethod)
    wrapped = wrap(found.__func__ if static else found)
    setattr(owner, name, staticmethod(wrapped) if static else wrapped)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, found)
        else:
            delattr(owner, name)
