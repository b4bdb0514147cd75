"""Every method meets the same contract, and has limits of its own.

The contract runs over the registry: a method is tested from the moment it is registered, and so is each of its presets.
"""

import copy
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from helpers import Run, differences, run, state_bits, tiny, vector
from methods_helpers import (
    NAMES,
    PRIVATE_HEADS,
    TALKING,
    fresh,
    marked,
    updates_of,
)

import weft
from weft import methods
from weft.core.client import Runtime, answer
from weft.methods import class_of
from weft.methods.method import RoundContext
from weft.metrics import backward_transfer, forgetting
from weft.plan import Plan
from weft.wire.ledger import Ledger
from weft.wire.message import Message, encode
from weft.wire.tensors import size

ROOT = Path(__file__).resolve().parent.parent


each_method = pytest.mark.parametrize("name", marked(NAMES))


# ---- the contract


@each_method
def test_learns_a_toy_task(name):
    """Twice three tasks of two classes from forty images; chance is one half, and 240 test images vary by 0.03."""
    toy = {"network__hidden": 16, "scenario__train": 40, "scenario__test": 40, "batch_size": 20}
    found = []
    for seed in (0, 1):
        finished = run(
            method=name,
            tasks=1,
            rounds_per_task=4,
            epochs_per_round=4,
            learning_rate=2e-3,
            sgd_rate=0.02,
            seed=seed,
            **toy,
        )
        found += [matrix[0][0] for matrix in finished.matrices.values()]
    assert len(found) == 6
    assert sum(found) / 6 > 0.62


@each_method
def test_same_seed_same_bits_other_seed_other_bits(name):
    first = run(method=name)
    assert differences(first.bits(), fresh(method=name).bits()) == []
    other = run(method=name, seed=1)
    assert not torch.equal(first.clients[0].weights, other.clients[0].weights)


@pytest.mark.slow
@each_method
def test_the_order_of_clients_does_not_matter(name):
    backwards = Run(tiny(method=name, tasks=3), backwards=True).go()
    assert backwards.wires != run(method=name, tasks=3).wires
    assert differences(run(method=name, tasks=3).bits(), backwards.bits()) == []


@each_method
def test_survives_save_and_resume_after_any_message(name, tmp_path):
    """Every client goes to disk and comes back after every answer, the server after every round."""
    interrupted = Run(tiny(method=name, tasks=3), folder=tmp_path).go_with_interruptions()
    assert interrupted.marks == 6  # two rounds of a task, three times
    assert differences(run(method=name, tasks=3).bits(), interrupted.bits()) == []


@pytest.mark.slow
@each_method
def test_the_same_request_twice_and_networks_overwritten_in_between(name):
    """A repeated request gets the same reply and trains nothing; and nothing is remembered in the network."""
    careless = Run(tiny(method=name, tasks=3), careless=True).go()
    assert differences(run(method=name, tasks=3).bits(), careless.bits()) == []


@each_method
def test_a_method_holds_no_state(name):
    running = Run(tiny(method=name, rounds_per_task=1))
    method, kind = running.method, type(running.method)

    def snapshot():
        parts = [method, *getattr(method, "parts", [])]
        return [repr(vars(part)) for part in parts], {key: repr(value) for key, value in vars(kind).items()}

    before = snapshot()
    running.go()
    assert snapshot() == before


@each_method
def test_who_does_not_talk_sends_nothing(name):
    finished = run(method=name)
    if finished.method.traits.federated:
        assert finished.parts("c2s")
        assert finished.parts("s2c")
    else:
        assert finished.parts("c2s") == finished.parts("s2c") == {}
        assert finished.ledger.entries == []
        assert not dataclasses.fields(finished.server)


