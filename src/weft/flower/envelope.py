"""weft messages inside Flower messages: one opaque array for the bytes, one record of fields beside it."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from weft.errors import printable

STYPE = "weft.wire.message"  # the array is read by weft.wire.message.decode and by nothing else
MESSAGE_TYPE = "train.weft"  # selects the handler of the client app
RECORD, FIELDS, KEY = "weft", "fields", "message"
MAX_REASON = 200  # characters
RUN_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z.@+-]{0,127}")  # it becomes the name of a folder


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
    return Message(_content(**request._asdict()), dst_node_id=node, message_type=MESSAGE_TYPE, ttl=lifetime)


def pack_reply(reply: SiteReply, to: Message) -> Message:
    return Message(_content(**reply._asdict()), reply_to=to)


def unpack(message: Message) -> SiteRequest:
    request = SiteRequest(**_open(message, run=str, plan=str, client=int))
    if not RUN_NAME.fullmatch(request.run):
        raise EnvelopeError("the run's name is not a folder name")
    return request


def unpack_reply(message: Message) -> SiteReply:
    reply = SiteReply(**_open(message, seconds=float, waiting=str, left=bool))
    if not 0 <= reply.seconds < math.inf:
        raise EnvelopeError(f"seconds={reply.seconds} is out of range")
    return reply._replace(waiting=printable(" ".join(reply.waiting.split()))[:MAX_REASON])


def _content(wire: bytes, **fields: Any) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(wire),), stype=STYPE, data=wire)
    return RecordDict({RECORD: ArrayRecord({KEY: array}), FIELDS: ConfigRecord(fields)})


def _open(message: Message, **kinds: type) -> dict[str, Any]:
    try:
        array, fields = message.content.array_records[RECORD][KEY], message.content.config_records[FIELDS]
    except (KeyError, ValueError):
        raise EnvelopeError("it holds no weft message") from None
    if array.stype != STYPE:
        raise EnvelopeError(f"its array is not {STYPE}")
    if any(type(fields.get(name)) is not kind for name, kind in kinds.items()):
        raise EnvelopeError(f"its fields are not {', '.join(kinds)}")
    return {"wire": array.data} | {name: fields[name] for name in kinds}
