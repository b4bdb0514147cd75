"""Against decode and the checks behind it: whatever a stranger sends is refused, quickly and in little memory."""

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

from weft.core.checks import Inspector, Refused
from weft.core.schedule import Visit
from weft.wire.codec import BLOCK, HIGHEST
from weft.wire.message import Message, decode, encode

RANDOM = 100_000


class Answer(Target):
    """A right answer, its request, and the inspector."""

    def __init__(self, inspector: Inspector, wire: bytes, visit: Visit):
        self.inspector, self.visit = inspector, visit
        super().__init__(wire)

    def open(self, wire: bytes) -> None:
        self.inspector.open(wire, self.visit.client, {self.visit.request_id: self.visit})


@pytest.fixture(scope="module")
def targets() -> list[Answer]:
    found = []
    for words in (
        {"method": "fedweit"},
        {"method": "fedweit", "precision": "half"},
        {"method": "fedweit", "precision": "int8"},
        {"method": "fedavg"},
        {"method": "fedavg", "method__keep": 0.05},
    ):
        finished = Run(tiny(**SMALL, tasks=1, metrics="recall,balanced", **words)).go()
        request = finished.requests[0]
        visit = Visit(int(request.receiver.removeprefix("client-")), request.task, request.round, request.ops, True)
        found.append(Answer(finished.inspector, finished.wires[1], visit))
    return found


# ---- random mutations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [QUICK, pytest.param(RANDOM, marks=pytest.mark.long)])
def test_random_mutations(targets, count):
    throw(targets, count, lambda target, dice: mutated(target.wire, dice))


# ---- mutations with a valid checksum, each of which is wrong for a reason of its own ---------------------------------


def wrong_word(target: Target, dice: random.Random) -> bytes:
    """A field of the header that is not what it was."""
    header = copy.deepcopy(target.header)
    key = dice.choice(["sender", "receiver", "request_id", "task", "round", "ops", "precision", "fields", "tensors"])
    header[key] = dice.choice([value for value in [*HUGE, "x", {}, ["train"]] if value != header[key]])
    if header["tensors"] == []:  # a client that has stopped learning may send none; but then no bytes are left over
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
    """NaN, an infinity, or values that no training gives; the last tensor's values are the payload's end."""
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
    """The same for int8, which knows no NaN: the largest exponent, one beyond it, or a byte that is not used."""
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
    """Bytes of an index, or of a mask of rows, that point elsewhere; what is not there is claimed."""
    payload = bytearray(target.payload)
    for place in range(dice.randrange(4, 12)):  # the first tensor's index, or in a dense tensor its first values
        payload[place] = 255
    if target.header["tensors"][0]["encoding"] == "dense":
        payload[:8] = b"\xff" * 8  # NaN
    return with_header(target, target.header, bytes(payload))


def wrong_number(target: Target, dice: random.Random) -> bytes:
    """What a client says of its work."""
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


WAYS = [wrong_word, wrong_field, wrong_size, wrong_kind, wrong_values, wrong_index, wrong_length, wrong_number]
WAYS += [not_a_header]


@pytest.mark.parametrize("count", [QUICK, pytest.param(STRUCTURED, marks=pytest.mark.long)])
def test_structured_mutations(targets, count):
    throw(targets, count, lambda target, dice: dice.choice(WAYS)(target, dice))


def test_every_number_of_an_answer_is_checked(targets):
    for target in targets:
        assert {"valid_accuracy", "valid_loss", "train_loss", "rate", "metrics"} <= target.header["fields"].keys()
        for name in target.header["fields"]:
            header = {**target.header, "fields": {**target.header["fields"], name: "high"}}
            with pytest.raises(Refused, match=f"its {name} cannot be 'high'"):
                target.open(with_header(target, header))


def test_values_beyond_all_training_are_refused_for_what_they_are(targets):
    """In every precision: not since a length is wrong."""
    dice, said = random.Random(1), {target.header["precision"]: set() for target in targets}
    for number in range(200):
        target = targets[number % len(targets)]
        with pytest.raises(Refused) as caught:
            target.open(wrong_values(target, dice))
        text = str(caught.value)
        said[target.header["precision"]] |= {word for word in ("max_update_norm", "finite", "int8") if word in text}
    assert said == {
        "float32": {"max_update_norm", "finite"},
        "half": {"max_update_norm", "finite"},
        "int8": {"max_update_norm", "int8"},
    }


def test_what_is_sealed_again_without_a_change_passes(targets):
    """Or the tests above would pass for a wrong checksum."""
    for target in targets:
        assert with_header(target, target.header) == target.wire
        target.open(with_header(target, target.header))


def test_an_error_reply_brings_nothing_in(targets):
    """Whoever says that it failed can say nothing else: it would be weighed, part by part, and kept."""
    target = targets[0]
    words = ("client-0", "server", target.visit.request_id, (), 0, 0)
    out = {target.visit.request_id: target.visit}
    reply, _ = target.inspector.open(encode(Message(*words, error="disk full")), target.visit.client, out)
    assert reply.error == "disk full"
    many = {f"=x{number}": torch.ones(1) for number in range(100)}
    for more in ({"tensors": many}, {"fields": {"images": 3}}):
        with pytest.raises(Refused, match="says that it failed"):
            target.inspector.open(encode(Message(*words, error="disk full", **more)), target.visit.client, out)
