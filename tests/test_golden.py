"""The library against examples/fedweit_in_one_file.py, which shares no line with it: same data, same draws, same result.

The library works on one flat vector with hand-written gradients, a wire format, checkpoints and Adam's moments saved
between rounds; the example on one small matrix for each layer, with autograd and nothing saved. What comes out is compared
value by value at the end of a run: theta_G, kb, every client's B, and m, A, alpha, biases, head and theta of every task.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import weft
from weft import networks, scenarios
from weft.methods import fedweit, formulas
from weft.methods.fedweit import FedWeIT
from weft.randomness import generator
from weft.record import accuracy_matrices, read_rows
from weft.state import State
from weft.tensors import dense

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "fedweit_in_one_file.py"
specification = importlib.util.spec_from_file_location("fedweit_in_one_file", EXAMPLE)
one_file = importlib.util.module_from_spec(specification)
sys.modules["fedweit_in_one_file"] = one_file  # where dataclasses look up the annotations
specification.loader.exec_module(one_file)


MLP = {
    "scenario.classes_per_task": 3,
    "scenario.train": 24,
    "scenario.valid": 6,
    "scenario.test": 30,
    "clients": 3,
    "tasks": 3,
    "network": "mlp",
    "network.hidden": 20,
    "network.features": 10,
    "method.keep": 0.5,
    "method.kb_size": 2,
    "method.lambda_sparsity": 0.3,
    "rounds_per_task": 3,
    "epochs_per_round": 2,
    "batch_size": 8,
    "learning_rate": 1e-3,
    "patience": 100,
}
LENET = MLP | {
    "scenario.train": 12,
    "scenario.test": 6,
    "clients": 2,
    "tasks": 2,
    "network": "lenet",
    "rounds_per_task": 1,
    "epochs_per_round": 2,
    "batch_size": 4,
}
del LENET["network.hidden"], LENET["network.features"]
SHAPES = {
    "mlp": {"fc1": (20, 3072), "fc2": (10, 20)},
    "lenet": {"conv1": (20, 3, 5, 5), "conv2": (50, 20, 5, 5), "fc1": (800, 3200), "fc2": (500, 800)},
}


def plain_mlp(theta, private, images):
    x = functional.relu(functional.linear(images.flatten(1), theta["fc1"], private["fc1.bias"]))
    x = functional.relu(functional.linear(x, theta["fc2"], private["fc2.bias"]))
    return functional.linear(x, private["head"], private["head.bias"])


def plain_lenet(theta, private, images):
    x = images
    for layer in ("conv1", "conv2"):
        x = functional.relu(functional.conv2d(x, theta[layer], private[f"{layer}.bias"], padding=2))
        x = functional.local_response_norm(x, size=9, alpha=1e-3, beta=0.75, k=1)
        x = functional.max_pool2d(x, 3, stride=2, ceil_mode=True)
    x = x.flatten(1)
    for layer in ("fc1", "fc2"):
        x = functional.relu(functional.linear(x, theta[layer], private[f"{layer}.bias"]))
    return functional.linear(x, private["head"], private["head.bias"])


def cut(vector, shapes):
    """A flat vector as the named pieces that it is made of."""
    pieces = torch.split(vector, [int(np.prod(shape)) for shape in shapes.values()])
    return {name: piece.view(shape).clone() for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def private_shapes(plan):
    layers = SHAPES[plan.network]
    features, classes = list(layers.values())[-1][0], plan.scenario_options["classes_per_task"]
    return {f"{name}.bias": shape[:1] for name, shape in layers.items()} | {"head": (classes, features), "head.bias": (classes,)}


def by_example(plan, dtype=torch.float32):
    """The one-file run on what the plan says, in the terms of `facts`."""
    options = plan.method_options
    world = scenarios.build(plan.scenario, plan.scenario_options, plan.clients, plan.tasks, plan.seed)
    network = networks.build(plan.network, plan.network_options, plan.scenario_options["classes_per_task"])
    shapes = SHAPES[plan.network]

    def split(task, part):
        data = task.load(part)
        scaled = (data.images.astype(np.float32) - np.float32(task.mean)) / np.float32(task.deviation)
        return torch.from_numpy(scaled).permute(0, 3, 1, 2).contiguous().to(dtype), torch.from_numpy(data.labels)

    def private(client, step):
        biases = torch.zeros(sum(shape[0] for shape in shapes.values()))
        head = network.initial_head(generator(plan.seed, "head", client, step))
        return cut(torch.cat([biases, head]).to(dtype), private_shapes(plan))

    def order(client, step, round_index, epoch, count):
        return torch.from_numpy(generator(plan.seed, "shuffle", client, step, round_index, epoch).permutation(count))

    def sample(client, step, stored, count):
        if len(stored) <= count:
            return stored
        return sorted(stored[place] for place in generator(plan.seed, "kb", client, step).permutation(len(stored))[:count])

    tasks = [[{part: split(task, part) for part in ("train", "test")} for task in sequence] for sequence in world.sequences]
    weights = network.initial_body(generator(plan.seed, "initial"))[: network.layout.weights].to(dtype)
    theta_g, clients, kb, sent = one_file.run(
        tasks,
        {"mlp": plain_mlp, "lenet": plain_lenet}[plan.network],
        cut(weights, shapes),
        private,
        one_file.Options(
            plan.rounds_per_task,
            plan.epochs_per_round,
            plan.batch_size,
            plan.learning_rate,
            options["lambda_sparsity"],
            options["lambda_drift"],
            options["keep"],
            options["kb_size"],
        ),
        order,
        sample,
    )
    found = {f"theta_G {layer}": value for layer, value in theta_g.items()}
    for (c, t), adaptive in kb.items():
        found |= {f"kb {c}.{t} {layer}": value for layer, value in adaptive.items()}
    for c, client in enumerate(clients):
        found |= {f"client {c} B {layer}": value for layer, value in client.base.items()}
        for t, task in enumerate(client.learned):
            theta = one_file.compose(client.base, task)
            for layer in shapes:
                found[f"client {c} task {t} m {layer}"] = task.mask(layer).flatten()
                found[f"client {c} task {t} A {layer}"] = task.adaptive[layer]
                found[f"client {c} task {t} alpha {layer}"] = task.attention[layer]
                found[f"client {c} task {t} theta {layer}"] = theta[layer]
            found |= {f"client {c} task {t} {name}": value for name, value in task.private.items()}
    return {name: value.detach() for name, value in found.items()}, [client.accuracy for client in clients], sent


def by_library(plan, folder):
    """The library's run, read from the states that it left on disk, in the same terms."""
    weft.run(plan, folder, save_every=0)
    network = networks.build(plan.network, plan.network_options, plan.scenario_options["classes_per_task"])
    manifest = json.loads((folder / "checkpoints" / "manifest.json").read_text())
    shapes = SHAPES[plan.network]
    rows = {layer: shape[:1] for layer, shape in shapes.items()}
    server = State.load(folder / "checkpoints", manifest["server"])
    found = {f"theta_G {layer}": value for layer, value in cut(dense(server.tensors["global"]), shapes).items()}
    for key, adaptive in server.archive.items():
        found |= {f"kb {key} {layer}": value for layer, value in cut(dense(adaptive), shapes).items()}
    for c in range(plan.clients):
        client = State.load(folder / "checkpoints", manifest["clients"][str(c)])
        found |= {f"client {c} B {layer}": value for layer, value in cut(client.tensor("base"), shapes).items()}
        for t in range(plan.tasks):
            keys = client.numbers[f"foreign/{t}"]
            attention = client.archive[f"attention/{t}"] if keys else torch.zeros(0)
            parts = {
                "m": cut(client.archive[f"mask/{t}"], rows),
                "A": cut(dense(client.archive[f"adaptive/{t}"]), shapes),
                "alpha": cut(attention, {layer: (len(keys),) for layer in shapes}),
                "theta": cut(composed(plan, network, client, c, t), shapes),
            }
            for part, layers in parts.items():
                found |= {f"client {c} task {t} {part} {layer}": value for layer, value in layers.items()}
            private = cut(client.archive[f"private/{t}"], private_shapes(plan))
            found |= {f"client {c} task {t} {name}": value for name, value in private.items()}
    return found, list(accuracy_matrices(folder).values()), read_rows(folder, "ledger.csv")


def composed(plan, network, client, c, t):
    lesson = weft.methods.base.Lesson(c, t, plan, network)
    weft.methods.load(plan.method, plan.method_options).answer_for(client, t, lesson)
    return network.vector[: network.layout.weights].clone()
