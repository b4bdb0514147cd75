"""The composed theta of one task as a plain nn.Module: normalisation, body and head in one."""

from __future__ import annotations

import copy
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft import networks
from weft.core.client import World
from weft.core.storage import State
from weft.errors import WeftError
from weft.networks.flat import Dropout, Network
from weft.plan import Plan
from weft.runs.folder import has_sites, read_manifest, read_plan, way_on
from weft.runs.run import check_images
from weft.scenarios import sites
from weft.scenarios.sites import DEPTH

CHECKED = 100  # test images on which an exported file is held against the run

Facts = dict[str, Any]  # what a reader of the file should know; JSON


class Plain(nn.Module):
    """uint8 images (batch, height, width, 3) in; logits and what a person wants to read (probabilities) out."""

    def __init__(self, network: Network, mean: tuple[float, ...], deviation: tuple[float, ...], first: int, count: int):
        """Of a network as it stands: its body and the `count` outputs of its heads from `first` on."""
        super().__init__()
        self.body = _plain_body(network.body)
        weight, bias = (each.detach().cpu()[first : first + count].clone() for each in network.parameters[-2:])
        self.head = nn.Linear(weight.shape[1], count)
        self.head.load_state_dict({"weight": weight, "bias": bias})
        self.objective = network.objective
        self.mean: torch.Tensor
        self.deviation: torch.Tensor
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))
        self.eval()
        self.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = (images.float() - self.mean) / self.deviation  # (batch, height, width, channels)
        logits = self.head(self.body(scaled.permute(0, 3, 1, 2)))
        return logits, self.objective.answer(logits)


def _plain_body(body: nn.Module) -> nn.Module:
    """A copy with memory of its own, without what only training needs."""
    found = copy.deepcopy(body).cpu()
    for module in found.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Dropout):
                del module._forward_pre_hooks[key]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
        if isinstance(getattr(module, "plain", None), bool):  # it has a form in ordinary operations
            module.plain = True  # type: ignore[assignment]
    return found


@dataclass(frozen=True)
class Taken:
    """A task's model, what to know about it, and test images with the logits that the run itself gives for them."""

    model: Plain
    facts: Facts
    images: torch.Tensor  # uint8
    logits: torch.Tensor


def take(folder: Path, client: int, step: int) -> Taken:
    """The model of one task of one client, from the last checkpoint of a run."""
    plan = read_plan(folder)
    if has_sites(folder):
        raise WeftError(f"the clients of {folder} are sites, which keep their models: weft site export at the site")
    manifest = read_manifest(folder / "checkpoints")
    if manifest is None:
        raise WeftError(f"the run in {folder} has no checkpoint yet; {way_on(folder)} goes on with it")
    check_images(folder)  # the normalisation comes from them
    if not 0 <= client < plan.clients:
        raise WeftError(f"there is no client {client}; choose 0 to {plan.clients - 1}")
    if str(client) not in manifest["clients"]:
        raise WeftError(f"client {client} has learned nothing yet; {way_on(folder)} goes on with it")
    state = State.load(folder / "checkpoints", manifest["clients"][str(client)])
    return _taken(plan, state, client, step, plan.scenario_options.get("bits", DEPTH))


def take_at_site(site: Path, run: str, step: int) -> Taken:
    """The model of one task that a site keeps of a run; WEFT_SITE names the site, whose tasks are meant."""
    folder = site / "state" / run
    manifest = read_manifest(folder)
    if manifest is None or not manifest["states"]:
        raise WeftError(f"{site} remembers no run {run}; weft site status lists those that it does")
    plan = Plan.load(folder / "plan.toml")
    ((client, reference),) = manifest["states"].items()
    known = sites.listed(site)
    bits = known[step]["bits"] if plan.scenario == "sites" and step < len(known) else DEPTH
    return _taken(plan, State.load(folder, reference), int(client), step, bits)


def _taken(plan: Plan, state: State, client: int, step: int, bits: int) -> Taken:
    finished = state.numbers.get("finished", -1)
    if not 0 <= step <= finished:
        known = f"choose 0 to {finished}" if finished >= 0 else "none is finished yet"
        raise WeftError(f"client {client} has not finished a task {step}; {known}")
    world = World(plan)
    lesson, task = world.lesson(client, step), world.task(client, step)
    world.method.answer_for(state, step, lesson)
    first, count = world.own_head(client, step)
    model = Plain(lesson.network, task.mean, task.deviation, first, count)
    batches = world.batches(client, step, "test")
    with torch.no_grad():
        images, _ = batches.take(slice(0, CHECKED))
        logits = lesson.network.logits(images)[:, first : first + count].cpu()
    side = list(batches.images.shape[1:])
    facts: Facts = {
        "weft": importlib.metadata.version("weft"),
        "task": task.name,
        "classes": list(task.classes),
        "answers": "probabilities" if plan.loss is None else "outputs",
        "image": side,  # height, width, channels; uint8
        "mean": list(task.mean),
        "deviation": list(task.deviation),
        "bits": bits,  # of pictures deeper than 8 bits: 2 ** bits - 1 is white
        "network": plan.network,
        "network_options": plan.network_options,
        "loss": plan.loss,
    }
    return Taken(model, facts, batches.images[:CHECKED].cpu(), logits)


def rebuilt(facts: Facts) -> Plain:
    """The module that tensors of an exported file belong to, by weft's own networks."""
    classes = len(facts["classes"])
    network = networks.build(facts["network"], facts["network_options"], (classes,), "cpu", facts["loss"])
    return Plain(network, tuple(facts["mean"]), tuple(facts["deviation"]), 0, classes)
