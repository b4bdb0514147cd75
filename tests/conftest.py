"""Fixtures of all tests, and a red line at the end for each missing package or browser that skipped some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from skips import LOUD


@pytest.fixture(autouse=True)
def denormal_floats() -> Iterator[None]:
    """Undo set_flush_denormal: a worker flushes denormal numbers to 0, and hypothesis needs them."""
    _keep_denormals()
    yield
    _keep_denormals()


def _keep_denormals() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_flush_denormal(False)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """What each client held when its last task ended, just before it put away what only a task under way needs."""
    from weft.methods.fedweit.apd import APD

    found: dict[int, dict[str, Any]] = {}
    end_task = APD.end_task

    def keeping(method: Any, client: Any, ctx: Any) -> None:
        found[ctx.client] = dict(vars(client))
        end_task(method, client, ctx)

    monkeypatch.setattr(APD, "end_task", keeping)
    return found


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()) if report.longrepr]
    for reason in sorted({reason.partition(LOUD)[2] for reason in reasons if LOUD in reason}):
        count = sum(LOUD + reason in each for each in reasons)
        terminalreporter.write_sep("!", f"NOT TESTED ({count}): {reason}", red=True, bold=True)
