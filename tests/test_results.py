"""The committed results: of the plans as they are now, and told in FIDELITY.md as they were measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest

from weft.benchmarks.suite import default_hash
from weft.repro import FIGURES, TABLES, Figure, Scale, load
from weft.repro.figures.writing import FigureDesk
from weft.repro.store import Results, key_of
from weft.repro.writing import TableDesk

FIDELITY = Path(__file__).resolve().parent.parent / "FIDELITY.md"
README, RESULTS = FIDELITY.parent / "README.md", FIDELITY.parent / "results"
STALE = ("methods-glyphs",)  # still to be made again; README.md names it under "Limitations"
EVERY = [
    (name, scale)
    for name in (*TABLES, *FIGURES)
    for scale in ((None,) if load(name).scale is None else ("paper", "small"))
]


@pytest.fixture(autouse=True)
def without_images(tmp_path, monkeypatch):
    """What is committed does not depend on the images that somebody has."""
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))


def committed(name: str, scale: Scale | None) -> Results:
    experiment = load(name, scale)
    desk = FigureDesk(experiment, RESULTS) if isinstance(experiment, Figure) else TableDesk(experiment, RESULTS)
    return Results(experiment, experiment.rows, range(experiment.seeds), desk.known())


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_what_is_committed_is_of_the_plans_as_they_are_now(name, scale):
    """After a change of a default or of a ready plan the results are others: `weft repro NAME` makes them again."""
    results = committed(name, scale)
    stale = [key_of(line) for line in results.lines.values() if not results.is_current(line)]
    assert bool(stale) == (results.experiment.stem in STALE), stale
    assert results.mixed_images() == []


def test_what_is_out_of_date_is_told():
    told = README.read_text().split("\n## Limitations\n")[1].split("\n## ")[0]
    assert all(f"results/{stem}" in told for stem in STALE)


def test_the_benchmark_that_is_committed_is_of_the_defaults_as_they_are_now():
    assert json.loads((RESULTS / "bench.json").read_text())["plan_hash"] == default_hash()


def measured(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """The lines of FIDELITY.md's table of runs: row, table, and what is said of them."""
    for line in text.split("\n## Measured\n")[1].split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[0].startswith("`"):
            yield cells[0].strip("`"), cells[1].strip("`"), cells[2:]


def wanted(row: str, stem: str) -> list[str]:
    name = stem.removesuffix("-small")
    results = committed(name, "small" if stem.endswith("-small") else None)
    lines = [line for line in results.current() if line.row == row]
    ours = 100 * fmean(line.accuracy for line in lines)
    published = results.experiment.published.get(row, {}).get("accuracy")
    theirs = "-" if published is None else f"{published[0]:.2f}"
    return [f"{ours:.2f}", theirs, "-" if published is None else f"{ours - published[0]:+.2f}", str(len(lines))]


def test_fidelity_tells_what_was_measured():
    told = list(measured(FIDELITY.read_text()))
    assert told
    for row, stem, cells in told:
        assert cells == wanted(row, stem), (row, stem)


def test_fidelity_leaves_out_no_row_that_was_measured():
    told = {(row, stem) for row, stem, _ in measured(FIDELITY.read_text())}
    for name, scale in EVERY:
        results = committed(name, scale)
        if not isinstance(results.experiment, Figure):
            assert {(line.row, results.experiment.stem) for line in results.current()} <= told
