"""Comparison: FedAvg with a plain LeNet on Flower's simulation, and weft's FedAvg.

Flower is installed in a separate environment (`make peers`) and runs flower_fedavg.py, which gets the images as arrays.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from weft import scenarios
from weft.errors import WeftError
from weft.plan import Plan
from weft.runs.result import Result

from .processes import LIMIT, last_line
from .runs import complete_run, plan_folder, round_seconds
from .timing import Progress, quartiles, ratio

PYTHON = Path("build", "peers", "bin", "python")
SCRIPT = Path(__file__).resolve().parent / "flower_fedavg.py"


def environment() -> Path:
    """The Python of Flower's environment, in this folder or in weft's source tree."""
    for folder in (Path.cwd(), SCRIPT.parent.parent):
        if (folder / PYTHON).exists():
            return folder / PYTHON
    raise WeftError("Flower is not installed in build/peers; run make peers, then weft bench, in weft's source folder")


class PeerRun(NamedTuple):
    accuracy: float
    seconds: float  # of the whole run
    rounds: list[float]  # seconds of each


def measure(turns: int, rounds: int, progress: Progress) -> dict[str, Any]:
    python = environment()
    cores = os.cpu_count() or 1
    # one task for all clients, with different images each; Adam restarts each round, as on Flower
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
    flower: list[PeerRun] = []
    weft: list[PeerRun] = []
    for turn in range(turns):
        with plan_folder(plan) as folder:
            flower.append(_run_flower(python, plan, folder, cores))
            progress(2 * turn + 1, 2 * turns)
            weft.append(_run_weft(folder, min(cores, plan.clients), rounds))
            progress(2 * turn + 2, 2 * turns)
    medians = [[quartiles(run.rounds)["median"] for run in runs] for runs in (flower, weft)]
    seconds = [[run.seconds for run in runs] for runs in (flower, weft)]
    return {
        "clients": plan.clients,
        "turns": turns,
        "rounds": rounds,
        "batch_size": plan.batch_size,
        "workers": cores,
        "flower": _summary(flower),
        "weft": _summary(weft),
        "round_speedup": ratio(*medians)["median"],
        "whole_speedup": ratio(*seconds)["median"],
    }


def _summary(runs: list[PeerRun]) -> dict[str, Any]:
    return {
        "accuracy": fmean(run.accuracy for run in runs),
        "seconds": quartiles([run.seconds for run in runs])["median"],
        "round_seconds": quartiles([seconds for run in runs for seconds in run.rounds]),
    }


def _run_flower(python: Path, plan: Plan, folder: Path, cores: int) -> PeerRun:
    arrays: dict[str, np.ndarray] = {}
    for client, (task,) in enumerate(scenarios.of(plan).sequences):
        arrays[f"mean_{client}"], arrays[f"deviation_{client}"] = np.array(task.mean), np.array(task.deviation)
        for part in ("train", "test"):
            split = task.load(part)
            arrays[f"{part}_images_{client}"] = np.ascontiguousarray(split.images.transpose(0, 3, 1, 2))
            arrays[f"{part}_labels_{client}"] = split.labels
    np.savez(folder / "data.npz", **arrays)  # type: ignore[arg-type]
    arguments = [folder / "data.npz", plan.rounds_per_task, plan.batch_size, plan.learning_rate, cores]
    start = time.time()
    with (folder / "flower.txt").open("wb") as log:
        try:
            done = subprocess.run(
                [python, SCRIPT, *map(str, arguments)], stdout=subprocess.PIPE, stderr=log, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired:
            raise WeftError(f"FedAvg on Flower took more than {LIMIT:.0f} s; omit --peers") from None
    seconds = time.time() - start
    if done.returncode != 0:
        raise WeftError(f"Flower ended with code {done.returncode}: {last_line(folder / 'flower.txt')}")
    result = json.loads(done.stdout.decode().strip().splitlines()[-1])
    rounds = [after - before for before, after in pairwise(result["round_ends"])]  # the first is before any round
    return PeerRun(result["accuracy"], seconds, rounds[1:] or rounds)


def _run_weft(folder: Path, workers: int, rounds: int) -> PeerRun:
    start = time.time()
    events = complete_run(folder, workers)
    seconds = time.time() - start
    return PeerRun(Result(folder / "run").accuracy, seconds, round_seconds(events, range(1, rounds)))
