"""What somebody brings: scenarios from arrays and datasets, losses, metrics; by file, and by an installed package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import weft
from weft import registry as named
from weft import scenarios
from weft.errors import WeftError
from weft.networks.losses import Loss
from weft.scenarios import Scenario
from weft.scenarios.arrays import from_arrays, from_dataset

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TINY = {"network": "mlp", "clients": 2, "tasks": 2, "rounds_per_task": 8, "batch_size": 10, "device": "cpu"}
TINY["learning_rate"] = 3e-4


def example(name):
    return f"{EXAMPLES / 'own_'}{name}"


# ---- scenarios -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_scenario_from_arrays_learns(tmp_path):
    plan = weft.Plan(scenario=example("scenario.py:stripes"), method="stl", **{**TINY, "scenario.images": 120})
    result = weft.run(plan, tmp_path / "run")
    assert result.accuracy > 0.6  # a guess is a third
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["images"] == {
        "stripes": scenarios.of(plan).fingerprint
    }
    assert scenarios.of(plan).fingerprint != scenarios.of(weft.Plan(scenario=plan.scenario, **TINY)).fingerprint


def test_a_scene_is_on_one_side():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, size=(90, 32, 32, 3), dtype=np.uint8)
    scenes = [f"scene {place // 9}" for place in range(90)]
    task = from_arrays("t", images, np.arange(90) % 3, groups=scenes)
    known = {image.tobytes(): scene for image, scene in zip(images, scenes, strict=True)}
    of_part = [{known[image.tobytes()] for image in task.load(part).images} for part in ("train", "test", "valid")]
    assert sum(map(len, of_part)) == 10
    assert len(set.union(*of_part)) == 10


def test_a_scenario_from_a_torch_dataset_learns(tmp_path):
    result = weft.run(weft.Plan(scenario=example("scenario.py:from_torch"), method="stl", **TINY), tmp_path / "run")
    assert result.accuracy == 1.0


def test_images_of_all_kinds_are_the_same_image():
    grey = np.linspace(0, 1, 32 * 32).reshape(32, 32)
    as_bytes = (grey * 255).round().astype(np.uint8)
    colour = np.repeat(as_bytes[:, :, None], 3, axis=2)
    from PIL import Image

    for other in (
        grey,
        colour,
        torch.from_numpy(colour).permute(2, 0, 1),
        torch.from_numpy(grey)[None],
        Image.fromarray(as_bytes),
        Image.fromarray(as_bytes.astype(np.uint16) * 257),  # 16 bits, of which 65535 is white
    ):
        pairs = [(other, place % 2) for place in range(10)]
        assert (from_dataset("t", pairs).load("train").images == colour).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"images": np.full((10, 8, 8), 7.0)}, "image 0 .*from 7 to 7"),
        ({"images": np.full((10, 8, 8), np.nan)}, "from nan"),
        ({"images": np.zeros((10, 8, 8), dtype=np.int64)}, "use uint8, uint16, or floats"),
        ({"images": np.zeros((10, 8))}, "its shape is"),
        ({"labels": [0] * 9}, "10 images and 9 labels"),
        ({"labels": [0] * 10}, "only one class"),
        ({"labels": [0, 3] * 5, "classes": ["a", "b"]}, "from 0 to 3, for 2 classes"),
        ({"labels": ["x", "y"] * 5, "classes": ["x", "z"]}, "the label 'y' is not in classes"),
        ({"splits": ["train"] * 10}, "has no test images"),
        ({"labels": np.zeros((10, 2)), "classes": ["a"]}, "1 classes for 2 outputs"),
    ],
)
def test_what_is_wrong_with_arrays(changed, said):
    given = {"images": np.zeros((10, 8, 8)), "labels": [0, 1] * 5, **changed}
    with pytest.raises(WeftError, match=said.replace("(", r"\(")):
        from_arrays("t", given.pop("images"), given.pop("labels"), **given)


def two(clients, tasks, seed, wrong: bool = False):
    task = from_arrays("t", np.zeros((10, 8, 8)), [0, 1] * 5)
    return Scenario("two", ((task,),)) if wrong else Scenario("two", ((task,) * tasks,) * clients)


def no_seed(clients, tasks): ...


def nothing(clients, tasks, seed): ...


def fails(clients, tasks, seed):
    raise KeyError("my own slip")


def test_a_function_will_do_in_python():
    plan = weft.Plan(scenario={"name": two, "wrong": False}, clients=2, tasks=1)
    assert plan.scenario == "test_own_parts:two"
    assert scenarios.of(plan).clients == 2


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("two", {"wrong": True}, "returned 1 clients with up to 1 tasks; the plan has clients=2 and tasks=2"),
        ("two", {"worng": True}, "did you mean scenario.wrong"),
        ("no_seed", {}, "it has no argument 'seed'"),
        ("nothing", {}, "returned NoneType"),
        ("fails", {}, "KeyError: 'my own slip'"),
        ("to", {}, "has no to; did you mean two"),
    ],
)
def test_what_is_no_scenario_is_refused(name, options, said):
    with pytest.raises(WeftError, match=said):
        scenarios.of(weft.Plan(scenario={"name": f"test_own_parts:{name}", **options}, clients=2, tasks=2))


def test_options_of_the_plans_own_scenario_are_none_of_another():
    given = {"scenario.train": 20, "network": "mlp", "network.hidden": 5}
    plan = weft.Plan.merge(given, ["scenario=test_own_parts:two"])
    assert plan.scenario_options == {"wrong": False}
    assert plan.network_options["hidden"] == 5
    with pytest.raises(WeftError, match=r"unknown key scenario\.train"):
        weft.Plan.merge({}, ["scenario=test_own_parts:two", "scenario.train=20"])


# ---- losses and metrics ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "scenario", "at_least"), [("SeveralLabels", "colours", 0.9), ("Number", "lengths", 0.7)]
)
@pytest.mark.parametrize("method", ["stl", "fedweit"])
def test_a_loss_of_ones_own_learns(tmp_path, loss, scenario, at_least, method):
    words = {"scenario": example(f"loss.py:{scenario}"), "loss": example(f"loss.py:{loss}"), "method": method}
    result = weft.run(weft.Plan(**words, **TINY), tmp_path / "run")
    assert result.accuracy > at_least


def test_the_fisher_information_of_another_loss():
    from weft.networks import build
    from weft.networks.fisher import fisher

    network = build("mlp", {"hidden": 4, "features": 3}, (2,), "cpu", example("loss.py:SeveralLabels"))
    network.vector.copy_(torch.linspace(-1, 1, len(network.vector)))
    images, targets = torch.rand(3, 3, 32, 32), torch.tensor([[0.0, 1], [1, 1], [0, 0]])
    slow = torch.zeros_like(network.vector)
    for place in range(3):
        network.compute_gradient(images[place : place + 1], targets[place : place + 1])
        slow += network.gradient**2 / 3
    torch.testing.assert_close(fisher(network, [(images, targets)]), slow)


class Same(Loss):
    """Cross entropy, once more."""


@pytest.mark.slow
def test_the_usual_loss_by_name_is_the_usual_loss(tmp_path):
    plain, named_ = (
        weft.run(weft.Plan(**{**TINY, "scenario.train": 20, "rounds_per_task": 1}, **more), tmp_path / str(len(more)))
        for more in ({}, {"loss": "test_own_parts:Same"})
    )
    np.testing.assert_array_equal(plain.accuracy_matrix, named_.accuracy_matrix)
    assert plain.traffic == named_.traffic


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"loss": "mse"}, "is not a loss; write file.py:Name"),
        ({"loss": "test_own_parts:two"}, "is not a loss"),
        ({"loss": "test_own_parts:Same", "method": "joint"}, "remove loss="),
        ({"metrics": "f1"}, "unknown metric 'f1'"),
    ],
)
def test_what_is_wrong_with_a_plan(words, said):
    with pytest.raises(WeftError, match=said):
        weft.Plan(**words)


@pytest.mark.slow
def test_a_metric_of_ones_own(tmp_path):
    plan = weft.Plan(metrics=f"balanced, {example('metric.py:sure_and_wrong')}", **{**TINY, "rounds_per_task": 1})
    result = weft.run(plan, tmp_path / "run")
    assert 0 <= result.metrics["sure_and_wrong"] <= 1 - result.accuracy


@pytest.mark.slow
def test_nobody_pays_who_does_not_ask(tmp_path):
    weft.run(weft.Plan(**{**TINY, "rounds_per_task": 1}), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.csv").exists()
    text = (tmp_path / "run" / "plan.toml").read_text()
    assert "metrics" not in text
    assert "loss" not in text


@pytest.mark.slow
def test_metrics_survive_a_stop(tmp_path):
    """A run that goes on writes the same table."""
    plan = weft.Plan(metrics="recall", **{**TINY, "rounds_per_task": 1})
    weft.run(plan, tmp_path / "whole")
    weft.run(plan, tmp_path / "run", save_every=0)
    table = (tmp_path / "run" / "metrics.csv").read_bytes()
    assert table == (tmp_path / "whole" / "metrics.csv").read_bytes()
    with (tmp_path / "run" / "metrics.csv").open("ab") as file:
        file.write(b"0,1,0,recall,rest of a killed session,0.5\n")
    (tmp_path / "run" / "summary.json").unlink()
    weft.resume(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == table


@pytest.mark.slow
def test_joint_is_measured_within_each_tasks_own_classes(tmp_path):
    result = weft.run(weft.Plan(method="joint", metrics="balanced", **{**TINY, "rounds_per_task": 2}), tmp_path / "run")
    assert result.metrics["balanced"] == pytest.approx(result.accuracy)  # test images are even


# ---- an installed package --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """examples/package, installed by pip into a folder of its own."""
    place = tmp_path_factory.mktemp("installed")
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, *words, "--target", str(place), str(EXAMPLES / "package")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.long
def test_an_installed_package_adds_by_name(installed, tmp_path):
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    words = "method=fedavg+cautious network=stripe scenario=halves loss=softened metrics=doubt"
    (tmp_path / "plan.toml").write_text("clients = 2\ntasks = 2\nrounds_per_task = 6\nbatch_size = 10\n")

    def weft_command(*words):
        keys = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, "-m", "weft", *words], **keys)

    done = weft_command("run", "plan.toml", *words.split(), "method.longest=0.5", "--workers", "2", "--out", "run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy"] > 0.8
    assert "doubt" in summary["metrics"]
    plan = (tmp_path / "run" / "plan.toml").read_text()
    for name in ("fedavg+weft_extras:Cautious", "weft_extras:stripe", "weft_extras:halves", "weft_extras:Softened"):
        assert name in plan
    shown = weft_command("show", "halves", "clients=1", "tasks=1")
    assert "upper, lower" in shown.stdout, shown.stderr
    for kind, name in (("methods", "cautious"), ("scenarios", "halves"), ("networks", "stripe")):
        assert name in weft_command("list", kind).stdout
    refused = weft_command("run", "plan.toml", "method=cautius")
    assert refused.returncode == 2


def test_entry_points_are_looked_up_by_group(monkeypatch):
    points = {"weft.losses": {"same": "test_own_parts:Same"}}
    monkeypatch.setattr(named, "installed", lambda group: points.get(group, {}))
    assert weft.Plan(loss="same").loss == "test_own_parts:Same"
