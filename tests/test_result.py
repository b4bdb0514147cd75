"""The result of a run: its summary and tables, and `Result` in Python."""

import csv
import math
import platform
import re
import sys
from pathlib import Path

import pytest
import torch
from cli_helpers import (
    ANSWERS,
    TINY,
    assert_one_line,
    assert_same_result,
    copy,
    summary_of,
    tiny,
)

import weft
from weft import Result, WeftError, metrics, scenarios
from weft.runs.folder import accuracy_matrices, read_rows
from weft.wire.ledger import Entry

pytest_plugins = ["cli_helpers"]


@pytest.fixture(params=["finished", "finished_fedavg", "finished_stl"])
def any_run(request):
    return request.getfixturevalue(request.param)


# ---- the summary and the tables --------------------------------------------------------------------------------------


def test_fields_of_a_summary(any_run):
    summary = summary_of(any_run)
    texts = dict.fromkeys(("method", "scenario", "network"), str)
    counts = ("seed", "clients", "tasks", "rounds_per_task", "model_size_bytes", "model_size_paper_bytes")
    measures = ("accuracy", "validation_accuracy", "forgetting", "backward_transfer", "images_per_second", "seconds")
    for key, kind in {**texts, **dict.fromkeys(counts, int), **dict.fromkeys(measures, float)}.items():
        assert type(summary[key]) is kind, key
    assert (summary["scenario"], summary["network"], summary["clients"], summary["tasks"]) == ("glyphs", "mlp", 3, 2)
    assert summary["rounds_per_task"] == 2
    assert summary["measured_model"] == "own"
    assert len(summary["accuracy_by_client"]) == 3
    for fraction in (summary["accuracy"], summary["validation_accuracy"], *summary["accuracy_by_client"]):
        assert 0 < fraction <= 1  # not percent
    assert -1 <= summary["forgetting"] <= 1
    assert -1 <= summary["backward_transfer"] <= 1
    if summary["method"] == "fedweit":
        assert 0 < summary["adaptive_density"] <= 1
    else:
        assert summary["adaptive_density"] is None
    assert set(summary["traffic"]) == {"c2s", "s2c"}
    for traffic in summary["traffic"].values():
        kinds = {key: type(value) for key, value in traffic.items()}
        assert kinds == dict.fromkeys(("bytes", "nonzeros", "dense_bytes"), int)
    assert summary["model_size_bytes"] >= summary["model_size_paper_bytes"] > 0
    assert summary["seconds"] > 0
    assert summary["images_per_second"] > 0


def test_a_summary_contains_no_path_host_or_date(any_run):
    text = (any_run / "summary.json").read_text()
    for secret in (str(any_run), str(any_run.parent), str(Path.home()), platform.node(), str(Path.cwd())):
        assert len(secret) < 3 or secret not in text
    assert "/" not in text
    assert not re.search(r"\b20\d\d-\d\d", text)
    assert not re.search(r"\b1[6-9]\d{8}\b", text)  # seconds since 1970


