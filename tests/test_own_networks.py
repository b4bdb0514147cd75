"""User-defined networks: named in a plan, their options and errors, equal in every process, and whole runs."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_helpers import assert_same_result
from helpers import TINY, Run, differences
from safetensors.numpy import load_file

import weft
from weft import networks
from weft.core import client
from weft.core.training import SGD, train_step
from weft.errors import WeftError
from weft.methods import COMBINATIONS, METHODS
from weft.methods.method import LocalTraining, RoundContext

torch.set_num_threads(1)

OWN = Path(__file__).resolve().parent / "own_networks.py"


def own(name):
    return f"{OWN}:{name}"


def test_built_by_name():
    network = networks.build(own("ViT"), {"width": 4}, (2, 3))
    assert networks.build(own("ViT"), {"width": 4, "depth": 1}, (2, 3)) is network  # scratch memory: one per kind
    assert networks.build(own("ViT"), {"width": 4}, (5,)) is not network
    assert type(network.body).__name__ == "ViT"
    assert network.layout.size - network.layout.body == 5 * (4 + 1)


def test_building_draws_nothing_from_the_global_generator():
    state = torch.random.get_rng_state()
    networks.build(own("ViT"), {"width": 2, "heads": 1}, (2,))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_options_come_from_the_signature():
    words = {"network.depth": 2, "network.wide": True, "network.extra": 1}
    plan = weft.Plan(network=own("from_a_function"), **words)
    defaults = {"statistics": "own", "rate": 0.5, "copy": 1}
    assert plan.network_options == {**defaults, "depth": 2, "wide": True, "extra": 1}
    assert len(networks.build(plan.network, plan.network_options, (2,)).body) == 4
    assert weft.Plan(network=own("Conv1dNet"), **{"network.widths": [2, 3, 4]}).network_options["widths"] == [2, 3, 4]
    network = networks.build(own("Conv1dNet"), {"widths": [2, 3, 5], "statistics": "own"}, (2,))
    assert [layer.rows for layer in network.layout.layers] == [2, 3, 5]


def test_a_plan_with_an_own_network_can_be_written_and_read(tmp_path):
    plan = weft.Plan(network=own("Conv1dNet"), **{"network.statistics": "shared"})
    (tmp_path / "plan.toml").write_text(plan.toml())
    assert weft.Plan.load(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"network": own("from_a_function")}, "network.depth: field required"),
        ({"network": own("OwnMlp"), "network.hiden": 5}, "unknown key network.hiden; did you mean network.hidden?"),
        ({"network": own("OwnMlp"), "network.hidden": "5"}, "network.hidden: input should be a valid integer, not '5'"),
        ({"network": own("ViT"), "network.dropout": True}, "network.dropout: input should be a valid number, not True"),
        ({"network": own("Conv1dNet"), "network.act": "relu"}, "unknown key network.act; "),
        ({"network": own("OwnMpl")}, f"{OWN} has no OwnMpl; did you mean OwnMlp?"),
        ({"network": own("number")}, f"network {own('number')}: 5 is "),
        ({"network": own("takes_statistics")}, f"network {own('takes_statistics')}: its argument 'statistics' has"),
        ({"network": "no/file.py:Net"}, "there is no file "),
    ],
)
def test_errors_in_a_plan(words, said):
    with pytest.raises(WeftError) as caught:
        weft.Plan(**words)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("image_to_image", "it returned shape (2, 4, 30, 30) for images of shape (2, 3, 32, 32); expected features"),
        ("returns_a_pair", "it returned a tuple for images of shape (2, 3, 32, 32); expected features"),
        ("nothing_to_train", "it has no linear or convolution layer to train"),
        ("wrong_size", "it fails on images of shape (2, 3, 32, 32): RuntimeError: mat1 and mat2 shapes cannot be"),
        ("no_module", "it returned a int; expected an nn.Module"),
    ],
)
def test_errors_in_a_network(name, said):
    with pytest.raises(WeftError) as caught:
        networks.build(own(name), {}, (2,))
    assert str(caught.value).startswith(f"network {own(name)}: {said}")
    assert "\n" not in str(caught.value)


def test_a_network_that_cannot_be_created():
    with pytest.raises(WeftError, match=r"it cannot be created with .*: AssertionError: embed_dim must be divisible"):
        networks.build(own("ViT"), {"width": 5}, (2,))


def test_lazy_modules_infer_their_sizes():
    network = networks.build(own("Lazy"), {}, (2,))
    assert [layer.shape for layer in network.layout.layers] == [(4, 3, 5, 5), (6, 196)]
    assert network.layout.statistics[1] - network.layout.statistics[0] == 8
    assert set(network.vector[slice(*network.layout.statistics)].tolist()) == {0.0, 1.0}


DIGEST = """
import hashlib, sys, torch
from weft import networks
torch.manual_seed(int(sys.argv[1]))
for name in sys.argv[2:]:
    print(hashlib.sha256(networks.build(name, {}, (2,))._initial.numpy().tobytes()).hexdigest())
    torch.rand(3)
