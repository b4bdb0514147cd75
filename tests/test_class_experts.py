"""Sharing by class: class experts, FedAvg within class sets, heads=class, and what is announced about classes."""

import pytest
import torch
from helpers import Run, differences, run, tiny
from methods_helpers import started, updates_of

from weft import methods
from weft.methods.averaging import Update, Updates
from weft.methods.class_heads import model_of, set_key, split_model
from weft.methods.context import Download, ServerContext
from weft.methods.federated.class_experts import ALL, Expert, quantized
from weft.networks.flat import Layout
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import dense

ROTATING = {
    "scenario__sharing": "rotating",
    "tasks": 3,
}  # two tasks that all learn, at different times, and one more


def experts(**changed):
    return run(method="class-experts", **ROTATING, **changed)


def same_classes(finished, client, other):
    """The tasks of two clients that have the same classes."""
    sets = [[set(finished.runtime.class_ids(each, task)) for task in range(3)] for each in (client, other)]
    return [(task, its) for task in range(3) for its in range(3) if sets[0][task] == sets[1][its]]


def update(client, task, body, rows, classes):
    model = torch.cat([torch.tensor(body), *(torch.tensor(rows[each]) for each in sorted(classes))])
    return Update(client, task, {}, {f"model.{task}": model}, {}, {}, True, classes)


@pytest.fixture
def server():
    """A server of a network with a body of two values and one feature; every change counts exactly in float32."""
    running = Run(tiny(method="class-experts"))
    running.ctx = ServerContext(running.plan, Layout((), 2, 2, 6, (2, 2), 1), torch.zeros(2))
    running.server.start(running.ctx, running.method.options)
    return running


def mean_for(finished, classes, starting=True):
    found = finished.method.mean_for(finished.server, classes, starting, finished.plan)
    return None if found is None else found.tolist()


# ---- class experts: the server


def test_the_same_set_of_classes_is_answered_by_its_own_mean(server):
    rows = {"a": [1.0, 0.0], "b": [2.0, 0.0]}
    server.method.aggregate(server.server, [update(0, 0, [1.0, 2.0], rows, ("b", "a"))], server.ctx)
    assert mean_for(server, ["a", "b"]) == [1.0, 2.0, 1.0, 0.0, 2.0, 0.0]
    for client, value in ((1, 50.0), (2, 3.0), (3, 5.0)):  # of four uploads the newer two count
        more = {"a": [value, 2.0], "b": [value + 1, 2.0]}
        server.method.aggregate(server.server, [update(client, 0, [value, 2 * value], more, ("a", "b"))], server.ctx)
    assert mean_for(server, ["b", "a"]) == [4.0, 8.0, 4.0, 2.0, 5.0, 2.0]  # rows sorted by class, in any order
    assert mean_for(server, ["c"]) is None


def test_sets_that_overlap_are_weighed_by_the_uploads_that_had_their_classes(server):
    """n_S = 1; n_a = 2, n_b = 1: lambda = 1 / 1.5."""
    server.method.aggregate(
        server.server,
        [
            update(0, 0, [3.0, 0.0], {"a": [3.0, 3.0], "b": [6.0, 0.0]}, ("a", "b")),
            update(1, 0, [9.0, 6.0], {"a": [9.0, 3.0], "c": [0.0, 1.0]}, ("a", "c")),
        ],
        server.ctx,
    )
    share = 1 / 1.5
    common, newest_a = [9.0, 6.0], [9.0, 3.0]  # the newer half: one upload
    wanted = [share * x + (1 - share) * y for x, y in zip([3.0, 0.0], common, strict=True)]
    wanted += [share * x + (1 - share) * y for x, y in zip([3.0, 3.0], newest_a, strict=True)]
    wanted += [6.0, 0.0]  # b came with this set only
    assert mean_for(server, ["a", "b"]) == pytest.approx(wanted)
    assert mean_for(server, ["a", "d"]) == pytest.approx([*common, *newest_a, 0.0, 0.0])  # a row of 0: not known


def test_a_mean_takes_the_newest_uploads_and_others_are_forgotten():
    running = Run(tiny(method="class-experts", method__window=3, method__start_window=2, method__common_window=4))
    running.server.size, running.server.width = 1, 1
    for number in range(6):
        windows = {ALL: 4, "s": 3}
        running.server.add(f"{number}.0", Expert(quantized(torch.tensor([float(number)]), running.plan)), windows)
    assert running.server.mean("s", 3, running.plan).tolist() == [4.0]
    assert running.server.mean("s", 2, running.plan).tolist() == [4.5]
    assert list(running.server.experts) == ["2.0", "3.0", "4.0", "5.0"]
    assert running.server.counts == {ALL: 6, "s": 6}
    running.server.remove_client(5)
    assert running.server.mean("s", 3, running.plan).tolist() == [3.5]  # of those that are left


