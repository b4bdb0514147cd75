"""Fault injection, and what a reply must be before it is used: no garbage reaches theta_G or the knowledge base."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import cli_helpers
import pytest
import torch
from helpers import Run, differences, run, state_bits, tiny, vector

import weft
from weft import WeftError, registry
from weft.core.checks import RejectedReply, ReplyChecks
from weft.core.engine import Reply
from weft.core.progress import Pending
from weft.core.schedule import Assignment
from weft.engines.simulated import SimulatedEngine, corrupted, fault_of
from weft.plan import FaultOptions, Plan
from weft.wire.message import Message, MessageError, decode, encode
from weft.wire.tensors import Rows, Sparse

pytest_plugins = ["cli_helpers"]

RATES = {"crash": 0.1, "drop": 0.2, "corrupt": 0.05, "delay": 0.15}
FAULTY = {"tasks": 2, "rounds_per_task": 4, "clients": 4}

# ---- fault injection -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_faults_occur_at_their_rates_and_always_the_same():
    def drawn(options: FaultOptions, seed: int = 0, count: int = 20_000) -> list[str]:
        return [fault_of(options, seed, f"0.{number}.1") for number in range(count)]

    found = drawn(FaultOptions(**RATES))
    assert found == drawn(FaultOptions(**RATES))
    for kind, rate in RATES.items():
        assert found.count(kind) / len(found) == pytest.approx(rate, abs=0.01)
    assert found != drawn(FaultOptions(**RATES), seed=1)
    assert set(drawn(FaultOptions(), count=1000)) == {"none"}


def test_rates_are_less_than_one_together():
    with pytest.raises(WeftError, match="together"):
        Plan(**{"faults.drop": 0.6, "faults.crash": 0.5})
    with pytest.raises(WeftError, match=r"faults.drop: .*less than 1"):
        Plan(**{"faults.drop": 1.0})


def theirs(finished: Run) -> dict[str, Any]:
    """All that the server and the clients remember, and the accuracies."""
    states = {"server": finished.server, **finished.clients}
    return {str(owner): state_bits(state) for owner, state in states.items()} | {"accuracy": finished.matrices}


@pytest.mark.slow
def test_a_damaged_reply_has_the_effect_of_a_lost_one():
    """The same replies, once damaged and once lost: bit for bit the same theta_G, kb, clients and accuracies."""
    damaged, lost = run(**FAULTY, faults__corrupt=0.3), run(**FAULTY, faults__drop=0.3)
    assert sum("rejected" in reason for *_, reason in damaged.incidents) > 5
    assert [incident[:3] for incident in damaged.incidents] == [incident[:3] for incident in lost.incidents]
    assert differences(theirs(damaged), theirs(lost)) == []
    assert differences(theirs(damaged), theirs(run(**FAULTY))) != []


@pytest.mark.slow
def test_incidents_have_a_client_a_time_and_a_reason(tmp_path):
    words = {f"faults.{kind}": rate for kind, rate in RATES.items()}
    result = weft.run(cli_helpers.tiny(**words, rounds_per_task=6, deadline=2.0), tmp_path / "run")
    journal = [json.loads(line) for line in (result.folder / "journal.jsonl").read_text().splitlines()]
    incidents = [line for line in journal if line["event"] == "incident"]
    assert all({"client", "task", "round", "reason", "time"} <= line.keys() for line in incidents)
    reasons = " ".join(line["reason"] for line in incidents)
    assert "the client failed" in reasons
    assert "no reply in time" in reasons
    tests = [line for line in journal if line["event"] == "tested"]
    assert {(line["client"], line["task"]) for line in tests} == set(itertools.product(range(3), range(2)))
    for one, other in itertools.pairwise(tests):
        assert one["images"] <= other["images"]
        assert one["time"] <= other["time"]
    assert [len(line["accuracy"]) for line in tests] == [line["task"] + 1 for line in tests]


def test_corrupted_replies_are_never_what_they_were():
    wire = run().wires[1]
    kinds = set()
    for number in range(40):
        bad = corrupted(wire, 0, f"0.{number}.0")
        assert bad != wire
        try:
            kinds.add(f"values {sorted(decode(bad).tensors)}")
        except MessageError as reason:
            kinds.add(str(reason)[:30])
    assert len(kinds) >= 3


# ---- clients that were away, or leave --------------------------------------------------------------------------------


def test_a_client_catches_up_on_tasks_that_it_missed():
    """A client that starts with the third task can be tested on all three."""
    running = Run(tiny(tasks=3, clients=1))
    assert len(running.ask("begin train end test", 2).fields["accuracy"]) == 3
    assert [task.adaptive.size for task in running.clients[0].tasks.values()] == [running.layout.weights] * 3


class Leaving(Run):
    """The second client leaves after it has uploaded its A and before the round is over."""

    def replied(self, assignment, seconds, fields):
        super().replied(assignment, seconds, fields)
        if assignment.client == 1 and "share" in assignment.ops:
            found = self.engine.clients()
            self.engine.clients = lambda: dataclasses.replace(found, left=frozenset({1}))


def test_knowledge_of_a_client_that_leaves_meanwhile_is_not_stored():
    stayed, left = run(tasks=1).server, Leaving(tiny(tasks=1)).go().server
    assert {key[0] for key in stayed.knowledge} - {key[0] for key in left.knowledge} == {"1"}
    assert 1 in stayed.has_foreign
    assert 1 not in left.has_foreign


def test_a_repeated_start_or_end_of_a_task_changes_nothing():
    one, other = Run(tiny(clients=1)), Run(tiny(clients=1))
    for number, ops in enumerate(["begin train", "train end"]):
        one.ask(ops, 0, number)
    for number, ops in enumerate(["begin train", "begin train end", "end test"]):
        other.ask(ops, 0, number)
    first, second = one.clients[0], other.clients[0]
    assert first.started == first.finished == 0
    second.request_id, second.reply = first.request_id, first.reply
    assert differences(state_bits(first), state_bits(second)) == []


# ---- what a reply must be --------------------------------------------------------------------------------------------


def exchanged(finished: Run, index: int = 0) -> tuple[ReplyChecks, Message, Pending]:
    """The reply to one request of a run, and that request as the server remembers it."""
    request, reply = finished.requests[index], finished.answers[index]
    client = int(request.receiver.removeprefix("client-"))
    assignment = Assignment(client, request.task, request.round, request.ops, True)
    return finished.checks, reply, Pending(assignment, 0, 0, 0.0, request.fields)


@pytest.fixture(scope="module")
def right() -> tuple[ReplyChecks, Message, Pending]:
    """A FedWeIT reply to the last round of a task, as it should be."""
    finished = run()
    return exchanged(finished, next(n for n, request in enumerate(finished.requests) if "share" in request.ops))


def fault(checks: ReplyChecks, reply: Message, pending: Pending) -> str:
    """Why the reply is rejected; empty if it is not."""
    request = pending.assignment
    try:
        checks.open(encode(reply), request.client, {request.request_id: pending})
    except RejectedReply as rejected:
        return str(rejected) if rejected.pending is pending else f"of another request: {rejected}"
    return ""


def test_a_correct_reply_is_accepted(right):
    checks, reply, pending = right
    assert set(reply.tensors) == {"weights", "adaptive"}
    assert fault(checks, reply, pending) == ""
    without = header(tensors={"weights": reply.tensors["weights"]})(reply)  # it shares nothing of its A
    assert fault(checks, without, pending) == ""


def tensor(name: str, change: Callable[[Any], Any]) -> Callable[[Message], Message]:
    return lambda reply: dataclasses.replace(reply, tensors={**reply.tensors, name: change(reply.tensors[name])})


def field(name: str, value: Any) -> Callable[[Message], Message]:
    return lambda reply: dataclasses.replace(reply, fields={**reply.fields, name: value})


def header(**values: Any) -> Callable[[Message], Message]:
    return lambda reply: dataclasses.replace(reply, **values)


def rows(kept: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    """Other rows of B than those that were sent."""
    return tensor("weights", lambda b: Rows.of(b.dense(), b.segments, kept(b.kept)))


WRONG = {
    "another sender": (header(sender="client-9"), "'client-9' to 'server'"),
    "another receiver": (header(receiver="client-2"), "to 'client-2'"),
    "another task": (header(task=7), "task 7"),
    "another round": (header(round=7), "round 7"),
    "requests": (header(ops=("train",)), "not requested"),
    "dense": (tensor("weights", lambda b: b.dense()), "is dense and not rows"),
    "longer": (tensor("adaptive", lambda a: Sparse(a.size + 1, a.indices, a.values)), "in another order or number"),
    "other segments": (
        tensor("weights", lambda b: Rows(((b.size, 1),), torch.ones(b.size, dtype=torch.bool), b.dense())),
        "in another order or number",
    ),
    "a huge value": (
        tensor("weights", lambda b: Rows(b.segments, b.kept, b.values.index_fill(0, torch.tensor([3]), 1e20))),
        "max_update_norm",
    ),
    "all rows": (rows(torch.ones_like), "other rows"),
    "no row": (rows(torch.zeros_like), "other rows"),
    "an undeclared tensor": (header(tensors={"theta": vector(1)}), "'theta' .*upload_spec"),
    "no examples": (field("examples", 0), "examples"),
    "too many examples": (field("examples", 10**15), "examples"),
    "examples as text": (field("examples", "many"), "examples"),
    "an accuracy above 1": (field("accuracy", [1.5]), "accuracy"),
    "too many tasks": (field("accuracy", [1.0] * 99), "accuracy"),
    "negative bytes": (field("size", {"bytes": -1, "paper_bytes": 1}), "size"),
    "negative work": (field("images", -5), "images"),
    "markup": (field("valid_accuracy", "<b>x"), "valid_accuracy cannot be"),
    "no accuracy": (field("valid_accuracy", None), "valid_accuracy cannot be"),
    "a validation accuracy above 1": (field("valid_accuracy", 1.01), "valid_accuracy cannot be"),
    "a loss as text": (field("valid_loss", "high"), "valid_loss cannot be"),
    "a list of losses": (field("train_loss", [0.5]), "train_loss cannot be"),
    "a Boolean loss": (field("train_loss", True), "train_loss cannot be"),
    "a negative rate": (field("rate", -0.1), "rate cannot be"),
    "density as text": (field("density", ["thin"]), "density cannot be"),
    "metrics that the plan does not have": (field("metrics", [{"recall": [1.0]}]), "metrics was not requested"),
    "large unknown fields": (field("remarks", ["x" * 40] * 100), "unknown fields take 4,4"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reply_is_rejected(right, name):
    checks, reply, pending = right
    change, reason = WRONG[name]
    found = fault(checks, change(reply), pending)
    assert re.match(rf"(it|its|tensor) .*{reason}", found)
    assert "\n" not in found


def test_with_the_strongest_rows_a_client_sends_no_more_than_its_share():
    checks, reply, pending = exchanged(run(method__rows="strongest", tasks=1))
    assert fault(checks, reply, pending) == ""
    assert "rows of fc1.weight, at most" in fault(checks, rows(torch.ones_like)(reply), pending)
    other = rows(lambda kept: kept.roll(1))(reply)
    assert reply.tensors["weights"].kept.tolist() != other.tensors["weights"].kept.tolist()
    assert fault(checks, other, pending) == ""


def test_without_masks_all_rows_are_sent():
    checks, reply, pending = exchanged(run(method__ablate="m", tasks=1))
    assert fault(checks, reply, pending) == ""
    fewer = rows(lambda kept: kept & (torch.arange(len(kept)) > 0))(reply)
    assert "other rows" in fault(checks, fewer, pending)


def test_a_replay_is_rejected(right):
    checks, reply, pending = right
    request = pending.assignment
    others = dataclasses.replace(pending, assignment=dataclasses.replace(request, client=request.client + 1))
    for requests in ({}, {"9.9.9": pending}, {request.request_id: others}):
        with pytest.raises(RejectedReply, match="not requested or is answered already") as caught:
            checks.open(encode(reply), request.client, requests)
        assert caught.value.unrelated


@pytest.mark.parametrize(
    ("ops", "name"),
    [
        ("train upload end test", "adaptive"),
        ("train end test", "weights"),
        ("end test", "examples"),
        ("train test", "task_valid_accuracy"),
        ("train end", "accuracy"),
    ],
)
def test_what_was_not_requested_is_rejected(right, ops, name):
    checks, reply, pending = right
    tensors = {name: reply.tensors[name]} if name in reply.tensors else {}
    assignment = dataclasses.replace(pending.assignment, ops=tuple(ops.split()))
    pending = dataclasses.replace(pending, assignment=assignment)
    found = fault(checks, header(tensors=tensors)(reply), pending)
    assert re.search(rf"\b{name}\b.* was not requested", found)


def test_a_client_close_to_divergence_is_accepted(right):
    """Its losses are huge and finite; others cannot be sent, and the client replies that it failed."""
    checks, reply, pending = right
    assert fault(checks, field("valid_loss", 1e300)(reply), pending) == ""
    assert fault(checks, field("train_loss", -3)(reply), pending) == ""  # a user-defined loss
    with pytest.raises(WeftError, match="finite"):
        encode(field("train_loss", float("nan"))(reply))


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (None, "metrics is missing"),
        ([], "metrics is of 0 tasks"),
        ([{}], "metrics are not balanced, recall"),
        ([{"balanced": [1.0]}], "metrics are not balanced, recall"),
        ([{"balanced": [1.0], "recall": [1.0, None], "auroc": [1.0]}], "metrics are not balanced, recall"),
        ([{"balanced": [1.0], "recall": []}], "metrics cannot be"),
        ([{"balanced": [1.0], "recall": ["x", 1.0]}], "metrics cannot be"),
        ([{"balanced": [1.0, 1.0, 1.0], "recall": [1.0, 1.0]}], "metrics cannot be"),
        ([{"balanced": 1.0, "recall": [1.0]}], "metrics cannot be"),
        ([{"balanced": [1.0], "recall": [1.0] * 100_000}], "metrics cannot be"),
        ([{"balanced": [1.0], "recall": [1.0, None]}], ""),
    ],
)
def test_metrics_are_those_of_the_plan(metrics, reason):
    checks, reply, pending = exchanged(run(tasks=1, rounds_per_task=1, metrics="recall,balanced"))
    assert fault(checks, reply, pending) == ""
    fields = {name: value for name, value in reply.fields.items() if name != "metrics"}
    if metrics is not None:
        fields["metrics"] = metrics
    found = fault(checks, header(fields=fields)(reply), pending)
    assert reason in found
    assert bool(reason) == bool(found)


def test_a_client_that_repeats_itself_is_counted_once(monkeypatch):
    """Client 0 sends everything twice, and its first reply again and again."""
    replies = SimulatedEngine.replies
    honest, loud = run(method="fedavg"), Run(tiny(method="fedavg"))

    def repeated(self, timeout=None, only=None) -> Iterator[Reply]:
        for reply in replies(self, timeout, only):
            yield reply
            if reply.client == 0:
                yield reply
                yield reply._replace(wire=loud.wires[1])

    monkeypatch.setattr(SimulatedEngine, "replies", repeated)
    loud.go()
    assert len(loud.incidents) == 2 * 4
    assert all("answered already" in reason for *_, reason in loud.incidents)
    assert differences(theirs(honest), theirs(loud)) == []


class Undeclared(weft.methods.class_of("fedavg")):  # type: ignore[misc]
    def upload(self, client, ctx):
        return super().upload(client, ctx) | {"extra": vector(1, 2)}


@pytest.fixture
def careless(monkeypatch):
    """What clients do that do not check what they send."""
    return lambda: monkeypatch.setattr("weft.core.client.forms_fault", lambda *_: "")


def test_an_undeclared_upload_does_not_leave_its_client_and_is_an_incident_of_one_that_sends_it(monkeypatch, careless):
    plan = tiny(method=registry.reference(Undeclared), tasks=1)
    with pytest.raises(WeftError, match=r"Undeclared: tensor 'extra' .*upload_spec .*biases, weights"):
        Run(plan).go()
    careless()
    with pytest.raises(WeftError, match=r"Undeclared: tensor 'extra' .*upload_spec .*biases, weights"):
        Run(plan).go()
    monkeypatch.setattr(SimulatedEngine, "remote", True)
    remote = Run(plan).go()
    assert sum("rejected: tensor 'extra'" in reason for *_, reason in remote.incidents) == 6
    assert torch.equal(remote.server.weights, remote.ctx.initial[: remote.layout.weights])


class TooShort(weft.methods.class_of("fedavg")):  # type: ignore[misc]
    def upload(self, client, ctx):
        return {name: tensor[1:] for name, tensor in super().upload(client, ctx).items()}


class Nothing(weft.methods.class_of("fedavg")):  # type: ignore[misc]
    def upload(self, client, ctx):
        return {}


class TooLarge(weft.methods.class_of("fedavg")):  # type: ignore[misc]
    def upload(self, client, ctx):
        return {name: 1e9 * (1 + tensor) for name, tensor in super().upload(client, ctx).items()}


@pytest.mark.parametrize(
    ("kind", "reason"), [(TooShort, "values"), (Nothing, "missing"), (TooLarge, "max_update_norm")]
)
@pytest.mark.parametrize("asynchronous", ["none", "updates"])
def test_a_round_that_merges_nothing_ends_a_local_run_and_is_a_warning_elsewhere(
    kind, reason, asynchronous, monkeypatch, careless
):
    kind.traits = dataclasses.replace(kind.traits, asynchronous=True)
    plan = tiny(method=registry.reference(kind), tasks=1, **{"async": asynchronous})
    with pytest.raises(WeftError, match=reason):
        Run(plan).go()
    careless()
    monkeypatch.setattr(SimulatedEngine, "remote", True)
    remote = Run(plan).go()
    assert len(remote.incidents) == 6
    assert remote.progress.rounds_without_update == len(remote.warnings) > 0
    assert all(reason in text for text in remote.warnings)


def test_a_client_that_has_stopped_uploads_nothing_and_that_is_no_fault():
    stopped = run(method="fedavg", learning_rate=1e-7, rounds_per_task=3, patience=1, rate_floor=1e-7, rate_decay=3.0)
    assert not stopped.warnings


def test_a_run_in_which_nothing_is_trained_fails_and_one_with_incidents_ends_with_their_number(tmp_path, command):
    crashing = cli_helpers.tiny(**{"faults.crash": 0.999})
    with pytest.raises(WeftError, match=rf"nothing was trained.*weft show {tmp_path / 'run'}"):
        weft.run(crashing, tmp_path / "run")
    (tmp_path / "plan.toml").write_text(cli_helpers.tiny(**{"faults.crash": 0.8}).toml())
    outcome = command("run", tmp_path / "plan.toml", "--out", tmp_path / "other", "--workers", 1)
    summary = json.loads((tmp_path / "other" / "summary.json").read_text())
    assert outcome.code == 0
    assert summary["incidents"] > 0
    assert summary["rounds_without_update"] > 0
    assert f"incidents: {summary['incidents']}, rounds without update: " in outcome.err
    assert "warning: " in outcome.err


# ---- many clients, many faults ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_24_clients_with_dropout_and_corrupted_replies_lose_little():
    words = {
        "clients": 24,
        "tasks": 2,
        "rounds_per_task": 20,  # the default; of 8, each that is missed counts: docs/asynchronous.md
        "scenario__train": 40,
        "scenario__test": 40,
        "network__hidden": 16,
        "clock__spread": 3.0,
        "clock__jitter": 0.2,
    }
    fine, faulty = run(**words), run(**words, faults__drop=0.3, faults__corrupt=0.05, deadline=6.0)
    assert len(faulty.incidents) > 100
    assert len(faulty.matrices) == 24
    without, with_faults = (fmean(fmean(matrix[-1]) for matrix in one.matrices.values()) for one in (fine, faulty))
    assert without > 0.7
    assert with_faults > without - 0.02
