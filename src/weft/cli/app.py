"""The command line. Nothing here learns or computes: it reads words, calls the library, and shows what comes back.

Errors that a person can mend go to stderr in one line, with exit code 2. With --json, stdout holds JSON alone.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import click
import typer
import typer.core
from rich.padding import Padding

from weft import repro, scenarios
from weft.cli import bench, data, export, hub, listing, report, site
from weft.cli.common import AsJson, DataDir, ProgressDisplay, notes, out, print_json, say
from weft.engines.workers import Crew
from weft.errors import WeftError, nearest
from weft.plan import Plan, ready_plans
from weft.report import screens
from weft.repro.outcome import outcome_of
from weft.repro.runner import Request, reproduce
from weft.runs.folder import accuracy_matrices, read_measures, read_plan, read_rows, read_summary, way_on
from weft.runs.run import SAVE_EVERY, fresh_folder, is_over, resume, run

MOST_WORKERS = 8  # by default: each takes about 300 MB for torch alone
DEMO_METHODS = ("fedweit", "fedavg", "stl")

typer.core.HAS_RICH = False  # typer 0.20 escapes brackets for rich in help that rich does not show: \[required]
app = typer.Typer(
    name="weft",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Federated continual learning: many clients, each learning its own tasks, that help one another.\n\n"
    "Start with `weft demo`. Then: weft run demo method=fedavg clients=3 seed=1",
)
app.add_typer(data.app, name="data")
app.add_typer(hub.app, name="hub")
app.add_typer(site.app, name="site")
app.command("bench")(bench.bench_command)
report.add_to(app)
export.add_to(app)

Words = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Plan keys, such as seed=5.")]
Workers = Annotated[int | None, typer.Option(help="Processes that share the clients; the result is the same for any.")]
Memory = Annotated[
    int | None,
    typer.Option(help="Megabytes of client states kept in memory; else by the number of clients (docs/plans.md)."),
]
SaveEvery = Annotated[float, typer.Option(min=0, help="Seconds between checkpoints: what a kill may cost.")]


class Kind(StrEnum):
    methods = "methods"
    scenarios = "scenarios"
    networks = "networks"
    plans = "plans"
    tables = "tables"
    figures = "figures"


class Scale(StrEnum):
    paper = "paper"
    small = "small"


@app.callback(invoke_without_command=True)
def any_command(
    version: Annotated[bool, typer.Option("--version", help="Say which weft this is.", is_eager=True)] = False,
) -> None:
    if version:
        sys.stdout.write(f"weft {metadata.version('weft')}\n")
        raise typer.Exit


@app.command("demo")
def demo_command(
    seed: Annotated[int | None, typer.Option(help="Another seed than the plan's.")] = None,
    workers: Workers = None,
) -> None:
    """FedWeIT, FedAvg and single task learning on drawn images: one table in about a minute, no download."""
    words = [] if seed is None else [f"seed={seed}"]
    plans = [Plan.load(ready_plans()["demo"], [f"method={name}", *words]) for name in DEMO_METHODS]
    folders = [fresh_folder(plan) for plan in plans]
    with ProgressDisplay() as bars, _crew(workers, plans[0]) as crew:
        results = [
            _stoppable(folder, run, plan, folder, workers=crew, screen=bars)
            for plan, folder in zip(plans, folders, strict=True)
        ]
    out.print(screens.comparison([result.summary for result in results]))
    for result in results:
        say(f"{result.summary['method']:>8}: {result.folder}")
    say(f"\nweft show {folders[0]}   tells more about a run")
    say(f"\nthe page to look at: {report.write_page(folders, Path('demo.html'))}")


@app.command("run")
def run_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or a name of `weft list plans`.")],
    words: Words = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="The new run folder; else under runs/.")] = None,
    workers: Workers = None,
    seeds: Annotated[int, typer.Option(min=1, help="Run so many seeds, counting up from the plan's.")] = 1,
    memory: Memory = None,
    save_every: SaveEvery = SAVE_EVERY,
    data_dir: DataDir = None,
) -> None:
    """Run a plan: weft run demo method=fedavg seed=5 --workers 2

    Any key of the plan can be changed by KEY=VALUE; options of the method are method.NAME=VALUE.
    """
    first = Plan.load(plan, words or [])
    results = []
    with ProgressDisplay() as bars, _crew(workers, first) as crew:
        for place in range(seeds):
            this = first if seeds == 1 else Plan.load(plan, words or [], seed=first.seed + place)
            folder = out_folder or fresh_folder(this)
            if seeds > 1 and out_folder:
                folder = out_folder / f"s{this.seed}"
            options = {"workers": crew, "memory": memory, "save_every": save_every, "screen": bars}
            results.append(_stoppable(folder, run, this, folder, **options))
    out.print(screens.comparison([result.summary for result in results], mean=screens.plus_minus(out)))
    for result in results:
        say(str(result.folder))


@app.command("resume")
def resume_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that was stopped.")],
    workers: Workers = None,
    memory: Memory = None,
    save_every: SaveEvery = SAVE_EVERY,
    data_dir: DataDir = None,
) -> None:
    """Go on with a run that was stopped, killed or crashed; the result is the same as without the stop."""
    if is_over(folder):
        say(f"the run in {folder} is over; nothing to do", notes)
    with ProgressDisplay() as bars, _crew(workers, read_plan(folder)) as crew:
        options = {"workers": crew, "memory": memory, "save_every": save_every, "screen": bars}
        result = _stoppable(folder, resume, folder, **options)
    out.print(screens.comparison([result.summary]))


@app.command("show")
def show_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR|SCENARIO", help="A run folder, or a scenario's name.")],
    words: Words = None,
    picture: Annotated[Path | None, typer.Option(help="A PNG file for samples of a scenario.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """What a run did: its result, every client's accuracy matrix, what crossed the wire, who helped whom.

    Of a scenario: what each client learns in which order. weft show glyphs clients=3 --picture glyphs.png
    """
    if not folder.is_dir() and (scenarios.is_known(str(folder)) or str(folder) in ready_plans()):
        _show_scenario(str(folder), words or [], picture, as_json)
        return
    if words or picture:
        given = " ".join([*(words or []), *(["--picture"] if picture else [])])
        raise WeftError(f"{folder} is no scenario, and {given} is for one of those: {', '.join(scenarios.SCENARIOS)}")
    if not folder.exists():
        known = {*scenarios.SCENARIOS, *ready_plans()}
        raise WeftError(f"{folder} is not a run folder, nor a scenario or plan; {nearest(str(folder), known)}")
    from weft.wire.ledger import Entry, by

    summary = read_summary(folder)
    if as_json:
        if summary is None:
            raise WeftError(f"the run in {folder} is not over; {way_on(folder)} goes on with it")
        print_json(summary)
        return
    if summary is None:
        say(f"not over yet; {way_on(folder)} goes on with it if nothing is running\n")
    else:
        out.print(screens.comparison([summary]))
    for client, rows in accuracy_matrices(folder).items():
        out.print(screens.matrix(client, rows))
    if measures := read_measures(folder):
        out.print(screens.measures(measures))
    out.print(screens.traffic(by(map(Entry.from_row, read_rows(folder, "ledger.csv")), "direction", "tensor")))
    for part in report.more_about(folder, out):
        out.print(part)


def _show_scenario(name: str, words: list[str], picture: Path | None, as_json: bool) -> None:
    """By the ready plan of that name, if there is one: it knows how many clients and tasks are usual."""
    from weft.scenarios import preview

    ready = ready_plans().get(name)
    plan = Plan.load(ready, words) if ready else Plan.merge({"scenario": name}, words)
    scenario = scenarios.of(plan)
    if picture is not None:
        preview.draw_sheet(scenario, picture)
    if as_json:
        print_json(preview.contents(scenario))
        return
    out.print(screens.scenario(preview.contents(scenario)))
    if picture is not None:
        say(str(picture))


@app.command("compare")
def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")],
    as_json: AsJson = False,
) -> None:
    """Several runs in one table."""
    found = {folder: read_summary(folder) for folder in folders}
    waiting = [
        f"the run in {folder} is not over; {way_on(folder)} goes on with it" for folder in folders if not found[folder]
    ]
    over = {folder: summary for folder, summary in found.items() if summary}
    if not over:
        raise WeftError(waiting[0])
    for line in waiting:
        say(line, notes)
    summaries = list(over.values())
    if as_json:
        print_json(summaries)
    else:
        out.print(screens.comparison(summaries, [folder.name for folder in over]))


@app.command("repro")
def repro_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A table or a figure; without it all are listed.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds; else as many as it asks for.")] = None,
    first_seed: Annotated[int | None, typer.Option(min=0, help="The first of them; else its own.")] = None,
    only: Annotated[
        str | None, typer.Option(metavar="METHOD,...", help="These rows alone, by label or method.")
    ] = None,
    scale: Annotated[
        Scale | None, typer.Option(help="small: 5 clients, 5 tasks, 8 rounds; else the paper's size.")
    ] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Where the results go.")] = Path("results"),
    runs: Annotated[Path | None, typer.Option(help="Where the run folders go; else runs/repro/NAME.")] = None,
    workers: Workers = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Make a table or a figure: run what is missing, go on with what was stopped, and write the results.

    A table is NAME.csv, .md and .tex, a figure NAME.csv, .md, .png and .svg. They are written after each run; the same
    command again goes on where it was stopped. Without a name all of them are listed.
    """
    if name is None:
        _list_repro(as_json)
        return
    experiment = repro.load(name, None if scale is None else scale.value)
    rows = experiment.choose(only if only is None else [word.strip() for word in only.split(",")])
    first = experiment.first_seed if first_seed is None else first_seed
    chosen = range(first, first + (seeds or experiment.seeds))
    place = runs or Path("runs", "repro", experiment.stem)
    request = Request(experiment, rows, chosen, place, elsewhere=None if runs else place.parent)
    count = _count(workers, max(job.plan.clients for job in request.jobs))
    outcome = outcome_of(experiment, out_folder)
    try:
        with ProgressDisplay() as bars:
            results, files = reproduce(request, outcome.desk, count, bars, lambda line: say(line, notes))
    except KeyboardInterrupt:
        command = shlex.join(["weft", *sys.argv[1:]])
        saved = f"what is older than {SAVE_EVERY:g} seconds is saved"
        say(f"\nstopped; {saved}, and the same command goes on with it: {command}", notes)
        raise typer.Exit(130) from None
    if as_json:
        print_json(outcome.as_object(results))
    else:
        out.print(outcome.shown(results, screens.plus_minus(out)), highlight=False, markup=False)
        for file in files:
            say(str(file))
    missing = {**results.failures, **results.busy}
    for (label, seed), said in sorted(missing.items()):
        say(f"weft: {label} s{seed} failed: {said}", notes)
    if missing:
        raise typer.Exit(1)


