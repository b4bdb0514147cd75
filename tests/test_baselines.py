"""The paper's other methods: each against its formula, its limit, and without the one term that makes it what it is."""

import math

import pytest
import torch
from helpers import Run, assert_other, assert_same, run, tiny, vector
from torch.nn import functional

import weft
from weft import methods
from weft.core.optimizers import make_optimizer
from weft.core.storage import State
from weft.methods import COMBINATIONS, METHODS, class_of
from weft.methods.fedweit.formulas import curvature_gradient
from weft.methods.method import TaskContext, in_parts
from weft.networks.flat import Layer, Layout
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import Sparse, dense

TALKING = [name for name in (*METHODS, *COMBINATIONS) if class_of(name).traits.federated]
AVERAGING = [name for name in TALKING if name != "fedweit"]  # they send theta itself


def learned_bits(finished):
    return {key: value for key, value in finished.bits().items() if "accuracy" in key or "bits" in key}


# ---- a federation of one number: theta, without images, biases or heads


class OneNumber:
    """A network whose loss is slope / 2 * (theta - best)^2, and all of a method's hooks called in the loop's order."""

    def __init__(self, name, wells, sgd_rate=0.1, **options):
        self.layout = Layout((Layer("only", (1, 1), 0, 0),), 1, 1, 1)
        self.vector, self.gradient = torch.zeros(1), torch.zeros(1)
        self.method = methods.load(name, {"biases": "private", **options})
        self.plan = tiny(
            method=name, clients=len(wells), sgd_rate=sgd_rate, **{f"method__{k}": v for k, v in options.items()}
        )
        self.wells = wells  # (slope, best) of each client
        self.server, self.clients = State(), [State(numbers={"schedule": {"epochs": 1}}) for _ in wells]
        self.lessons = [TaskContext(client, 0, self.plan, self) for client in range(len(wells))]
        self.method.open_server(self.server, torch.zeros(1), self.layout, self.plan)
        for state, lesson in zip(self.clients, self.lessons, strict=True):
            self.method.join(state, lesson)
            state.tensors["private"] = torch.zeros(0)

    def initial_body(self, rng):
        return torch.zeros(1)

    def round(self, steps=1):
        replies = []
        for client, (state, lesson) in enumerate(zip(self.clients, self.lessons, strict=True)):
            tensors, numbers = self.method.brief(self.server, client, 0, False, self.plan)
            given = Message("server", f"client-{client}", "x", (), 0, 0, tensors, numbers)
            self.method.receive(state, decode(encode(given)), lesson)
            work = self.method.open(state, lesson)
            optimizer = make_optimizer(self.plan, work, None)
            slope, best = self.wells[client]
            for _ in range(steps):
                self.method.compose(work)
                self.gradient[:] = slope * (self.vector - best)
                self.method.pull_back(work)
                self.method.penalise(work)
                optimizer.step(0.1)
                self.method.constrain(work, 0.1)
            self.method.close(state, work)
            said = Message(f"client-{client}", "server", "x", (), 0, 0, self.method.contribute(state, lesson))
            said.numbers["examples"] = 1
            replies.append(decode(encode(said)))
        self.method.aggregate(self.server, replies)
        return dense(self.server.tensors["weights"]).item()

    def rounds(self, count, steps):
        for _ in range(count):
            found = self.round(steps)
        return found


WELLS = ((1.0, 1.0), (4.0, -1.0))  # the sum of both losses is least at (1 * 1 - 4 * 1) / 5 = -0.6


# ---- FedProx


@pytest.mark.slow
def test_fedprox_without_mu_is_fedavg_in_every_bit():
    assert run(method="fedprox", method__mu=0).matrices == run(method="fedavg").matrices
    assert_same(run(method="fedprox", method__mu=0, tasks=3), run(method="fedavg", tasks=3))
    assert_other(run(method="fedprox", method__mu=0.5), run(method="fedavg"))


