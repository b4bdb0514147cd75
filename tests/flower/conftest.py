from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("flwr") is None:  # make test-flower has an environment with Flower in it
    collect_ignore_glob = ["test_*.py"]

from federation import Federation


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
