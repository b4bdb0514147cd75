"""Run every command and every program of README.md and docs/ in an empty folder.

There the plan `demo` is a tiny one (a file called `demo` in the current folder has precedence over the ready plan):
the tests are about the documentation, not about learning. `weft repro` is patched to use that plan, and `weft bench`
to measure as little as possible.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from image_helpers import write_folder, write_table

from weft import repro
from weft.methods import METHODS, class_of
from weft.networks import NETWORKS
from weft.plan import Plan
from weft.scenarios import SCENARIOS, builder_of

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = ("many-machines.md",)  # tests/flower runs its commands
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in ELSEWHERE),
]
TINY = """
clients = 2
tasks = 2
network = "mlp"
rounds_per_task = 2
batch_size = 10
[scenario]
train = 20
valid = 10
test = 10
"""
TINY_TABLES = """
from pathlib import Path
from weft.cli import app as cli
from weft import repro
repro.Experiment.plan_file = lambda table, row: Path("demo")
cli.main()
"""


TINY_BENCH = """
from weft.cli import app as cli
from weft.benchmarks import suite
tiny = {"network": "mlp", "batch_size": 10, "scenario.train": 20, "scenario.valid": 10, "scenario.test": 10}
suite.QUICK = suite.FULL = suite.Amounts(
    passes=2, tasks=2, worker_turns=1, worker_rounds=3, starts=1, clients=[5, 1000], client_rounds=2, client_limit=0.0,
    messages=[10], entries=[10, 20], peer_turns=1, peer_rounds=1, paired_seeds=[0], paired_tasks=2, plan=tiny,
)
cli.main()
"""
WITH_PACKS = ("bring-your-own.md", "take-home.md")  # they pack images into the cache
SMALLER = {"repro": ["-c", TINY_TABLES], "bench": ["-c", TINY_BENCH]}  # commands without a plan argument


# all pages together take ten minutes: `make test` runs the first one, `make test-all` all
EACH = [pytest.param(page, id=page.name, marks=() if page.name == "start.md" else pytest.mark.long) for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    lines = [line.split("#")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line]


def _matching(word: str, folder: Path) -> list[str]:
    """Expand a word with a star like a shell."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word)) if "*" in word else []


