"""Every method meets the same contract, and has limits of its own.

The contract runs over the registry: a method is tested from the moment it is registered, and so is each of its presets.
"""

import copy
import dataclasses
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import CachedWorld, Run, differences, run, spread, tiny, vector
from torch.nn import functional

import weft
from weft import methods
from weft.client import World, answer
from weft.ledger import Ledger
from weft.message import Message, encode
from weft.methods import COMBINATIONS, METHODS, class_of
from weft.methods.apd import APD
from weft.methods.fedweit import Options
from weft.metrics import backward_transfer, forgetting
from weft.plan import Plan
from weft.state import State
from weft.tensors import Rows, Sparse, dense, same, size

PRESETS = [f"{name}@{preset}" for name in METHODS for preset in class_of(name).presets]
NAMES = [*METHODS, *COMBINATIONS, *PRESETS]
ROOT = Path(__file__).resolve().parent.parent
TALKING = [name for name in NAMES if class_of(name).talks]
QUICK = ["fedweit", "fedavg", "scaffold", "joint", "fedprox+ewc"]  # the others meet the contract in the slow tests


def marked(names):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


each_method = pytest.mark.parametrize("name", marked(NAMES))


def fresh(**changed):
    return Run(tiny(**changed)).go()


def sent(finished):
    """Everything that was said, tensors and numbers, in order."""
    return finished.wires, finished.matrices


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
    assert not torch.equal(first.clients[0].tensor("base"), other.clients[0].tensor("base"))


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
        return copy.deepcopy(vars(method)), {key: repr(value) for key, value in vars(kind).items()}

    before = snapshot()
    running.go()
    assert snapshot() == before
    assert set(vars(method)) == {"options"}


@each_method
def test_who_does_not_talk_sends_nothing(name):
    finished = run(method=name)
    if finished.method.talks:
        assert finished.parts("c2s")
        assert finished.parts("s2c")
    else:
        assert finished.parts("c2s") == finished.parts("s2c") == {}
        assert finished.ledger.entries == []
        assert not finished.server.tensors
        assert not finished.server.archive


@each_method
@pytest.mark.parametrize("biases", ["private", "shared"])
def test_heads_stay_at_home_and_private_biases_too(name, biases):
    """Looked for in the very bytes that travelled: any four numbers in a row of somebody's head."""
    if methods.options_of(name)().biases == biases:
        finished = run(method=name)
    else:
        try:
            finished = run(method=name, method__biases=biases)
        except weft.Problem:
            pytest.skip(f"{name} has no {biases} biases")
    count = finished.layout.body - finished.layout.weights
    allowed = {finished.layout.weights, *([count] if biases == "shared" else [])}
    for message in finished.requests + finished.replies:
        assert {size(payload) for payload in message.tensors.values()} <= allowed

    secrets = []
    for private in {value.numpy().tobytes(): value for value in finished.privates}.values():
        parts = [private[count:-2]] + ([private[:count]] if biases == "private" else [])
        secrets += [part[at : at + 4] for part in parts for at in range(0, len(part) - 3, 7)]
    secrets = [part.numpy().tobytes() for part in secrets if part.count_nonzero() > 2]
    assert len(secrets) > 30
    travelled = b"".join(finished.wires)
    assert not any(secret in travelled for secret in secrets)


@pytest.mark.parametrize("name", marked(TALKING))
def test_shared_biases_do_travel(name):
    """The other side of the test above: what is sent is found in the bytes."""
    finished = run(method=name, **{} if name == "fedavg" else {"method__biases": "shared"})
    biases = finished.layout.body - finished.layout.weights
    for place, message in enumerate(finished.replies):
        own = finished.privates[place][:biases]
        assert torch.equal(message.tensors["biases"], own)
        assert own.numpy().tobytes() in finished.wires[2 * place + 1]


