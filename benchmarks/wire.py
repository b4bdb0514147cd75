"""Encoding and decoding the messages of FedWeIT, compared with a plain copy of as many bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

from weft.plan import Plan
from weft.wire.message import Message, decode, encode

from .internals import payloads
from .timing import Progress, interleave, quartiles, seconds_of


def measure(plan: dict[str, Any], passes: int, progress: Progress) -> dict[str, Any]:
    chosen = Plan(**plan, device="cpu")
    results: dict[str, Any] = {}
    forms = payloads(chosen)
    for name, payload in forms.items():
        message = Message("client-0", "server", "bench", (), 0, 0, {"weights": payload})
        encoded = encode(message, chosen.wire)
        contenders = {
            "encode": partial(seconds_of, encode, message, chosen.wire),
            "decode": partial(seconds_of, decode, encoded),
            "copy": partial(seconds_of, bytearray, encoded),
        }
        times = interleave([contenders], passes, lambda *_: None)
        rates = {act: len(encoded) / 1e6 / quartiles(seconds)["median"] for act, seconds in times.items()}
        results[name] = {"bytes": len(encoded)} | {f"{act}_megabytes_per_second": rate for act, rate in rates.items()}
        progress(len(results), len(forms))
    return results
