"""What a message may become in memory, before Flower makes it.

A message travels as objects: words, and chunks of arrays. An array names its chunks by their places, one as often as it
likes, so that one megabyte can claim to be any number of them; and Flower puts them together before anybody is asked.
So whoever takes messages in looks first at what the objects are and what they would come to.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from flwr.app import Array
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content
from flwr.superlink.grid import http_grid

MOST = 1 << 31  # bytes of any message; a site knows nothing of the plan before it has read one
WORDS = 1 << 18  # bytes of all that is no chunk of an array: names, sizes, the plan
OBJECTS = 1 << 12  # of one message; Flower cuts an array every 5 MiB
UPLOAD = 900.0  # seconds for which parts that are still being sent are waited for; by itself Flower waits for two hours

Pull = Callable[..., dict[str, bytes]]


class TooMuch(Exception):  # noqa: N818 - whoever sent it is told of, and the run goes on
    """A message that is larger than any that was asked for, or that cannot be read."""


def guard(most: Callable[[], int] = lambda: MOST) -> None:
    """From now on this process takes in no message that would be larger; `most` is asked when one comes."""
    # by name, in both modules that use it, so that a Flower that does it in another way fails here and is not let be
    for module in (inflatable_utils, http_grid):
        if not hasattr(module, "pull_objects"):
            raise ImportError(f"{module.__name__} has no pull_objects, where weft looks for it; install flwr==1.41.0")
        replaced: Any = module
        replaced.pull_objects = _guarded(_PULL, most)


def _guarded(pull: Pull, most: Callable[[], int]) -> Pull:
    def pull_objects(object_ids: list[str], pull_object_fn: Callable[[str], bytes], **options: Any) -> dict[str, bytes]:
        bound, taken, lock = most(), 0, threading.Lock()
        if len(object_ids) > OBJECTS:
            raise TooMuch(f"it has {len(object_ids):,} parts, at most {OBJECTS:,} are let in")

        def pull_one(object_id: str) -> bytes:
            nonlocal taken
            try:
                content = pull_object_fn(object_id)
            except httpx.HTTPStatusError as no:  # the hub is there and does not give it: it is this message's fault
                raise TooMuch(f"a part of it cannot be had (status {no.response.status_code})") from None
            with lock:
                taken += len(content)
            if taken > bound + WORDS:
                raise TooMuch(f"it is larger than {bound:,} bytes, which is the most that is let in")
            return content

        contents = pull(object_ids, pull_one, **{"max_time": UPLOAD, **options})
        check(contents, bound)
        return contents

    return pull_objects


def check(contents: Mapping[str, bytes], most: int) -> None:
    """What the objects of a message would come to, found without making it."""
    words = {name: content for name, content in contents.items() if not _is_chunk(content)}
    if (size := sum(map(len, words.values()))) > WORDS:
        raise TooMuch(f"it has {size:,} bytes beside its array, at most {WORDS:,} are let in")
    total = 0
    for content in words.values():
        kind, chunks, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[chunks[place]]) for place in places)
    if total > most + WORDS:
        raise TooMuch(f"its arrays would take {total:,} bytes, at most {most:,} are let in")


def _is_chunk(content: bytes) -> bool:
    """By a head as Flower writes it, which is short: a long one would be read as words."""
    return content.startswith(b"ArrayChunk ") and HEAD_BODY_DIVIDER in content[:64]


_PULL: Pull = inflatable_utils.pull_objects  # as Flower has it
