"""Faults on purpose, and what an answer must be before it is used: nobody's garbage reaches theta_G or the kb."""

from __future__ import annotations

import dataclasses
import itertools
import json
from statistics import fmean
from typing import Any

import cli_helpers
import pytest
import torch
from helpers import Run, differences, run, state_bits, tiny, vector

import weft
from weft import WeftError
from weft import registry as named
from weft.core.checks import RejectedReply, ReplyChecks, forms_of
from weft.core.schedule import Assignment
from weft.engines.faults import corrupted, fate
from weft.plan import FaultOptions as Options
from weft.plan import Plan
from weft.wire.message import Message, MessageError, decode, encode
from weft.wire.tensors import Rows, Sparse

RATES = {"crash": 0.1, "drop": 0.2, "corrupt": 0.05, "delay": 0.15}

# ---- fates -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fates_come_at_their_rates_and_always_the_same():
    options = Options(**RATES)
    fates = [fate(options, 0, f"0.{number}.1") for number in range(20_000)]
    assert fates == [fate(options, 0, f"0.{number}.1") for number in range(20_000)]
    for kind, rate in RATES.items():
        assert fates.count(kind) / len(fates) == pytest.approx(rate, abs=0.01)
    assert fates != [fate(options, 1, f"0.{number}.1") for number in range(20_000)]
    assert {fate(Options(), 0, f"0.{number}.1") for number in range(1000)} == {"fine"}


def test_rates_are_less_than_one_together():
    with pytest.raises(WeftError, match="together"):
        Plan(**{"faults.drop": 0.6, "faults.crash": 0.5})
    with pytest.raises(WeftError, match=r"faults.drop: .*less than 1"):
        Plan(**{"faults.drop": 1.0})


FAULTY = {"tasks": 2, "rounds_per_task": 4, "clients": 4}


def theirs(finished: Run) -> dict[str, Any]:
    """What the server and the clients are left with, but for the replies' bytes."""
    found = {"server": state_bits(finished.server)} | {str(c): state_bits(s) for c, s in finished.clients.items()}
    return found | {"accuracy": finished.matrices}


@pytest.mark.slow
def test_garbage_is_as_good_as_silence():
    """The same answers, once damaged and once lost: bit for bit the same theta_G, kb, clients and accuracies."""
    damaged, lost = run(**FAULTY, faults__corrupt=0.3), run(**FAULTY, faults__drop=0.3)
    assert sum("refused" in reason for *_, reason in damaged.incidents) > 5
    assert [incident[:3] for incident in damaged.incidents] == [incident[:3] for incident in lost.incidents]
    assert differences(theirs(damaged), theirs(lost)) == []
    assert differences(theirs(damaged), theirs(run(**FAULTY))) != []


@pytest.mark.slow
def test_incidents_say_who_when_and_why(tmp_path):
    words = {f"faults.{kind}": rate for kind, rate in RATES.items()}
    result = weft.run(cli_helpers.tiny(**words, rounds_per_task=6, deadline=2.0), tmp_path / "run")
    journal = [json.loads(line) for line in (result.folder / "journal.jsonl").read_text().splitlines()]
    incidents = [line for line in journal if line["event"] == "incident"]
    assert incidents
    assert all({"client", "task", "round", "reason", "time"} <= line.keys() for line in incidents)
    said = " ".join(line["reason"] for line in incidents)
    assert "it failed" in said
    assert "no answer in time" in said
    tests = [line for line in journal if line["event"] == "tested"]
    assert {(line["client"], line["task"]) for line in tests} == {(c, s) for c in range(3) for s in range(2)}
    for one, other in itertools.pairwise(tests):
        assert one["images"] <= other["images"]
        assert one["time"] <= other["time"]
    assert [len(line["accuracy"]) for line in tests] == [line["task"] + 1 for line in tests]


def test_a_task_that_was_never_reached_is_made_up_for():
    """A client that is told to begin its third task without having met the others can still answer for all."""
    running = Run(tiny(tasks=3, clients=1))
    words = ("server", "client-0", "x", ("begin", "train", "finish", "test"), 2, 0)
    ((_, wire, _),) = running.exchange([(0, encode(Message(*words)), "x", True)])
    assert len(decode(wire).fields["accuracy"]) == 3
    state = running.clients[0]
    assert {key for key in state.archive if key.startswith("adaptive/")} == {f"adaptive/{step}" for step in range(3)}