def test_fedprox_pulls_towards_theta_g():
    """One step of Adam forgets a gradient's size, so with SGD: theta <- theta - rate * (g + mu * (theta - theta_G))."""
    one = OneNumber("fedprox", [(1.0, 1.0)], mu=2.0)
    one.plan = tiny(method="fedprox", clients=1, optimizer="sgd")
    theta, theta_g = 0.0, 0.0
    for _ in range(3):
        theta -= 0.1 * (theta - 1.0 + 2.0 * (theta - theta_g))
    assert one.round(steps=3) == pytest.approx(theta)
    theta_g = theta  # of one client: the mean is its own
    for _ in range(3):
        theta -= 0.1 * (theta - 1.0 + 2.0 * (theta - theta_g))
    assert one.round(steps=3) == pytest.approx(theta)
    assert theta > 0.1


def gradients(name, step=1, steps=1, **changed):
    """Those of a client's first batch of a round, with what the penalty added to them; and what autograd needs."""
    running = Run(tiny(method=name, **changed)).go_to(step)
    method, state, lesson = running.method, running.clients[0], running.runtime.training_context(0, step)
    method.begin(state, lesson)
    if method.traits.federated:
        tensors, numbers = method.brief(running.server, 0, step, True, running.plan)
        method.receive(state, Message("server", "client-0", "x", (), step, 0, tensors, numbers), lesson)
    work = method.open(state, lesson)
    rng = torch.Generator().manual_seed(0)
    for value in work.variables.values():
        value.add_(0.05 * torch.randn(value.shape, generator=rng))
    method.compose(work)
    lesson.network.compute_gradient(*lesson.load("train").take(torch.arange(20)))
    method.pull_back(work)
    plain = {key: value.clone() for key, value in work.gradients.items()}
    method.penalise(work)
    added = {key: value - plain[key] for key, value in work.gradients.items()}
    return running, state, work, added


def by_autograd(penalty, work, layout):
    theta = torch.cat([work.variables["weights"], work.variables["private"]]).clone().requires_grad_()
    (found,) = torch.autograd.grad(penalty(theta[: layout.body]), theta)
    return in_parts(found, layout)


@pytest.mark.parametrize("biases", ["shared", "private"])
def test_the_gradient_of_fedprox_is_that_of_its_formula(biases):
    running, _, work, added = gradients("fedprox", method__mu=0.7, method__biases=biases)
    layout, server = running.layout, running.server
    count = layout.body if biases == "shared" else layout.weights
    theta_g = torch.cat([server.weights, server.tensors.get("biases", torch.zeros(layout.body - layout.weights))])
    wanted = by_autograd(lambda theta: 0.35 * (theta - theta_g)[:count].square().sum(), work, layout)
    for name, value in wanted.items():
        torch.testing.assert_close(added[name], value, rtol=1e-4, atol=1e-6)
    assert added["weights"].abs().max() > 0


# ---- SCAFFOLD


def test_scaffold_without_variates_is_fedavg_in_every_bit():
    alike = {"sgd_rate": 0.05, "method__average": "equal", "tasks": 3}
    assert_same(run(method="scaffold", method__variates=False, **alike), run(method="fedavg", optimizer="sgd", **alike))
    assert_other(run(method="scaffold", **alike), run(method="fedavg", optimizer="sgd", **alike))


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
    own = [state.tensor("own_variate/base").item() for state in one.clients]
    assert own == pytest.approx([-1.0, 4.0])
    assert one.server.tensor("variate/base").item() == pytest.approx(1.5)
    # gradients at -0.15: -1.15 and 3.4; corrected by c - c_i: 1.35 and 0.9
    assert one.round() == pytest.approx(-0.15 - 0.1 * (1.35 + 0.9) / 2)


def test_server_rate_stretches_the_step():
    one = OneNumber("scaffold", WELLS, server_rate=2.0)
    assert one.round() == pytest.approx(-0.3)


@pytest.mark.parametrize("changed", [{}, {"method__keep": 0.3}, {"clients_per_round": 2}], ids=["all", "keep", "some"])
def test_the_servers_variate_is_the_mean_of_all_clients_and_theirs_stay_at_home(changed):
    finished = run(method="scaffold", tasks=2, **changed)
    for name in ("weights", "biases"):
        own = [state.tensor(f"own_variate/{name}") for state in finished.clients.values()]
        torch.testing.assert_close(finished.server.tensor(f"variate/{name}"), sum(own) / 3, rtol=1e-4, atol=1e-6)
    assert not any("own" in name for name in finished.server.tensors)
    assert not any("own" in name for name in (*finished.names("c2s"), *finished.names("s2c")))


