"""weft bench: its reference computes the same function, its clients have finished tasks, and its timers add up."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from weft.benchmarks import bars, engine, internals, processes, server, steps, timing, wire
from weft.benchmarks.plain_lenet import PlainLeNet, PlainTrainer
from weft.errors import WeftError
from weft.plan import Plan
from weft.wire.codec import arriving
from weft.wire.tensors import Sparse

torch.set_num_threads(1)

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
TINY: dict[str, Any] = {
    "network": {"name": "mlp", "hidden": 64},
    "scenario": {"name": "glyphs", "train": 20, "valid": 10, "test": 10, "classes_per_task": 5},
    "batch_size": 10,
}


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_plain_trainer():
    """That the network computes the same function as weft's LeNet is tested in test_networks."""
    trainer = PlainTrainer(PlainLeNet(), (120.0, 110.0, 100.0), (60.0, 61.0, 62.0), 1e-3)
    raw = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = trainer.normalize(raw)
    assert torch.allclose(images[:, 1], (raw[:, 1].float() - 110) / 61)
    predicted = trainer.net(images).argmax(dim=1)
    assert trainer.accuracy(raw, predicted) == 1.0
    assert trainer.accuracy(raw, (predicted + 1) % 5) == 0.0
    labels, before = torch.arange(20) % 5, [each.detach().clone() for each in trainer.net.parameters()]
    expected = functional.cross_entropy(trainer.net(images), labels).item()  # the mean, as in weft's networks
    assert trainer.step(raw, labels) == pytest.approx(expected)
    assert not any(torch.equal(*pair) for pair in zip(before, trainer.net.parameters(), strict=True))


def test_operations_of_an_image_by_hand():
    forward = [2 * 32 * 32 * 20 * 75, 2 * 16 * 16 * 50 * 500, 2 * 3200 * 800, 2 * 800 * 500, 2 * 500 * 5]
    assert steps.operations_per_image(PlainLeNet()) == 3 * sum(forward) - forward[0] == 62_319_000
    one = nn.Sequential(nn.Flatten(), nn.Linear(3072, 2, bias=False))
    assert steps.operations_per_image(one) == 2 * 2 * 3072 * 2  # forward, and by the weights: no gradient of images


# ---- clients and server ----------------------------------------------------------------------------------------------


def test_a_client_at_its_fourth_task_has_three_finished_tasks_and_foreign_knowledge():
    runtime = internals.Runtime(Plan(**TINY, tasks=4, clients=2, device="cpu"))
    weights = internals.layout_of(runtime).weights
    knowledge = internals.task_knowledge(runtime, 2)
    assert all(isinstance(each, Sparse) for each in knowledge)
    assert [len(each.values) for each in knowledge] == [int(0.1 * weights)] * 2  # adaptive_keep
    assert not torch.equal(knowledge[0].indices, knowledge[1].indices)
    before = internals.states_before(runtime, {0, 3})
    client = internals.BenchClient(runtime, 3, before[3])
    client.receive(knowledge)
    state = client.state
    assert list(state.tasks) == [0, 1, 2]
    assert all(isinstance(task.adaptive, Sparse) for task in state.tasks.values())
    assert not torch.equal(state.tasks[0].mask, state.tasks[1].mask)
    assert (state.started, state.finished, state.foreign) == (3, 2, ["1.0", "1.1"])
    assert torch.equal(state.knowledge["1.1"].indices, knowledge[1].indices)
    torch.testing.assert_close(state.knowledge["1.1"].values, arriving(knowledge[1].values, runtime.plan.wire))
    assert not before[3].knowledge  # the next contender starts from this state too
    assert not before[0].tasks

    weights = state.weights.clone()
    with client.training_round() as train:
        assert np.isfinite(train(*runtime.batches(0, 0, "train").take(slice(0, 10))))
    assert not torch.equal(state.weights, weights)


def test_the_server_merges_replies_of_equal_rows():
    runtime = internals.Runtime(Plan(**TINY))
    merging, updates = internals.BenchServer(runtime), internals.make_updates(runtime, 4)
    before = merging.state.weights.values.clone()
    merging.aggregate(updates)
    after = merging.state.weights.values
    assert not torch.equal(after[: len(before)], before[: len(after)])
    first, second, *_ = (update.tensors["weights"] for update in updates)
    assert torch.equal(first.kept, second.kept)
    assert not torch.equal(first.values, second.values)


@pytest.mark.slow
def test_steps_measures_every_contender_and_ratio():
    found = steps.measure(TINY, quick=True, passes=2, progress=silent)
    json.dumps(found, allow_nan=False)
    wanted = {case.name for case in steps.QUICK}
    assert set(found["contenders"]) == {"plain", "lenet", *wanted}
    assert set(found["ratios"]) == set(list(bars.BARS)[:3])
    for one in found["contenders"].values():
        assert one["step_seconds"]["count"] == 2
        assert one["images_per_second"] == pytest.approx(10 / one["step_seconds"]["median"])
        assert one["share_of_peak"] > 0


# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_contenders_of_a_group_take_turns_in_changing_order():
    order: list[str] = []

    def contender(name):
        def turn():
            order.append(name)
            return float(len(order))

        return turn

    found = timing.interleave([{name: contender(name) for name in group} for group in ("abc", "de")], 20, silent)
    passes = ["".join(order[start : start + 5]) for start in range(0, 100, 5)]
    assert all(sorted(one[:3]) == list("abc") and sorted(one[3:]) == list("de") for one in passes)
    assert {one[:3] for one in passes} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert {one[3:] for one in passes} == {"de", "ed"}
    assert found["d"] == [index + 1 for index, name in enumerate(order) if name == "d"]


