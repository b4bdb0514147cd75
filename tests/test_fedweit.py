"""FedWeIT: its limit, each of its options, its formulas, and the rows that are sent."""

import copy
import dataclasses

import pytest
import torch
from helpers import CachedRuntime, Run, layout_of, run, spread, tiny, vector
from methods_helpers import (
    adaptives,
    begun,
    fresh,
    learned_bits,
    prepared,
    sent,
    start_of_a,
    started,
    updates_of,
    weit,
)
from torch.nn import functional

from weft import methods
from weft.methods import averaging
from weft.methods.averaging import Update, Updates
from weft.methods.fedweit.fedweit import FedWeITOptions, FedWeITServer
from weft.methods.fedweit.formulas import rows_in_turn
from weft.methods.method import Download, RoundContext, ServerContext
from weft.wire.tensors import Rows, Sparse, dense, same

# ---- its limit

PLAIN = {"ablate": "m,a,l1,l2", "keep": 1, "biases": "private", "average": "equal"}


@pytest.mark.parametrize("changed", [{}, {"clients_per_round": 2, "tasks": 3}], ids=["all", "some"])
def test_fedweit_without_its_parts_is_fedavg(changed):
    ours = weit(**PLAIN, **changed)
    plain = run(method="fedavg", method__biases="private", method__average="equal", **changed)
    assert ours.matrices == plain.matrices
    assert torch.equal(dense(ours.server.weights), plain.server.weights)
    for client in range(3):
        assert torch.equal(ours.clients[client].weights, plain.clients[client].weights)
    for key, value in plain.parts("c2s").items():
        assert torch.equal(dense(ours.parts("c2s")[key]), value)


@pytest.mark.parametrize("word", ["m", "a"])
def test_each_part_matters_to_that_limit(word):
    ablate = ",".join(sorted(set(PLAIN["ablate"].split(",")) - {word}))
    plain, ours = (weit(**PLAIN | {"ablate": words}) for words in (PLAIN["ablate"], ablate))
    assert not torch.equal(ours.clients[0].weights, plain.clients[0].weights)


# ---- its options


class UnevenRuntime(CachedRuntime):
    """Client 0 has half as many training images as the others."""

    def _load(self, client, task, split):
        batches = super()._load(client, task, split)
        if client == 0 and split == "train":
            batches = copy.copy(batches)
            batches.images, batches.labels = batches.images[::2], batches.labels[::2]
        return batches


SOME = {"clients_per_round": 2, "train_unchosen": True}
EFFECTS = [  # option, another value, other options that it needs to matter
    ("biases", "shared", {}),
    ("keep", 0.7, {}),
    ("lambda_sparsity", 0.05, {}),
    ("lambda_mask", 0.5, {}),
    ("lambda_mask", 0.5, {"mask": "linear", "mask_start": 1.0}),
    ("sparsify", "gradient", {}),
    ("prune_below", 0.01, {"adaptive_keep": 1}),
    ("adaptive_keep", 0.5, {}),
    ("lambda_drift", 1.0, {}),
    ("weight_decay", 0.1, {}),
    ("weight_decay", 0.1, {"ablate": "m,a"}),
    ("mask", "linear", {"mask_start": 1.0}),
    ("mask_start", 1.0, {}),
    ("mask_spread", 0.5, {}),
    ("mask_trained", False, {}),
    ("send", "product", {}),
    ("rows", "strongest", {}),
    ("divide", "clients", {"rows": "strongest"}),  # in turn all clients send the same rows
    ("divide", "anchored", {"rows": "strongest"}),
    ("adaptive_origin", "zero", {}),
    ("adaptive_rank", "size", {}),
    ("mask_rate", 30.0, {}),
    ("adaptive_rate", 3.0, {}),
    ("attention_rate", 30.0, {}),
    ("kb_size", 1, {}),
    ("kb_size", 0, {}),
    ("kb_from", "last", {"tasks": 3, "kb_size": "all"}),
    ("kb_own", True, {}),
    ("kb_clients", "chosen", SOME),
    ("share", 3, {}),
    ("share", "nothing", {}),
    ("attention_start", "random", {}),
    ("past", "closed", {}),
    ("past", "joint", {}),
    ("past", "joint", {"past": "closed"}),
    ("drift_from", "received", {}),
    ("drift_from", "received", {"ablate": "a_comm"}),
    ("drift_from", "received", {"past": "closed"}),
    ("adaptive_start", 0.0, {}),
    ("ablate", "l2", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "value", "context"), EFFECTS, ids=[f"{o}={v}-{c}" for o, v, c in EFFECTS])
