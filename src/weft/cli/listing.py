"""What there is to choose from, as plain data: `weft list` shows it, and prints it as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel

from weft import methods, networks, registry, repro, scenarios
from weft.plan import Plan, ready_plans

BELOW = ("citation", "verified", "options", "presets", "command")  # too long for a column: shown below the table or not

Entry = dict[str, Any]


def below(kind: str, entry: Entry) -> list[str]:
    """The lines about an entry that stand below the table: who it is by, what verifies it, its options."""
    lines = []
    if "citation" in entry:
        lines.append(entry["citation"])
        lines.append(f"verified by {entry['verified']}" if entry["verified"] else "not verified")
        lines += [f"preset {entry['name']}@{preset}: not verified" for preset in entry["presets"]]
    if entry.get("options"):
        part = kind.removesuffix("s")
        words = [
            f"{part}.{key}" + ("" if value is None else f"={json.dumps(value)}")
            for key, value in entry["options"].items()
        ]
        lines.append(" ".join(words))
    return lines


def list_methods() -> list[Entry]:
    found = []
    for name, reference in _with_installed((*methods.METHODS, *methods.COMBINATIONS), "weft.methods"):
        method = methods.class_of(reference)
        found.append(
            {
                "name": name,
                "kind": method.kind,
                "sends_up": method.sends[0],
                "sends_down": method.sends[1],
                "citation": method.citation,
                "verified": method.verified,
                "presets": list(method.presets),
                "options": _defaults(method.options_class),
            }
        )
    return found


def list_scenarios() -> list[Entry]:
    return [
        _described(name, scenarios.module_of(reference).Options)
        for name, reference in _with_installed(scenarios.SCENARIOS, scenarios.GROUP)
    ]


def list_networks() -> list[Entry]:
    return [
        _described(name, networks.options_of(reference))
        for name, reference in _with_installed(networks.NETWORKS, "weft.networks")
    ]


def _with_installed(known: Iterable[str], group: str) -> list[tuple[str, str]]:
    """Our own names, then those that installed packages add, each with what it stands for."""
    return [*((name, name) for name in known), *sorted(registry.installed(group).items())]


def _described(name: str, options: type[BaseModel]) -> Entry:
    return {"name": name, "about": _about(options), "options": _defaults(options)}


def _defaults(options: type[BaseModel]) -> dict[str, Any]:
    """Each option and its value if nobody says another; null where it has none."""
    return {
        key: None if field.is_required() else field.get_default(call_default_factory=True)
        for key, field in options.model_fields.items()
    }


def list_plans() -> list[Entry]:
    found = []
    for name, file in ready_plans().items():
        plan = Plan.load(file)
        first = file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        found.append(
            {
                "name": name,
                "command": first,
                "scenario": plan.scenario,
                "method": plan.method,
                "clients": plan.clients,
                "tasks": plan.tasks,
            }
        )
    return found


def list_tables() -> list[Entry]:
    return [_experiment(name) for name in repro.TABLES]


def list_figures() -> list[Entry]:
    return [_experiment(name) for name in repro.FIGURES]


def _experiment(name: str) -> Entry:
    found = repro.load(name)
    rows = [row.label for row in found.rows]
    return {"name": found.name, "title": found.title, "rows": rows, "plan": str(found.plan)}


def _about(described: type) -> str:
    return (inspect.getdoc(described) or "").partition("\n")[0]


LISTS: dict[str, Callable[[], list[Entry]]] = {
    "methods": list_methods,
    "scenarios": list_scenarios,
    "networks": list_networks,
    "plans": list_plans,
    "tables": list_tables,
    "figures": list_figures,
}
