"""Every figure on tiny real runs of made-up images: its points against the run folders, its pictures, its page."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from PIL import Image

from weft import repro
from weft.errors import WeftError
from weft.metrics import Spread
from weft.repro import Figure, Row
from weft.repro.figures import attention, points, reading
from weft.repro.figures.points import Point
from weft.repro.figures.writing import FigureDesk, as_object, markdown
from weft.repro.runner import Request, reproduce
from weft.repro.store import Results
from weft.runs.folder import accuracy_matrices, read_plan
from weft.runs.result import Result

pytest_plugins = ["cli_helpers", "data_helpers"]

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


def tiny_figure(name: str) -> Figure:
    found = repro.load(name)
    assert isinstance(found, Figure)

    def cut(row: Row) -> Row:
        keys = {**SMALL_NETWORK, **TINY[name], **row.keys}
        if name == "fig-adaptation":
            count = CLIENTS[row.label.rpartition("-")[2]]
            keys |= {"clients": count, **({"clients_per_round": 2} if row.plan else {})}
        return dataclasses.replace(row, keys=keys)

    rows = found.choose(SOME.get(name))
    return dataclasses.replace(found, rows=tuple(map(cut, rows)), scale=None, seeds=1)


class Silent:
    """Nobody looks on."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Made:
    """A figure that was made of tiny runs."""

    def __init__(self, name: str, folder: Path):
        self.figure = tiny_figure(name)
        self.out, self.runs = folder / "results", folder / "runs"
        request = Request(self.figure, self.figure.rows, range(1), self.runs)
        self.desk = FigureDesk(self.figure, self.out)
        self.results, self.files = reproduce(request, self.desk, 1, Silent(), pytest.fail)  # type: ignore[arg-type]
        assert not self.results.failures

    def run(self, label: str) -> Path:
        return self.runs / f"{label}-s0"

    def lines(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO((self.out / f"{self.figure.name}.csv").read_text())))