@pytest.mark.parametrize("name", marked(PRIVATE_HEADS))
@pytest.mark.parametrize("biases", ["private", "shared"])
def test_heads_stay_at_home_and_private_biases_too(name, biases):
    """Looked for in the very bytes that travelled: any four numbers in a row of somebody's head."""
    if methods.options_of(name)().biases == biases:
        finished = run(method=name)
    else:
        try:
            finished = run(method=name, method__biases=biases)
        except weft.WeftError:
            pytest.skip(f"{name} has no {biases} biases")
    count = finished.layout.body - finished.layout.weights
    allowed = {finished.layout.weights, *([count] if biases == "shared" else [])}
    for message in finished.requests + finished.answers:
        assert {size(payload) for payload in message.tensors.values()} <= allowed

    secrets = []
    for private in {value.numpy().tobytes(): value for value in finished.privates}.values():
        parts = [private[count:-2]] + ([private[:count]] if biases == "private" else [])
        secrets += [part[at : at + 4] for part in parts for at in range(0, len(part) - 3, 7)]
    secrets = [part.numpy().tobytes() for part in secrets if part.count_nonzero() > 2]
    assert len(secrets) > 30
    travelled = b"".join(finished.wires)
    assert not any(secret in travelled for secret in secrets)


@pytest.mark.parametrize("name", marked([name for name in TALKING if name in PRIVATE_HEADS]))
def test_shared_biases_do_travel(name):
    """The other side of the test above: what is sent is found in the bytes."""
    finished = run(method=name, **{} if name == "fedavg" else {"method__biases": "shared"})
    biases = finished.layout.body - finished.layout.weights
    for place, message in enumerate(finished.answers):
        own = finished.privates[place][:biases]
        assert torch.equal(message.tensors["biases"], own)
        assert own.numpy().tobytes() in finished.wires[2 * place + 1]


@each_method
def test_the_ledger_weighs_every_byte_that_travelled(name):
    finished = run(method=name)
    again = Ledger(finished.layout.body)
    if finished.method.traits.federated:
        for request, reply, (first, second) in zip(
            finished.requests,
            finished.answers,
            zip(finished.wires[::2], finished.wires[1::2], strict=True),
            strict=True,
        ):
            client = int(reply.sender.removeprefix("client-"))
            again.enter("s2c", client, request.task, request.round, first)
            again.enter("c2s", client, request.task, request.round, second)
    assert finished.ledger.totals() == again.totals()
    assert (
        sum(total["bytes"] for total in again.totals().values())
        == sum(map(len, finished.wires)) * finished.method.traits.federated
    )


@pytest.mark.slow
@each_method
@pytest.mark.parametrize(("measured", "unchosen"), [("own", False), ("global", False), ("global", True)])
def test_everybody_that_was_ever_asked_is_tested_after_every_task(name, measured, unchosen):
    """Also after the tasks before it was first asked; and whoever never was costs nothing."""
    changed = {"clients_per_round": 1, "measured_model": measured, "train_unchosen": unchosen}
    finished = run(method=name, **changed)
    learned = {int(request.receiver.removeprefix("client-")) for request in finished.requests if "train" in request.ops}
    assert set(finished.matrices) == set(finished.clients) == learned
    assert len(learned) > 1
    assert all([len(row) for row in matrix] == [1, 2] for matrix in finished.matrices.values())
    chosen = {(request.task, request.round) for request in finished.requests if request.tensors}
    for step, round_index in chosen:
        asked = [m for m in finished.requests if (m.task, m.round) == (step, round_index) and m.tensors]
        if round_index < 2:  # after the last round the global model is tested
            assert len(asked) == 1


@each_method
def test_trying_theta_g_on_for_a_test_changes_nothing(name):
    finished = run(method=name)
    state = copy.copy(finished.clients[0])
    before = state_bits(state)
    download = finished.method.configure(finished.server, 0, RoundContext(finished.plan, 1, False))
    wire = encode(Message("server", "client-0", "1.9.0", ("test",), 1, 9, download.tensors, download.fields))
    answer(finished.runtime, 0, state, wire)
    changed = set(differences(before, state_bits(state)))
    assert changed <= {"values", "reply"}  # the reply is kept, in case the request is repeated


@each_method
def test_a_preset_counts_in_python_as_on_the_command_line(name):
    plain, _, preset = name.partition("@")
    for plan in (Plan.merge({}, [f"method={name}"]), Plan(method=name)):
        for key, value in methods.preset_of(plain, preset).items():
            part, _, option = key.partition(".")
            assert (plan.method_options[option] if part == "method" else getattr(plan, key)) == value, key