@each_method
def test_the_ledger_weighs_every_byte_that_travelled(name):
    finished = run(method=name)
    again = Ledger(finished.layout.body)
    if finished.method.talks:
        for request, reply, (first, second) in zip(
            finished.requests,
            finished.replies,
            zip(finished.wires[::2], finished.wires[1::2], strict=True),
            strict=True,
        ):
            client = int(reply.sender.removeprefix("client-"))
            again.enter("s2c", client, request.step, request.round, first)
            again.enter("c2s", client, request.step, request.round, second)
    assert finished.ledger.totals() == again.totals()
    assert (
        sum(total["bytes"] for total in again.totals().values())
        == sum(map(len, finished.wires)) * finished.method.talks
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
    chosen = {(request.step, request.round) for request in finished.requests if request.tensors}
    for step, round_index in chosen:
        asked = [m for m in finished.requests if (m.step, m.round) == (step, round_index) and m.tensors]
        if round_index < 2:  # after the last round the global model is tested
            assert len(asked) == 1


@each_method
def test_trying_theta_g_on_for_a_test_changes_nothing(name):
    finished = run(method=name)
    own, step = finished.clients[0], 1
    state = State(dict(own.tensors), dict(own.numbers), own.archive, own.reply)
    before, archived = {key: value.clone() for key, value in state.tensors.items()}, list(state.archive)
    tensors, numbers = finished.method.brief(finished.server, 0, step, False, finished.plan)
    wire = encode(Message("server", "client-0", "tried", ("test",), step, 9, tensors, numbers))
    answer(finished.world, 0, state, wire)
    assert all(torch.equal(state.tensor(key), value) for key, value in before.items())
    assert list(state.archive) == archived


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
    assert kind.citation
    if "@" not in name:
        file, _, test = kind.verified.partition(": ")
        assert not test or f"def {test}(" in (ROOT / file).read_text()
        assert test or name == "fedweit"
    assert len(kind.sends) == 2
    assert kind.talks == (kind.sends != ("nothing", "nothing"))
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
        parts = finished.ledger.by("direction", "part")
        sizes = {part: sums.bytes for (way, part), sums in parts.items() if way == direction and part != "header"}
        assert sum(sizes.values()) == 4 * body * messages
    totals = finished.ledger.totals()
    for total in totals.values():
        assert total["bytes"] == total["dense_bytes"]
        assert total["nonzeros"] <= body * messages


def replies_of(*parts, examples=(1, 1, 1)):
    """One reply a client, as the server gets them."""
    return [
        Message(f"client-{place}", "server", str(place), (), 0, 0, tensors, {"examples": count})
        for place, (tensors, count) in enumerate(zip(parts, examples, strict=False))
    ]


@pytest.mark.parametrize(("average", "wanted"), [("examples", [2.5, 5.0]), ("equal", [2.0, 4.0])])
def test_fedavg_mean_by_hand(average, wanted):
    method = methods.load("fedavg", {"average": average, "biases": "private"})
    server = State()
    method.aggregate(server, replies_of({"base": vector(1, 2)}, {"base": vector(3, 6)}, examples=(10, 30)))
    assert server.tensor("global").tolist() == wanted
    method.aggregate(server, replies_of({}, {}))  # all have stopped: theta_G stays
    assert server.tensor("global").tolist() == wanted


def test_fedavg_clients_start_each_round_from_theta_g():
    finished = run(method="fedavg")
    given, answered = finished.parts("s2c"), finished.parts("c2s")
    for (client, step, round_index, name), value in given.items():
        assert torch.equal(value, given[0, step, round_index, name])  # the same for everybody
        if client == 0 and (step, round_index) > (0, 0):
            before = (step, round_index - 1) if round_index else (step - 1, 1)
            name_up = {"global": "base"}.get(name, name)
            mean = sum(answered[c, *before, name_up] for c in range(3)) / 3
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
    world = World(plan)
    (_, second), other = world.scenario.sequences
    assert other[0].name != second.name
    world.scenario = dataclasses.replace(world.scenario, sequences=((other[0], second), other))
    return Run(plan, world=world).go()


def test_tasks_of_stl_do_not_influence_one_another():
    first, second = run(method="stl", clients=2), with_another_first_task("stl")
    assert not torch.equal(first.theta(0, 0), second.theta(0, 0))
    assert torch.equal(first.theta(0, 1), second.theta(0, 1))
    assert first.matrices[0][1][1] == second.matrices[0][1][1]


def test_tasks_of_fedavg_do():
    first, second = run(method="fedavg", clients=2), with_another_first_task("fedavg")
    assert not torch.equal(first.theta(0, 1), second.theta(0, 1))


# ---- FedWeIT: its limit

PLAIN = {"without": "m,a,l1,l2", "keep": 1, "biases": "private", "average": "equal"}


def start_of_a(finished):
    """What A is counted from."""
    return finished.world.lesson(0, 0).initial()[: finished.layout.weights] * (1 / 3)


def weit(**changed):
    """A FedWeIT run: options by their names, plan keys by theirs."""
    options = {f"method__{key}" if key in Options.model_fields else key: value for key, value in changed.items()}
    return run(method="fedweit", **options)


@pytest.fixture
def held(monkeypatch):
    """What each client held when its last task ended, just before it put away what only a task under way needs."""
    found, finish = {}, APD.finish

    def keeping(method, client, lesson):
        found[lesson.client] = dict(client.tensors)
        finish(method, client, lesson)

    monkeypatch.setattr(APD, "finish", keeping)
    return found


def fresh_weit(**options):
    """Like `weit`, but run now."""
    return Run(tiny(method="fedweit", **{f"method__{key}": value for key, value in options.items()})).go()


@pytest.mark.parametrize("changed", [{}, {"clients_per_round": 2, "tasks": 3}], ids=["all", "some"])
def test_fedweit_without_all_that_is_its_own_is_fedavg(changed):
    ours = weit(**PLAIN, **changed)
    plain = run(method="fedavg", method__biases="private", method__average="equal", **changed)
    assert ours.matrices == plain.matrices
    assert torch.equal(dense(ours.server.tensors["global"]), plain.server.tensor("global"))
    for client in range(3):
        assert torch.equal(ours.clients[client].tensor("base"), plain.clients[client].tensor("base"))
    for key, value in plain.parts("c2s").items():
        assert torch.equal(dense(ours.parts("c2s")[key]), value)


@pytest.mark.parametrize("word", ["m", "a"])
def test_each_part_matters_to_that_limit(word):
    without = ",".join(sorted(set(PLAIN["without"].split(",")) - {word}))
    plain = run(method="fedavg", method__biases="private", method__average="equal")
    assert not torch.equal(
        weit(**PLAIN | {"without": without}).clients[0].tensor("base"), plain.clients[0].tensor("base")
    )


# ---- FedWeIT: the paper's ablations


def adaptives(finished, client=0):
    return {key: dense(value) for key, value in finished.clients[client].archive.items() if key.startswith("adaptive/")}


def test_everything_travels_by_default():
    finished = weit(tasks=3)
    assert finished.names("c2s") == {"base", "adaptive"}
    assert finished.names("s2c") == {"global", "foreign"}


def test_without_b_comm_no_base_travels():
    for biases in ("private", "shared"):
        finished = weit(without="b_comm", biases=biases)
        assert finished.names("c2s") == {"adaptive"}
        assert finished.names("s2c") == {"foreign"}
    assert not torch.equal(*(finished.clients[client].tensor("base") for client in (0, 1)))


def test_without_a_comm_no_adaptive_travels():
    finished = weit(tasks=3, without="a_comm")
    assert finished.names("c2s") == {"base"}
    assert finished.names("s2c") == {"global"}
    assert not finished.server.archive
    assert all(value.count_nonzero() for value in adaptives(finished).values())  # it is there, at home


@pytest.mark.parametrize("past", ["frozen", "closed", "joint"])
def test_without_a_it_is_zero_everywhere(past):
    finished = weit(tasks=3, without="a", past=past)
    assert finished.names("c2s") == {"base"}
    assert finished.names("s2c") == {"global"}
    for client in range(3):
        assert len(adaptives(finished, client)) == 3
        for key, value in adaptives(finished, client).items():
            assert value.count_nonzero() == 0, (client, key)


def test_without_m_every_row_is_sent_as_it_is():
    finished = weit(without="m", send="product", keep=0.3)
    for step in range(2):
        assert (dense(finished.clients[0].archive[f"mask/{step}"]) == 1).all()
    for key, value in finished.parts("c2s").items():
        if key[-1] == "base":
            assert value.kept.all(), key
    theta, state = finished.theta(0, 0), finished.clients[0]
    wanted = state.tensor("base") + start_of_a(finished) + dense(state.archive["adaptive/0"])
    assert torch.equal(theta[: finished.layout.weights], wanted)


def learned_bits(finished):
    return {key: value for key, value in finished.bits().items() if "accuracy" in key or "bits" in key}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sparsify", "past"),
    [("proximal", "frozen"), ("gradient", "frozen"), ("gradient", "joint"), ("proximal", "closed")],
)
def test_without_l1_nothing_is_shrunk(sparsify, past, held):
    """lambda_1 means nothing any more, to A, to m, or to past A; and no value of A is 0."""
    first, second = (
        fresh_weit(without="l1", sparsify=sparsify, past=past, adaptive_origin="zero", **words)  # all of A is learned
        for words in ({}, {"lambda_sparsity": 3.0, "lambda_mask": 1.0})
    )
    assert differences(learned_bits(first), learned_bits(second)) == []
    assert held[0]["adaptive"].count_nonzero() == first.layout.weights


