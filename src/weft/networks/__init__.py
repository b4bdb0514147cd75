"""The networks by name. Their options are defined here, so that a plan can be checked before torch is loaded.

`package.module:Name` and `path/to/file.py:Name` name a user-defined network: a class or function that is called with
the options `network.*` and returns an nn.Module, which maps images (batch, 3, 32, 32) to features (batch, n).
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from weft import registry
from weft.errors import WeftError, nearest
from weft.registry import Statistics, StrictModel, options_from

if TYPE_CHECKING:
    from torch import nn

    from weft.networks.flat import Network


class LeNetOptions(StrictModel):
    """The paper's LeNet: two convolutions, two fully connected layers, 2,987,870 values without heads."""

    pool: Literal[2, 3] = 3  # the table of appendix A says 3x3, its text 2x2


class MlpOptions(StrictModel):
    """Two fully connected layers, for quick experiments."""

    hidden: int = Field(64, gt=0, le=65536)
    features: int = Field(32, gt=0, le=65536)


class ResNet18Options(StrictModel):
    """ResNet-18 (He et al. 2016), 11,168,832 values without heads for images of 32x32."""

    stem: Literal["small", "classical"] = "small"  # 3x3 without pooling for 32x32 images; 7x7 and pooling for larger
    norm: Literal["batch", "group"] = "batch"
    statistics: Statistics = "own"


NETWORKS: dict[str, type[BaseModel]] = {"lenet": LeNetOptions, "mlp": MlpOptions, "resnet18": ResNet18Options}
SEED = 0  # for what modules initialize, such as position embeddings: equal in every process and for every plan


def options_of(name: str) -> type[BaseModel]:
    if (factory := _factory(name)) is not None:
        try:
            return options_from(factory)
        except WeftError as problem:
            raise WeftError(f"network {name}: {problem}") from None
    if name.endswith(".py"):
        raise WeftError(f"{name} is a file; also name the class in it, as in {name}:MyNetwork")
    if name not in NETWORKS:
        raise WeftError(f"there is no network {name!r}; {nearest(name, NETWORKS)}")
    return NETWORKS[name]


def check_loss(name: str) -> None:
    """Raise a `WeftError` unless `name` is a loss."""
    if ":" not in name:
        raise WeftError(f"loss={name} is not a loss; write file.py:Name, or omit it for cross entropy")
    found = registry.find(name)
    if not callable(getattr(found, "loss", None)) or not isinstance(found, type):
        raise WeftError(f"{name} is not a loss; it must be a class derived from weft.networks.losses.Loss")


def build(
    name: str, options: dict[str, object], heads: tuple[int, ...], device: str = "cpu", loss: str | None = None
) -> Network:
    """The network with heads of these sizes; clients share it as scratch memory."""
    chosen = options_of(name).model_validate(options)
    return _build(name, _factory(name), chosen.model_dump_json(), heads, device, loss)


def _factory(name: str) -> Any:
    """The class or function of a user-defined network; None for a built-in one."""
    return registry.find(name) if ":" in name else None


@functools.lru_cache(maxsize=8)
def _build(name: str, factory: Any, text: str, heads: tuple[int, ...], device: str, loss: str | None) -> Network:
    import torch

    from weft.networks.flat import Network

    options = options_of(name).model_validate_json(text).model_dump()  # JSON can be a cache key, even of lists
    statistics = options.pop("statistics", "own")
    try:
        with torch.random.fork_rng(devices=[]):  # leaves the global generator unchanged
            torch.default_generator.manual_seed(SEED)
            if factory is None:
                body, features = importlib.import_module(f"weft.networks.{name}").body(**options)
            else:
                body, features = _user_body(factory, options)
        objective = None if loss is None else registry.find(loss)()
        network = Network(body, features, heads, device, statistics, objective=objective)
        if not network.layout.layers:
            raise WeftError("it has no linear or convolution layer to train; add at least one")
        return network
    except WeftError as problem:
        raise WeftError(f"network {name}: {problem}") from problem.__cause__


def _user_body(factory: Any, options: dict[str, Any]) -> tuple[nn.Module, int]:
    from torch import nn

    from weft.networks.flat import count_features

    try:
        body = factory(**options)
    except Exception as error:
        raise WeftError(f"it cannot be created with {options}: {registry.error_line(error)}") from error
    if not isinstance(body, nn.Module):
        raise WeftError(f"it returned a {type(body).__name__}; expected an nn.Module")
    return body, count_features(body)
