"""Experiments as files: the paper's tables and figures with their plans and numbers, and those of users."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from weft import methods, repro
from weft.cli.show import LISTS
from weft.errors import WeftError
from weft.plan import ready_plans
from weft.repro.figures import FIGURES
from weft.repro.output import commands
from weft.repro.store import Results

EVERY = {name: repro.load(name) for name in repro.ready_experiments()}
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


def test_every_figure_has_an_experiment():
    assert {one.figure for one in EVERY.values() if one.figure} == set(FIGURES)


def test_the_table_of_all_methods():
    table = repro.load("methods-glyphs")
    assert [row.label for row in table.rows] == [*methods.METHODS, *methods.COMBINATIONS, "ewc-1e4"]
    assert (table.seeds, table.first_seed) == (3, 0)


def test_a_table_at_the_small_scale_has_different_files():
    small = repro.load("table2-cifar", "small")
    assert (repro.load("table2-cifar").stem, small.stem) == ("table2-cifar", "table2-cifar-small")
    assert commands(Results(small, small.rows, range(1))) == ["weft repro table2-cifar --seeds 1 --scale small"]
    with pytest.raises(WeftError, match="one size only"):
        repro.load("methods-glyphs", "small")


def sizes(name: str, scale: str | None, index: int = 0) -> tuple[Any, ...]:
    table = repro.load(name, scale)
    plan = table.plan_of(table.rows[index], 0)
    return plan.clients, plan.tasks, plan.rounds_per_task, plan.epochs_per_round, plan.network, plan.scenario


def test_the_settings_of_the_papers_tables():
    cifar, mixed = "overlapped-cifar100", "noniid-35"
    assert sizes("table1", "paper") == (100, 10, 20, 1, "lenet", cifar)
    assert sizes("table1", "small") == (20, 5, 8, 1, "lenet", cifar)
    assert sizes("table2-cifar", "paper") == (5, 10, 20, 1, "lenet", cifar)
    assert sizes("table2-cifar", "small") == (5, 5, 8, 1, "lenet", cifar)
    assert sizes("table-resnet", "paper") == (5, 7, 20, 1, "resnet18", mixed)
    assert sizes("table-resnet", "small") == (5, 5, 8, 1, "resnet18", mixed)
    assert sizes("table-20tasks", "paper") == (5, 20, 20, 1, "lenet", cifar)
    assert sizes("table-20tasks", "small") == (5, 20, 8, 1, "lenet", cifar)
    assert sizes("table-ablation", "small") == (5, 5, 8, 1, "lenet", mixed)
    epochs = [(20, 1), (10, 2), (4, 5), (1, 20)]
    assert [sizes("table-epochs", "paper", index)[1:4] for index in range(4)] == [(10, *one) for one in epochs]
    assert [sizes("table-epochs", "small", index)[1:4] for index in range(4)] == [(5, *one) for one in epochs]
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
        ("table1", "stl", {"accuracy": (32.96, 0.23), "model": (12200, None)}),
        (
            "table2-cifar",
            "fedweit",
            {
                "accuracy": (55.16, 0.19),
                "forgetting": (0.01, 0),
                "model": (75, None),
                "up": (370, None),
                "down": (1070, None),
            },
        ),
        ("table-resnet", "fedprox+apd", {"accuracy": (92.89, 0.22), "forgetting": (0.02, 0.01), "model": (2050, None)}),
        (
            "table-epochs",
            "4x5",
            {"accuracy": (53.73, 0.44), "model": (83, None), "up": (80, None), "down": (220, None)},
        ),
        (
            "table-regularizers",
            "without-l2",
            {"accuracy": (56.76, 0.84), "model": (63.44, None), "backward_transfer": (-0.3203, None)},
        ),
    ],
)
def test_numbers_of_the_paper(name, row, numbers):
    (found,) = repro.load(name).choose([row])
    assert found.paper == numbers


def test_rows_are_chosen_by_label_before_method():
    table, cost = repro.load("table-ablation"), repro.load("fig-cost")
    for name in ("fedweit", "without-a"):
        assert [row.label for row in table.choose([name])] == [name]
    assert [row.label for row in cost.choose(["fedavg"])] == ["fedavg-0.03", "fedavg-0.1", "fedavg-0.3", "fedavg-1"]
    with pytest.raises(WeftError, match=r"no row .fedwiet.*fedweit"):
        table.choose(["fedwiet"])


def test_tables_and_figures_are_listed():
    listed = {kind: LISTS[kind]() for kind in ("tables", "figures")}
    assert set(listed["tables"][0]) == {"name", "title", "rows", "plan"}
    names = {kind: [entry["name"] for entry in entries] for kind, entries in listed.items()}
    assert sorted(names["tables"] + names["figures"]) == sorted(EVERY)
    assert all(EVERY[name].figure for name in names["figures"])


def test_an_unknown_name():
    with pytest.raises(WeftError, match=r"did you mean methods-glyphs\?"):
        repro.load("method-glyphs")


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


def test_an_experiment_of_a_user(tmp_path):
    (tmp_path / "my_plan.toml").write_text("clients = 2\ntasks = 4\n")
    (tmp_path / "mine.toml").write_text(MINE)
    paper, small = (repro.load(str(tmp_path / "mine.toml"), scale) for scale in (None, "small"))
    assert (paper.stem, small.stem, paper.rows[0].paper["model"]) == ("mine", "mine-small", (7, None))
    first, second = (small.plan_of(row, 1) for row in small.rows)
    assert (first.clients, first.tasks, first.rounds_per_task) == (2, 1, 3)
    assert (second.learning_rate, second.scenario_options["train"]) == (1e-4, 20)
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


def test_a_ready_plan_comes_before_a_file_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "methods").write_text("clients = 77")
    monkeypatch.chdir(tmp_path)
    table = repro.load("methods-glyphs")
    assert table.plan_of(table.rows[0], 0).clients == 4


def test_the_page_lists_every_table_and_figure():
    page = (Path(__file__).resolve().parent.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w-]+)` \|[^|]*\| (\d+ x \d+) \|", page, flags=re.MULTILINE))
    assert listed == {name: f"{len(one.rows)} x {one.seeds}" for name, one in EVERY.items()}