def test_with_l1_values_of_a_are_zero():
    kept = []
    for weight in (1.0, 3.0):
        found = weit(lambda_sparsity=weight, adaptive_keep=1)
        kept.append([int(value.count_nonzero()) for value in adaptives(found).values()])
    assert max(kept[0]) < 0.9 * found.layout.weights
    assert all(map(int.__lt__, kept[1], kept[0]))


def test_adaptive_keep_is_the_largest_share_of_a(held):
    finished = fresh_weit(adaptive_keep=0.25, adaptive_rank="size")
    given = finished.parts("c2s")[0, 1, 1, "adaptive"]
    learned, kept = held[0]["adaptive"], given.dense() != 0
    assert 0.24 * finished.layout.weights < given.nonzeros <= 0.25 * finished.layout.weights
    assert learned[kept].abs().min() >= learned[~kept].abs().max()
    assert torch.equal(given.dense()[kept], learned[kept])


@pytest.mark.parametrize("past", ["frozen", "closed", "joint"])
def test_without_l2_nothing_pulls_at_b(past):
    first, second = (weit(without="l2", past=past, lambda_drift=value) for value in (100.0, 1.0))
    assert differences(learned_bits(first), learned_bits(second)) == []


def test_with_l2_b_stays_nearer_to_where_it_was(held):
    """No theta_G in between: the pull alone."""
    moved = {}
    for words in ("b_comm", "b_comm,l2"):
        Run(tiny(method="fedweit", method__without=words, rounds_per_task=4)).go()
        moved[words] = (held[0]["base"] - held[0]["reference"]).norm().item()
    assert moved["b_comm"] < 0.8 * moved["b_comm,l2"]


