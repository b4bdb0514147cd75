"""A run of the default FedWeIT plan: where its time goes, what is sent, its accuracy; and what saved bytes cost."""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from weft.plan import Plan
from weft.runs.folder import read_rows
from weft.runs.run import run
from weft.wire.ledger import Entry, by

from . import processes
from .internals import ReplyCounter, Timers
from .timing import Progress

VARIANTS: dict[str, dict[str, Any]] = {"default": {}, "dense": {"method.keep": 1.0, "precision": "float32"}}


def measure(plan: dict[str, Any], progress: Progress) -> dict[str, Any]:
    chosen, timers = Plan(**plan), Timers()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, timers.running():
        result = run(chosen, Path(folder, "run"), workers=1, display=ReplyCounter(progress))
        sums = by([Entry.from_row(row) for row in read_rows(result.folder, "ledger.csv")], "direction", "tensor")
        summary = result.summary
    seconds = sum(timers.seconds.values())
    rounds = chosen.tasks * chosen.rounds_per_task
    adaptive = sums["c2s", "adaptive"]
    return {
        "clients": chosen.clients,
        "tasks": chosen.tasks,
        "rounds_per_task": chosen.rounds_per_task,
        "seed": chosen.seed,
        "rounds_per_second": rounds / seconds,
        "images_per_second": summary["images_per_second"],
        "shares": {category: part / seconds for category, part in timers.seconds.items()},
        "accuracy": summary["accuracy"],
        "forgetting": summary["forgetting"],
        "traffic": {
            direction: {
                "bytes_per_round": sent["bytes"] / rounds,
                "paper_bytes_per_round": 4 * sent["nonzeros"] / rounds,
                "dense_bytes_per_round": sent["dense_bytes"] / rounds,
                "over_dense": sent["bytes"] / sent["dense_bytes"],
            }
            for direction, sent in summary["traffic"].items()
        },
        "bits_per_adaptive_value": 8 * adaptive.bytes / adaptive.nonzeros,
    }


def measure_paired(plan: dict[str, Any], seeds: list[int], progress: Progress) -> dict[str, Any]:
    """The accuracy of the default plan, and with the same seeds if all rows of B are sent as float32."""
    plans = [{**plan, **changes, "seed": seed} for changes in VARIANTS.values() for seed in seeds]
    runs: list[dict[str, Any]] = []
    started: list[subprocess.Popen[str]] = []

    def measure_run(plan: dict[str, Any]) -> dict[str, Any]:
        return processes.measure_part("engine", {"plan": plan}, lambda *_: None, started)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # processes of one thread each; nothing is timed here
        try:
            for run in pool.map(measure_run, plans):
                runs.append(run)
                progress(len(runs), len(plans))
        except BaseException:  # Ctrl-C reaches only this thread, and the pool would wait for the other runs
            pool.shutdown(wait=False, cancel_futures=True)
            for process in started:
                process.kill()
            raise
    reached = iter(run["accuracy"] for run in runs)
    accuracy = {variant: [next(reached) for _ in seeds] for variant in VARIANTS}
    lost = fmean(accuracy["dense"]) - fmean(accuracy["default"])
    return {"seeds": seeds, "tasks": runs[0]["tasks"], "accuracy": accuracy, "points_lost": 100 * lost}
