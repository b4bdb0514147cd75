"""The direction of imports, as architecture.md draws it, and what no source file may do.

plan -> scenario -> loop -> engine -> client -> method -> network: what stands on the left may know what stands on the
right, never the other way round; the loop knows no method, a method no engine, an engine no learning.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import weft

SOURCE = Path(weft.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


class Import(NamedTuple):
    module: str
    when: str  # "load" of the importing module, "use" inside a function, or "types" for the type checker alone


def name_of(file: Path) -> str:
    parts = ["weft", *file.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def imports(text: str, known: dict[str, Path] = MODULES) -> Iterator[Import]:
    """Every module that a text imports; `from weft import methods` names the module weft.methods."""

    def walk(nodes: list[ast.stmt], when: str) -> Iterator[Import]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, when) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, "imports are written in full"
                assert node.module is not None
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield Import(whole if whole in known else node.module, when)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from walk(node.body, "use" if when == "load" else when)
            elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                yield from walk(node.body, "types")
                yield from walk(node.orelse, when)
            else:
                for field in ("body", "orelse", "finalbody", "handlers"):
                    yield from walk(getattr(node, field, []), when)

    yield from walk(ast.parse(text).body, "load")


@functools.cache
def all_of(module: str) -> list[Import]:
    return list(imports(MODULES[module].read_text(encoding="utf-8")))


def of(module: str, *whens: str) -> set[str]:
    return {one.module for one in all_of(module) if one.when in (whens or ("load", "use", "types"))}


def under(*prefixes: str) -> list[str]:
    return [name for name in MODULES if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)]


def named(wanted: set[str], *prefixes: str) -> set[str]:
    return {name for name in wanted if any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)}


METHOD_FILES = [name for name in under("weft.methods") if name not in ("weft.methods", "weft.methods.method")]
# from what starts a run down to the weights; data that all of them share (plan, message, ...) is not here
CHAIN = [
    ["weft.cli.app"],
    ["weft.export"],
    ["weft.flower.hub"],
    ["weft.bench"],
    ["weft.repro"],
    ["weft.runs.run"],
    ["weft.runs.session"],
    ["weft.core.loop"],
    ["weft.core.engine"],
    ["weft.core.client"],
    ["weft.core.training"],
    ["weft.methods"],
    ["weft.networks"],
]


def test_there_is_something_to_check():
    assert {"weft.cli.app", "weft.core.loop", "weft.core.client", "weft.plan", "weft.runs.folder"} <= set(MODULES)
    assert {"weft.methods.fedweit.fedweit", "weft.methods.federated.fedavg", "weft.methods.continual.stl"} <= set(
        METHOD_FILES
    )
    assert "weft.plan" in of("weft.core.loop")
    assert "torch" in of("weft.methods.fedweit.fedweit", "types")
    assert "torch" not in of("weft.methods.fedweit.fedweit", "load")
    for (group,) in CHAIN:
        assert under(group), group


@pytest.mark.parametrize("place", range(len(CHAIN)), ids=[group[0] for group in CHAIN])
def test_nothing_knows_what_stands_before_it(place):
    before = [name for groups in CHAIN[:place] for name in groups]
    for module in under(*CHAIN[place]):
        if module == "weft.engines.workers":  # a crew is workers and pipes
            assert not named(of(module), "weft.methods", "weft.networks", "weft.core.client")
        assert not named(of(module), *before), module


def test_the_loop_knows_no_method():
    assert named(of("weft.core.loop"), "weft.methods") == {"weft.methods.method"}
    assert not named(of("weft.core.loop"), "weft.runs.folder", "weft.report.screens", "weft.networks")


@pytest.mark.parametrize("module", under("weft.methods"))
def test_a_method_knows_no_engine(module):
    forbidden = (
        "weft.core.engine",
        "weft.core.loop",
        "weft.runs.folder",
        "weft.runs.session",
        "weft.runs.run",
        "weft.core.client",
        "weft.runs.result",
    )
    assert not named(
        of(module), *forbidden, "weft.cli.app", "weft.report.screens", "weft.wire.ledger", "weft.scenarios"
    )


@pytest.mark.parametrize("module", under("weft.core.engine"))
def test_an_engine_knows_no_learning(module):
    assert not named(of(module), *METHOD_FILES)
    assert not named(
        of(module), "weft.networks", "weft.core.training", "weft.scenarios", "weft.metrics", "weft.core.loop"
    )


@pytest.mark.parametrize("module", under("weft.networks"))
def test_a_network_knows_no_method(module):
    allowed = ("weft.networks", "weft.errors", "weft.randomness", "weft.lazy", "weft.wire.tensors", "weft.scenarios")
    allowed += ("weft.registry", "weft.networks.batches")
    assert named(of(module), "weft") == named(of(module), *allowed)


@pytest.mark.parametrize("module", under("weft.scenarios"))
def test_a_scenario_is_pure_data(module):
    allowed = ("weft.scenarios", "weft.errors", "weft.randomness", "weft.lazy", "weft.data")
    allowed += ("weft.registry",)
    assert named(of(module), "weft") == named(of(module), *allowed)
    assert not named(of(module), "torch")


@pytest.mark.parametrize("module", under("weft.data"))
def test_data_knows_no_learning(module):
    assert named(of(module), "weft") == named(of(module), "weft.data", "weft.errors", "weft.lazy")
    assert not named(of(module), "torch")


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in ("weft.report.screens", "weft.runs.result", "weft.cli.report", *under("weft.report"))
        if name in MODULES
    ],
)
def test_what_is_shown_comes_out_of_the_run_folder(module):
    working = (
        "weft.runs.session",
        "weft.core.loop",
        "weft.core.engine",
        "weft.core.client",
        "weft.core.storage",
        "weft.wire.message",
        "weft.core.training",
    )
    assert not named(of(module), *working, "weft.runs.run", "torch", "weft.methods", "weft.networks")


@pytest.mark.parametrize("module", ["weft.errors", "weft.randomness", "weft.lazy", "weft.metrics"])
def test_the_ground_floor_stands_on_nothing(module):
    assert not named(of(module), "weft", "torch") - {"weft.lazy"}


def test_things_are_found_by_name_without_torch():
    assert named(of("weft.registry"), "weft", "torch") == {"weft.errors"}


WIRE = {"weft.errors", "weft.wire.tensors", "weft.wire.message", "weft.wire.headers", "weft.wire.codec"}


@pytest.mark.parametrize(
    "module", ["weft.wire.tensors", *under("weft.wire.message", "weft.wire.headers", "weft.wire.codec")]
)
def test_the_wire_knows_no_learning(module):
    assert named(of(module), "weft") <= WIRE


def loaded_by(*roots: str) -> dict[str, list[str]]:
    """Everything that is loaded along with some modules, each with the way that leads to it."""
    ways: dict[str, list[str]] = {}
    waiting = [(root, [root]) for root in roots]
    while waiting:
        module, way = waiting.pop()
        if module in ways:
            continue
        ways[module] = way
        if module in MODULES:
            waiting += [(one, [*way, one]) for one in of(module, "load")]
            package = module.rpartition(".")[0]
            waiting += [(package, [*way, package])] if package else []
    return ways


def test_the_command_line_loads_no_torch():
    """The folder must be on disk before torch is loaded; a plan's check loads all files of methods and scenarios."""
    roots = [
        "weft",
        "weft.cli.app",
        "weft.plan",
        "weft.runs.folder",
        *under("weft.methods", "weft.scenarios"),
        "weft.networks",
    ]
    ways = loaded_by(*roots)
    assert "weft.errors" in ways
    assert "numpy" in ways
    for heavy in ("torch", "safetensors", "pandas", "matplotlib", "pooch", "requests", "scipy", "PIL", "tensorboard"):
        found = [" -> ".join(way) for module, way in ways.items() if module.split(".")[0] == heavy]
        assert not found


