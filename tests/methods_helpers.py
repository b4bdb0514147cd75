"""What the tests of methods share: which methods there are, and runs of them to look at."""

import pytest
import torch
from helpers import Run, run, tiny

from weft import methods
from weft.core import client as client_module
from weft.core.training import make_optimizer
from weft.methods import COMBINATIONS, METHODS, class_of
from weft.methods.averaging import Update, Updates
from weft.methods.fedweit.fedweit import FedWeITOptions
from weft.methods.method import LocalTraining, RoundContext, ServerContext, TaskContext
from weft.methods.robust import robust
from weft.methods.state import OptimizerState, RateSchedule
from weft.networks.flat import Layer, Layout
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import dense

PRESETS = [f"{name}@{preset}" for name in METHODS for preset in class_of(name).presets]
NAMES = [*METHODS, *COMBINATIONS, *PRESETS]
PRIVATE_HEADS = [name for name in NAMES if not class_of(name).traits.by_class]  # unless heads=class
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


def started(runtime, client=0):
    """A new client that has started its first task."""
    state, ctx = runtime.new_client(), runtime.training_context(client, 0)
    state.start(ctx, runtime.method.options)
    client_module.begin(runtime, state, ctx)
    return state, ctx


def send_download(download):
    """A download as the client receives it."""
    once = {f"foreign/{key}": value for key, value in download.once.items()}
    message = Message("server", "client-0", "0.0.0", (), 0, 0, download.tensors | once, download.fields)
    return client_module._download(decode(encode(message)))


def begun(running, task=1):
    """Client 0 before its first batch of a task: begun, with the first download received, and prepared."""
    method, state, ctx = running.method, running.clients[0], running.runtime.training_context(0, task)
    client_module.begin(running.runtime, state, ctx)
    if method.traits.federated:
        download = send_download(method.configure(running.server, 0, RoundContext(running.plan, task, True)))
        state.knowledge.update(download.once)
        method.receive(state, download, ctx)
    return state, ctx, prepared(running.method, state, ctx)


def prepared(method, state, ctx):
    training = LocalTraining.plain(state, ctx)
    method.prepare(training, state, ctx)
    return training


def gradients(name, task=1, **changed):
    """What the penalties add to the gradients of a client's first batch of a task."""
    running = Run(tiny(method=name, **changed)).go_to(task)
    _, ctx, training = begun(running, task)
    rng = torch.Generator().manual_seed(0)
    for value in training.variables.values():
        value.add_(0.05 * torch.randn(value.shape, generator=rng))
    training.compose(False)
    ctx.network.compute_gradient(*ctx.load("train").take(torch.arange(20)))
    training.backward()
    plain = {key: value.clone() for key, value in training.gradients.items()}
    for penalty in training.penalties:
        penalty()
    return running, training, {key: value - plain[key] for key, value in training.gradients.items()}


def assert_gradient_of(penalty, training, added, layout, **tolerance):
    """What was added is the gradient of this function of the body."""
    theta = torch.cat([training.variables["weights"], training.variables["private"]]).clone().requires_grad_()
    (found,) = torch.autograd.grad(penalty(theta[: layout.body]), theta)
    torch.testing.assert_close(added["weights"], found[: layout.weights], **tolerance)
    torch.testing.assert_close(added["private"], found[layout.weights :], **tolerance)
    assert added["weights"].abs().max() > 1e-4


# ---- a federation of one number: theta, without images, biases or heads


class OneNumber:
    """A network whose loss is slope / 2 * (theta - best)^2, and all hooks of a method called in the loop's order."""

    def __init__(self, name, wells, optimizer="sgd", **options):
        self.layout = Layout((Layer("only", (1, 1), 0, 0),), 1, 1, 1)
        self.vector, self.gradient = torch.zeros(1), torch.zeros(1)
        self.method = methods.load(name, {"biases": "private", **options})
        words = {f"method__{key}": value for key, value in options.items()}
        self.plan = tiny(method=name, clients=len(wells), optimizer=optimizer, **words)
        self.wells = wells  # (slope, best) of each client
        self.ctx = ServerContext(self.plan, self.layout, torch.zeros(1))
        self.server = self.method.Server()
        self.server.start(self.ctx, self.method.options)
        self.clients = [self.method.Client(rate=RateSchedule(epochs=1)) for _ in wells]
        for client, ctx in zip(self.clients, self.contexts(), strict=True):
            client.start(ctx, self.method.options)

    def contexts(self):
        return [TaskContext(client, 0, self.plan, self) for client in range(len(self.wells))]

    def initial_body(self, rng):
        return torch.zeros(1)

    def round(self, steps=1):
        updates = []
        for client, ctx, (slope, best) in zip(self.clients, self.contexts(), self.wells, strict=True):
            download = self.method.configure(self.server, ctx.client, RoundContext(self.plan, 0, False))
            self.method.receive(client, send_download(download), ctx)
            training = prepared(self.method, client, ctx)
            optimizer = make_optimizer(self.plan, training, OptimizerState())
            for _ in range(steps):
                training.compose(False)
                self.gradient[:] = slope * (self.vector - best)
                training.backward()
                for penalty in training.penalties:
                    penalty()
                optimizer.step(0.1)
                for callback in training.after_step:
                    callback(0.1)
            for callback in training.on_end:
                callback()
            reply = Message(f"client-{ctx.client}", "server", "x", (), 0, 0, self.method.upload(client, ctx))
            sent = decode(encode(reply)).tensors
            updates.append(Update(ctx.client, 0, sent, {}, {"examples": 1}, {}, True))
        self.method.aggregate(self.server, Updates(updates), self.ctx)
        return dense(self.server.weights).item()

    def rounds(self, count, steps):
        return [self.round(steps) for _ in range(count)][-1]
