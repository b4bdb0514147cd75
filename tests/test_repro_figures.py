"""Every figure on tiny real runs of made-up images: its points against the run folders, its pictures, its page."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image

from weft import repro
from weft.errors import WeftError
from weft.metrics import Spread
from weft.report.matplotlib import draw
from weft.report.reading import read_run
from weft.repro import Experiment, Row, output
from weft.repro.figures import FIGURES, Figure, by_dataset, by_round, first_connected, shown_tasks
from weft.repro.runner import Request, reproduce
from weft.repro.store import Results, Store, plan_hash
from weft.runs.folder import accuracy_matrices, read_plan
from weft.runs.result import Result

pytest_plugins = ["data_helpers"]

NAMES = [name for name in repro.ready_experiments() if repro.load(name).figure]
SMALL_NETWORK = {"network": "mlp", "network.hidden": 8, "network.features": 8, "rounds_per_task": 2, "batch_size": 20}
TINY: dict[str, dict[str, Any]] = {  # what a figure's plans are cut to, besides the network
    "fig-interference": {"scenario.images": 50, "scenario.sender_images": 50},
    "fig-adaptation": {"tasks": 3},
    "fig-forgetting": {"clients": 2, "tasks": 3},
    "fig-cost": {"clients": 2, "tasks": 2},
    "fig-attention": {"tasks": 3},
    "fig-async": {"clients": 2, "tasks": 2},
    "fig-transfer": {"clients": 2, "tasks": 2},
}
CLIENTS = {"c5": 2, "c20": 3, "c100": 4}  # of fig-adaptation
SOME = {  # rows enough to see whether it works
    "fig-adaptation": ("fedprox-c5", "fedweit-c5", "apd-c20", "fedweit-c100", "apd-c100"),
    "fig-forgetting": ("fedavg+ewc", "fedweit"),
    "fig-transfer": ("cifar-with", "cifar-without", "disjoint-with", "disjoint-without"),
    "fig-cost": ("fedweit-0.3", "fedavg-0.03", "fedavg-0.1", "fedavg-0.3", "fedavg-1"),
}


def tiny_figure(name: str) -> Experiment:
    found = repro.load(name)

    def cut(row: Row) -> Row:
        keys = {**SMALL_NETWORK, **TINY[name], **row.set}
        if name == "fig-adaptation":
            count = CLIENTS[row.label.rpartition("-")[2]]
            keys |= {"clients": count, **({"clients_per_round": 2} if row.plan else {})}
        return row.model_copy(update={"set": keys})

    rows = tuple(map(cut, found.choose(SOME.get(name))))
    return found.model_copy(update={"rows": rows, "small": None, "scale": None, "seeds": 1})


class Made:
    """A figure that was made of tiny runs."""

    def __init__(self, name: str, folder: Path):
        self.figure = tiny_figure(name)
        self.out, self.runs = folder / "results", folder / "runs"
        request = Request(self.figure, self.figure.rows, range(1), self.runs)
        self.store = Store(self.figure, self.out, output.render)
        self.results, self.files = reproduce(request, self.out, 1, MagicMock(), pytest.fail)
        assert not self.results.failures

    def run(self, label: str) -> Path:
        return self.runs / f"{label}-s0"

    def lines(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO((self.out / f"{self.figure.name}.csv").read_text())))


@pytest.fixture(scope="module")
def made(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Each figure is made once, by the first test that needs it."""
    known: dict[str, Made] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_DATA", str(small_cache))

        def make(name: str) -> Made:
            if name not in known:
                known[name] = Made(name, tmp_path_factory.mktemp(name))
            return known[name]

        yield make


