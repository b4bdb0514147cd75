"""The committed results: made with the current plans, and reported in FIDELITY.md as measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from weft.benchmarks.suite import default_hash
from weft.repro import Scale, load, ready_experiments
from weft.repro.store import Results, read_csv

FIDELITY = Path(__file__).resolve().parent.parent / "FIDELITY.md"
README, RESULTS = FIDELITY.parent / "README.md", FIDELITY.parent / "results"
STALE = ("methods-glyphs",)  # to be run again; README.md names it under "Limitations"
EVERY = [
    (name, scale)
    for name in ready_experiments()
    for scale in ((None,) if load(name).small is None else ("paper", "small"))
]


@pytest.fixture(autouse=True)
def without_images(tmp_path, monkeypatch):
    """Committed results do not depend on the dataset cache of this machine."""
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))


def committed(name: str, scale: Scale | None) -> Results:
    experiment = load(name, scale)
    records = read_csv(experiment, RESULTS / f"{experiment.stem}.csv")
    return Results(experiment, experiment.rows, range(experiment.seeds), records)


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_committed_results_are_made_with_the_current_plans(name, scale):
    """A change of a default or of a ready plan makes results stale: run `weft repro NAME` again."""
    results = committed(name, scale)
    stale = [record.key for record in results.records.values() if not results.is_current(record)]
    assert bool(stale) == (results.experiment.stem in STALE), stale
    assert results.mixed_images() == []


def test_stale_results_are_named_in_the_readme():
    told = README.read_text().split("\n## Limitations\n")[1].split("\n## ")[0]
    assert all(f"results/{stem}" in told for stem in STALE)


def test_the_committed_benchmark_is_made_with_the_current_defaults():
    assert json.loads((RESULTS / "bench.json").read_text())["plan_hash"] == default_hash()


def measured(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """The table of runs in FIDELITY.md: row, experiment, and the other cells."""
    for line in text.split("\n## Measured\n")[1].split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):
            yield cells[0].strip("`"), cells[1].strip("`"), cells[2:]


def wanted(row: str, stem: str) -> list[str]:
    name = stem.removesuffix("-small")
    results = committed(name, "small" if stem.endswith("-small") else None)
    lines = [record.lines[0] for record in results.current() if record.row == row]
    ours = 100 * fmean(line["accuracy"] for line in lines)
    (published,) = (one.paper.get("accuracy") for one in results.experiment.rows if one.label == row)
    theirs = "-" if published is None else f"{published[0]:.2f}"
    return [f"{ours:.2f}", theirs, "-" if published is None else f"{ours - published[0]:+.2f}", str(len(lines))]


def test_fidelity_reports_what_was_measured():
    told = list(measured(FIDELITY.read_text()))
    assert told
    for row, stem, cells in told:
        assert cells == wanted(row, stem), (row, stem)


def test_fidelity_reports_every_measured_row():
    told = {(row, stem) for row, stem, _ in measured(FIDELITY.read_text())}
    for name, scale in EVERY:
        results = committed(name, scale)
        if not results.experiment.figure:
            assert {(record.row, results.experiment.stem) for record in results.current()} <= told
