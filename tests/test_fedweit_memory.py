"""FedWeIT: the knowledge base, and past tasks."""

import json
import math

import pytest
import torch
from helpers import Run, run, spread, tiny, vector
from methods_helpers import PRIVATE_HEADS, TALKING, adaptives, begun, marked, moved, origin, weit

from weft import methods
from weft.core import storage
from weft.core.progress import Progress
from weft.core.schedule import Assignment
from weft.methods import COMBINATIONS, METHODS, class_of
from weft.methods.averaging import Update, Updates
from weft.methods.fedweit.fedweit import FedWeITServer
from weft.methods.method import RoundContext
from weft.wire.message import decode
from weft.wire.tensors import Sparse, dense, same, size

# ---- the knowledge base


def kb_of(finished):
    """By (client, task): the foreign A's that a client uses, named in one request alone."""
    found = {}
    for request in finished.requests:
        if "foreign" in request.fields:
            key = int(request.receiver.removeprefix("client-")), request.task
            assert key not in found  # once a task: Alg. 1 line 6
            found[key] = request.fields["foreign"]
    return found


NO_ROWS = {"ablate": ("b_comm",)}  # A's alone
CLOCKS = {"async": "task_clocks"}


def server_with(*keys):
    server = FedWeITServer()
    for key in keys:
        server.knowledge[key] = Sparse.of(vector(*origin(key), 1))
    return server


@pytest.mark.parametrize("kb_size", [0, 1, 3, 5, "all"])
@pytest.mark.parametrize("kb_from", ["all", "last"])
@pytest.mark.parametrize("kb_own", [True, False])
def test_what_a_client_receives(kb_size, kb_from, kb_own):
    """Of nine A's of three clients and three tasks, and some of the present and the future."""
    method = methods.load("fedweit", {"kb_size": kb_size, "kb_from": kb_from, "kb_own": kb_own, **NO_ROWS})
    server = server_with(*(f"{client}.{task}" for client in range(3) for task in range(5)))
    download = method.configure(server, 1, RoundContext(tiny(), 3, True))
    given = [origin(key) for key in download.fields["foreign"]]
    open_to = [(c, t) for c in range(3) for t in range(3) if (kb_own or c != 1) and (kb_from == "all" or t == 2)]
    assert len(set(given)) == len(given) == (len(open_to) if kb_size == "all" else min(kb_size, len(open_to)))
    assert set(given) <= set(open_to)


def test_the_sample_is_drawn_for_each_client_and_task():
    method = methods.load("fedweit", {"kb_size": 4})
    server = server_with(*(f"{client}.{task}" for client in range(9) for task in range(9)))
    contexts = [RoundContext(tiny(seed=seed), task, True) for task in (5, 6) for seed in (0, 1)]
    drawn = [tuple(method.sample(server, client, ctx)) for client in (0, 1) for ctx in contexts]
    assert len(set(drawn)) == 8
    assert method.sample(server, 0, contexts[0]) == list(drawn[0])


def test_a_repeated_first_request_repeats_its_sample():
    """With task clocks kb grows between two requests of one task; a late reply may be to either."""
    running = Run(tiny(method="fedweit", method__kb_size=1, method__ablate="b_comm", **CLOCKS)).go()
    server, exchange, wires = server_with("1.0"), running.federation.exchange, []
    exchange.server = server
    exchange.engine.submit = lambda request: wires.append(decode(request.wire))
    for round_index, more in enumerate(("2.0", "3.0", "4.0", "5.0", "6.0")):
        exchange._request(Assignment(0, 1, round_index, ("receive",), True, first=True))
        server.knowledge[more] = Sparse.of(vector(0, 1, 1))
        exchange.progress = Progress.from_json(json.loads(json.dumps(exchange.progress.to_json())))
    for message in wires:  # with the whole A, as no reply has confirmed it
        assert (set(message.tensors), message.fields["foreign"]) == ({"foreign/1.0"}, ["1.0"])
    for _ in range(2):  # the second of two late replies has nothing new
        running.method.aggregate(server, Updates([Update(0, 1, {}, {}, {}, message.fields, True)]), running.ctx)
    assert server.has_foreign == {0: ["1.0"]}
    for task in (2, 3):  # another task is another sample, also if there was no reply
        exchange._request(Assignment(0, task, 0, ("receive",), True, first=True))
        wanted = running.method.sample(server, 0, RoundContext(running.plan, task, True))
        assert wires[-1].fields["foreign"] == wanted
        assert len(wanted) == 1


