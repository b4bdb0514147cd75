"""Typed state on disk: what a dataclass may hold, and that it comes back bit for bit."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import differences, state_bits, vector

from weft.core import storage
from weft.errors import WeftError
from weft.methods.state import Table, TaskState
from weft.wire.tensors import Sparse


@dataclass
class Example:
    tensor: Any = field(default_factory=lambda: torch.empty(0))
    by_name: dict[str, Any] = field(default_factory=dict)
    by_number: dict[int, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    count: int | None = None
    tasks: Table[int, TaskState] = field(default_factory=Table)
    wire: bytes = b""


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = Example(vector(1, -0.0), {"a": vector(2), "b": Sparse.of(vector(0, 3))}, {7: vector(4)}, ["x"], 5)
    state.tasks.entry, state.wire = TaskState, b"\x00\xff"
    state.tasks[3] = TaskState(vector(6))
    reference = json.loads(json.dumps(storage.save(state, tmp_path, "it")))
    again = Example()
    again.tasks.entry = TaskState
    again = storage.load(again, tmp_path, reference)
    assert differences(state_bits(state), state_bits(again)) == []
    assert storage.files_of(reference) == {path.name for path in tmp_path.iterdir()}


def test_tensors_that_share_memory_are_saved_apart(tmp_path):
    whole = vector(1, 2, 3)
    again = storage.load(Example(), tmp_path, storage.save(Example(whole, {"part": whole[:2]}), tmp_path, "it"))
    assert again.by_name["part"].tolist() == [1, 2]
    assert again.tensor.tolist() == [1, 2, 3]


@pytest.mark.parametrize("wrong", [{"deep": {"er": torch.ones(1)}}, {"deep": [torch.ones(1)]}])
def test_tensors_that_would_be_lost_are_refused(tmp_path, wrong):
    with pytest.raises(WeftError, match=r"by_name.*dictionary of tensors"):
        storage.save(Example(by_name=wrong), tmp_path, "it")
    with pytest.raises(WeftError, match=r"words.*dictionary of tensors"):
        storage.save(Example(words=[torch.ones(1)]), tmp_path, "it")
