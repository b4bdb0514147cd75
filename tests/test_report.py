"""The page: what it shows is what the run folder holds, for every figure; and it opens without a network."""

from __future__ import annotations

import hashlib
import html
import io
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from cli_helpers import TINY, assert_one_line, copy, summary_of, tiny
from report_helpers import data_of, figure, layers, page_of, rows, states, traces, vector
from rich.console import Console

import weft
from weft import metrics
from weft.core.storage import State
from weft.report import page as page_module
from weft.report.facts import group, label
from weft.report.figures import when
from weft.report.helping import CAVEATS, helps
from weft.report.reading import read_journal, read_runs
from weft.report.terminal import more_about
from weft.runs.folder import accuracy_matrices, read_measures

pytest_plugins = ["cli_helpers"]

ASSETS = Path(page_module.__file__).parent / "assets"
CLIENTS, TASKS = TINY["clients"], TINY["tasks"]


@pytest.fixture(scope="module")
def two_seeds(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("seeds") / "s1"
    weft.run(tiny(seed=1), folder)
    return [finished, folder]


@pytest.fixture(scope="module")
def stl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stl") / "stl"
    weft.run(tiny(method="stl"), folder)
    return folder


@pytest.fixture(scope="module")
def text(two_seeds: list[Path], finished_fedavg: Path, stl: Path) -> str:
    """Three methods, one of them with two seeds."""
    return page_of(*two_seeds, finished_fedavg, stl)


@pytest.fixture(scope="module")
def data(text: str) -> dict:
    return data_of(text)


# ---- what is shown is what is there ----------------------------------------------------------------------------------


def test_density_is_that_of_the_states(finished):
    data = data_of(page_of(finished))
    parts = layers(finished)
    for client, state in states(finished):
        of_a = figure(data, f"density-a-0-{client}")["traces"][0]
        of_m = figure(data, f"density-m-0-{client}")["traces"][0]
        assert of_a["y"] == [name.removesuffix(".weight") for name, _, _ in parts]
        for step in range(TASKS):
            adaptive, mask = vector(state, f"adaptive/{step}"), vector(state, f"mask/{step}")
            for level, (_, span, row_span) in enumerate(parts):
                wanted = 100 * np.count_nonzero(adaptive[span]) / adaptive[span].size
                assert of_a["z"][level][step] == pytest.approx(wanted, rel=1e-6)
                assert of_m["z"][level][step] == pytest.approx(mask[row_span].mean(), rel=1e-6)
                assert of_m["customdata"][level][step] == np.count_nonzero(mask[row_span]) / mask[row_span].size


def test_attention_is_that_of_the_states(finished):
    data = data_of(page_of(finished))
    parts = layers(finished)
    given, added = Counter(), Counter()
    for client, state in states(finished):
        detail = figure(data, f"helping-alpha-0-{client}")["traces"][0]
        place = 0
        for step in range(1, TASKS):
            keys = state.numbers[f"foreign/{step}"]
            alphas = vector(state, f"attention/{step}").reshape(len(parts), len(keys))
            for column, key in enumerate(keys):
                giver = int(key.split(".")[0])
                assert detail["y"][place] == f"task {step} from {key}"
                assert detail["customdata"][place] == pytest.approx(list(alphas[:, column]), rel=1e-6)
                assert detail["z"][place] == pytest.approx(list(alphas[:, column] * len(keys)), rel=1e-6)
                foreign = vector(state, f"foreign/{key}")
                norms = [np.linalg.norm(foreign[span]) for _, span, _ in parts]
                given[giver, client] += np.abs(alphas[:, column]).sum()
                added[giver, client] += (np.abs(alphas[:, column]) * norms).sum()
                place += 1
        assert place == len(detail["y"])
    pairs = figure(data, "helping-pairs-0")["traces"][0]["z"]
    for giver in range(CLIENTS):
        for taker in range(CLIENTS):
            wanted = given.get((giver, taker))
            assert pairs[giver][taker] == (None if wanted is None else pytest.approx(wanted, rel=1e-6))
    for measure, sums in (("attention", given), ("added", added)):
        (trace,) = traces(data, "helping-shares-0", measure=measure)
        wanted = [
            sum(value for (giver, _), value in sums.items() if giver == c) / sum(sums.values()) for c in range(CLIENTS)
        ]
        assert trace["y"] == pytest.approx([100 * value for value in wanted], rel=1e-6)


def test_another_state_gives_another_page(finished, tmp_path):
    """The facts come from the checkpoint's files and nowhere else."""
    folder = copy(finished, tmp_path / "run")
    manifest_file = folder / "checkpoints" / "manifest.json"
    manifest = json.loads(manifest_file.read_text())
    state = State.load(folder / "checkpoints", manifest["clients"]["1"], owner="changed")
    state.archive["attention/1"] = torch.full_like(state.archive["attention/1"], 0.25)
    manifest["clients"]["1"] = state.save(folder / "checkpoints", "changed")
    manifest_file.write_text(json.dumps(manifest))
    detail = figure(data_of(page_of(folder)), "helping-alpha-0-1")["traces"][0]
    assert {value for row in detail["customdata"] for value in row} == {0.25}


def test_accuracy_is_that_of_the_table(data, two_seeds, finished_fedavg, stl):
    for place, folders in enumerate((two_seeds, [finished_fedavg], [stl])):
        (line,) = traces(data, "accuracy-after", group=place, client="mean")
        for after in range(TASKS):
            means = []
            for folder in folders:
                found = [row for row in rows(folder, "accuracy.csv") if int(row["after_task"]) == after]
                by_client = [
                    fmean(float(row["accuracy"]) for row in found if row["client"] == str(client))
                    for client in range(CLIENTS)
                ]
                means.append(fmean(by_client))
            assert line["y"][after] == pytest.approx(100 * fmean(means), rel=1e-6)
            told = line["customdata"][after][1]
            assert told == (f" ± {100 * stdev(means):.1f}" if len(means) > 1 else "")
        for client in range(CLIENTS):
            (own,) = traces(data, "accuracy-after", group=place, client=str(client))
            ends = [metrics.average_accuracy(accuracy_matrices(folder)[client]) for folder in folders]
            assert own["y"][-1] == pytest.approx(100 * fmean(ends), rel=1e-6)


def test_matrices_are_those_of_the_table(data, two_seeds, finished_fedavg):
    for place, folders in enumerate((two_seeds, [finished_fedavg])):
        for client in range(CLIENTS):
            shown = figure(data, f"matrix-{place}-{client}")["traces"][0]["z"]
            for after in range(TASKS):
                for task in range(TASKS):
                    cells = [
                        float(row["accuracy"])
                        for folder in folders
                        for row in rows(folder, "accuracy.csv")
                        if (int(row["client"]), int(row["after_task"]), int(row["task"])) == (client, after, task)
                    ]
                    assert shown[after][task] == (pytest.approx(100 * fmean(cells), rel=1e-6) if cells else None)


def test_bytes_are_those_of_the_ledger(data, finished_fedavg, two_seeds):
    for place, folders in enumerate((two_seeds, [finished_fedavg])):
        wanted: Counter = Counter()
        for folder in folders:
            for row in rows(folder, "ledger.csv"):
                wanted[row["direction"], row["part"].split("/")[0]] += int(row["bytes"]) / len(folders)
        shown = {
            (one["meta"]["direction"], one["meta"]["part"]): abs(sum(one["y"]))
            for one in traces(data, f"traffic-parts-{place}")
        }
        assert set(shown) == set(wanted)
        for key, value in wanted.items():
            assert shown[key] == pytest.approx(value, rel=1e-6)
        for way, direction in (("up", "c2s"), ("down", "s2c")):
            lines = traces(data, "traffic-total", group=place, client="mean")
            (total,) = [one for one in lines if one["name"].endswith(way)]
            summed = sum(value for (which, _), value in wanted.items() if which == direction)
            assert total["y"][-1] == pytest.approx(summed, rel=1e-6)


def test_rounds_are_those_of_the_journal(data, finished_fedavg):
    (line,) = traces(data, "adaptation-rounds", group=1, client="1")
    events = [json.loads(each) for each in (finished_fedavg / "journal.jsonl").read_text().splitlines()]
    wanted = [100 * event["valid_accuracy"] for event in events if event["event"] == "reply" and event["client"] == 1]
    assert [value for value in line["y"] if value is not None] == pytest.approx(wanted, rel=1e-6)
    assert len(wanted) == TASKS * TINY["rounds_per_task"]


def test_forgetting_is_that_of_the_summaries(data, two_seeds, finished_fedavg, stl):
    for place, folders in enumerate((two_seeds, [finished_fedavg], [stl])):
        (line,) = traces(data, "forgetting-after", group=place, client="mean")
        wanted = fmean(summary_of(folder)["forgetting"] for folder in folders)
        assert line["y"][-1] == pytest.approx(100 * wanted, rel=1e-6, abs=1e-9)
        assert line["y"][0] is None


def test_the_table_has_the_summaries(text, two_seeds, finished_fedavg):
    accuracies = [summary_of(folder)["accuracy"] for folder in two_seeds]
    assert f"{100 * fmean(accuracies):.1f} ± {100 * stdev(accuracies):.1f} %" in text
    assert f"{100 * summary_of(finished_fedavg)['accuracy']:.1f} %" in text


def test_gain_is_together_minus_alone(data, finished, finished_fedavg, stl):
    for place, folder in enumerate((finished, finished_fedavg)):  # stl has seed 0 alone
        bars, marks = traces(data, "alone-gain", group=place)
        ours, own = accuracy_matrices(folder), accuracy_matrices(stl)
        wanted = [[a - b for a, b in zip(ours[c][-1], own[c][-1], strict=True)] for c in range(CLIENTS)]
        assert bars["y"] == pytest.approx([100 * fmean(each) for each in wanted], rel=1e-6, abs=1e-9)
        assert marks["y"] == pytest.approx([100 * value for each in wanted for value in each], rel=1e-6, abs=1e-9)


def test_alone_needs_the_same_tasks_and_seed(finished, finished_stl, stl):
    assert not helps(group(read_runs([finished, finished_stl])))  # seed 3 has other tasks
    (one,) = helps(group(read_runs([finished, stl])))
    assert (one.together.label, one.alone.label, one.seeds) == ("fedweit", "stl", (0,))
    words = data_of(page_of(finished))["html"]["alone"]
    assert "not both here" in words


def test_alone_needs_the_same_terms_and_images(finished, stl, tmp_path):
    longer = weft.run(tiny(method="stl", rounds_per_task=3), tmp_path / "longer").folder
    assert not helps(group(read_runs([finished, longer])))
    others = copy(stl, tmp_path / "others")
    facts = json.loads((others / "environment.json").read_text())
    (others / "environment.json").write_text(json.dumps(facts | {"images": {"photos": "other"}}))
    assert not helps(group(read_runs([finished, others])))


def test_alone_is_the_strongest_on_the_seeds_of_both(finished, stl, tmp_path):
    """A rival is not judged by seeds that the federated run does not have."""
    local = weft.run(tiny(method="local"), tmp_path / "local").folder
    groups = group(read_runs([finished, stl, local]))
    (one,) = helps(groups)
    ends = {each.label: fmean(fmean(rows[-1]) for rows in each.runs[0].matrices.values()) for each in groups[1:]}
    assert ends[one.alone.label] == max(ends.values())


# ---- seeds, labels ---------------------------------------------------------------------------------------------------


def test_seeds_of_a_plan_are_one_group(two_seeds, stl):
    groups = group(read_runs([two_seeds[0], stl, two_seeds[1]]))
    assert [(one.label, one.seeds) for one in groups] == [("fedweit", [0, 1]), ("stl", [0])]


def test_the_same_run_twice_is_counted_once(finished, tmp_path):
    again = copy(finished, tmp_path / "again")
    (one,) = group(read_runs([finished, again]))
    assert one.seeds == [0]
    assert f"{again} repeats a plan and seed that is here already; left out" in page_of(finished, again)


def test_plans_of_one_method_are_told_apart():
    plans = [{"method": "fedweit", "seed": 0, "method.keep": 0.3}, {"method": "fedweit", "seed": 1, "method.keep": 0.1}]
    assert label(plans) == ["fedweit keep=0.3", "fedweit keep=0.1"]


def test_runs_on_other_terms_are_marked(finished, tmp_path):
    folder = tmp_path / "other"
    weft.run(tiny(method="local", tasks=1), folder)
    assert "differ in tasks: compare them with care" in data_of(page_of(finished, folder))["html"]["overview"]


def test_a_folder_of_runs_stands_for_them(finished, finished_fedavg, tmp_path, command):
    for folder in (finished, finished_fedavg):
        shutil.copytree(folder, tmp_path / "runs" / folder.name)
    done = command("report", tmp_path / "runs", cwd=tmp_path)
    assert (done.code, done.out) == (0, "report.html\n")
    assert len(data_of((tmp_path / "report.html").read_text())["groups"]) == 2


# ---- a page that needs nothing ---------------------------------------------------------------------------------------


def test_nothing_is_loaded_from_anywhere(text):
    shell = text.replace(page_module.asset("plotly-cartesian.min.js"), "")
    assert re.findall(r'\s(?:src|href|action)\s*=\s*["\']?([^"\'\s>]+)', shell) == ["#main"]
    assert not re.search(r"@import|url\(", shell)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', shell)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'none'" in policy


def test_the_page_is_the_same_each_time(finished, finished_fedavg):
    assert page_of(finished, finished_fedavg) == page_of(finished, finished_fedavg)


def test_the_bundle_is_the_one_that_was_released():
    """plotly.js-cartesian-dist-min 4.1.1 of the npm registry."""
    blob = (ASSETS / "plotly-cartesian.min.js").read_bytes()
    assert hashlib.sha256(blob).hexdigest() == "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
    assert b"v4.1.1" in blob[:80]
    assert "MIT" in (ASSETS / "plotly-LICENSE.txt").read_text()
    assert b"</script" not in blob.lower()


def test_names_from_files_are_words(finished, tmp_path):
    evil = "<img src=x onerror=alert(1)>%{y}</script>&amp;"
    folder = copy(finished, tmp_path / "<b>run")
    plan = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(plan.replace('method = "fedweit"', f'method = "{evil}"'))
    contents = json.loads((folder / "contents.json").read_text())
    contents["layers"][0]["name"] = evil
    contents["tasks"][0][0]["name"] = evil
    (folder / "contents.json").write_text(json.dumps(contents))
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"at": 1.0, "event": evil, "why": evil}) + "\n")
    text = page_of(folder)
    assert text.count("</script") == 3
    assert "<img" not in text
    assert "<b>run" not in text
    assert html.escape(evil) in text
    for spec in data_of(text)["figures"].values():
        strings = re.findall(r'"((?:[^"\\]|\\.)*)"', json.dumps(spec))
        assert all("<" not in each.replace("<extra>", "").replace("</extra>", "") for each in strings)