class Leaving(Run):
    """The second client says that it leaves, after it has given its A and before the round is over."""

    def answered(self, client, step, round_index, seconds, fields):
        super().answered(client, step, round_index, seconds, fields)
        if client == 1 and "size" in fields:  # the answer that finishes a task
            self.federation.dismiss(client)


def test_an_a_that_is_under_way_while_its_client_leaves_is_not_kept():
    gone = Leaving(tiny(tasks=1)).go()
    senders = [{key.split(".")[0] for key in one.server.archive} for one in (run(tasks=1), gone)]
    assert senders[0] - senders[1] == {"1"}
    assert "1" not in gone.server.fields["held"]


def test_begin_and_finish_twice_are_done_once():
    one, other = Run(tiny(clients=1)), Run(tiny(clients=1))
    for running, rounds in ((one, ["begin train", "train finish"]), (other, ["begin train", "begin train finish"])):
        for number, ops in enumerate([*rounds, *(["finish test"] if running is other else [])]):
            words = ("server", "client-0", f"0.{number}.0", tuple(ops.split()), 0, number)
            list(running.exchange([(0, encode(Message(*words)), "", True)]))
    found = [differences(state_bits(one.clients[0]), state_bits(other.clients[0]))]
    assert found == [["fields", "reply"]]  # which request was answered last, and how
    assert one.clients[0].fields["learned"] == other.clients[0].fields["learned"] == [0]


# ---- what an answer must be ------------------------------------------------------------------------------------------


def asked(*ops: str, client: int = 1, step: int = 0, round_index: int = 0) -> Assignment:
    return Assignment(client, step, round_index, ops, True)


@pytest.fixture(scope="module")
def right() -> tuple[ReplyChecks, Message, Assignment]:
    """A FedWeIT answer to the last round of a task, as it should be."""
    finished = run()
    place = next(n for n, request in enumerate(finished.requests) if "give" in request.ops)
    request, reply = finished.requests[place], finished.answers[place]
    client = int(request.receiver.removeprefix("client-"))
    visit = asked(*request.ops, client=client, task=request.task, round_index=request.round)
    return finished.inspector, reply, visit._replace(told=request.fields)


def test_what_is_right_passes(right):
    inspector, reply, visit = right
    assert set(reply.tensors) == {"weights", "adaptive"}
    assert inspector.open(encode(reply), visit.client, {visit.request_id: visit})[1] == visit
    without = dataclasses.replace(reply, tensors={"weights": reply.tensors["weights"]})  # it shares nothing of its A
    assert inspector.fault(without, visit) == ""


def changed(part: str, how: Any) -> Any:
    def change(reply: Message) -> Message:
        if part in ("weights", "adaptive"):
            return dataclasses.replace(reply, tensors={**reply.tensors, part: how(reply.tensors[part])})
        if part.startswith("number/"):
            return dataclasses.replace(reply, fields={**reply.fields, part.removeprefix("number/"): how})
        return dataclasses.replace(reply, **{part: how})

    return change


