"""What users would pick instead: FedAvg with a plain LeNet on Flower's simulation, beside weft's FedAvg.

Flower has an environment of its own, which `make peers` makes, and its own script, benchmarks/flower_fedavg.py, which
gets the images as arrays.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from weft import scenarios
from weft.bench.children import journal, last_line, running, watch
from weft.bench.places import file_of
from weft.bench.rounds import LIMIT, round_seconds, write_plan
from weft.bench.timing import Tell, ratio, spread
from weft.errors import WeftError
from weft.plan import Plan
from weft.runs.result import Result

PLACE = Path("build", "peers", "bin", "python")
MISSING = "there is no Flower to compare with; make peers sets it up in build/peers (run both in weft's source folder)"


def environment() -> Path:
    """The Python of the peers' environment, in this folder or in weft's source tree."""
    for folder in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (folder / PLACE).exists():
            return folder / PLACE
    raise WeftError(MISSING)


def measure(turns: int, rounds: int, tell: Tell) -> dict[str, Any]:
    python = environment()
    cores = os.cpu_count() or 1
    # one task that all clients learn from images of their own; Adam starts anew each round, as on Flower
    plan = Plan(
        name="peers",
        method="fedavg",
        tasks=1,
        rounds_per_task=rounds,
        batch_size=20,
        scenario={"name": "glyphs", "sharing": "overlapping", "pool": 1},
        optimizer_memory="round",
        measured_model="global",
    )
    theirs: list[Found] = []
    ours: list[Found] = []
    for turn in range(turns):
        with tempfile.TemporaryDirectory(prefix="weft-bench-") as name:
            folder = Path(name)
            write_plan(plan, folder)
            theirs.append(_flower(python, plan, folder, cores))
            tell(2 * turn + 1, 2 * turns)
            ours.append(_weft(folder, min(cores, plan.clients), rounds))
            tell(2 * turn + 2, 2 * turns)
    return {
        "clients": plan.clients,
        "turns": turns,
        "rounds": rounds,
        "batch_size": plan.batch_size,
        "workers": cores,
        "flower": _told(theirs),
        "weft": _told(ours),
        "round_speedup": ratio(*([spread(one.rounds)["median"] for one in side] for side in (theirs, ours)))["median"],
        "whole_speedup": ratio(*([one.seconds for one in side] for side in (theirs, ours)))["median"],
    }


class Found(NamedTuple):
    """One run: accuracy at its end, seconds of the whole, and of each round."""

    accuracy: float
    seconds: float
    rounds: list[float]


def _told(runs: list[Found]) -> dict[str, Any]:
    return {
        "accuracy": fmean(run.accuracy for run in runs),
        "seconds": spread([run.seconds for run in runs])["median"],
        "round_seconds": spread([seconds for run in runs for seconds in run.rounds]),
    }


def _flower(python: Path, plan: Plan, folder: Path, cores: int) -> Found:
    arrays: dict[str, np.ndarray] = {}
    for client, (task,) in enumerate(scenarios.of(plan).sequences):
        arrays[f"mean_{client}"], arrays[f"deviation_{client}"] = np.array(task.mean), np.array(task.deviation)
        for part in ("train", "test"):
            split = task.load(part)
            arrays[f"{part}_images_{client}"] = np.ascontiguousarray(split.images.transpose(0, 3, 1, 2))
            arrays[f"{part}_labels_{client}"] = split.labels
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    numbers = [plan.rounds_per_task, plan.batch_size, plan.learning_rate, cores]
    script, data = file_of("flower_fedavg.py"), folder / "data.npz"
    began = time.time()
    with (folder / "said.txt").open("wb") as said:
        try:
            done = subprocess.run(
                [python, script, data, *map(str, numbers)],
                stdout=subprocess.PIPE,
                stderr=said,
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise WeftError(f"FedAvg on Flower took more than {LIMIT:.0f} s; weft bench gave up") from None
    seconds = time.time() - began
    if done.returncode != 0:
        raise WeftError(f"Flower ended with code {done.returncode}: {last_line(folder / 'said.txt')}")
    found = json.loads(done.stdout.decode().strip().splitlines()[-1])
    ends = found["round_ends"]  # the first stands before the first round
    rounds = [after - before for before, after in pairwise(ends)]
    return Found(found["accuracy"], seconds, rounds[1:] or rounds)


def _weft(folder: Path, workers: int, rounds: int) -> Found:
    began = time.time()
    with running(["plan.toml", "--out", "run", "--workers", str(workers)], folder) as process:
        if not watch(process, folder, LIMIT, lambda: False):
            raise WeftError(f"weft's FedAvg took more than {LIMIT:.0f} s; weft bench gave up")
    seconds = time.time() - began
    result = Result(folder / "run")
    found = round_seconds(journal(result.folder), range(1, rounds))
    return Found(result.accuracy, seconds, found)
