"""Encoding and decoding of the messages that FedWeIT sends, against a plain copy of as many bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.bench.timing import Tell, interleave, seconds_of, spread
from weft.core.client import World
from weft.methods.fedweit.formulas import largest
from weft.plan import Plan
from weft.randomness import generator
from weft.wire.headers import Precision
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import Payload, Rows, Sparse


def measure(plan: dict[str, Any], passes: int, tell: Tell) -> dict[str, Any]:
    chosen = Plan(**plan, device="cpu")
    found: dict[str, Any] = {}
    kinds = payloads(chosen)
    for place, (kind, payload) in enumerate(kinds.items()):
        message = Message("client-0", "server", "bench", (), 0, 0, {"base": payload})
        wire = encode(message, chosen.wire)
        contenders = {
            "encode": partial(encoding_seconds, message, chosen.wire),
            "decode": partial(seconds_of, decode, wire),
            "copy": partial(seconds_of, bytearray, wire),
        }
        times = interleave([contenders], passes, lambda *_: None)
        rates = {name: len(wire) / 1e6 / spread(seconds)["median"] for name, seconds in times.items()}
        found[kind] = {"bytes": len(wire)} | {f"{name}_megabytes_per_second": rate for name, rate in rates.items()}
        tell(place + 1, len(kinds))
    return found


def encoding_seconds(message: Message, precision: Precision) -> float:
    """Of a message that nobody has encoded yet, as a client's is; a server's rows are written once for all."""
    tensors = {name: fresh(payload) for name, payload in message.tensors.items()}
    return seconds_of(encode, replace(message, tensors=tensors), precision)


def fresh(payload: Payload) -> Payload:
    return Rows(payload.segments, payload.kept, payload.values) if isinstance(payload, Rows) else payload


def payloads(plan: Plan) -> dict[str, Payload]:
    """The three kinds at the size of the plan's network: whole, the rows that are kept, and a sparse A."""
    layout = World(plan).lesson(0, 0).layout
    drawn = generator(plan.seed, "bench", "wire").standard_normal(layout.weights, dtype="float32")
    vector = torch.from_numpy(drawn)
    kept = torch.from_numpy(generator(plan.seed, "bench", "rows").random(layout.rows) < plan.method_options["keep"])
    return {
        "dense": vector,
        "rows": Rows.of(vector, layout.segments, kept),
        "sparse": Sparse.of(largest(vector, plan.method_options["adaptive_keep"])),
    }