def test_each_option_has_an_effect(option, value, context):
    first, second = weit(**context), weit(**context | {option: value})
    assert sent(first) != sent(second)
    assert learned_bits(first) != learned_bits(second)


def test_no_option_is_left_out_above():
    of_every_method = {"average", "heads", "dropout"}  # tested for all of them
    assert {option for option, _, _ in EFFECTS} | of_every_method == set(FedWeITOptions.model_fields)


@pytest.mark.parametrize("name", ["fedavg", "fedweit"])
def test_average_has_an_effect_where_clients_differ_in_size(name):
    found = []
    for average in ("equal", "examples"):
        plan = tiny(method=name, method__average=average)
        finished = Run(plan, runtime=UnevenRuntime(plan)).go()
        assert {reply.fields["examples"] for reply in finished.answers} == {10, 20}
        found.append(dense(finished.server.weights))
    assert (found[0] - found[1]).abs().max() > 1e-4


SEGMENTS = ((2, 1), (1, 2))  # two rows of one weight, one row of two


def rows(kept, *values):
    return {"weights": Rows(SEGMENTS, torch.tensor(kept), vector(*values))}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"divide": "senders"}, [2, 0, 4, 6]),
        ({"divide": "clients"}, [4 / 3, 0, 4 / 3, 2]),
        ({"divide": "senders", "average": "examples"}, [2.5, 0, 4, 6]),
        ({"divide": "clients", "average": "examples"}, [2, 0, 0.8, 1.2]),
    ],
)
def test_fedweit_mean_by_hand(options, wanted):
    """Alg. 1 line 9; rows that nobody sent are left out, and a client keeps its values there."""
    method = methods.load("fedweit", {"rows": "strongest", **options})
    server = FedWeITServer(whole=torch.zeros(4), changed=torch.zeros(3))
    sent = rows([True, False, False], 1), rows([True, False, False], 3), rows([False, False, True], 4, 6)
    method.aggregate(server, updates_of(*sent, examples=(10, 30, 10)), None)
    found = server.weights
    assert found.kept.tolist() == [True, False, True]
    assert found.dense().tolist() == pytest.approx(wanted)
    method.aggregate(server, updates_of({}, {}), None)
    assert same(server.weights, found)


def test_b_becomes_theta_g_where_it_is_not_zero():
    """Section 3.4: B(n) = theta_G(n) for the n where theta_G is not 0."""
    finished = fresh(method="fedweit", method__keep=0.3)
    client, layout = finished.clients[0], finished.layout
    own = client.weights.clone()
    theta_g = torch.arange(1.0, layout.weights + 1)
    kept = torch.arange(layout.rows) % 2 == 0
    download = Download({"weights": Rows.of(theta_g, layout.segments, kept)})
    finished.method.receive(client, download, finished.runtime.context(0, 1))
    for layer, found in layout.by_layer(client.weights):
        for row in range(layer.rows):
            source = theta_g if kept[layer.first_row + row] else own
            assert torch.equal(found[row], source[layer.span].view(layer.rows, -1)[row])


def kept_rows(finished):
    return [value.kept for (*_, name), value in finished.parts("c2s").items() if name == "weights"]