@pytest.mark.parametrize("word", ["b_comm", "a_comm", "a", "m", "l1", "l2"])
def test_each_ablation_changes_the_run(word):
    assert learned_bits(weit(without=word)) != learned_bits(weit())


# ---- FedWeIT: its options


class UnevenWorld(CachedWorld):
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
    ("weight_decay", 0.1, {"without": "m,a"}),
    ("mask", "linear", {"mask_start": 1.0}),
    ("mask_start", 1.0, {}),
    ("mask_spread", 0.5, {}),
    ("mask_trained", False, {}),
    ("send", "product", {}),
    ("divide", "clients", {}),
    ("divide", "anchored", {}),
    ("adaptive_origin", "zero", {}),
    ("adaptive_rank", "size", {}),
    ("mask_rate", 30.0, {}),
    ("adaptive_rate", 3.0, {}),
    ("attention_rate", 30.0, {}),
    ("kb_size", 1, {}),
    ("kb_size", 0, {}),
    ("kb_from", "last", {"tasks": 3, "kb_size": "all"}),
    ("kb_own", True, {}),
    ("kb_givers", "chosen", SOME),
    ("share", 3, {}),
    ("share", "nothing", {}),
    ("attention_start", "random", {}),
    ("past", "closed", {}),
    ("past", "joint", {}),
    ("past", "joint", {"past": "closed"}),
    ("drift_from", "received", {}),
    ("drift_from", "received", {"without": "a_comm"}),
    ("drift_from", "received", {"past": "closed"}),
    ("adaptive_start", 0.0, {}),
    ("without", "l2", {}),
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
        finished = Run(plan, world=UnevenWorld(plan)).go()
        assert {reply.numbers["examples"] for reply in finished.replies} == {10, 20}
        found.append(dense(finished.server.tensors["global"]))
    assert (found[0] - found[1]).abs().max() > 1e-4