def journal(folder: Path, kind: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


# ---- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_files_of_a_figure(name, made):
    one = made(name)
    files = {path: path.read_bytes() for path in one.files}
    assert [path.suffix for path in files][:4] == [".csv", ".md", ".png", ".svg"]
    page = one.files[1].read_text()
    for path in files:
        if path.suffix == ".png":
            pixels = np.asarray(Image.open(path).convert("L"))
            assert pixels.shape[1] > 500
            assert (pixels < 200).mean() > 0.005, "there is nothing on it"
            assert f"]({path.stem}.svg)" in page
            assert b"<dc:date>" not in files[path.with_suffix(".svg")]
    assert page.startswith(f"# {one.figure.title}\n\nMade by `weft repro {name} --seeds 1`.\n")
    assert one.figure.note in page
    assert "One seed." in page
    assert not re.search("nan|cannot be compared", page)
    assert len({line["plan_hash"] for line in one.lines()}) == len(one.figure.rows)
    assert all(line["images"] for line in one.lines() if "glyphs" not in ",".join(line.values()))  # which are drawn

    results = Results(one.figure, one.figure.rows, range(1), one.store.read())  # without the runs
    assert results.current() == one.results.current()
    assert one.store.write(results) == one.files
    assert {path: path.read_bytes() for path in one.files} == files

    row = one.figure.rows[0]
    some = {key: run for key, run in one.results.records.items() if run.row == row.label}
    assert set(output.render(Results(one.figure, (row,), range(1), some), False)) >= {".md", ".png", ".svg"}


def test_a_figure_of_nothing_has_a_page_and_no_picture(tmp_path):
    figure = tiny_figure("fig-cost")
    results = Results(figure, figure.rows, range(1))
    files = Store(figure, tmp_path, output.render).write(results)
    assert [path.name for path in files] == ["fig-cost.csv", "fig-cost.md"]
    assert "Nothing has been run yet." in files[1].read_text()


# ---- each of them ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_interference_is_the_receivers_second_task(made):
    one = made("fig-interference")
    for sender in ("svhn", "cifar10", "nobody"):
        wanted = [
            event["valid_accuracy"]
            for event in journal(one.run(sender), "reply")
            if (event["client"], event["task"]) == (0, 1)
        ]
        found = [line for line in one.lines() if line["sender"] == sender]
        assert [float(line["validation_accuracy"]) for line in found] == wanted
        assert [float(line["round"]) for line in found] == [1, 2]
    page = one.files[1].read_text()
    assert re.search(r"compared with receiving from nobody: .*CIFAR-10 [-+]\d.* at the start, .* of 2 points", page)


@pytest.mark.slow
def test_adaptation_is_the_mean_over_clients(made):
    one = made("fig-adaptation")
    wanted = [
        event["valid_accuracy"]
        for event in journal(one.run("apd-c100"), "reply")
        if (event["task"], event["round"]) == (2, 1)
    ]
    assert len(wanted) == CLIENTS["c100"]
    (found,) = [
        line
        for line in one.lines()
        if (line["row"], line["clients_and_task"], line["round"]) == ("apd-c100", "4 clients, task 3", "2")
    ]
    assert float(found["validation_accuracy"]) == pytest.approx(fmean(wanted))
    assert {path.stem for path in one.files} == {"fig-adaptation", "fig-adaptation-clients"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["none", "task_clocks", "updates"])
def test_async_is_what_was_tested_last_by_the_work_done(way, made):
    """With two tasks there are two moments: half of the work, and all of it."""
    one = made("fig-async")
    events = journal(one.run(f"glyphs-{way}"), "tested")
    whole = max(event["images"] for event in events)
    found = {float(line["work"]): float(line["accuracy"]) for line in one.lines() if line["row"] == f"glyphs-{way}"}
    ends = [event for event in events if event["task"] == 1]
    assert len(ends) == 2
    assert found[1.0] == pytest.approx(fmean(fmean(event["accuracy"]) for event in ends))
    first = {event["client"]: fmean(event["accuracy"]) for event in events if event["images"] <= whole / 2}
    assert found.get(0.5) == (pytest.approx(fmean(first.values())) if first else None)


@pytest.mark.slow
def test_transfer_is_the_mean_over_later_tasks_with_and_without(made):
    one = made("fig-transfer")
    answers = journal(one.run("disjoint-with"), "reply")
    wanted = fmean(event["valid_accuracy"] for event in answers if (event["task"], event["round"]) == (1, 0))
    found = {line["round"]: line for line in one.lines() if line["row"] == "disjoint-with"}
    assert (found["1"]["tasks"], found["1"]["foreign"]) == ("glyphs, disjoint tasks", "with")
    assert float(found["1"]["validation_accuracy"]) == pytest.approx(wanted)
    assert read_plan(one.run("cifar-without")).method_options["ablate"] == ["a_comm"]
    assert "| Overlapped-CIFAR-100: validation accuracy (%), round | 1 | 2 |" in one.files[1].read_text()


@pytest.mark.slow
def test_forgetting_is_a_column_of_the_matrices(made):
    one = made("fig-forgetting")
    matrices = accuracy_matrices(one.run("fedavg+ewc"))
    wanted = {
        (f"task {task + 1}", str(after + 1)): fmean(matrix[after][task] for matrix in matrices.values())
        for task, after in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2))
    }
    found = {(line["task"], line["after_task"]): line for line in one.lines() if line["row"] == "fedavg+ewc"}
    assert {key: float(line["accuracy"]) for key, line in found.items()} == wanted
    change = 100 * (wanted["task 1", "3"] - wanted["task 1", "1"])
    (line,) = [line for line in one.files[1].read_text().splitlines() if line.startswith("| FedAvg-EWC")]
    assert line.split("|")[2].strip() == f"{change:+.1f}"