def test_the_worker_process_can_watch_its_parent_before_torch_is_there():
    assert "torch" not in loaded_by("weft.engines.worker")


def test_no_circles():
    """A module that is loaded does not need itself."""
    for module in MODULES:
        for direct in of(module, "load") & set(MODULES):
            way = loaded_by_without_packages(direct).get(module)
            assert way is None, [module, *(way or [])]


def loaded_by_without_packages(root: str) -> dict[str, list[str]]:
    ways: dict[str, list[str]] = {}
    waiting = [(root, [root])]
    while waiting:
        module, way = waiting.pop()
        if module not in ways and module in MODULES:
            ways[module] = way
            waiting += [(one, [*way, one]) for one in of(module, "load")]
    return ways


# ---- what no file may do ---------------------------------------------------------------------------------------------

DANGEROUS_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

# ways to read a file that can run code, beside torch.load and np.load, which can be told not to
PICKLE_INSIDE = ("export.load", "jit.load", "hub.load", "package.PackageImporter", "read_pickle")
# by file: what stands there all the same; docs/trust.md says so, and `weft predict` opens such a file only with --trust
ALLOWED = {"export/files.py": ["torch.export.load, which is pickle inside"]}


def faults(text: str) -> list[str]:
    """What could run a stranger's code, or read a file that can."""
    tree = ast.parse(text)
    found = [one.module for one in imports(text) if one.module.split(".")[0] in DANGEROUS_MODULES]
    forks = [node for node in ast.walk(tree) if isinstance(node, ast.With) and "fork_rng" in ast.unparse(node.items[0])]
    forked = {child for fork in forks for child in ast.walk(fork)}  # a seed is put back behind it
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            found += [f"{name}, which is pickle inside" for name in whole if name.endswith(PICKLE_INSIDE)]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called in (
            "eval",
            "exec",
            "compile",
            "__import__",
            "os.system",
            "os.popen",
            "builtins.eval",
            "builtins.exec",
        ):
            found.append(called)
        if keywords.get("shell", "False") != "False":
            found.append(f"{called} with a shell")
        if keywords.get("allow_pickle", "False") != "False":
            found.append(f"{called} with allow_pickle")
        if called in ("torch.load", "torch.save") and keywords.get("weights_only") != "True":
            found.append(called)
        if called.endswith(PICKLE_INSIDE):
            found.append(f"{called}, which is pickle inside")
        whose = called.split(".")[0]
        if called.endswith("manual_seed") and whose == "torch" and node in forked:
            continue
        if called.endswith(("manual_seed", "random.seed")) and whose in ("torch", "random", "numpy", "np"):
            found.append(f"{called}: randomness is passed, never global")
    return found


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill",
        "eval('1')",
        "exec(text)",
        "subprocess.run('ls', shell=True)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "os.system('ls')",
        "torch.export.load(path)",
        "from torch.export import load",
        "torch.jit.load(path)",
        "pd.read_pickle(path)",
        "torch.manual_seed(0)",
        "with torch.random.fork_rng():\n    np.random.seed(0)",
        "with torch.no_grad():\n    torch.manual_seed(0)",
    ],
)
def test_the_check_finds(bad):
    assert faults(bad)