SEGMENTS = ((2, 1), (1, 2))  # two rows of one weight, one row of two


def rows(kept, *values):
    return {"base": Rows(SEGMENTS, torch.tensor(kept), vector(*values))}


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
    method = methods.load("fedweit", options)
    server = State()
    first, second, third = (
        rows([True, False, False], 1),
        rows([True, False, False], 3),
        rows([False, False, True], 4, 6),
    )
    method.aggregate(server, replies_of(first, second, third, examples=(10, 30, 10)))
    found = server.tensors["global"]
    assert found.kept.tolist() == [True, False, True]
    assert found.dense().tolist() == pytest.approx(wanted)
    method.aggregate(server, replies_of({}, {"adaptive": Sparse.of(vector(1))}))
    assert same(server.tensors["global"], found)


def test_b_becomes_theta_g_where_it_is_not_zero():
    """Section 3.4: B(n) = theta_G(n) for the n where theta_G is not 0."""
    finished = fresh(method="fedweit", method__keep=0.3)
    client, layout = finished.clients[0], finished.layout
    own = client.tensor("base").clone()
    theta_g = torch.arange(1.0, layout.weights + 1)
    kept = torch.arange(layout.rows) % 2 == 0
    message = Message("server", "client-0", "x", (), 1, 0, {"global": Rows.of(theta_g, layout.segments, kept)})
    finished.method.receive(client, message, finished.world.lesson(0, 1))
    for layer, found in layout.by_layer(client.tensor("base")):
        for row in range(layer.rows):
            source = theta_g if kept[layer.first_row + row] else own
            assert torch.equal(found[row], source[layer.span].view(layer.rows, -1)[row])


def kept_rows(finished):
    return [value.kept for (*_, name), value in finished.parts("c2s").items() if name == "base"]


def test_keep_is_the_share_of_rows_that_is_sent():
    for keep, each in ((0.3, [3, 5]), (0.5, [4, 8]), (1.0, [8, 16])):  # of 8 and 16 rows, rounded up
        for kept in kept_rows(weit(keep=keep)):
            assert [int(part.sum()) for part in kept.split([8, 16])] == each
    sums = weit(keep=0.3).ledger.by("direction", "part")["c2s", "base"]
    assert sums.bytes == 12 * (
        4 * (3 * 3072 + 5 * 8) + 3
    )  # twelve replies: values of eight rows, and a bit for each of 24


