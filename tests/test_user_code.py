"""The code that a run is made with: kept with the run, and the same when it is resumed."""

import hashlib
import json
from pathlib import Path

import pytest
from cli_helpers import Stop, Stopper, tiny

import weft
from weft import WeftError
from weft.report.reading import read_run

pytest_plugins = ["cli_helpers"]

METHOD = """
from beside import FACTOR
from weft.methods.method import Method


class Decay(Method):
    def prepare(self, training, client, ctx):
        weights, gradient = training.variables["weights"], training.gradients["weights"]
        training.penalties.append(lambda: gradient.add_(weights, alpha=FACTOR))
"""


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "beside.py").write_text("FACTOR = 0.01\n")
    (folder / "decay.py").write_text(METHOD)
    return folder


def stopped_run(code, folder):
    plan = tiny(method=f"{code / 'decay.py'}:Decay")
    with pytest.raises(Stop):
        weft.run(plan, folder, save_every=0, display=Stopper(8))


def test_the_folder_keeps_every_file_and_resume_refuses_a_changed_one(code, tmp_path):
    run = tmp_path / "run"
    stopped_run(code, run)
    recorded = json.loads((run / "environment.json").read_text())["code"]
    assert recorded == {
        str(code / name): hashlib.sha256((code / name).read_bytes()).hexdigest() for name in ("beside.py", "decay.py")
    }
    copies = {path.read_bytes() for path in (run / "code").iterdir()}
    assert copies == {path.read_bytes() for path in code.glob("*.py")}

    (code / "beside.py").write_text("FACTOR = 0.5\n")
    with pytest.raises(WeftError, match=r"beside.py was changed since .* started; restore it \(cp \S*/code/"):
        weft.resume(run)
    (code / "beside.py").unlink()
    with pytest.raises(WeftError, match=r"beside\.py is missing"):
        weft.resume(run)
    (code / "beside.py").write_text("FACTOR = 0.01\n")
    assert weft.resume(run).accuracy > 0


def test_a_run_can_be_read_where_its_code_is_missing(code, tmp_path, command):
    run = tmp_path / "run"
    weft.run(tiny(method=f"{code / 'decay.py'}:Decay"), run)
    for file in code.glob("*.py"):
        file.unlink()
    for words in (("show", run), ("compare", run), ("report", run, "--out", tmp_path / "report.html")):
        outcome = command(*words)
        assert (outcome.code, outcome.err) == (0, ""), words
    result = weft.Result(run)
    assert result.accuracy > 0
    assert result.accuracy_matrix.shape == (3, 2, 2)
    assert len(result.frame()) == 9
    assert read_run(run).summary == result.summary


def test_a_failed_start_leaves_no_folder(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(METHOD.replace("from beside import FACTOR", "").replace("training.penalties", "training.penalty"))
    with pytest.raises(AttributeError):
        weft.run(tiny(method=f"{file}:Decay"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_force_replaces_a_run_and_says_which(tmp_path, command, finished):
    plan, run = tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text(tiny(method="stl").toml())
    assert command("run", plan, "--out", run, "--workers", 1).code == 0
    assert command("run", plan, "seed=3", "--out", run).code == 2
    outcome = command("run", plan, "seed=3", "--out", run, "--force", "--workers", 1)
    assert outcome.code == 0
    assert f"{run} (stl, seed 0, finished, accuracy " in outcome.err
    assert weft.Result(run).seed == 3
    other = tmp_path / "other"
    other.mkdir()
    Path(other / "thesis.tex").write_text("years of work")
    assert command("run", plan, "--out", other, "--force").code == 2
    assert (other / "thesis.tex").exists()


class Interrupted(Stopper):
    def started(self, *_, **__):
        raise KeyboardInterrupt


def test_force_keeps_the_former_run_until_the_new_one_has_done_a_round(tmp_path):
    run, file = tmp_path / "run", tmp_path / "broken.py"
    file.write_text(METHOD.replace("from beside import FACTOR", "").replace("training.penalties", "training.penalty"))
    former = weft.run(tiny(method="stl"), run).accuracy
    with pytest.raises(AttributeError):
        weft.run(tiny(method=f"{file}:Decay"), run, force=True)
    with pytest.raises(KeyboardInterrupt, match="holds the former run"):
        weft.run(tiny(seed=3), run, force=True, display=Interrupted(1))
    assert (weft.Result(run).accuracy, weft.Result(run).plan.method) == (former, "stl")
    with pytest.raises(Stop):
        weft.run(tiny(seed=3), run, force=True, save_every=0, display=Stopper(8))
    assert weft.resume(run).seed == 3
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} - {"__pycache__"} == {"run"}