WRONG = {
    "another sender": (changed("sender", "client-9"), "goes from"),
    "another receiver": (changed("receiver", "client-2"), "goes from"),
    "another task": (changed("task", 7), "task 7"),
    "another round": (changed("round", 7), "round 7"),
    "requests": (changed("ops", ("train",)), "not what was asked"),
    "dense": (changed("weights", lambda base: base.dense()), "is dense and not rows"),
    "longer": (changed("adaptive", lambda a: Sparse(a.size + 1, a.indices, a.values)), "in another order or number"),
    "other rows": (
        changed("weights", lambda b: Rows(((b.size, 1),), torch.ones(b.size, dtype=torch.bool), b.dense())),
        "in another order or number",
    ),
    "a huge value": (
        changed("weights", lambda b: Rows(b.segments, b.kept, b.values.index_fill(0, torch.tensor([3]), 1e20))),
        "max_update_norm",
    ),
    "a strange tensor": (changed("tensors", {"theta": vector(1)}), "was not asked for"),
    "no examples": (changed("number/examples", 0), "examples"),
    "a crowd": (changed("number/examples", 10**15), "examples"),
    "a text": (changed("number/examples", "many"), "examples"),
    "better than all": (changed("number/accuracy", [1.5]), "accuracy"),
    "too many tasks": (changed("number/accuracy", [1.0] * 99), "accuracy"),
    "negative bytes": (changed("number/size", {"bytes": -1, "paper_bytes": 1}), "size"),
    "negative work": (changed("number/images", -5), "images"),
    "markup": (changed("number/valid_accuracy", "<b>x"), "valid_accuracy cannot be"),
    "no accuracy": (changed("number/valid_accuracy", None), "valid_accuracy cannot be"),
    "more than all are right": (changed("number/valid_accuracy", 1.01), "valid_accuracy cannot be"),
    "a loss in words": (changed("number/valid_loss", "high"), "valid_loss cannot be"),
    "losses": (changed("number/train_loss", [0.5]), "train_loss cannot be"),
    "a true loss": (changed("number/train_loss", True), "train_loss cannot be"),
    "a negative rate": (changed("number/rate", -0.1), "rate cannot be"),
    "density in words": (changed("number/density", ["thin"]), "density cannot be"),
    "metrics that nobody wants": (changed("number/metrics", [{"recall": [1.0]}]), "metrics was not asked for"),
    "a book": (changed("number/remarks", ["x" * 40] * 100), "other names than weft's take 4,4"),
    "all rows": (changed("weights", lambda b: Rows.of(b.dense(), b.segments, torch.ones_like(b.kept))), "in turn"),
    "no row": (changed("weights", lambda b: Rows.of(b.dense(), b.segments, torch.zeros_like(b.kept))), "in turn"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused(right, name):
    inspector, reply, visit = right
    change, said = WRONG[name]
    with pytest.raises(RejectedReply, match=said) as caught:
        inspector.open(encode(change(reply)), visit.client, {visit.request_id: visit})
    assert "\n" not in str(caught.value)


def test_with_rows_of_its_own_choice_a_client_chooses_no_more_than_its_share():
    finished = run(method__rows="strongest", tasks=1)
    request, reply = finished.requests[0], finished.answers[0]
    visit = asked(*request.ops, client=0)._replace(told=request.fields)
    assert finished.inspector.fault(reply, visit) == ""
    base = reply.tensors["weights"]
    more = changed("weights", lambda b: Rows.of(b.dense(), b.segments, torch.ones_like(b.kept)))(reply)
    assert "more rows of fc1.weight than the share of 0.3" in finished.inspector.fault(more, visit)
    other = changed("weights", lambda b: Rows.of(b.dense(), b.segments, b.kept.roll(1)))(reply)
    assert base.kept.tolist() != other.tensors["weights"].kept.tolist()
    assert finished.inspector.fault(other, visit) == ""


def test_without_masks_all_rows_are_sent():
    finished = run(method__ablate="m", tasks=1)
    request, reply = finished.requests[0], finished.answers[0]
    visit = asked(*request.ops, client=0)._replace(told=request.fields)
    assert finished.inspector.fault(reply, visit) == ""
    fewer = changed("weights", lambda b: Rows.of(b.dense(), b.segments, b.kept & (torch.arange(len(b.kept)) > 0)))(
        reply
    )
    assert "not all rows" in finished.inspector.fault(fewer, visit)


def test_a_replay_is_refused(right):
    inspector, reply, visit = right
    for out in ({}, {"9.9.9": visit}, {visit.request_id: visit._replace(client=visit.client + 1)}):
        with pytest.raises(RejectedReply, match="not asked or is answered already") as caught:
            inspector.open(encode(reply), visit.client, out)
        assert caught.value.foreign


def test_nothing_is_taken_that_was_not_asked_for(right):
    inspector, reply, visit = right
    assert inspector.fault(reply, visit._replace(ops=("train", "send", "finish", "test"))) == (
        "tensor 'adaptive' was not asked for"
    )
    assert "nobody asked" in inspector.fault(reply, visit._replace(ops=("train", "finish", "test")))


def test_numbers_belong_to_what_was_asked(right):
    inspector, reply, visit = right
    bare = dataclasses.replace(reply, tensors={})
    assert "examples was not asked for" in inspector.fault(bare, visit._replace(ops=("finish", "test")))
    assert "task_valid_accuracy was not asked for" in inspector.fault(bare, visit._replace(ops=("train", "test")))
    assert "accuracy was not asked for" in inspector.fault(bare, visit._replace(ops=("train", "finish")))


def test_a_client_near_divergence_is_heard(right):
    """Its losses are huge and finite; those that are not finite cannot be sent, and the client says that it failed."""
    inspector, reply, visit = right
    assert inspector.fault(changed("number/valid_loss", 1e300)(reply), visit) == ""
    assert inspector.fault(changed("number/train_loss", -3)(reply), visit) == ""  # somebody's own loss
    with pytest.raises(WeftError, match="only finite fields"):
        encode(changed("number/train_loss", float("nan"))(reply))


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (None, "metrics is missing"),
        ([], "cannot be"),
        ([{}], "metrics are not balanced, recall"),
        ([{"balanced": [1.0]}], "metrics are not balanced, recall"),
        ([{"balanced": [1.0], "recall": [1.0, None], "auroc": [1.0]}], "metrics are not balanced, recall"),
        ([{"balanced": [1.0], "recall": []}], "cannot be"),
        ([{"balanced": [1.0], "recall": ["x", 1.0]}], "cannot be"),
        ([{"balanced": [1.0, 1.0, 1.0], "recall": [1.0, 1.0]}], "cannot be"),
        ([{"balanced": 1.0, "recall": [1.0]}], "cannot be"),
        ([{"balanced": [1.0], "recall": [1.0] * 100_000}], "cannot be"),
        ([{"balanced": [1.0], "recall": [1.0, None]}], ""),
    ],
)
def test_metrics_are_those_of_the_plan(metrics, said):
    finished = run(tasks=1, rounds_per_task=1, metrics="recall,balanced")
    reply, visit = finished.answers[0], asked(*finished.requests[0].ops, client=0)
    assert finished.inspector.fault(reply, visit) == ""
    fields = {name: value for name, value in reply.fields.items() if name != "metrics"}
    if metrics is not None:
        fields["metrics"] = metrics
    found = finished.inspector.fault(dataclasses.replace(reply, fields=fields), visit)
    assert said in found
    assert bool(said) == bool(found)