def test_the_rows_sent_are_those_of_the_strongest_mask_and_of_b_itself():
    for send in ("base", "product"):
        finished = fresh(method="fedweit", method__send=send)
        state, layout = finished.clients[0], finished.layout
        part = finished.parts("c2s")[0, 1, 1, "base"]
        mask = state.tensor("mask").sigmoid()
        for layer in layout.layers:
            kept = part.kept[layer.row_span]
            assert mask[layer.row_span][kept].min() >= mask[layer.row_span][~kept].max()
        base = state.tensor("base")
        factor = spread(layout, mask) if send == "product" else 1.0
        torch.testing.assert_close(part.dense(), Rows.of(base * factor, layout.segments, part.kept).dense())


def test_theta_is_eq_1():
    """What answers for a task is B * m + A + sum of alpha * A_f, written out here with dense vectors."""
    finished = weit(tasks=3, kb_size="all")
    state, layout = finished.clients[1], finished.layout
    for step in range(3):
        mask = dense(state.archive[f"mask/{step}"])
        wanted = state.tensor("base") * spread(layout, mask) + start_of_a(finished)
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
    assert (finished.clients[0].tensor("mask") == 0.25).all()
    assert (weit(mask_start=0.25).clients[0].tensor("mask") != 0.25).sum() > 12  # of 24; a unit may be dead


@pytest.mark.parametrize("origin", ["start", "zero"])
def test_a_starts_at_a_share_of_the_initial_weights(origin):
    running = Run(tiny(method="fedweit", method__adaptive_start=0.25, method__adaptive_origin=origin))
    state, lesson = State(), running.world.lesson(0, 0)
    running.method.join(state, lesson)
    running.method.begin(state, lesson)
    share = 0.25 if origin == "zero" else 0.0  # A is counted from its start, and is none
    torch.testing.assert_close(state.tensor("adaptive"), state.tensor("base") * share)
    work = running.method.open(state, lesson)
    running.method.compose(work)
    theta = lesson.network.vector[: lesson.layout.weights]
    torch.testing.assert_close(theta, state.tensor("base") * 0.75)  # a half of B, and a quarter


@pytest.mark.parametrize("name", ["fedweit", "apd"])
@pytest.mark.parametrize(("mask", "past"), [("sigmoid", "joint"), ("linear", "closed"), ("sigmoid", "frozen")])
def test_the_gradients_of_a_step_are_those_of_eq_2(name, mask, past):
    """The whole objective written out with autograd: loss, l1, drift, decay; past A put, moved, or learned too."""
    weights = {"lambda_sparsity": 0.3, "lambda_mask": 0.2, "lambda_drift": 5.0, "weight_decay": 0.05}
    options = {"mask": mask, "mask_start": 0.5, "mask_spread": 0.2, "sparsify": "gradient", "past": past, **weights}
    running = Run(tiny(method=name, **{f"method__{key}": value for key, value in options.items()})).go_to(1)
    method, state, lesson, layout = running.method, running.clients[0], running.world.lesson(0, 1), running.layout
    method.begin(state, lesson)
    if method.talks:
        tensors, numbers = method.brief(running.server, 0, 1, True, running.plan)
        method.receive(state, Message("server", "client-0", "x", (), 1, 0, tensors, numbers), lesson)
    rng = torch.Generator().manual_seed(0)
    before = dense(state.archive["adaptive/0"])
    if past != "frozen":  # as an earlier round of the task has left it
        state.archive["adaptive/0"] = Sparse.of(before + 0.01 * torch.randn(layout.weights, generator=rng))
    work = method.open(state, lesson)
    work.variables["base"].add_(0.01 * torch.randn(layout.weights, generator=rng))
    images, labels = running.world.batches(0, 1, "train").take(torch.arange(20))
    for _ in range(2):  # of the second step too: nothing is left over from the first
        method.compose(work)
        lesson.network.compute_gradient(images, labels)
        method.pull_back(work)
        method.penalise(work)
        found = {name: gradient.clone() for name, gradient in work.gradients.items()}
        method.constrain(work, 0.1)

    v = {name: value.clone().requires_grad_() for name, value in work.variables.items()}
    wanted = {"base", "mask", "adaptive", "private", *(["adaptive/0"] if past == "joint" else [])}
    wanted |= {"attention"} if name == "fedweit" else set()
    assert set(v) == set(found) == wanted
    m = v["mask"].sigmoid() if mask == "sigmoid" else v["mask"]
    theta = v["base"] * spread(layout, m) + start_of_a(running) + v["adaptive"]
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
    moved = (v["base"] - state.tensor("reference")) * past_mask + past_a - before
    objective = loss + 0.3 * (v["adaptive"].abs().sum() + past_a.abs().sum()) + 0.2 * m.abs().sum()
    objective = objective + 5 * moved.square().sum()
    objective = objective + 0.05 * (v["adaptive"].square().sum() + v["mask"].square().sum())
    for key, gradient in zip(v, torch.autograd.grad(objective, list(v.values())), strict=True):
        torch.testing.assert_close(found[key], gradient, rtol=1e-3, atol=1e-4, msg=lambda said, n=key: f"{n}: {said}")


