"""Mutated requests: a client rejects them before it allocates or changes anything."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from fuzz_helpers import (
    QUICK,
    SMALL,
    STRUCTURED,
    Target,
    mutated,
    not_a_header,
    throw,
    with_header,
    wrong_field,
    wrong_length,
    wrong_size,
)
from helpers import Run, differences, state_bits, tiny

from weft.core.checks import request_fault
from weft.core.client import Runtime, answer
from weft.methods.state import ClientState
from weft.wire.message import Message, MessageError, decode, encode
from weft.wire.tensors import LARGEST, Payload, Rows, Sparse, dense, size


class RequestTarget(Target):
    """A valid request, and the client that receives it."""

    def __init__(self, runtime: Runtime, state: ClientState, wire: bytes):
        self.runtime, self.client = runtime, int(decode(wire).receiver.removeprefix("client-"))
        self.state = copy.deepcopy(state)
        super().__init__(wire)
        self.state, self.bits = state, state_bits(state)

    def open(self, wire: bytes) -> None:
        answer(self.runtime, self.client, self.state, wire)


@pytest.fixture(scope="module")
def requests() -> list[RequestTarget]:
    """The first request of each method's second task, which has all tensors that a client can receive."""
    found = []
    for words in (
        {"method": "fedweit", "method__biases": "shared"},
        {"method": "fedweit", "precision": "int8"},
        {"method": "fedavg", "precision": "half"},
        {"method": "scaffold", "method__keep": 0.05},
        {"method": "fedcurv"},
    ):
        running = Run(tiny(**SMALL, tasks=2, **words)).go_to(1)
        states, before = copy.deepcopy(running.clients), len(running.wires)
        wire = running.go().wires[before]
        client = int(decode(wire).receiver.removeprefix("client-"))
        found.append(RequestTarget(running.runtime, states[client], wire))
    assert {name.partition("/")[0] for target in found for name in decode(target.wire).tensors} == {
        *("weights", "biases", "foreign", "variate", "fisher", "fisher_theta")
    }
    return found


def wrong_shape(target: Target, dice: random.Random) -> bytes:
    """Well-formed tensors of another network."""
    asked = decode(target.wire)
    name = dice.choice(sorted(asked.tensors))
    true = size(asked.tensors[name])
    nothing = (torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    others: list[Payload] = [
        *(Sparse(count, *nothing) for count in (LARGEST, true - 1, true + 1, 2 * true, 0)),
        *(torch.zeros(count) for count in (true - 1, true + 1, 0)),
        Rows(((1, LARGEST),), torch.zeros(1, dtype=torch.bool), torch.zeros(0)),
        Rows(((1, true),), torch.zeros(1, dtype=torch.bool), torch.zeros(0)),
        Rows(((true, 1),), torch.ones(true, dtype=torch.bool), dense(asked.tensors[name])),
        Rows((), torch.zeros(0, dtype=torch.bool), torch.zeros(0)),
    ]
    asked.tensors[name] = dice.choice(others)
    return encode(asked, target.header["precision"])


def strange_tensor(target: Target, dice: random.Random) -> bytes:
    """An unknown tensor that is larger than the network."""
    asked = decode(target.wire)
    nothing = (torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    asked.tensors[dice.choice(["theta", "foreign/9.9", "a/b"])] = Sparse(dice.choice([LARGEST, 2**30, 10**6]), *nothing)
    return encode(asked, target.header["precision"])


def strange_request(target: Target, dice: random.Random) -> bytes:
    """For another client, about an unknown task, or with an unknown operation."""
    header = copy.deepcopy(target.header)
    key, values = dice.choice(
        [
            ("sender", ["x", "client-0", "", 5]),
            ("receiver", ["client-9", "server", "client-", None]),
            ("task", [-1, 2, 99, 2**31 - 1, 2**40, "1", 0.5]),
            ("ops", [["rm"], ["train", "train"], ["begin", "__class__"], "train", [5], {}]),
            ("precision", ["pickle", None, 8]),
            ("tensors", [[], {}, None]),
            ("fields", [[], None, "x"]),
        ]
    )
    header[key] = dice.choice(values)
    return with_header(target, header)


ASKING = [wrong_shape, strange_tensor, strange_request, wrong_field, wrong_size, wrong_length, not_a_header]


@pytest.mark.parametrize("count", [QUICK, pytest.param(STRUCTURED, marks=pytest.mark.long)])
def test_requests(requests, count):
    """Rejected before the state of the client changes."""
    throw(requests, count, lambda target, dice: dice.choice(ASKING)(target, dice))
    throw(requests, count, lambda target, dice: mutated(target.wire, dice))
    for target in requests:
        assert differences(state_bits(target.state), target.bits) == []


@pytest.mark.parametrize("name", ["weights", "foreign/1.0", "theta"])
def test_a_small_request_that_claims_gigabytes(requests, name):
    target = requests[0]
    huge = Sparse(LARGEST, torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    words = ("server", f"client-{target.client}", "1.0.0", ("begin", "receive"), 1, 0)
    wire = encode(Message(*words, {name: huge}, {"foreign": []}))
    assert len(wire) < 300
    with pytest.raises(MessageError, match=r"has 2,147,483,647 values|is not one of this method"):
        target.open(wire)


def test_checking_a_request_is_fast(requests):
    target = requests[0]
    asked, runtime = decode(target.wire), target.runtime
    layout, classes = runtime.context(0, 0).layout, [list(runtime.class_ids(target.client, 0))]
    began = time.perf_counter()
    for _ in range(100):
        assert request_fault(asked, target.client, runtime.method, layout, classes) == ""
    assert time.perf_counter() - began < 0.1  # a millisecond each, and it takes a tenth of one
