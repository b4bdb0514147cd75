"""Faults on purpose: what may happen to a request and its answer on the way, drawn from the plan's seed.

Each request has one fate, which depends on the seed and the request's id alone: whoever repeats a run, with any number
of workers and after any stop, meets the same faults.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from weft.randomness import generator
from weft.wire import message

if TYPE_CHECKING:
    import numpy as np


Fate = Literal["fine", "crash", "drop", "corrupt", "delay"]
SMALL = 1024  # bytes of an answer that is all header
FATES: tuple[Fate, ...] = ("crash", "drop", "corrupt", "delay")


class Options(BaseModel):
    """The rate of each fault, as a share of all requests that go over the wire; none by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    crash: float = Field(0.0, ge=0, lt=1)  # the client dies before it has done anything, and says so
    drop: float = Field(0.0, ge=0, lt=1)  # the client works, and its answer is lost
    corrupt: float = Field(0.0, ge=0, lt=1)  # the answer arrives damaged, or holds garbage
    delay: float = Field(0.0, ge=0, lt=1)  # the answer comes late by `delay_seconds`
    delay_seconds: float = Field(3.0, gt=0)

    @model_validator(mode="after")
    def _together(self) -> Options:
        if sum(self.rate(kind) for kind in FATES) >= 1:
            raise ValueError("the rates of all faults together have to be less than 1")
        return self

    def rate(self, kind: Fate) -> float:
        return float(getattr(self, kind))

    @property
    def any(self) -> bool:
        return any(self.rate(kind) for kind in FATES)


def fate(options: Options, seed: int, request_id: str) -> Fate:
    """What becomes of a request."""
    drawn = generator(seed, "fault", request_id).random()
    for kind in FATES:
        drawn -= options.rate(kind)
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
