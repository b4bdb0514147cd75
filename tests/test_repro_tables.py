"""The tables there are: their plans at both scales, the paper's numbers, and the page that lists them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from weft import methods, repro
from weft.errors import WeftError
from weft.plan import ready_plans
from weft.repro import Table, describing, writing
from weft.repro.store import Results

pytest_plugins = ["cli_helpers"]


def test_the_table_of_all_methods():
    table = repro.load("methods-glyphs")
    labels = [row.label for row in table.rows]
    assert labels == [*methods.METHODS, *methods.COMBINATIONS, "ewc-1e4"]
    assert (table.seeds, table.first_seed) == (3, 0)
    assert table.published["fedweit"] == {"accuracy": (84.11, 0.27), "forgetting": (0.0, 0.0)}
    assert table.published["stl"] == {"accuracy": (85.78, 0.17)}
    for entry in table.published.values():
        assert set(entry) <= {measure.key for measure in writing.MEASURES}


def test_a_table_at_a_small_scale_has_files_of_its_own():
    paper, small = repro.load("table2-cifar"), repro.load("table2-cifar", "small")
    assert (paper.stem, small.stem) == ("table2-cifar", "table2-cifar-small")
    sizes = [
        (plan.clients, plan.tasks, plan.rounds_per_task) for plan in (t.plan_of(t.rows[0], 0) for t in (paper, small))
    ]
    assert sizes == [(5, 10, 20), (5, 5, 8)]
    results = Results(small, small.rows, range(1), {})
    assert describing.commands_of(results) == ["weft repro table2-cifar --seeds 1 --scale small"]
    with pytest.raises(WeftError, match="one size only"):
        repro.load("methods-glyphs", "small")


SCALED = [name for name in repro.TABLES if name != "methods-glyphs"]


@pytest.mark.parametrize(("name", "scale"), [("methods-glyphs", None), *itertools.product(SCALED, ("paper", "small"))])
def test_every_table_has_plans_that_are_valid(name, scale):
    table = repro.load(name, scale)
    assert isinstance(table, Table)
    assert table.name == name
    assert str(table.plan) in ready_plans()
    for row in table.rows:
        assert table.plan_of(row, 7).seed == 7
        assert table.plan_of(row, 7).method == row.method
    assert set(table.published) <= {row.label for row in table.rows} | {"stl"}
    for numbers in table.published.values():
        assert set(numbers) <= set(table.measures)


def sizes(name: str, scale: str | None, place: int = 0) -> tuple[Any, ...]:
    table = repro.load(name, scale)
    plan = table.plan_of(table.rows[place], 0)
    return plan.clients, plan.tasks, plan.rounds_per_task, plan.epochs_per_round, plan.network, plan.scenario


def test_the_settings_of_the_papers_tables():
    cifar, mixed = "overlapped-cifar100", "noniid-35"
    assert sizes("table1", "paper") == (100, 10, 20, 1, "lenet", cifar)
    assert sizes("table1", "small") == (20, 5, 8, 1, "lenet", cifar)
    assert sizes("table-resnet", "paper") == (5, 7, 20, 1, "resnet18", mixed)
    assert sizes("table-resnet", "small") == (5, 5, 8, 1, "resnet18", mixed)
    assert sizes("table-20tasks", "paper") == (5, 20, 20, 1, "lenet", cifar)
    assert sizes("table-20tasks", "small") == (5, 20, 8, 1, "lenet", cifar)
    assert sizes("table-ablation", "small") == (5, 5, 8, 1, "lenet", mixed)
    assert [sizes("table-epochs", "paper", place)[2:4] for place in range(4)] == [(20, 1), (10, 2), (4, 5), (1, 20)]
    assert [sizes("table-epochs", "small", place)[1:4] for place in range(4)] == [
        (5, 20, 1),
        (5, 10, 2),
        (5, 4, 5),
        (5, 1, 20),
    ]
    table = repro.load("table-ablation")
    assert [table.plan_of(row, 0).method_options["ablate"] for row in table.rows] == [
        [],
        ["b_comm"],
        ["a_comm"],
        ["a"],
        ["m"],
    ]


def test_the_full_method_is_one_run_in_three_tables():
    """Of the very same plan, so that it is made once."""
    plans = set()
    for name in ("table2-noniid", "table-ablation", "table-regularizers"):
        table = repro.load(name)
        (row,) = table.choose(["fedweit"])[:1]
        plans.add(table.plan_of(row, 3).toml())
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("name", "row", "numbers"),
    [
        ("table1", "fedweit", {"accuracy": (39.58, 0.27), "forgetting": (0.01, 0.0), "model": (4030, None)}),
        ("table1", "stl", {"accuracy": (32.96, 0.23), "model": (12200, None)}),
        (
            "table2-cifar",
            "fedweit",
            {
                "accuracy": (55.16, 0.19),
                "forgetting": (0.01, 0.0),
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
    table = repro.load(name)
    assert isinstance(table, Table)
    assert table.published[row] == numbers


def test_a_file_that_lies_about_is_not_taken_for_the_plan_of_a_table(tmp_path, monkeypatch):
    (tmp_path / "methods").write_text("clients = 77")
    monkeypatch.chdir(tmp_path)
    table = repro.load("methods-glyphs")
    assert table.plan_of(table.rows[0], 0).clients == 4


def test_list_tables(command):
    outcome = command("list", "tables")
    assert (outcome.code, outcome.err) == (0, "")
    assert max(map(len, outcome.out.splitlines())) <= 80
    listed = json.loads(command("list", "tables", "--json").out)
    assert [entry["name"] for entry in listed] == list(repro.TABLES)
    assert set(listed[0]) == {"name", "title", "rows", "plan"}
    assert "fedweit" in listed[0]["rows"]
    for word in ("methods-glyphs", "fedweit", "methods"):
        assert word in outcome.out


def test_an_unknown_table():
    with pytest.raises(WeftError, match=r"did you mean methods-glyphs\?"):
        repro.load("method-glyphs")


def test_the_page_lists_every_table_and_figure():
    page = (Path(__file__).resolve().parent.parent / "docs" / "reproduce.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `([\w-]+)` \|[^|]*\| (\d+ x \d+) \|", page, flags=re.MULTILINE))
    for name in (*repro.TABLES, *repro.FIGURES):
        found = repro.load(name)
        assert listed.pop(name) == f"{len(found.rows)} x {found.seeds}"
    assert not listed
