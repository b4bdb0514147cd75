"""`weft site`: a machine whose data stays on it, as part of a federation."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.hub import AsJson, Detached, say, up_or_down
from weft.cli.tools import ModelFormat, write_model
from weft.flower import leaving, sharing
from weft.flower.hub import supervisor
from weft.flower.hub.programs import check_flower
from weft.scenarios import sites

if TYPE_CHECKING:
    from weft.flower.hub.site import Site

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Take part in a federation with data of your own.")
tasks = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The site's own tasks.")
app.add_typer(tasks, name="task")

MOST_NAMED = 5  # files in a line

Folder = Annotated[Path, typer.Option("--folder", help="The site's folder.")]
Images = Annotated[Path, typer.Argument(metavar="FOLDER", help="Images, with a subfolder for each class.")]
Bits = Annotated[int, typer.Option(min=9, max=32, help="Of images deeper than 8 bits: 2 ** BITS - 1 is white.")]


def open_site(folder: Path) -> Site:
    check_flower()
    from weft.flower.hub.site import Site

    return Site(folder)


@app.command("join")
def join_command(
    invitation: Annotated[Path, typer.Argument(metavar="FILE", help="The invitation that the hub made.")],
    folder: Folder = Path("site"),
) -> None:
    """Make a site's folder out of an invitation. It takes part once it is started."""
    check_flower()
    from weft.flower.hub.site import Site

    site = Site.join(invitation, folder)
    say(f"{folder}: {site.name}, of the hub at {site.hub}; remove {invitation}, its key is in {folder} now")
    say(f"weft site start --folder {folder}   takes part")


@app.command("check")
def check_command(images: Images, bits: Bits = sites.DEFAULT_BITS, as_json: AsJson = False) -> None:
    """What a folder of images would be as a task, and what is wrong with it. Nothing is sent or kept."""
    found = sites.look(images, bits)
    classes = found.counts()
    if as_json:
        told = {
            "classes": classes,
            "groups": found.groups,
            "others": found.other_files,
            "faults": found.errors,
            "notes": found.notes,
        }
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        raise typer.Exit(2 if found.errors else 0)
    for name, parts in classes.items():
        said = ", ".join(f"{count} to {part}" for part, count in parts.items())
        say(f"  {name}: {_so_many(sum(parts.values()), 'image')}, {said}")
    for line in _beside_images(found):
        say(f"  {line}")
    for fault in found.errors:
        say(f"  wrong: {fault}")
    for note in found.notes:
        say(f"  note: {note}")
    say("it can be a task" if not found.errors else "it cannot be a task yet")
    if found.errors:
        raise typer.Exit(2)


def _beside_images(found: sites.FolderReport) -> Iterator[str]:
    """Of a folder: how many groups it has, and which files are no images."""
    if found.task is not None and found.groups:
        yield f"{_so_many(found.groups, 'group')} (folders below a class, such as a patient's), each on one side"
    elif found.task is not None:
        yield "no groups: every image is cut by itself (images of one patient belong in a folder below the class)"
    if found.other_files:
        some = ", ".join(found.other_files[:MOST_NAMED]) + (", ..." if len(found.other_files) > MOST_NAMED else "")
        yield f"{_so_many(len(found.other_files), 'file')} left out, no image by the name: {some}"


def _so_many(count: int, word: str) -> str:
    """
    >>> _so_many(1, "image"), _so_many(1200, "image")
    ('1 image', '1,200 images')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


@tasks.command("add")
def add_command(
    name: Annotated[str, typer.Option(help="What the task is called here; the hub does not learn it.")],
    data: Annotated[Path, typer.Option(help="Images, with a subfolder for each class.")],
    bits: Bits = sites.DEFAULT_BITS,
    folder: Folder = Path("site"),
) -> None:
    """Announce the site's next task, for plans with scenario=sites. A run that waits for it goes on."""
    site = open_site(folder)
    from weft.flower import remembered

    with remembered.one_by_one(site.folder):
        found = site.add_task(name, data, bits)
    classes = found.counts()
    images = sum(sum(parts.values()) for parts in classes.values())
    place = len(sites.listed(site.folder)) - 1
    say(f"{site.name}: task {place} is {name}, {len(classes)} classes, {_so_many(images, 'image')}")
    for line in _beside_images(found):
        say(f"  {line}")
    for note in found.notes:
        say(f"  note: {note}")


@tasks.command("list")
def list_command(folder: Folder = Path("site"), as_json: AsJson = False) -> None:
    """The site's own tasks, in the order in which runs learn them."""
    site = open_site(folder)
    listed = sites.listed(site.folder)
    if as_json:
        sys.stdout.write(json.dumps(listed, indent=2) + "\n")
        return
    for place, task in enumerate(listed):
        say(_task_words(place, task))
    if not listed:
        say(f"{site.name} has no tasks; weft site task add --name N --data FOLDER announces one")


@tasks.command("remove")
def remove_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the task is called here.")],
    folder: Folder = Path("site"),
) -> None:
    """Take back a task that no run has begun, with the images that were packed for it; your files stay."""
    site = open_site(folder)
    from weft.flower import remembered

    with remembered.one_by_one(site.folder):
        site.remove_task(name)
    say(f"{site.name} has no task {name} any more")
    for place, task in enumerate(sites.listed(site.folder)):
        say(f"  {_task_words(place, task)}")


def _task_words(place: int, task: dict[str, Any]) -> str:
    return f"task {place}: {task['name']} ({task['folder']})"


