"""Faults on purpose: what may happen to a request and its answer on the way, drawn from the plan's seed.

Each request has one fate, which depends on the seed and the request's id alone: whoever repeats a run, with any number
of workers and after any stop, meets the same faults.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Literal

from weft.plan import FaultOptions
from weft.randomness import generator
from weft.wire import message

if TYPE_CHECKING:
    import numpy as np


Fate = Literal["fine", "crash", "drop", "corrupt", "delay"]
SMALL = 1024  # bytes of an answer that is all header
FATES: tuple[Fate, ...] = ("crash", "drop", "corrupt", "delay")


def fate(options: FaultOptions, seed: int, request_id: str) -> Fate:
    """What becomes of a request."""
    drawn = generator(seed, "fault", request_id).random()
    for kind in FATES:
        drawn -= options.rates[kind]
        if drawn < 0:
            return kind
    return "fine"


def corrupted(wire: bytes, seed: int, request_id: str) -> bytes:
    """A damaged answer: noise on the line, or a well-formed message of values that no training gives."""
    rng = generator(seed, "corrupt", request_id)
    kind = rng.integers(4 if len(wire) > SMALL else 2)  # what holds no tensors can only be damaged
    if kind == 0:
        return wire[: int(rng.integers(len(wire)))]
    damaged = bytearray(wire)
    if kind == 1:
        for place in rng.integers(len(wire), size=8):
            damaged[place] ^= int(rng.integers(1, 256))
        return bytes(damaged)
    return garbled(wire, rng, "noise" if kind == 2 else "huge")


def garbled(wire: bytes, rng: np.random.Generator, kind: Literal["noise", "huge"]) -> bytes:
    """The same message with a valid checksum over random bits, or over values near to the largest there are."""
    _, _, header, size = message.PREFIX.unpack_from(wire)
    start, end = message.PREFIX.size + header, message.PREFIX.size + header + size
    payload = rng.bytes(end - start) if kind == "noise" else b"\xff\xff\x7f\x7f" * ((end - start) // 4 + 1)
    body = wire[:start] + payload[: end - start]
    return body + zlib.crc32(body).to_bytes(4, "little")
