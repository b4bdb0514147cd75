"""Exported models: the same predictions in a process that cannot import weft, for every format and network."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from cli_helpers import assert_one_line
from PIL import Image

import weft
from weft import networks
from weft.core import storage
from weft.core.client import Runtime
from weft.export.files import FORMATS, open_model, write
from weft.networks.lenet import LeNet
from weft.runs.folder import read_manifest
from weft.runs.model import TaskModel, task_from_run

pytest_plugins = ["cli_helpers"]

OWN = Path(__file__).resolve().parent / "own_networks.py"
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SMALL = {
    "clients": 2,
    "tasks": 2,
    "rounds_per_task": 1,
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 110,
    "device": "cpu",
}


def make(folder, **words):
    weft.run(weft.Plan(**{**SMALL, **words}), folder)
    return folder


@pytest.fixture(scope="module")
def lenet_run(tmp_path_factory):
    return make(tmp_path_factory.mktemp("export") / "run")


@pytest.fixture(scope="module")
def mlp_run(tmp_path_factory):
    return make(tmp_path_factory.mktemp("export") / "run", network="mlp")


def library_logits(folder, client, task, count=100):
    """Test images, and their logits as weft computes them."""
    runtime = Runtime(weft.Plan.load(folder / "plan.toml"))
    reference = read_manifest(folder / "checkpoints")["clients"][str(client)]
    ctx = runtime.context(client, task)
    runtime.method.load_task(storage.load(runtime.new_client(), folder / "checkpoints", reference), task, ctx)
    batches = runtime.batches(client, task, "test")
    with torch.no_grad():
        logits = ctx.network.logits(batches.take(slice(0, count))[0])
    return batches.images[:count].numpy(), logits.numpy()


WITHOUT_WEFT = """
import importlib.util
import json
import sys
import numpy as np
assert importlib.util.find_spec("weft") is None
file, images, out = sys.argv[1:]
images = np.load(images)
{body}
np.savez(out, logits=logits, predictions=predictions, classes=np.array(facts["classes"]))
"""
BY_ONNX = """
import onnxruntime
session = onnxruntime.InferenceSession(file)
facts = json.loads(session.get_modelmeta().custom_metadata_map["weft"])
logits, predictions = session.run(["logits", "probabilities"], {"images": images})
assert "torch" not in sys.modules
"""
BY_TENSORS = """
import safetensors.torch
import torch
from torch import nn
with safetensors.safe_open(file, framework="pt") as opened:
    facts = json.loads(opened.metadata()["weft"])
tensors = safetensors.torch.load_file(file)
mean, deviation = tensors.pop("mean"), tensors.pop("deviation")
norm = lambda: nn.LocalResponseNorm(9, alpha=1e-3, beta=0.75, k=1.0)
pool = lambda: nn.MaxPool2d(3, stride=2, ceil_mode=True)
names = ["body.conv1", "body.conv2", "body.fc1", "body.fc2", "head"]
layers = [nn.Conv2d(3, 20, 5, padding=2), nn.Conv2d(20, 50, 5, padding=2), nn.Linear(3200, 800), nn.Linear(800, 500)]
layers.append(nn.Linear(500, len(facts["classes"])))
for name, layer in zip(names, layers):
    layer.load_state_dict({key: tensors.pop(f"{name}.{key}") for key in ("weight", "bias")})
