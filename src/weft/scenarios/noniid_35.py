"""noniid-35: NonIID-50 without the faces, which have no public home: 35 tasks of seven datasets at 5 clients."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from weft.scenarios import Scenario
from weft.scenarios.noniid import OTHERS, deal

COUNTS = {"cifar100": 17, "traffic_signs": 8, **OTHERS}


class Options(BaseModel):
    """35 tasks of seven datasets, without faces: up to 5 clients, up to 7 tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    return deal("noniid-35", COUNTS, 7, clients, tasks, seed)