# ---- FedWeIT: the knowledge base


def kb_of(finished):
    """By (client, step): which foreign A's a client was told to use, in the one message that tells it."""
    found = {}
    for request in finished.requests:
        if "foreign" in request.numbers:
            key = int(request.receiver.removeprefix("client-")), request.step
            assert key not in found  # once a task: Alg. 1 line 6
            found[key] = request.numbers["foreign"]
    return found


def origin(key):
    client, step = key.split(".")
    return int(client), int(step)


@pytest.mark.parametrize("kb_size", [0, 1, 3, 5, "all"])
@pytest.mark.parametrize("kb_from", ["all", "last"])
@pytest.mark.parametrize("kb_own", [True, False])
def test_what_a_client_is_given(kb_size, kb_from, kb_own):
    """Drawn by the method alone: nine A's of three clients and three tasks, and some of the present and the future."""
    method = methods.load("fedweit", {"kb_size": kb_size, "kb_from": kb_from, "kb_own": kb_own})
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
    lesson, state = running.world.lesson(0, 1), running.clients[0]
    tensors, numbers = running.method.brief(running.server, 0, 1, True, running.plan)
    running.method.begin(state, lesson)
    running.method.receive(state, Message("server", "client-0", "x", (), 1, 0, tensors, numbers), lesson)
    assert state.tensor("attention").tolist() == [0.5] * 4  # two foreign A's, two layers


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
    weighed = finished.ledger.by("direction", "part", "client", "step")
    assert {key[2:] for key in weighed if key[:2] == ("c2s", "adaptive")} == set(given)  # also when it is sent alone
    for client, step in given:
        (reply,) = (
            r for r in finished.replies if r.sender == f"client-{client}" and r.step == step and "adaptive" in r.tensors
        )
        assert same(reply.tensors["adaptive"], finished.server.archive[f"{client}.{step}"])
        assert same(reply.tensors["adaptive"], finished.clients[client].archive[f"adaptive/{step}"])


@pytest.mark.parametrize("unchosen", [True, False])
def test_kb_givers_chosen_are_those_of_the_last_round(unchosen):
    finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, kb_givers="chosen")
    last = {(client, step) for client, step, r, name in finished.parts("c2s") if r == 1 and name == "base"}
    assert len(last) == 3
    assert set(map(origin, finished.server.archive)) == last


