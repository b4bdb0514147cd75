"""A limit on what a message becomes in memory, checked before Flower builds it.

A message travels as objects: metadata, and chunks of arrays. An array lists its chunks by index and may list one chunk
any number of times, so a message of one megabyte can inflate to terabytes, and Flower inflates it before any handler
runs. The guard replaces Flower's function that pulls the objects.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import httpx
from flwr.app import Array
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content
from flwr.superlink.grid import http_grid

MAX_BYTES = 1 << 31  # of any message: a site knows nothing of the plan before it has read one
MAX_METADATA = 1 << 18  # bytes of everything that is not a chunk of an array: names, sizes, the plan
MAX_OBJECTS = 1 << 12  # of one message; Flower splits arrays into chunks of 5 MiB
UPLOAD_TIMEOUT = 900.0  # seconds to wait for objects that are still being uploaded; Flower's default is two hours


class MessageTooLargeError(Exception):
    """A message that is larger than any expected one, or that cannot be read."""


def install(limit: Callable[[], int] = lambda: MAX_BYTES) -> None:
    """From now on this process accepts no message above `limit()` bytes."""

    def pull_objects(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> dict[str, bytes]:
        bound, pulled, lock = limit(), 0, threading.Lock()
        if len(object_ids) > MAX_OBJECTS:
            raise MessageTooLargeError(f"it has {len(object_ids):,} objects; the limit is {MAX_OBJECTS:,}")

        def pull_one(object_id: str) -> bytes:
            nonlocal pulled
            try:
                content = pull_object_fn(object_id)
            except httpx.HTTPStatusError as error:  # the SuperLink works but does not have it: the message is at fault
                raise MessageTooLargeError(f"an object is missing (status {error.response.status_code})") from None
            with lock:
                pulled += len(content)
            if pulled > bound + MAX_METADATA:
                raise MessageTooLargeError(f"it is larger than the limit of {bound:,} bytes")
            return content

        contents = _PULL(object_ids, pull_one, **{"max_time": UPLOAD_TIMEOUT, **options})
        check(contents, bound)
        return contents

    for module in (inflatable_utils, http_grid):  # http_grid imports the function by name
        patch(module, pull_objects=pull_objects)


def patch(module: ModuleType, **replacements: Any) -> None:
    """Replace functions of Flower; fails for a version of Flower that does not have them."""
    for name, function in replacements.items():
        if not hasattr(module, name):
            raise ImportError(f"{module.__name__} has no {name}, which weft replaces; install flwr==1.41.0")
        setattr(module, name, function)


def check(contents: Mapping[str, bytes], limit: int) -> None:
    """Compute the size of a message from its objects without building it."""
    metadata = {name: content for name, content in contents.items() if not _is_chunk(content)}
    if (size := sum(map(len, metadata.values()))) > MAX_METADATA:
        raise MessageTooLargeError(f"it has {size:,} bytes of metadata; the limit is {MAX_METADATA:,}")
    total = 0
    for content in metadata.values():
        kind, chunks, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            indices = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[chunks[index]]) for index in indices)
    if total > limit + MAX_METADATA:
        raise MessageTooLargeError(f"its arrays would take {total:,} bytes; the limit is {limit:,}")


def _is_chunk(content: bytes) -> bool:
    """A short head as Flower writes it; an object with a long head counts as metadata."""
    return content.startswith(b"ArrayChunk ") and HEAD_BODY_DIVIDER in content[:64]


_PULL: Callable[..., dict[str, bytes]] = inflatable_utils.pull_objects  # the function of Flower