def _list_repro(as_json: bool) -> None:
    entries = [*listing.list_tables(), *listing.list_figures()]
    if as_json:
        print_json(entries)
        return
    out.print(screens.listing(entries, ["name", "title", "plan"]))
    say("weft repro NAME makes one, at the paper's scale; --scale small makes a small one")


@app.command("list")
def list_command(
    kind: Annotated[Kind, typer.Argument(metavar="|".join(Kind), help="What to list.")],
    as_json: AsJson = False,
) -> None:
    """What there is to choose from, with the options of each."""
    entries = listing.LISTS[kind]()
    if as_json:
        print_json(entries)
        return
    columns = [column for column in entries[0] if column not in listing.BELOW]
    out.print(screens.listing(entries, columns))
    for entry in entries:
        if lines := listing.below(kind, entry):
            out.print(f"\n[bold]{entry['name']}[/] {lines[0]}", highlight=False)
        for line in lines[1:]:
            out.print(Padding(line, (0, 0, 0, 2)), highlight=False, markup=False)


@contextmanager
def _crew(wanted: int | None, plan: Plan) -> Iterator[int | Crew]:
    """The workers of a command, which serve all its runs; one worker is this process itself."""
    count = _count(wanted, plan.clients)
    if count <= 1:
        yield count
        return
    crew = Crew(count)
    try:
        yield crew
    finally:
        crew.close()


def _count(wanted: int | None, clients: int) -> int:
    count = wanted if wanted is not None else max(1, min(os.cpu_count() or 1, MOST_WORKERS))
    return min(count, clients)  # more would have nothing to do


def _stoppable(folder: Path, act: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return act(*arguments, **options)
    except KeyboardInterrupt:
        say(f"\nstopped; {way_on(folder)} goes on with it", notes)
        raise typer.Exit(130) from None


def main() -> None:
    """The `weft` command."""
    try:
        code = app(standalone_mode=False)
    except WeftError as problem:
        _fail(str(problem))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        sys.exit(2)
    except click.ClickException as error:
        _fail(error.format_message())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: `weft list ... | head`
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(text: str) -> None:
    sys.stderr.write(f"weft: {' '.join(text.split())}\n")
    sys.exit(2)