@app.command("start")
def start_command(folder: Folder = Path("site"), detached: Detached = False) -> None:
    """Take part until stopped: Flower's SuperNode, started again if it dies."""
    site = open_site(folder)
    if detached:
        supervisor.detach(site.folder, "site", f"{site.name} serves")
        say(f"{site.name} serves {site.hub}; weft site stop ends it")
        return
    site.start(say)


@app.command("stop")
def stop_command(folder: Folder = Path("site")) -> None:
    """End what `weft site start` started; the site stays a member."""
    site = open_site(folder)
    say(f"{folder} is stopped" if supervisor.stop(site.folder) else f"{folder} was not started")


@app.command("status")
def status_command(folder: Folder = Path("site"), as_json: AsJson = False) -> None:
    """Whether the site is up, its tasks, and what it has answered in which run."""
    site = open_site(folder)
    from weft.flower import remembered

    runs = remembered.known(site.folder)
    found: dict[str, Any] = {
        "name": site.name,
        "hub": site.hub,
        "left": leaving.has_left(site.folder),
        "told": [told._asdict() for told in leaving.told(site.folder)],
        "share": sharing.shared_at(site.folder),
        "processes": supervisor.running(site.folder),
        "left behind": supervisor.left_behind(site.folder),
        "tasks": sites.listed(site.folder),
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    trouble = _trouble(site.folder, found)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    say(f"{site.name} of {site.hub} is {up_or_down(found['processes'], found['left behind'], 'site')}")
    if trouble:
        say(f"  {trouble}")
    for line in _leaving_words(found):
        say(f"  {line}")
    for name, words in (found["processes"]["processes"] if found["processes"] else {}).items():
        if words["starts"] > 1:
            say(f"  {name} was started {words['starts']} times ({site.folder / 'logs' / name}.log)")
    say(f"  gives of its A's: {found['share']} (weft site share)")
    for place, task in enumerate(found["tasks"]):
        say(f"  {_task_words(place, task)}")
    for run in runs:
        say(f"  run {run.in_words()}")


def _trouble(folder: Path, found: dict[str, Any]) -> str:
    """Between the site and its hub, while its SuperNode is there; for JSON it stands in what was found, in one word."""
    from weft.flower.hub import link

    log = folder / "logs" / "supernode.log"
    supervised = found["processes"]["processes"] if found["processes"] else {}
    supernode = (supervised | found["left behind"]).get("supernode")
    found["link"] = link.state(log, supernode) if supernode else ""
    return link.in_words(found["link"], supernode, log) if supernode else ""


def _leaving_words(found: dict[str, Any]) -> list[str]:
    if not found["left"]:
        return []
    if not found["told"]:
        return ["it leaves, and the hub does not know yet: it is told when it asks, which it does while a run goes on"]
    return [f"it has left: the hub was told on {told['when']} UTC, in {told['run']}" for told in found["told"]]


@app.command("share")
def share_command(
    share: Annotated[str, typer.Argument(metavar="all|ROWS|nothing", help="Of the A of each task.")],
    folder: Folder = Path("site"),
) -> None:
    """What this site gives of its A's from now on: all, its strongest rows, or nothing. No plan can ask for more."""
    site = open_site(folder)
    chosen = sharing.parse(share)
    sharing.choose(site.folder, chosen)
    say(f"{site.name} gives {chosen if isinstance(chosen, str) else f'the strongest {chosen} rows'} of its A's")


@app.command("export")
def export_command(
    run: Annotated[
        str,
        typer.Argument(
            help="An id of weft site status, or its beginning; by a name or a plan's, the latest so called."
        ),
    ],
    task: Annotated[int, typer.Option(min=0, help="For which of the site's tasks, counted from 0.")] = 0,
    kind: Annotated[ModelFormat, typer.Option("--format", help="Of the file.")] = ModelFormat.onnx,
    file: Annotated[Path | None, typer.Option("--out", help="The file; else SITE-task0.onnx.")] = None,
    folder: Folder = Path("site"),
) -> None:
    """A task's model out of a federation, as one file that needs no weft; it is at its site and nowhere else."""
    site = open_site(folder)
    os.environ["WEFT_SITE"] = str(site.folder)  # whose tasks are meant
    from weft.export.model import task_from_site
    from weft.flower import remembered

    meant = remembered.run_called(run, remembered.known(site.folder))
    say(f"run {meant.in_words()}")
    write_model(task_from_site(site.folder, meant.id, task), file or Path(f"{site.name}-task{task}.{kind.value}"), kind)


@app.command("leave")
def leave_command(folder: Folder = Path("site")) -> None:
    """Leave the federation. The hub removes this site's A's from the knowledge base when it asks next."""
    site = open_site(folder)
    leaving.leave(site.folder)
    say(f"{site.name} leaves; keep it started until weft site status says that the hub was told")


@app.command("left")
def left_command(folder: Folder = Path("site"), as_json: AsJson = False) -> None:
    """All that has left this site: each tensor, its shape and bytes, when, and to whom."""
    site = open_site(folder)
    from weft.flower import audit_log

    rows, damaged = audit_log.read(site.folder)
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    elif not rows:
        say(f"nothing {'that can be read ' if damaged else ''}has left {site.name}")
    else:
        for line in audit_log.lines(rows):
            say(line)
        say(f"{sum(row['bytes'] for row in rows):,} bytes have left {site.name}")
    if damaged:  # not on stdout, where JSON stands alone
        lines, are = ("line", "is") if len(damaged) == 1 else ("lines", "are")
        numbers = ", ".join(map(str, damaged))
        typer.echo(
            f"{lines} {numbers} of {site.folder / audit_log.FILE} cannot be read and {are} not counted", err=True
        )
