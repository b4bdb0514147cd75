from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("flwr") is None:  # `make test-flower` has an environment with Flower
    collect_ignore_glob = ["test_*.py", "loop_grid.py"]

from federation import TINY, Federation, outcome

import weft


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the processes of the session's hub run in one worker, one after another."""
    for item in items:
        if "federation" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("federation"))


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One hub and three sites, TLS and node authentication on."""
    folder: Path = tmp_path_factory.mktemp("federation")
    if "PYTEST_XDIST_WORKER" in os.environ:  # fails if a second worker starts a hub: workers share the parent
        (tmp_path_factory.getbasetemp().parent / "the-only-federation").mkdir()
    found = Federation(folder, ("ada", "ben", "cleo"))
    try:
        found.begin()
        yield found
    finally:
        found.end()


# ---- for the fake grid of loop_grid.py; modules that need Flower are imported where they are used


@pytest.fixture
def quick(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    from weft.flower import engine

    monkeypatch.setattr(engine, "RETRY", 0.01)
    monkeypatch.setattr(engine, "POLL", 0.01)
    monkeypatch.setattr(engine, "REFRESH", 0.0)
    for key, value in {"_run_id": 1, "_node_id": 1, "_task_id": 1}.items():  # a Message reads its sender
        monkeypatch.setattr(TaskIdentity, key, value, raising=False)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return outcome(weft.run(weft.Plan.merge(TINY), tmp_path_factory.mktemp("local") / "run").folder)


@pytest.fixture
def still(monkeypatch):
    """A clock that advances only while the engine sleeps."""
    from weft.flower import engine

    turns = itertools.count()
    clock = SimpleNamespace(moment=0.0, monotonic=lambda: clock.moment)

    def sleep(seconds: float) -> None:
        assert next(turns) < 10**6, "the engine never returns"
        clock.moment += seconds

    clock.sleep = sleep
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(engine, "POLL", 0.25)
    return clock