"""


@pytest.mark.slow
def test_initial_values_are_equal_in_every_process():
    names = [own("ViT"), own("Lazy"), "mlp"]
    there = subprocess.run([sys.executable, "-c", DIGEST, "123", *names], capture_output=True, text=True, check=True)
    state = torch.random.get_rng_state()
    here = [hashlib.sha256(networks.build(name, {}, (2,))._initial.numpy().tobytes()).hexdigest() for name in names]
    assert there.stdout.split() == here
    assert torch.equal(torch.random.get_rng_state(), state)
    made = networks.build(names[0], {}, (7,))._initial
    assert torch.equal(made, networks.build(names[0], {}, (2,))._initial)  # independent of the heads
    assert networks.build(names[0], {}, (2,)).body.positions.std() > 0


# ---- whole runs


def test_a_network_that_does_not_work_leaves_no_folder(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text(
        "from torch import nn\n\n\nclass Bad(nn.Module):\n    def forward(self, images):\n        return images\n"
    )
    with pytest.raises(WeftError, match="expected features"):
        weft.run(weft.Plan.merge({"network": f"{file}:Bad"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def plan_of(name, **changed):
    words = {key: value for key, value in TINY.items() if not key.startswith("network.")}
    return weft.Plan.merge({**words, "network": own(name), **{key.replace("__", "."): v for key, v in changed.items()}})


@pytest.mark.slow
@pytest.mark.parametrize("method", [*METHODS, *COMBINATIONS])
@pytest.mark.parametrize("where", ["own", "shared"])
def test_a_run_with_batch_norm_resumes_with_the_same_bits(tmp_path, method, where):
    plan = plan_of("Normed", method=method, network__statistics=where)
    straight = Run(plan).go()
    # saved and read after every message, and every request sent twice with the network's memory overwritten after it
    broken = Run(plan, folder=tmp_path, careless=True).go_with_interruptions()
    assert not differences(straight.bits(), broken.bits())
    for index in range(plan.clients):
        first, second = (straight.theta(index, task)[slice(*straight.layout.statistics)] for task in range(2))
        assert first.isfinite().all()
        assert first.unique().numel() > 2  # no longer 0 and 1
        if method in ("fedweit", "fedavg"):
            # one set for all tasks if they are shared and sent like biases, otherwise one per task
            assert torch.equal(first, second) == (where == "shared" and method == "fedavg")


@pytest.mark.parametrize("method", ["fedprox", "fedcurv", "scaffold", "fedprox+ewc"])
def test_penalties_do_not_change_statistics(method):
    """Statistics are the running mean and variance of the inputs, for any global weights."""
    running = Run(plan_of("Normed", method=method, network__statistics="shared")).go_to(1)
    ctx, state = running.runtime.training_context(0, 1), running.clients[0]
    client.begin(running.runtime, state, ctx)
    download = running.method.configure(running.server, 0, RoundContext(running.plan, 1, first=True))
    download.tensors["biases"] = download.tensors["biases"] + 1.0  # global weights far away
    running.method.receive(state, download, ctx)
    training = LocalTraining.plain(state, ctx)
    running.method.prepare(training, state, ctx)
    weights, (begin, end) = ctx.layout.weights, ctx.layout.statistics
    training.variables["private"][begin - weights : end - weights] += 0.5
    train_step(training, SGD(training), *ctx.load("train").take(torch.arange(10)), 0.1)
    assert (ctx.network.gradient[begin:end] == 0).all()
    assert begin < end


@pytest.mark.parametrize("method", ["fedweit", "apd"])
def test_statistics_are_updated_at_the_end_of_a_task(method):
    """A is reduced to its largest values then, which changes the mean of every layer's inputs."""
    finished = Run(plan_of("Normed", method=method, method__adaptive_keep=0.02, rounds_per_task=4)).go()
    network, train = finished.runtime.context(0, 1).network, finished.runtime.batches(0, 1, "train")
    theta = finished.theta(0, 1)  # of the last task: B has not changed since
    begin, end = network.layout.statistics
    for _ in range(40):
        network.recount(train.in_order(10))
    torch.testing.assert_close(network.vector[begin:end], theta[begin:end], rtol=0.1, atol=0.05)
    weights = network.layout.weights
    trained = finished.clients[0].private[begin - weights : end - weights]  # with all of A
    assert not torch.allclose(trained, theta[begin:end], rtol=0.1, atol=0.05)


def test_only_shared_statistics_are_averaged():
    own_biases, shared = (
        Run(plan_of("Normed", method="fedavg", network__statistics=where)).go().server.biases
        for where in ("own", "shared")
    )
    assert len(shared) == len(own_biases) + 20
    assert shared[-20:].unique().numel() > 2


@pytest.fixture(scope="module")
def workers():
    from weft.engines.workers import WorkerPool

    pool = WorkerPool(2)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedweit", "fedavg"])
@pytest.mark.parametrize("name", ["ViT", "Conv1dNet", "Normed"])
def test_a_run_with_workers(name, method, workers, tmp_path):
    """Workers load the file and give the same bits as one process, with dropout."""
    plan = plan_of(name, method=method)
    together, alone = weft.run(plan, tmp_path / "a", workers=workers), weft.run(plan, tmp_path / "b")
    assert_same_result(together.folder, alone.folder)
    found, wanted = (
        {
            f"{file.name} {key}": tensor.tobytes()
            for file in (run.folder / "checkpoints").glob("*.safetensors")
            for key, tensor in load_file(file).items()
        }
        for run in (together, alone)
    )
    assert wanted
    assert not differences(found, wanted)
