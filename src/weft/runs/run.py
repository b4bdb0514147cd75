"""From a plan to a summary: first the folder, then torch, then the loop."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import psutil

from weft import metrics, networks, registry, scenarios
from weft.data import cache
from weft.data.sources import SOURCES
from weft.engines.workers import WorkerPool
from weft.errors import WeftError
from weft.plan import Plan
from weft.runs.folder import (
    RunFolder,
    accuracy_matrices,
    has_sites,
    read_images,
    read_measures,
    read_plan,
    read_summary,
    resume_command,
)
from weft.runs.result import Result
from weft.scenarios import splits

if TYPE_CHECKING:
    from weft.core.progress import Progress
    from weft.runs.session import Connect, Display
    from weft.scenarios import Scenario
    from weft.wire.ledger import Ledger

MEMORY = 1024  # megabytes of client states, up to MANY clients or if all of them work in every round
MANY = 20
MEMORY_FOR_MANY = 64  # beyond: few of them come again soon, and 100 clients of LeNet are to run within 2 GB
SHARE_FOR_ALL = 0.4  # of the memory that is free: what all need in every round is written and read as often, if on disk
SAVE_EVERY = 30.0  # seconds of work that a kill may cost


def run(
    plan: Plan,
    out: str | Path | None = None,
    *,
    workers: int | WorkerPool = 1,
    memory: int | None = None,
    save_every: float = SAVE_EVERY,
    display: Display | None = None,
) -> Result:
    """Run a plan in a new folder (`out`, or a new one under runs/) and return its result.

    `workers` processes share the clients (or those of an existing pool). `memory` megabytes hold their states; the rest
    goes to disk. A kill costs about `save_every` seconds of work. None of the three changes a bit of the result.
    """
    check_resources(workers, memory, save_every)
    scenario = scenarios.of(plan)  # a missing dataset is reported before there is a folder ...
    if ":" in plan.network:  # ... and so is a user's network that does not work
        networks.build(plan.network, plan.network_options, heads=(2,))
    folder = RunFolder.create(new_path(plan) if out is None else Path(out), plan, scenario.images)
    for line in scenario.warnings:
        folder.journal("warning", about=line)
    return _work(folder, scenario, workers, memory, save_every, display)


def resume(
    path: str | Path,
    *,
    workers: int | WorkerPool = 1,
    memory: int | None = None,
    save_every: float = SAVE_EVERY,
    display: Display | None = None,
    connect: Connect | None = None,
) -> Result:
    """Continue a run that was stopped; a finished one is left as it is.

    `connect` makes an engine other than the local one, such as that of a hub with sites on other machines.
    """
    check_resources(workers, memory, save_every)
    if connect is None and has_sites(Path(path)):
        raise WeftError(f"the clients of {path} are sites of a hub; use {resume_command(Path(path))}")
    folder = RunFolder.open(Path(path))
    try:
        if is_over(folder.path):
            folder.close()
            return Result(folder.path)
        check_images(folder.path)
        check_cut(folder.path)
        scenario = scenarios.of(folder.plan)
    except WeftError:
        folder.close()
        raise
    if (folder.path / "contents.json").exists():  # else a hub has made the folder, and nothing has started
        folder.journal("resumed")
    return _work(folder, scenario, workers, memory, save_every, display, connect)


def check_images(folder: Path) -> None:
    """These are the images that the run began with."""
    began = read_images(folder)
    own = began.keys() - SOURCES.keys()
    found = {name: cache.fingerprint(name) for name in began.keys() - own}
    if own:
        found |= scenarios.of(read_plan(folder)).images
    for name, mark in began.items():
        mark = splits.images_in(mark)
        if (here := found.get(name)) != mark:
            place = "are there now" if name in own else f"{cache.folder()} has"
            raise WeftError(
                f"the run in {folder} began with other images of {name} ({mark}) than {place} ({here}); "
                f"{'put them back' if name in own else 'name its cache with --data-dir'}, or run again in a new folder"
            )


def check_cut(folder: Path) -> None:
    """They are cut into train, test and valid as they were when the run began."""
    began = read_images(folder) or dict.fromkeys(scenarios.of(read_plan(folder)).datasets, "")  # else of an older weft
    for name, mark in began.items():
        if splits.has_other_split(name, mark):
            raise WeftError(
                f"the run in {folder} began with another cut of {name} into train, test and valid than this "
                "weft makes; run again in a new folder"
            )


def is_over(folder: Path) -> bool:
    """Is there a result? A damaged summary is none: it will be written again."""
    read_plan(folder)
    try:
        return read_summary(folder) is not None
    except WeftError:
        return False


def new_path(plan: Plan) -> Path:
    """runs/NAME-METHOD-sSEED, with a number behind it if that is taken."""
    name = f"{plan.name}-{registry.short(plan.method)}-s{plan.seed}"
    candidate, count = Path("runs") / name, 1
    while candidate.exists():
        count += 1
        candidate = Path("runs") / f"{name}-{count}"
    return candidate


def check_resources(workers: int | WorkerPool, memory: int | None = None, save_every: float = SAVE_EVERY) -> None:
    if isinstance(workers, int) and workers < 1:
        raise WeftError(f"workers is {workers}; choose 1 or more (this machine has {os.cpu_count()} cores)")
    if memory is not None and memory < 1:
        raise WeftError(f"memory is {memory} megabytes; choose 1 or more")
    if not save_every >= 0:  # not a number is not either
        raise WeftError(f"save_every is {save_every} seconds; choose 0 or more")


def default_memory(plan: Plan, free: int) -> int:
    """Megabytes of client states that stay in memory.

    >>> default_memory(Plan(), free=9000), default_memory(Plan(clients=100, clients_per_round=5), free=9000)
    (1024, 64)
    >>> default_memory(Plan(clients=100), free=9000), default_memory(Plan(clients=100), free=500)
    (3600, 1024)
    """
    if plan.clients <= MANY:
        return MEMORY
    if plan.clients_per_round == "all" or plan.train_unchosen:
        return max(MEMORY, int(SHARE_FOR_ALL * free))
    return MEMORY_FOR_MANY


def _work(
    folder: RunFolder,
    scenario: Scenario,
    workers: int | WorkerPool,
    memory: int | None,
    save_every: float,
    display: Display | None,
    connect: Connect | None = None,
) -> Result:
    if memory is None:
        memory = default_memory(folder.plan, psutil.virtual_memory().available >> 20)
    pool = workers if isinstance(workers, WorkerPool) else WorkerPool(workers) if workers > 1 else None
    try:
        # loads torch; by now the folder is on disk and the workers are starting
        from weft.core.client import Runtime
        from weft.runs.session import Session

        session = Session(folder, Runtime(folder.plan, scenario), pool, memory, save_every, display, connect)
        try:
            session.federation.run()
            session.save()
        finally:
            session.close()
        folder.write_summary(summarize(folder, session.progress, session.ledger))
        folder.journal("finished")
    finally:
        if pool is not None and pool is not workers:
            pool.close()
        folder.close()
    return Result(folder.path)


def summarize(folder: RunFolder, progress: Progress, ledger: Ledger) -> dict[str, Any]:
    """The result of a run: what was run, the measures, what was sent and what is kept. No path, host or date."""
    plan, clients = folder.plan, progress.clients
    matrices = accuracy_matrices(folder.path)
    measures = metrics.by_name(read_measures(folder.path))
    densities = [density for client in clients for density in client.density]
    validation = [accuracy for client in clients for accuracy in client.validation.values()]
    return {
        "plan": plan.name,
        "method": plan.method,
        "scenario": plan.scenario,
        "network": plan.network,
        "seed": plan.seed,
        "clients": plan.clients,
        "tasks": plan.tasks,
        "rounds_per_task": plan.rounds_per_task,
        "measured_model": plan.measured_model,
        "accuracy": metrics.over_clients(metrics.average_accuracy, matrices.values()),
        "validation_accuracy": fmean(validation) if validation else None,
        "forgetting": metrics.over_clients(metrics.forgetting, matrices.values()),
        "backward_transfer": metrics.over_clients(metrics.backward_transfer, matrices.values()),
        **({"metrics": measures} if plan.metrics is not None else {}),
        "accuracy_by_client": [metrics.average_accuracy(matrix) for matrix in matrices.values()],
        "adaptive_density": fmean(densities) if densities else None,
        "incidents": sum(client.incidents for client in clients),
        "traffic": ledger.totals(),
        "model_size_bytes": sum(client.size.get("bytes", 0) for client in clients),
        "model_size_paper_bytes": sum(client.size.get("paper_bytes", 0) for client in clients),
        "images_per_second": progress.images / progress.seconds if progress.seconds else None,
        "seconds": progress.seconds,
    }