@pytest.mark.parametrize("unchosen", [True, False])
def test_an_a_that_nobody_takes_is_not_charged(unchosen):
    """With kb_givers=chosen the others do not give; what they do not give must not be on the wire, or in the ledger."""
    finished = weit(tasks=3, clients_per_round=1, train_unchosen=unchosen, kb_givers="chosen")
    given = {(client, step) for client, step, _, name in finished.parts("c2s") if name == "adaptive"}
    assert given == set(map(origin, finished.server.archive))


@pytest.mark.parametrize("name", marked(TALKING))
def test_train_unchosen(name):
    """All train in every round, and only the chosen talk."""
    finished = run(method=name, clients_per_round=1, train_unchosen=True, measured_model="own")
    assert len([1 for *_, numbers in finished.reports if numbers.get("images")]) == 3 * 2 * 2
    up = [(step, r) for _, step, r, part in finished.parts("c2s") if part == "base"]
    down = [(step, r) for _, step, r, part in finished.parts("s2c") if part == "global"]
    assert sorted(up) == sorted(down) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    alone = [r for r in finished.requests if not r.tensors]
    assert len(alone) == 8
    assert not any({"receive", "send"} & set(request.ops) for request in alone)
    waiting = run(method=name, clients_per_round=1, train_unchosen=False, measured_model="own")
    assert len([1 for *_, numbers in waiting.reports if numbers.get("images")]) == 2 * 2


# ---- FedWeIT: past tasks


def moved(past, **changed):
    """How far the weights that answer for task 0 have moved while task 1 was learned, mean over the clients."""
    running = Run(tiny(method="fedweit", method__past=past, **changed)).go_to(1)
    before = [running.theta(client, 0) for client in range(3)]
    old = [adaptives(running, client)["adaptive/0"] for client in range(3)]
    running.go()
    far = [(running.theta(client, 0) - before[client]).norm().item() for client in range(3)]
    new = [adaptives(running, client)["adaptive/0"] for client in range(3)]
    return sum(far) / 3, all(map(torch.equal, old, new)), far


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
    closed, _, _ = moved("closed", method__without="l1")
    assert closed < 1e-4


def test_joint_past_a_is_learned_against_the_change_of_b(held):
    running = Run(tiny(method="fedweit", method__past="joint", method__lambda_sparsity=0.03)).go_to(1)
    old = adaptives(running)["adaptive/0"]
    running.go()
    state = running.clients[0]
    mask = spread(running.layout, dense(state.archive["mask/0"]))
    change = (held[0]["base"] - held[0]["reference"]) * mask  # dB * m
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
    running = Run(
        tiny(method=name, **({"method__keep": 0.5} if "keep" in class_of(name).options_class.model_fields else {}))
    )
    running.go_to(1)
    for state in running.clients.values():
        places = [
            value.data_ptr() for value in state.tensors.values() if isinstance(value, torch.Tensor) and len(value)
        ]
        assert len(set(places)) == len(places)


def test_between_tasks_a_client_keeps_no_whole_vector_but_b():
    state = weit().clients[0]
    assert [key for key, value in state.tensors.items() if size(value) == weit().layout.weights] == ["base"]


def test_drift_is_counted_from_b_before_or_after_theta_g(held):
    """Row 21 of fidelity.md: `own` is B at the end of task t-1, `received` is B once theta_G is in."""
    for drift_from in ("own", "received"):
        running = Run(tiny(method="fedweit", method__drift_from=drift_from)).go_to(1)
        end = running.clients[0].tensor("base").clone()
        running.go()
        reference = held[0]["reference"]
        assert torch.equal(reference, end) == (drift_from == "own")
        if drift_from == "received":
            theta_g = running.parts("s2c")[0, 1, 0, "global"].dense()
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
        "paper_bytes": 4 * (int(state.tensor("base").count_nonzero()) + sum(nonzeros)),
    }
    assert finished.progress.densities["0"] == pytest.approx([count / layout.weights for count in nonzeros])
    assert all(map(math.isfinite, finished.progress.densities["0"]))
    assert json.loads(json.dumps(finished.progress.sizes)) == finished.progress.sizes