def test_server_rate_and_keep_do_not_go_together():
    with pytest.raises(weft.WeftError, match="server_rate needs keep=1"):
        tiny(method="scaffold", method__keep=0.5, method__server_rate=2.0)


# ---- what is sent


@pytest.mark.parametrize(("name", "times"), [("fedavg", 1), ("fedprox", 1), ("scaffold", 2), ("fedcurv", 3)])
def test_the_ledger_matches_the_papers_cost_formula(name, times):
    """|C| * R * |theta| values each way; twice as many for SCAFFOLD, thrice for FedCurv (once in the paper's table)."""
    finished = run(method=name, tasks=3)
    for direction in ("c2s", "s2c"):
        parts = finished.ledger.by("direction", "tensor")
        sizes = [sums.bytes for (way, part), sums in parts.items() if way == direction and part != "header"]
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
    chosen = torch.zeros(len(moved), dtype=torch.bool)
    chosen[part.indices.long()] = True
    assert moved.max() > 0
    assert moved[chosen].min() >= moved[~chosen].max()
    assert torch.equal(part.values, state.weights[chosen])


def test_where_nobody_sent_anything_a_client_keeps_its_own():
    finished = run(method="fedavg", method__keep=0.25)
    said = [finished.parts("c2s")[client, 0, 1, "weights"].dense() for client in range(3)]
    given = finished.parts("s2c")[0, 1, 0, "weights"].dense()
    senders = sum((value != 0).float() for value in said)
    torch.testing.assert_close(given, sum(said) / senders.clamp(min=1))
    assert (senders == 0).any()


# ---- EWC


def test_ewc_without_lambda_is_plain_training():
    assert_same(run(method="ewc", method__lambda_ewc=0, tasks=3), run(method="local", tasks=3))
    assert_other(run(method="ewc", method__lambda_ewc=1e3, tasks=3), run(method="local", tasks=3))


def by_image(running, client, step, theta):
    """The Fisher information the slow way: a backward pass for each image."""
    network = running.runtime.context(client, step).network
    network.vector.copy_(theta)
    images, labels = running.runtime.batches(client, step, "train").take(slice(None))
    total = torch.zeros_like(theta)
    for image, label in zip(images, labels, strict=True):
        network.compute_gradient(image[None], label[None])
        total += network.gradient.square()
    return total[: running.layout.body] / len(labels)


def test_ewc_holds_what_mattered():
    """After two tasks: lambda / 2 * sum over both of F_i * (theta - theta_i)^2, F by image, theta as each ended."""
    finished = Run(tiny(method="ewc", method__lambda_ewc=40.0, tasks=3))
    ends = []
    for step in (0, 1):
        finished.go_to(step + 1)
        ends.append(finished.theta(0, step))
    information = [by_image(finished, 0, step, end) for step, end in enumerate(ends)]
    _, _, work, added = gradients("ewc", step=2, method__lambda_ewc=40.0, tasks=3)
    body = finished.layout.body

    def penalty(theta):
        return 20 * sum((f * (theta - end[:body]).square()).sum() for f, end in zip(information, ends, strict=True))

    wanted = by_autograd(penalty, work, finished.layout)
    for name, value in wanted.items():
        torch.testing.assert_close(added[name], value, rtol=1e-3, atol=1e-6)
    assert added["weights"].abs().max() > 1e-4


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
    finished = run(method="ewc", method__lambda_ewc=10.0, rounds_per_task=1, tasks=2)
    untrained = Run(tiny(method="ewc", method__lambda_ewc=10.0))
    state, lesson = State(), untrained.runtime.training_context(0, 0)
    untrained.method.join(state, lesson)
    untrained.method.begin(state, lesson)
    state.numbers["schedule"] = {"epochs": 0}
    untrained.method.finish(state, lesson)
    assert "curvature/base" not in state.tensors
    assert "curvature/base" in finished.clients[0].tensors


def test_curvature_gradient_by_hand():
    """F = 2 at 1 and F = 3 at 4: the slope of half the sum at theta = 5 is 2 * 4 + 3 * 1 = 11."""
    found = vector(0.5)
    curvature_gradient(vector(5), vector(2 + 3), vector(2 * 1 + 3 * 4), 10.0, found)
    assert found.item() == pytest.approx(0.5 + 110)


