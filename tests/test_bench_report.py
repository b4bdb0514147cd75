"""weft bench: bars, tables, figure and command, on given results; and real runs that are watched."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from weft.benchmarks import bars, peers, processes, report, runs, suite
from weft.cli import app as cli
from weft.errors import WeftError

ROOT = Path(__file__).resolve().parent.parent
TINY: dict[str, Any] = {
    "network": "mlp",
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}


def spread(median: float) -> dict[str, Any]:
    return {"median": median, "low": 0.9 * median, "high": 1.1 * median, "count": 5}


@pytest.fixture
def found() -> dict[str, Any]:
    """The committed results without comparisons, with some values that tests expect."""
    result = json.loads((ROOT / "results" / "bench.json").read_text())
    del result["paired"], result["peers"]
    result |= {"quick": True, "seconds": 200.0, "start": {"seconds": spread(2.5)}}
    result["machine"] |= {"processor": "Abacus", "torch": "2.13.0"}
    steps, engine, memory = result["steps"], result["engine"], result["memory"]
    steps["ratios"] = {name: spread(RATIOS[name]) for name in steps["ratios"]}
    middle = {"step_seconds": spread(0.16), "images_per_second": 625, "share_of_peak": 0.5, "round_seconds": None}
    steps["contenders"]["fedweit task 10 foreign 5"] |= middle
    result["workers"]["speedup"] = 1.8
    memory["limit_seconds"] = 25.0
    memory["clients"]["1000"] |= {"peak_bytes": 1_500_000_000, "complete": False}
    engine |= {"accuracy": 0.801, "bits_per_adaptive_value": 40.0}
    engine["shares"]["training"] = 0.88
    engine["traffic"]["c2s"]["over_dense"], engine["traffic"]["s2c"]["over_dense"] = 0.31, 0.44
    result["ratios"] = bars.ratios_of(result)
    result["bars"] = bars.judge(result["ratios"])
    return result


PAIRED = {
    "seeds": [0, 1],
    "tasks": 2,
    "accuracy": {"default": [0.80, 0.79], "dense": [0.82, 0.79]},
    "points_lost": 1.0,
}


@pytest.mark.parametrize(("lost", "met"), [(None, [True, True]), (0.5, [True, True]), (0.6, [False, False])])
def test_bytes_count_as_saved_only_if_accuracy_is_kept(found, lost, met):
    ratios = found["ratios"] | {"c2s_bytes_over_dense": 0.1, "s2c_bytes_over_dense": 0.3}
    bars_by_name = {bar["ratio"]: bar for bar in bars.judge(ratios, lost)}
    assert [bars_by_name[name]["met"] for name in bars.BYTES] == met
    assert [bars_by_name[name]["aim_met"] for name in bars.BYTES] == met
    assert bars_by_name["two_workers_speedup"]["met"]


RATIOS = {
    "lenet_speedup_over_plain": 3.2,
    "fedweit_task10_over_lenet": 1.28,
    "fedweit_task50_over_task2": 1.2,
    "two_workers_speedup": 1.8,
    "training_share_of_round": 0.88,
    "c2s_bytes_over_dense": 0.31,
    "s2c_bytes_over_dense": 0.44,
    "bits_per_adaptive_value": 40.0,
    "peak_memory_gb_1000_clients": 1.5,
    "seconds_to_first_step": 2.5,
    "share_of_peak": 0.5,
}


def test_ratios_come_from_the_parts_and_bars_are_met_from_the_right_side(found):
    assert found["ratios"] == pytest.approx(RATIOS)
    assert list(found["ratios"]) == list(bars.BARS)
    missed = [bar["ratio"] for bar in found["bars"] if bar["met"] is False]
    assert missed == ["fedweit_task50_over_task2", "c2s_bytes_over_dense", "bits_per_adaptive_value"]
    aims = [bar["ratio"] for bar in found["bars"] if bar["aim_met"]]
    assert aims == ["lenet_speedup_over_plain", "seconds_to_first_step"]
    assert [bar["ratio"] for bar in found["bars"] if bar["met"] is None] == ["share_of_peak"]


def test_the_page_names_the_machine_and_holds_every_table(found):
    text = report.to_markdown(found)
    assert "`weft bench --quick --out results` in 3 min 20 s on Abacus, 2 cores, torch 2.13.0" in text
    assert "| our LeNet step, times faster than the plain one | 3.2 | 2.4 | 3 | yes | yes |" in text
    assert "| sparse A: bits per value, index included | 40 | 24 | 18 | no | no |" in text
    assert "an accuracy of 80.1 %" in text
    assert "The run of 1,000 clients was stopped after 25 s" in text
    assert "| fedweit task 10 foreign 5 | 160.0 | 144.0 to 176.0 | 625 | 50.0 % | - |" in text
    assert "Flower" not in text
    assert "ignore accuracy" in text
    one = {"accuracy": 0.82, "seconds": 40.0, "round_seconds": spread(3.0)}
    found["peers"] = {"clients": 5, "turns": 2, "rounds": 5, "batch_size": 20, "workers": 2, "flower": one, "weft": one}
    found["paired"] = PAIRED
    found["memory"]["clients"]["1000"]["complete"] = True
    text = report.to_markdown(found)
    assert "was stopped" not in text
    assert "ignore accuracy" not in text
    assert "weft bench --quick --peers --out results" in text
    assert "| Flower's simulation, plain LeNet | 3.00 | 40.0 | 82.0 % |" in text
    assert "| 0 | 80.0 % | 82.0 % | -2.0 |" in text
    assert "| mean | 79.5 % | 80.5 % | -1.0 |" in text
    for table in report.tables(found):
        assert all(len(row) == len(table.headings) for row in table.rows), table.title


def test_every_table_fits_a_terminal(found):
    written = io.StringIO()
    console = Console(width=80, file=written)
    for table in report.tables(found):
        console.print(report.to_terminal(table))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    (speedup,) = [line.split() for line in lines if "our LeNet step, times faster" in line]
    assert speedup[-5:] == ["3.2", "2.4", "3", "yes", "yes"]


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(found, monkeypatch):
    asked: list[tuple[bool, bool]] = []

    def bench(quick, with_peers, show, keep):
        asked.append((quick, with_peers))
        show("steps", 0, 1)
        show("steps", 1, 1)
        keep({**found, "part_seconds": {"steps": 1.0}})
        return found

    monkeypatch.setattr(suite, "bench", bench)
    return lambda *words: (CliRunner().invoke(cli.app, ["bench", *words]), asked)


def test_stdout_has_only_json_and_a_missed_bar_fails_with_check(command, found):
    done, asked = command("--json", "--quick")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(json.dumps(found))
    assert asked == [(True, False)]
    assert "training steps" in done.stderr
    assert command("--check", "--json")[0].exit_code == 1, "a bar is missed"
    for bar in found["bars"]:
        bar["met"] = True
    assert command("--check", "--json")[0].exit_code == 0


@pytest.mark.slow
def test_results_are_written_to_the_folder(command, found, tmp_path):
    pytest.importorskip("matplotlib")  # an extra; `make test` installs it
    done, _ = command("--out", str(tmp_path / "results"))
    assert done.exit_code == 0, done.output
    files = {file.name: file for file in (tmp_path / "results").iterdir()}
    assert set(files) == {"bench.json", "bench.md", "bench-growth.png"}
    assert json.loads(files["bench.json"].read_text())["ratios"] == found["ratios"]
    assert files["bench.md"].read_text() == report.to_markdown(found)
    from PIL import Image

    with Image.open(files["bench-growth.png"]) as picture:
        assert picture.size[0] > 1000


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt(), WeftError("the part wire ended with code 1"), ZeroDivisionError()]
)
def test_an_interrupted_benchmark_keeps_its_results(monkeypatch, tmp_path, end):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.json").write_text("an earlier one")

    def measure_part(name, settings, progress):
        if name == "steps":
            return {"images": 7}
        raise end

    monkeypatch.setattr(processes, "measure_part", measure_part)
    done = CliRunner().invoke(cli.app, ["bench", "--quick", "--out", str(tmp_path)])
    assert done.exit_code == (130 if isinstance(end, KeyboardInterrupt) else 1)
    assert f"(steps) are in {tmp_path / 'bench-parts.json'}" in done.stderr
    assert json.loads((tmp_path / "bench-parts.json").read_text())["steps"] == {"images": 7}
    assert (tmp_path / "bench.json").read_text() == "an earlier one"


def test_what_is_missing_is_an_error_before_anything_is_measured(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(peers, "PYTHON", Path("nowhere", "python"))
    monkeypatch.setattr(processes, "measure_part", lambda *_: pytest.fail("measured"))

    def error(*words: str) -> str:
        done = CliRunner().invoke(cli.app, ["bench", *words])
        assert isinstance(done.exception, WeftError)
        return str(done.exception)

    (tmp_path / "results").write_text("a file")
    assert "choose another --out" in error("--out", str(tmp_path / "results"))
    assert (tmp_path / "results").read_text() == "a file"
    assert "make peers" in error("--peers")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'weft[figures]'" in error("--out", str(tmp_path))


def test_the_machine_is_named_without_host_or_path(tmp_path):
    table = tmp_path / "cpuinfo"
    table.write_text("processor\t: 0\nmodel name\t: Abacus 3000\nmodel name\t: Abacus 3000\n")
    assert suite.processor(table) == "Abacus 3000"
    assert suite.processor(tmp_path / "nothing")
    said = json.dumps(suite.machine())
    assert os.uname().nodename not in said
    assert "/" not in said


# ---- runs that are watched -------------------------------------------------------------------------------------------


def reply(at: float, round_index: int) -> dict[str, Any]:
    return {"at": at, "event": "reply", "round": round_index}


def test_a_round_lasts_from_the_last_reply_before_it_to_its_last_reply():
    events = [{"at": 0.0, "event": "created"}, reply(5, 0), reply(4, 0), reply(7, 1), reply(8, 1), reply(12, 2)]
    assert runs.round_seconds(events, range(1, 3)) == [3, 4]
    assert runs.round_seconds(events, range(1, 2)) == [3]


def test_an_incomplete_line_of_a_journal_is_ignored(tmp_path):
    assert processes.journal(tmp_path) == []
    (tmp_path / "journal.jsonl").write_text('{"event": "created"}\n{"event": "ans')
    assert processes.journal(tmp_path) == [{"event": "created"}]


def test_memory_is_that_of_a_process_and_its_children():
    fill = "b = b'x' * 60_000_000; print('full', flush=True); import time; time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {fill!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert 60e6 < processes.memory_of(process.pid) < 200e6
        finally:
            for each in reversed(processes.family(process.pid)):
                each.kill()
    assert processes.memory_of(process.pid) == 0


@pytest.mark.long
def test_a_failed_part_or_run_names_the_cause(tmp_path):
    with pytest.raises(WeftError, match="batch_size"):
        processes.measure_part("wire", {"plan": {"batch_size": -1}, "passes": 1}, lambda *_: None)
    error = pytest.raises(WeftError, match=r"ended with code 2.*nobody")
    with processes.weft_run(["nobody.toml", "--out", "run"], tmp_path) as process, error:
        processes.watch(process, tmp_path, lambda: False)


@pytest.mark.long
def test_real_runs_are_measured():
    start = time.time()
    found = runs.measure_start(TINY, 1, lambda *_: None)
    assert 0.3 < found["seconds"]["median"] < time.time() - start
    found = runs.measure_workers(TINY, 1, 4, lambda *_: None)
    assert found["round_seconds"]["1"]["count"] == found["round_seconds"]["2"]["count"] == 2
    assert found["speedup"] > 0
    one = runs.measure_memory(TINY, [6], 2, 60.0, lambda *_: None)["clients"]["6"]
    assert one["complete"]
    assert 1e8 < one["peak_bytes"] < 4e9
    many = runs.measure_memory(TINY, [300], 2, 0.0, lambda *_: None)["clients"]["300"]
    assert many["rounds_per_second"] > 0
