"""From a plan to a summary: first the folder, then torch, then the loop."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from weft import metrics, networks, registry, scenarios
from weft.data import cache
from weft.data.sources import SOURCES
from weft.engines.workers import Crew
from weft.errors import WeftError
from weft.plan import Plan
from weft.runs.folder import (
    Record,
    accuracy_matrices,
    has_sites,
    read_images,
    read_measures,
    read_plan,
    read_summary,
    way_on,
)
from weft.runs.result import Result
from weft.scenarios import splits

if TYPE_CHECKING:
    from weft.runs.session import Connect, Screen, Session

MEMORY = 1024  # megabytes of client states, up to MANY clients or if all of them work in every round
MANY = 20
MEMORY_FOR_MANY = 64  # beyond: few of them come again soon, and 100 clients of LeNet are to run within 2 GB
SHARE_FOR_ALL = 0.4  # of the memory that is free: what all need in every round is written and read as often, if on disk
SAVE_EVERY = 30.0  # seconds of work that a kill may cost


def run(
    plan: Plan,
    out: str | Path | None = None,
    *,
    workers: int | Crew = 1,
    memory: int | None = None,
    save_every: float = SAVE_EVERY,
    screen: Screen | None = None,
) -> Result:
    """Run a plan in a new folder (`out`, or a fresh one under runs/) and give its result.

    `workers` processes share the clients (or those of a crew that is there already); `memory` megabytes hold their
    states, and what is beyond goes to disk; a kill costs about `save_every` seconds of work. None of the three changes
    a bit of the result.
    """
    check_resources(workers, memory, save_every)
    scenario = scenarios.of(plan)  # a dataset that is missing is told before there is a folder ...
    if ":" in plan.network:  # ... and so is a network of somebody's own that does not work
        networks.build(plan.network, plan.network_options, heads=(2,))
    record = Record.create(fresh_folder(plan) if out is None else Path(out), plan, scenario.images)
    for line in scenario.warnings:
        record.journal("warning", about=line)
    return _work(record, workers, memory, save_every, screen)


def resume(
    folder: str | Path,
    *,
    workers: int | Crew = 1,
    memory: int | None = None,
    save_every: float = SAVE_EVERY,
    screen: Screen | None = None,
    connect: Connect | None = None,
) -> Result:
    """Go on with a run that was stopped; one that is over is left as it is.

    `connect` gives another engine than the local one, such as that of a hub with sites on other machines.
    """
    check_resources(workers, memory, save_every)
    if connect is None and has_sites(Path(folder)):
        raise WeftError(f"the clients of {folder} are sites of a hub; {way_on(Path(folder))} goes on with it")
    record = Record.open(Path(folder))
    if is_over(record.folder):
        record.close()
        return Result(record.folder)
    try:
        check_images(record.folder)
        check_cut(record.folder)
    except WeftError:
        record.close()
        raise
    if (record.folder / "contents.json").exists():  # else a hub has made the folder, and nobody has begun
        record.journal("resumed")
    return _work(record, workers, memory, save_every, screen, connect)


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


def fresh_folder(plan: Plan) -> Path:
    """runs/NAME-METHOD-sSEED, with a number behind it if that is taken."""
    name = f"{plan.name}-{registry.short(plan.method)}-s{plan.seed}"
    candidate, count = Path("runs") / name, 1
    while candidate.exists():
        count += 1
        candidate = Path("runs") / f"{name}-{count}"
    return candidate


def check_resources(workers: int | Crew, memory: int | None = None, save_every: float = SAVE_EVERY) -> None:
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


def free_megabytes() -> int:
    """What the system could give without swapping; 0 where it does not say."""
    try:
        words = [line.split() for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return 0
    return sum(int(line[1]) for line in words if line[0] == "MemAvailable:") // 1024


def _work(
    record: Record,
    workers: int | Crew,
    memory: int | None,
    save_every: float,
    screen: Screen | None,
    connect: Connect | None = None,
) -> Result:
    if memory is None:
        memory = default_memory(record.plan, free_megabytes())
    crew = workers if isinstance(workers, Crew) else Crew(workers) if workers > 1 else None
    try:
        from weft.runs.session import (
            Session,  # loads torch; by now the folder is on disk and the workers are on their way
        )

        session = Session(record, crew, memory, save_every, screen, connect)
        try:
            session.federation.run()
            session.save()
        finally:
            session.close()
        record.write_summary(summarise(record, session))
        record.journal("finished")
    finally:
        if crew is not None and crew is not workers:
            crew.close()
        record.close()
    return Result(record.folder)


def summarise(record: Record, session: Session) -> dict[str, Any]:
    """The result of a run: what was run, the measures, what was sent and what is kept. No path, host or date."""
    plan, progress, ledger = record.plan, session.progress, session.federation.ledger
    matrices = accuracy_matrices(record.folder)
    measures = metrics.by_name(read_measures(record.folder))
    densities = [density for of_client in progress.densities.values() for density in of_client]
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
        "validation_accuracy": fmean(progress.validation.values()) if progress.validation else None,
        "forgetting": metrics.over_clients(metrics.forgetting, matrices.values()),
        "backward_transfer": metrics.over_clients(metrics.backward_transfer, matrices.values()),
        **({"metrics": measures} if plan.metrics is not None else {}),
        "accuracy_by_client": [metrics.average_accuracy(matrix) for matrix in matrices.values()],
        "adaptive_density": fmean(densities) if densities else None,
        "incidents": sum(progress.incidents.values()),
        "traffic": ledger.totals(),
        "model_size_bytes": sum(size["bytes"] for size in progress.sizes.values()),
        "model_size_paper_bytes": sum(size["paper_bytes"] for size in progress.sizes.values()),
        "images_per_second": progress.images / progress.seconds if progress.seconds else None,
        "seconds": progress.seconds,
    }
