from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("flwr") is None:  # make test-flower has an environment with Flower in it
    collect_ignore_glob = ["test_*.py", "loop_grid.py"]

from federation import Federation, outcome

import weft


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the processes of the session's hub runs in one worker, one after another; all else meanwhile."""
    for item in items:
        if "federation" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("federation"))


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One hub and three sites, TLS and node authentication on."""
    folder: Path = tmp_path_factory.mktemp("federation")
    if "PYTEST_XDIST_WORKER" in os.environ:  # then workers share the parent: fails if the group was not kept together
        (tmp_path_factory.getbasetemp().parent / "the-only-federation").mkdir()
    found = Federation(folder, ("ada", "ben", "cleo"))
    try:
        found.begin()
        yield found
    finally:
        found.end()


# ---- for the stand-in grid of loop_grid.py; what needs Flower is imported where it is used


@pytest.fixture
def quick(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    from weft.flower import engine

    monkeypatch.setattr(engine, "ASK_AGAIN", 0.01)
    monkeypatch.setattr(engine, "POLL", 0.01)
    monkeypatch.setattr(engine, "LOOK", 0.0)
    monkeypatch.delenv("WEFT_SITE", raising=False)
    for key, value in {"_run_id": 1, "_node_id": 1, "_task_id": 1}.items():  # a Message asks who sends it
        monkeypatch.setattr(TaskIdentity, key, value, raising=False)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    from loop_grid import TINY

    return outcome(weft.run(weft.Plan.merge(TINY), tmp_path_factory.mktemp("local") / "run").folder)


@pytest.fixture
def still(monkeypatch):
    from weft.flower import engine

    turns = itertools.count()
    clock = SimpleNamespace(moment=0.0, monotonic=lambda: clock.moment)

    def sleep(seconds: float) -> None:
        assert next(turns) < 10**6, "it never ends"
        clock.moment += seconds

    clock.sleep = sleep
    monkeypatch.setattr(engine, "time", clock)
    return clock
