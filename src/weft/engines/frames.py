"""Frames: a JSON object and some bytes, each with its length before it; what engine and worker say to each other."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

LENGTHS = struct.Struct("<IQ")  # of the JSON, of the bytes


def write_frame(stream: IO[bytes], words: dict[str, Any], blob: bytes = b"") -> None:
    text = json.dumps(words).encode()
    stream.write(LENGTHS.pack(len(text), len(blob)))
    stream.write(text)
    stream.write(blob)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """The next frame; EOFError if the other side has gone."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        raise EOFError
    words, blob = LENGTHS.unpack(lengths)
    return json.loads(stream.read(words)), stream.read(blob)