@pytest.fixture(scope="module")
def made(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Each figure is made once, by whoever asks first."""
    known: dict[str, Made] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_DATA", str(small_cache))

        def make(name: str) -> Made:
            if name not in known:
                known[name] = Made(name, tmp_path_factory.mktemp(name))
            return known[name]

        yield make


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


# ---- all of them -----------------------------------------------------------------------------------------------------


def test_every_figure_is_tested():
    assert set(TINY) == set(repro.FIGURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", repro.FIGURES)
def test_the_files_of_a_figure(name, made):
    one = made(name)
    kinds = [path.suffix for path in one.files]
    assert kinds[:4] == [".csv", ".md", ".png", ".svg"]
    assert kinds.count(".png") == kinds.count(".svg")
    for path in one.files:
        if path.suffix == ".png":
            pixels = np.asarray(Image.open(path).convert("L"))
            assert pixels.shape[1] > 500
            assert (pixels < 200).mean() > 0.005, "there is nothing on it"
        if path.suffix == ".svg":
            assert "<dc:date>" not in path.read_text()
    page = one.files[1].read_text()
    assert page.startswith(f"# {one.figure.title}\n\nMade by `weft repro {name} --seeds 1`.\n")
    for path in one.files:
        assert path.suffix != ".svg" or f"]({path.name})" in page
    assert one.figure.note in page
    assert "One seed." in page
    assert "nan" not in page
    assert "do not compare" not in page
    plans = {line["plan_hash"] for line in one.lines()}
    assert len(plans) == len(one.figure.rows)
    assert all(line["images"] for line in one.lines() if "glyphs" not in ",".join(line.values()))  # which are drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", repro.FIGURES)
def test_the_same_numbers_give_the_same_files_without_the_runs(name, made):
    one = made(name)
    before = {path: path.read_bytes() for path in one.files}
    results = Results(one.figure, one.figure.rows, range(1), one.desk.known())
    assert results.current() == one.results.current()
    assert one.desk.write(results) == one.files
    assert {path: path.read_bytes() for path in one.files} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", repro.FIGURES)
def test_a_figure_of_one_row_can_be_drawn(name, made):
    one = made(name)
    row = one.figure.rows[0]
    some = {key: run for key, run in one.results.lines.items() if run.row == row.label}
    results = Results(one.figure, (row,), range(1), some)
    assert set(one.desk.others(results, more_to_come=False)) >= {".md", ".png", ".svg"}


@pytest.mark.parametrize("name", repro.FIGURES)
@pytest.mark.parametrize("scale", ["paper", "small"])
def test_every_figure_has_plans_that_are_valid(name, scale):
    figure = repro.load(name, scale)
    assert isinstance(figure, Figure)
    assert (figure.name, figure.scale) == (name, scale)
    for row in figure.rows:
        plan = figure.plan_of(row, 7)
        assert (plan.seed, plan.method) == (7, row.method)
        assert plan.rounds_per_task == (20 if scale == "paper" or name == "fig-transfer" else 8)


def test_a_figure_of_nothing_has_a_page_and_no_picture(tmp_path):
    figure = tiny_figure("fig-cost")
    desk = FigureDesk(figure, tmp_path)
    results = Results(figure, figure.rows, range(1), {})
    assert [path.name for path in desk.write(results)] == ["fig-cost.csv", "fig-cost.md"]
    assert "Nothing has been run yet." in markdown(results, [])


# ---- each of them ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_interference_is_the_receivers_second_task(made):
    one = made("fig-interference")
    for sender in ("svhn", "cifar10", "nobody"):
        wanted = [
            event["valid_accuracy"]
            for event in journal(one.run(sender))
            if event["event"] == "reply" and (event["client"], event["task"]) == (0, 1)
        ]
        found = [line for line in one.lines() if line["sender"] == sender]
        assert [float(line["validation_accuracy"]) for line in found] == wanted
        assert [float(line["round"]) for line in found] == [1, 2]
    assert "CIFAR-10: " in one.files[1].read_text()


@pytest.mark.slow
def test_adaptation_is_the_mean_over_clients(made):
    one = made("fig-adaptation")
    wanted = [
        event["valid_accuracy"]
        for event in journal(one.run("apd-c100"))
        if event["event"] == "reply" and (event["task"], event["round"]) == (2, 1)
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
    events = [event for event in journal(one.run(f"glyphs-{way}")) if event["event"] == "tested"]
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
    answers = [event for event in journal(one.run("disjoint-with")) if event["event"] == "reply"]
    wanted = fmean(event["valid_accuracy"] for event in answers if (event["task"], event["round"]) == (1, 0))
    found = {line["round"]: line for line in one.lines() if line["row"] == "disjoint-with"}
    assert (found["1"]["tasks"], found["1"]["foreign"]) == ("glyphs, disjoint tasks", "with")
    assert float(found["1"]["validation_accuracy"]) == pytest.approx(wanted)
    assert read_plan(one.run("cifar-without")).method_options["ablate"] == ["a_comm"]
    assert "| Overlapped-CIFAR-100, after the first round |" in one.files[1].read_text()


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
    from weft import scenarios
    from weft.core.storage import State
    from weft.runs.folder import read_manifest

    one = made("fig-attention")
    folder = one.run("fedweit")
    plan = read_plan(folder)
    sequences = scenarios.of(plan).sequences
    state = State.load(folder / "checkpoints", read_manifest(folder / "checkpoints")["clients"]["1"])
    given = state.numbers["foreign/2"]
    assert given
    assert attention.first_connected(plan) == 0  # the mlp's first layer
    values = state.archive["attention/2"].view(-1, len(given))[0].tolist()
    names = [sequences[int(key.split(".")[0])][int(key.split(".")[1])].name for key in given]
    found = [line for line in one.lines() if line["task"] == sequences[1][2].name]
    assert [(line["foreign_task"], float(line["attention"])) for line in found] == list(zip(names, values, strict=True))
    assert {float(line["foreign_count"]) for line in found} == {len(given)}
    own = {task.name for task in sequences[1]}
    assert not own & set(names), "a client was given its own A"


# ---- points ----------------------------------------------------------------------------------------------------------


def test_a_client_that_stopped_keeps_its_last_value(tmp_path, made):
    plan = read_plan(made("fig-cost").run("fedavg-1"))
    events = [
        (0, 0, 0.5),
        (1, 0, 0.7),
        (1, 1, 0.9),
        (1, 1, 0.9),
    ]  # client, round, accuracy; one line stands there twice
    lines = [
        json.dumps({"event": "reply", "client": client, "task": 0, "round": place, "valid_accuracy": value})
        for client, place, value in events
    ]
    lines += [json.dumps({"event": "reply", "client": 0, "task": 0, "round": 1, "stopped": True})]
    (tmp_path / "journal.jsonl").write_text("\n".join(['{"event": "created"}', *lines]) + "\n")
    assert reading.by_round(tmp_path, plan) == {0: pytest.approx([0.6, 0.7])}
    assert reading.by_round(tmp_path, plan, {1}) == {0: [0.7, 0.9]}
    (tmp_path / "journal.jsonl").write_text("{}\n")
    with pytest.raises(WeftError, match=r"journal\.jsonl is damaged"):
        reading.by_round(tmp_path, plan)


def test_means_over_seeds_in_the_order_of_the_rows():
    rows = (Row("b", "fedavg"), Row("a", "fedavg"))
    runs = [
        points.Plotted(label, "fedavg", seed, (Point("p", label, 1, value),), "", "")
        for label, seed, value in (("a", 0, 1.0), ("b", 0, 2.0), ("b", 1, 4.0))
    ]
    found = points.panels_of(rows, runs)
    assert list(found["p"]) == ["b", "a"]
    assert found["p"]["b"] == [(1, Spread(3.0, pytest.approx(2**0.5)))]


def test_bands_and_the_object_of_a_figure(made, tmp_path):
    one = made("fig-cost")
    runs = {}
    for run in one.results.current():
        for seed in (0, 1):
            plan_hash = points.short_hash(one.figure.plan_of(_row(one, run.row), seed).toml())
            runs[run.row, seed] = dataclasses.replace(run, seed=seed, plan_hash=plan_hash)
    results = Results(one.figure, one.figure.rows, range(2), runs)
    FigureDesk(one.figure, tmp_path).write(results)
    page = (tmp_path / "fig-cost.md").read_text()
    assert "Made by `weft repro fig-cost --seeds 2`" in page
    assert "Means over seeds, bands: ± sample deviation." in page
    found = as_object(results)
    assert found["figure"] == "fig-cost"
    assert found["panels"]["accuracy"]["fedavg"][0] == [
        0.03,
        pytest.approx(found["panels"]["accuracy"]["fedavg"][0][1]),
        0,
    ]
    json.dumps(found)


def _row(one: Made, label: str) -> Row:
    return next(row for row in one.figure.rows if row.label == label)
