"""The other methods of the paper: each against its formula, its limit, and without its characteristic term."""

import math

import pytest
import torch
from helpers import Run, assert_other, assert_same, run, tiny, vector
from methods_helpers import OneNumber, assert_gradient_of, begun, gradients, prepared, started
from torch.nn import functional

import weft
from weft.core import client as client_module
from weft.methods import COMBINATIONS, METHODS, class_of
from weft.methods.continual.ewc import curvature_gradient
from weft.wire.tensors import Sparse, dense

FEDERATED = [name for name in (*METHODS, *COMBINATIONS) if class_of(name).traits.federated and name != "fedweit"]
AVERAGING = [name for name in FEDERATED if "keep" in class_of(name).Options.model_fields]  # they send theta itself
WELLS = ((1.0, 1.0), (4.0, -1.0))  # the sum of both losses is least at (1 * 1 - 4 * 1) / 5 = -0.6


# ---- limits

ALIKE = {"sgd_rate": 0.05, "method__average": "equal", "tasks": 3}
SLOW_SGD = {"sgd_rate": 0.02, "method__dropout": 0.0}
PLAIN_SGD = {"optimizer": "sgd", "sgd_rate": 0.02}
LIMITS = {  # a method without its own term, the method that it is then, and the term
    "fedprox": ({"tasks": 3, "method__mu": 0}, "fedavg", {"tasks": 3}, {"method__mu": 0.5}),
    "scaffold": (
        ALIKE | {"method__variates": False},
        "fedavg",
        ALIKE | {"optimizer": "sgd"},
        {"method__variates": True},
    ),
    "ewc": ({"tasks": 3, "method__lambda_ewc": 0}, "local", {"tasks": 3}, {"method__lambda_ewc": 1e3}),
    "fedcurv": ({"method__lambda_fedcurv": 0}, "fedavg", {}, {"method__lambda_fedcurv": 100}),
    "stable-sgd": (SLOW_SGD | {"method__decay": 1.0}, "local", PLAIN_SGD, {"method__decay": 0.9}),
    "stable-sgd dropout": (SLOW_SGD | {"method__decay": 1.0}, "local", PLAIN_SGD, {"method__dropout": 0.1}),
}


@pytest.mark.parametrize("case", LIMITS)
def test_without_its_term_a_method_is_another_in_every_bit(case):
    without, other, words, term = LIMITS[case]
    limit = run(method=other, **words)
    assert_same(run(method=case.partition(" ")[0], **without), limit)
    assert_other(run(method=case.partition(" ")[0], **without | term), limit)


# ---- FedProx


def test_fedprox_pulls_towards_theta_g():
    """One step of Adam forgets a gradient's size, so with SGD: theta <- theta - rate * (g + mu * (theta - theta_G))."""
    one, theta = OneNumber("fedprox", [(1.0, 1.0)], mu=2.0), 0.0
    for _ in range(2):
        theta_g = theta  # of one client: the mean is its theta
        for _ in range(3):
            theta -= 0.1 * (theta - 1.0 + 2.0 * (theta - theta_g))
        assert one.round(steps=3) == pytest.approx(theta)
    assert theta > 0.1


@pytest.mark.parametrize("biases", ["shared", "private"])
def test_the_gradient_of_fedprox_is_that_of_its_formula(biases):
    running, training, added = gradients("fedprox", method__mu=0.7, method__biases=biases)
    layout, server = running.layout, running.server
    theta_g = torch.cat([server.weights, server.biases])
    assert len(theta_g) == (layout.body if biases == "shared" else layout.weights)

    def penalty(theta):
        return 0.35 * (theta[: len(theta_g)] - theta_g).square().sum()

    assert_gradient_of(penalty, training, added, layout, rtol=1e-4, atol=1e-6)


# ---- SCAFFOLD