def test_the_a_of_a_client_that_left_is_not_sent():
    method, plan = methods.load("fedweit", {"kb_size": "all", **NO_ROWS}), tiny(**CLOCKS)
    server = server_with("1.0", "2.0")
    first = method.configure(server, 0, RoundContext(plan, 1, True))
    assert first.fields["foreign"] == ["1.0", "2.0"]
    server.remove_client(1)
    again = method.configure(server, 0, RoundContext(plan, 1, True, repeats=first.fields))
    assert (set(again.once), again.fields["foreign"]) == ({"2.0"}, ["2.0"])


@pytest.mark.parametrize("backwards", [True, False])
def test_no_own_and_no_future_task_in_a_run(backwards):
    finished = Run(tiny(method="fedweit", method__kb_size="all", tasks=3), backwards=backwards).go()
    given = kb_of(finished)
    assert set(given) == {(client, task) for client in range(3) for task in range(3)}
    for (client, task), keys in given.items():
        assert {origin(key) for key in keys} == {(c, t) for c in range(3) for t in range(task) if c != client}


@pytest.mark.parametrize("kb_size", [2, "all"])
def test_a_foreign_a_is_sent_once_and_stored_once(kb_size):
    finished = weit(tasks=4, kb_size=kb_size, rounds_per_task=1)
    given, own = kb_of(finished), finished.parts("c2s")
    for client in range(3):
        sent = [name for c, _, _, name in finished.parts("s2c") if c == client and name.startswith("foreign/")]
        used = {key for (c, _), keys in given.items() if c == client for key in keys}
        assert sorted(sent) == sorted(f"foreign/{key}" for key in used)
        assert set(finished.clients[client].knowledge) == used
        for key in used:  # and it is what its owner gave, bit for bit
            giver, task = origin(key)
            assert same(finished.clients[client].knowledge[key], own[giver, task, 0, "adaptive"])
    if kb_size == "all":
        assert max(map(len, given.values())) == 6


def test_kb_comes_with_the_first_download_of_a_task():
    """Alg. 1 line 6, also for a client that is first selected in a later round."""
    for unchosen in (True, False):
        finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, rounds_per_task=3)
        first = {}
        for client, task, round_index, name in sorted(finished.parts("s2c")):
            if name == "weights":
                first.setdefault((client, task), round_index)
        assert set(first.values()) > {0}
        requests = [request for request in finished.requests if "foreign" in request.fields]
        assert {(int(each.receiver.removeprefix("client-")), each.task): each.round for each in requests} == first
        assert len(requests) == len(first)


def test_attention_starts_even():
    running = Run(tiny(method="fedweit", tasks=2)).go_to(1)
    assert begun(running)[0].attention.tolist() == [0.5] * 4  # two foreign A's, two layers


def trained(finished):
    """Who trained on which task: (client, task)."""
    return {(client, task) for client, task, _, fields in finished.reports if fields.get("images")}


@pytest.mark.slow
@pytest.mark.parametrize("unchosen", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_clients_that_trained_upload_their_a(unchosen, seed):
    """Alg. 1 line 11: j in C, not only those of the last round."""
    finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, seed=seed)
    up = {key[:2]: value for key, value in finished.parts("c2s").items() if key[-1] == "adaptive"}
    assert len(up) == len([key for key in finished.parts("c2s") if key[-1] == "adaptive"])  # each once
    assert set(up) == trained(finished) == set(map(origin, finished.server.knowledge))
    assert (len(up) == 9) == unchosen
    counted = finished.ledger.by("direction", "tensor", "client", "task")
    assert {key[2:] for key in counted if key[:2] == ("c2s", "adaptive")} == set(up)  # also when it is sent alone
    for (client, task), adaptive in up.items():
        assert same(adaptive, finished.server.knowledge[f"{client}.{task}"])
        assert same(adaptive, finished.clients[client].tasks[task].adaptive)


@pytest.mark.parametrize("unchosen", [True, False])
def test_with_kb_clients_chosen_those_of_the_last_round_upload(unchosen):
    """What the others do not upload is not sent, and not in the ledger."""
    finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, kb_clients="chosen")
    sent = finished.parts("c2s")
    last = {(client, task) for client, task, r, name in sent if r == 1 and name == "weights"}
    given = {(client, task) for client, task, _, name in sent if name == "adaptive"}
    assert len(last) == 3
    assert set(map(origin, finished.server.knowledge)) == last == given