def test_keep_is_the_share_of_rows_that_is_sent():
    for keep, each in ((0.3, [3, 5]), (0.5, [4, 8]), (1.0, [8, 16])):  # of 8 and 16 rows, rounded up
        for kept in kept_rows(weit(keep=keep)):
            assert [int(part.sum()) for part in kept.split([8, 16])] == each
    sums = weit(keep=0.3).ledger.by("direction", "tensor")["c2s", "weights"]
    assert sums.bytes == 12 * (4 * (3 * 3072 + 5 * 8) + 3)  # of twelve replies: eight rows, and a bit for each of 24


def test_the_rows_sent_are_those_of_the_strongest_mask_and_of_b_itself():
    for send in ("base", "product"):
        finished = fresh(method="fedweit", method__send=send, method__rows="strongest")
        state, layout = finished.clients[0], finished.layout
        part = finished.parts("c2s")[0, 1, 1, "weights"]
        mask = state.mask.sigmoid()
        for layer in layout.layers:
            kept = part.kept[layer.row_span]
            assert mask[layer.row_span][kept].min() >= mask[layer.row_span][~kept].max()
        value = state.weights * (spread(layout, mask) if send == "product" else 1.0)
        torch.testing.assert_close(part.dense(), Rows.of(value, layout.segments, part.kept).dense())


def test_all_clients_of_a_round_send_the_same_rows_in_turn():
    finished = weit(tasks=2, keep=0.3)
    rounds = finished.plan.rounds_per_task
    for (_, task, round_index, name), value in finished.parts("c2s").items():
        if name == "weights":  # turns continue in the next task
            assert torch.equal(value.kept, rows_in_turn(finished.layout, task * rounds + round_index, 0.3))
    down = [value for (*_, name), value in finished.parts("s2c").items() if name == "weights"]
    assert {int(value.kept.sum()) for value in down} == {0, 3 + 5}  # the initial weights are drawn and not sent


def test_a_client_that_was_not_selected_is_sent_all_that_changed_meanwhile():
    finished = weit(clients=5, clients_per_round=2, tasks=2, rounds_per_task=4, keep=0.3)
    initial = finished.ctx.initial[: finished.layout.weights]
    theta_g, known, counts = initial.clone(), [initial.clone() for _ in range(5)], set()
    down, up = finished.parts("s2c"), finished.parts("c2s")
    for task, round_index in sorted({key[1:3] for key in up if key[3] == "weights"}):
        keys = [(client, task, round_index, "weights") for client in range(5)]
        for client, key in enumerate(keys):
            if (news := down.get(key)) is not None:
                assert torch.equal(news.over(known[client]), theta_g)
                counts.add(int(news.kept.sum()))
                known[client] = theta_g.clone()
        sent_up = [up[key] for key in keys if key in up]
        averaging.average(sent_up, [1.0] * len(sent_up)).over(theta_g)
    assert len(sent_up) == 2
    assert len(counts) > 2  # some had missed more than others


class FourRows:
    """A server whose network has four rows of one weight, of which two are sent in a round."""

    def __init__(self):
        self.method, self.layout = methods.load("fedweit", {"keep": 0.5}), layout_of((4, 1))
        self.plan = tiny(method="fedweit", method__keep=0.5)
        self.server = self.method.Server()
        self.server.start(ServerContext(self.plan, self.layout, torch.zeros(4)), self.method.options)

    def configure(self, client):
        return self.method.configure(self.server, client, RoundContext(self.plan, 0, False))

    def rows_sent_to(self, client):
        return self.configure(client).tensors["weights"].kept.tolist()

    def rows(self, turn, value):
        return {"weights": Rows.of(torch.full((4,), value), self.layout.segments, rows_in_turn(self.layout, turn, 0.5))}

    def aggregate(self, *updates):
        self.method.aggregate(self.server, Updates(list(updates)), None)


