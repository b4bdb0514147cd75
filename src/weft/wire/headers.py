"""What the header of a message may say: plain checks that find the first fault and put it into words.

They hold for what is sent and for what is received; whether the tensors fit the payload is seen where it is read.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from weft.wire.tensors import LARGEST

Precision = Literal["float32", "half", "int8"]

DEEPEST = 32  # levels of nesting in fields

_FIELDS = {"error", "fields", "ops", "precision", "receiver", "request_id", "round", "sender", "task", "tensors"}
_DESCRIPTIONS = {
    "dense": {"encoding", "name", "size"},
    "rows": {"encoding", "name", "segments"},
    "sparse-gaps": {"count", "encoding", "name", "size"},
    "sparse-mask": {"encoding", "name", "size"},
}


def header_fault(header: dict[str, Any]) -> str:
    """What is wrong with a header, the list of tensors aside; nothing if nothing is."""
    if header.keys() != _FIELDS:
        strange, missing = sorted(header.keys() - _FIELDS), sorted(_FIELDS - header.keys())
        return f"field {show(strange[0])} is unknown" if strange else f"field {missing[0]!r} is missing"
    for key in ("sender", "receiver", "request_id", "error"):
        if not isinstance(header[key], str):
            return f"{key} is not text"
    for key in ("task", "round"):
        if type(header[key]) is not int or abs(header[key]) > LARGEST:
            return f"{key} is not a whole number of at most {LARGEST:,}"
    if not isinstance(header["ops"], list) or not all(isinstance(op, str) for op in header["ops"]):
        return "ops is not a list of texts"
    if header["precision"] not in get_args(Precision):
        return f"precision {show(header['precision'])} is unknown"
    if not isinstance(header["tensors"], list):
        return "tensors is not a list"
    if not isinstance(header["fields"], dict):
        return "fields is not an object"
    return number_fault(header["fields"], "fields", 0)


def number_fault(value: Any, path: str, depth: int) -> str:
    # exact types: a tuple or a numpy float would come back as something else than was sent
    if value is None or type(value) in (str, bool):
        return ""
    if type(value) is int:
        return "" if -(2**63) <= value < 2**63 else f"{path} does not fit into 64 bits"
    if type(value) is float:
        return "" if math.isfinite(value) else f"{path} is {value}; only finite fields can be sent"
    if depth == DEEPEST:
        return f"fields is nested deeper than {DEEPEST} levels"
    if type(value) is list:
        faults = (number_fault(item, f"{path}[{place}]", depth + 1) for place, item in enumerate(value))
        return next(filter(None, faults), "")
    if type(value) is dict:
        if strange := [key for key in value if type(key) is not str]:
            return f"{path} has the key {show(strange[0])}, which is not text"
        faults = (number_fault(item, f"{path}[{show(key)}]", depth + 1) for key, item in value.items())
        return next(filter(None, faults), "")
    return f"{path} is a {type(value).__name__}; JSON knows str, int, float, bool, None, list and dict"


def description_fault(description: Any) -> str:
    """What is wrong with a tensor's description as such; whether it fits the payload is seen later."""
    if not isinstance(description, dict) or not isinstance(description.get("encoding"), str):
        return "a tensor's description is not an object with an encoding"
    known = _DESCRIPTIONS.get(description["encoding"])
    if known is None:
        return f"encoding {show(description['encoding'])} is unknown"
    if description.keys() != known:
        return f"a {description['encoding']} tensor has the fields {show(sorted(description))}, not {sorted(known)}"
    name = description["name"]
    if not isinstance(name, str) or name_fault(name):
        return f"a tensor cannot be called {show(name)}"
    for key in known & {"size", "count"}:
        if type(description[key]) is not int or not 0 <= description[key] <= LARGEST:
            return f"the {key} of tensor {name!r} is {show(description[key])}, not a number from 0 to {LARGEST:,}"
    if "segments" in known:
        segments = description["segments"]
        if not isinstance(segments, list) or not all(_is_segment(segment) for segment in segments):
            return f"the segments of tensor {name!r} are not a list of [rows, width], both at least 1"
        if sum(rows * width for rows, width in segments) > LARGEST:
            return f"the segments of tensor {name!r} make more than {LARGEST:,} values"
    return ""


def _is_segment(segment: Any) -> bool:
    return (
        isinstance(segment, list) and len(segment) == 2 and all(type(n) is int and 1 <= n <= LARGEST for n in segment)
    )


def name_fault(name: str) -> str:
    if name == "header":
        return "the rest of a message is weighed under this name"
    if not 1 <= len(name) <= 200 or not name.isprintable():
        return "a name has 1 to 200 printable characters"  # it becomes a column of a CSV file
    return ""


def show(value: Any) -> str:
    """A stranger's value in an error of one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