# ---- FedCurv


def test_fedcurv_pulls_towards_the_others():
    """lambda * sum over the others j of u_j * (theta - theta_j)^2, from what the others said in the last round."""
    running, _, work, added = gradients("fedcurv", method__lambda_fedcurv=30.0)
    body = running.layout.body
    others = []
    for client in (1, 2):
        said = running.parts("c2s")
        u = torch.cat([said[client, 0, 1, "fisher/base"], said[client, 0, 1, "fisher/biases"]])
        theta = torch.cat([said[client, 0, 1, "weights"], said[client, 0, 1, "biases"]])
        others.append((u, theta))

    def penalty(theta):
        return 30 * sum((u * (theta - other).square()).sum() for u, other in others)

    assert body == len(others[0][0])
    for name, value in by_autograd(penalty, work, running.layout).items():
        torch.testing.assert_close(added[name], value, rtol=2e-3, atol=1e-5)
    assert added["weights"].abs().max() > 1e-4


def test_what_fedcurv_sends_is_the_fisher_information_of_each_image():
    finished = run(method="fedcurv", tasks=1)
    said = finished.parts("c2s")
    for client in range(3):
        theta = finished.theta(client, 0)
        u = torch.cat([said[client, 0, 1, "fisher/base"], said[client, 0, 1, "fisher/biases"]])
        torch.testing.assert_close(u, by_image(finished, client, 0, theta), rtol=1e-3, atol=1e-8)
        torch.testing.assert_close(
            said[client, 0, 1, "fisher_theta/base"], u[: finished.layout.weights] * theta[: finished.layout.weights]
        )


def test_a_client_that_sat_out_has_nothing_of_its_own_to_take_out():
    finished = run(method="fedcurv", clients_per_round=2, tasks=3)
    counted = [request.fields["counted"] for request in finished.requests if "counted" in request.fields]
    assert True in counted
    assert counted.count(False) > 2  # more than the very first round's
    for request, reply in zip(finished.requests, finished.answers, strict=True):
        assert request.receiver == reply.sender
    asked = {}
    for request in finished.requests:
        if "counted" in request.fields:
            asked.setdefault((request.task, request.round), {})[request.receiver] = request.fields["counted"]
    before = set()
    for place in sorted(asked):
        for name, was in asked[place].items():
            assert was == (name in before), place
        before = set(asked[place])


def test_fedcurv_without_lambda_is_fedavg_in_every_bit():
    assert_same(run(method="fedcurv", method__lambda_fedcurv=0), run(method="fedavg"))
    assert_other(run(method="fedcurv", method__lambda_fedcurv=100), run(method="fedavg"))


# ---- Stable-SGD


def test_stable_sgd_lowers_the_rate_with_each_task():
    finished = run(method="stable-sgd", tasks=3, sgd_rate=0.02, patience=100)
    for _, step, _, numbers in finished.reports:
        assert numbers["rate"] == pytest.approx(0.02 * 0.85**step)
    assert run(method="stable-sgd", tasks=1).reports[0][-1]["rate"] == 0.05


def test_stable_sgd_without_decay_and_dropout_is_plain_sgd():
    plain = run(method="local", optimizer="sgd", sgd_rate=0.02)
    assert_same(run(method="stable-sgd", sgd_rate=0.02, method__decay=1.0, method__dropout=0.0), plain)
    assert_other(run(method="stable-sgd", sgd_rate=0.02, method__decay=0.9, method__dropout=0.0), plain)
    assert_other(run(method="stable-sgd", sgd_rate=0.02, method__decay=1.0, method__dropout=0.1), plain)


def test_plain_sgd_is_theta_minus_rate_times_gradient():
    """One epoch of two batches, with autograd and nothing of the library's training."""
    plan = tiny(method="local", optimizer="sgd", sgd_rate=0.05, tasks=1, rounds_per_task=1, shuffle=False, clients=1)
    finished = Run(plan).go()
    lesson = finished.runtime.context(0, 0)
    state = State()
    finished.method.join(state, lesson)
    finished.method.begin(state, lesson)
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
    assert (plan.optimizer, plan.sgd_rate) == ("sgd", class_of(name).sgd_rate)  # written down, not left to defaults
    with pytest.raises(weft.WeftError, match="requires SGD"):
        tiny(method=name, optimizer="adam")


