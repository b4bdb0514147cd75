"""How a client trains: the schedule of the rate, Adam against a plain loop, the order of the images, early stopping."""

import itertools

import pytest
import torch
from helpers import CachedRuntime, Interrupted, Run, run, state_bits, tiny
from torch.nn import functional

from weft.core.client import answer
from weft.core.training import train_round
from weft.errors import WeftError
from weft.methods import METHODS
from weft.methods.method import Download, RoundContext, ServerContext, initial_body
from weft.methods.state import RateSchedule
from weft.networks.batches import Batches
from weft.networks.flat import Network
from weft.networks.mlp import INPUTS, Mlp
from weft.randomness import generator
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import dense

# ---- the schedule


def after_each(losses, plan):
    """The rate and whether the task is over, after each epoch."""
    schedule, found = RateSchedule(plan.learning_rate), []
    for epoch, loss in enumerate(losses):
        schedule.after_epoch(loss, plan)
        assert schedule.epochs == epoch + 1
        found.append((schedule.rate, schedule.stopped))
    return found


def rates(losses, plan):
    return [rate for rate, _ in after_each(losses, plan)]


def test_the_schedule_of_the_paper_by_hand():
    plan = tiny(learning_rate=9.0, rate_floor=0.5)  # divided by 3 after 5 epochs: the defaults
    losses = [5, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 9, 9, 9, 9, 9]
    assert rates(losses, plan) == [9, 9, 9, 9, 9, 9, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 0.5]
    assert [stopped for _, stopped in after_each(losses, plan)] == [False] * 17 + [True]


def test_the_defaults_are_those_of_the_paper():
    plan = tiny()
    assert (plan.rate_decay, plan.patience, plan.rate_floor, plan.stop_at_floor) == (3.0, 5, 1e-7, True)
    assert plan.optimizer_memory == "task"
    assert plan.shuffle


def test_only_a_new_lowest_loss_resets_the_patience():
    plan = tiny(learning_rate=9.0, patience=2)
    assert rates([5, 5, 4, 4, 3, 3, 3], plan) == [9] * 6 + [3]
    assert rates([5, 6, 5.5, 5.5, 5.5], plan) == [9, 9, 3, 3, 1]  # lower than the last one is not enough


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_not_lower(value):
    assert rates([5, value, 4], tiny(learning_rate=9.0, patience=1)) == [9, 3, 3]


def test_the_rate_never_falls_below_the_floor():
    plan = tiny(learning_rate=9.0, patience=1, rate_floor=2.0, stop_at_floor=False)
    assert after_each([5] * 5, plan) == [(9, False), (3, False), (2, False), (2, False), (2, False)]


def test_a_round_that_diverges_leaves_the_schedule_as_it_was(monkeypatch):
    runtime = CachedRuntime(tiny(method="stl", patience=1))
    state = runtime.new_client()
    ask(runtime, state, ("begin", "train"))
    before = RateSchedule(**vars(state.rate))
    monkeypatch.setattr(Network, "measure", lambda self, data: (0.5, float("nan")))
    with pytest.raises(WeftError, match="lower learning_rate"):
        train_round(state, runtime.method, runtime.training_context(0, 0), 1)
    assert state.rate == before


@pytest.fixture
def flat_validation(monkeypatch):
    """A validation loss that never falls."""
    monkeypatch.setattr(Network, "measure", lambda self, data: (0.5, 1.0))


def reported(finished, key, client=0):
    return [fields[key] for who, _, _, fields in finished.reports if who == client and key in fields]


@pytest.mark.usefixtures("flat_validation")
def test_a_run_follows_the_schedule():
    plan = tiny(method="stl", rounds_per_task=5, tasks=2, patience=1, learning_rate=9e-3, rate_floor=2e-3)
    finished = Run(plan).go()
    # of each task: the first epoch sets the lowest loss, the next two fall to the floor, the rest is waiting
    assert reported(finished, "rate") == [9e-3, pytest.approx(3e-3), 2e-3, 2e-3, 2e-3] * 2
    assert reported(finished, "stopped") == [False, False, True, True, True] * 2
    assert reported(finished, "images") == [20, 20, 20, 0, 0] * 2
    assert finished.progress.images == 3 * 2 * 60
    assert len(reported(finished, "train_loss")) == 6  # an epoch that was not run has no loss


@pytest.mark.usefixtures("flat_validation")
def test_without_stop_at_floor_a_task_continues_at_the_floor():
    words = {"method": "stl", "tasks": 1, "rounds_per_task": 4, "patience": 1, "rate_floor": 2e-3}
    finished = Run(tiny(**words, stop_at_floor=False)).go()
    assert reported(finished, "images") == [20] * 4
    assert reported(finished, "stopped") == [False] * 4


@pytest.mark.usefixtures("flat_validation")
def test_epochs_within_a_round_count_too():
    plan = tiny(method="stl", tasks=1, rounds_per_task=1, epochs_per_round=6, patience=1, rate_floor=2e-3)
    finished = Run(plan).go()
    assert reported(finished, "images") == [40]  # stopped after the second of six epochs


