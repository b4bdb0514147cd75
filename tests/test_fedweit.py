"""FedWeIT: its limit, the paper's ablations, and each of its options."""

import copy

import pytest
import torch
from helpers import CachedRuntime, Run, layout_of, run, spread, tiny, vector
from methods_helpers import (
    adaptives,
    fresh,
    learned_bits,
    replies_of,
    sent,
    start_of_a,
    weit,
)
from torch.nn import functional

from weft import methods
from weft.core.storage import State
from weft.errors import WeftError
from weft.methods import averaging
from weft.methods.fedweit.fedweit import Options
from weft.methods.fedweit.formulas import rows_in_turn
from weft.wire.message import Message
from weft.wire.tensors import Rows, Sparse, dense, same

# ---- FedWeIT: its limit

PLAIN = {"ablate": "m,a,l1,l2", "keep": 1, "biases": "private", "average": "equal"}


@pytest.mark.parametrize("changed", [{}, {"clients_per_round": 2, "tasks": 3}], ids=["all", "some"])
def test_fedweit_without_all_that_is_its_own_is_fedavg(changed):
    ours = weit(**PLAIN, **changed)
    plain = run(method="fedavg", method__biases="private", method__average="equal", **changed)
    assert ours.matrices == plain.matrices
    assert torch.equal(dense(ours.server.tensors["weights"]), plain.server.weights)
    for client in range(3):
        assert torch.equal(ours.clients[client].weights, plain.clients[client].weights)
    for key, value in plain.parts("c2s").items():
        assert torch.equal(dense(ours.parts("c2s")[key]), value)


@pytest.mark.parametrize("word", ["m", "a"])
def test_each_part_matters_to_that_limit(word):
    ablate = ",".join(sorted(set(PLAIN["ablate"].split(",")) - {word}))
    plain = run(method="fedavg", method__biases="private", method__average="equal")
    assert not torch.equal(weit(**PLAIN | {"ablate": ablate}).clients[0].weights, plain.clients[0].weights)


# ---- FedWeIT: its options


class UnevenWorld(CachedRuntime):
    """Client 0 has half as many training images as the others."""

    def _load(self, client, step, part):
        batches = super()._load(client, step, part)
        if client == 0 and part == "train":
            batches = copy.copy(batches)
            batches.images, batches.labels = batches.images[::2], batches.labels[::2]
        return batches