@pytest.mark.slow
def test_cost_is_what_the_run_says(made):
    one = made("fig-cost")
    result = Result(one.run("fedweit-0.3"))
    sent = result.traffic["c2s"]
    found = {line["measure"]: line for line in one.lines() if line["row"] == "fedweit-0.3"}
    assert float(found["accuracy"]["value"]) == result.accuracy
    assert float(found["sent_of_dense"]["value"]) == pytest.approx(4 * sent["nonzeros"] / sent["dense_bytes"])
    assert {line["keep"] for line in found.values()} == {"0.3"}
    shares = {line["row"]: float(line["value"]) for line in one.lines() if line["measure"] == "sent_of_dense"}
    assert shares["fedavg-0.03"] < shares["fedavg-0.1"] < shares["fedavg-0.3"] < shares["fedavg-1"]
    assert shares["fedavg-1"] == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_attention_is_that_of_the_saved_states(made):
    one = made("fig-attention")
    run = read_run(one.run("fedweit"))
    received = [item for item in run.attention if (item.client, item.task) == (1, 2)]
    assert received
    # alphas[0]: the mlp's first layer
    wanted = [(run.task_name(item.sender, item.sender_task), item.alphas[0]) for item in received]
    found = [line for line in one.lines() if line["task"] == run.task_name(1, 2)]
    assert [(line["foreign_task"], float(line["attention"])) for line in found] == wanted
    assert {float(line["foreign_count"]) for line in found} == {len(received)}
    assert not {run.task_name(1, task) for task in range(3)} & {name for name, _ in wanted}, "received its own A"


# ---- points ----------------------------------------------------------------------------------------------------------


def test_a_client_that_stopped_keeps_its_last_value(tmp_path, made):
    run = read_run(made("fig-cost").run("fedavg-1"))
    rounds = [(0, 0, 0.5), (1, 0, 0.7), (1, 1, 0.9)]  # client, round, accuracy
    kept = tuple(run.rounds[0]._replace(client=c, task=0, round=r, valid_accuracy=a) for c, r, a in rounds)
    stopped = run.rounds[0]._replace(client=0, task=0, round=1, valid_accuracy=None)
    run = dataclasses.replace(run, rounds=(*kept, stopped))
    assert by_round(run) == {0: pytest.approx([0.6, 0.7])}
    assert by_round(run, {1}) == {0: [0.7, 0.9]}