@pytest.mark.slow
def test_scaffold_finds_the_optimum_that_fedavg_misses():
    """Ten local steps on two different losses: FedAvg ends beside the optimum of their sum, SCAFFOLD in it."""
    plain = OneNumber("scaffold", WELLS, variates=False).rounds(200, steps=10)
    first, second = 1 - 0.9**10, 1 - 0.6**10  # how far a client gets from theta_G towards its own best
    assert plain == pytest.approx((first - second) / (first + second), abs=1e-5)
    assert abs(plain + 0.6) > 0.3
    assert OneNumber("scaffold", WELLS).rounds(200, steps=10) == pytest.approx(-0.6, abs=1e-4)


def test_scaffold_by_hand():
    """Two rounds of one step. A client's variate becomes its gradient at theta_G, the server's their mean."""
    one = OneNumber("scaffold", WELLS)
    assert one.round() == pytest.approx(-0.15)  # gradients -1 and 4: theta 0.1 and -0.4
    assert [client.variate["weights"].item() for client in one.clients] == pytest.approx([-1.0, 4.0])
    assert one.server.variate["weights"].item() == pytest.approx(1.5)
    # gradients at -0.15: -1.15 and 3.4; corrected by c - c_i: 1.35 and 0.9
    assert one.round() == pytest.approx(-0.15 - 0.1 * (1.35 + 0.9) / 2)


def test_server_rate_stretches_the_step():
    assert OneNumber("scaffold", WELLS, server_rate=2.0).round() == pytest.approx(-0.3)


@pytest.mark.parametrize("changed", [{}, {"method__keep": 0.3}, {"clients_per_round": 2}], ids=["all", "keep", "some"])
def test_the_servers_variate_is_the_mean_of_those_of_the_clients_which_are_not_sent(changed):
    finished = run(method="scaffold", tasks=2, **changed)
    for name in ("weights", "biases"):
        own = [client.variate[name] for client in finished.clients.values()]
        torch.testing.assert_close(finished.server.variate[name], sum(own) / 3, rtol=1e-4, atol=1e-6)
    assert finished.names("c2s") == finished.names("s2c") == {"weights", "biases", "variate"}
    for index, client in finished.clients.items():  # only changes are sent
        sent = [value for key, value in finished.parts("c2s").items() if key[::3] == (index, "variate/weights")]
        torch.testing.assert_close(sum(map(dense, sent)), client.variate["weights"], rtol=1e-4, atol=1e-5)


def test_server_rate_and_keep_exclude_each_other():
    with pytest.raises(weft.WeftError, match="server_rate needs keep=1"):
        tiny(method="scaffold", method__keep=0.5, method__server_rate=2.0)


# ---- what is sent


@pytest.mark.parametrize(("name", "times"), [("fedavg", 1), ("fedprox", 1), ("scaffold", 2), ("fedcurv", 3)])
def test_the_ledger_matches_the_papers_cost_formula(name, times):
    """|C| * R * |theta| values each way; twice as many for SCAFFOLD, thrice for FedCurv (once in the paper's table)."""
    finished = run(method=name, tasks=3)
    tensors = finished.ledger.by("direction", "tensor")
    for direction in ("c2s", "s2c"):
        sizes = [sums.bytes for (way, name), sums in tensors.items() if way == direction and name != "header"]
        assert sum(sizes) == times * 4 * finished.layout.body * 3 * 2 * 3  # clients, rounds, tasks
        assert len(sizes) == 2 * times  # weights and biases


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGING)
def test_keep_is_the_share_of_values_that_is_sent(name):
    finished = run(method=name, method__keep=0.25, tasks=2)
    weights = finished.layout.weights
    for key, value in finished.parts("c2s").items():
        if key[-1].endswith("weights"):
            assert isinstance(value, Sparse), key
            assert len(value.values) == math.ceil(0.25 * weights)
    whole = run(method=name, tasks=2).ledger.totals()["c2s"]["bytes"]
    assert finished.ledger.totals()["c2s"]["bytes"] < 0.32 * whole  # a quarter, a bit for each place, the biases
    assert all(not isinstance(value, Sparse) for value in run(method=name, tasks=2).parts("c2s").values())


