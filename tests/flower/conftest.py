from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("flwr") is None:  # make test-flower has an environment with Flower in it
    collect_ignore_glob = ["test_*.py"]

from federation import Federation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the processes of the session's hub runs in one worker, one after another; all else meanwhile."""
    for item in items:
        if "federation" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("federation"))


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One hub and three sites, TLS and node authentication on."""
    folder: Path = tmp_path_factory.mktemp("federation")
    found = Federation(folder, ("ada", "ben", "cleo"))
    try:
        found.begin()
        yield found
    finally:
        found.end()
