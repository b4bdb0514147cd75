"""What the tests of methods share: which methods there are, and runs of them to look at."""

import pytest
import torch
from helpers import Run, run, tiny

from weft.core.robust import robust
from weft.methods import COMBINATIONS, METHODS, class_of
from weft.methods.averaging import Update, Updates
from weft.methods.fedweit.fedweit import FedWeITOptions
from weft.wire.tensors import dense

PRESETS = [f"{name}@{preset}" for name in METHODS for preset in class_of(name).presets]
NAMES = [*METHODS, *COMBINATIONS, *PRESETS]
TALKING = [name for name in NAMES if class_of(name).traits.federated]
QUICK = ["fedweit", "fedavg", "scaffold", "joint", "fedprox+ewc"]  # the others meet the contract in the slow tests


def marked(names):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


def fresh(**changed):
    return Run(tiny(**changed)).go()


def sent(finished):
    """Everything that was said, tensors and numbers, in order."""
    return finished.wires, finished.matrices


def updates_of(*parts, examples=(1, 1, 1), rule="mean"):
    """One update of each client, as the server gets them."""
    found = [
        Update(client, 0, tensors, {}, {"examples": count}, {}, True)
        for client, (tensors, count) in enumerate(zip(parts, examples, strict=False))
    ]
    return Updates(found if rule == "mean" else robust(found, rule), equal=rule != "mean")


def weit(**changed):
    """A FedWeIT run: options by their names, plan keys by theirs."""
    options = {f"method__{key}" if key in FedWeITOptions.model_fields else key: value for key, value in changed.items()}
    return run(method="fedweit", **options)


def adaptives(finished, client=0):
    """A of every finished task, by task."""
    return {task: dense(entry.adaptive) for task, entry in finished.clients[client].tasks.items()}


def origin(key):
    client, step = key.split(".")
    return int(client), int(step)


def moved(past, **changed):
    """How far the weights that answer for task 0 have moved while task 1 was learned, mean over the clients."""
    running = Run(tiny(method="fedweit", method__past=past, **changed)).go_to(1)
    before = [running.theta(client, 0) for client in range(3)]
    old = [adaptives(running, client)[0] for client in range(3)]
    running.go()
    far = [(running.theta(client, 0) - before[client]).norm().item() for client in range(3)]
    new = [adaptives(running, client)[0] for client in range(3)]
    return sum(far) / 3, all(map(torch.equal, old, new)), far


def learned_bits(finished):
    return {key: value for key, value in finished.bits().items() if "accuracy" in key or "bits" in key}


def start_of_a(finished):
    """What A is counted from."""
    return finished.ctx.initial[: finished.layout.weights] * (1 / 3)


def fresh_weit(**options):
    """Like `weit`, but run now."""
    return Run(tiny(method="fedweit", **{f"method__{key}": value for key, value in options.items()})).go()