SOME = {"clients_per_round": 2, "train_unchosen": True}
EFFECTS = [  # option, another value, what else has to be so for it to matter
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
    assert {option for option, _, _ in EFFECTS} | {"average"} == set(Options.model_fields)


@pytest.mark.parametrize("name", ["fedavg", "fedweit"])
def test_average_has_an_effect_where_clients_differ_in_size(name):
    found = []
    for average in ("equal", "examples"):
        plan = tiny(method=name, method__average=average)
        finished = Run(plan, runtime=UnevenWorld(plan)).go()
        assert {reply.fields["examples"] for reply in finished.answers} == {10, 20}
        found.append(dense(finished.server.tensors["weights"]))
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
    """Alg. 1 line 9: rows that nobody sent are not there, and a client keeps its own."""
    method = methods.load("fedweit", {"rows": "strongest", **options})
    server = State()
    first, second, third = (
        rows([True, False, False], 1),
        rows([True, False, False], 3),
        rows([False, False, True], 4, 6),
    )
    method.aggregate(server, replies_of(first, second, third, examples=(10, 30, 10)))
    found = server.tensors["weights"]
    assert found.kept.tolist() == [True, False, True]
    assert found.dense().tolist() == pytest.approx(wanted)
    method.aggregate(server, replies_of({}, {"adaptive": Sparse.of(vector(1))}))
    assert same(server.tensors["weights"], found)


def test_b_becomes_theta_g_where_it_is_not_zero():
    """Section 3.4: B(n) = theta_G(n) for the n where theta_G is not 0."""
    finished = fresh(method="fedweit", method__keep=0.3)
    client, layout = finished.clients[0], finished.layout
    own = client.weights.clone()
    theta_g = torch.arange(1.0, layout.weights + 1)
    kept = torch.arange(layout.rows) % 2 == 0
    message = Message("server", "client-0", "x", (), 1, 0, {"global": Rows.of(theta_g, layout.segments, kept)})
    finished.method.receive(client, message, finished.runtime.context(0, 1))
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
    assert sums.bytes == 12 * (
        4 * (3 * 3072 + 5 * 8) + 3
    )  # twelve replies: values of eight rows, and a bit for each of 24


def test_the_rows_sent_are_those_of_the_strongest_mask_and_of_b_itself():
    for send in ("weights", "product"):
        finished = fresh(method="fedweit", method__send=send, method__rows="strongest")
        state, layout = finished.clients[0], finished.layout
        part = finished.parts("c2s")[0, 1, 1, "weights"]
        mask = state.mask.sigmoid()
        for layer in layout.layers:
            kept = part.kept[layer.row_span]
            assert mask[layer.row_span][kept].min() >= mask[layer.row_span][~kept].max()
        base = state.weights
        factor = spread(layout, mask) if send == "product" else 1.0
        torch.testing.assert_close(part.dense(), Rows.of(base * factor, layout.segments, part.kept).dense())


def test_rows_are_sent_in_turn_the_same_by_everybody():
    finished = weit(tasks=2, keep=0.3)
    rounds = finished.runtime.plan.rounds_per_task
    for (_, step, round_index, name), value in finished.parts("c2s").items():
        if name == "weights":  # on and on, over the ends of tasks
            assert torch.equal(value.kept, rows_in_turn(finished.layout, step * rounds + round_index, 0.3))
    down = [value for (*_, name), value in finished.parts("s2c").items() if name == "weights"]
    assert {int(value.kept.sum()) for value in down} == {0, 3 + 5}  # what everybody draws from the seed is not sent


def test_a_client_that_was_not_asked_is_told_all_that_changed_meanwhile():
    finished = weit(clients=5, clients_per_round=2, tasks=2, rounds_per_task=4, keep=0.3)
    initial = finished.runtime.context(0, 0).initial()[: finished.layout.weights]
    theta_g, known, counts = initial.clone(), [initial.clone() for _ in range(5)], set()
    down, up = finished.parts("s2c"), finished.parts("c2s")
    for step, round_index in sorted({place[1:3] for place in up if place[3] == "weights"}):
        for client in range(5):
            if (news := down.get((client, step, round_index, "global"))) is not None:
                assert torch.equal(news.over(known[client]), theta_g)
                counts.add(int(news.kept.sum()))
                known[client] = theta_g.clone()
        sent_up = [up[c, step, round_index, "weights"] for c in range(5) if (c, step, round_index, "weights") in up]
        averaging.average(sent_up, [1.0] * len(sent_up)).over(theta_g)
    assert len(sent_up) == 2
    assert len(counts) > 2  # some had missed more than others


def test_who_has_left_or_sent_nothing_is_told_again():
    """A client that sends no B, as its rate has reached the floor, has not used what it was told."""
    method = methods.load("fedweit", {"keep": 0.5})
    layout, plan = layout_of((4, 1)), tiny(method="fedweit", method__keep=0.5)
    server = State()
    method.open_server(server, torch.zeros(4), layout, plan)
    for turn in range(2):
        told = [method.brief(server, client, 0, False, plan)[1] for client in (0, 1)]
        rows = Rows.of(torch.full((4,), 1.0 + turn), layout.segments, rows_in_turn(layout, turn, 0.5))
        replies = replies_of({"weights": rows}, {})
        for client in (0, 1):
            method.confirm(server, client, replies[client], told[client])
        method.aggregate(server, replies)
    news = [method.brief(server, client, 0, False, plan)[0]["weights"].kept.tolist() for client in (0, 1)]
    assert news == [[False, False, True, True], [True] * 4]
    assert method.brief(server, 0, 0, False, plan)[1] == {"turn": 2}
    method.part(server, 0)
    assert method.brief(server, 0, 0, False, plan)[0]["weights"].kept.all()


def test_a_late_answer_confirms_what_came_with_its_own_request():
    """The first request's answer comes after the second was sent, and the second never arrives: it is told again."""
    method = methods.load("fedweit", {"keep": 0.5})
    layout, plan = layout_of((4, 1)), tiny(method="fedweit", method__keep=0.5)
    server = State()
    method.open_server(server, torch.zeros(4), layout, plan)

    def merge(turn):
        rows = Rows.of(torch.full((4,), 1.0 + turn), layout.segments, rows_in_turn(layout, turn, 0.5))
        replies = replies_of({"weights": rows})
        method.aggregate(server, replies)
        return replies[0]

    _, first = method.brief(server, 1, 0, False, plan)
    late = merge(0)
    sent, second = method.brief(server, 1, 0, False, plan)
    assert sent["weights"].kept.tolist() == [True, True, False, False]
    method.confirm(server, 1, late, first)
    merge(1)
    assert method.brief(server, 1, 0, False, plan)[0]["weights"].kept.all()
    method.confirm(server, 1, late, second)
    method.confirm(server, 1, late, first)  # in the wrong order: what has arrived has arrived
    assert method.brief(server, 1, 0, False, plan)[0]["weights"].kept.tolist() == [False, False, True, True]


def test_rows_that_only_a_late_answer_brings_are_not_its_alone():
    method = methods.load("fedweit", {"keep": 0.5})
    layout, plan = layout_of((4, 1)), tiny(method="fedweit", method__keep=0.5)
    server = State()
    method.open_server(server, torch.zeros(4), layout, plan)
    in_turn = [Rows.of(torch.full((4,), 1.0), layout.segments, rows_in_turn(layout, 1, 0.5)) for _ in range(3)]
    late = Rows.of(torch.full((4,), 100.0), layout.segments, rows_in_turn(layout, 0, 0.5))
    method.aggregate(server, replies_of(*({"weights": rows} for rows in [*in_turn, late]), examples=[1] * 4))
    assert server.anchor.tolist() == [25, 25, 1, 1]  # a quarter of the way; and the mean of those in turn
    assert server.tensors["weights"].dense().tolist() == [25, 25, 1, 1]


def test_theta_is_eq_1():
    """What answers for a task is B * m + A + sum of alpha * A_f, written out here with dense vectors."""
    finished = weit(tasks=3, kb_size="all")
    state, layout = finished.clients[1], finished.layout
    for step in range(3):
        mask = dense(state.archive[f"mask/{step}"])
        wanted = state.weights * spread(layout, mask) + start_of_a(finished)
        wanted = wanted + dense(state.archive[f"adaptive/{step}"])
        keys = state.numbers[f"foreign/{step}"]
        assert len(keys) == 2 * step
        for place, key in enumerate(keys):
            alpha = dense(state.archive[f"attention/{step}"]).view(len(layout.layers), len(keys))[:, place]
            by_weight = torch.cat([alpha[i].expand(x.rows * x.width) for i, x in enumerate(layout.layers)])
            wanted = wanted + by_weight * dense(state.archive[f"foreign/{key}"])
        torch.testing.assert_close(finished.theta(1, step)[: layout.weights], wanted)


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
    state, lesson = State(), running.runtime.context(0, 0)
    running.method.join(state, lesson)
    running.method.begin(state, lesson)
    share = 0.25 if origin == "zero" else 0.0  # A is counted from its start, and is none
    torch.testing.assert_close(state.adaptive, state.weights * share)
    work = running.method.open(state, lesson)
    running.method.compose(work)
    theta = lesson.network.vector[: lesson.layout.weights]
    torch.testing.assert_close(theta, state.weights * 0.75)  # a half of B, and a quarter


@pytest.mark.parametrize("name", ["fedweit", "apd"])
@pytest.mark.parametrize(("mask", "past"), [("sigmoid", "joint"), ("linear", "closed"), ("sigmoid", "frozen")])
def test_the_gradients_of_a_step_are_those_of_eq_2(name, mask, past):
    """The whole objective written out with autograd: loss, l1, drift, decay; past A put, moved, or learned too."""
    weights = {"lambda_sparsity": 0.3, "lambda_mask": 0.2, "lambda_drift": 5.0, "weight_decay": 0.05}
    options = {"mask": mask, "mask_start": 0.5, "mask_spread": 0.2, "sparsify": "gradient", "past": past, **weights}
    running = Run(tiny(method=name, **{f"method__{key}": value for key, value in options.items()})).go_to(1)
    method, state, lesson, layout = running.method, running.clients[0], running.runtime.context(0, 1), running.layout
    method.begin(state, lesson)
    if method.traits.federated:
        tensors, numbers = method.brief(running.server, 0, 1, True, running.plan)
        method.receive(state, Message("server", "client-0", "x", (), 1, 0, tensors, numbers), lesson)
    rng = torch.Generator().manual_seed(0)
    before = dense(state.archive["adaptive/0"])
    if past != "frozen":  # as an earlier round of the task has left it
        state.archive["adaptive/0"] = Sparse.of(before + 0.01 * torch.randn(layout.weights, generator=rng))
    work = method.open(state, lesson)
    work.variables["weights"].add_(0.01 * torch.randn(layout.weights, generator=rng))
    images, labels = running.runtime.batches(0, 1, "train").take(torch.arange(20))
    for _ in range(2):  # of the second step too: nothing is left over from the first
        method.compose(work)
        lesson.network.compute_gradient(images, labels)
        method.pull_back(work)
        method.penalise(work)
        found = {name: gradient.clone() for name, gradient in work.gradients.items()}
        method.constrain(work, 0.1)

    v = {name: value.clone().requires_grad_() for name, value in work.variables.items()}
    wanted = {"weights", "mask", "adaptive", "private", *(["adaptive/0"] if past == "joint" else [])}
    wanted |= {"attention"} if name == "fedweit" else set()
    assert set(v) == set(found) == wanted
    m = v["mask"].sigmoid() if mask == "sigmoid" else v["mask"]
    theta = v["weights"] * spread(layout, m) + start_of_a(running) + v["adaptive"]
    for place, key in enumerate(state.numbers.get("foreign", [])):
        alpha = v["attention"].view(2, 2)
        by_weight = torch.cat([alpha[i, place].expand(x.rows * x.width) for i, x in enumerate(layout.layers)])
        theta = theta + by_weight * dense(state.archive[f"foreign/{key}"])
    first, second = (theta[layer.span].view(layer.shape) for layer in layout.layers)
    bias1, bias2, head, bias3 = v["private"].split([8, 16, 32, 2])
    x = functional.relu(functional.linear(images.flatten(1), first, bias1))
    x = functional.relu(functional.linear(x, second, bias2))
    loss = functional.cross_entropy(functional.linear(x, head.view(2, 16), bias3), labels)
    past_mask, past_a = spread(layout, dense(state.archive["mask/0"])), dense(state.archive["adaptive/0"])
    past_a = v.get("adaptive/0", past_a)
    moved = (v["weights"] - state.reference) * past_mask + past_a - before
    objective = loss + 0.3 * (v["adaptive"].abs().sum() + past_a.abs().sum()) + 0.2 * m.abs().sum()
    objective = objective + 5 * moved.square().sum()
    objective = objective + 0.05 * (v["adaptive"].square().sum() + v["mask"].square().sum())
    for key, gradient in zip(v, torch.autograd.grad(objective, list(v.values())), strict=True):
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4, msg=lambda said, n=key: f"{n}: {said}")


def test_a_run_of_a_weft_that_sent_other_rows_is_refused_in_words():
    with pytest.raises(WeftError, match="begin it anew"):
        methods.load("fedweit", {}).brief(State(numbers={"held": {}}), 0, 0, False, tiny())
