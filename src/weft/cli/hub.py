"""`weft hub`: the machine that sites of a federation reach, and runs over all of them."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from weft.errors import WeftError
from weft.flower.hub import supervisor
from weft.flower.hub.programs import UP, check_flower
from weft.plan import Plan
from weft.report import terminal

if TYPE_CHECKING:
    from weft.flower.hub.hub import Hub

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Serve a federation of many machines.")
out = Console()
SOON = 60  # days before its certificates end in which a hub says so
THERE = {True: "there", False: "away", None: "not known whether it is there"}

Folder = Annotated[Path, typer.Option("--folder", help="The hub's folder.")]
Detached = Annotated[bool, typer.Option("--detach", help="In the background, until stopped.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]


def say(line: str) -> None:
    """A line at once, also into a pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def up_or_down(found: dict[str, Any] | None, behind: dict[str, Any], kind: str) -> str:
    """In words; of a supervisor that was killed what it had started goes on, until it is stopped or started anew."""
    if not behind:
        return "up" if found else "down"
    names = " and ".join(f"{name} (process {words['pid']})" for name, words in behind.items())
    serves = f"still serve{'s' if len(behind) == 1 else ''}"
    return (
        f"without its supervisor, which was killed; {names} {serves}, and would not be started again: "
        f"weft {kind} stop ends it, weft {kind} start starts it anew"
    )


def open_hub(folder: Path) -> Hub:
    check_flower()
    from weft.flower.hub.hub import Hub

    return Hub(folder)


@app.command("init")
def init_command(
    folder: Folder = Path("hub"),
    address: Annotated[
        str | None, typer.Option(help="HOST:PORT at which sites reach nginx; else they are on this machine.")
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65534, help="Of the SuperLink, on this machine's loopback.")] = 9092,
) -> None:
    """Make a hub's folder: an authority and certificates, keys, Flower's configuration and nginx's."""
    check_flower()
    from weft.flower.hub.hub import Hub

    hub = Hub.create(folder, address, port)
    say(f"{folder}: a hub that sites reach at {hub.address}")
    say(f"weft hub start --folder {folder}   serves it; weft hub invite NAME --folder {folder}   lets a site in")


@app.command("start")
def start_command(folder: Folder = Path("hub"), detached: Detached = False) -> None:
    """Serve until stopped: Flower's SuperLink and what runs its server apps, started again if they die."""
    hub = open_hub(folder)
    if detached:
        supervisor.detach(hub.folder, "hub", UP)
        say(f"{UP}; sites reach it at {hub.address}; weft hub stop ends it")
        return
    hub.start(say)


@app.command("stop")
def stop_command(folder: Folder = Path("hub")) -> None:
    """End what `weft hub start` started. A run goes on when the hub is started and told again."""
    hub = open_hub(folder)
    say(f"{folder} is stopped" if supervisor.stop(hub.folder) else f"{folder} was not started")


@app.command("invite")
def invite_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The site's name.")],
    folder: Folder = Path("hub"),
    file: Annotated[Path | None, typer.Option("--out", help="The invitation's file; else NAME.json.")] = None,
) -> None:
    """Make an invitation: the file with which a site joins. It holds the site's private key: send it by a safe way."""
    hub = open_hub(folder)
    path = file or Path(f"{name}.json")
    if path.exists() and name not in hub.sites():  # of whom `invite` says more
        raise WeftError(f"{path} is there already; choose another --out")
    hub.invite(name, path)
    if hub.is_up():
        hub.register()  # else it is done when the hub starts
    say(f"{path}: at the site, weft site join {path.name}; it holds the site's key: remove it once the site has joined")


@app.command("remove")
def remove_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The site's name.")], folder: Folder = Path("hub")
) -> None:
    """Take a site out: its key opens nothing any more, and runs that go on or come later do without it."""
    hub = open_hub(folder)
    from weft.flower.hub import runs

    hub.remove(name)
    for run in hub.begun():
        runs.note_removed(Path(run), name)
    say(f"{name} is no site of {folder} any more")


