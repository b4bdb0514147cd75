"""Experiments as files: the paper's tables and figures with their plans and numbers, and those of users."""

from __future__ import annotations

import json
import operator
import re
import sys
from pathlib import Path

import pytest
from cli_helpers import Outcome, assert_one_line

import weft.cli.app
from weft import methods, repro
from weft.cli.show import LISTS
from weft.errors import WeftError
from weft.plan import ready_plans
from weft.repro import runner
from weft.repro.figures import FIGURES
from weft.repro.output import commands
from weft.repro.store import Results

pytest_plugins = ["cli_helpers", "data_helpers"]

EVERY = {name: repro.load(name) for name in repro.ready_experiments()}
EPOCHS = [(20, 1), (10, 2), (4, 5), (1, 20)]
SIZES = [
    (name, scale) for name, one in EVERY.items() for scale in (("paper", "small") if one.small is not None else (None,))
]


@pytest.mark.parametrize(("name", "scale"), SIZES)
def test_every_experiment_has_valid_plans(name, scale):
    experiment = repro.load(name, scale)
    assert (experiment.name, experiment.scale) == (name, scale)
    assert experiment.plan in ready_plans()
    for row in experiment.rows:
        plan = experiment.plan_of(row, 7)
        assert (plan.seed, plan.method) == (7, row.method)
        assert set(row.paper) <= set(experiment.measures)
        if experiment.figure:
            assert plan.rounds_per_task == (20 if scale == "paper" or name == "fig-transfer" else 8)


def test_every_figure_and_every_method_has_an_experiment():
    assert {one.figure for one in EVERY.values() if one.figure} == set(FIGURES)
    labels = [row.label for row in EVERY["methods-glyphs"].rows]
    assert labels == [*methods.METHODS, *methods.COMBINATIONS, "ewc-1e4"]


def test_a_table_at_the_small_scale_has_different_files():
    small = repro.load("table2-cifar", "small")
    assert (repro.load("table2-cifar").stem, small.stem) == ("table2-cifar", "table2-cifar-small")
    assert commands(Results(small, small.rows, range(1))) == ["weft repro table2-cifar --seeds 1 --scale small"]
    with pytest.raises(WeftError, match="one size only"):
        repro.load("methods-glyphs", "small")


@pytest.mark.parametrize(
    ("name", "scale", "wanted"),
    [
        ("table1", "paper", [(100, 10, 20, 1, "lenet", "overlapped-cifar100")]),
        ("table1", "small", [(20, 5, 8, 1, "lenet", "overlapped-cifar100")]),
        ("table2-cifar", "paper", [(5, 10, 20, 1, "lenet", "overlapped-cifar100")]),
        ("table2-cifar", "small", [(5, 5, 8, 1, "lenet", "overlapped-cifar100")]),
        ("table-resnet", "paper", [(5, 7, 20, 1, "resnet18", "noniid-35")]),
        ("table-resnet", "small", [(5, 5, 8, 1, "resnet18", "noniid-35")]),
        ("table-20tasks", "paper", [(5, 20, 20, 1, "lenet", "overlapped-cifar100")]),
        ("table-20tasks", "small", [(5, 20, 8, 1, "lenet", "overlapped-cifar100")]),
        ("table-ablation", "small", [(5, 5, 8, 1, "lenet", "noniid-35")]),
        ("table-epochs", "paper", [(5, 10, *one, "lenet", "overlapped-cifar100") for one in EPOCHS]),
        ("table-epochs", "small", [(5, 5, *one, "lenet", "overlapped-cifar100") for one in EPOCHS]),
    ],
)
def test_the_settings_of_the_papers_tables(name, scale, wanted):
    keys = operator.attrgetter("clients", "tasks", "rounds_per_task", "epochs_per_round", "network", "scenario")
    table = repro.load(name, scale)
    assert [keys(table.plan_of(row, 0)) for row in table.rows[: len(wanted)]] == wanted


def test_the_rows_of_the_ablation():
    table = repro.load("table-ablation")
    ablated = [table.plan_of(row, 0).method_options["ablate"] for row in table.rows]
    assert ablated == [[], ["b_comm"], ["a_comm"], ["a"], ["m"]]


