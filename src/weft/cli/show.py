"""`weft show`, `weft compare` and `weft list`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.padding import Padding

from weft import methods, networks, registry, repro, scenarios
from weft.cli.common import AsJson, DataDir, Overrides, notes, out, print_json, say
from weft.errors import WeftError, nearest
from weft.plan import Plan, ready_plans
from weft.report import terminal
from weft.runs.folder import accuracy_matrices, read_measures, read_rows, read_summary, resume_command

Entry = dict[str, Any]


def show_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR|SCENARIO", help="A run folder, or the name of a scenario.")],
    words: Overrides = None,
    picture: Annotated[Path | None, typer.Option(help="A PNG file for sample images of a scenario.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show a run: its result, the accuracy matrix of each client, the traffic, and which clients helped which.

    For a scenario: the tasks of each client in order. weft show glyphs clients=3 --picture glyphs.png
    """
    name = str(folder)
    if not folder.is_dir() and (scenarios.is_known(name) or name in ready_plans()):
        _show_scenario(name, words or [], picture, as_json)
    elif words or picture:
        given = " ".join([*(words or []), *(["--picture"] if picture else [])])
        known = ", ".join(scenarios.SCENARIOS)
        raise WeftError(f"{folder} is not a scenario, and {given} applies to scenarios only: {known}")
    elif not folder.exists():
        known = nearest(name, {*scenarios.SCENARIOS, *ready_plans()})
        raise WeftError(f"{folder} is not a run folder, a scenario or a plan; {known}")
    else:
        _show_run(folder, as_json)


def _show_run(folder: Path, as_json: bool) -> None:
    from weft.report.reading import read_run
    from weft.wire.ledger import Entry, by

    summary = read_summary(folder)
    if as_json:
        if summary is None:
            raise WeftError(_unfinished(folder))
        print_json(summary)
        return
    if summary is None:
        say(f"{_unfinished(folder)}\n")
    else:
        out.print(terminal.comparison([summary]))
    for name, images in (("accuracy.csv", "test"), ("validation.csv", "validation")):
        for client, rows in accuracy_matrices(folder, name).items() if (folder / name).exists() else ():
            out.print(terminal.matrix(client, rows, images))
    if measures := read_measures(folder):
        out.print(terminal.measures(measures))
    out.print(terminal.traffic(by(map(Entry.from_row, read_rows(folder, "ledger.csv")), "direction", "tensor")))
    for table in terminal.details(read_run(folder)):
        out.print(table)


def _show_scenario(name: str, words: list[str], picture: Path | None, as_json: bool) -> None:
    """Use the ready plan of that name, if there is one: it sets the usual numbers of clients and tasks."""
    from weft.scenarios import preview

    ready = ready_plans().get(name)
    plan = Plan.load(ready, words) if ready else Plan.merge({"scenario": name}, words)
    scenario = scenarios.of(plan)
    if picture is not None:
        preview.draw_sheet(scenario, picture)
    if as_json:
        print_json(preview.contents(scenario))
        return
    out.print(terminal.scenario(preview.contents(scenario)))
    if picture is not None:
        say(str(picture))


def compare_command(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.")], as_json: AsJson = False
) -> None:
    """Compare several runs in one table."""
    found = {folder: read_summary(folder) for folder in folders}
    finished = {folder: summary for folder, summary in found.items() if summary}
    unfinished = [_unfinished(folder) for folder in folders if folder not in finished]
    if not finished:
        raise WeftError(unfinished[0])
    for line in unfinished:
        say(line, notes)
    if as_json:
        print_json(list(finished.values()))
    else:
        out.print(terminal.comparison(list(finished.values()), [folder.name for folder in finished]))


def _unfinished(folder: Path) -> str:
    return f"the run in {folder} is not finished; if it is not running, resume it with: {resume_command(folder)}"


# ---- weft list


Kind = StrEnum("Kind", ["methods", "scenarios", "networks", "plans", "tables", "figures"])


BELOW = ("citation", "verified", "options", "presets", "command")  # too long for a column


def list_command(
    kind: Annotated[Kind, typer.Argument(metavar="|".join(Kind), help="What to list.")], as_json: AsJson = False
) -> None:
    """List what a plan can name, with the options of each."""
    entries = LISTS[kind]()
    if as_json:
        print_json(entries)
        return
    out.print(terminal.listing(entries, [column for column in entries[0] if column not in BELOW]))
    for entry in entries:
        lines = _below(kind.removesuffix("s"), entry)
        if lines:
            out.print(f"\n[bold]{entry['name']}[/] {lines[0]}", highlight=False)
        for line in lines[1:]:
            out.print(Padding(line, (0, 0, 0, 2)), highlight=False, markup=False)


def _below(section: str, entry: Entry) -> list[str]:
    """The lines below the table: citation, verifying test, presets and options."""
    lines = []
    if "citation" in entry:
        lines = [entry["citation"], f"verified by {entry['verified']}" if entry["verified"] else "not verified"]
        lines += [f"preset {entry['name']}@{preset}: not verified" for preset in entry["presets"]]
    if options := entry.get("options"):
        values = {key: "" if value is None else f"={json.dumps(value)}" for key, value in options.items()}
        lines.append(" ".join(f"{section}.{key}{value}" for key, value in values.items()))
    return lines


def _methods() -> list[Entry]:
    def entry(name: str, reference: str) -> Entry:
        method = methods.class_of(reference)
        info = method.info
        sends = {"kind": info.kind, "sends_up": info.uploads, "sends_down": info.downloads}
        origin = {"citation": info.citation, "verified": info.verified, "presets": list(method.presets)}
        return {"name": name, **sends, **origin, "options": _defaults(method.Options)}

    return [entry(*one) for one in _with_installed((*methods.METHODS, *methods.COMBINATIONS), "weft.methods")]


def _scenarios() -> list[Entry]:
    known = _with_installed(scenarios.SCENARIOS, scenarios.GROUP)
    return [_described(name, scenarios.builder_of(reference).Options) for name, reference in known]


def _networks() -> list[Entry]:
    known = _with_installed(networks.NETWORKS, "weft.networks")
    return [_described(name, networks.options_of(reference)) for name, reference in known]


def _with_installed(known: Iterable[str], group: str) -> list[tuple[str, str]]:
    """Names and references: those of weft, then those of installed packages."""
    return [*((name, name) for name in known), *sorted(registry.installed(group).items())]


def _described(name: str, options: type[BaseModel]) -> Entry:
    about = (inspect.getdoc(options) or "").partition("\n")[0]
    return {"name": name, "about": about, "options": _defaults(options)}


def _defaults(options: type[BaseModel]) -> dict[str, Any]:
    """Each option with its default; null if it is required."""
    return {
        key: None if field.is_required() else field.get_default(call_default_factory=True)
        for key, field in options.model_fields.items()
    }


def _plans() -> list[Entry]:
    entries = []
    for name, file in ready_plans().items():
        plan, command = Plan.load(file), file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        keys = {key: getattr(plan, key) for key in ("scenario", "method", "clients", "tasks")}
        entries.append({"name": name, "command": command, **keys})
    return entries


def experiments(names: Iterable[str]) -> list[Entry]:
    return [
        {"name": one.name, "title": one.title, "rows": [row.label for row in one.rows], "plan": one.plan}
        for one in map(repro.load, names)
    ]


LISTS: dict[str, Callable[[], list[Entry]]] = {
    "methods": _methods,
    "scenarios": _scenarios,
    "networks": _networks,
    "plans": _plans,
    "tables": lambda: experiments(repro.names_of("tables")),
    "figures": lambda: experiments(repro.names_of("figures")),
}
