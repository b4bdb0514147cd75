"""A result depends only on its plan: not on workers, memory, or how often it was saved."""

import pytest
from cli_helpers import assert_same_result, stop_after, tiny

import weft
from weft.engines.host import ClientHost

pytest_plugins = ["cli_helpers"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bits(tmp_path, finished, workers):
    result = weft.run(tiny(), tmp_path / "run", workers=workers)
    assert_same_result(result.folder, finished)


@pytest.mark.parametrize("method", ["fedavg", "stl"])
def test_a_repeated_run_gives_the_same_bits(tmp_path, method):
    for name in ("one", "two"):
        weft.run(tiny(method=method), tmp_path / name, memory=512 if name == "one" else 1)
    assert_same_result(tmp_path / "two", tmp_path / "one")


def test_states_on_disk_give_the_same_bits(tmp_path, finished):
    """One megabyte holds hardly one state; the others are on disk."""
    result = weft.run(tiny(), tmp_path / "run", memory=1)
    assert_same_result(result.folder, finished)


def test_states_on_disk_do_not_accumulate_between_checkpoints(tmp_path, finished, monkeypatch):
    """A state replaces the one before it, unless the last checkpoint names that."""
    most: dict[int, int] = {}

    class Watched(ClientHost):
        def answer(self, client, wire):
            reply = super().answer(client, wire)
            states = [path for path in self._folder.glob(f"client-{client:04d}@*") if path.name.count(".") == 1]
            most[client] = max(most.get(client, 0), len(states))
            return reply

    monkeypatch.setattr("weft.runs.session.ClientHost", Watched)
    monkeypatch.setattr("weft.engines.host.MEGABYTE", 0)  # nothing stays in memory
    result = weft.run(tiny(), tmp_path / "run", save_every=1000.0)
    assert set(most.values()) == {1}
    assert_same_result(result.folder, finished)


@pytest.mark.slow
@pytest.mark.parametrize("replies", [4, 7, 10])
def test_a_checkpoint_survives_states_that_are_written_after_it(tmp_path, finished, monkeypatch, replies):
    monkeypatch.setattr("weft.engines.host.MEGABYTE", 0)
    stop_after(tmp_path / "run", replies)
    assert_same_result(weft.resume(tmp_path / "run", save_every=1000.0).folder, finished)


def test_saving_often_changes_nothing(tmp_path, finished, monkeypatch):
    monkeypatch.setattr("weft.runs.session.SAVE_SHARE", 0)
    result = weft.run(tiny(), tmp_path / "run", save_every=0)
    assert_same_result(result.folder, finished)


def test_another_seed_gives_another_result(tmp_path, finished):
    """Otherwise the tests above could pass with constants."""
    result = weft.run(tiny(seed=1), tmp_path / "run")
    with pytest.raises(AssertionError):
        assert_same_result(result.folder, finished)
