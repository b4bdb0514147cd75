"""Against decode and the checks behind it: whatever a stranger sends is refused, quickly and in little memory."""

from __future__ import annotations

import copy
import json
import random
import resource
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from helpers import Run, tiny

from weft.checks import Inspector, Refused
from weft.message import CHECKSUM, PREFIX, Message, encode
from weft.schedule import Visit

QUICK, RANDOM, STRUCTURED = 2_000, 100_000, 10_000
GROWTH = 200 << 10  # kilobytes that all of it may take on top
HUGE = [-1, 2**31 - 1, 2**31, 2**40, 2**62, 10**30, 0.5, "9", None, [], True, 1e308]


class Target:
    """A right answer, its request, and the inspector that lets it through."""

    def __init__(self, inspector: Inspector, wire: bytes, visit: Visit):
        self.inspector, self.wire, self.visit = inspector, wire, visit
        _, _, length, _ = PREFIX.unpack_from(wire)
        self.header: dict[str, Any] = json.loads(wire[PREFIX.size : PREFIX.size + length])
        self.payload = wire[PREFIX.size + length : -CHECKSUM.size]
        self.open(wire)

    def open(self, wire: bytes) -> None:
        self.inspector.open(wire, self.visit.client, {self.visit.request_id: self.visit})

    def is_refused(self, wire: bytes) -> bool:
        """Refused, and in no other way than with a reason of one line."""
        try:
            self.open(wire)
        except Refused as reason:
            return "\n" not in str(reason) and len(str(reason)) < 400
        return False


@pytest.fixture(scope="module")
def targets() -> list[Target]:
    found = []
    small = {"network__hidden": 4, "network__features": 4, "clients": 2, "tasks": 1, "rounds_per_task": 1}
    for words in (
        {"method": "fedweit"},
        {"method": "fedweit", "precision": "half"},
        {"method": "fedweit", "precision": "int8"},
        {"method": "fedavg"},
        {"method": "fedavg", "method__keep": 0.05},
    ):
        finished = Run(tiny(**small, **words)).go()
        request = finished.requests[0]
        visit = Visit(int(request.receiver.removeprefix("client-")), request.step, request.round, request.ops, True)
        found.append(Target(finished.inspector, finished.wires[1], visit))
    return found


def sealed(header: bytes, payload: bytes, lengths: tuple[int, int] | None = None) -> bytes:
    """With a valid checksum; `lengths`: what the prefix claims."""
    claimed = lengths or (len(header), len(payload))
    body = PREFIX.pack(b"WEFT", 1, *claimed) + header + payload
    return body + CHECKSUM.pack(zlib.crc32(body))