assert not tensors
a, b, c, d, e = layers
relu = nn.ReLU()
model = nn.Sequential(a, relu, norm(), pool(), b, relu, norm(), pool(), nn.Flatten(), c, relu, d, relu, e)
with torch.no_grad():
    x = ((torch.from_numpy(images).float() - mean) / deviation).permute(0, 3, 1, 2)
    logits = model(x)
    predictions = logits.softmax(1).numpy()
    logits = logits.numpy()
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The Python of a new environment that has what a model needs, and no weft."""
    folder = tmp_path_factory.mktemp("elsewhere") / "env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    pip += ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, f"torch=={torch.__version__.partition('+')[0]}", "safetensors", "onnxruntime"], check=True)
    return folder / "bin" / "python"


def without_weft(python, body, file, images, folder):
    np.save(folder / "images.npy", images)
    script = WITHOUT_WEFT.replace("{body}", textwrap.dedent(body))
    words = [python, "-I", "-c", script, file, folder / "images.npy", folder / "out.npz"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return np.load(folder / "out.npz")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "body"), [("onnx", BY_ONNX), ("safetensors", BY_TENSORS)])
def test_the_same_predictions_without_weft(lenet_run, elsewhere, tmp_path, kind, body, command):
    file = tmp_path / f"model.{kind}"
    outcome = command("export", lenet_run, "--client", "1", "--task", "0", "--format", kind, "--out", file)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert "100 test images" in outcome.out
    images, logits = library_logits(lenet_run, 1, 0)
    assert len(images) == 100
    found = without_weft(elsewhere, body, file, images, tmp_path)
    assert (found["logits"].argmax(1) == logits.argmax(1)).all()
    np.testing.assert_allclose(found["logits"], logits, atol=1e-4)
    np.testing.assert_allclose(found["predictions"].sum(1), 1, atol=1e-5)
    runtime = Runtime(weft.Plan.load(lenet_run / "plan.toml"))
    assert tuple(found["classes"].tolist()) == runtime.task(1, 0).classes


@pytest.mark.slow
def test_the_exported_lenet_is_the_same_network():
    network = networks.build("lenet", {}, (3,))
    generator = torch.Generator().manual_seed(0)
    network.vector.normal_(0, 0.05, generator=generator)
    images = torch.randint(0, 256, (60, 32, 32, 3), generator=generator, dtype=torch.uint8)
    plain = TaskModel(network, (100.0, 110.0, 120.0), (50.0, 60.0, 70.0), 0, 3)
    assert isinstance(plain.body, LeNet)
    assert plain.body.plain
    assert not network.body.plain
    scaled = ((images.float() - plain.mean) / plain.deviation).permute(0, 3, 1, 2)
    torch.testing.assert_close(plain(images)[0], network.logits(scaled).detach(), rtol=1e-4, atol=1e-5)
    network.vector.zero_()
    assert plain(images)[0].abs().max() > 0  # it shares no memory


NETWORKS = {
    "resnet18": {"network": "resnet18", "clients": 1, "tasks": 1, "scenario.train": 10, "scenario.test": 10},
    "own": {"network": f"{OWN}:Conv1dNet", "clients": 1, "tasks": 1},
    "vit": {"network": f"{OWN}:ViT", "clients": 1, "tasks": 1},
    "joint": {"network": "mlp", "method": "joint"},
    "several labels": {
        "network": "mlp",
        "scenario": f"{EXAMPLES}/own_loss.py:colours",
        "loss": f"{EXAMPLES}/own_loss.py:SeveralLabels",
    },
}


@pytest.mark.long
@pytest.mark.parametrize("case", NETWORKS)
def test_other_networks_methods_and_losses(tmp_path, case):
    words = {
        key: value
        for key, value in {**SMALL, **NETWORKS[case]}.items()
        if "scenario" not in NETWORKS[case] or not key.startswith("scenario.")
    }
    weft.run(weft.Plan(**words), tmp_path / "run")
    exported = task_from_run(tmp_path / "run", 0, words["tasks"] - 1)
    for kind in FORMATS:
        write(exported, tmp_path / f"model.{kind}", kind)  # compares it with the run
        predict, metadata = open_model(tmp_path / f"model.{kind}", trusted=True)
        logits, predictions = predict(exported.images.numpy())
        np.testing.assert_allclose(logits, exported.logits.numpy(), atol=1e-3)
        assert predict(exported.images.numpy()[:1])[0].shape == (1, len(metadata["classes"]))
        if case == "several labels":
            np.testing.assert_allclose(predictions, 1 / (1 + np.exp(-logits)), atol=1e-5)
        if kind == "onnx":
            assert metadata["batch"] == (1 if case == "vit" else "any")  # whose code uses the batch size
            assert str(EXAMPLES.parent) not in json.dumps(metadata)  # no path of this machine


def test_a_file_that_differs_from_the_run_is_not_kept(mlp_run, tmp_path):
    exported = task_from_run(mlp_run, 0, 0)
    exported.logits[0, 0] += 1
    with pytest.raises(weft.WeftError, match="differs from the run"):
        write(exported, tmp_path / "model.safetensors", "safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_predict(mlp_run, tmp_path, command):
    command("export", mlp_run, "--task", "1", "--format", "safetensors", "--out", tmp_path / "m.safetensors")
    images, logits = library_logits(mlp_run, 0, 1, count=5)
    for place, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{place}.png")
    files = [tmp_path / f"{place}.png" for place in range(5)]
    printed = json.loads(command("predict", tmp_path / "m.safetensors", *files, "--json").out)
    found = np.array([list(one["probabilities"].values()) for one in printed])
    assert (found.argmax(1) == logits.argmax(1)).all()
    lines = command("predict", tmp_path / "m.safetensors", *files).out.splitlines()
    names = list(printed[0]["probabilities"])
    assert [names[row.argmax()] in line for row, line in zip(found, lines, strict=True)] == [True] * 5


@pytest.mark.parametrize("key", ["network", "loss"])
def test_code_that_an_untrusted_file_names_does_not_run(key, mlp_run, tmp_path):
    """Code that a file names runs only if the user trusts the file."""
    path, mark = tmp_path / "model.safetensors", tmp_path / "mark"
    write(task_from_run(mlp_run, 0, 0), path, "safetensors")
    with safetensors.safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["weft"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    code = tmp_path / "code.py"
    code.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\nAny = None\n")
    safetensors.torch.save_file(tensors, path, {"weft": json.dumps(facts | {key: f"{code}:Any"})})
    with pytest.raises(weft.WeftError, match="names code to run"):
        open_model(path)
    assert not mark.exists()
    with pytest.raises((weft.WeftError, TypeError)):
        open_model(path, trusted=True)  # neither a network nor a loss, but now it was imported
    assert mark.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "RUN", "--client", "5"], "there is no client 5; choose 0 to 1"),
        (["export", "RUN", "--task", "2"], "has not finished task 2; choose 0 to 1"),
        (["export", "nothing"], "is not a run folder"),
        (["export", "RUN", "--format", "onnx", "--out", "no/where.onnx"], "choose another --out"),
        (["predict", "model.bin", "a.png"], "has none of the suffixes"),
        (["predict", "model.onnx", "a.png"], "there is no file model.onnx"),
        (["predict", "bad.onnx", "a.png"], "is not a model that weft export wrote"),
        (["predict", "bad.safetensors", "a.png"], "is not a model that weft export wrote"),
        (["predict", "good.safetensors", "bad.onnx"], "bad.onnx cannot be read as an image"),
    ],
)
def test_errors_are_one_line(mlp_run, tmp_path, command, words, said):
    for kind in FORMATS:
        (tmp_path / f"bad.{kind}").write_bytes(b"nothing of the kind")
    if "good.safetensors" in words:
        write(task_from_run(mlp_run, 0, 0), tmp_path / "good.safetensors", "safetensors")
    words = [str(mlp_run) if word == "RUN" else word for word in words]
    assert_one_line(command(*words, cwd=tmp_path), said)


def test_without_the_extra_the_error_names_it(mlp_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(weft.WeftError, match=r"pip install 'weft\[export\]'"):
        write(task_from_run(mlp_run, 0, 0), tmp_path / "model.onnx", "onnx")
