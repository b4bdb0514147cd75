"""What is written and shown of a table: digits computed by hand, the csv to the last digit, LaTeX, the terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import filelock
import pytest
from rich.console import Console

from weft.errors import WeftError
from weft.report import terminal
from weft.repro import Experiment, output, store
from weft.repro.store import Record, Results, Store, csv_text, measured_line, plan_hash, read_csv

pytest_plugins = ["cli_helpers"]

ROWS: dict[str, Any] = {"fedavg": {}, "avg-fast": {"method": "fedavg", "set": {"learning_rate": 0.01}}, "stl": {}}


def a_table(plan: Path, rows: dict[str, Any] = ROWS, **fields: Any) -> Experiment:
    return Experiment(name="tiny", title="A tiny table", plan=str(plan), rows=rows, **fields)


@pytest.fixture
def table(plan_file) -> Experiment:
    return a_table(plan_file)


def record(table: Experiment, label: str, seed: int, summary: dict[str, Any], images: str = "") -> Record:
    (row,) = (row for row in table.rows if row.label == label)
    identity = plan_hash(table.plan_of(row, seed).toml())
    return Record(label, row.method, seed, identity, images, (measured_line(summary),))


# ---- digits by hand --------------------------------------------------------------------------------------------------


def summary(accuracy: float, forgetting: float | None, **more: Any) -> dict[str, Any]:
    sent = {"bytes": 5_000_000, "nonzeros": 250_000, "dense_bytes": 4_000_000}
    none = {"bytes": 0, "nonzeros": 0, "dense_bytes": 0}
    return {
        "method": "fedavg",
        "seed": 0,
        "accuracy": accuracy,
        "forgetting": forgetting,
        "backward_transfer": None,
        "validation_accuracy": 0.5,
        "traffic": {"c2s": sent, "s2c": none},
        "model_size_bytes": 2_000_000,
        "model_size_paper_bytes": 1_234_000,
        "seconds": 1.5,
        "images_per_second": 10.0,
        **more,
    }


def results_of(table: Experiment, images: tuple[str, str, str] = ("", "", "")) -> Results:
    """Two seeds of fedavg, one of stl, none of avg-fast, with a plan of two tasks."""
    results = Results(table, table.rows, range(2))
    results.add(record(table, "fedavg", 0, summary(0.5, 0.1), images[0]))
    results.add(record(table, "fedavg", 1, summary(0.7, 0.2), images[1]))
    results.add(record(table, "stl", 0, summary(0.95, None), images[2]))
    return results


def with_paper(plan: Path, fedavg: dict[str, Any], stl: dict[str, Any], **fields: Any) -> Results:
    rows = {**ROWS, "fedavg": {"paper": fedavg}, "stl": {"paper": stl}}
    return results_of(a_table(plan, rows, **fields))


@pytest.fixture
def by_hand(plan_file) -> Results:
    return with_paper(plan_file, {"accuracy": [84.11, 0.27]}, {"accuracy": 50.0}, note="Only the order counts.")


def test_markdown_by_hand(by_hand):
    # 60 ± sqrt(2 * 10^2); 0.15 ± sqrt(2 * 0.05^2); 5 MB in 2 tasks; 4 * 250,000 of 4,000,000
    text = output.page(by_hand)
    made_by = "`weft repro tiny --seeds 2 --only fedavg` and `weft repro tiny --seeds 1 --only stl`"
    assert f"# A tiny table\n\nMade by {made_by}.\n" in text
    grid = [line for line in text.splitlines() if line.startswith("|")]
    assert grid == [
        "| row | accuracy (%) | paper | forgetting | up (MB/task) | of dense | down (MB/task) | of dense "
        "| model (MB) | seeds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| fedavg | 60.00 ± 14.14 | 84.11 ± 0.27 | 0.150 ± 0.071 | 2.50 ± 0.00 | 0.25 ± 0.00 | - | - "
        "| 1.23 ± 0.00 | 2 |",
        "| avg-fast | - | - | - | - | - | - | - | - | 0 |",
        "| stl | 95.00 | 50.00 | - | 2.50 | 0.25 | - | - | 1.23 | 1 |",
    ]
    assert "`clients=3`, `tasks=2`, `network=mlp`" in text
    assert "Differences by row: avg-fast `learning_rate=0.01`." in text
    assert "Only the order counts." in text
    assert (
        "best first: stl, fedavg; in the paper: fedavg, stl. Kendall's tau of the two orders of 2 rows: -1.00" in text
    )


def test_latex_by_hand(by_hand):
    text = output.latex(by_hand)
    assert r"\begin{tabular}{lrrrrrrrrr}" in text
    assert r"row & accuracy (\%) & paper & forgetting &" in text
    row = r"fedavg & 60.00 $\pm$ 14.14 & 84.11 $\pm$ 0.27 & 0.150 $\pm$ 0.071 & 2.50 $\pm$ 0.00 & 0.25 $\pm$ 0.00"
    assert row + r" & -- & -- & 1.23 $\pm$ 0.00 & 2 \\" in text
    made_by = "% made by weft repro tiny --seeds 2 --only fedavg\n% made by weft repro tiny --seeds 1 --only stl\n"
    assert text.startswith(made_by)
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(f"\\{rule}\n") == 1
    body = text[text.index("\\toprule") : text.index("\\bottomrule")]
    assert {line.count("&") for line in body.splitlines() if line.endswith(r"\\")} == {9}
    assert text.isascii()


def test_without_numbers_of_the_paper_there_is_no_column_and_no_order(table):
    results = results_of(table)
    assert "paper &" not in output.latex(results)
    assert "| paper" not in output.page(results)
    assert "Kendall" not in output.page(results)


def test_hashes_do_not_depend_on_the_time():
    one = measured_line(summary(0.5, 0.1))
    assert re.fullmatch("[0-9a-f]{16}", one["summary_hash"])
    later = measured_line(summary(0.5, 0.1, seconds=9.0, images_per_second=None))
    assert later["summary_hash"] == one["summary_hash"]
    assert later != one
    assert measured_line(summary(0.5, 0.2))["summary_hash"] != one["summary_hash"]


def test_the_csv_is_sorted_and_read_back_to_the_last_digit(tmp_path, table):
    records = [record(table, "fedavg", seed, summary(1 / 3, None)) for seed in (10, 2, 0)]
    text = csv_text(table, records)
    assert text == csv_text(table, reversed(records))
    assert text.splitlines()[0] == (
        "row,method,seed,accuracy,forgetting,backward_transfer,validation_accuracy,c2s_bytes,s2c_bytes,c2s_dense_bytes,"
        "s2c_dense_bytes,c2s_nonzeros,s2c_nonzeros,model_size_bytes,model_size_paper_bytes,seconds,images_per_second,"
        "plan_hash,summary_hash,images"
    )
    assert [line.split(",")[2] for line in text.splitlines()[1:]] == ["0", "2", "10"]
    (tmp_path / "a.csv").write_text(text)
    assert list(read_csv(table, tmp_path / "a.csv").values()) == sorted(records, key=lambda one: one.seed)


# ---- on the screen ---------------------------------------------------------------------------------------------------


def drawn(thing: object, **options: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=80, **options).print(thing)
    return file.getvalue()


def test_long_names_fit_eighty_columns(plan_file):
    rows = {**ROWS, "fedavg": {"paper": {"accuracy": 84.11}}, "fedprox+stable-sgd@published": {"method": "fedavg"}}
    text = drawn(output.for_terminal(results_of(a_table(plan_file, rows)), "±"))
    assert "60.0 ± 14.1" in text
    assert "84.11" in text, "the paper's number as it is printed"
    assert " 0.150 " in text, "forgetting without its deviation, which the files have"
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_mean_over_seeds_of_weft_run(finished):
    one = json.loads((finished / "summary.json").read_text())
    summaries = [
        {**one, "seed": 0, "accuracy": 0.5, "forgetting": 0.1, "seconds": 1.0},
        {**one, "seed": 1, "accuracy": 0.7, "forgetting": 0.2, "seconds": 2.0},
    ]
    text = drawn(terminal.comparison(summaries, mean="±"))
    lines = [line.split() for line in text.splitlines() if line.split()[:1] in (["mean"], ["±"])]
    mean, deviation, validation = lines
    assert validation == [
        "mean",
        *(f"{100 * one['validation']['accuracy']:.1f} %".split()),
        f"{one['validation']['forgetting']:.3f}",
    ]
    assert mean[:4] == ["mean", "60.0", "%", "0.150"]
    assert mean[-1] == "1.5"
    assert deviation == ["±", "sd", "14.1", "%", "0.071"]
    assert "…" not in text
    assert " sd " not in drawn(terminal.comparison(summaries[:1], mean="±"))
    assert " sd " not in drawn(terminal.comparison(summaries))
    ascii_only = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert terminal.plus_minus(ascii_only) == "+-"


# ---- two processes at once -------------------------------------------------------------------------------------------

WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
import test_repro_output as here
from pathlib import Path

table = here.a_table(Path(sys.argv[2]), {f"row{index}": {"method": "fedavg"} for index in range(40)})
results = here.Results(table, table.rows, range(1))
for row in table.rows[int(sys.argv[4]) :: 2]:
    results.add(here.record(table, row.label, 0, here.summary(0.5, 0.1)))
    here.Store(table, Path(sys.argv[3]), here.output.render).write(results)
"""