def test_the_full_method_is_one_run_in_three_tables():
    plans = set()
    for name in ("table2-noniid", "table-ablation", "table-regularizers"):
        table = repro.load(name)
        (row,) = table.choose(["fedweit"])
        plans.add(table.plan_of(row, 3).toml())
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("name", "row", "numbers"),
    [
        ("methods-glyphs", "fedweit", {"accuracy": (84.11, 0.27), "forgetting": (0, 0)}),
        ("table1", "fedweit", {"accuracy": (39.58, 0.27), "forgetting": (0.01, 0), "model": (4030, None)}),
        ("table2-cifar", "fedweit", {"accuracy": (55.16, 0.19), "up": (370, None), "down": (1070, None)}),
        ("table-resnet", "fedprox+apd", {"accuracy": (92.89, 0.22), "forgetting": (0.02, 0.01), "model": (2050, None)}),
        ("table-epochs", "4x5", {"accuracy": (53.73, 0.44), "model": (83, None), "up": (80, None)}),
        ("table-regularizers", "without-l2", {"model": (63.44, None), "backward_transfer": (-0.3203, None)}),
    ],
)
def test_numbers_of_the_paper(name, row, numbers):
    (found,) = repro.load(name).choose([row])
    assert found.paper.items() >= numbers.items()


def test_rows_are_chosen_by_label_before_method():
    table, cost = repro.load("table-ablation"), repro.load("fig-cost")
    for name in ("fedweit", "without-a"):
        assert [row.label for row in table.choose([name])] == [name]
    assert [row.label for row in cost.choose(["fedavg"])] == ["fedavg-0.03", "fedavg-0.1", "fedavg-0.3", "fedavg-1"]
    with pytest.raises(WeftError, match=r"no row .fedwiet.*fedweit"):
        table.choose(["fedwiet"])
    with pytest.raises(WeftError, match=r"did you mean methods-glyphs\?"):
        repro.load("method-glyphs")


def test_tables_and_figures_are_listed():
    listed = {kind: LISTS[kind]() for kind in ("tables", "figures")}
    assert set(listed["tables"][0]) == {"name", "title", "rows", "plan"}
    names = {kind: [entry["name"] for entry in entries] for kind, entries in listed.items()}
    assert sorted(names["tables"] + names["figures"]) == sorted(EVERY)
    assert all(EVERY[name].figure for name in names["figures"])


# ---- files of users --------------------------------------------------------------------------------------------------

MINE = """
title = "My table"
plan = "my_plan.toml"
set = { rounds_per_task = 3 }
small = { tasks = 1 }

[rows]
fedavg = { paper = { accuracy = [50.0, 1.5], model = 7 } }
slow = { method = "fedavg", plan = "demo", set = { scenario.train = 20, learning_rate = 1e-4 } }
"""


def test_an_experiment_of_a_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").write_text("clients = 77")  # a ready plan comes before a file of its name
    (tmp_path / "my_plan.toml").write_text("clients = 2\ntasks = 4\n")
    (tmp_path / "mine.toml").write_text(MINE)
    paper, small = (repro.load(str(tmp_path / "mine.toml"), scale) for scale in (None, "small"))
    assert (paper.stem, small.stem, paper.rows[0].paper["model"]) == ("mine", "mine-small", (7, None))
    first, second = (small.plan_of(row, 1) for row in small.rows)
    assert (first.clients, first.tasks, first.rounds_per_task) == (2, 1, 3)
    assert (second.learning_rate, second.scenario_options["train"]) == (1e-4, 20)
    assert second.clients != 77
    assert commands(Results(paper, paper.rows, range(3))) == [f"weft repro {tmp_path / 'mine.toml'} --seeds 3"]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("title", "titel"), "unknown key titel; did you mean title"),
        (("[rows]", "[row]"), "unknown key row; did you mean rows|rows: field required"),
        (("model = 7", "modell = 7"), r"rows\.fedavg\.paper\.modell"),
        (("{ method = ", "{ methd = "), r"unknown key rows\.slow\.methd; did you mean method"),
        (("fedavg = {", '"a/b" = {'), r"rows\.a/b\.label"),
        (("fedavg = {", "fedavg = { = {"), "not valid TOML"),
        (('title = "My table"', 'title = "My table"\nfigure = "costs"'), "figure"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path, change, error):
    (tmp_path / "mine.toml").write_text(MINE.replace(*change))
    with pytest.raises(WeftError, match=rf"mine\.toml.*({error})") as found:
        repro.load(str(tmp_path / "mine.toml"))
    assert "\n" not in str(found.value)
    with pytest.raises(WeftError, match=r"yours\.toml cannot be read"):
        repro.load(str(tmp_path / "yours.toml"))