def test_an_upload_that_arrives_twice_counts_once(server):
    rows = {"a": [1.0, 0.0], "b": [2.0, 0.0]}
    for body in ([1.0, 2.0], [5.0, 5.0]):
        server.method.aggregate(server.server, [update(0, 0, body, rows, ("a", "b"))], server.ctx)
    assert mean_for(server, ["a", "b"])[:2] == [1.0, 2.0]
    assert server.server.counts[ALL] == 1


@pytest.mark.parametrize(("rule", "wanted"), [("mean", 34.0), ("median", 2.0), ("clip", 2.0)])
def test_one_of_three_senders_moves_a_robust_mean_little(rule, wanted):
    running = Run(tiny(method="class-experts", aggregation=rule))
    running.server.size = 1
    for client, value in enumerate([0.0, 0.0, 1.0, 2.0, 99.0]):  # the newer three count
        running.server.add(f"{client}.0", Expert(quantized(torch.tensor([value]), running.plan)), {"s": 3})
    assert running.server.mean("s", 3, running.plan).item() == pytest.approx(wanted, abs=0.5)


# ---- class experts: the client


def test_a_second_learner_starts_from_the_first():
    """The first task of client 0 is a later one of client 1, which starts it with body and head of client 0."""
    finished = experts(epochs_per_round=6)
    (first, second) = next((a, b) for a, b in same_classes(finished, 0, 1) if a < b)
    sent = finished.parts("c2s")
    (model,) = (dense(part) for key, part in sent.items() if key[0] == 0 and key[3] == f"model.{first}")
    others = [model]  # and of client 2, if it had these classes by then
    for task, its in same_classes(finished, 0, 2):
        others += [dense(part) for key, part in sent.items() if task == first and its < second and key[:2] == (2, its)]
    start = dense(finished.parts("s2c")[1, second, 0, f"model.{second}"])
    assert any(torch.equal(start, each) for each in others)  # of at most two, the newer one


@pytest.mark.parametrize("useful", [True, False])
def test_a_start_that_is_no_better_than_chance_is_not_used(useful):
    running = Run(tiny(method="class-experts", scenario__train=60, rounds_per_task=4, epochs_per_round=10)).go_to(1)
    learned = running.method.share_task(running.clients[0], running.runtime.context(0, 0))["model.0"]
    state, ctx = started(running.runtime)
    before = state.weights.clone()
    running.method.receive(state, Download({"model.0": learned if useful else 0 * learned}), ctx)
    assert torch.equal(state.weights, before) != useful


def test_a_finished_task_takes_the_mean_unless_its_own_result_is_clearly_better():
    running = Run(
        tiny(method="class-experts", scenario__train=60, scenario__valid=40, rounds_per_task=4, epochs_per_round=10)
    )
    running.go_to(1)
    client, ctx = running.clients[0], running.runtime.training_context(0, 0)
    own = client.tasks[0] = type(client.tasks[0])(**{**vars(client.tasks[0]), "kept": ""})
    running.method.receive(client, Download({"model.0": 0 * running.method.share_task(client, ctx)["model.0"]}), ctx)
    assert client.tasks[0].kept == "own"
    assert client.tasks[0].change == own.change
    client.tasks[0] = own
    running.method.receive(client, Download({"model.0": running.method.share_task(client, ctx)["model.0"]}), ctx)
    assert client.tasks[0].kept == "shared"


def test_finished_tasks_improve_without_images():
    """What a client answers with for its first task is, after the last one, the mean of all that learned it."""
    finished = experts(epochs_per_round=6)
    task, its = next((a, b) for a, b in same_classes(finished, 0, 1) if b > a)
    assert its > task
    mean = finished.method.mean_for(finished.server, list(finished.runtime.class_ids(0, task)), False, finished.plan)
    body, _ = split_model(mean, finished.runtime.class_ids(0, task), finished.layout)
    kept = finished.clients[0].tasks[task]
    theta = finished.theta(0, task)[: finished.layout.head]
    shared = finished.ctx.initial + body[: finished.layout.body]
    assert torch.allclose(theta[: finished.layout.body], shared, atol=1e-6) == (kept.kept == "shared")


def test_each_client_reports_what_it_kept():
    finished = experts()
    reports = [fields for *_, fields in finished.reports if "accuracy" in fields]
    assert reports
    assert all(set(fields["kept"]) <= {"own", "shared"} for fields in reports)
    assert all(len(fields["kept"]) == len(fields["accuracy"]) for fields in reports)


def test_only_whole_results_travel_and_in_four_bits():
    finished = run(method="class-experts", precision="int4", **ROTATING)
    rounds = {(task, r) for _, task, r, name in finished.parts("c2s")}
    assert rounds == {(task, 1) for task in range(3)}  # with the last round of a task
    model = next(iter(finished.parts("c2s").values()))
    sizes = [entry.bytes for entry in finished.ledger.entries if entry.direction == "c2s" and "model" in entry.tensor]
    assert max(sizes) < 0.57 * dense(model).numel()  # 4 bits a value and 8 for 32 of them: 4.25 bits