@pytest.mark.slow
def test_a_damaged_journal_is_an_error(tmp_path, made):
    folder = Path(shutil.copytree(made("fig-interference").run("svhn"), tmp_path / "run"))
    with (folder / "journal.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(WeftError, match=r"journal\.jsonl is damaged.*run again"):
        figure("interference").points(Row(label="svhn", method="fedavg"), folder)


def test_bands_and_the_object_of_a_figure(made, tmp_path):
    one = made("fig-cost")
    records = {}
    for record in one.results.current():
        (row,) = (row for row in one.figure.rows if row.label == record.row)
        for seed in (0, 1):
            lines = tuple({**line, "value": line["value"] + seed} for line in record.lines)
            identity = plan_hash(one.figure.plan_of(row, seed).toml())
            records[record.row, seed] = dataclasses.replace(record, seed=seed, plan_hash=identity, lines=lines)
    results = Results(one.figure, one.figure.rows, range(2), records)
    Store(one.figure, tmp_path, output.render).write(results)
    page = (tmp_path / "fig-cost.md").read_text()
    assert "Made by `weft repro fig-cost --seeds 2`" in page
    assert "± sample standard deviation" in page
    found = output.as_object(results)
    assert found["figure"] == "fig-cost"
    assert list(found["panels"]["accuracy"]) == ["fedweit", "fedavg"], "in the order of the rows"
    keep, _, deviation = found["panels"]["accuracy"]["fedavg"][0]
    assert (keep, deviation) == (0.03, pytest.approx(0.5**0.5))
    json.dumps(found)


# ---- charts from numbers by hand -------------------------------------------------------------------------------------


def figure(name: str) -> Figure:
    return FIGURES[name](repro.load(f"fig-{name}"))


def test_the_papers_tasks_are_shown_if_they_exist():
    curve = [(5.0, Spread(0.2, None))]
    panels = {"mnist-0": {"svhn-1": curve}, "mnist-1": {"svhn-1": curve, "svhn-0": curve}, "cifar100-3": {"a-0": curve}}
    assert shown_tasks(panels) == ["mnist-0", "cifar100-3"]
    del panels["mnist-0"]
    assert shown_tasks(panels) == ["mnist-1", "cifar100-3"]
    assert by_dataset(panels)["mnist", "svhn"] == (1.0, 2)
    assert first_connected([(64, 3, 3, 3), (64, 64, 3, 3)]) == 1


def test_attention_is_drawn_from_the_largest_as_in_the_text():
    of = {name: [(2.0, Spread(value, None))] for name, value in {"a-0": 0.4, "mnist-1": 0.6, "svhn-0": 0.5}.items()}
    chart, _ = figure("attention").charts({"mnist-0": of})
    assert [(bar.label, *bar.x, *bar.y) for bar in chart.body] == [
        ("MNIST", "MNIST (1)", pytest.approx(0.1)),
        ("SVHN", "SVHN (0)", pytest.approx(0.0)),
        ("a", "a (0)", pytest.approx(-0.1)),
    ]
    assert "MNIST (1) 0.6000, SVHN (0) 0.5000, a (0) 0.4000" in figure("attention").text({"mnist-0": of})[0]


def test_a_band_ends_at_0_and_100_percent():
    curve = [(0.0, Spread(0.95, 0.1)), (1.0, Spread(0.05, 0.1))]
    (axes,) = draw(figure("transfer").charts({"": {"FedWeIT": curve}})).axes
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (0, 100)


@pytest.mark.parametrize(("tasks", "wanted"), [(10, [3, 6, 8]), (7, [2, 4, 6]), (5, [2, 3, 4]), (2, [1])])
def test_the_chosen_tasks_of_forgetting_are_at_the_papers_positions(tasks, wanted):
    panels = {f"task {number}": {"fedweit": [(1.0, Spread(0.5, None))]} for number in range(1, tasks)}
    charts = [chart for chart in figure("forgetting").charts(panels) if not chart.figure]
    assert [chart.title for chart in charts] == [f"task {number}" for number in wanted]