def test_every_figure_has_words(text, data):
    labels = re.findall(r'<div class=plot role=img aria-label="([^"]*)"', text)
    assert len(labels) == len(data["figures"])
    assert all(len(each) > 10 for each in labels)
    for name in data["sections"]:
        assert re.search(r"<p class=words>[^<]{10,}", data["html"][name]), name


def test_the_caveats_of_attention_are_there(data):
    for line in CAVEATS:
        assert html.escape(line) in data["html"]["helping"]


def test_plan_environment_and_incidents_are_there(text, finished):
    assert "learning_rate" in text
    assert json.loads((finished / "environment.json").read_text())["packages"]["torch"] in text
    assert "All 4 runs went through without an incident." in text


def _themes() -> dict[str, dict[str, str]]:
    css = (ASSETS / "page.css").read_text()
    light, dark = (
        re.search(rf"{start} \{{(.*?)\}}", css, re.DOTALL) for start in (":root", ':root\\[data-theme="dark"\\]')
    )
    assert light
    assert dark
    found = {name: dict(re.findall(r"--(\w+): (#\w{6})", part[1])) for name, part in (("light", light), ("dark", dark))}
    return {"light": found["light"], "dark": {**found["light"], **found["dark"]}}


def _contrast(one: str, other: str) -> float:
    """WCAG 2: (L1 + 0.05) / (L2 + 0.05)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_told_from_the_paper(theme):
    colours = _themes()[theme]
    for ground in ("paper", "card"):
        for name in ("ink", "soft", "accent", "good", "warn"):
            assert _contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        for place in range(8):
            assert _contrast(colours[f"s{place}"], colours[ground]) >= 3, (place, ground)


# ---- runs that are not over, and folders that are damaged ------------------------------------------------------------


def test_a_run_that_is_not_over_is_shown(stopped):
    text = page_of(stopped)
    assert "Not over yet: fedweit" in text
    (line,) = traces(data_of(text), "accuracy-after", group=0, client="mean")
    assert len(line["y"]) == 1


def test_a_resumed_run_counts_each_round_once(stopped, tmp_path):
    folder = copy(stopped, tmp_path / "run")
    weft.resume(folder)
    (run,) = read_runs([folder])
    assert len(run.rounds) == CLIENTS * TASKS * TINY["rounds_per_task"]
    assert "1 time a run went on after a stop" in page_of(folder)


def test_what_is_damaged_is_said(finished, tmp_path):
    folder = copy(finished, tmp_path / "run")
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"at": 1, "event"\n{"half')
    next((folder / "checkpoints").glob("*attention*")).write_bytes(b"nothing")
    text = page_of(folder)
    assert "2 things could not be read" in text
    assert "density and attention are left out" in text
    assert "No task here has used another client" in text


@pytest.mark.parametrize("name", ["valid_accuracy", "valid_loss", "train_loss", "round"])
@pytest.mark.parametrize("value", ['"high"', "[0.5]", "NaN", "1e999", "{}"])
def test_an_answer_of_another_kind_is_said_and_left_out(finished, tmp_path, name, value):
    shutil.copy(finished / "journal.jsonl", tmp_path)
    notes: list[str] = []
    whole = read_journal(tmp_path, notes)
    assert not notes
    answer = '{"at": 2e9, "event": "reply", "client": 0, "task": 0, "round": 77, "images": 5, "%s": %s}\n'
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write(answer % (name, value))
    assert read_journal(tmp_path, notes) == whole
    assert len(notes) == 1
    assert "is damaged and left out" in notes[0]


def test_answers_of_another_kind_do_no_harm(finished, tmp_path, command):
    folder = copy(finished, tmp_path / "run")
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"valid_accuracy"' in line)
    lines[place] = json.dumps({**json.loads(lines[place]), "valid_accuracy": "high", "valid_loss": "<b>"})
    journal.write_text("\n".join(lines) + "\n")
    assert "1 thing could not be read" in page_of(folder)
    assert command("show", folder, cwd=tmp_path).code == 0


@pytest.mark.parametrize("name", ["accuracy.csv", "ledger.csv"])
def test_a_damaged_table_is_one_line(finished, tmp_path, command, name):
    folder = copy(finished, tmp_path / "run")
    with (folder / name).open("a") as file:
        file.write("x,y\n")
    assert_one_line(command("report", folder, cwd=tmp_path), name, "damaged")


def test_a_plan_of_another_machine_does_no_harm(finished, tmp_path):
    folder = copy(finished, tmp_path / "run")
    plan = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(plan.replace('network = "mlp"', 'network = "/nowhere/nets.py:Own"'))
    assert "/nowhere/nets.py:Own" in page_of(folder)


def test_mistakes_are_one_line(finished, tmp_path, command):
    assert_one_line(command("report", tmp_path / "none"), "is not a run folder")
    assert_one_line(command("report", finished, "--out", tmp_path / "no" / "page.html"), "cannot be written", "--out")
    assert_one_line(command("report"), "DIR...")


@pytest.mark.slow
def test_a_report_loads_no_torch(finished, tmp_path):
    program = "import sys; sys.modules['torch'] = None; from weft.cli.app import main; main()"
    argv = [sys.executable, "-c", program, "report", str(finished), "--out", str(tmp_path / "page.html")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "helping-pairs-0" in data_of((tmp_path / "page.html").read_text())["figures"]


# ---- beside accuracy -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_a_plan_measures_beside_accuracy_is_on_the_page(tmp_path, two_seeds):
    assert "Beside accuracy" not in page_of(*two_seeds)
    folder = weft.run(tiny(metrics="balanced,recall"), tmp_path / "run").folder
    lines = [line for line in read_measures(folder) if line.after_task == TINY["tasks"] - 1]
    balanced = fmean(line.value for line in lines if line.metric == "balanced")
    shown = data_of(page_of(folder))["html"]["measures"]
    assert f"<th scope=row>balanced</th><td class=number>{balanced:.3f}</td>" in shown
    some = next(line.label for line in lines if line.metric == "recall")
    recall = fmean(line.value for line in lines if (line.metric, line.label) == ("recall", some))
    assert f"<th scope=row>recall, {some}</th><td class=number>{recall:.3f}</td>" in shown


# ---- runs that are not as usual --------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [0, 1])
def test_a_test_that_was_never_answered_is_left_out(missed, finished, tmp_path):
    folder = copy(finished, tmp_path / "run")
    table = folder / "accuracy.csv"
    head, *lines = table.read_text().splitlines()
    kept = [line for line in lines if line.split(",")[:2] != ["1", str(missed)]]
    assert len(kept) < len(lines)
    table.write_text("\n".join([head, *kept]) + "\n")
    shown = data_of(page_of(folder))  # which is JSON: NaN is none
    json.dumps(shown, allow_nan=False)
    grid = figure(shown, "matrix-0-1")["traces"][0]["z"]
    assert set(grid[missed]) == {None}
    more_about(read_runs([folder])[0], Console(file=io.StringIO()))


@pytest.mark.parametrize("how", ["task_clocks", "updates"])
def test_rounds_of_clients_with_clocks_of_their_own(how, tmp_path):
    """Some tasks take more rounds than the plan says, others fewer: each has a place of its own within its task."""
    folder = weft.run(tiny(rounds_per_task=4, **{"async": how}), tmp_path / "run").folder
    (one,) = group(read_runs([folder]))
    longest = max(item.round for run in one.runs for item in run.rounds)
    assert longest >= 4
    places = [when((item.step, item.round), one) for run in one.runs for item in run.rounds if item.client == 0]
    assert len(set(places)) == len(places)
    assert all(item.step < when((item.step, item.round), one) < item.step + 1 for item in one.runs[0].rounds)
    page_of(folder)


@pytest.mark.slow
def test_a_resumed_run_with_clocks_of_their_own_keeps_all_rounds(tmp_path):
    whole = weft.run(tiny(rounds_per_task=4, **{"async": "updates", "clock.spread": 3.0}), tmp_path / "whole").folder
    lines = (whole / "journal.jsonl").read_text().splitlines()
    cut = next(place for place in range(len(lines) // 2, len(lines)) if '"event": "reply"' in lines[place])
    again = [lines[0], *lines[1:cut], json.dumps({"at": 0.0, "event": "resumed"}), *lines[cut - 3 :]]
    other = copy(whole, tmp_path / "other")
    (other / "journal.jsonl").write_text("\n".join(again) + "\n")
    before, after = (read_runs([folder])[0].rounds for folder in (whole, other))
    assert [item[:3] for item in after] == [item[:3] for item in before]
