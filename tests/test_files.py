"""Checks whether another process uses a folder, without acquiring its lock."""

from __future__ import annotations

import filelock
import pytest

from weft import files


@pytest.fixture
def lock(tmp_path):
    path = tmp_path / ".lock"
    path.touch()
    return path


def test_a_lock_is_seen_while_it_is_held(lock):
    assert files.is_held(lock) is False
    assert not files.is_taken(lock)
    with filelock.FileLock(lock):
        assert files.is_held(lock)
        assert files.is_taken(lock)
    assert not files.is_taken(lock)


def test_a_lock_of_another_file_is_not_this_one(lock, tmp_path):
    with filelock.FileLock(tmp_path / "other"):
        assert files.is_held(lock) is False


def test_what_is_not_there_is_not_held(tmp_path):
    assert files.is_held(tmp_path / ".lock") is None
    assert not files.is_taken(tmp_path / ".lock")
    assert list(tmp_path.iterdir()) == []  # and to look makes nothing


def test_to_look_takes_nothing(lock, monkeypatch):
    monkeypatch.setattr(filelock, "FileLock", None)
    assert not files.is_taken(lock)


def test_where_no_locks_are_listed_it_is_tried(lock, monkeypatch):
    monkeypatch.setattr(files, "is_held", lambda _: None)
    assert not files.is_taken(lock)
    with filelock.FileLock(lock):
        assert files.is_taken(lock)