def test_a_client_that_has_left_or_sent_nothing_is_sent_rows_again():
    """A client that sends no B, as its rate has reached the floor, has not used what it received."""
    four = FourRows()
    for turn in range(2):
        fields = [four.configure(client).fields for client in (0, 1)]
        first = Update(0, 0, four.rows(turn, 1.0 + turn), {}, {}, fields[0], received=True)
        four.aggregate(first, Update(1, 0, {}, {}, {}, fields[1], received=False))
    assert [four.rows_sent_to(client) for client in (0, 1)] == [[False, False, True, True], [True] * 4]
    assert four.configure(0).fields == {"turn": 2, "version": 2}
    four.server.remove_client(0)
    assert four.rows_sent_to(0) == [True] * 4


def test_a_late_reply_confirms_what_came_with_its_request():
    """The reply to the first request comes after the second was sent, which never arrives: its rows are sent again."""
    four = FourRows()

    def confirm(fields):
        four.aggregate(Update(1, 0, {}, {}, {}, fields, received=True))

    first = four.configure(1).fields
    four.aggregate(Update(0, 0, four.rows(0, 1.0), {}, {}, None, received=True))
    second = four.configure(1).fields
    assert four.rows_sent_to(1) == [True, True, False, False]
    confirm(first)
    four.aggregate(Update(0, 0, four.rows(1, 2.0), {}, {}, None, received=True))
    assert four.rows_sent_to(1) == [True] * 4
    confirm(second)
    confirm(first)  # in the wrong order: nothing that was confirmed is forgotten
    assert four.rows_sent_to(1) == [False, False, True, True]


def test_rows_that_only_a_late_reply_has_count_by_their_share():
    four = FourRows()
    sent = [*(four.rows(1, 1.0) for _ in range(3)), four.rows(0, 100.0)]
    four.method.aggregate(four.server, updates_of(*sent, examples=[1] * 4), None)
    assert four.server.whole.tolist() == [25, 25, 1, 1]  # a quarter of the way; and the mean of those in turn
    assert four.server.weights.dense().tolist() == [25, 25, 1, 1]


# ---- its formulas


def by_layer(layout, alpha):
    """Each layer's number, repeated for all its weights."""
    return torch.cat([alpha[index].expand(each.rows * each.width) for index, each in enumerate(layout.layers)])


def test_theta_is_eq_1():
    """A task is evaluated with B * m + A + sum of alpha * A_f, written out here with dense vectors."""
    finished = weit(tasks=3, kb_size="all")
    state, layout = finished.clients[1], finished.layout
    for number, task in state.tasks.items():
        wanted = state.weights * spread(layout, task.mask) + start_of_a(finished) + dense(task.adaptive)
        assert len(task.foreign) == 2 * number
        for index, key in enumerate(task.foreign):
            alpha = task.attention.view(len(layout.layers), -1)[:, index]
            wanted = wanted + by_layer(layout, alpha) * dense(state.knowledge[key])
        torch.testing.assert_close(finished.theta(1, number)[: layout.weights], wanted)
    assert len(state.tasks) == 3


@pytest.mark.slow
def test_prune_below_holds_for_what_is_stored_and_sent():
    for past in ("frozen", "joint", "closed"):
        finished = weit(tasks=3, prune_below=0.01, past=past, lambda_sparsity=0.1, adaptive_keep=1)
        stored = [value for client in range(3) for value in adaptives(finished, client).values()]
        given = [dense(value) for key, value in finished.parts("c2s").items() if key[-1] == "adaptive"]
        assert len(stored) == len(given) == 9
        for value in stored + given:
            assert value.count_nonzero() > 0
            assert value[value != 0].abs().min() >= 0.01, past


def test_masks_that_are_not_trained_stay_where_they_started():
    finished = weit(mask_trained=False, mask_start=0.25)
    assert (finished.clients[0].mask == 0.25).all()
    assert (weit(mask_start=0.25).clients[0].mask != 0.25).sum() > 12  # of 24; a unit may be dead