@pytest.mark.parametrize("name", marked([name for name in TALKING if name in PRIVATE_HEADS]))
def test_train_unchosen(name):
    """All train in every round, and only the selected ones exchange anything."""
    finished, waiting = (
        run(method=name, clients_per_round=1, train_unchosen=unchosen, measured_model="own")
        for unchosen in (True, False)
    )
    images = [[1 for *_, fields in each.reports if fields.get("images")] for each in (finished, waiting)]
    assert list(map(len, images)) == [3 * 2 * 2, 2 * 2]
    for direction in ("c2s", "s2c"):
        rounds = [(task, r) for _, task, r, tensor in finished.parts(direction) if tensor == "weights"]
        assert sorted(rounds) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    alone = [request for request in finished.requests if not request.tensors]
    assert len(alone) == 8
    assert not any({"receive", "upload"} & set(request.ops) for request in alone)


# ---- past tasks


def test_past_tasks_drift_while_their_a_is_frozen():
    """theta_G changes the B of past tasks; `closed` moves their A against it, `frozen` does not."""
    frozen, put, each_frozen = moved("frozen", method__lambda_sparsity=0.03)
    closed, also_put, each_closed = moved("closed", method__lambda_sparsity=0.03)
    assert put
    assert not also_put
    assert frozen > 0.01
    assert closed < 0.5 * frozen
    assert all(map(float.__lt__, each_closed, each_frozen))


def test_without_l1_closed_past_tasks_do_not_drift_at_all():
    closed, _, _ = moved("closed", method__ablate="l1")
    assert closed < 1e-4


def test_joint_past_a_is_learned_against_the_change_of_b(held):
    running = Run(tiny(method="fedweit", method__past="joint", method__lambda_sparsity=0.03)).go_to(1)
    old = adaptives(running)[0]
    running.go()
    mask = spread(running.layout, running.clients[0].tasks[0].mask)
    change = (held[0]["weights"] - held[0]["reference"]) * mask  # dB * m
    move = adaptives(running)[0] - old  # dA
    assert torch.corrcoef(torch.stack([change, move]))[0, 1] < -0.3


@pytest.mark.parametrize("past", ["frozen", "closed", "joint"])
def test_what_belongs_to_a_past_task_stays(past):
    """Its mask, biases, head, attention and list of foreign A's are as they were when the task ended."""
    running = Run(tiny(method="fedweit", method__past=past, tasks=3)).go_to(2)

    def belongings():
        tasks = [running.clients[0].tasks[task] for task in range(2)]
        return [(*(x.tolist() for x in (each.mask, each.private, each.attention)), each.foreign) for each in tasks]

    before = belongings()
    assert len(before[1][-1]) == 2
    running.go()
    assert belongings() == before


def tensors_of(state):
    """All tensors of a state, except those of its tables."""
    found = {}
    storage._split(state, "", found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, *COMBINATIONS])
def test_no_two_tensors_of_a_client_share_memory(name):
    """Training in place would change the other one."""
    running = Run(tiny(method=name, **({"method__keep": 0.5} if "keep" in class_of(name).Options.model_fields else {})))
    running.go_to(1)
    for state in running.clients.values():
        pointers = [x.data_ptr() for x in tensors_of(state).values() if isinstance(x, torch.Tensor) and len(x)]
        assert len(set(pointers)) == len(pointers)


def test_between_tasks_a_client_keeps_no_whole_vector_but_b():
    finished = weit()
    kept = tensors_of(finished.clients[0]).items()
    assert [key for key, value in kept if size(value) == finished.layout.weights] == ["weights"]


def test_drift_is_counted_from_b_before_or_after_theta_g(held):
    """Row 21 of fidelity.md: `own` is B at the end of task t-1, `received` is B with theta_G."""
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
    foreign = [int(dense(value).count_nonzero()) for value in state.knowledge.values()]
    dense_values = layout.weights + 2 * layout.rows + 2 * (layout.size - layout.weights) + 2 * 2
    assert len(foreign) == 2
    known = finished.progress.clients[0]
    assert known.size == {
        "bytes": 4 * dense_values + 8 * (sum(nonzeros) + sum(foreign)),
        "paper_bytes": 4 * (int(state.weights.count_nonzero()) + sum(nonzeros)),
    }
    assert known.density == pytest.approx([count / layout.weights for count in nonzeros])
    assert all(map(math.isfinite, known.density))
    assert Progress.from_json(json.loads(json.dumps(finished.progress.to_json()))).clients[0] == known
