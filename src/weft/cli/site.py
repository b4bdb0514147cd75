"""`weft site`: a machine whose data stays on it, as a member of a federation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.common import AsJson, notes, print_json, say, say_lines
from weft.cli.hub import Detached, process_state
from weft.cli.tools import ModelFormat, write_model
from weft.flower import audit_log, site_policy, site_state
from weft.flower.hub import status, supervisor
from weft.flower.hub.site import Site
from weft.scenarios import sites

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Take part in a federation with your own data.")
tasks = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The tasks of the site.")
app.add_typer(tasks, name="task")

MAX_FILES = 5  # named in a line
Folder = Annotated[Path, typer.Option("--folder", help="The site's folder.")]
Bits = Annotated[int, typer.Option(min=9, max=32, help="Of images deeper than 8 bits: 2 ** BITS - 1 is white.")]


@app.command("join")
def join_command(
    invitation: Annotated[Path, typer.Argument(metavar="FILE", help="The invitation of the hub.")],
    folder: Folder = Path("site"),
) -> None:
    """Create a site's folder from an invitation."""
    site = Site.join(invitation, folder)
    say(f"{folder}: {site.name}, a site of the hub at {site.hub}; remove {invitation}, its key is now in {folder}")
    say(f"next: weft site start --folder {folder}")


@app.command("check")
def check_command(
    images: Annotated[Path, typer.Argument(metavar="FOLDER", help="Images, with a subfolder for each class.")],
    bits: Bits = sites.DEFAULT_BITS,
    as_json: AsJson = False,
) -> None:
    """Show what a folder of images would be as a task, and its errors. Nothing is sent or stored."""
    found = sites.look(images, bits)
    classes = found.counts()
    if as_json:
        facts = {"groups": found.groups, "other_files": found.other_files, "errors": found.errors, "notes": found.notes}
        print_json({"classes": classes, **facts})
    else:
        for name, splits in classes.items():
            counts = ", ".join(f"{split}: {count}" for split, count in splits.items())
            say(f"  {name}: images: {sum(splits.values()):,} ({counts})")
        say_lines([*_details(found), *(f"error: {error}" for error in found.errors)])
        say("it cannot be a task yet" if found.errors else "it can be a task")
    if found.errors:
        raise typer.Exit(2)


def _details(found: sites.FolderReport) -> Iterator[str]:
    """Groups, files that are not images, and notes."""
    if found.task is not None and found.groups:
        yield f"groups: {found.groups} (folders below a class, such as a patient's), each in one split"
    elif found.task is not None:
        yield "no groups: every image is split separately (put the images of a patient in a folder below the class)"
    if found.other_files:
        some = ", ".join(found.other_files[:MAX_FILES]) + (", ..." if len(found.other_files) > MAX_FILES else "")
        yield f"ignored files, not images by name: {len(found.other_files)} ({some})"
    yield from (f"note: {note}" for note in found.notes)


@tasks.command("add")
def add_command(
    name: Annotated[str, typer.Option(help="The name of the task at this site; it is not sent to the hub.")],
    data: Annotated[Path, typer.Option(help="Images, with a subfolder for each class.")],
    bits: Bits = sites.DEFAULT_BITS,
    folder: Folder = Path("site"),
) -> None:
    """Announce the site's next task, for plans with scenario=sites. A run that waits for it continues."""
    site = Site(folder)
    with site_state.changing_tasks(site.folder):
        found = site.add_task(name, data, bits)
    classes = found.counts()
    images = sum(sum(splits.values()) for splits in classes.values())
    index = len(sites.listed(site.folder)) - 1
    say(f"{site.name}: task {index} is {name}, classes: {len(classes)}, images: {images:,}")
    say_lines(_details(found))


@tasks.command("list")
def list_command(folder: Folder = Path("site"), as_json: AsJson = False) -> None:
    """List the site's tasks in the order in which runs learn them."""
    site = Site(folder)
    if as_json:
        print_json(sites.listed(site.folder))
    elif not list(map(say, _task_lines(site.folder))):
        say(f"{site.name} has no tasks; weft site task add --name NAME --data FOLDER announces one")


@tasks.command("remove")
def remove_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the task at this site.")],
    folder: Folder = Path("site"),
) -> None:
    """Remove a task that no run has started, with its packed images; your files stay."""
    site = Site(folder)
    with site_state.changing_tasks(site.folder):
        site.remove_task(name)
    say(f"task {name} of {site.name} is removed")
    say_lines(_task_lines(site.folder))


def _task_lines(site: Path) -> list[str]:
    return [f"task {index}: {task['name']} ({task['folder']})" for index, task in enumerate(sites.listed(site))]