def test_the_check_lets_pass():
    assert not faults("network.eval()\nsubprocess.run(['ls'])\nnp.load(path)\ntorch.load(path, weights_only=True)")
    assert not faults("with torch.random.fork_rng():\n    torch.manual_seed(0)")


EXAMPLES = sorted((SOURCE.parent.parent / "examples").glob("*.py"))
BENCHMARKS = sorted((SOURCE.parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("file", [*FILES, *EXAMPLES, *BENCHMARKS], ids=lambda file: file.name)
def test_no_file_runs_what_it_reads(file):
    found = faults(file.read_text(encoding="utf-8"))
    if file in [*EXAMPLES, *BENCHMARKS]:  # a single file may own its process, and with it the seed
        found = [fault for fault in found if "randomness" not in fault]
    allowed = ALLOWED.get(file.relative_to(SOURCE).as_posix(), []) if file in FILES else []
    assert found == allowed  # each as often as it is allowed: one more in the same file is one too many


def test_there_are_benchmarks_to_search():
    assert {"flower_fedavg.py", "plain_lenet.py"} <= {file.name for file in BENCHMARKS}
    assert all((SOURCE / name).is_file() for name in ALLOWED)


def test_an_example_stands_alone():
    for file in EXAMPLES:
        if file.name == "fedweit_in_one_file.py":
            assert not named({one.module for one in imports(file.read_text(encoding="utf-8"))}, "weft")


def test_only_known_packages_are_used():
    """What pyproject names, and the standard library; anything else would fail on a fresh machine."""
    allowed = {"weft", "torch", "numpy", "safetensors", "pydantic", "typer", "click", "rich", "filelock", "pandas"}
    allowed |= {"pooch", "requests", "PIL", "scipy", "matplotlib", "tensorboard", "onnxruntime", "onnxscript"}
    allowed |= {"flwr", "cryptography", "httpx"}
    used = {one.split(".")[0] for module in MODULES for one in of(module)}
    assert used - set(sys.stdlib_module_names) <= allowed


def test_flower_is_in_one_folder():
    """It renames things about yearly."""
    users = {module for module in MODULES if named(of(module), "flwr")}
    assert users
    assert users <= set(under("weft.flower"))


def test_every_package_that_is_used_is_named_in_pyproject():
    import tomllib

    project = tomllib.loads((SOURCE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [name for names in project.get("optional-dependencies", {}).values() for name in names]
    named_there = {word.split(">")[0].split("=")[0].split("[")[0] for word in [*project["dependencies"], *extras]}
    used = {one.split(".")[0] for module in MODULES for one in of(module)} - set(sys.stdlib_module_names) - {"weft"}
    assert {"pillow" if name == "PIL" else name for name in used} <= {name.lower() for name in named_there}
