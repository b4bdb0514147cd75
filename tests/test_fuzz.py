"""Mutated replies: decode and the checks of replies reject them, fast and in little memory."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any

import pytest
import torch
from fuzz_helpers import (
    HUGE,
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
from helpers import Run, tiny

from weft.core.checks import RejectedReply, ReplyChecks
from weft.core.progress import Pending
from weft.core.schedule import Assignment
from weft.wire.codec import BLOCK, HIGHEST
from weft.wire.message import Message, decode, encode

RANDOM = 100_000


class ReplyTarget(Target):
    """A valid reply, its request, and the checks."""

    def __init__(self, checks: ReplyChecks, wire: bytes, request: Message):
        client = int(request.receiver.removeprefix("client-"))
        assignment = Assignment(client, request.task, request.round, request.ops, exchanges=True)
        self.checks, self.client = checks, client
        self.pending = {assignment.request_id: Pending(assignment, 0, 0, 0.0, request.fields)}
        super().__init__(wire)

    def open(self, wire: bytes) -> Message:
        return self.checks.open(wire, self.client, self.pending)[0]


@pytest.fixture(scope="module")
def targets() -> list[ReplyTarget]:
    found = []
    for words in (
        {"method": "fedweit"},
        {"method": "fedweit", "precision": "half"},
        {"method": "fedweit", "precision": "int8"},
        {"method": "fedavg"},
        {"method": "fedavg", "method__keep": 0.05},
    ):
        finished = Run(tiny(**SMALL, tasks=1, metrics="recall,balanced", **words)).go()
        found.append(ReplyTarget(finished.checks, finished.wires[1], finished.requests[0]))
    return found


# ---- random mutations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [QUICK, pytest.param(RANDOM, marks=pytest.mark.long)])
def test_random_mutations(targets, count):
    throw(targets, count, lambda target, dice: mutated(target.wire, dice))


# ---- mutations with a valid checksum ---------------------------------------------------------------------------------


def wrong_key(target: Target, dice: random.Random) -> bytes:
    """A key of the header with a different value."""
    header = copy.deepcopy(target.header)
    key = dice.choice(["sender", "receiver", "request_id", "task", "round", "ops", "precision", "fields", "tensors"])
    header[key] = dice.choice([value for value in [*HUGE, "x", {}, ["train"]] if value != header[key]])
    if header["tensors"] == []:  # a client that has stopped may send none, but then there are no bytes
        return with_header(target, header)
    if header["fields"] == {}:
        header["task"] += 1
    return with_header(target, header)


def wrong_kind(target: Target, dice: random.Random) -> bytes:
    """Another encoding, another name, a tensor twice, or one too many."""
    header = copy.deepcopy(target.header)
    place = dice.randrange(len(header["tensors"]))
    described = header["tensors"][place]
    kind = dice.randrange(4)
    if kind == 0:
        others = {"dense", "rows", "sparse-gaps", "sparse-mask", "pickle", ""} - {described["encoding"]}
        described["encoding"] = dice.choice(sorted(others))
    elif kind == 1:
        described["name"] = dice.choice(["", "theta", "header", "base\n", "x" * 300, "base" * (place + 2)])
    elif kind == 2:
        header["tensors"].append(copy.deepcopy(described))
    else:
        header["tensors"].reverse()
        if len(header["tensors"]) == 1:
            header["tensors"] = []
    return with_header(target, header)


def wrong_values(target: Target, dice: random.Random) -> bytes:
    """NaN, an infinity, or values beyond any training, in the last tensor of the payload."""
    if target.header["precision"] == "int8":
        return wrong_bytes(target, dice)
    width, form = (2, "<e") if target.header["precision"] == "half" else (4, "<f")
    payload = bytearray(target.payload)
    kind = dice.randrange(4)
    value = [float("nan"), float("inf"), float("-inf"), 60_000.0 if width == 2 else 3e38][kind]
    count = 1 if kind < 3 else 3
    for place in range(count):
        payload[len(payload) - (place + 1) * width : len(payload) - place * width] = struct.pack(form, value)
    return with_header(target, target.header, bytes(payload))


def wrong_bytes(target: Target, dice: random.Random) -> bytes:
    """The same for int8, which has no NaN: the largest exponent, one beyond it, or an unused byte."""
    *_, last = decode(target.wire).tensors.values()
    count = len(last if isinstance(last, torch.Tensor) else last.values)
    blocks = -(-count // BLOCK)
    payload = bytearray(target.payload)
    block, kind = dice.randrange(blocks), dice.randrange(3)
    exponent = len(payload) - count - blocks + block
    begin = len(payload) - count + BLOCK * block
    end = min(begin + BLOCK, len(payload))
    payload[exponent] = HIGHEST + (kind == 1)
    payload[begin:end] = bytes([127]) * (end - begin)
    if kind == 2:
        payload[dice.randrange(begin, end)] = 128  # -128
    return with_header(target, target.header, bytes(payload))


def wrong_index(target: Target, dice: random.Random) -> bytes:
    """Bytes of an index, or of a mask of rows, that point elsewhere."""
    payload = bytearray(target.payload)
    for place in range(dice.randrange(4, 12)):  # the first tensor's index, or in a dense tensor its first values
        payload[place] = 255
    if target.header["tensors"][0]["encoding"] == "dense":
        payload[:8] = b"\xff" * 8  # NaN
    return with_header(target, target.header, bytes(payload))


def wrong_reply_field(target: Target, dice: random.Random) -> bytes:
    """A field that a client reports."""
    header = copy.deepcopy(target.header)
    name = dice.choice(sorted(header["fields"]))
    wrong = ["9", "<b>x", [2.0], [1.0] * 50, [None], {}, {"bytes": -1}]
    if name in ("examples", "accuracy", "size", "images", "density", "metrics", "stopped"):
        wrong += [-1, 0.5, None, 10**17]
    header["fields"][name] = dice.choice(wrong)
    if dice.random() < 0.2:
        deep: Any = 0
        for _ in range(dice.choice([40, 500])):
            deep = [deep]
        header["fields"]["deep"] = deep
    return with_header(target, header)


WAYS = [wrong_key, wrong_field, wrong_size, wrong_kind, wrong_values, wrong_index, wrong_length, wrong_reply_field]
WAYS += [not_a_header]


@pytest.mark.parametrize("count", [QUICK, pytest.param(STRUCTURED, marks=pytest.mark.long)])
def test_structured_mutations(targets, count):
    throw(targets, count, lambda target, dice: dice.choice(WAYS)(target, dice))


def test_every_field_of_a_reply_is_checked(targets):
    for target in targets:
        assert {"valid_accuracy", "valid_loss", "train_loss", "rate", "metrics"} <= target.header["fields"].keys()
        for name in target.header["fields"]:
            header = {**target.header, "fields": {**target.header["fields"], name: "high"}}
            with pytest.raises(RejectedReply, match=name):
                target.open(with_header(target, header))


def test_impossible_values_are_rejected_for_what_they_are(targets):
    """In every precision, and not because a length is wrong."""
    dice, said = random.Random(1), {target.header["precision"]: set() for target in targets}
    for number in range(200):
        target = targets[number % len(targets)]
        with pytest.raises(RejectedReply) as caught:
            target.open(wrong_values(target, dice))
        text = str(caught.value)
        said[target.header["precision"]] |= {word for word in ("max_update_norm", "finite", "int8") if word in text}
    assert said == {
        "float32": {"max_update_norm", "finite"},
        "half": {"max_update_norm", "finite"},
        "int8": {"max_update_norm", "int8"},
    }


def test_an_unchanged_message_with_a_new_checksum_passes(targets):
    """Otherwise the tests above would pass because of a wrong checksum."""
    for target in targets:
        assert with_header(target, target.header) == target.wire
        target.open(with_header(target, target.header))


def test_an_error_reply_has_nothing_else(targets):
    """Its tensors would be counted and kept."""
    target = targets[0]
    ids = (f"client-{target.client}", "server", next(iter(target.pending)), (), 0, 0)
    assert target.open(encode(Message(*ids, error="disk full"))).error == "disk full"
    many = {f"=x{number}": torch.ones(1) for number in range(100)}
    for more in ({"tensors": many}, {"fields": {"images": 3}}):
        with pytest.raises(RejectedReply, match="failure"):
            target.open(encode(Message(*ids, error="disk full", **more)))
