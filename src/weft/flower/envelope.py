"""weft messages inside Flower messages: one opaque array for the bytes, one record of fields beside it."""

from __future__ import annotations

import math
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

STYPE = "weft.wire.message"  # the array is read by weft.wire.message.decode and by nothing else
MESSAGE_TYPE = "train.weft"  # selects the handler of the client app
RECORD, FIELDS, KEY = "weft", "fields", "message"
MAX_REASON = 200  # characters

Fields = dict[str, str | int | float | bool]


class SiteRequest(NamedTuple):
    wire: bytes  # empty: only asks whether the site is still a member
    run: str  # names the site's state of this run
    plan: str  # TOML
    client: int  # the client of the plan that this site is


class SiteReply(NamedTuple):
    wire: bytes = b""
    seconds: float = 0.0  # spent by the site
    waiting: str = ""  # why there is no reply yet
    left: bool = False  # the site has left the federation


class EnvelopeError(Exception):
    """A Flower message that weft did not pack."""


def pack(request: SiteRequest, node: int, lifetime: float) -> Message:
    fields: Fields = {"run": request.run, "plan": request.plan, "client": request.client}
    return Message(_content(request.wire, fields), dst_node_id=node, message_type=MESSAGE_TYPE, ttl=lifetime)


def pack_reply(reply: SiteReply, to: Message) -> Message:
    fields: Fields = {"seconds": reply.seconds, "waiting": reply.waiting, "left": reply.left}
    return Message(_content(reply.wire, fields), reply_to=to)


def unpack(message: Message) -> SiteRequest:
    wire, fields = _open(message)
    run, plan, client = fields.get("run"), fields.get("plan"), fields.get("client")
    if not isinstance(run, str) or not isinstance(plan, str) or type(client) is not int:
        raise EnvelopeError("its fields are not those of a request")
    return SiteRequest(wire, run, plan, client)


def unpack_reply(message: Message) -> SiteReply:
    wire, fields = _open(message)
    seconds, waiting, left = fields.get("seconds"), fields.get("waiting"), fields.get("left")
    if not isinstance(seconds, float) or not isinstance(waiting, str) or not isinstance(left, bool):
        raise EnvelopeError("its fields are not those of a reply")
    if not 0 <= seconds < math.inf:
        raise EnvelopeError(f"seconds={seconds} is out of range")
    return SiteReply(wire, seconds, waiting[:MAX_REASON], left)


def _content(wire: bytes, fields: Fields) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(wire),), stype=STYPE, data=wire)
    return RecordDict({RECORD: ArrayRecord({KEY: array}), FIELDS: ConfigRecord(dict(fields))})


def _open(message: Message) -> tuple[bytes, ConfigRecord]:
    try:
        array, fields = message.content.array_records[RECORD][KEY], message.content.config_records[FIELDS]
    except (KeyError, ValueError):
        raise EnvelopeError("it holds no weft message") from None
    if array.stype != STYPE:
        raise EnvelopeError(f"its array is not {STYPE}")
    return array.data, fields