def test_the_page_lists_every_table_and_figure():
    page = (Path(__file__).resolve().parent.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w-]+)` \|[^|]*\| (\d+ x \d+) \|", page, flags=re.MULTILINE))
    assert listed == {name: f"{len(one.rows)} x {one.seeds}" for name, one in EVERY.items()}


# ---- the command -----------------------------------------------------------------------------------------------------

COST = """
title = "A tiny figure"
figure = "cost"
plan = "overlapped-cifar100"
method = "fedavg"
seeds = 1
set = { clients = 2, tasks = 2, rounds_per_task = 2, batch_size = 20, network = "mlp" }

[rows]
"fedavg-0.3" = { set = { method.keep = 0.3 } }
fedavg-1 = { set = { method.keep = 1.0 } }
"""


@pytest.fixture
def weft_repro(small_data, tmp_path, monkeypatch, capsys):
    """`weft repro` in a folder with the experiments mine.toml and other.toml."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "other"):
        Path(f"{name}.toml").write_text(COST)

    def act(*words: str) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["weft", "repro", *words])
        with pytest.raises(SystemExit) as end:
            weft.cli.app.main()
        printed = capsys.readouterr()
        return Outcome(int(end.value.code or 0), printed.out, printed.err)

    return act


@pytest.mark.slow
def test_a_figure_by_its_command(weft_repro):
    outcome = weft_repro("mine.toml", "--workers", "1", "--only", "fedavg-1")
    assert outcome.code == 0, outcome
    assert "1 of 1 runs finished" in outcome.err
    assert outcome.out.splitlines()[-4:] == [f"results/mine.{kind}" for kind in ("csv", "md", "png", "svg")]
    assert "| fedavg | " in outcome.out
    again = weft_repro("mine.toml", "--workers", "1", "--json")
    assert again.code == 0, again
    assert [x for x, *_ in json.loads(again.out)["panels"]["accuracy"]["fedavg"]] == [0.3, 1]
    assert "1 of 2 runs to do" in again.err
    assert weft_repro("mine.toml").err == ""


def test_without_matplotlib_nothing_is_run(weft_repro, monkeypatch):
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    assert_one_line(weft_repro("mine.toml"), "matplotlib", 'pip install "weft[figures]"')
    assert not Path("results").exists()
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_run_of_the_same_plan_serves_two_figures(weft_repro):
    assert weft_repro("mine.toml", "--workers", "1", "--only", "fedavg-1").code == 0
    broken = Path("runs/repro/broken/fedavg-1-s0")
    broken.mkdir(parents=True)
    (broken / "plan.toml").write_bytes(Path("runs/repro/mine/fedavg-1-s0/plan.toml").read_bytes())
    outcome = weft_repro("other.toml", "--only", "fedavg-1")
    assert (outcome.code, outcome.err) == (0, "")
    assert not Path("runs/repro/other").exists()
    assert Path("results/mine.csv").read_text() == Path("results/other.csv").read_text()
    elsewhere = weft_repro("other.toml", "--only", "fedavg-1", "--runs", "mine", "--out", "mine", "--workers", "1")
    assert elsewhere.code == 0
    assert Path("mine/fedavg-1-s0/summary.json").exists()


def test_without_a_name_all_are_listed(weft_repro):
    outcome = weft_repro()
    assert max(map(len, outcome.out.splitlines())) <= 80
    listed = [entry["name"] for entry in json.loads(weft_repro("--json").out)]
    assert set(listed) == set(repro.ready_experiments())
    assert all(name in outcome.out for name in listed)
