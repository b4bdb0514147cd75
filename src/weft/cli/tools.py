"""`weft repro`, `bench`, `export` and `predict`. Each imports what it needs when it is called."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft import repro
from weft.cli.common import AsJson, DataDir, Workers, interruptible, notes, out, print_json, say, worker_count
from weft.cli.progress import ProgressDisplay
from weft.cli.show import experiments
from weft.errors import WeftError
from weft.lazy import np
from weft.plan import named_code
from weft.report import terminal
from weft.repro import output
from weft.repro.runner import Request, reproduce
from weft.runs.run import SAVE_EVERY

if TYPE_CHECKING:
    from weft.runs.model import ExportedTask

# ---- weft repro


class Scale(StrEnum):
    paper = "paper"
    small = "small"


def repro_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A table, a figure or a TOML file. Default: list all.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds. Default: set by the experiment.")] = None,
    first_seed: Annotated[
        int | None, typer.Option(min=0, help="The first seed. Default: set by the experiment.")
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="METHOD,...", help="Only these rows, by label or method.")] = None,
    scale: Annotated[
        Scale | None, typer.Option(help="small: 5 clients, 5 tasks, 8 rounds. Default: the paper's scale.")
    ] = None,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the results.")] = Path("results"),
    runs: Annotated[Path | None, typer.Option(help="Folder for the run folders. Default: runs/repro/NAME.")] = None,
    workers: Workers = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Reproduce a table or a figure: run what is missing, resume what was stopped, write the results.

    A table is NAME.csv, .md and .tex, a figure NAME.csv, .md, .png and .svg. They are written after each run; repeat
    the command to resume after a stop. Without a name, all are listed.
    """
    if name is None:
        entries = experiments(repro.ready_experiments())
        if as_json:
            print_json(entries)
            return
        out.print(terminal.listing(entries, ["name", "title", "plan"]))
        say("weft repro NAME reproduces one at the paper's scale; --scale small is quicker")
        return
    experiment = repro.load(name, None if scale is None else scale.value)
    rows = experiment.choose(only if only is None else [word.strip() for word in only.split(",")])
    first = experiment.first_seed if first_seed is None else first_seed
    chosen = range(first, first + (seeds or experiment.seeds))
    place = runs or Path("runs", "repro", experiment.stem)
    request = Request(experiment, rows, chosen, place, elsewhere=None if runs else place.parent)
    count = worker_count(workers, max(job.plan.clients for job in request.jobs))
    with interruptible(_repeat), ProgressDisplay() as display:
        results, files = reproduce(request, out_folder, count, display, lambda line: say(line, notes))
    if as_json:
        print_json(output.as_object(results))
    else:
        out.print(output.for_terminal(results, terminal.plus_minus(out)), highlight=False, markup=False)
        for file in files:
            say(str(file))
    missing = {**results.failures, **results.locked}
    for (label, seed), reason in sorted(missing.items()):
        say(f"weft: {label} s{seed} failed: {reason}", notes)
    if missing:
        raise typer.Exit(1)


def _repeat() -> str:
    command = shlex.join(["weft", *sys.argv[1:]])
    return f"all but the last {SAVE_EVERY:g} seconds is saved; repeat the command to resume: {command}"


# ---- weft bench


def bench_command(
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="All ratios from fewer repetitions, in some minutes.")] = False,
    peers: Annotated[bool, typer.Option("--peers", help="Also Flower's simulation (run `make peers` first).")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with code 1 if a threshold is missed.")] = False,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Write bench.json, .md and -growth.png there.")
    ] = None,
) -> None:
    """Measure this machine: training steps, the engine, server, wire and memory, as ratios within one run.

    Run nothing else meanwhile; it takes a quarter of an hour or more, some minutes with --quick.
    """
    from weft.benchmarks.report import TITLES, Files, tables, to_terminal
    from weft.benchmarks.suite import bench

    files = Files(out_folder)
    try:
        with interruptible(files.describe_partial), ProgressDisplay() as display:
            found = bench(quick, peers, lambda part, *count: display.part(TITLES[part], *count), files.save_partial)
    except Exception:
        if files.parts:
            say(files.describe_partial(), notes)
        raise
    written = files.write(found)
    if as_json:
        print_json(found)
    else:
        for table in tables(found):
            out.print(to_terminal(table))
        for file in written:
            say(str(file))
    if check and any(bar["met"] is False for bar in found["bars"]):
        raise typer.Exit(1)


# ---- weft export, weft predict


class ModelFormat(StrEnum):
    safetensors = "safetensors"
    onnx = "onnx"


def export_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.")],
    client: Annotated[int, typer.Option(min=0, help="Index of the client.")] = 0,
    task: Annotated[int, typer.Option(min=0, help="Index of the task.")] = 0,
    kind: Annotated[ModelFormat, typer.Option("--format", help="File format.")] = ModelFormat.onnx,
    file: Annotated[Path | None, typer.Option("--out", help="The file. Default: client0-task0.onnx.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="You know who made DIR: its plan may name code.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Export the model of one task as one file that needs no weft: weft export runs/demo-fedweit-s0 --client 0 --task 1

    Input: images as bytes; output: logits and probabilities. The file is checked against the run on test images.
    """
    if not trust and (folder / "plan.toml").is_file() and (code := named_code(folder / "plan.toml")):
        raise WeftError(f"{folder} names code to run ({', '.join(code)}): add --trust if you trust its author")
    from weft.runs.model import task_from_run

    write_model(task_from_run(folder, client, task), file or Path(f"client{client}-task{task}.{kind.value}"), kind)


def write_model(exported: ExportedTask, path: Path, kind: ModelFormat) -> None:
    from weft.export.files import write

    difference = write(exported, path, kind.value)
    names = ", ".join(exported.metadata["classes"])
    say(f"{path}: {exported.metadata['task']} ({names}); checked on {len(exported.images)} test images")
    say(f"largest difference of a logit: {difference:.1e}; try it with: weft predict {path} IMAGE...")


def predict_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by weft export.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files of any size.")],
    trust: Annotated[bool, typer.Option("--trust", help="You know who wrote FILE: it may name code to run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Classify images with an exported model: weft predict client0-task0.onnx a.png b.png"""
    from weft.data.images import read_image  # the way the images of a folder are read for training
    from weft.export.files import open_model

    predict, facts = open_model(file, trusted=trust)
    _, predictions = predict(np.stack([read_image(path, facts["image"][0], facts["bits"]) for path in images]))
    found = [dict(zip(facts["classes"], map(float, row), strict=True)) for row in predictions]
    if as_json:
        print_json([{"image": str(path), facts["predictions"]: row} for path, row in zip(images, found, strict=True)])
        return
    for path, row in zip(images, found, strict=True):
        say(f"{path}: {_prediction_text(row, facts)}")


def _prediction_text(row: dict[str, float], facts: dict[str, Any]) -> str:
    if facts["predictions"] != "probabilities":
        return ", ".join(f"{name} {value:.3f}" for name, value in row.items())
    best, *others = sorted(row, key=lambda name: -row[name])
    return f"{best} {100 * row[best]:.1f} %" + (f", then {others[0]} {100 * row[others[0]]:.1f} %" if others else "")
