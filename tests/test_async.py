"""Asynchronous training: per-client task clocks, updates merged as they arrive, and the same bits on every engine."""

from __future__ import annotations

import dataclasses
import signal
from statistics import fmean

import cli_helpers
import pytest
import torch
from cli_helpers import Stop, Stopper, assert_same_result, journal_lines, until
from helpers import Run, Watched, differences, run, tiny, vector

import weft
from weft import WeftError
from weft.core.exchange import staleness_weight
from weft.core.schedule import task_lengths
from weft.engines.simulated import SimulatedEngine
from weft.methods.averaging import mix
from weft.plan import Plan
from weft.wire.tensors import Rows, Sparse

pytest_plugins = ["cli_helpers"]

UNEVEN = {"clock__spread": 4.0, "clock__jitter": 0.3}
FAULTS = {"faults__drop": 0.15, "faults__crash": 0.1, "faults__corrupt": 0.1, "faults__delay": 0.1, "deadline": 4.0}
UNRELIABLE = {  # so many crash or are late that a task is offered several times before anybody answers
    **{"async": "task_clocks", "clients": 4, "tasks": 3, "rounds_per_task": 4, "method__kb_size": 1, "deadline": 1.5},
    **{"faults__crash": 0.25, "faults__delay": 0.35, "faults__drop": 0.1},
    **{"network__hidden": 4, "network__features": 4, "scenario__train": 10, "scenario__test": 10},
}
MODES = {
    "tasks": {"async": "task_clocks", "tasks": 3, "rounds_per_task": 4},
    "tasks, some chosen": {"async": "task_clocks", "tasks": 3, "rounds_per_task": 4, "clients_per_round": 2},
    "tasks, faults": {"seed": 2, **UNRELIABLE},
    "updates": {"async": "updates", "tasks": 3, **UNEVEN},
    "updates, coming and going": {"async": "updates", "clock__late": 3.0, "clock__stay": 3.0, "clock__away": 2.0},
    "updates, faults": {"async": "updates", **UNEVEN, **FAULTS},
    "updates, global": {"async": "updates", "method": "fedavg", "measured_model": "global", **UNEVEN},
    "quorum": {"quorum": 2, "rounds_per_task": 4, **UNEVEN},
    "deadline, late dropped": {"deadline": 2.0, "late": "drop", "rounds_per_task": 4, **UNEVEN},
    "deadline, coming and going": {"deadline": 2.0, "clock__stay": 3.0, "clock__away": 2.0, **UNEVEN},
    "faults": {"rounds_per_task": 3, **FAULTS},
    "median": {"aggregation": "median", "rounds_per_task": 3, "faults__drop": 0.2},
}


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_a_run_that_is_stopped_after_every_round(name, tmp_path):
    whole, stopped = run(**MODES[name]), Run(tiny(**MODES[name]), folder=tmp_path).go_with_interruptions()
    assert differences(whole.bits(), stopped.bits()) == []
    assert whole.incidents == stopped.incidents


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_it_does_not_matter_which_client_is_fastest(name):
    backwards = Run(tiny(**MODES[name]), backwards=True).go()
    assert differences(run(**MODES[name]).bits() | {"traffic": 0}, backwards.bits() | {"traffic": 0}) == []


@pytest.mark.parametrize("name", MODES)
def test_every_client_trains_and_tests_every_task(name):
    finished = run(**MODES[name])
    for matrix in finished.matrices.values():
        assert [len(row) for row in matrix] == list(range(1, finished.plan.tasks + 1))
    assert len(finished.matrices) == finished.plan.clients
    assert not finished.progress.pending


def plan(**words) -> Plan:
    return cli_helpers.tiny(**{key.replace("__", "."): value for key, value in words.items()})