def with_header(target: Target, header: Any, payload: bytes | None = None) -> bytes:
    text = json.dumps(header, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return sealed(text.encode(), target.payload if payload is None else payload)


# ---- random mutations ------------------------------------------------------------------------------------------------


def mutated(wire: bytes, dice: random.Random) -> bytes:
    kind, place = dice.randrange(6), dice.randrange(len(wire))
    if kind == 0:
        return wire[:place]
    if kind == 1:
        return wire + dice.randbytes(dice.randrange(1, 20))
    if kind == 2:
        return wire[:place] + dice.randbytes(dice.randrange(1, 9)) + wire[place:]
    if kind == 3:
        return wire[:place] + wire[place + dice.randrange(1, 40) :]
    changed = bytearray(wire)
    for _ in range(dice.randrange(1, 5) if kind == 4 else 1):
        changed[dice.randrange(len(wire) if kind == 4 else 60)] ^= dice.randrange(1, 256)
    return bytes(changed)


def throw(targets: list[Target], count: int, make: Callable[[Target, random.Random], bytes]) -> None:
    dice = random.Random(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    longest = 0.0
    for number in range(count):
        target = targets[number % len(targets)]
        wire = make(target, dice)
        began = time.perf_counter()
        assert wire == target.wire or target.is_refused(wire), wire[:400]
        longest = max(longest, time.perf_counter() - began)
    assert longest < 5  # seconds, on a machine that is busy with other things
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


@pytest.mark.parametrize("count", [QUICK, pytest.param(RANDOM, marks=pytest.mark.long)])
def test_random_mutations(targets, count):
    throw(targets, count, lambda target, dice: mutated(target.wire, dice))


# ---- mutations with a valid checksum, each of which is wrong for a reason of its own ---------------------------------


def wrong_word(target: Target, dice: random.Random) -> bytes:
    """A field of the header that is not what it was."""
    header = copy.deepcopy(target.header)
    key = dice.choice(["sender", "receiver", "request_id", "step", "round", "ops", "precision", "numbers", "tensors"])
    header[key] = dice.choice([value for value in [*HUGE, "x", {}, ["train"]] if value != header[key]])
    if header["tensors"] == []:  # a client that has stopped learning may send none; but then no bytes are left over
        return with_header(target, header)
    if header["numbers"] == {}:
        header["step"] += 1
    return with_header(target, header)


def wrong_field(target: Target, dice: random.Random) -> bytes:
    """One more field, one less, or one that was never heard of."""
    header = copy.deepcopy(target.header)
    holder = dice.choice([header, *header["tensors"]])
    if dice.random() < 0.5:
        del holder[dice.choice(sorted(holder))]
    else:
        holder[dice.choice(["__class__", "dtype", "x", "header"])] = dice.choice(HUGE)
    return with_header(target, header)


def wrong_size(target: Target, dice: random.Random) -> bytes:
    """A tensor that claims another size, count or other rows."""
    header = copy.deepcopy(target.header)
    described = dice.choice(header["tensors"])
    key = dice.choice(sorted(set(described) - {"name", "encoding"}))
    if key == "segments":
        old = copy.deepcopy(described[key])
        segment = dice.choice(described[key])
        segment[dice.randrange(2)] = dice.choice([*HUGE, 0, segment[0] + 1, segment[1] + 1])
        if described[key] == old:
            described[key] = old[:-1]
    else:
        described[key] = dice.choice([*HUGE, described[key] + 1, described[key] - 1, 2 * described[key] + 1])
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
    if target.header["precision"] == "int8":  # which knows no NaN
        return wrong_length(target, dice)
    width, form = (2, "<e") if target.header["precision"] == "half" else (4, "<f")
    payload = bytearray(target.payload)
    kind = dice.randrange(4)
    value = [float("nan"), float("inf"), float("-inf"), 60_000.0 if width == 2 else 3e38][kind]
    count = 1 if kind < 3 else 3
    for place in range(count):
        payload[len(payload) - (place + 1) * width : len(payload) - place * width] = struct.pack(form, value)
    return with_header(target, target.header, bytes(payload))


def wrong_index(target: Target, dice: random.Random) -> bytes:
    """Bytes of an index, or of a mask of rows, that point elsewhere; what is not there is claimed."""
    payload = bytearray(target.payload)
    for place in range(dice.randrange(4, 12)):  # the first tensor's index, or in a dense tensor its first values
        payload[place] = 255
    if target.header["tensors"][0]["encoding"] == "dense":
        payload[:8] = b"\xff" * 8  # NaN
    return with_header(target, target.header, bytes(payload))


def wrong_length(target: Target, dice: random.Random) -> bytes:
    """Bytes too many or too few, or a prefix that claims what is not there."""
    kind, some = dice.randrange(3), dice.randrange(1, 9)
    if kind == 0:
        return with_header(target, target.header, target.payload + dice.randbytes(some))
    if kind == 1:
        return with_header(target, target.header, target.payload[:-some])
    lengths = (dice.choice([0, 2**31, 2**32 - 1]), dice.choice([0, 2**40, 2**63]))
    return sealed(json.dumps(target.header).encode(), target.payload, lengths)


def wrong_number(target: Target, dice: random.Random) -> bytes:
    """What a client says of its work."""
    header = copy.deepcopy(target.header)
    name = dice.choice(["examples", "accuracy", "size", "images", "density", "stopped"])
    header["numbers"][name] = dice.choice([-1, 0.5, "9", None, [2.0], [1.0] * 50, {"bytes": -1}, 10**17])
    if dice.random() < 0.2:
        deep: Any = 0
        for _ in range(dice.choice([40, 500])):
            deep = [deep]
        header["numbers"]["deep"] = deep
    return with_header(target, header)


def not_a_header(target: Target, dice: random.Random) -> bytes:
    """Headers that are no JSON, or not in the one form that is allowed."""
    text = json.dumps(target.header, sort_keys=True, separators=(",", ":"))
    raw = dice.choice(
        [
            b"",
            b"null",
            b"[" * 100_000,
            text.encode()[: dice.randrange(1, len(text))],
            text.replace(":", ": ", 1).encode(),
            text.replace("{", '{"error":"",', 1).encode(),
            text.encode("utf-16"),
            text.replace('"round":', '"round":1e999,"x":', 1).encode(),
            b"\xff" * dice.randrange(1, 5000),
            dice.randbytes(dice.randrange(1, 400)),
        ]
    )
    return sealed(raw, target.payload)


WAYS = [wrong_word, wrong_field, wrong_size, wrong_kind, wrong_values, wrong_index, wrong_length, wrong_number]
WAYS += [not_a_header]


@pytest.mark.parametrize("count", [QUICK, pytest.param(STRUCTURED, marks=pytest.mark.long)])
def test_structured_mutations(targets, count):
    throw(targets, count, lambda target, dice: dice.choice(WAYS)(target, dice))


def test_what_is_sealed_again_without_a_change_passes(targets):
    """Or the tests above would pass for a wrong checksum."""
    for target in targets:
        assert with_header(target, target.header) == target.wire
        target.open(with_header(target, target.header))


def test_an_error_reply_brings_nothing_in(targets):
    """Whoever says that it failed may say anything else beside it: it is not used."""
    target = targets[0]
    words = ("client-0", "server", target.visit.request_id, (), 0, 0)
    reply, _ = target.inspector.open(
        encode(Message(*words, error="disk full")), target.visit.client, {target.visit.request_id: target.visit}
    )
    assert reply.error == "disk full"
