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

from pydantic import BaseModel, ConfigDict, Field

from weft.randomness import generator


class Options(BaseModel):
    """Clients that differ in speed, arrive late, go away and come back; all of it off by default."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    spread: float = Field(1.0, ge=1, le=1000)  # the slowest client may take so many times as long as the fastest
    jitter: float = Field(0.0, ge=0, le=2)  # deviation of the logarithm of a round's duration
    late: float = Field(0.0, ge=0)  # a client arrives up to so many seconds after the start
    stay: float = Field(0.0, ge=0)  # mean seconds until a client goes away; 0: it stays
    away: float = Field(5.0, gt=0)  # mean seconds until it is back


@dataclass(frozen=True)
class Clock:
    options: Options
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