# ---- APD


@pytest.mark.slow
def test_apd_is_fedweit_that_sends_nothing():
    ours = run(method="apd", tasks=3)
    silent = run(method="fedweit", method__ablate="b_comm,a_comm", tasks=3)
    assert_same(ours, silent)
    for client in range(3):
        for step in range(3):
            for key in (f"adaptive/{step}", f"mask/{step}"):
                mine, theirs = (dense(each.clients[client].archive[key]) for each in (ours, silent))
                assert torch.equal(mine, theirs)
    assert_other(ours, run(method="fedweit", tasks=3))


@pytest.mark.parametrize("word", ["a", "m", "l1", "l2"])
def test_each_part_of_apd_matters(word):
    assert_other(run(method="apd", method__ablate=word, tasks=3), run(method="apd", tasks=3))


def test_an_untrained_task_does_not_enter_the_drift_term():
    """With clients_per_round=1 some client misses its first task; in its second nothing holds B."""
    finished = Run(tiny(method="fedweit", clients_per_round=1, tasks=3, rounds_per_task=1)).go()
    learned = [step for state in finished.clients.values() for step in state.numbers["learned"]]
    assert sorted(learned) == [0, 1, 2]  # one client a task; whoever is never asked has no state at all
    for client, state in finished.clients.items():
        lesson = finished.runtime.training_context(client, 2)
        finished.method.begin(state, lesson)
        work = finished.method.open(state, lesson)
        past = [step for step in state.numbers["learned"] if step < 2]
        assert len(work.past_masks) == len(past)
        assert (work.reference is None) == (not past)


# ---- plain training, and joint training


def test_local_is_plain_training():
    """Its first task is single task learning; its second goes on from where the first ended."""
    first, second = run(method="local", method__biases="private"), run(method="stl")
    for client in range(3):
        assert first.matrices[client][0] == second.matrices[client][0]
        assert first.matrices[client][1][1] != second.matrices[client][1][1] or not torch.equal(
            first.theta(client, 1), second.theta(client, 1)
        )
    running = Run(tiny(method="local")).go_to(1)
    base = running.clients[0].weights.clone()
    running.method.begin(running.clients[0], running.runtime.training_context(0, 1))
    assert torch.equal(running.clients[0].weights, base)


def test_joint_sees_every_task_from_the_first_step():
    running = Run(tiny(method="joint", tasks=3, rounds_per_task=4)).go_to(1)
    network = running.runtime.context(0, 0).network
    assert network.heads == (2, 2, 2)
    state, lesson = State(), running.runtime.training_context(0, 0)
    running.method.join(state, lesson)
    running.method.begin(state, lesson)
    moved = (running.clients[0].private - state.private).abs()
    heads = moved[-6 * 17 : -6].view(6, 16)
    assert (heads.amax(dim=1) > 0).all()  # a row for each class of each of the three tasks
    running.go()
    assert [len(row) for row in running.matrices[0]] == [1, 2, 3]
    assert all(numbers["images"] == 20 for *_, numbers in running.reports)  # an epoch costs what it costs the others


def test_joint_normalises_each_image_as_its_own_task_does():
    runtime = Run(tiny(method="joint", tasks=3)).runtime
    pooled = runtime.training_context(0, 1).load("train")
    images, labels = pooled.take(slice(None))
    assert (len(pooled), pooled.epoch) == (60, 20)
    for step in range(3):
        own, own_labels = runtime.batches(0, step, "train").take(slice(None))
        assert torch.equal(images[20 * step : 20 * step + 20], own)
        assert torch.equal(labels[20 * step : 20 * step + 20], own_labels)
        assert set(own_labels.tolist()) == {2 * step, 2 * step + 1}


def test_a_task_that_is_over_shows_its_images_to_nobody():
    runtime = Run(tiny(method="ewc")).runtime
    with pytest.raises(AssertionError, match="only while it is being learned"):
        runtime.context(0, 0).load("train")
    assert len(runtime.training_context(0, 1).load("train")) == 20
    assert torch.equal(runtime.training_context(0, 1).load("train").images, runtime.batches(0, 1, "train").images)
