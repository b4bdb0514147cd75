"""From a checkpoint: what a client remembers, and the weights of one task as a plain nn.Module."""

from __future__ import annotations

import copy
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft import networks
from weft.core import storage
from weft.core.client import Runtime
from weft.core.storage import Reference
from weft.errors import WeftError
from weft.methods.state import ClientState
from weft.networks.flat import Dropout, Network
from weft.plan import Plan
from weft.runs.folder import has_sites, read_manifest, read_plan, resume_command
from weft.runs.run import check_images
from weft.scenarios import sites
from weft.scenarios.sites import DEFAULT_BITS

CHECKED_IMAGES = 100  # test images on which an exported file is compared with the run

Metadata = dict[str, Any]  # what the user of the file needs to know; JSON


class TaskModel(nn.Module):
    """uint8 images (batch, height, width, 3) in; logits and predictions (usually probabilities) out."""

    def __init__(self, network: Network, mean: tuple[float, ...], deviation: tuple[float, ...], first: int, count: int):
        """Copy the body of a network and `count` outputs of its heads, starting at output `first`."""
        super().__init__()
        self.body = _inference_body(network.body)
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
        return logits, self.objective.predict(logits)


def _inference_body(body: nn.Module) -> nn.Module:
    """A copy that shares no memory with `body` and lacks what only training needs."""
    copied = copy.deepcopy(body).cpu()
    for module in copied.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Dropout):
                del module._forward_pre_hooks[key]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
        if isinstance(getattr(module, "plain", None), bool):  # it can compute with standard operations only
            module.plain = True  # type: ignore[assignment]
    return copied


@dataclass(frozen=True)
class ExportedTask:
    """The model of a task, its metadata, and test images with the logits that the run computes for them."""

    model: TaskModel
    metadata: Metadata
    images: torch.Tensor  # uint8
    logits: torch.Tensor


class ImageModel(nn.Module):
    """The model of one task: images in, logits out.

    Images are bytes of shape (batch, height, width, 3), as they are stored, or floats from 0 to 1 of shape
    (batch, 3, height, width), as torchvision makes them. The model normalizes them itself.
    """

    def __init__(self, exported: ExportedTask):
        super().__init__()
        self.model = exported.model
        self.task: str = exported.metadata["task"]
        self.classes: tuple[str, ...] = tuple(exported.metadata["classes"])  # the name of each output

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the logits, (batch, classes)."""
        if images.is_floating_point():
            images = 255 * images.permute(0, 2, 3, 1)
        logits: torch.Tensor = self.model(images)[0]
        return logits


def task_from_run(folder: Path, client: int, task: int) -> ExportedTask:
    """One task of one client, from the last checkpoint of a run."""
    plan, reference = _saved(folder, client)
    bits = plan.scenario_options.get("bits", DEFAULT_BITS)
    return _export(plan, folder / "checkpoints", reference, client, task, bits)


def state_from_run(folder: Path, client: int) -> ClientState:
    """What a client remembers, from the last checkpoint of a run."""
    plan, reference = _saved(folder, client)
    return storage.load(Runtime(plan).new_client(), folder / "checkpoints", reference)


def _saved(folder: Path, client: int) -> tuple[Plan, Reference]:
    """The plan of a run, and where the state of a client is."""
    plan = read_plan(folder)
    if has_sites(folder):
        raise WeftError(f"the clients of {folder} are sites, which keep their models: use weft site export at the site")
    manifest = read_manifest(folder / "checkpoints")
    if manifest is None:
        raise WeftError(f"the run in {folder} has no checkpoint yet; {resume_command(folder)} continues it")
    check_images(folder, same_splits=False)  # the normalization comes from them
    if not 0 <= client < plan.clients:
        raise WeftError(f"there is no client {client}; choose 0 to {plan.clients - 1}")
    if str(client) not in manifest["clients"]:
        raise WeftError(f"client {client} has not trained yet; {resume_command(folder)} continues the run")
    return plan, manifest["clients"][str(client)]


def task_from_site(site: Path, run: str, task: int) -> ExportedTask:
    """One task that a site keeps of a run."""
    folder = site / "state" / run
    manifest = read_manifest(folder)
    if manifest is None or not manifest["clients"]:
        raise WeftError(f"{site} has no run {run}; weft site status lists its runs")
    plan = sites.at_site(Plan.load(folder / "plan.toml"), site)
    ((client, reference),) = manifest["clients"].items()
    known = sites.listed(site)
    bits = known[task]["bits"] if plan.scenario == "sites" and task < len(known) else DEFAULT_BITS
    return _export(plan, folder, reference, int(client), task, bits)


def _export(plan: Plan, folder: Path, reference: Reference, client: int, task_index: int, bits: int) -> ExportedTask:
    runtime = Runtime(plan)
    state = storage.load(runtime.new_client(), folder, reference)
    if not 0 <= task_index <= state.finished:
        known = f"choose 0 to {state.finished}" if state.finished >= 0 else "it has not finished any task yet"
        raise WeftError(f"client {client} has not finished task {task_index}; {known}")
    ctx, task = runtime.context(client, task_index), runtime.task(client, task_index)
    runtime.method.load_task(state, task_index, ctx)
    first, count = runtime.head_span(client, task_index)
    batches = runtime.batches(client, task_index, "test")
    with torch.no_grad():
        images, _ = batches.take(slice(0, CHECKED_IMAGES))
        logits = ctx.network.logits(images)[:, first : first + count].cpu()
    metadata: Metadata = {
        "weft": importlib.metadata.version("weft"),
        "task": task.name,
        "classes": list(task.classes),
        "predictions": "probabilities" if plan.loss is None else "outputs",
        "image": list(batches.images.shape[1:]),  # height, width, channels; uint8
        "mean": list(task.mean),
        "deviation": list(task.deviation),
        "bits": bits,  # of images deeper than 8 bits: 2 ** bits - 1 is white
        "network": plan.network,
        "network_options": plan.network_options,
        "loss": plan.loss,
    }
    model = TaskModel(ctx.network, task.mean, task.deviation, first, count)
    return ExportedTask(model, metadata, batches.images[:CHECKED_IMAGES].cpu(), logits)


def rebuild(metadata: Metadata) -> TaskModel:
    """The module for the tensors of an exported file, with the network that its metadata names."""
    classes = len(metadata["classes"])
    network = networks.build(metadata["network"], metadata["network_options"], (classes,), "cpu", metadata["loss"])
    return TaskModel(network, tuple(metadata["mean"]), tuple(metadata["deviation"]), 0, classes)
