"""The source of all randomness of a run: one derived generator per purpose, never a global one.

The key names who draws and when. So the order in which clients run changes nothing, and a resumed run draws the same
numbers as one that was never stopped.
"""

from __future__ import annotations

import hashlib

from weft.lazy import np


def generator(seed: int, purpose: str, *where: int | str) -> np.random.Generator:
    """Make the generator of one purpose, for example `generator(0, "shuffle", client, task, round)`.

    >>> first = generator(0, "shuffle", 3, 1).integers(1000, size=3)
    >>> bool((first == generator(0, "shuffle", 3, 1).integers(1000, size=3)).all())
    True
    >>> bool((first == generator(0, "shuffle", 31).integers(1000, size=3)).all())
    False
    """
    key = "/".join([str(seed), purpose, *map(str, where)])
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
