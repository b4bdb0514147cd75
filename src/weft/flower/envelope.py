"""How our bytes ride on Flower's messages: one opaque array for the message, one record of words beside it.

The words of a request say which run it belongs to, what the run's plan is and which client this site is in it; those of
a reply say how long it took, or why there is none yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

STYPE = "weft.wire.message"  # how the array is to be read: by weft.wire.message.decode, and by nothing else
KIND = "train.weft"  # Flower's word for what a client app is asked to do
RECORD, WORDS, KEY = "weft", "words", "message"

Words = dict[str, str | int | float | bool]


class Asked(NamedTuple):
    wire: bytes
    run: str  # names the site's memory of this run
    plan: str  # TOML
    client: int  # which client of the plan this site is


class Answered(NamedTuple):
    wire: bytes = b""
    seconds: float = 0.0  # that the site worked
    waiting: str = ""  # why there is no answer yet, though there will be one
    left: bool = False  # the site has left the federation


class BadEnvelope(Exception):  # noqa: N818 - whoever reads it goes on
    """Not what weft packs."""


def pack(asked: Asked, node: int, lifetime: float) -> Message:
    words: Words = {"run": asked.run, "plan": asked.plan, "client": asked.client}
    return Message(_content(asked.wire, words), dst_node_id=node, message_type=KIND, ttl=lifetime)


def reply(answered: Answered, to: Message) -> Message:
    words: Words = {"seconds": answered.seconds, "waiting": answered.waiting, "left": answered.left}
    return Message(_content(answered.wire, words), reply_to=to)


def unpack(message: Message) -> Asked:
    wire, words = _open(message)
    run, plan, client = words.get("run"), words.get("plan"), words.get("client")
    if not isinstance(run, str) or not isinstance(plan, str) or type(client) is not int:
        raise BadEnvelope("its words are not those of a request")
    return Asked(wire, run, plan, client)


def unpack_reply(message: Message) -> Answered:
    wire, words = _open(message)
    seconds, waiting, left = words.get("seconds"), words.get("waiting"), words.get("left")
    if not isinstance(seconds, float) or not isinstance(waiting, str) or not isinstance(left, bool):
        raise BadEnvelope("its words are not those of a reply")
    if not 0 <= seconds < math.inf:
        raise BadEnvelope("its words are not those of a reply")
    return Answered(wire, seconds, waiting[:200], left)


def _content(wire: bytes, words: Words) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(wire),), stype=STYPE, data=wire)
    return RecordDict({RECORD: ArrayRecord({KEY: array}), WORDS: ConfigRecord(dict(words))})


def _open(message: Message) -> tuple[bytes, ConfigRecord]:
    try:
        array = message.content.array_records[RECORD][KEY]
        words = message.content.config_records[WORDS]
    except (KeyError, ValueError):
        raise BadEnvelope("it has no message of weft's inside") from None
    if array.stype != STYPE:
        raise BadEnvelope(f"what is inside is not {STYPE}")
    return array.data, words
