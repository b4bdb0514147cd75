"""Shared by the tests of damaged messages: a valid message, and ways to make an invalid one of it."""

from __future__ import annotations

import copy
import json
import random
import resource
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from weft.core.checks import RejectedReply
from weft.wire.message import CHECKSUM, PREFIX, VERSION, MessageError

QUICK, STRUCTURED = 2_000, 10_000  # mutations
GROWTH = 200 << 10  # kilobytes that all mutations together may take
SMALL = {"network__hidden": 4, "network__features": 4, "clients": 2, "rounds_per_task": 1}
HUGE = [-1, 2**31 - 1, 2**31, 2**40, 2**62, 10**30, 0.5, "9", None, [], True, 1e308]


class Target:
    """A valid message, and what accepts it."""

    def __init__(self, wire: bytes):
        self.wire = wire
        _, _, length, _ = PREFIX.unpack_from(wire)
        self.header: dict[str, Any] = json.loads(wire[PREFIX.size : PREFIX.size + length])
        self.payload = wire[PREFIX.size + length : -CHECKSUM.size]
        self.open(wire)

    def open(self, wire: bytes) -> None:
        raise NotImplementedError

    def is_rejected(self, wire: bytes) -> bool:
        """Whether the message is rejected with a reason of one line, and in no other way."""
        try:
            self.open(wire)
        except (RejectedReply, MessageError) as reason:
            return "\n" not in str(reason) and len(str(reason)) < 400
        return False


def sealed(header: bytes, payload: bytes, lengths: tuple[int, int] | None = None) -> bytes:
    """A message with a valid checksum; `lengths` are what the prefix claims."""
    claimed = lengths or (len(header), len(payload))
    body = PREFIX.pack(b"WEFT", VERSION, *claimed) + header + payload
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


def throw(targets: Sequence[Target], count: int, make: Callable[[Target, random.Random], bytes]) -> None:
    dice = random.Random(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    longest = 0.0
    for number in range(count):
        target = targets[number % len(targets)]
        wire = make(target, dice)
        began = time.perf_counter()
        assert wire == target.wire or target.is_rejected(wire), wire[:400]
        longest = max(longest, time.perf_counter() - began)
    assert longest < 5  # seconds, on a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


# ---- mutations with a valid checksum ---------------------------------------------------------------------------------


def wrong_field(target: Target, dice: random.Random) -> bytes:
    """One key more or less, or an unknown one."""
    header = copy.deepcopy(target.header)
    holder = dice.choice([header, *header["tensors"]])
    if dice.random() < 0.5:
        del holder[dice.choice(sorted(holder))]
    else:
        holder[dice.choice(["__class__", "dtype", "x", "header"])] = dice.choice(HUGE)
    return with_header(target, header)


def wrong_size(target: Target, dice: random.Random) -> bytes:
    """A tensor that claims a different size, count or rows."""
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


def wrong_length(target: Target, dice: random.Random) -> bytes:
    """Too many or too few bytes, or a prefix that claims more than there is."""
    kind, some = dice.randrange(3), dice.randrange(1, 9)
    if kind == 0:
        return with_header(target, target.header, target.payload + dice.randbytes(some))
    if kind == 1:
        return with_header(target, target.header, target.payload[:-some])
    lengths = (dice.choice([0, 2**31, 2**32 - 1]), dice.choice([0, 2**40, 2**63]))
    return sealed(json.dumps(target.header).encode(), target.payload, lengths)


def not_a_header(target: Target, dice: random.Random) -> bytes:
    """Headers that are not JSON, or not in canonical form."""
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
