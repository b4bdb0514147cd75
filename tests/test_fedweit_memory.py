"""FedWeIT: the knowledge base, and what becomes of past tasks."""

import json
import math

import pytest
import torch
from helpers import Run, run, spread, tiny, vector
from methods_helpers import TALKING, adaptives, marked, moved, origin, weit

from weft import methods
from weft.core.storage import State
from weft.methods import COMBINATIONS, METHODS, class_of
from weft.wire.message import Message
from weft.wire.tensors import Sparse, dense, same, size

# ---- FedWeIT: the knowledge base


def kb_of(finished):
    """By (client, step): which foreign A's a client was told to use, in the one message that tells it."""
    found = {}
    for request in finished.requests:
        if "foreign" in request.fields:
            key = int(request.receiver.removeprefix("client-")), request.task
            assert key not in found  # once a task: Alg. 1 line 6
            found[key] = request.fields["foreign"]
    return found


NO_ROWS = {"ablate": ("b_comm",)}  # A's alone


@pytest.mark.parametrize("kb_size", [0, 1, 3, 5, "all"])
@pytest.mark.parametrize("kb_from", ["all", "last"])
@pytest.mark.parametrize("kb_own", [True, False])
def test_what_a_client_is_given(kb_size, kb_from, kb_own):
    """Drawn by the method alone: nine A's of three clients and three tasks, and some of the present and the future."""
    method = methods.load("fedweit", {"kb_size": kb_size, "kb_from": kb_from, "kb_own": kb_own, **NO_ROWS})
    server = State(numbers={"held": {}})
    for client in range(3):
        for step in range(5):
            server.archive[f"{client}.{step}"] = Sparse.of(vector(client, step))
    _, numbers = method.brief(server, 1, 3, True, tiny())
    given = [origin(key) for key in numbers["foreign"]]
    open_to = [(c, s) for c in range(3) for s in range(3) if (kb_own or c != 1) and (kb_from == "all" or s == 2)]
    assert len(set(given)) == len(given) == (len(open_to) if kb_size == "all" else min(kb_size, len(open_to)))
    assert set(given) <= set(open_to)


def test_the_sample_is_drawn_for_each_client_and_task():
    method = methods.load("fedweit", {"kb_size": 4})
    keys = [f"{client}.{step}" for client in range(9) for step in range(9)]
    drawn = [tuple(method._sample(keys, client, step, seed)) for client in (0, 1) for step in (5, 6) for seed in (0, 1)]
    assert len(set(drawn)) == 8
    assert method._sample(keys, 0, 5, 0) == list(drawn[0])


def test_what_is_offered_stays_until_somebody_has_answered():
    """With clocks of their own kb grows between two requests of one task; a late answer may be to either."""
    method, plan = methods.load("fedweit", {"kb_size": 1, **NO_ROWS}), tiny(**{"async": "task_clocks"})
    server = State(numbers={"held": {}})
    server.archive["1.0"] = Sparse.of(vector(1, 0))
    offers = []
    for more in ("2.0", "3.0", "4.0", "5.0", "6.0"):
        sent, numbers = method.brief(server, 0, 1, True, plan)
        offers.append(numbers["foreign"])
        assert set(sent) == {f"foreign/{key}" for key in numbers["foreign"]}  # whole, as nobody has answered
        server.archive[more] = Sparse.of(vector(0, 1))
        server.numbers = json.loads(json.dumps(server.numbers))  # as a checkpoint gives it back
    assert offers == [["1.0"]] * 5
    answer = Message("client-0", "server", "", (), 1, 0)
    for _ in range(2):  # the second of two late answers says nothing new
        method.confirm(server, 0, answer, numbers)
    assert server.numbers["held"] == {"0": ["1.0"]}
    assert len(kb := method.brief(server, 0, 2, True, plan)[1]["foreign"]) == 1
    assert method.brief(server, 0, 3, True, plan)[1]["foreign"] == method._sample(
        sorted(server.archive), 0, 3, plan.seed, False
    )  # another task is another offer, though nobody has answered
    assert kb == method._sample(sorted(server.archive), 0, 2, plan.seed, False)


def test_what_is_offered_by_somebody_who_left_is_taken_back():
    method, plan = methods.load("fedweit", {"kb_size": "all", **NO_ROWS}), tiny(**{"async": "task_clocks"})
    server = State(numbers={"held": {}})
    for key in ("1.0", "2.0"):
        server.archive[key] = Sparse.of(vector(1, 0))
    assert method.brief(server, 0, 1, True, plan)[1]["foreign"] == ["1.0", "2.0"]
    method.part(server, 1)
    sent, numbers = method.brief(server, 0, 1, True, plan)
    assert (set(sent), numbers["foreign"]) == ({"foreign/2.0"}, ["2.0"])


