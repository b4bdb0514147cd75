"""`weft hub`: the machine that the sites of a federation connect to, and runs over all of them."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.common import AsJson, out, print_json, say, say_incidents, say_lines
from weft.errors import WeftError
from weft.flower.hub import runs, status, supervisor
from weft.flower.hub.hub import UP, Hub
from weft.plan import Plan
from weft.report import terminal

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Serve a federation of many machines.")
WARN_DAYS = 60  # before the certificates expire
ONLINE = {True: "online", False: "offline", None: "unknown"}

Folder = Annotated[Path, typer.Option("--folder", help="The hub's folder.")]
Detached = Annotated[bool, typer.Option("--detach", help="Run in the background until stopped.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The site's name.")]


@app.command("init")
def init_command(
    folder: Folder = Path("hub"),
    address: Annotated[str | None, typer.Option(help="HOST:PORT of nginx. Default: all sites are here.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65534, help="Of the SuperLink, on loopback.")] = 9092,
) -> None:
    """Create a hub's folder: certificates, keys, and the configurations of Flower and nginx."""
    hub = Hub.create(folder, address, port)
    say(f"{folder}: a hub that sites reach at {hub.address}")
    say(f"next: weft hub start --folder {folder}, then weft hub invite NAME --folder {folder}")


@app.command("start")
def start_command(folder: Folder = Path("hub"), detached: Detached = False) -> None:
    """Serve until stopped: Flower's SuperLink and SuperExec, restarted if they die."""
    hub = Hub(folder)
    if detached:
        supervisor.detach(hub.folder, "hub", UP)
        say(hub.ready)
    else:
        hub.start(say)


@app.command("stop")
def stop_command(folder: Folder = Path("hub")) -> None:
    """Stop what `weft hub start` started. Resume a run with weft hub start and weft hub run FOLDER."""
    say(f"{folder} is stopped" if supervisor.stop(Hub(folder).folder) else f"{folder} was not started")


@app.command("invite")
def invite_command(
    name: Name,
    folder: Folder = Path("hub"),
    file: Annotated[Path | None, typer.Option("--out", help="The file of the invitation. Default: NAME.json.")] = None,
) -> None:
    """Write an invitation, with which a site joins. It holds the site's private key: send it over a secure channel."""
    hub = Hub(folder)
    path = file or Path(f"{name}.json")
    if path.exists() and name not in hub.sites():  # otherwise `invite` names the better remedy
        raise WeftError(f"{path} already exists; choose another --out")
    hub.invite(name, path)
    if hub.is_up():
        hub.register()  # otherwise done when the hub starts
    say(f"{path}: an invitation with the site's private key; remove it once the site has joined")
    say(f"next, at the site: weft site join {path.name}")


@app.command("remove")
def remove_command(name: Name, folder: Folder = Path("hub")) -> None:
    """Remove a site: its key is revoked, and current and later runs continue without it."""
    hub = Hub(folder)
    hub.remove(name)
    for run in hub.runs():
        runs.write_removed(run, name)
    say(f"{name} is removed from {folder}")


@app.command("status")
def status_command(folder: Folder = Path("hub"), as_json: AsJson = False) -> None:
    """Show what is running, which sites are online, and the status of this hub's runs."""
    hub = Hub(folder)
    running, orphans = supervisor.running(hub.folder), supervisor.orphans(hub.folder)
    online: list[str] | None = []
    unknown = ""
    if running is not None or "superlink" in orphans:
        try:
            online = hub.online()
        except WeftError as error:
            online, unknown = None, str(error)
    is_up = running is not None or "superexec" in orphans  # which starts server apps
    found = [status.run_status(run, is_up) for run in hub.runs()]
    left = status.sites_that_left(found, hub.invited())
    sites: list[dict[str, Any]] = [
        {"site": name, "client": client, "online": None if online is None else name in online, "left": name in left}
        for client, name in enumerate(hub.sites())
    ]
    expiry, warning = _certificates(hub)
    if as_json:
        facts = {"processes": running, "orphans": orphans, "sites": sites, "certificates_expire": expiry}
        print_json({**facts, "runs": [dataclasses.asdict(run) for run in found]})
        return
    say(f"{folder} is {process_state(running, orphans, 'hub')}; sites reach it at {hub.address}")
    lines = [warning, unknown and f"cannot tell which sites are online; the SuperLink may be starting ({unknown})"]
    for name, process in (running["processes"] if running else {}).items():
        lines.append(f"{name}: process {process['pid']}, starts: {process['starts']}")
    for site in sites:
        note = f"; it has left (weft hub remove {site['site']} removes it)" if site["left"] else ""
        lines.append(f"client {site['client']}: {site['site']}, {ONLINE[site['online']]}{note}")
    lines += [f"{run.folder}{f' (at sites {run.run})' if run.run else ''}: {run.as_text()}" for run in found]
    say_lines(lines)


def process_state(running: dict[str, Any] | None, orphans: supervisor.Processes, kind: str) -> str:
    """Running, stopped, or without a supervisor: what a killed one had started still runs."""
    if not orphans:
        return "running" if running else "stopped"
    names = ", ".join(f"{name} (process {facts['pid']})" for name, facts in orphans.items())
    return (
        f"without its supervisor, which was killed; still running, and not restarted if it dies: {names}; "
        f"weft {kind} stop ends it, weft {kind} start restarts it"
    )


def _certificates(hub: Hub) -> tuple[str | None, str]:
    """When they expire, and a warning if that is soon."""
    if not (hub.folder / "server.pem").exists():
        return None, ""
    from weft.flower.hub.keys import expiry  # loads cryptography

    try:
        end = expiry(hub.folder)
    except WeftError as error:
        return None, str(error)
    days = (end.timestamp() - time.time()) // 86400
    expires = "have expired" if days < 0 else f"expire in {days:.0f} days"
    warning = f"its certificates {expires} ({end:%Y-%m-%d}): create a new hub and invite all sites"
    return end.isoformat(), warning if days < WARN_DAYS else ""


@app.command("run")
def run_command(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="A plan, or the folder of a stopped run.")],
    words: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Plan keys.")] = None,
    folder: Folder = Path("hub"),
    out_folder: Annotated[Path | None, typer.Option("--out", help="The new run folder. Default: in runs/.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for sites that are offline.")] = 600.0,
) -> None:
    """Run a plan over all sites, or resume a run: weft hub run demo clients=3

    The plan's clients are the sites in the order of their invitations.
    """
    hub = Hub(folder)
    if runs.is_run(plan):
        if words or out_folder:
            raise WeftError(f"{plan} is a run, which is resumed unchanged; remove {' '.join(words or ['--out'])}")
        run = Path(plan).absolute()
    else:
        run = runs.prepare(hub, Plan.load(plan, words or []), out_folder)
    try:
        result = runs.work(hub, run, say, wait)
    except KeyboardInterrupt:
        say(f"\nthe run continues at the hub; weft hub run {run} watches it again")
        raise typer.Exit(130) from None
    out.print(terminal.comparison([result.summary]))
    say(str(run))
    say_incidents(result)
