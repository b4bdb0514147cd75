"""weft bench: what it compares with is the same function, its clients have a real past, and its clock is honest."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from weft import networks
from weft import registry as named
from weft.bench import bars, engine, paired, probe, server, steps, timing, wire
from weft.bench.places import file_of
from weft.core.client import World
from weft.core.optimizers import make_optimizer
from weft.core.training import train_step
from weft.errors import WeftError
from weft.plan import Plan
from weft.wire.codec import arriving
from weft.wire.tensors import Sparse

torch.set_num_threads(1)

TINY: dict[str, Any] = {
    "network": {"name": "mlp", "hidden": 64},
    "scenario": {"name": "glyphs", "train": 20, "valid": 10, "test": 10, "classes_per_task": 5},
    "batch_size": 10,
}


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


# ---- the plain LeNet -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    """Our LeNet and the plain one with the same weights: ours, theirs, and the plain trainer around it."""
    ours = networks.build("lenet", {}, heads=(5,))
    rng = np.random.default_rng(3)
    body = ours.initial_body(rng)
    ours.vector.copy_(torch.cat([body, ours.initial_head(rng)]))
    ours.vector[ours.layout.weights : ours.layout.body] = torch.from_numpy(rng.normal(0, 0.1, 1370)).float()  # biases
    plain = named.find(f"{file_of('plain_lenet.py')}:PlainLeNet")()
    names = [f"{layer}.{kind}" for kind in ("weight", "bias") for layer in ("conv1", "conv2", "fc1", "fc2")]
    order = [*names, "head.weight", "head.bias"]  # as they lie in the vector
    place = 0
    with torch.no_grad():
        for name in order:
            parameter = plain.get_parameter(name)
            parameter.copy_(ours.vector[place : place + parameter.numel()].view(parameter.shape))
            place += parameter.numel()
    assert place == ours.layout.size
    return ours, plain, order


@pytest.mark.slow
def test_the_plain_lenet_computes_the_same_function(pair):
    ours, plain, order = pair
    rng = np.random.default_rng(4)
    mean, deviation = (120.0, 110.0, 100.0), (60.0, 61.0, 62.0)
    raw = torch.from_numpy(rng.integers(0, 256, (12, 3, 32, 32)).astype(np.uint8))
    labels = torch.from_numpy(rng.integers(0, 5, 12))
    trainer = named.find(f"{file_of('plain_lenet.py')}:PlainTrainer")(plain, mean, deviation, 1e-3)
    images = trainer.normalise(raw)
    assert torch.allclose(images[:, 1], (raw[:, 1].float() - 110) / 61)
    torch.testing.assert_close(plain(images), ours.logits(images), rtol=1e-4, atol=1e-5)
    loss = ours.compute_gradient(images.contiguous(memory_format=torch.channels_last), labels)
    before = [plain.get_parameter(name).detach().clone() for name in order]
    assert trainer.step(raw, labels) == pytest.approx(loss, rel=1e-5)
    theirs = torch.cat([plain.get_parameter(name).grad.view(-1) for name in order])
    torch.testing.assert_close(theirs, ours.gradient, rtol=1e-3, atol=1e-6)
    assert all(not torch.equal(old, plain.get_parameter(name)) for old, name in zip(before, order, strict=True))


@pytest.mark.slow
def test_the_plain_accuracy_is_that_of_its_logits(pair):
    _, plain, _ = pair
    trainer = named.find(f"{file_of('plain_lenet.py')}:PlainTrainer")(plain, (0.0,) * 3, (255.0,) * 3, 1e-3)
    raw = torch.randint(0, 256, (20, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    guessed = plain(raw.float() / 255).argmax(dim=1)
    assert trainer.accuracy(raw, guessed) == 1.0
    assert trainer.accuracy(raw, (guessed + 1) % 5) == 0.0


def test_operations_of_an_image_by_hand():
    forward = [2 * 32 * 32 * 20 * 75, 2 * 16 * 16 * 50 * 500, 2 * 3200 * 800, 2 * 800 * 500, 2 * 500 * 5]
    assert steps.operations_per_image(steps.PlainTurn.network()) == 3 * sum(forward) - forward[0] == 62_319_000
    one = nn.Sequential(nn.Flatten(), nn.Linear(3072, 2, bias=False))
    assert steps.operations_per_image(one) == 2 * 2 * 3072 * 2  # forward, and by the weights: no gradient of images


def test_a_missing_file_is_told():
    with pytest.raises(WeftError, match=r"benchmarks/nobody\.py is missing.*install weft anew"):
        file_of("nobody.py")


# ---- clients with a past ---------------------------------------------------------------------------------------------


def test_a_client_at_its_fourth_task_has_three_tasks_behind_it_and_the_foreign_it_was_given():
    world = World(Plan(**TINY, tasks=4, clients=2, device="cpu"))
    weights = world.lesson(0, 0).layout.weights
    gifts = steps.given_away(world, client=1, count=2)
    assert all(isinstance(gift, Sparse) for gift in gifts)
    assert [len(gift.values) for gift in gifts] == [int(0.1 * weights)] * 2  # adaptive_keep
    assert not torch.equal(gifts[0].indices, gifts[1].indices)
    past = steps.past_states(world, client=0, wanted={1, 4})
    client = steps.Client(world, 3, lambda *_: steps.copy_of(past[4]))
    client.meet(gifts)
    archive = client.state.archive
    assert {key for key in archive if key.startswith("adaptive/")} == {f"adaptive/{step}" for step in range(3)}
    assert {key for key in archive if key.startswith("mask/")} == {f"mask/{step}" for step in range(3)}
    assert not torch.equal(archive["mask/0"], archive["mask/1"])
    assert client.state.numbers["learned"] == [0, 1, 2]
    assert client.state.numbers["foreign"] == ["1.0", "1.1"]
    assert torch.equal(archive["foreign/1.1"].indices, gifts[1].indices)
    torch.testing.assert_close(archive["foreign/1.1"].values, arriving(gifts[1].values, world.plan.wire))
    assert "foreign/1.1" not in past[4].archive  # the next contender starts from it too
    assert not past[1].archive

    work = world.method.open(client.state, client.lesson)
    optimizer = make_optimizer(world.plan, work, client.state)
    before = client.state.tensor("base").clone()
    loss = train_step(world.method, work, optimizer, *world.batches(0, 0, "train").take(slice(0, 10)), 1e-3)
    world.method.close(client.state, work)
    assert np.isfinite(loss)
    assert not torch.equal(client.state.tensor("base"), before)


@pytest.mark.slow
def test_steps_gives_every_contender_and_ratio():
    found = steps.measure(TINY, quick=True, passes=2, tell=silent)
    json.dumps(found, allow_nan=False)
    wanted = {place.name for place in steps.QUICK}
    assert set(found["contenders"]) == {"plain", "lenet", *wanted}
    assert set(found["ratios"]) == set(list(bars.BARS)[:3])
    for one in found["contenders"].values():
        assert one["step_seconds"]["count"] == 2
        assert one["images_per_second"] == pytest.approx(10 / one["step_seconds"]["median"])
        assert one["share_of_peak"] > 0


# ---- clocks ----------------------------------------------------------------------------------------------------------


def test_contenders_take_turns_in_their_groups_in_ever_other_orders():
    order: list[str] = []

    def contender(name):
        def turn():
            order.append(name)
            return float(len(order))

        return turn

    found = timing.interleave([{name: contender(name) for name in group} for group in ("abc", "de")], 20, silent)
    passes = ["".join(order[place : place + 5]) for place in range(0, 100, 5)]
    assert all(sorted(one[:3]) == list("abc") and sorted(one[3:]) == list("de") for one in passes)
    assert {one[:3] for one in passes} == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert {one[3:] for one in passes} == {"de", "ed"}
    assert found["d"] == [place + 1 for place, name in enumerate(order) if name == "d"]


def test_a_slow_pass_does_not_move_a_ratio():
    assert timing.ratio([2.0, 20.0, 2.0, 3.0], [1.0, 10.0, 1.0, 1.5])["median"] == 2.0
    assert timing.spread([5.0]) == {"median": 5.0, "low": 5.0, "high": 5.0, "count": 1}


def test_the_probe_gives_each_second_to_one_part(monkeypatch):
    now = 0.0

    def passes(seconds: float, then=None):
        def act():
            nonlocal now
            now += seconds
            if then is not None:
                then()
            now += seconds

        return act

    monkeypatch.setattr(probe.time, "perf_counter", lambda: now)
    clock = probe.Probe()
    point = probe.POINTS["evaluation"][1]
    measured = clock._wrap("evaluation", point, passes(1))
    opened = clock._wrap("state", probe.POINTS["state"][0], passes(2))
    measured()  # outside of the loop nothing counts
    training = clock._wrap("training", probe.POINTS["training"][0], passes(10, lambda: (measured(), opened())))
    testing = clock._wrap("evaluation", probe.POINTS["evaluation"][0], passes(3, measured))
    clock._wrap("rest", probe.WHOLE, passes(100, lambda: (training(), testing())))()
    assert clock.seconds["training"] == 2 * 10 + 2 * 1  # with its validation, without what belongs to the state
    assert clock.seconds["state"] == 2 * 2
    assert clock.seconds["evaluation"] == 2 * 3 + 2 * 1
    assert clock.seconds["rest"] == 200
    assert sum(clock.seconds.values()) == now - 2  # all but the first measure
    assert clock.calls[point] == 3


@pytest.mark.slow
def test_every_point_of_the_probe_is_reached_by_a_run_and_put_back(tmp_path):
    def found(point):
        module, _, path = point.partition(":")
        owner = named.find(f"{module}:{path.rpartition('.')[0]}") if "." in path else __import__("sys").modules[module]
        return vars(owner).get(path.rpartition(".")[2], "inherited")

    from weft.runs import run as running
    from weft.runs import session

    points = [probe.WHOLE, *(point for points in probe.POINTS.values() for point in points)]
    before = {point: found(point) for point in points}
    clock = probe.Probe()
    with clock.watching():
        assert found(probe.WHOLE) is not before[probe.WHOLE]
        plan = Plan(**TINY, clients=3, tasks=2, rounds_per_task=2)
        running.run(plan, tmp_path / "run", memory=1, save_every=0)  # one megabyte: states go to disk and come back
    assert [point for point, calls in clock.calls.items() if not calls] == []
    assert {point: found(point) for point in points} == before
    assert all(seconds > 0 for seconds in clock.seconds.values()), clock.seconds
    assert inspect.getattr_static(session.State, "load") is before["weft.core.storage:State.load"]


# ---- the other parts -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_part_tells_shares_bytes_and_accuracy_of_one_run():
    plan = {**TINY, "clients": 3, "tasks": 2, "rounds_per_task": 2}
    found = engine.measure(plan, tell=silent)
    json.dumps(found, allow_nan=False)
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert 0 < found["shares"]["training"] < 1
    assert 0 <= found["accuracy"] <= 1
    for one in found["traffic"].values():
        assert one["over_dense"] == pytest.approx(one["bytes_per_round"] / one["dense_bytes_per_round"])
        assert one["paper_bytes_per_round"] < one["dense_bytes_per_round"]
    assert (
        found["traffic"]["s2c"]["over_dense"] < found["traffic"]["c2s"]["over_dense"] < 0.5
    )  # the same rows; up, A too
    assert found["bits_per_adaptive_value"] > 16


def test_the_server_part_stores_what_it_says():
    found = server.measure(TINY, messages=[3, 20], entries=[40], repeats=1, tell=silent)
    json.dumps(found, allow_nan=False)
    assert set(found["aggregation"]) == {"3", "20"}
    full, small = found["knowledge_base"].values()
    assert (full["entries"], small["entries"]) == (10, 40)
    assert small["memory_bytes"] + small["disk_bytes"] >= 40 * small["bytes_per_entry"] == 40 * 8 * server.SMALL


def test_aggregation_merges_the_replies_that_are_timed():
    world = World(Plan(**TINY))
    state, replies = server.opened(world), server.make_replies(world, 4)
    before = state.tensors["global"].values.clone()
    world.method.aggregate(state, replies)
    assert not torch.equal(state.tensors["global"].values[: len(before)], before[: len(state.tensors["global"].values)])
    first, second, *_ = (reply.tensors["base"] for reply in replies)
    assert torch.equal(first.kept, second.kept)
    assert not torch.equal(first.values, second.values)


def test_the_wire_part_weighs_three_kinds():
    found = wire.measure(TINY, passes=2, tell=silent)
    assert list(found) == ["dense", "rows", "sparse"]
    assert found["sparse"]["bytes"] < found["rows"]["bytes"] < found["dense"]["bytes"]
    assert all(value > 0 for one in found.values() for value in one.values())


def test_the_cross_entropy_of_the_plain_trainer_is_the_mean():
    """The step is the one that our own network takes: mean cross entropy, not its sum."""
    plain = named.find(f"{file_of('plain_lenet.py')}:PlainLeNet")()
    trainer = named.find(f"{file_of('plain_lenet.py')}:PlainTrainer")(plain, (0.0,) * 3, (255.0,) * 3, 1e-3)
    raw = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 3])
    wanted = functional.cross_entropy(plain(raw.float()), labels).item()
    assert trainer.step(raw, labels) == pytest.approx(wanted)


def test_pairs_are_of_one_seed_and_what_is_lost_is_their_mean(monkeypatch):
    def ask(part, settings, tell, started):
        plan = settings["plan"]
        kind = "dense" if "method.keep" in plan else "default"
        return {"accuracy": {"default": 0.7, "dense": 0.72}[kind] + plan["seed"] / 10, "tasks": 2}

    monkeypatch.setattr(paired, "ask_part", ask)
    told = []
    found = paired.measure({"tasks": 2}, [0, 1], lambda *place: told.append(place))
    assert found["accuracy"] == {
        "default": [0.7, pytest.approx(0.8)],
        "dense": [0.72, pytest.approx(0.82)],
    }
    assert found["points_lost"] == pytest.approx(2)
    assert told[-1] == (4, 4)


@pytest.mark.slow
def test_pairs_that_are_stopped_end_their_runs(monkeypatch):
    """Ctrl-C reaches the main thread only, while others wait for runs of many minutes."""
    ready = threading.Barrier(min(os.cpu_count() or 1, 6) + 1)  # all that run at a time, and the test
    ended: list[int] = []

    def ask(part, settings, tell, started):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        started.append(process)
        ready.wait()
        ended.append(process.wait())
        raise WeftError("it ended")

    def interrupted(pool, ask_one, jobs):
        for job in jobs:
            pool.submit(ask_one, job)
        ready.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(paired, "ask_part", ask)
    monkeypatch.setattr(paired.ThreadPoolExecutor, "map", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        paired.measure({"tasks": 2}, [0, 1, 2], silent)
    assert time.monotonic() - began < 60
    assert ended
    assert set(ended) == {-signal.SIGKILL}
