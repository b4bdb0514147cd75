"""`weft demo`, `weft run` and `weft resume`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from weft import registry
from weft.cli.common import DataDir, Overrides, Workers, interruptible, notes, out, say, say_incidents, worker_count
from weft.cli.progress import ProgressDisplay
from weft.cli.report import write_page
from weft.engines.workers import WorkerPool
from weft.errors import WeftError
from weft.plan import Plan, ready_plans
from weft.report import terminal
from weft.report.text import percent
from weft.runs.folder import read_keys, read_plan, read_summary
from weft.runs.folder import resume_command as command_to_resume
from weft.runs.result import Result
from weft.runs.run import SAVE_EVERY, is_over, new_path, resume, run

DEMO_METHODS = ("class-experts", "fedweit", "fedavg", "stl")

Memory = Annotated[
    int | None,
    typer.Option(help="Megabytes of client state kept in memory. Default: by the number of clients (docs/plans.md)."),
]
SaveEvery = Annotated[float, typer.Option(min=0, help="Seconds between checkpoints: the most work a kill can lose.")]


def demo_command(
    seed: Annotated[int | None, typer.Option(help="Replaces the plan's seed.")] = None, workers: Workers = None
) -> None:
    """Compare sharing by class, FedWeIT, FedAvg and single-task learning on drawn images: two minutes, no download."""
    overrides = [] if seed is None else [f"seed={seed}"]
    plans = [Plan.load(ready_plans()["demo"], [f"method={name}", *overrides]) for name in DEMO_METHODS]
    results = _run_all([(plan, new_path(plan)) for plan in plans], workers)
    out.print(terminal.comparison([result.summary for result in results]))
    for result in results:
        say(f"{result.summary['method']:>13}: {result.folder}")
    say(f"\nmore about a run: weft show {results[0].folder}")
    say(f"report for a browser: {write_page([result.folder for result in results], Path('demo.html'))}")


def run_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or a name of `weft list plans`.")],
    words: Overrides = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The new run folder. Default: under runs/.")] = None,
    workers: Workers = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds to run, counting up from the plan's.")] = 1,
    memory: Memory = None,
    save_every: SaveEvery = SAVE_EVERY,
    data_dir: DataDir = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a run that is in the folder.")] = False,
) -> None:
    """Run a plan: weft run demo method=fedavg seed=5 --workers 2

    KEY=VALUE changes a key of the plan; method.NAME=VALUE sets an option of the method.
    """
    first = Plan.load(plan, words or [])
    plans = [first, *(Plan.load(plan, words or [], seed=first.seed + index) for index in range(1, seeds))]
    folders = [out_folder] if seeds == 1 else [out_folder and out_folder / f"s{one.seed}" for one in plans]
    jobs = [(one, folder or new_path(one)) for one, folder in zip(plans, folders, strict=True)]
    for one in (path for _, path in jobs if force and (path / "run.json").exists()):
        say(f"--force: {description(one)} is replaced", notes)
    results = _run_all(jobs, workers, memory=memory, save_every=save_every, force=force)
    out.print(terminal.comparison([result.summary for result in results], mean=terminal.plus_minus(out)))
    for result in results:
        say(str(result.folder))
        say_incidents(result)


def description(folder: Path) -> str:
    """What is in a run folder, in words."""
    try:
        keys, summary = read_keys(folder), read_summary(folder)
    except WeftError:
        return f"{folder} (a run that cannot be read)"
    state = "not finished" if summary is None else f"finished, accuracy {percent(summary['accuracy'])}"
    return f"{folder} ({registry.short(str(keys.get('method')))}, seed {keys.get('seed')}, {state})"


def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that was stopped.")],
    workers: Workers = None,
    memory: Memory = None,
    save_every: SaveEvery = SAVE_EVERY,
    data_dir: DataDir = None,
) -> None:
    """Resume a run that was stopped, killed or crashed; the result is the same as without the stop."""
    if is_over(folder):
        say(f"the run in {folder} is finished; nothing to do", notes)
    with ProgressDisplay() as display, worker_pool(workers, read_plan(folder).clients) as pool, _stoppable(folder):
        result = resume(folder, workers=pool, memory=memory, save_every=save_every, display=display)
    out.print(terminal.comparison([result.summary]))
    say_incidents(result)


def _run_all(jobs: list[tuple[Plan, Path]], workers: int | None, **options: Any) -> list[Result]:
    results = []
    with ProgressDisplay() as display, worker_pool(workers, jobs[0][0].clients) as pool:
        for plan, folder in jobs:
            with _stoppable(folder):
                results.append(run(plan, folder, workers=pool, display=display, **options))
    return results


def _stoppable(folder: Path) -> Any:
    return interruptible(lambda: f"resume with: {command_to_resume(folder)}")


@contextmanager
def worker_pool(wanted: int | None, clients: int) -> Iterator[int | WorkerPool]:
    """Worker processes that serve all runs of a command; one worker is this process."""
    count = worker_count(wanted, clients)
    if count <= 1:
        yield count
        return
    pool = WorkerPool(count)
    try:
        yield pool
    finally:
        pool.close()