def test_accuracy_and_summary_agree(any_run):
    with (any_run / "accuracy.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["client", "after_task", "task", "accuracy"]
    keys = [(int(row["client"]), int(row["after_task"]), int(row["task"])) for row in rows]
    expected = {(client, after, task) for client in range(3) for after in range(2) for task in range(after + 1)}
    assert len(keys) == len(expected)
    assert set(keys) == expected
    values = dict(zip(keys, (float(row["accuracy"]) for row in rows), strict=True))
    for value in values.values():
        assert 0 <= value <= 1
        assert math.isclose(value * TINY["scenario.test"], round(value * TINY["scenario.test"]), abs_tol=1e-6)

    # computed again, without the library
    summary = summary_of(any_run)
    last = [(values[client, 1, 0] + values[client, 1, 1]) / 2 for client in range(3)]
    forgotten = [values[client, 0, 0] - values[client, 1, 0] for client in range(3)]
    assert summary["accuracy_by_client"] == pytest.approx(last)
    assert summary["accuracy"] == pytest.approx(sum(last) / 3)
    assert summary["forgetting"] == pytest.approx(sum(forgotten) / 3)
    assert summary["backward_transfer"] == pytest.approx(-sum(forgotten) / 3)

    matrix = Result(any_run).accuracy_matrix
    for (client, after, task), value in values.items():
        assert matrix[client, after, task] == value
    assert matrix.shape == (3, 2, 2)
    assert [math.isnan(matrix[client, 0, 1]) for client in range(3)] == [True] * 3  # not learned yet
    matrices = accuracy_matrices(any_run)
    assert metrics.over_clients(metrics.average_accuracy, matrices.values()) == summary["accuracy"]


def test_validation_images_are_measured_wherever_test_images_are(any_run):
    """Also those of earlier tasks: a choice by them sees forgetting."""
    rows, tested = (read_rows(any_run, name) for name in ("validation.csv", "accuracy.csv"))
    assert [row[:3] for row in rows] == [row[:3] for row in tested]
    values = {tuple(map(int, row[:3])): float(row[3]) for row in rows}
    for value in values.values():
        assert math.isclose(value * TINY["scenario.valid"], round(value * TINY["scenario.valid"]), abs_tol=1e-6)

    result = Result(any_run)
    diagonal = [values[client, task, task] for client in range(3) for task in range(2)]
    assert result.validation_accuracy == pytest.approx(sum(diagonal) / 6)
    for (client, after, task), value in values.items():
        assert result.validation_matrix[client, after, task] == value
    last = [(values[client, 1, 0] + values[client, 1, 1]) / 2 for client in range(3)]
    forgotten = [values[client, 0, 0] - values[client, 1, 0] for client in range(3)]
    assert result.validation["accuracy"] == pytest.approx(sum(last) / 3)
    assert result.validation["forgetting"] == pytest.approx(sum(forgotten) / 3)
    assert len(result.frame("validation")) == len(values)


def test_the_ledger_sums_up_to_the_traffic(any_run):
    summary = summary_of(any_run)
    sums = {direction: dict.fromkeys(("bytes", "nonzeros", "dense_bytes"), 0) for direction in ("c2s", "s2c")}
    with (any_run / "ledger.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            for key in sums[row["direction"]]:
                sums[row["direction"]][key] += int(row[key])
    columns = ["direction", "client", "task", "round", "tensor", "bytes", "nonzeros", "dense_bytes"]
    assert reader.fieldnames == columns
    assert summary["traffic"] == sums
    if summary["method"] == "stl":
        assert sums["c2s"]["bytes"] == sums["s2c"]["bytes"] == 0
    else:
        assert sums["c2s"]["bytes"] > sums["c2s"]["nonzeros"] > 0  # at least a byte for each value


def test_the_ledger_contains_every_message_once(finished):
    entries = [Entry.from_row(row) for row in read_rows(finished, "ledger.csv")]
    headers = [(e.direction, e.client, e.task, e.round) for e in entries if e.tensor == "header"]
    assert len(headers) == len(set(headers)) == 2 * ANSWERS
    assert {(e.direction, e.tensor) for e in entries} >= {("c2s", "weights"), ("s2c", "weights"), ("c2s", "adaptive")}
    adaptive = [(e.client, e.task) for e in entries if e.tensor == "adaptive"]  # Alg. 1 line 11: once a client and task
    assert sorted(adaptive) == [(client, task) for client in range(3) for task in range(2)]


# ---- Result ----------------------------------------------------------------------------------------------------------


def test_a_result_has_the_fields_of_the_summary(finished):
    result = Result(finished)
    summary = summary_of(finished)
    assert result.plan == tiny()
    assert summary.pop("plan") == "tiny"
    for key, value in summary.items():
        assert getattr(result, key) == value
    with pytest.raises(AttributeError, match=r"no 'acuracy'.*accuracy"):
        _ = result.acuracy
    assert "fedweit" in repr(result)
    assert str(finished) in repr(result)


def test_a_result_as_a_frame(finished):
    pandas = pytest.importorskip("pandas")
    result = Result(finished)
    frame = result.frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["client", "after_task", "task", "accuracy"]
    assert len(frame) == 9
    last = frame[frame.after_task == 1].groupby("client").accuracy.mean()
    assert list(last) == pytest.approx(result.accuracy_by_client)
    ledger = result.frame("ledger")
    assert ledger[ledger.direction == "c2s"].bytes.sum() == result.traffic["c2s"]["bytes"]
    with pytest.raises(WeftError, match=r"no table 'ledgr'.*accuracy, validation, ledger"):
        result.frame("ledgr")


def test_a_frame_without_pandas_names_the_remedy(finished, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(WeftError, match="pip install pandas"):
        Result(finished).frame()


def test_fields_are_visible_and_documented(finished):
    result, page = weft.load(finished), (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    assert {*result.summary, "accuracy_matrix", "curves", "frame", "model", "plan", "state"} <= {*dir(result)}
    settings = {"plan", "method", "scenario", "network", "seed", "clients", "tasks", "rounds_per_task"}
    for name in {*result.summary} - settings - {"measured_model"}:
        assert f"`{name}`" in page, name
        assert name in Result.__annotations__, name


def test_curves_have_every_round(finished):
    pytest.importorskip("pandas")
    curves = Result(finished).curves()
    assert list(curves.columns) == ["client", "task", "round", "valid_accuracy", "valid_loss", "train_loss"]
    assert len(curves) == ANSWERS
    assert len(curves.groupby(["client", "task", "round"])) == ANSWERS
    assert curves.valid_accuracy.between(0, 1).all()
    ends = curves[curves["round"] == 1].groupby("client").valid_accuracy.mean()
    assert ends.mean() == pytest.approx(Result(finished).validation_accuracy)


def test_the_model_of_a_task_classifies_images_as_the_run_did(any_run):
    result = weft.load(any_run)
    scenario = scenarios.of(result.plan)
    for client, task in ((0, 0), (2, 1)):
        model, split = result.model(client, task), scenario.sequences[client][task].load("test")
        images, labels = torch.as_tensor(split.images), torch.as_tensor(split.labels)
        assert model.classes == tuple(scenario.sequences[client][task].classes)
        logits = model(images)
        right = (logits.argmax(1) == labels).float().mean().item()
        assert right == pytest.approx(result.accuracy_matrix[client, -1, task])
        floats = images.permute(0, 3, 1, 2) / 255
        assert torch.allclose(model(floats), logits, atol=1e-4)
    with pytest.raises(WeftError, match="choose 0 to 1"):
        result.model(0, 2)


def test_the_state_of_a_client(finished):
    state = weft.load(finished).state(1)
    assert (state.finished, list(state.tasks)) == (1, [0, 1])
    assert state.weights.dtype == torch.float32
    assert state.size().bytes * 3 == pytest.approx(weft.load(finished).model_size_bytes, rel=0.5)
    with pytest.raises(WeftError, match="choose 0 to 2"):
        weft.load(finished).state(3)


def test_a_plan_is_run_by_its_name_or_file(tmp_path, monkeypatch, plan_file, finished):
    monkeypatch.chdir(tmp_path)
    assert_same_result(weft.run(plan_file, "by-file").folder, finished)
    (tmp_path / "demo").write_bytes(plan_file.read_bytes())  # a file wins over a ready plan's name
    assert_same_result(weft.run("demo", "by-name").folder, finished)
    with pytest.raises(WeftError, match="there is no plan dmo"):
        weft.run("dmo")
    assert not Path("runs").exists()


def test_an_unfinished_run_has_no_result(stopped):
    with pytest.raises(WeftError, match=rf"not finished; weft resume {stopped}"):
        Result(stopped)


def test_run_and_resume_from_python(tmp_path, monkeypatch, finished):
    monkeypatch.chdir(tmp_path)
    result = weft.run(weft.Plan(name="tiny", **TINY))
    assert result.folder == Path("runs/tiny-fedweit-s0")
    assert_same_result(result.folder, finished)
    again = weft.resume(str(result.folder))
    assert again.summary == result.summary


# ---- damaged tables and summaries ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("table", ["accuracy.csv", "ledger.csv"])
@pytest.mark.parametrize("line", ["0,1", "c2s,0,0", "a,b,c,d", "0,0,0,x", "c2s,0,0,0,weights,one,2,3", ""])
def test_a_table_with_a_damaged_line(tmp_path, command, finished, table, line):
    folder = copy(finished, tmp_path / "run")
    lines = (folder / table).read_text().splitlines()
    lines[2] = line
    (folder / table).write_text("\n".join(lines) + "\n")
    assert_one_line(command("show", folder)._replace(out=""))  # it may have printed something before


def test_a_matrix_with_a_missing_entry_is_rejected(tmp_path, finished):
    folder = copy(finished, tmp_path / "run")
    lines = (folder / "accuracy.csv").read_text().splitlines()
    del lines[next(index for index, line in enumerate(lines) if line.startswith("0,1,0,"))]  # half a row
    (folder / "accuracy.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(WeftError, match=r"accuracy\.csv"):
        _ = Result(folder).accuracy_matrix


def test_a_line_that_is_still_being_written_is_left_out(tmp_path, stopped):
    folder = copy(stopped, tmp_path / "run")
    whole = read_rows(folder, "ledger.csv")
    with (folder / "ledger.csv").open("a") as file:
        file.write("c2s,0,1,1,ba")
    assert read_rows(folder, "ledger.csv") == whole


def test_a_damaged_summary_is_written_again_by_resume(tmp_path, command, finished):
    folder = copy(finished, tmp_path / "run")
    text = (folder / "summary.json").read_text()
    for damaged in (text[: len(text) // 2], "[]", "{}", "null", '{"method": "fedweit"}'):
        (folder / "summary.json").write_text(damaged)
        for act in ("show", "compare"):
            assert_one_line(command(act, folder), "summary.json", f"weft resume {folder}")
    assert command("resume", folder, "--workers", "1").code == 0  # the remedy in the error
    assert_same_result(folder, finished)