@pytest.mark.parametrize("backwards", [True, False])
def test_no_own_and_no_future_task_in_a_run(backwards):
    finished = Run(tiny(method="fedweit", method__kb_size="all", tasks=3), backwards=backwards).go()
    given = kb_of(finished)
    assert set(given) == {(client, step) for client in range(3) for step in range(3)}
    for (client, step), keys in given.items():
        assert {origin(key) for key in keys} == {(c, s) for c in range(3) for s in range(step) if c != client}


@pytest.mark.parametrize("kb_size", [2, "all"])
def test_a_foreign_a_is_sent_once_and_stored_once(kb_size):
    finished = weit(tasks=4, kb_size=kb_size, rounds_per_task=1)
    given, own = kb_of(finished), finished.parts("c2s")
    for client in range(3):
        sent = [name for c, _, _, name in finished.parts("s2c") if c == client and name.startswith("foreign/")]
        used = {key for (c, _), keys in given.items() if c == client for key in keys}
        assert sorted(sent) == sorted(f"foreign/{key}" for key in used)
        assert sorted(key for key in finished.clients[client].archive if key.startswith("foreign/")) == sorted(sent)
        for key in used:  # and it is what its owner gave, bit for bit
            giver, step = origin(key)
            assert same(finished.clients[client].archive[f"foreign/{key}"], own[giver, step, 0, "adaptive"])
    if kb_size == "all":
        assert max(map(len, given.values())) == 6


def test_a_client_meets_kb_in_its_first_exchange_of_a_task():
    """Alg. 1 line 6, also for a client that is first chosen in a later round."""
    for unchosen in (True, False):
        finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, rounds_per_task=3)
        talked = sorted((client, step, r) for client, step, r, part in finished.parts("s2c") if part == "global")
        first = {}
        for client, step, r in talked:
            first.setdefault((client, step), r)
        assert set(first.values()) > {0}
        told = {
            (int(m.receiver.removeprefix("client-")), m.step): m.round
            for m in finished.requests
            if "foreign" in m.numbers
        }
        assert told == first
        assert set(kb_of(finished)) == set(first)


def test_attention_starts_even():
    running = Run(tiny(method="fedweit", tasks=2))
    running.go_to(1)
    lesson, state = running.runtime.context(0, 1), running.clients[0]
    tensors, numbers = running.method.brief(running.server, 0, 1, True, running.plan)
    running.method.begin(state, lesson)
    running.method.receive(state, Message("server", "client-0", "x", (), 1, 0, tensors, numbers), lesson)
    assert state.attention.tolist() == [0.5] * 4  # two foreign A's, two layers


def trained(finished):
    """Who trained on which task: (client, step)."""
    return {(client, step) for client, step, _, numbers in finished.reports if numbers.get("images")}


@pytest.mark.slow
@pytest.mark.parametrize("unchosen", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_that_trained_give_their_a(unchosen, seed):
    """Alg. 1 line 11: j in C, not only those of the last round; who never trained has nothing to give."""
    finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, seed=seed)
    given = [(client, step) for client, step, _, name in finished.parts("c2s") if name == "adaptive"]
    assert len(set(given)) == len(given)
    assert set(given) == trained(finished) == set(map(origin, finished.server.archive))
    assert (len(given) == 9) == unchosen
    weighed = finished.ledger.by("direction", "tensor", "client", "step")
    assert {key[2:] for key in weighed if key[:2] == ("c2s", "adaptive")} == set(given)  # also when it is sent alone
    for client, step in given:
        (reply,) = (
            r for r in finished.answers if r.sender == f"client-{client}" and r.step == step and "adaptive" in r.tensors
        )
        assert same(reply.tensors["adaptive"], finished.server.archive[f"{client}.{step}"])
        assert same(reply.tensors["adaptive"], finished.clients[client].archive[f"adaptive/{step}"])


@pytest.mark.parametrize("unchosen", [True, False])
def test_kb_clients_chosen_are_those_of_the_last_round(unchosen):
    finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, kb_clients="chosen")
    last = {(client, step) for client, step, r, name in finished.parts("c2s") if r == 1 and name == "weights"}
    assert len(last) == 3
    assert set(map(origin, finished.server.archive)) == last


@pytest.mark.parametrize("unchosen", [True, False])
def test_an_a_that_nobody_takes_is_not_charged(unchosen):
    """With kb_clients=chosen the others do not give; what they do not give is not sent, and not in the ledger."""
    finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, kb_clients="chosen")
    given = {(client, step) for client, step, _, name in finished.parts("c2s") if name == "adaptive"}
    assert given == set(map(origin, finished.server.archive))


@pytest.mark.parametrize("name", marked(TALKING))
def test_train_unchosen(name):
    """All train in every round, and only the chosen talk."""
    finished = run(method=name, clients_per_round=1, train_unchosen=True, measured_model="own")
    assert len([1 for *_, numbers in finished.reports if numbers.get("images")]) == 3 * 2 * 2
    up = [(step, r) for _, step, r, part in finished.parts("c2s") if part == "weights"]
    down = [(step, r) for _, step, r, part in finished.parts("s2c") if part == "weights"]
    assert sorted(up) == sorted(down) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    alone = [r for r in finished.requests if not r.tensors]
    assert len(alone) == 8
    assert not any({"receive", "send"} & set(request.ops) for request in alone)
    waiting = run(method=name, clients_per_round=1, train_unchosen=False, measured_model="own")
    assert len([1 for *_, numbers in waiting.reports if numbers.get("images")]) == 2 * 2