@pytest.mark.slow
def test_two_processes_lose_no_line(tmp_path, plan_file):
    here = str(Path(__file__).parent)
    both = [
        subprocess.Popen([sys.executable, "-c", WRITER, here, str(plan_file), str(tmp_path), str(first)])
        for first in (0, 1)
    ]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len((tmp_path / "tiny.csv").read_text().splitlines()) == 1 + 40
    assert "| row39 | 50.00 |" in (tmp_path / "tiny.md").read_text()


def test_a_csv_that_stays_locked_is_an_error(tmp_path, table, monkeypatch):
    monkeypatch.setattr(store, "LOCK_TIMEOUT", 0.1)
    with (
        filelock.FileLock(tmp_path / ".tiny.lock"),
        pytest.raises(WeftError, match=r"another process is writing .*tiny"),
    ):
        Store(table, tmp_path, output.render).write(Results(table, table.rows, range(1)))


def test_runs_of_different_images_are_reported(table, tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))  # without a cache, no image is known to have changed
    mixed = results_of(table, ("cifar100:a svhn:b", "cifar100:c svhn:b", ""))
    assert "different images of cifar100 than others: they cannot be compared" in output.page(mixed)
    assert "cannot be compared" not in output.page(results_of(table))


def test_the_papers_sizes_have_the_digits_of_the_paper(plan_file):
    measures = ("accuracy", "backward_transfer", "model")
    numbers = {"model": 61, "backward_transfer": -0.0014}, {"model": 68.93}
    results = with_paper(plan_file, *numbers, measures=measures)
    grid = [line for line in output.page(results).splitlines() if line.startswith("|")]
    assert grid[0] == "| row | accuracy (%) | backward transfer | paper | model (MB) | paper | seeds |"
    assert grid[2] == "| fedavg | 60.00 ± 14.14 | - | -0.0014 | 1.23 ± 0.00 | 61 | 2 |"
    assert grid[4] == "| stl | 95.00 | - | - | 1.23 | 68.93 | 1 |"
    assert r"fedavg & 60.00 $\pm$ 14.14 & -- & $-$0.0014 & 1.23 $\pm$ 0.00 & 61 & 2 \\" in output.latex(results)