# ---- Adam


class Plain:
    """The same training of a first task with nothing of weft's but the images, their order and the initial weights."""

    def __init__(self, plan, client=0):
        runtime = CachedRuntime(plan)
        network = runtime.context(client, 0).network
        self.plan, self.client = plan, client
        self.data = runtime.batches(client, 0, "train")
        options = plan.network_options
        self.body = Mlp(INPUTS, options["hidden"], options["features"])
        self.head = torch.nn.Linear(options["features"], network.classes)
        start = initial_body(network, plan.seed)
        head = network.initial_head(generator(plan.seed, "head", client, 0))
        with torch.no_grad():
            for parameter, values in zip(self.parameters(), self.split(torch.cat([start, head])), strict=True):
                parameter.copy_(values)

    def parameters(self):
        fc1, fc2 = self.body.fc1, self.body.fc2
        return [fc1.weight, fc2.weight, fc1.bias, fc2.bias, self.head.weight, self.head.bias]

    def split(self, whole):
        sizes = [parameter.numel() for parameter in self.parameters()]
        return [part.view(p.shape) for part, p in zip(whole.split(sizes), self.parameters(), strict=True)]

    def train(self, rounds, memory, rate_of=lambda epoch: None):
        optimizer = None
        for round_index, epoch in itertools.product(range(rounds), range(self.plan.epochs_per_round)):
            if optimizer is None or (memory == "round" and epoch == 0):
                optimizer = torch.optim.Adam(self.parameters(), lr=self.plan.learning_rate, foreach=False, fused=False)
            for group in optimizer.param_groups:
                group["lr"] = rate_of(round_index * self.plan.epochs_per_round + epoch) or self.plan.learning_rate
            rng = generator(self.plan.seed, "shuffle", self.client, 0, round_index, epoch)
            for chosen in torch.from_numpy(rng.permutation(len(self.data))).split(self.plan.batch_size):
                images, labels = self.data.take(chosen)
                optimizer.zero_grad()
                functional.cross_entropy(self.head(self.body(images)), labels).backward()
                optimizer.step()
        return torch.cat([parameter.detach().view(-1) for parameter in self.parameters()])


def trained(finished, client=0):
    state = finished.clients[client]
    return torch.cat([state.weights, state.private])


def assert_alike(found, wanted):
    """The two Adams round differently: where a gradient is close to 0 its last bits decide, so a few values differ."""
    apart = (found - wanted).abs()
    assert apart.mean() < 1e-6
    assert apart.max() < 1e-3


ADAM = {"method": "stl", "tasks": 1, "rounds_per_task": 3, "epochs_per_round": 2, "batch_size": 7}


@pytest.mark.parametrize("memory", ["task", "round"])
def test_training_equals_a_plain_adam_loop(memory):
    """Moments kept for the task: one Adam through all rounds. For the round: a new one in each."""
    plan = tiny(**ADAM, optimizer_memory=memory)
    finished = run(**ADAM, optimizer_memory=memory)
    for client in range(plan.clients):
        wanted = Plain(plan, client).train(3, memory)
        assert_alike(trained(finished, client), wanted)
    other = Plain(plan).train(3, "round" if memory == "task" else "task")
    assert (trained(finished) - other).abs().mean() > 1e-4  # the test can tell the two


@pytest.mark.usefixtures("flat_validation")
def test_the_rate_of_the_schedule_is_the_rate_that_is_used():
    plan = tiny(**ADAM, patience=2, learning_rate=9e-3)
    wanted = Plain(plan).train(3, "task", rate_of=[9e-3, 9e-3, 9e-3, 3e-3, 3e-3, 1e-3].__getitem__)
    found = trained(Run(plan).go())
    assert_alike(found, wanted)
    assert (found - Plain(plan).train(3, "task")).abs().mean() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_moments_are_kept_between_rounds_or_not_and_never_after_the_task(name):
    adam = tiny(method=name).optimizer == "adam"  # SGD has none
    for memory in ("task", "round"):
        running = Run(tiny(method=name, rounds_per_task=2, tasks=1, optimizer_memory=memory), stop_after_round=True)
        for kept in (memory == "task" and adam, False):
            with pytest.raises(Interrupted):
                running.go()
            moments = running.clients[0].optimizer
            assert bool(moments.first) == kept
            assert moments.first.keys() == moments.second.keys() == moments.steps.keys()
            assert set(moments.steps.values()) == ({2} if kept else set())  # 20 images in batches of 10


# ---- the order of the images


@pytest.fixture
def taken(monkeypatch):
    """Which images each batch took, in order."""
    found = []
    plain = Batches.take

    def note(chosen):
        if isinstance(chosen, torch.Tensor):  # validation takes slices, in order
            found.append(chosen.tolist())

    monkeypatch.setattr(Batches, "take", lambda self, chosen: (note(chosen), plain(self, chosen))[1])
    return found