# ---- FedWeIT: past tasks


def test_past_a_that_stays_put_lets_past_answers_drift():
    """theta_G changes B under the past tasks; `closed` moves their A against it, `frozen` does not."""
    frozen, put, each_frozen = moved("frozen", method__lambda_sparsity=0.03)
    closed, also_put, each_closed = moved("closed", method__lambda_sparsity=0.03)
    assert put
    assert not also_put
    assert frozen > 0.01
    assert closed < 0.5 * frozen
    assert all(map(float.__lt__, each_closed, each_frozen))


def test_without_l1_closed_past_answers_do_not_drift_at_all():
    closed, _, _ = moved("closed", method__ablate="l1")
    assert closed < 1e-4


def test_joint_past_a_is_learned_against_the_change_of_b(held):
    running = Run(tiny(method="fedweit", method__past="joint", method__lambda_sparsity=0.03)).go_to(1)
    old = adaptives(running)["adaptive/0"]
    running.go()
    state = running.clients[0]
    mask = spread(running.layout, dense(state.archive["mask/0"]))
    change = (held[0]["weights"] - held[0]["reference"]) * mask  # dB * m
    move = adaptives(running)["adaptive/0"] - old  # dA
    assert torch.corrcoef(torch.stack([change, move]))[0, 1] < -0.3


@pytest.mark.parametrize("past", ["frozen", "closed", "joint"])
def test_what_belongs_to_a_past_task_stays(past):
    """Its mask, biases, head, attention and list of foreign A's are as they were when the task ended."""
    running = Run(tiny(method="fedweit", method__past=past, tasks=3)).go_to(2)

    def belongings():
        state = running.clients[0]
        keep = [f"{kind}/{step}" for kind in ("mask", "private", "attention") for step in range(2)]
        found = {key: dense(state.archive[key]).tolist() for key in keep if key in state.archive}
        return found, [state.numbers[f"foreign/{step}"] for step in range(2)]

    before = belongings()
    assert "attention/1" in before[0]
    running.go()
    assert belongings() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, *COMBINATIONS])
def test_no_two_tensors_of_a_client_share_memory(name):
    """What is learned in place would change what is remembered beside it, and no file could hold both."""
    running = Run(tiny(method=name, **({"method__keep": 0.5} if "keep" in class_of(name).Options.model_fields else {})))
    running.go_to(1)
    for state in running.clients.values():
        places = [
            value.data_ptr() for value in state.tensors.values() if isinstance(value, torch.Tensor) and len(value)
        ]
        assert len(set(places)) == len(places)


def test_between_tasks_a_client_keeps_no_whole_vector_but_b():
    state = weit().clients[0]
    assert [key for key, value in state.tensors.items() if size(value) == weit().layout.weights] == ["weights"]


def test_drift_is_counted_from_b_before_or_after_theta_g(held):
    """Row 21 of fidelity.md: `own` is B at the end of task t-1, `received` is B once theta_G is in."""
    for drift_from in ("own", "received"):
        running = Run(tiny(method="fedweit", method__drift_from=drift_from)).go_to(1)
        end = running.clients[0].weights.clone()
        running.go()
        reference = held[0]["reference"]
        assert torch.equal(reference, end) == (drift_from == "own")
        if drift_from == "received":
            theta_g = running.parts("s2c")[0, 1, 0, "weights"].dense()
            assert torch.equal(reference, torch.where(theta_g != 0, theta_g, end))


def test_sizes_reported_are_those_of_what_is_kept():
    """B, and of each task m, A, alpha, biases and head, and foreign A's: eight bytes for a sparse value."""
    finished = weit()
    state, layout = finished.clients[0], finished.layout
    nonzeros = [int(value.count_nonzero()) for value in adaptives(finished).values()]
    foreign = [int(dense(value).count_nonzero()) for key, value in state.archive.items() if key.startswith("foreign/")]
    dense_values = layout.weights + 2 * layout.rows + 2 * (layout.size - layout.weights) + 2 * 2
    assert len(foreign) == 2
    assert finished.progress.sizes["0"] == {
        "bytes": 4 * dense_values + 8 * (sum(nonzeros) + sum(foreign)),
        "paper_bytes": 4 * (int(state.weights.count_nonzero()) + sum(nonzeros)),
    }
    assert finished.progress.densities["0"] == pytest.approx([count / layout.weights for count in nonzeros])
    assert all(map(math.isfinite, finished.progress.densities["0"]))
    assert json.loads(json.dumps(finished.progress.sizes)) == finished.progress.sizes
