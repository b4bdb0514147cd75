"""All randomness of a run comes from here: a generator for each purpose, derived and never global.

Who draws, and when, is part of the key, so the order in which clients happen to work changes nothing, and a run that
was stopped draws the same numbers again when it goes on.
"""

from __future__ import annotations

import hashlib

from weft.lazy import np


def generator(seed: int, purpose: str, *where: int | str) -> np.random.Generator:
    """The generator for one purpose at one place, for example `generator(0, "shuffle", client, step, round)`.

    >>> first = generator(0, "shuffle", 3, 1).integers(1000, size=3)
    >>> bool((first == generator(0, "shuffle", 3, 1).integers(1000, size=3)).all())
    True
    >>> bool((first == generator(0, "shuffle", 31).integers(1000, size=3)).all())
    False
    """
    key = "/".join([str(seed), purpose, *map(str, where)])
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