def epochs(taken, each):
    return [list(itertools.chain(*taken[place : place + each])) for place in range(0, len(taken), each)]


def test_shuffled(taken):
    Run(tiny(method="stl", clients=2, tasks=2, rounds_per_task=2, epochs_per_round=2, batch_size=8)).go()
    assert [len(batch) for batch in taken[:3]] == [8, 8, 4]
    orders = epochs(taken, 3)
    assert all(sorted(order) == list(range(20)) for order in orders)
    # a new order for each client, task, round and epoch
    assert len({tuple(order) for order in orders}) == len(orders) == 2 * 2 * 2 * 2


def test_not_shuffled(taken):
    Run(tiny(method="stl", clients=2, tasks=1, rounds_per_task=2, batch_size=8, shuffle=False)).go()
    assert epochs(taken, 3) == [list(range(20))] * 4


def test_images_do_not_come_sorted_by_class():
    """In a fixed order, as the released code takes them, each batch would else be of one class."""
    runtime = CachedRuntime(tiny(shuffle=False))
    labels = runtime.batches(0, 0, "train").labels
    assert labels.tolist() != sorted(labels.tolist())


# ---- what is reported


def test_the_report_of_a_round():
    finished = run(**ADAM)
    fields = finished.reports[0][3]
    assert {"examples", "images", "rate", "stopped", "train_loss", "valid_loss", "valid_accuracy"} <= set(fields)
    assert (fields["examples"], fields["images"]) == (20, 40)
    accuracies = reported(finished, "valid_accuracy")
    assert reported(finished, "task_valid_accuracy") == accuracies[-1:]
    assert finished.progress.clients[0].validation == {"0": accuracies[-1]}


def test_the_validation_loss_is_that_of_the_model_after_the_round():
    finished = run(**ADAM)
    network = Network(Mlp(3072, 8, 16), 16, (2,))
    network.vector.copy_(trained(finished))
    accuracy, loss = network.measure(finished.runtime.batches(0, 0, "valid"))
    assert reported(finished, "valid_loss")[-1] == pytest.approx(loss, rel=1e-5)
    assert reported(finished, "valid_accuracy")[-1] == accuracy


# ---- a client that has stopped


def ask(runtime, state, ops, round_index=0, download=None):
    """The reply to a request about the first task."""
    download = download or Download()
    tensors = download.tensors | {f"foreign/{key}": value for key, value in download.once.items()}
    words = ("server", "client-0", f"0.{round_index}.0", ops, 0, round_index, tensors, download.fields)
    return decode(answer(runtime, 0, state, encode(Message(*words))))


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_client_keeps_its_model_and_sends_nothing(name):
    runtime = CachedRuntime(tiny(method=name, tasks=1))
    method, state, network = runtime.method, runtime.new_client(), runtime.context(0, 0).network

    def download(initial, first):
        server = method.Server()
        server.start(ServerContext(runtime.plan, network.layout, initial), method.options)
        return method.configure(server, 0, RoundContext(runtime.plan, 0, first))

    def tensors():
        other = ("values", "reply")  # JSON of the rest, and the last reply
        return {key: value for key, value in state_bits(state).items() if key not in other}

    initial = initial_body(network, 0)
    reply = ask(runtime, state, ("begin", "receive", "train", "send"), 0, download(initial, True))
    assert bool(reply.tensors) == method.traits.federated
    state.rate.stopped = True
    before, later = tensors(), download(-2 * initial, False)  # another theta_G
    reply = ask(runtime, state, ("receive", "train", "send"), 1, later)
    assert tensors() == before
    assert reply.tensors == {}
    assert (reply.fields["images"], reply.fields["stopped"]) == (0, True)

    # what is uploaded once per task is uploaded nevertheless, and nothing else
    reply = ask(runtime, state, ("receive", "train", "send", "finish", "give", "test"), 2, later)
    assert set(reply.tensors) == set(method.share_task(state, runtime.context(0, 0)))
    assert "weights" not in reply.tensors
    assert len(reply.fields["accuracy"]) == 1


@pytest.mark.usefixtures("flat_validation")
@pytest.mark.parametrize("name", [name for name in METHODS if name != "stl"])
def test_when_all_have_stopped_theta_g_stays_and_the_next_task_starts_at_full_rate(name):
    finished = Run(tiny(method=name, rounds_per_task=4, patience=1, rate_floor=2e-3, sgd_rate=3e-3)).go()
    assert reported(finished, "images") == [20, 20, 0, 0] * 2
    if not finished.method.traits.federated:
        return
    sent = sorted({(task, r) for _, task, r, tensor in finished.parts("c2s") if tensor == "weights"})
    assert sent == [(0, 0), (0, 1), (1, 0), (1, 1)]  # the round in which a client stops is still sent
    downloads = finished.parts("s2c")
    for task in range(2):
        assert torch.equal(*(dense(downloads[0, task, r, "weights"]) for r in (2, 3)))
