"""The charts show what the run folder holds: every value is compared with the files, read in another way."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from cli_helpers import TINY, copy, summary_of, tiny
from report_helpers import (
    attention,
    attention_sums,
    data_of,
    figure,
    layers,
    page_of,
    rows,
    states,
    traces,
    vector,
)

import weft
from weft import metrics
from weft.core import storage
from weft.report.facts import comparisons, group
from weft.report.reading import read_runs
from weft.report.sharing import DIRECTIONS, TENSORS
from weft.runs.folder import accuracy_matrices, read_measures

pytest_plugins = ["cli_helpers"]

CLIENTS, TASKS = TINY["clients"], TINY["tasks"]


@pytest.fixture(scope="module")
def two_seeds(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [finished, weft.run(tiny(seed=1), tmp_path_factory.mktemp("seeds") / "s1").folder]


@pytest.fixture(scope="module")
def stl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weft.run(tiny(method="stl"), tmp_path_factory.mktemp("stl") / "stl").folder


@pytest.fixture(scope="module")
def data(two_seeds: list[Path], finished_fedavg: Path, stl: Path) -> dict:
    """Three methods, one of them with two seeds."""
    return data_of(page_of(*two_seeds, finished_fedavg, stl))


# ---- from checkpoints ------------------------------------------------------------------------------------------------


def test_density_is_that_of_the_states(finished):
    data = data_of(page_of(finished))
    parts = layers(finished)
    for client, state in states(finished):
        of_a = figure(data, f"density-a-0-{client}")["traces"][0]
        of_m = figure(data, f"density-m-0-{client}")["traces"][0]
        assert of_a["y"] == [name.removesuffix(".weight") for name, _, _ in parts]
        for task in range(TASKS):
            adaptive, mask = vector(state.tasks[task].adaptive), vector(state.tasks[task].mask)
            for level, (_, span, row_span) in enumerate(parts):
                expected = 100 * np.count_nonzero(adaptive[span]) / adaptive[span].size
                assert of_a["z"][level][task] == pytest.approx(expected, rel=1e-6)
                assert of_m["z"][level][task] == pytest.approx(mask[row_span].mean(), rel=1e-6)
                share = np.count_nonzero(mask[row_span]) / mask[row_span].size
                assert of_m["customdata"][level][task] == f"{100 * share:.1f} % nonzero"


def test_attention_is_that_of_the_states(finished):
    data = data_of(page_of(finished))
    parts = layers(finished)
    added: Counter = Counter()
    for client, state in states(finished):
        detail = figure(data, f"helping-alpha-0-{client}")["traces"][0]
        shown = dict(zip(detail["y"], zip(detail["z"], detail["customdata"], strict=True), strict=True))
        for task in range(1, TASKS):
            found = attention(state, task)
            for key, alphas in found.items():
                norms = [np.linalg.norm(vector(state.knowledge[key])[span]) for _, span, _ in parts]
                cells, notes = shown.pop(f"task {task} from {key}")
                assert cells == pytest.approx(list(alphas * len(found)), rel=1e-6)
                assert notes == [f"alpha {a:.4f}, norm of A {n:.3f}" for a, n in zip(alphas, norms, strict=True)]
                added[int(key.split(".")[0]), client] += (np.abs(alphas) * norms).sum()
        assert not shown
    sums = attention_sums(finished, TASKS)
    pairs = figure(data, "helping-pairs-0")["traces"][0]["z"]
    for sender in range(CLIENTS):
        for receiver in range(CLIENTS):
            expected = sums.get((sender, receiver))
            assert pairs[sender][receiver] == (None if expected is None else pytest.approx(expected, rel=1e-6))
    for measure, values in (("attention", sums), ("added", added)):
        (trace,) = traces(data, "helping-shares-0", key=measure)
        by_sender = [sum(value for (sender, _), value in values.items() if sender == c) for c in range(CLIENTS)]
        assert trace["y"] == pytest.approx([100 * value / sum(by_sender) for value in by_sender], rel=1e-6)


def test_another_state_gives_another_page(finished, tmp_path):
    """The facts come from the files of the checkpoint."""
    folder = copy(finished, tmp_path / "run")
    manifest_file = folder / "checkpoints" / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    state = dict(states(folder))[1]
    state.tasks[1] = replace(state.tasks[1], attention=torch.full_like(state.tasks[1].attention, 0.25))
    manifest["clients"]["1"] = storage.save(state, folder / "checkpoints", "changed")
    manifest_file.write_text(json.dumps(manifest))
    detail = figure(data_of(page_of(folder)), "helping-alpha-0-1")["traces"][0]
    assert {note.partition(",")[0] for row in detail["customdata"] for note in row} == {"alpha 0.2500"}


# ---- from tables and the journal -------------------------------------------------------------------------------------


def test_accuracy_is_that_of_the_table(data, two_seeds, finished_fedavg, stl):
    for index, folders in enumerate((two_seeds, [finished_fedavg], [stl])):
        (line,) = traces(data, "accuracy-after", group=index, client="mean")
        for after in range(TASKS):
            means = []
            for folder in folders:
                found = [row for row in rows(folder, "accuracy.csv") if int(row["after_task"]) == after]
                own = [[float(row["accuracy"]) for row in found if row["client"] == str(c)] for c in range(CLIENTS)]
                means.append(fmean(map(fmean, own)))
            assert line["y"][after] == pytest.approx(100 * fmean(means), rel=1e-6)
            assert line["text"][after] == f"after task {after}"
            if len(means) > 1:
                assert line["customdata"][after] == f" ± {100 * stdev(means):.1f}"
        assert ("customdata" in line) == (len(folders) > 1)
        for client in range(CLIENTS):
            (own,) = traces(data, "accuracy-after", group=index, client=str(client))
            ends = [metrics.average_accuracy(accuracy_matrices(folder)[client]) for folder in folders]
            assert own["y"][-1] == pytest.approx(100 * fmean(ends), rel=1e-6)


def test_matrices_are_those_of_the_table(data, two_seeds, finished_fedavg):
    for index, folders in enumerate((two_seeds, [finished_fedavg])):
        cells: dict[tuple[int, ...], list[float]] = {}
        for folder in folders:
            for row in rows(folder, "accuracy.csv"):
                key = (int(row["client"]), int(row["after_task"]), int(row["task"]))
                cells.setdefault(key, []).append(float(row["accuracy"]))
        for client in range(CLIENTS):
            shown = figure(data, f"matrix-{index}-{client}")["traces"][0]["z"]
            for after in range(TASKS):
                for task in range(TASKS):
                    values = cells.get((client, after, task))
                    assert shown[after][task] == (pytest.approx(100 * fmean(values), rel=1e-6) if values else None)


def test_bytes_are_those_of_the_ledger(data, finished_fedavg, two_seeds):
    for index, folders in enumerate((two_seeds, [finished_fedavg])):
        expected: Counter = Counter()
        for folder in folders:
            for row in rows(folder, "ledger.csv"):
                tensor, way = row["tensor"].split("/")[0], DIRECTIONS[row["direction"]]
                label, _ = TENSORS.get(f"{tensor} {way}") or TENSORS[tensor]
                expected[row["direction"], label] += int(row["bytes"]) / len(folders)
        shown = {
            ("c2s" if one["y"][0] > 0 else "s2c", one["meta"]["key"]): abs(sum(one["y"]))
            for one in traces(data, f"traffic-tensors-{index}")
        }
        assert shown == {key: pytest.approx(value, rel=1e-6) for key, value in expected.items()}
        for way, direction in (("up", "c2s"), ("down", "s2c")):
            lines = traces(data, "traffic-total", group=index, client="mean")
            (total,) = [one for one in lines if one["name"].endswith(way)]
            summed = sum(value for (which, _), value in expected.items() if which == direction)
            assert total["y"][-1] == pytest.approx(summed, rel=1e-6)


def test_rounds_are_those_of_the_journal(data, finished_fedavg):
    (line,) = traces(data, "adaptation-rounds", group=1, client="1")
    events = [json.loads(each) for each in (finished_fedavg / "journal.jsonl").read_text().splitlines()]
    expected = [100 * event["valid_accuracy"] for event in events if event["event"] == "reply" and event["client"] == 1]
    assert [value for value in line["y"] if value is not None] == pytest.approx(expected, rel=1e-6)
    assert len(expected) == TASKS * TINY["rounds_per_task"]


def test_the_results_are_those_of_the_summaries(data, two_seeds, finished_fedavg, stl):
    for index, folders in enumerate((two_seeds, [finished_fedavg], [stl])):
        summaries = [summary_of(folder) for folder in folders]
        (line,) = traces(data, "forgetting-after", group=index, client="mean")
        expected = fmean(summary["forgetting"] for summary in summaries)
        assert line["y"] == [None, pytest.approx(100 * expected, rel=1e-6, abs=1e-9)]
        values = [100 * summary["accuracy"] for summary in summaries]
        deviation = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
        assert f"{fmean(values):.1f}{deviation} %" in data["html"]["overview"]


@pytest.mark.slow
def test_other_metrics_are_on_the_page(tmp_path, two_seeds):
    assert "measures" not in data_of(page_of(*two_seeds))["sections"]
    folder = weft.run(tiny(metrics="balanced,recall"), tmp_path / "run").folder
    lines = [line for line in read_measures(folder) if line.after_task == TASKS - 1]
    balanced = fmean(line.value for line in lines if line.metric == "balanced")
    shown = data_of(page_of(folder))["html"]["measures"]
    assert f"<th scope=row>balanced</th><td class=number>{balanced:.3f}</td>" in shown
    some = next(line.label for line in lines if line.metric == "recall")
    recall = fmean(line.value for line in lines if (line.metric, line.label) == ("recall", some))
    assert f"<th scope=row>recall, {some}</th><td class=number>{recall:.3f}</td>" in shown


# ---- federated and local ---------------------------------------------------------------------------------------------


def test_gain_is_federated_minus_local(data, finished, finished_fedavg, stl):
    for index, folder in enumerate((finished, finished_fedavg)):  # stl has seed 0 only
        bars, dots = traces(data, "gain", group=index)
        ours, own = accuracy_matrices(folder), accuracy_matrices(stl)
        expected = [[a - b for a, b in zip(ours[c][-1], own[c][-1], strict=True)] for c in range(CLIENTS)]
        assert bars["y"] == pytest.approx([100 * fmean(each) for each in expected], rel=1e-6, abs=1e-9)
        assert dots["y"] == pytest.approx([100 * value for each in expected for value in each], rel=1e-6, abs=1e-9)


def test_a_comparison_needs_the_same_tasks_seed_terms_and_images(finished, finished_stl, stl, tmp_path):
    assert not comparisons(group(read_runs([finished, finished_stl])))  # seed 3 has other tasks
    (one,) = comparisons(group(read_runs([finished, stl])))
    assert (one.federated.label, one.local.label, one.seeds) == ("fedweit", "stl", (0,))
    assert "gain" not in data_of(page_of(finished))["figures"]
    for rounds, comparable in ((1, False), (3, True)):  # local training has no fewer epochs
        other = weft.run(tiny(method="stl", rounds_per_task=rounds), tmp_path / f"rounds-{rounds}").folder
        assert bool(comparisons(group(read_runs([finished, other])))) == comparable
    others = copy(stl, tmp_path / "others")
    facts = json.loads((others / "environment.json").read_text())
    (others / "environment.json").write_text(json.dumps(facts | {"images": {"photos": "other"}}))
    assert not comparisons(group(read_runs([finished, others])))


def test_local_is_the_strongest_on_the_seeds_of_both(finished, stl, tmp_path):
    local = weft.run(tiny(method="local"), tmp_path / "local").folder
    groups = group(read_runs([finished, stl, local]))
    (one,) = comparisons(groups)
    ends = {each.label: fmean(fmean(rows[-1]) for rows in each.runs[0].matrices.values()) for each in groups[1:]}
    assert ends[one.local.label] == max(ends.values())


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_seeds_of_a_plan_are_one_group_and_the_same_run_twice_is_counted_once(two_seeds, stl, tmp_path):
    again = copy(two_seeds[0], tmp_path / "again")
    groups = group(read_runs([two_seeds[0], stl, two_seeds[1], again]))
    assert [(one.label, one.seeds) for one in groups] == [("fedweit", [0, 1]), ("stl", [0])]
    assert str(again) in groups[0].notes[0]
    assert groups[0].notes[0] in page_of(two_seeds[0], again)


def test_runs_that_cannot_be_compared_are_marked(finished, tmp_path):
    folder = weft.run(tiny(method="local", tasks=1), tmp_path / "other").folder
    assert "differ in tasks" in data_of(page_of(finished, folder))["html"]["overview"]


@pytest.mark.parametrize("how", ["task_clocks", "updates"])
def test_rounds_of_clients_with_task_clocks(how, tmp_path):
    """Some tasks take more rounds than the plan says, others fewer: each has its position within its task."""
    folder = weft.run(tiny(rounds_per_task=4, **{"async": how}), tmp_path / "run").folder
    (one,) = group(read_runs([folder]))
    rounds = one.runs[0].rounds
    assert max(item.round for item in rounds) >= 4
    xs = [one.position((item.task, item.round)) for item in rounds if item.client == 0]
    assert len(set(xs)) == len(xs)
    assert all(item.task < one.position((item.task, item.round)) < item.task + 1 for item in rounds)
    page_of(folder)
