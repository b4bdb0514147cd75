"""The networks by name. Their options are described here, so that a plan can be checked before torch is loaded."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from weft.errors import Problem, nearest

if TYPE_CHECKING:
    from weft.networks.flat import Network


class LeNetOptions(BaseModel):
    """The paper's LeNet: two convolutions, two fully connected layers, 2,987,870 values without heads."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    pool: Literal[2, 3] = 3  # the table of appendix A says 3x3, its text 2x2


class MlpOptions(BaseModel):
    """Two fully connected layers, for trying things out in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    hidden: int = Field(64, gt=0, le=65536)
    features: int = Field(32, gt=0, le=65536)


NETWORKS: dict[str, type[BaseModel]] = {"lenet": LeNetOptions, "mlp": MlpOptions}


def options_of(name: str) -> type[BaseModel]:
    if name not in NETWORKS:
        raise Problem(f"there is no network {name!r}; {nearest(name, NETWORKS)}")
    return NETWORKS[name]


@functools.lru_cache(maxsize=8)
def _build(name: str, options: BaseModel, classes: int, device: str) -> Network:
    from weft.networks.flat import Network

    module = importlib.import_module(f"weft.networks.{name}")
    body, features = module.body(**options.model_dump())
    return Network(body, features, classes, device)


def build(name: str, options: dict[str, object], classes: int, device: str = "cpu") -> Network:
    """The network for tasks of so many classes; one for each kind, since it is scratch memory that clients share."""
    return _build(name, options_of(name).model_validate(options), classes, device)
