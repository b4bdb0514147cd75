"""`weft repro` with figures: by name, again, with runs that another one has made already, and without a name."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import pytest
from cli_helpers import Outcome, assert_one_line
from test_repro_figures import tiny_figure

import weft.cli.app
from weft import repro
from weft.repro import Figure

pytest_plugins = ["cli_helpers", "data_helpers"]


@functools.cache
def tiny_cost() -> Figure:
    found = tiny_figure("fig-cost")
    return dataclasses.replace(found, rows=found.rows[-2:])


@pytest.fixture
def weft_repro(small_data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_cost()  # of the real one, which its name does not stand for any more
    monkeypatch.setitem(repro.FIGURES, "fig-cost", f"{__name__}:tiny_cost")

    def act(*words: str) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["weft", "repro", *words])
        with pytest.raises(SystemExit) as end:
            weft.cli.app.main()
        said = capsys.readouterr()
        return Outcome(int(end.value.code or 0), said.out, said.err)

    return act


@pytest.mark.slow
def test_a_figure_by_its_command(weft_repro):
    outcome = weft_repro("fig-cost", "--workers", "1", "--only", "fedavg-1")
    assert outcome.code == 0, outcome
    assert "1 of 1 runs finished" in outcome.err
    assert outcome.out.splitlines()[-4:] == [f"results/fig-cost.{kind}" for kind in ("csv", "md", "png", "svg")]
    assert "| FedAvg | " in outcome.out
    again = weft_repro("fig-cost", "--workers", "1", "--json")
    assert again.code == 0, again
    assert [x for x, *_ in json.loads(again.out)["panels"]["accuracy"]["fedavg"]] == [0.3, 1]
    assert "1 of 2 runs to do" in again.err
    assert weft_repro("fig-cost").err == ""
    assert_one_line(weft_repro("fig-costs"), "no table or figure 'fig-costs'", "did you mean fig-cost?")


def test_without_matplotlib_nothing_is_run(weft_repro, monkeypatch):
    monkeypatch.setattr("weft.repro.figures.style.find_spec", lambda name: None)
    assert_one_line(weft_repro("fig-cost"), "matplotlib", 'pip install "weft[figures]"')
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_run_of_the_same_plan_serves_two_figures(weft_repro, monkeypatch):
    assert weft_repro("fig-cost", "--workers", "1", "--only", "fedavg-1").code == 0
    other = dataclasses.replace(tiny_cost(), name="fig-other")
    monkeypatch.setitem(repro.FIGURES, "fig-other", f"{__name__}:other")
    monkeypatch.setattr(sys.modules[__name__], "other", lambda: other, raising=False)
    broken = Path("runs/repro/fig-broken/fedavg-1-s0")
    broken.mkdir(parents=True)
    (broken / "plan.toml").write_bytes(Path("runs/repro/fig-cost/fedavg-1-s0/plan.toml").read_bytes())
    outcome = weft_repro("fig-other", "--only", "fedavg-1")
    assert (outcome.code, outcome.err) == (0, "")
    assert not Path("runs/repro/fig-other").exists()
    first, second = (Path(f"results/{name}.csv").read_text() for name in ("fig-cost", "fig-other"))
    assert first == second
    elsewhere = weft_repro("fig-other", "--only", "fedavg-1", "--runs", "mine", "--out", "mine", "--workers", "1")
    assert elsewhere.code == 0
    assert Path("mine/fedavg-1-s0/summary.json").exists()


@pytest.mark.slow
def test_without_a_name_all_are_listed(weft_repro):
    outcome = weft_repro()
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    listed = json.loads(weft_repro("--json").out)
    assert [entry["name"] for entry in listed] == [*repro.TABLES, *repro.FIGURES]
    for name in (*repro.TABLES, *repro.FIGURES):
        assert name in outcome.out
