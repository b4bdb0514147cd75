"""What the bytes saved cost: the default FedWeIT plan, and the same seeds with all rows of B sent as float32."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from typing import Any

from weft.bench.children import ask_part
from weft.bench.timing import Tell

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "dense": {"method.keep": 1.0, "precision": "float32"},
}


def measure(plan: dict[str, Any], seeds: list[int], tell: Tell) -> dict[str, Any]:
    jobs = [{**plan, **changed, "seed": seed} for changed in KINDS.values() for seed in seeds]
    runs: list[dict[str, Any]] = []
    started: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process of one thread, and nothing is timed here
        try:
            for run in pool.map(lambda job: ask_part("engine", {"plan": job}, lambda *_: None, started), jobs):
                runs.append(run)
                tell(len(runs), len(jobs))
        except BaseException:  # Ctrl-C reaches this thread alone, and the pool would wait for the others' runs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.kill()
            raise
    reached = iter(run["accuracy"] for run in runs)
    accuracy = {kind: [next(reached) for _ in seeds] for kind in KINDS}
    lost = fmean(accuracy["dense"]) - fmean(accuracy["default"])
    return {"seeds": seeds, "tasks": runs[0]["tasks"], "accuracy": accuracy, "points_lost": 100 * lost}