@pytest.mark.long
@pytest.mark.parametrize("name", ["tasks", "updates, faults", "updates, coming and going", "deadline, late dropped"])
def test_any_number_of_workers(name, tmp_path):
    first, second = (weft.run(plan(**MODES[name]), tmp_path / str(n), workers=n).folder for n in (1, 3))
    assert_same_result(second, first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tasks", "updates, faults", "deadline, late dropped"])
def test_stopped_in_a_run_folder(name, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.runs.session.SAVE_SHARE", 0)
    whole = weft.run(plan(**MODES[name]), tmp_path / "whole").folder
    with pytest.raises(Stop):
        weft.run(plan(**MODES[name]), tmp_path / "stopped", display=Stopper(5), save_every=0.0)
    for more in (4, 3):
        with pytest.raises(Stop):
            weft.resume(tmp_path / "stopped", display=Stopper(more), save_every=0.0)
    assert_same_result(weft.resume(tmp_path / "stopped", memory=1).folder, whole)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tasks", "updates, faults"])
def test_killed(name, tmp_path, command):
    long = {**MODES[name], "tasks": 3, "rounds_per_task": 6}
    (tmp_path / "plan.toml").write_text(plan(**long).toml())
    whole = weft.run(plan(**long), tmp_path / "whole").folder
    words, folder = ["run", tmp_path / "plan.toml", "--out", tmp_path / "run"], tmp_path / "run"
    for workers, lines in (("1", 12), ("2", 24)):
        running = command.start(*words, "--workers", workers, "--save-every", "0", save_always=True)
        until(lambda lines=lines: journal_lines(folder) >= lines)
        assert running.kill() == -signal.SIGKILL
        words = ["resume", folder]
    assert command("resume", folder, "--workers", "1").code == 0
    assert_same_result(folder, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_client_has_every_foreign_a_that_it_is_told_to_use(seed):
    finished = run(seed=seed, **UNRELIABLE)
    assert finished.incidents
    for client, state in finished.clients.items():
        used = {key for task in range(3) for key in state.tasks[task].foreign}
        assert used | set(finished.server.has_foreign.get(client, [])) <= set(state.knowledge)


# ---- per-client task clocks ------------------------------------------------------------------------------------------


def test_tasks_differ_in_length_and_all_clients_do_the_same_work():
    words = {"rounds_per_task": 10, "rounds_spread": 0.4, "tasks": 7}
    lengths = [task_lengths(Plan(**{"async": "task_clocks"}, **words), client, 7) for client in range(20)]
    assert {sum(each) for each in lengths} == {70}
    assert (min(map(min, lengths)), max(map(max, lengths))) == (6, 14)
    assert len({tuple(each) for each in lengths}) == 20
    assert task_lengths(Plan(**words), 0, 7) == [10] * 7  # synchronous


def test_in_one_round_clients_are_at_different_tasks():
    finished = run(**MODES["tasks"])
    tasks = [[request.task for request in finished.requests if request.receiver == f"client-{c}"] for c in range(3)]
    assert any(len(set(each)) > 1 for each in zip(*tasks, strict=False))
    assert finished.progress.images == run(tasks=3, rounds_per_task=4).progress.images  # the same work


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tasks", "updates"])
def test_a_client_that_starts_a_task_gets_what_was_uploaded_by_then(name):
    """kb^(t) is sampled from all A's that were uploaded before, also of tasks that the receiver has not reached."""
    words = {**MODES[name], "tasks": 4, "rounds_per_task": 5, "rounds_spread": 0.9}
    finished = run(**words, method__kb_size="all")
    uploaded: set[str] = set()
    ahead = 0
    for request in finished.requests:
        me = request.receiver.removeprefix("client-")
        if (foreign := request.fields.get("foreign")) is not None:
            assert set(foreign) <= uploaded
            assert not any(key.startswith(f"{me}.") for key in foreign)
            ahead += sum(int(key.partition(".")[2]) >= request.task for key in foreign)
        if "share" in request.ops:
            uploaded.add(f"{me}.{request.task}")
    assert ahead > 0  # in synchronous rounds there would be none


# ---- updates as they arrive ------------------------------------------------------------------------------------------


def test_staleness_weights_by_hand():
    assert [staleness_weight(staleness, 0.5) for staleness in (0, 3, 8, 15)] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [staleness_weight(staleness, 1.0) for staleness in (0, 1, 3)] == [1, 0.5, 0.25]
    assert staleness_weight(99, 0.0) == 1


def test_mixing_by_hand():
    segments = ((3, 2),)
    known = Rows(segments, torch.tensor([True, True, False]), vector(4, 8, 1, 1))
    update = Rows(segments, torch.tensor([True, False, True]), vector(8, 0, 5, 6))
    mixed = mix(known, update, 0.25)
    assert mixed.dense().tolist() == [5, 6, 1, 1, 5, 6]  # a quarter of the way; not sent; not known before
    assert mixed.kept.tolist() == [True, True, True]
    assert mix(vector(0, 4), vector(8, 0), 0.25).tolist() == [2, 3]
    assert mix(vector(0, 4, 7), Sparse.of(vector(8, 0, 0)), 0.5).tolist() == [4, 4, 7]
    assert mix(Sparse.of(vector(0, 4, 0)), Sparse.of(vector(8, 8, 0)), 0.5).dense().tolist() == [8, 6, 0]


def test_a_stale_update_has_less_weight():
    """Of three equally fast clients each update, after the first ones, is two merges old."""
    finished = Watched(tiny(**{"async": "updates", "rounds_spread": 0.0})).go()
    assert [each.mix for each in finished.merged] == pytest.approx([1, 2**-0.5, *[3**-0.5] * 10])
    assert finished.progress.version == 12


def test_an_update_beyond_the_staleness_bound_is_not_merged():
    finished = Watched(tiny(**{"async": "updates", "rounds_spread": 0.0, "staleness_bound": 1})).go()
    assert [each.mix for each in finished.merged[:2]] == pytest.approx([1, 2**-0.5])
    assert finished.incidents
    assert all("staleness_bound" in reason for *_, reason in finished.incidents)
    assert len(finished.incidents) + len(finished.merged) == 12
    assert len(finished.matrices) == 3  # everybody trains nevertheless


def test_a_slow_client_replies_less_often():
    finished = Watched(tiny(**{"async": "updates", "clock__spread": 50.0, "tasks": 3})).go()
    half = [each.client for each in finished.merged[: len(finished.merged) // 2]]
    counts = [half.count(client) for client in range(3)]
    assert max(counts) > 2 * min(counts)
    assert finished.progress.images == run(tasks=3).progress.images


def test_a_single_client_learns_the_same_as_in_rounds():
    words = {"clients": 1, "method": "fedavg", "rounds_spread": 0.0, "method__average": "equal"}
    one, other = run(**words), run(**{"async": "updates"}, **words)
    assert one.matrices == other.matrices
    assert torch.equal(one.server.weights, other.server.weights)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fedweit", "fedprox+ewc", "fedavg+apd", "stl", "ewc"])
def test_methods_that_support_it(method):
    assert len(run(**{"async": "updates"}, method=method).matrices) == 3


class OwnAggregate(weft.methods.class_of("fedavg")):  # type: ignore[misc]
    def aggregate(self, server, updates, ctx):
        super().aggregate(server, updates, ctx)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"method": "scaffold"}, "scaffold cannot run with async=updates: its variates"),
        ({"method": "fedcurv+ewc"}, "cannot run with async=updates: U and V"),
        ({"method": "fedweit@paper"}, "method.divide=clients"),
        ({"method": OwnAggregate}, "aggregate"),
        ({"quorum": 2}, "leave .*quorum=all"),
        ({"aggregation": "median"}, "leave .*aggregation=mean"),
        ({"clients_per_round": 2}, "leave clients_per_round=all"),
        ({"faults.drop": 0.1}, "set deadline"),
        ({"staleness_bound": -1}, "choose 0 or more"),
    ],
)
def test_a_plan_that_makes_no_sense_is_an_error(words, said):
    with pytest.raises(WeftError, match=said):
        Plan(**{"async": "updates", **words})


# ---- rounds with a quorum or a deadline ------------------------------------------------------------------------------


def test_no_round_waits_for_a_client_that_is_away(monkeypatch):
    """A client that has started a task and is not expected back gets no request, and costs no deadline at its end."""
    clients = SimulatedEngine.clients

    def second_away(self):
        found, away = clients(self), frozenset({1} if self.now() > 0 else ())
        return dataclasses.replace(found, available=found.available - away, away=away)

    monkeypatch.setattr(SimulatedEngine, "clients", second_away)
    some = Run(tiny(deadline=5.0, rounds_per_task=3, **UNEVEN)).go()
    assert [(task, round_index) for client, task, round_index, _ in some.reports if client == 1] == [(0, 0)]
    assert sorted(some.matrices) == [0, 2]
    assert all(len(rows) == some.plan.tasks for rows in some.matrices.values())


@pytest.mark.slow
def test_a_quorum_does_not_wait_for_slow_clients():
    words = {"clock__spread": 6.0, "tasks": 1, "rounds_per_task": 6, "clients": 5}
    waiting, quorum = (run(**words, **more) for more in ({}, {"quorum": 3}))
    assert quorum.engine.now() < waiting.engine.now()
    assert not waiting.incidents
    assert {reason for *_, reason in quorum.incidents} == {"no reply in time"}


@pytest.mark.parametrize("late", ["next", "drop"])
def test_late_updates_count_in_the_next_round_or_not_at_all(late):
    words = {"deadline": 2.0, "tasks": 1, "rounds_per_task": 4, "clock__spread": 4.0, "clients": 5}
    finished = Watched(tiny(late=late, **words)).go()
    assert any(each.round < each.at for each in finished.merged) == (late == "next")
    assert any("too late" in reason for *_, reason in finished.incidents) == (late == "drop")
    assert fmean(row[0] for matrix in finished.matrices.values() for row in matrix) > 0.5
