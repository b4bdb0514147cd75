"""The virtual clock: how long clients take and when they are there, drawn from the plan's seed.

Results must not depend on which machine was busy, so on one machine time is not measured but drawn: one virtual second
is what a client of full speed needs for a round. All that is asked here is a function of seed, client and moment, and
nothing is remembered, so a run that was stopped meets the same clients at the same times again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from weft.plan import ClockOptions
from weft.randomness import generator


@dataclass(frozen=True)
class Clock:
    options: ClockOptions
    seed: int

    def duration(self, client: int, request_id: str) -> float:
        """The seconds that a client works on a request."""
        slowness = self.options.spread ** generator(self.seed, "speed", client).random()
        jitter = self.options.jitter * generator(self.seed, "jitter", request_id).standard_normal()
        return float(slowness * math.exp(jitter))

    def there_from(self, client: int, moment: float) -> float:
        """The first moment, from this one on, at which the client is there; this one itself if it is there now."""
        for arrives, leaves in self._visits(client):
            if moment < leaves:
                return max(arrives, moment)
        raise AssertionError("a client always comes back")

    def is_there(self, client: int, moment: float) -> bool:
        return self.there_from(client, moment) == moment

    def _visits(self, client: int) -> Iterator[tuple[float, float]]:
        """When the client arrives and leaves, over and over; drawn one after another, so always the same."""
        options = self.options
        arrives = float(options.late * generator(self.seed, "late", client).random())
        if not options.stay:
            yield arrives, math.inf
            return
        for place in itertools.count():
            rng = generator(self.seed, "presence", client, place)
            leaves = arrives + float(rng.exponential(options.stay))
            yield arrives, leaves
            arrives = leaves + float(rng.exponential(options.away))