@each_method
def test_a_method_describes_itself(name):
    kind = class_of(name)
    assert kind.info.citation
    if "@" not in name:
        file, _, test = kind.info.verified.partition(": ")
        assert not test or f"def {test}(" in (ROOT / file).read_text()
        assert test or name == "fedweit" or ":" in name  # a user's own
    assert kind.traits.federated == ((kind.info.uploads, kind.info.downloads) != ("nothing", "nothing"))
    for part in methods.parts_of(name):
        assert "    " in inspect.getdoc(inspect.getmodule(class_of(part))) or part in (
            "local",
            "stl",
            "joint",
        )  # formulas
    assert methods.options_of(name).model_config["extra"] == "forbid"


def test_the_federation_of_these_tests_is_the_real_one(tmp_path):
    """What is compared here are runs in memory; engine, record and checkpoints add nothing to the result."""
    result = weft.run(tiny(method="fedweit"), tmp_path / "run", save_every=0.0)
    wanted = run(method="fedweit")
    for client, matrix in wanted.matrices.items():
        for after, row in enumerate(matrix):
            assert result.accuracy_matrix[client, after, : len(row)].tolist() == row
    assert result.traffic == wanted.ledger.totals()


# ---- FedAvg


def test_fedavg_sends_the_whole_body_both_ways_every_round():
    finished = run(method="fedavg", tasks=3)
    body, messages = finished.layout.body, 2 * 3 * 3  # rounds, tasks, clients
    for direction in ("c2s", "s2c"):
        parts = finished.ledger.by("direction", "tensor")
        sizes = {part: sums.bytes for (way, part), sums in parts.items() if way == direction and part != "header"}
        assert sum(sizes.values()) == 4 * body * messages
    totals = finished.ledger.totals()
    for total in totals.values():
        assert total["bytes"] == total["dense_bytes"]
        assert total["nonzeros"] <= body * messages


@pytest.mark.parametrize(("average", "wanted"), [("examples", [2.5, 5.0]), ("equal", [2.0, 4.0])])
def test_fedavg_mean_by_hand(average, wanted):
    method = methods.load("fedavg", {"average": average, "biases": "private"})
    server = method.Server()
    method.aggregate(server, updates_of({"weights": vector(1, 2)}, {"weights": vector(3, 6)}, examples=(10, 30)), None)
    assert server.weights.tolist() == wanted
    method.aggregate(server, updates_of({}, {}), None)  # all have stopped: theta_G stays
    assert server.weights.tolist() == wanted


def test_fedavg_clients_start_each_round_from_theta_g():
    finished = run(method="fedavg")
    given, answered = finished.parts("s2c"), finished.parts("c2s")
    for (client, step, round_index, name), value in given.items():
        assert torch.equal(value, given[0, step, round_index, name])  # the same for everybody
        if client == 0 and (step, round_index) > (0, 0):
            before = (step, round_index - 1) if round_index else (step - 1, 1)
            mean = sum(answered[c, *before, name] for c in range(3)) / 3
            torch.testing.assert_close(value, mean)


# ---- STL


def test_stl_forgets_nothing():
    for matrix in run(method="stl", tasks=3).matrices.values():
        assert forgetting(matrix) == backward_transfer(matrix) == 0
        for i in range(3):
            assert len({matrix[t][i] for t in range(i, 3)}) == 1


def with_another_first_task(name):
    """Client 0 learns its second task after another first one."""
    plan = tiny(method=name, clients=2)
    runtime = Runtime(plan)
    (_, second), other = runtime.scenario.sequences
    assert other[0].name != second.name
    runtime.scenario = dataclasses.replace(runtime.scenario, sequences=((other[0], second), other))
    return Run(plan, runtime=runtime).go()


def test_tasks_of_stl_do_not_influence_one_another():
    first, second = run(method="stl", clients=2), with_another_first_task("stl")
    assert not torch.equal(first.theta(0, 0), second.theta(0, 0))
    assert torch.equal(first.theta(0, 1), second.theta(0, 1))
    assert first.matrices[0][1][1] == second.matrices[0][1][1]


def test_tasks_of_fedavg_do():
    first, second = run(method="fedavg", clients=2), with_another_first_task("fedavg")
    assert not torch.equal(first.theta(0, 1), second.theta(0, 1))