@app.command("status")
def status_command(folder: Folder = Path("hub"), as_json: AsJson = False) -> None:
    """What is running, which sites are there, and how the runs that this hub began are doing."""
    hub = open_hub(folder)
    from weft.flower.hub import status

    found = supervisor.running(hub.folder)
    behind = supervisor.left_behind(hub.folder)
    online, why = _online(hub) if found is not None or "superlink" in behind else ([], "")
    is_up = found is not None or "superexec" in behind  # which starts server apps
    states = [status.state(Path(path), is_up) for path in hub.begun()]
    left = status.left(states, hub.invited())
    sites: list[dict[str, Any]] = [
        {"site": name, "client": place, "there": None if online is None else name in online, "left": name in left}
        for place, name in enumerate(hub.sites())
    ]
    end, ending = _certificates(hub)
    if as_json:
        words = {"processes": found, "left behind": behind, "sites": sites, "runs": states, "certificates end": end}
        sys.stdout.write(json.dumps(words, indent=2) + "\n")
        return
    say(f"{folder} is {up_or_down(found, behind, 'hub')}; sites reach it at {hub.address}")
    if ending:
        say(f"  {ending}")
    for name, process in (found["processes"] if found else {}).items():
        again = f", started {process['starts']} times" if process["starts"] > 1 else ""
        say(f"  {name}: process {process['pid']}{again}")
    if why:
        say(f"  which sites are there is not known; the SuperLink may be on its way up ({why})")
    for site in sites:
        parted = f"; it has left (weft hub remove {site['site']} takes it out)" if site["left"] else ""
        say(f"  client {site['client']}: {site['site']}, {THERE[site['there']]}{parted}")
    for state in states:
        known = f" (at sites {state['run']})" if state.get("run") else ""
        say(f"  {state['folder']}{known}: {status.in_words(state)}")


def _certificates(hub: Hub) -> tuple[str | None, str]:
    """When they end, and what a person should know of that; nothing while it is far off."""
    if not (hub.folder / "server.pem").exists():
        return None, ""
    from weft.flower.hub.keys import end_of_certificates

    try:
        end = end_of_certificates(hub.folder)
    except WeftError as problem:
        return None, str(problem)
    left = end - _now()
    day = end.strftime("%Y-%m-%d")
    if left < datetime.timedelta():
        return end.isoformat(), f"its certificates ended on {day}: no site is let in, make a new hub and invite anew"
    if left < datetime.timedelta(days=SOON):
        return end.isoformat(), f"its certificates end on {day}, in {left.days} days: make a new hub and invite anew"
    return end.isoformat(), ""


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _online(hub: Hub) -> tuple[list[str] | None, str]:
    """The sites that are there; None, and why, while Flower cannot be asked: all else is to be shown then too."""
    try:
        return hub.online(), ""
    except WeftError as problem:
        return None, str(problem)


@app.command("run")
def run_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan, or the folder of a run that was stopped.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Plan keys.")] = None,
    folder: Folder = Path("hub"),
    out_folder: Annotated[Path | None, typer.Option("--out", help="The new run folder; else under runs/.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for sites that are not there.")] = 600.0,
) -> None:
    """Run a plan over all sites: weft hub run demo clients=3

    The plan's clients are the sites in the order of their invitations. With a run folder it goes on with that run.
    """
    hub = open_hub(folder)
    from weft.flower.hub import runs

    if runs.is_run(plan):
        if words or out_folder:
            raise WeftError(f"{plan} is a run that goes on as it was; leave out {' '.join(words or ['--out'])}")
        place = Path(plan).absolute()
    else:
        place = runs.prepare(hub, Plan.load(plan, words or []), out_folder)
    try:
        result = runs.work(hub, place, say, wait)
    except KeyboardInterrupt:
        say(f"\nthe run goes on at the hub; weft hub run {place} watches it again")
        raise typer.Exit(130) from None
    out.print(terminal.comparison([result.summary]))
    say(str(place))
