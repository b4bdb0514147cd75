"""From a plan to a result: create the folder, load torch, run the federation, write the summary."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from weft import metrics, networks, registry, scenarios
from weft.data import cache
from weft.data.sources import SOURCES
from weft.engines.workers import WorkerPool
from weft.errors import WeftError
from weft.plan import Plan
from weft.runs import folder as folders
from weft.runs.code import check_code
from weft.runs.folder import RunFolder, has_sites, resume_command
from weft.runs.result import Result
from weft.scenarios import splits

if TYPE_CHECKING:
    from weft.core.progress import Progress
    from weft.runs.session import Connect
    from weft.scenarios import Scenario
    from weft.wire.ledger import Ledger

MEMORY = 1024  # megabytes of client states, for up to MANY clients or if all of them train in every round
MANY = 20
MEMORY_FOR_MANY = 64  # for more clients: few are selected again soon, and 100 clients of LeNet should fit in 2 GB
FREE_SHARE = 0.4  # of free memory, if all of many clients train in every round: on disk, all would be read each time
SAVE_EVERY = 30.0  # seconds of work that a kill may cost


class Display(Protocol):
    """Shows a run while it is in progress."""

    def started(self, plan: Plan, done: int, total: int, estimate: float) -> None: ...
    def answered(self, client: int, task: int, round_index: int, fields: dict[str, Any]) -> None: ...
    def warned(self, text: str) -> None: ...


def run(
    plan: Plan | str | Path,
    out: str | Path | None = None,
    *,
    workers: int | WorkerPool = 1,
    memory: int | None = None,
    save_every: float = SAVE_EVERY,
    display: Display | None = None,
    force: bool = False,
) -> Result:
    """Run a plan in a new folder (`out`, or a new one under runs/) and return its result.

    `plan` may also be a plan file or the name of a ready plan: `weft.run("demo")`.
    `workers` processes, or those of a pool, share the clients. `memory` megabytes hold client states; the rest is on
    disk. A kill costs about `save_every` seconds of work. These three do not change a bit of the result. `force`
    replaces a run that is in the folder, as soon as a round of the new one is done. A run that fails before leaves no
    folder.
    """
    check_resources(workers, memory, save_every)
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    scenario = scenarios.of(plan)  # before the folder is created: report a missing dataset ...
    if ":" in plan.network:  # ... or a user-defined network that fails
        networks.build(plan.network, plan.network_options, heads=(2,))
    folder = RunFolder.create(new_path(plan) if out is None else Path(out), plan, scenario.images, force)
    for line in scenario.warnings:
        folder.journal("warning", about=line)
    try:
        return _run(folder, scenario, workers, memory, save_every, display)
    except Exception:
        if not folder.started:
            folder.remove()
        raise
    except KeyboardInterrupt:  # what can be resumed is kept
        if folder.replaced is None:
            raise
        folder.remove()
        raise KeyboardInterrupt(f"no round was done, and {folder.path} holds the former run") from None


def resume(
    path: str | Path,
    *,
    workers: int | WorkerPool = 1,
    memory: int | None = None,
    save_every: float = SAVE_EVERY,
    display: Display | None = None,
    connect: Connect | None = None,
) -> Result:
    """Resume a run that was stopped, and return its result. A finished run is not changed.

    `connect` creates an engine other than the local one, such as a hub's engine for sites on other machines.
    """
    check_resources(workers, memory, save_every)
    if connect is None and has_sites(Path(path)):
        raise WeftError(f"the clients of {path} are sites of a hub; use {resume_command(Path(path))}")
    check_code(Path(path))
    folder = RunFolder.open(Path(path))
    try:
        if is_over(folder.path):
            folder.close()
            return Result(folder.path)
        check_images(folder.path)
        scenario = scenarios.of(folder.plan)
    except WeftError:
        folder.close()
        raise
    if (folder.path / "contents.json").exists():  # otherwise a hub has created the folder and nothing has started
        folder.journal("resumed")
    return _run(folder, scenario, workers, memory, save_every, display, connect)


def check_images(path: Path, *, same_splits: bool = True) -> None:
    """Raise a WeftError unless the images, and their splits, are those with which the run started."""
    recorded = folders.read_images(path)
    current = {name: cache.fingerprint(name) for name in recorded.keys() & SOURCES.keys()}
    if recorded.keys() - SOURCES.keys():
        current = scenarios.of(folders.read_plan(path)).images | current
    for name, fingerprint in recorded.items():
        images, now = splits.images_in(fingerprint), current.get(name)
        if now != images:
            where, remedy = "there are now", "restore them"
            if name in SOURCES:
                where, remedy = f"{cache.folder()} has", "choose their cache with --data-dir"
            raise WeftError(
                f"the run in {path} started with other images of {name} ({images}) than {where} ({now}); "
                f"{remedy}, or run again in a new folder"
            )
        if same_splits and splits.has_other_split(name, fingerprint):
            raise WeftError(
                f"the run in {path} started with other train, test and valid splits of {name} than this version of "
                "weft makes; run again in a new folder"
            )


def is_over(path: Path) -> bool:
    """Whether there is a result. A damaged summary does not count: a resumed run writes it again."""
    folders.read_plan(path)
    try:
        return folders.load_summary(path) is not None
    except WeftError:
        return False


def new_path(plan: Plan) -> Path:
    """runs/NAME-METHOD-sSEED, followed by a number if that exists."""
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
    if not save_every >= 0:  # also rejects NaN
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
        return max(MEMORY, int(FREE_SHARE * free))
    return MEMORY_FOR_MANY


def _run(
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
        # these load torch; the folder is on disk and the workers are starting by now
        from weft.core.client import Runtime
        from weft.runs.session import Session, one_thread

        with one_thread():
            session = Session(folder, Runtime(folder.plan, scenario), pool, memory, save_every, display, connect)
            with contextlib.closing(session):
                session.federation.run()
                session.save()
        if not session.progress.images:
            raise WeftError(f"nothing was trained: no client's reply could be used; weft show {folder.path} lists why")
        folder.write_summary(summarize(folder, session.progress, session.ledger))
        folder.journal("finished")
    finally:
        if pool is not None and pool is not workers:
            pool.close()
        folder.close()
    return Result(folder.path)


def summarize(folder: RunFolder, progress: Progress, ledger: Ledger) -> dict[str, Any]:
    """The summary of a run: plan, measures, traffic and model size; without paths, hosts or dates."""
    plan, clients = folder.plan, progress.clients
    matrices = folders.accuracy_matrices(folder.path).values()
    on_validation = folders.accuracy_matrices(folder.path, "validation.csv").values()
    densities = [density for client in clients for density in client.density]
    validation = [accuracy for client in clients for accuracy in client.validation.values()]
    keys = ("method", "scenario", "network", "seed", "clients", "tasks", "rounds_per_task", "measured_model")
    measures = {"metrics": metrics.by_name(folders.read_measures(folder.path))} if plan.metrics is not None else {}
    return {
        "plan": plan.name,
        **{key: getattr(plan, key) for key in keys},
        "accuracy": metrics.over_clients(metrics.average_accuracy, matrices),
        "validation_accuracy": fmean(validation) if validation else None,
        "forgetting": metrics.over_clients(metrics.forgetting, matrices),
        "backward_transfer": metrics.over_clients(metrics.backward_transfer, matrices),
        "validation": {  # after the last task, as above; `validation_accuracy` is taken at each task's end
            "accuracy": metrics.over_clients(metrics.average_accuracy, on_validation),
            "forgetting": metrics.over_clients(metrics.forgetting, on_validation),
        },
        **measures,
        "accuracy_by_client": [metrics.average_accuracy(matrix) for matrix in matrices],
        "adaptive_density": fmean(densities) if densities else None,
        "incidents": sum(client.incidents for client in clients),
        "rounds_without_update": progress.rounds_without_update,
        "traffic": ledger.totals(),
        "model_size_bytes": sum(client.size.get("bytes", 0) for client in clients),
        "model_size_paper_bytes": sum(client.size.get("paper_bytes", 0) for client in clients),
        "images_per_second": progress.images / progress.seconds if progress.seconds else None,
        "seconds": progress.seconds,
    }
