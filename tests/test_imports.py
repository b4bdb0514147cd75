"""The direction of imports: a folder imports only folders above it in docs/architecture.md."""

from __future__ import annotations

import sys
import tomllib

import pytest
from source_helpers import FILES, MODULES, SOURCE, imports, loaded_by, named, of, under

ROOMS = {  # each may import those above it; the modules of weft itself are the ground
    "wire": "messages and bytes",
    "data": "public datasets",
    "scenarios": "tasks of clients",
    "networks": "a network as one vector",
    "methods": "both halves of each method",
    "core": "server loop and client",
    "engines": "how messages reach clients of this machine",
    "runs": "from a plan to a result",
    "report": "run folders for people",
    "repro": "tables and figures",
    "export": "models as files",
    "flower": "many machines",
    "benchmarks": "measurements of this machine",
    "cli": "the command",
}
GROUND = ("errors", "files", "lazy", "randomness", "registry", "metrics", "plan", "__main__")
LOOKING_UP = {  # modules of the ground that import a room
    "weft": {"runs"},  # weft.run, weft.Result
    "weft.__main__": {"cli"},
    "weft.plan": {"methods", "networks", "scenarios", "wire"},  # the classes of their options; precisions
}
HEAVY = {"torch", "safetensors", "pandas", "matplotlib", "pooch", "requests", "scipy", "PIL", "tensorboard", "jinja2"}


def room_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") and module.split(".")[1] in ROOMS else ""


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_rooms_above_its_own(module):
    room, order = room_of(module), ["", *ROOMS]
    assert room or module == "weft" or module.split(".")[1] in GROUND, f"{module} is in no room"
    above = {*order[: order.index(room) + 1], *LOOKING_UP.get(module, ())}
    assert {room_of(name) for name in of(module) if name in MODULES} <= above


def test_no_exception_is_superfluous():
    for module, rooms in LOOKING_UP.items():
        assert rooms <= {room_of(name) for name in of(module, "load", "use")}, module


@pytest.mark.parametrize(
    ("prefix", "forbidden"),
    [
        ("weft.wire", ["weft.registry", "weft.plan", "weft.metrics"]),
        ("weft.data", ["weft.wire", "weft.plan", "torch"]),
        ("weft.scenarios", ["weft.wire", "weft.plan", "torch"]),
        ("weft.networks", ["weft.data", "weft.plan", "weft.metrics", "weft.wire.message"]),
        ("weft.methods", ["weft.data", "weft.scenarios", "weft.wire.ledger"]),
        ("weft.core", ["weft.methods.federated", "weft.methods.continual", "weft.methods.fedweit"]),
        ("weft.engines", ["weft.methods.federated", "weft.methods.continual", "weft.methods.fedweit", "weft.networks"]),
        ("weft.report", ["weft.core", "weft.engines", "weft.methods", "weft.networks", "weft.runs.session", "torch"]),
    ],
)
def test_a_room_does_not_know(prefix, forbidden):
    """Scenarios are pure data, the loop knows no method, an engine knows no learning, a report reads folders only."""
    found = {module: named(of(module, "load", "use"), *forbidden) for module in under(prefix)}
    assert found
    assert not {module: names for module, names in found.items() if names}


def test_the_ground_stands_on_itself():
    for name in ("errors", "files", "lazy", "randomness", "registry", "metrics"):
        allowed = {f"weft.{one}" for one in GROUND if one not in ("plan", "__main__")}
        assert named(of(f"weft.{name}"), "weft", "torch") - {"torch"} <= allowed, name


def test_commands_and_plans_load_no_torch():
    """`weft --help` and errors are fast, and a run folder is on disk before torch loads."""
    roots = ["weft", "weft.cli.app", "weft.plan", *under("weft.methods", "weft.scenarios"), "weft.networks"]
    chains = loaded_by(*roots, "weft.runs.folder")
    assert "weft.errors" in chains
    assert not [" -> ".join(chain) for module, chain in chains.items() if module.split(".")[0] in HEAVY]
    assert "numpy" not in loaded_by("weft.cli.app")


def test_modules_do_not_import_each_other_in_circles():
    for module in MODULES:
        for direct in of(module, "load") & set(MODULES):
            chain = loaded_by(direct, with_packages=False).get(module)
            assert chain is None, [module, *(chain or [])]


def test_flower_is_imported_in_one_room():
    """Its API changes about yearly."""
    users = {module for module in MODULES if named(of(module), "flwr")}
    assert users
    assert users <= set(under("weft.flower"))


def test_the_example_in_one_file_needs_no_weft():
    text = (SOURCE.parent.parent / "examples" / "fedweit_in_one_file.py").read_text(encoding="utf-8")
    assert not named({one.module for one in imports(text)}, "weft")


def test_every_package_that_is_used_is_named_in_pyproject():
    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    declared = {word.split(">")[0].split("=")[0].split("[")[0].lower() for word in [*project["dependencies"], *extras]}
    used = {one.split(".")[0] for module in MODULES for one in of(module)} - set(sys.stdlib_module_names) - {"weft"}
    assert len(FILES) == len(MODULES)
    assert {"pillow" if name == "PIL" else name.lower() for name in used} <= declared