def _run_commands(page: Path, tmp_path: Path) -> None:
    (tmp_path / "demo").write_text(TINY)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if not any(words[0] == "python" for words in commands(page)):  # such a page writes the images itself
        write_folder(tmp_path / "photos", images=12)
    write_table(tmp_path)
    for words in commands(page):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), words
        elif words[0] == "weft":
            expanded = [found for word in words for found in (_matching(word, tmp_path) or [word])]
            start = SMALLER.get(words[1], ["-m", "weft"])
            done = subprocess.run(
                [sys.executable, *start, *expanded[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
            assert done.stdout.strip(), shlex.join(words)
        elif words[0] == "python":
            subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True, timeout=60)
        else:
            assert words[0] in (".", "pip"), f"{page.name} has a command that no test runs: {words}"


@pytest.mark.slow
@pytest.mark.parametrize("page", EACH)
def test_every_command_of_a_page_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in WITH_PACKS:
        monkeypatch.setenv("WEFT_DATA", str(tmp_path / "cache"))
    _run_commands(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", EACH)
def test_every_program_of_a_page_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name == "take-home.md":  # the programs read what the commands write
        monkeypatch.setenv("WEFT_DATA", str(tmp_path / "cache"))
        _run_commands(page, tmp_path)
    for place, program in enumerate(blocks(page, "python")):
        (tmp_path / f"program{place}.py").write_text(program)
        argv = [sys.executable, f"program{place}.py"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_notebook_runs_and_is_stored_without_output(tmp_path: Path) -> None:
    notebooks = sorted((ROOT / "examples").glob("*.ipynb"))
    assert notebooks
    for notebook in notebooks:
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        assert not any(cell["outputs"] for cell in cells)
        program = tmp_path / f"{notebook.stem}.py"
        program.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
        done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_an_extra_does_not_replace_an_editable_clone() -> None:
    """`make` installs the clone as editable; without -e, pip would put a copy of it in its place."""
    extras = [(page.name, line) for page in (ROOT / "docs").glob("*.md") for line in page.read_text().splitlines()]
    extras = [(name, line) for name, line in extras if re.search(r'pip install [^`]*"\.\[', line)]
    assert len(extras) >= 5
    constrained = "--constraint constraints-flower.txt"  # an environment of its own, without an editable clone
    assert all('pip install -e ".[' in line or constrained in line for _, line in extras)


def test_every_plan_of_a_page_is_valid() -> None:
    found = [tomllib.loads(block) for page in PAGES for block in blocks(page, "toml")]
    plans = [given for given in found if "plan" not in given]  # the others are experiments of `weft repro`
    assert plans
    for given in plans:
        Plan.merge(given)


def test_the_plan_page_names_every_key_and_option() -> None:
    text = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
    keys = [field.alias or key for key, field in Plan.model_fields.items() if not key.endswith("_options")]
    options = {key for name in METHODS for key in class_of(name).Options.model_fields}
    options |= {key for name in SCENARIOS for key in builder_of(name).Options.model_fields}
    options |= {key for options in NETWORKS.values() for key in options.model_fields}
    missing = [key for key in [*keys, *sorted(options)] if not re.search(rf"`{key}[`=]", text)]
    assert not missing


def test_fidelity_names_only_options_that_exist_and_the_page_about_tables_every_one() -> None:
    text = (ROOT / "FIDELITY.md").read_text(encoding="utf-8")
    known = {f"method.{key}" for name in METHODS for key in class_of(name).Options.model_fields}
    known |= {f"network.{key}" for options in NETWORKS.values() for key in options.model_fields}
    named = set(re.findall(r"`((?:method|network)\.\w+)", text))
    assert named
    assert named <= known
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    assert [name for name in repro.ready_experiments() if f"`{name}`" not in text] == []


NOT_LITERAL = {"the file's name", "twice tasks", "cross entropy", "none", ""}


def _table_rows(page: Path) -> list[list[str]]:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [
        [cell.replace("`", "").strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines
    ]


def _documented_defaults() -> list[tuple[str, str]]:
    """Key and default of every row of the plan page: `a`, `b` | 1, 2 are two of them."""
    found = []
    for cells in _table_rows(ROOT / "docs" / "plans.md"):
        keys, defaults = (cells[1], cells[2]) if len(cells) > 4 or cells[0].startswith("fed") else (cells[0], cells[1])
        split = keys.split(", "), defaults.split(", ")
        found += list(zip(*split, strict=True)) if len(split[0]) == len(split[1]) else [(keys, defaults)]
    return [(key.strip(), default.strip()) for key, default in found]


def _is_default(said: str, values: set[object]) -> bool:
    if said in NOT_LITERAL:
        return True
    above, _, below = said.partition("/")
    try:
        number = float(above) / (float(below) if below else 1.0)
    except ValueError:
        return said in {str(value).lower() if isinstance(value, bool) else str(value) for value in values}
    return any(isinstance(value, int | float) and abs(value - number) < 1e-12 for value in values)


def test_the_plan_page_has_the_defaults_of_the_code() -> None:
    models = [Plan, *(class_of(name).Options for name in METHODS), *NETWORKS.values()]
    models += [builder_of(name).Options for name in SCENARIOS]
    known: dict[str, set[object]] = {}
    for model in models:
        for key, field in model.model_fields.items():
            known.setdefault(field.alias or key, set()).add(field.default)
    checked = [(key, said) for key, said in _documented_defaults() if key in known and said != "option"]  # a heading
    assert len(checked) > 80
    assert [(key, said, known[key]) for key, said in checked if not _is_default(said, known[key])] == []