@app.command("start")
def start_command(folder: Folder = Path("site"), detached: Detached = False) -> None:
    """Take part until stopped: Flower's SuperNode, restarted if it dies."""
    site = Site(folder)
    if detached:
        supervisor.detach(site.folder, "site", site.ready)
        say(site.ready)
    else:
        site.start(say)


@app.command("stop")
def stop_command(folder: Folder = Path("site")) -> None:
    """Stop what `weft site start` started; the site remains a member."""
    say(f"{folder} is stopped" if supervisor.stop(Site(folder).folder) else f"{folder} was not started")


@app.command("status")
def status_command(folder: Folder = Path("site"), as_json: AsJson = False) -> None:
    """Show whether the site is running and connected, its tasks, and its runs."""
    site = Site(folder)
    runs = site_state.site_runs(site.folder)
    running, orphans = supervisor.running(site.folder), supervisor.orphans(site.folder)
    log, processes = site.folder / "logs" / "supernode.log", running["processes"] if running else {}
    supernode = (processes | orphans).get("supernode")
    connection = status.connection(log, supernode) if supernode else ""
    facts: dict[str, Any] = {
        "name": site.name,
        "hub": site.hub,
        "left": site_policy.has_left(site.folder),
        "leave_notices": site_policy.leave_notices(site.folder),
        "policy": site_policy.read_policy(site.folder).model_dump(),
        "processes": running,
        "orphans": orphans,
        "connection": connection,
        "tasks": sites.listed(site.folder),
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    if as_json:
        print_json(facts)
        return
    say(f"{site.name} of {site.hub} is {process_state(running, orphans, 'site')}")
    lines = [status.connection_text(connection, supernode, log) if supernode else ""]
    if facts["left"] and not facts["leave_notices"]:
        lines.append("it leaves; the hub is notified by its next request, which comes while a run is active")
    for notice in facts["leave_notices"]:
        lines.append(f"it has left: the hub was notified at {notice['when']} UTC in {notice['run']}")
    for name, process in processes.items():
        if process["starts"] > 1:
            lines.append(f"{name}: starts: {process['starts']} ({site.folder / 'logs' / name}.log)")
    lines.append(f"shares of each A: {facts['policy']['share']} (weft site policy shows all limits)")
    say_lines([*lines, *_task_lines(site.folder), *(f"run {run.as_text()}" for run in runs)])


@app.command("policy")
def policy_command(
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Limits to change.")] = None,
    folder: Folder = Path("site"),
) -> None:
    """Show or change what this site shares and accepts, such as share=nothing. No plan can override it."""
    policy = site_policy.change_policy(Site(folder).folder, words or [])
    say_lines(f"{key} = {value}" for key, value in policy.model_dump().items())


@app.command("export")
def export_command(
    run: Annotated[str, typer.Argument(help="A run's id or a prefix; the name of a run or plan means the latest.")],
    task: Annotated[int, typer.Option(min=0, help="Which of the site's tasks, counted from 0.")] = 0,
    kind: Annotated[ModelFormat, typer.Option("--format", help="Of the file.")] = ModelFormat.onnx,
    file: Annotated[Path | None, typer.Option("--out", help="The file. Default: SITE-task0.onnx.")] = None,
    folder: Folder = Path("site"),
) -> None:
    """Export the model of a task, which only its site has, as one file that runs without weft."""
    site = Site(folder)
    from weft.runs.model import task_from_site  # loads torch

    found = site_state.find_run(run, site_state.site_runs(site.folder))
    say(f"run {found.as_text()}")
    write_model(task_from_site(site.folder, found.id, task), file or Path(f"{site.name}-task{task}.{kind.value}"), kind)


@app.command("leave")
def leave_command(folder: Folder = Path("site")) -> None:
    """Leave the federation. With its next request the hub removes this site's A's from the knowledge base."""
    site = Site(folder)
    site_policy.leave(site.folder)
    say(f"{site.name} leaves; keep it running until weft site status shows that the hub was notified")


@app.command("audit")
def audit_command(folder: Folder = Path("site"), as_json: AsJson = False) -> None:
    """List all that has left this site: each tensor, its shape and bytes, when, and to which hub."""
    site = Site(folder)
    rows, damaged = audit_log.read(site.folder)
    if as_json:
        print_json(rows)
    else:
        for line in audit_log.as_text(rows) if rows else ():
            say(line)
        say(f"bytes that have left {site.name}: {sum(row['bytes'] for row in rows):,}")
    if damaged:  # on stderr: stdout may be JSON
        numbers = ", ".join(map(str, damaged))
        say(f"damaged lines of {site.folder / audit_log.FILE}, not counted: {numbers}", notes)