@pytest.mark.parametrize("origin", ["start", "zero"])
def test_a_starts_at_a_share_of_the_initial_weights(origin):
    running = Run(tiny(method="fedweit", method__adaptive_start=0.25, method__adaptive_origin=origin))
    state, ctx = started(running.runtime)
    share = 0.25 if origin == "zero" else 0.0  # otherwise it is counted from its start
    torch.testing.assert_close(state.adaptive, state.weights * share)
    prepared(running.method, state, ctx).compose(False)
    theta = ctx.network.vector[: ctx.layout.weights]
    torch.testing.assert_close(theta, state.weights * 0.75)  # a half of B, and a quarter


@pytest.mark.parametrize("name", ["fedweit", "apd"])
@pytest.mark.parametrize(("mask", "past"), [("sigmoid", "joint"), ("linear", "closed"), ("sigmoid", "frozen")])
def test_the_gradients_of_a_step_are_those_of_eq_2(name, mask, past):
    """The whole objective written out with autograd: loss, l1, drift, decay; past A fixed, changed, or trained."""
    weights = {"lambda_sparsity": 0.3, "lambda_mask": 0.2, "lambda_drift": 5.0, "weight_decay": 0.05}
    options = {"mask": mask, "mask_start": 0.5, "mask_spread": 0.2, "sparsify": "gradient", "past": past, **weights}
    running = Run(tiny(method=name, **{f"method__{key}": value for key, value in options.items()})).go_to(1)
    state, ctx, _ = begun(running)
    layout, rng = running.layout, torch.Generator().manual_seed(0)
    before = dense(state.tasks[0].adaptive)
    if past != "frozen":  # as an earlier round of the task has left it
        changed = Sparse.of(before + 0.01 * torch.randn(layout.weights, generator=rng))
        state.tasks[0] = dataclasses.replace(state.tasks[0], adaptive=changed)
    training = prepared(running.method, state, ctx)
    training.variables["weights"].add_(0.01 * torch.randn(layout.weights, generator=rng))
    images, labels = ctx.load("train").take(torch.arange(20))
    for _ in range(2):  # of the second step too: nothing is left over from the first
        training.compose(False)
        ctx.network.compute_gradient(images, labels)
        training.backward()
        for penalty in training.penalties:
            penalty()
        found = {name: gradient.clone() for name, gradient in training.gradients.items()}
        for callback in training.after_step:
            callback(0.1)

    v = {name: value.clone().requires_grad_() for name, value in training.variables.items()}
    wanted = {"weights", "mask", "adaptive", "private", *(["adaptive/0"] if past == "joint" else [])}
    wanted |= {"attention"} if name == "fedweit" else set()
    assert set(v) == set(found) == wanted
    m = v["mask"].sigmoid() if mask == "sigmoid" else v["mask"]
    theta = v["weights"] * spread(layout, m) + start_of_a(running) + v["adaptive"]
    for index, key in enumerate(getattr(state, "foreign", [])):
        theta = theta + by_layer(layout, v["attention"].view(2, 2)[:, index]) * dense(state.knowledge[key])
    first, second = (theta[layer.span].view(layer.shape) for layer in layout.layers)
    bias1, bias2, head, bias3 = v["private"].split([8, 16, 32, 2])
    x = functional.relu(functional.linear(images.flatten(1), first, bias1))
    x = functional.relu(functional.linear(x, second, bias2))
    loss = functional.cross_entropy(functional.linear(x, head.view(2, 16), bias3), labels)
    past_a = v.get("adaptive/0", dense(state.tasks[0].adaptive))
    moved = (v["weights"] - state.reference) * spread(layout, state.tasks[0].mask) + past_a - before
    objective = loss + 0.3 * (v["adaptive"].abs().sum() + past_a.abs().sum()) + 0.2 * m.abs().sum()
    objective = objective + 5 * moved.square().sum()
    objective = objective + 0.05 * (v["adaptive"].square().sum() + v["mask"].square().sum())
    for key, gradient in zip(v, torch.autograd.grad(objective, list(v.values())), strict=True):
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4, msg=lambda said, n=key: f"{n}: {said}")