# ---- FedAvg within class sets


def test_fedavg_within_class_sets_by_hand():
    running = Run(tiny(method="fedavg-sets"))
    one, two, other = torch.tensor([1.0, 4.0]), torch.tensor([3.0, 0.0]), torch.tensor([9.0, 9.0])
    found = updates_of({"model.x": one}, {"model.x": two}, {"model.y": other}, examples=(1, 3, 1))
    running.method.aggregate(running.server, found, running.ctx)
    assert running.server.models["model.x"].tolist() == [2.5, 1.0]
    assert running.server.models["model.y"].tolist() == [9.0, 9.0]
    later = Updates(updates_of({"model.y": one}).updates, mix=0.5)
    running.method.aggregate(running.server, later, running.ctx)
    assert running.server.models["model.y"].tolist() == [5.0, 6.5]


def test_a_class_set_is_one_model_wherever_it_is_learned():
    finished = run(method="fedavg-sets", **ROTATING)
    for first, second in same_classes(finished, 0, 1):
        ids = finished.runtime.class_ids(0, first)
        models = [
            model_of(
                client.tasks[task].weights,
                client.tasks[task].private,
                finished.runtime.class_ids(number, task),
                finished.layout,
            )
            for number, task, client in ((0, first, finished.clients[0]), (1, second, finished.clients[1]))
        ]
        assert torch.equal(*models)
        assert torch.equal(models[0], finished.server.models[f"model.{set_key(ids)}"])


# ---- heads=class


def test_rows_are_averaged_by_class():
    method = methods.load("fedavg", methods.options_of("fedavg")(heads="class").model_dump())
    running = Run(tiny(method="fedavg", method__heads="class"))
    rows = {"head.a": torch.tensor([1.0, 2.0]), "head.b": torch.tensor([5.0, 5.0])}
    base = {"weights": running.server.weights, "biases": running.server.biases}
    found = updates_of({**base, **rows}, {**base, "head.a": torch.tensor([4.0, 2.0])}, examples=(2, 1))
    running.method.aggregate(running.server, found, running.ctx)
    assert running.server.heads["a"].tolist() == [2.0, 2.0]
    assert running.server.heads["b"].tolist() == [5.0, 5.0]
    assert method.traits.by_class


@pytest.mark.parametrize("name", ["fedavg", "fedweit", "scaffold", "fedprox+apd", "fedcurv"])
def test_class_heads_travel_and_everything_else_is_as_before(name, tmp_path):
    changed = {"method": name, "method__heads": "class", **ROTATING}
    finished = run(**changed)
    assert not finished.incidents
    assert any(key[3].startswith("head.c") for key in finished.parts("c2s"))
    plain = run(method=name, measured_model="global", **ROTATING)
    others = [
        {key: part for key, part in each.parts("c2s").items() if "head." not in key[3]} for each in (finished, plain)
    ]
    assert others[0].keys() == others[1].keys()
    interrupted = Run(tiny(**changed), folder=tmp_path).go_with_interruptions()
    assert differences(finished.bits(), interrupted.bits()) == []


def test_the_second_learner_of_a_class_starts_with_its_row():
    finished = run(method="fedavg", method__heads="class", **ROTATING)
    first, second = next((a, b) for a, b in same_classes(finished, 0, 1) if a < b)
    rows = {key[3] for key in finished.parts("s2c") if key[:3] == (1, second, 0)}
    assert {f"head.{each}" for each in finished.runtime.class_ids(0, first)} <= rows


# ---- announcements


def test_classes_have_the_same_identifier_at_all_clients_of_a_run_and_of_no_other():
    finished = experts()
    pairs = same_classes(finished, 0, 1)
    assert len(pairs) == 2  # of three tasks, one is its own
    other = experts(seed=1)
    mine = {each for client in range(3) for task in range(3) for each in finished.runtime.class_ids(client, task)}
    theirs = {each for client in range(3) for task in range(3) for each in other.runtime.class_ids(client, task)}
    assert not mine & theirs
    assert all(
        len(each) == 16 and each.startswith("c") and not set(each[1:]) - set("0123456789abcdef") for each in mine
    )


@pytest.mark.parametrize("classes", [["bird"], ["c" * 16, "c" * 16], [], ["c0123456789abcdeX"], None])
def test_an_announcement_has_identifiers_and_nothing_else(classes):
    running = Run(tiny(method="class-experts", faults__drop=1e-6))  # where faults are expected, a bad reply is no bug
    answer = running.replies

    def lying():
        for reply in answer():
            message = decode(reply.wire)
            if "classes" in message.fields and message.sender == "client-0":
                fields = {} if classes is None else {"classes": classes}
                reply = reply._replace(wire=encode(Message(**{**vars(message), "fields": fields})))
            yield reply

    running.replies = lying
    running.go()
    assert any(client == 0 and "classes" in reason for client, _, _, reason in running.incidents)
    assert not running.progress.clients[0].classes
    assert running.progress.clients[1].classes