class Replayer(Run):
    """Client 0 says everything twice, and in its second task repeats what it said in its first."""

    def exchange(self, requests):
        for reply in super().exchange(requests):
            yield reply
            if reply.client == 0:
                yield reply
                yield reply._replace(wire=self.wires[1])


def test_who_repeats_itself_is_heard_once():
    # with a deadline, so that the engine passes on what nobody waits for; it is checked all the same
    honest = run(method="fedavg", quorum=3)
    loud = Replayer(tiny(method="fedavg", quorum=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.engines.simulated.SimulatedEngine._compute", _compute_with_echo)
        loud.go()
    assert loud.incidents
    assert all("answered already" in reason for *_, reason in loud.incidents)
    assert differences(theirs(honest), theirs(loud)) == []


def _compute_with_echo(self):
    """As `SimulatedEngine._compute`, for clients that answer more often than they are asked."""
    waiting = [flight for flight in self._flights if not flight.computed]
    by_client = {flight.client: flight for flight in waiting}
    requests = [(flight.client, flight.wire, flight.request_id, True) for flight in waiting]
    for client, wire, seconds in self._carrier.exchange(requests):
        flight = by_client[client]
        if flight.computed:
            self._flights.append(dataclasses.replace(flight, wire=wire))
        else:
            flight.wire, flight.computed, flight.seconds = wire, True, seconds


class Unsaid(weft.methods.class_of("fedavg")):  # type: ignore[misc]
    def contribute(self, client, lesson):
        return super().contribute(client, lesson) | {"extra": vector(1, 2)}


def test_a_method_that_does_not_say_what_it_sends():
    """Sizes and norms are checked all the same."""
    running = Run(tiny(method=named.reference(Unsaid), tasks=1))
    assert forms_of(running.method, running.layout) is None
    assert not running.go().incidents
    reply, visit = running.replies[0], asked(*running.requests[0].ops, client=0)
    assert running.inspector.fault(reply, visit) == ""
    large = dataclasses.replace(reply, tensors={"extra": torch.zeros(running.layout.body + 1)})
    assert "the network has" in running.inspector.fault(large, visit)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedcurv", "fedweit", "fedprox+ewc", "fedavg+apd"])
@pytest.mark.parametrize("biases", ["shared", "private"])
def test_every_method_says_what_it_sends(method, biases):
    running = Run(tiny(method=method, method__biases=biases, tasks=1, rounds_per_task=1))
    assert forms_of(running.method, running.layout) is not None
    assert not running.go().incidents


def test_corrupted_answers_are_never_what_they_were():
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


# ---- many clients, many faults ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_24_clients_with_dropout_and_corrupted_answers_lose_little():
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

    def accuracy(finished: Run) -> float:
        return fmean(fmean(matrix[-1]) for matrix in finished.matrices.values())

    assert len(faulty.matrices) == 24
    assert accuracy(fine) > 0.7
    assert accuracy(faulty) > accuracy(fine) - 0.02