@pytest.mark.parametrize("name", ["fedavg", "fedavg+apd", "fedprox+apd"])
def test_what_is_kept_is_what_moved_farthest_from_theta_g(name):
    finished = Run(tiny(method=name, method__keep=0.25)).go()
    state = finished.clients[0]
    moved = (state.weights - state.received).abs()
    part = finished.parts("c2s")[0, 1, 1, "weights"]
    chosen = torch.zeros(len(moved)).index_fill(0, part.indices.long(), 1).bool()
    assert moved.max() > 0
    assert moved[chosen].min() >= moved[~chosen].max()
    assert torch.equal(part.values, state.weights[chosen])


def test_theta_g_has_only_values_that_somebody_sent():
    finished = run(method="fedavg", method__keep=0.25)
    sent = [finished.parts("c2s")[client, 0, 1, "weights"].dense() for client in range(3)]
    given = finished.parts("s2c")[0, 1, 0, "weights"].dense()
    senders = sum((value != 0).float() for value in sent)
    torch.testing.assert_close(given, sum(sent) / senders.clamp(min=1))
    assert (senders == 0).any()


# ---- EWC


def by_image(running, client, task, theta):
    """The Fisher information the slow way: a backward pass for each image."""
    network = running.runtime.context(client, task).network
    network.vector.copy_(theta)
    images, labels = running.runtime.batches(client, task, "train").take(slice(None))
    total = torch.zeros_like(theta)
    for image, label in zip(images, labels, strict=True):
        network.compute_gradient(image[None], label[None])
        total += network.gradient.square()
    return total[: running.layout.body] / len(labels)


def test_ewc_holds_what_mattered():
    """After two tasks: lambda / 2 * sum over both of F_i * (theta - theta_i)^2, F by image, theta as each ended."""
    options = {"method__lambda_ewc": 40.0, "tasks": 3}
    running = Run(tiny(method="ewc", **options))
    ends = [running.go_to(task + 1).theta(0, task) for task in (0, 1)]
    information = [by_image(running, 0, task, end) for task, end in enumerate(ends)]
    _, training, added = gradients("ewc", task=2, **options)
    body = running.layout.body

    def penalty(theta):
        return 20 * sum((f * (theta - end[:body]).square()).sum() for f, end in zip(information, ends, strict=True))

    assert_gradient_of(penalty, training, added, running.layout, rtol=1e-3, atol=1e-6)


def test_ewc_forgets_less_than_plain_training():
    """What mattered to the first task moves less while the second is learned; what did not may move."""
    moved = {}
    for name, changed in (("local", {}), ("ewc", {"method__lambda_ewc": 1e4})):
        running = Run(tiny(method=name, rounds_per_task=6, **changed)).go_to(1)
        before = running.theta(0, 0)
        information = by_image(running, 0, 0, before)[: running.layout.weights]
        running.go()
        change = (running.theta(0, 0) - before)[: running.layout.weights].square()
        moved[name] = (information * change).sum().item(), change[information == 0].sum().item()
    assert moved["ewc"][0] < 0.5 * moved["local"][0]
    assert moved["ewc"][1] > 0.3 * moved["local"][1]


def test_a_task_that_was_never_trained_is_not_held():
    runtime = Run(tiny(method="ewc", method__lambda_ewc=10.0)).runtime
    state, ctx = started(runtime)
    client_module.end(runtime, state, ctx)
    assert state.curvature == {}
    finished = run(method="ewc", method__lambda_ewc=10.0, rounds_per_task=1, tasks=2)
    assert finished.clients[0].curvature["weights"].abs().max() > 0


def test_curvature_gradient_by_hand():
    """F = 2 at 1 and F = 3 at 4: the slope of half the sum at theta = 5 is 2 * 4 + 3 * 1 = 11."""
    found = vector(0.5)
    curvature_gradient(vector(5), vector(2 + 3), vector(2 * 1 + 3 * 4), 10.0, found)
    assert found.item() == pytest.approx(0.5 + 110)