def test_timers_assign_each_second_to_one_category(monkeypatch):
    now = 0.0

    def work(category: str, seconds: float, *inner):
        """A timed function that takes `seconds` before and after what it calls."""

        def function():
            nonlocal now
            now += seconds
            for each in inner:
                each()
            now += seconds

        return timers.timed(category, (category, seconds), function)

    monkeypatch.setattr(internals.time, "perf_counter", lambda: now)
    timers = internals.Timers()
    measure, opening = work("evaluation", 1), work("state", 2)
    measure()  # outside of the loop nothing counts
    work("rest", 100, work("training", 10, measure, opening), work("evaluation", 3, measure))()
    assert timers.seconds["training"] == 2 * 10 + 2 * 1  # with validation, without what belongs to the state
    assert timers.seconds["state"] == 2 * 2
    assert timers.seconds["evaluation"] == 2 * 3 + 2 * 1
    assert timers.seconds["rest"] == 200
    assert sum(timers.seconds.values()) == now - 2  # all but the first measure
    assert timers.calls["evaluation", 1] == 3


@pytest.mark.slow
def test_a_run_passes_every_timed_place_and_all_are_restored(tmp_path):
    from weft.runs.run import run

    def current():
        return [inspect.getattr_static(owner, name) for owner, name in places]

    places = [internals.LOOP, *(place for each in internals.PLACES.values() for place in each)]
    before, timers = current(), internals.Timers()
    with timers.running():
        assert not any(one is other for one, other in zip(current(), before, strict=True))
        run(Plan(**TINY, clients=3, tasks=2, rounds_per_task=2), tmp_path / "run", save_every=0)
    assert [place for place, calls in timers.calls.items() if not calls] == []
    assert current() == before
    assert all(seconds > 0 for seconds in timers.seconds.values()), timers.seconds


def test_only_one_module_knows_the_internals():
    """The method hooks, the loop and the engines may change: then one file of the benchmark does."""
    for file in FOLDER.glob("*.py"):
        if file.name != "internals.py":
            assert not re.search(r"from weft\.(core|engines|methods)\b", file.read_text(encoding="utf-8")), file.name


@pytest.mark.parametrize("name", ["bars", "report", "steps", "timing"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"weft.benchmarks.{name}"))
    assert result.attempted
    assert not result.failed


# ---- the other parts -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_part_measures_shares_bytes_and_accuracy():
    plan = {**TINY, "clients": 3, "tasks": 2, "rounds_per_task": 2}
    found = engine.measure(plan, progress=silent)
    json.dumps(found, allow_nan=False)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert 0 < found["shares"]["training"] < 1
    assert 0 <= found["accuracy"] <= 1
    for one in found["traffic"].values():
        assert one["over_dense"] == pytest.approx(one["bytes_per_round"] / one["dense_bytes_per_round"])
        assert one["paper_bytes_per_round"] < one["dense_bytes_per_round"]
    down, up = (found["traffic"][way]["over_dense"] for way in ("s2c", "c2s"))
    assert down < up < 0.5  # the same rows; up, A too
    assert found["bits_per_adaptive_value"] > 16


def test_the_server_and_wire_parts():
    found = wire.measure(TINY, passes=2, progress=silent)
    assert list(found) == ["dense", "rows", "sparse"]
    assert found["sparse"]["bytes"] < found["rows"]["bytes"] < found["dense"]["bytes"]
    assert all(value > 0 for one in found.values() for value in one.values())
    found = server.measure(TINY, messages=[3, 20], entries=[40], repeats=1, progress=silent)
    json.dumps(found, allow_nan=False)
    assert set(found["aggregation"]) == {"3", "20"}
    full, small = found["knowledge_base"].values()
    assert (full["entries"], small["entries"]) == (10, 40)
    assert small["memory_bytes"] + small["disk_bytes"] >= 40 * small["bytes_per_entry"] == 40 * 8 * server.SMALL


def test_pairs_are_of_one_seed_and_what_is_lost_is_their_mean(monkeypatch):
    def measure(part, settings, progress, started):
        plan = settings["plan"]
        kind = "dense" if "method.keep" in plan else "default"
        return {"accuracy": {"default": 0.7, "dense": 0.72}[kind] + plan["seed"] / 10, "tasks": 2}

    monkeypatch.setattr(processes, "measure_part", measure)
    reported = []
    found = engine.measure_paired({"tasks": 2}, [0, 1], lambda *count: reported.append(count))
    assert found["accuracy"] == {"default": pytest.approx([0.7, 0.8]), "dense": pytest.approx([0.72, 0.82])}
    assert found["points_lost"] == pytest.approx(2)
    assert reported[-1] == (4, 4)


@pytest.mark.slow
def test_pairs_that_are_stopped_end_their_runs(monkeypatch):
    """Ctrl-C reaches the main thread only, while others wait for runs of many minutes."""
    ready = threading.Barrier(min(os.cpu_count() or 1, 6) + 1)  # all that run at a time, and the test
    ended: list[int] = []

    def measure(part, settings, progress, started):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        started.append(process)
        ready.wait()
        ended.append(process.wait())
        raise WeftError("it ended")

    def interrupted(pool, measure_run, plans):
        for plan in plans:
            pool.submit(measure_run, plan)
        ready.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "measure_part", measure)
    monkeypatch.setattr(engine.ThreadPoolExecutor, "map", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.measure_paired({"tasks": 2}, [0, 1, 2], silent)
    assert time.monotonic() - began < 60
    assert ended
    assert set(ended) == {-signal.SIGKILL}
