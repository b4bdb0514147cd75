"""noniid-50: the paper's NonIID-50, 50 tasks of eight datasets at 5 clients."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from weft.scenarios import Scenario
from weft.scenarios.noniid import OTHERS, deal

LISTS = {
    "paper": {"cifar100": 15, "facescrub": 16, "traffic_signs": 9, **OTHERS},  # the last of the signs has 3 classes
    "released": {"cifar100": 16, "facescrub": 16, "traffic_signs": 8, **OTHERS},
}


class Options(BaseModel):
    """The paper's 50 tasks of eight datasets, faces among them: up to 5 clients, up to 10 tasks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    lists: Literal["paper", "released"] = "paper"


def build(options: BaseModel, clients: int, tasks: int, seed: int) -> Scenario:
    assert isinstance(options, Options)
    return deal("noniid-50", LISTS[options.lists], 10, clients, tasks, seed)
