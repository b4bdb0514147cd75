"""What no source file may do: run or unpickle what it reads, call a shell, or seed a global generator."""

from __future__ import annotations

import ast
import re

import pytest
from source_helpers import FILES, SOURCE, imports

DANGEROUS_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# functions that unpickle, besides torch.load and np.load, which have an option against it
PICKLE_INSIDE = ("export.load", "jit.load", "hub.load", "package.PackageImporter", "read_pickle")
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "builtins.eval", "builtins.exec"}
GLOBAL_SEED = re.compile(r"(torch|random|numpy|np)(\.\w+)*\.(manual_seed|manual_seed_all|seed)")
ROOT = SOURCE.parent.parent
SCRIPTS = [*sorted((ROOT / "examples").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))]


def faults(text: str) -> list[str]:
    """What could run foreign code or change randomness for others."""
    tree = ast.parse(text)
    found = [one.module for one in imports(text, "weft.benchmarks") if one.module.split(".")[0] in DANGEROUS_MODULES]
    forks = [node for node in ast.walk(tree) if isinstance(node, ast.With) and "fork_rng" in ast.unparse(node.items[0])]
    forked = {child for fork in forks for child in ast.walk(fork)}  # fork_rng restores the seed of torch
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found += [f"{name} unpickles" for name in names if name.endswith(PICKLE_INSIDE)]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {word.arg: ast.unparse(word.value) for word in node.keywords}
        unsafe = [word for word in ("shell", "allow_pickle") if keywords.get(word, "False") != "False"]
        found += [f"{called} with {word}" for word in unsafe]
        if called in ("torch.load", "torch.save") and keywords.get("weights_only") != "True":
            found.append(called)
        if called in RUNS_TEXT or called.endswith(PICKLE_INSIDE):
            found.append(called)
        if GLOBAL_SEED.fullmatch(called) and not (called.startswith("torch") and node in forked):
            found.append(f"{called} seeds a global generator")
    return found


@pytest.mark.parametrize(
    "bad",
    [
        "import pickle",
        "def f():\n    from dill import loads",
        "eval('1')",
        "exec(text)",
        "subprocess.run('ls', shell=True)",
        "np.load(path, allow_pickle=flag)",
        "torch.load(path)",
        "os.system('ls')",
        "torch.export.load(path)",
        "from torch.export import load",
        "torch.jit.load(path)",
        "pd.read_pickle(path)",
        "torch.manual_seed(0)",
        "torch.cuda.manual_seed_all(0)",
        "with torch.random.fork_rng():\n    np.random.seed(0)",
        "with torch.no_grad():\n    torch.manual_seed(0)",
    ],
)
def test_the_check_finds(bad):
    assert faults(bad)


def test_the_check_accepts():
    assert not faults("network.eval()\nsubprocess.run(['ls'])\nnp.load(path)\ntorch.load(path, weights_only=True)")
    assert not faults("with torch.random.fork_rng():\n    torch.manual_seed(0)\ntorch.Generator().manual_seed(0)")


@pytest.mark.slow
@pytest.mark.parametrize("file", [*FILES, *SCRIPTS], ids=lambda file: file.name)
def test_no_file_runs_what_it_reads(file):
    found = faults(file.read_text(encoding="utf-8"))
    # a script owns its process, and with it the global generator
    assert not [fault for fault in found if file in FILES or "global generator" not in fault]


def test_there_are_scripts_to_search():
    assert {"fedweit_in_one_file.py", "flower_fedavg.py", "plain_lenet.py"} <= {file.name for file in SCRIPTS}