# ---- FedCurv


def test_fedcurv_pulls_towards_the_others():
    """lambda * sum over the others j of u_j * (theta - theta_j)^2, from what the others said in the last round."""
    running, training, added = gradients("fedcurv", method__lambda_fedcurv=30.0)
    sent = running.parts("c2s")
    others = []
    for client in (1, 2):
        u, theta = (
            torch.cat([sent[client, 0, 1, f"{kind}weights"], sent[client, 0, 1, f"{kind}biases"]])
            for kind in ("fisher/", "")
        )
        others.append((u, theta))

    def penalty(theta):
        return 30 * sum((u * (theta - other).square()).sum() for u, other in others)

    assert_gradient_of(penalty, training, added, running.layout, rtol=2e-3, atol=1e-5)


def test_what_fedcurv_sends_is_the_fisher_information_of_each_image():
    finished = run(method="fedcurv", tasks=1)
    sent, weights = finished.parts("c2s"), finished.layout.weights
    for client in range(3):
        theta = finished.theta(client, 0)
        u = torch.cat([sent[client, 0, 1, "fisher/weights"], sent[client, 0, 1, "fisher/biases"]])
        torch.testing.assert_close(u, by_image(finished, client, 0, theta), rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(sent[client, 0, 1, "fisher_theta/weights"], u[:weights] * theta[:weights])


def test_a_client_that_sat_out_subtracts_nothing_of_itself():
    finished = run(method="fedcurv", clients_per_round=2, tasks=3)
    rounds = {}  # by (task, round): who was selected, and whether U and V were said to contain its own u and v
    for request in finished.requests:
        if "counted" in request.fields:
            rounds.setdefault((request.task, request.round), {})[request.receiver] = request.fields["counted"]
    counted = [value for selected in rounds.values() for value in selected.values()]
    assert True in counted
    assert counted.count(False) > 2  # more than those of the first round
    before = set()
    for place in sorted(rounds):
        assert rounds[place] == {client: client in before for client in rounds[place]}, place
        before = set(rounds[place])


# ---- Stable-SGD


def test_stable_sgd_lowers_the_rate_with_each_task():
    finished = run(method="stable-sgd", tasks=3, sgd_rate=0.02, patience=100)
    for _, task, _, fields in finished.reports:
        assert fields["rate"] == pytest.approx(0.02 * 0.85**task)
    assert run(method="stable-sgd", tasks=1).reports[0][-1]["rate"] == 0.05


def test_plain_sgd_is_theta_minus_rate_times_gradient():
    """One epoch of two batches, with autograd and nothing of the library's training."""
    plan = tiny(method="local", optimizer="sgd", sgd_rate=0.05, tasks=1, rounds_per_task=1, shuffle=False, clients=1)
    finished = Run(plan).go()
    state, _ = started(finished.runtime)
    theta = torch.cat([state.weights, state.private]).requires_grad_()
    images, labels = finished.runtime.batches(0, 0, "train").take(slice(None))
    for part in (slice(0, 10), slice(10, 20)):
        first, second, bias1, bias2, head, bias3 = theta.split([8 * 3072, 128, 8, 16, 32, 2])
        x = functional.relu(functional.linear(images[part].flatten(1), first.view(8, -1), bias1))
        x = functional.relu(functional.linear(x, second.view(16, 8), bias2))
        loss = functional.cross_entropy(functional.linear(x, head.view(2, 16), bias3), labels[part])
        (gradient,) = torch.autograd.grad(loss, theta)
        theta = (theta.detach() - 0.05 * gradient).requires_grad_()
    torch.testing.assert_close(finished.theta(0, 0), theta.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["scaffold", "stable-sgd", "fedprox+stable-sgd"])
def test_a_method_that_needs_sgd_refuses_adam(name):
    plan = tiny(method=name)
    assert (plan.optimizer, plan.sgd_rate) == ("sgd", class_of(name).traits.sgd_rate)  # written to the plan
    with pytest.raises(weft.WeftError, match="requires SGD"):
        tiny(method=name, optimizer="adam")


# ---- APD


@pytest.mark.slow
def test_apd_is_fedweit_that_sends_nothing():
    ours = run(method="apd", tasks=3)
    silent = run(method="fedweit", method__ablate="b_comm,a_comm", tasks=3)
    assert_same(ours, silent)
    for client in range(3):
        for task in range(3):
            mine, theirs = (each.clients[client].tasks[task] for each in (ours, silent))
            assert torch.equal(mine.mask, theirs.mask)
            assert torch.equal(mine.adaptive.dense(), theirs.adaptive.dense())
    assert_other(ours, run(method="fedweit", tasks=3))


@pytest.mark.parametrize("word", ["a", "m", "l1", "l2"])
def test_each_part_of_apd_matters(word):
    assert_other(run(method="apd", method__ablate=word, tasks=3), run(method="apd", tasks=3))


def test_an_untrained_task_does_not_enter_the_drift_term():
    """With clients_per_round=1 some client misses its first task; in its second nothing holds B."""
    finished = Run(tiny(method="fedweit", clients_per_round=1, tasks=3, rounds_per_task=1)).go()
    trained = [task for state in finished.clients.values() for task in state.past_masks]
    assert sorted(trained) == [0, 1, 2]  # one client a task; a client that was never selected has no state
    for client, state in finished.clients.items():
        ctx = finished.runtime.training_context(client, 2)
        finished.method.begin_task(state, ctx)
        drift = len(prepared(finished.method, state, ctx).penalties) - 1  # besides the regularizers
        assert drift == any(task < 2 for task in state.past_masks), client


# ---- plain training, and joint training


def test_local_is_plain_training():
    """Its first task is single-task learning; its second continues where the first ended."""
    first, second = run(method="local", method__biases="private"), run(method="stl")
    for client in range(3):
        assert first.matrices[client][0] == second.matrices[client][0]
        assert not torch.equal(first.theta(client, 1), second.theta(client, 1))
    running = Run(tiny(method="local")).go_to(1)
    before = running.clients[0].weights.clone()
    assert torch.equal(begun(running)[0].weights, before)


def test_joint_sees_every_task_from_the_first_step():
    running = Run(tiny(method="joint", tasks=3, rounds_per_task=4)).go_to(1)
    state, ctx = started(running.runtime)
    assert ctx.network.heads == (2, 2, 2)
    moved = (running.clients[0].private - state.private).abs()
    heads = moved[-6 * 17 : -6].view(6, 16)
    assert (heads.amax(dim=1) > 0).all()  # a row for each class of each of the three tasks
    running.go()
    assert [len(row) for row in running.matrices[0]] == [1, 2, 3]
    assert all(fields["images"] == 20 for *_, fields in running.reports)  # an epoch costs what it costs the others


def test_joint_normalizes_each_image_as_its_task_does():
    runtime = Run(tiny(method="joint", tasks=3)).runtime
    pooled = runtime.training_context(0, 1).load("train")
    images, labels = pooled.take(slice(None))
    assert (len(pooled), pooled.epoch) == (60, 20)
    for task in range(3):
        own, own_labels = runtime.batches(0, task, "train").take(slice(None))
        assert torch.equal(images[20 * task : 20 * task + 20], own)
        assert torch.equal(labels[20 * task : 20 * task + 20], own_labels)
        assert set(own_labels.tolist()) == {2 * task, 2 * task + 1}


def test_images_of_a_finished_task_are_not_available():
    runtime = Run(tiny(method="ewc")).runtime
    with pytest.raises(AssertionError, match="only while it is trained"):
        runtime.context(0, 0).load("train")
    assert torch.equal(runtime.training_context(0, 1).load("train").images, runtime.batches(0, 1, "train").images)
