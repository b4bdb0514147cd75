"""How a client trains: the schedule of the rate, Adam against a plain loop, the order of the images, early stopping."""

import itertools

import pytest
import torch
from helpers import CachedRuntime, Interrupted, Run, run, state_bits, tiny
from torch.nn import functional

from weft.core.client import answer
from weft.core.training import train_round
from weft.errors import WeftError
from weft.methods import METHODS, class_of
from weft.methods.context import Download, RoundContext, ServerContext, initial_body
from weft.methods.state import RateSchedule
from weft.networks.batches import Batches
from weft.networks.flat import Network
from weft.networks.mlp import INPUTS, Mlp
from weft.randomness import generator
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import dense

# ---- the schedule


SCHEDULES = {  # changes of the plan, losses, rates after each epoch
    "the paper's: divided by 3 after 5 epochs": (
        {"rate_floor": 0.5},
        [5, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 9, 9, 9, 9, 9],
        [9, 9, 9, 9, 9, 9, 3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 1, 0.5],
    ),
    "a lower loss resets the patience": ({"patience": 2}, [5, 5, 4, 4, 3, 3, 3], [9, 9, 9, 9, 9, 9, 3]),
    "lower than the last one is not enough": ({"patience": 2}, [5, 6, 5.5, 5.5, 5.5], [9, 9, 3, 3, 1]),
    "NaN is not lower": ({"patience": 1}, [5, float("nan"), 4], [9, 3, 3]),
    "infinity is not lower": ({"patience": 1}, [5, float("inf"), 4], [9, 3, 3]),
    "never below the floor": ({"patience": 1, "rate_floor": 2.0, "stop_at_floor": False}, [5] * 5, [9, 3, 2, 2, 2]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_by_hand(name):
    changes, losses, rates = SCHEDULES[name]
    plan = tiny(learning_rate=9.0, **changes)
    schedule, found = RateSchedule(plan.learning_rate), []
    for loss in losses:
        schedule.after_epoch(loss, plan)
        found.append((schedule.rate, schedule.stopped))
    assert found == [(rate, rate == 0.5) for rate in rates]  # only the first one reaches a floor at which it stops
    assert schedule.epochs == len(losses)


def test_the_defaults_are_those_of_the_paper():
    plan = tiny()
    assert (plan.rate_decay, plan.patience, plan.rate_floor, plan.stop_at_floor) == (3.0, 5, 1e-7, True)
    assert plan.optimizer_memory == "task"
    assert plan.shuffle


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
@pytest.mark.parametrize(
    ("words", "images", "stopped"),
    [
        ({"rounds_per_task": 4, "stop_at_floor": False}, [20] * 4, [False] * 4),
        ({"rounds_per_task": 1, "epochs_per_round": 6}, [40], [True]),  # after the second of six epochs
    ],
)
def test_when_a_task_stops(words, images, stopped):
    finished = Run(tiny(method="stl", tasks=1, patience=1, rate_floor=2e-3, **words)).go()
    assert (reported(finished, "images"), reported(finished, "stopped")) == (images, stopped)


# ---- Adam


def plain(plan, client=0, memory="task", rates=None):
    """The same training of a first task with nothing of weft's but the images, their order and the initial weights."""
    runtime = CachedRuntime(plan)
    network, data = runtime.context(client, 0).network, runtime.batches(client, 0, "train")
    body = Mlp(INPUTS, plan.network_options["hidden"], plan.network_options["features"])
    head = torch.nn.Linear(plan.network_options["features"], network.classes)
    parameters = [body.fc1.weight, body.fc2.weight, body.fc1.bias, body.fc2.bias, head.weight, head.bias]
    first_head = network.initial_head(generator(plan.seed, "head", client, 0))
    torch.nn.utils.vector_to_parameters(torch.cat([initial_body(network, plan.seed), first_head]), parameters)
    places = itertools.product(range(plan.rounds_per_task), range(plan.epochs_per_round))
    for number, (round_index, epoch) in enumerate(places):
        if number == 0 or (memory == "round" and epoch == 0):
            optimizer = torch.optim.Adam(parameters, foreach=False, fused=False)
        optimizer.param_groups[0]["lr"] = rates[number] if rates else plan.learning_rate
        rng = generator(plan.seed, "shuffle", client, 0, round_index, epoch)
        for chosen in torch.from_numpy(rng.permutation(len(data))).split(plan.batch_size):
            images, labels = data.take(chosen)
            optimizer.zero_grad()
            functional.cross_entropy(head(body(images)), labels).backward()
            optimizer.step()
    return torch.nn.utils.parameters_to_vector(parameters).detach()


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
    plan, finished = tiny(**ADAM, optimizer_memory=memory), run(**ADAM, optimizer_memory=memory)
    for client in range(plan.clients):
        assert_alike(trained(finished, client), plain(plan, client, memory))
    other = plain(plan, memory="round" if memory == "task" else "task")
    assert (trained(finished) - other).abs().mean() > 1e-4  # the test can tell the two


@pytest.mark.usefixtures("flat_validation")
def test_the_rate_of_the_schedule_is_the_rate_that_is_used():
    plan = tiny(**ADAM, patience=2, learning_rate=9e-3)
    found = trained(Run(plan).go())
    assert_alike(found, plain(plan, rates=[9e-3, 9e-3, 9e-3, 3e-3, 3e-3, 1e-3]))
    assert (found - plain(plan)).abs().mean() > 1e-4


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
def orders(monkeypatch):
    """The indices that each training epoch of 20 images took, in order, and the size of each batch."""
    indices, sizes = [], []
    take = Batches.take

    def noted(self, chosen):
        if isinstance(chosen, torch.Tensor):  # validation takes slices, in order
            indices.extend(chosen.tolist())
            sizes.append(len(chosen))
        return take(self, chosen)

    monkeypatch.setattr(Batches, "take", noted)
    return lambda: ([tuple(indices[start : start + 20]) for start in range(0, len(indices), 20)], sizes)


def test_shuffled(orders):
    Run(tiny(method="stl", clients=2, tasks=2, rounds_per_task=2, epochs_per_round=2, batch_size=8)).go()
    found, sizes = orders()
    assert sizes[:3] == [8, 8, 4]
    assert all(sorted(order) == list(range(20)) for order in found)
    assert len(set(found)) == len(found) == 2 * 2 * 2 * 2  # a new order for each client, task, round and epoch


def test_not_shuffled(orders):
    Run(tiny(method="stl", clients=2, tasks=1, rounds_per_task=2, batch_size=8, shuffle=False)).go()
    assert orders()[0] == [tuple(range(20))] * 4


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

# methods that send something in every round
EACH_ROUND = [name for name in METHODS if class_of(name).traits.federated and name != "class-experts"]


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
        classes = {0: list(runtime.class_ids(0, 0))}
        return method.configure(server, 0, RoundContext(runtime.plan, 0, first, classes=classes))

    def tensors():
        other = ("values", "reply")  # JSON of the rest, and the last reply
        return {key: value for key, value in state_bits(state).items() if key not in other}

    initial = initial_body(network, 0)
    reply = ask(runtime, state, ("begin", "receive", "train", "upload"), 0, download(initial, True))
    assert bool(reply.tensors) == (name in EACH_ROUND)
    state.rate.stopped = True
    before, later = tensors(), download(-2 * initial, False)  # another theta_G
    reply = ask(runtime, state, ("receive", "train", "upload"), 1, later)
    assert tensors() == before
    assert reply.tensors == {}
    assert (reply.fields["images"], reply.fields["stopped"]) == (0, True)

    # what is uploaded once per task is uploaded nevertheless, and nothing else
    reply = ask(runtime, state, ("receive", "train", "upload", "end", "share", "test"), 2, later)
    assert set(reply.tensors) == set(method.share_task(state, runtime.context(0, 0)))
    assert "weights" not in reply.tensors
    assert len(reply.fields["accuracy"]) == 1


@pytest.mark.usefixtures("flat_validation")
@pytest.mark.parametrize("name", [name for name in METHODS if name != "stl"])
def test_when_all_have_stopped_theta_g_stays_and_the_next_task_starts_at_full_rate(name):
    finished = Run(tiny(method=name, rounds_per_task=4, patience=1, rate_floor=2e-3, sgd_rate=3e-3)).go()
    assert reported(finished, "images") == [20, 20, 0, 0] * 2
    if name not in EACH_ROUND:
        return
    uploads = [key for key in finished.parts("c2s") if key[3] == "weights" or key[3].startswith("model.")]
    sent = sorted({(task, round_index) for _, task, round_index, _ in uploads})
    assert sent == [(0, 0), (0, 1), (1, 0), (1, 1)]  # the round in which a client stops is still sent
    downloads = finished.parts("s2c")
    for task, body in {(task, body) for client, task, _, body in uploads if client == 0}:
        assert torch.equal(*(dense(downloads[0, task, r, body]) for r in (2, 3)))
