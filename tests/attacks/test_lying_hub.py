"""A hub that lies to a site: another plan in mid-run, heads, single steps, steered weights, sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CachedRuntime, Run, differences, tiny

from weft.core.client import Runtime
from weft.errors import WeftError
from weft.flower import site_policy
from weft.flower.site_policy import Policy, change_policy, read_plan, read_policy
from weft.flower.site_state import SiteState
from weft.plan import Plan
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import Rows, Sparse, dense

pytestmark = pytest.mark.attack

BASE = {
    "clients": 2,
    "tasks": 2,
    "network": "mlp",
    "network.hidden": 16,
    "network.features": 8,
    "rounds_per_task": 2,
    "batch_size": 5,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
    "precision": "float32",
}
EXPERTS = {"method": "class-experts", "scenario.classes_per_task": 3}


def plan(**changed: Any) -> Plan:
    return Plan.merge({**BASE, "method": "fedavg", **{key.replace("__", "."): value for key, value in changed.items()}})


def request(ops: str, round_index: int = 0, task: int = 0, client: int = 0, **more: Any) -> bytes:
    request_id = more.pop("request_id", f"{task}.{round_index}.{client}")
    return encode(Message("server", f"client-{client}", request_id, tuple(ops.split()), task, round_index, **more))


def ask(folder: Path, given: Plan, *words: Any, policy: Policy | None = None, **more: Any) -> Message:
    return decode(SiteState(folder, given, 0, policy).answer(request(*words, **more)))


def head(folder: Path, given: Plan) -> torch.Tensor:
    """What must not leave: the head of the current task, as the site has it on its disk."""
    from safetensors.torch import load_file

    (path,) = folder.glob("client-*.safetensors")
    return load_file(path)["private"][Runtime(given).context(0, 0).layout.biases :]


# ---- 1: another plan in mid-run --------------------------------------------------------------------------------------


def test_another_plan_in_mid_run_gets_no_head(tmp_path):
    """With a wider network `biases` would cover the private part, and all of the head would leave."""
    first = ask(tmp_path, plan(), "begin train upload")
    secret = head(tmp_path, plan())
    with pytest.raises(WeftError, match="cannot change"):
        ask(tmp_path, plan(network__hidden=200), "upload", 1)
    with pytest.raises(WeftError, match="cannot change"):
        ask(tmp_path, plan(learning_rate=1e-2), "train upload", 1)
    leaves = torch.cat([dense(tensor) for tensor in first.tensors.values()])
    assert not set(secret.tolist()) & set(leaves.tolist())
    assert not ask(tmp_path, plan(), "train upload", 1).error  # the run goes on as it began


def test_one_site_cannot_be_asked_as_two_clients(tmp_path):
    ask(tmp_path, plan(), "begin train upload")
    with pytest.raises(WeftError, match="client number"):
        SiteState(tmp_path, plan(), 1).answer(request("begin train upload", client=1))


def test_nothing_leaves_that_does_not_have_its_declared_form(tmp_path, monkeypatch):
    """Whatever made the reply, here a state of another network on the site's disk."""
    wide = plan(network__hidden=200)
    monkeypatch.setattr(SiteState, "_pin", lambda self: None)
    ask(tmp_path, plan(), "begin train upload")
    reply = ask(tmp_path, wide, "upload", 1, policy=Policy(least_steps=1))
    assert reply.error
    assert not reply.tensors


# ---- 2: heads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [27, 16 * 3 + 3, 9 * 3, 3072 * 16])
@pytest.mark.parametrize("name", ["head", "private", "foreign/head", "theta"])
def test_no_request_overwrites_a_head(tmp_path, name, size):
    """From a zero head, one step of SGD would tell the number of images of each class."""
    ask(tmp_path, plan(), "begin train upload")
    before = head(tmp_path, plan())
    for tensor in (torch.zeros(size), Sparse(size, torch.zeros(0, dtype=torch.int32), torch.zeros(0))):
        assert "MessageError" in ask(tmp_path, plan(), "receive", 1, tensors={name: tensor}).error
    assert torch.equal(head(tmp_path, plan()), before)


@pytest.mark.parametrize("extra", [-1, 1, 9])
def test_a_request_tensor_has_exactly_the_size_of_the_network(tmp_path, extra):
    layout = Runtime(plan()).context(0, 0).layout
    for name, size in (("weights", layout.weights), ("biases", layout.biases)):
        assert "MessageError" in ask(tmp_path, plan(), "begin receive", tensors={name: torch.zeros(size + extra)}).error


def test_heads_leave_a_site_only_if_it_says_so_and_only_at_the_end_of_a_task():
    experts = plan(**EXPERTS)
    assert "no head leaves" in Policy().plan_fault(experts)
    assert Policy(heads="task-end").plan_fault(experts) == ""
    for each_round in (
        plan(method__heads="class"),
        plan(method="fedweit", method__heads="class"),
        plan(method="fedavg-sets"),
    ):
        assert "in every round" in Policy(heads="task-end").plan_fault(each_round)
    assert Policy().plan_fault(plan()) == ""


def test_a_head_is_not_drawn_from_what_the_hub_knows(tmp_path):
    """Else whoever has the plan subtracts the start and sees the gradient."""
    allowed, started = Policy(heads="task-end"), []
    for site in ("a", "b"):
        assert not ask(tmp_path / site, plan(**EXPERTS), "begin", policy=allowed).error
        started.append(head(tmp_path / site, plan(**EXPERTS)))
    assert not torch.equal(*started)
    assert not ask(tmp_path / "a", plan(**EXPERTS), "train", 1, policy=allowed).error  # nor is it drawn anew


def test_a_head_leaves_after_enough_steps_and_images(tmp_path):
    """One step from a known head would tell the class counts."""
    ops = "begin train end share"
    few = ask(tmp_path / "a", plan(**EXPERTS, batch_size=60), ops, policy=Policy(heads="task-end"))
    assert "least_steps" in few.error
    small = ask(tmp_path / "b", plan(**EXPERTS), ops, policy=Policy(heads="task-end", least_images=21))
    assert "least_images" in small.error
    good = ask(tmp_path / "c", plan(**EXPERTS), ops, policy=Policy(heads="task-end"))
    assert good.tensors.keys() == {"model.0"}  # the change of the body, and the rows of the head


# ---- 3: single steps and steered weights; the reconstruction itself is in reconstruct.py ----------------------------


def test_no_round_of_a_single_step_leaves_a_site(tmp_path):
    whole = plan(batch_size=1000)
    assert Policy().plan_fault(plan(batch_size=10**6))
    reply = ask(tmp_path, whole, "begin train upload")
    assert "least_steps" in reply.error
    assert not reply.tensors
    assert "without training" in ask(tmp_path, plan(batch_size=1000), "receive upload", 1, policy=_lax()).error


def _lax() -> Policy:
    return Policy(least_steps=1)


def test_a_site_chooses_methods_and_networks():
    only = Policy(methods="fedweit, fedavg", networks="lenet")
    assert "network" in only.plan_fault(plan())
    for name in ("scaffold", "fedavg+ewc"):
        assert "method" in only.plan_fault(Plan.merge({"method": name}))
    assert only.plan_fault(Plan.merge({"method": "fedweit@paper"})) == ""


@pytest.mark.parametrize("method", ["fedavg", "fedweit", "scaffold"])
def test_received_weights_move_a_site_only_so_far(tmp_path, method):
    """However far theta_G jumps, and in whatever tensor."""
    given = plan(method=method, **({"method__biases": "shared"} if method == "fedweit" else {}))
    layout = Runtime(given).context(0, 0).layout
    ask(tmp_path, given, "begin train upload")
    before = _weights(tmp_path)
    far: dict[str, Any] = {"weights": torch.full((layout.weights,), 9.0), "biases": torch.full((layout.biases,), 9.0)}
    if method == "fedweit":
        rows = torch.ones(layout.rows, dtype=torch.bool)
        far["weights"] = Rows(layout.segments, rows, far["weights"])
    if method == "scaffold":
        far |= {"variate/weights": far["weights"], "variate/biases": far["biases"]}
    reply = ask(tmp_path, given, "receive", 1, tensors=far)
    assert not reply.error
    moved = _weights(tmp_path) - before
    for layer in layout.layers:
        assert moved[layer.span].norm() == pytest.approx(0.5 * float(before[layer.span].norm()), rel=1e-4)


def _weights(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    (path,) = folder.glob("client-*.safetensors")
    return load_file(path)["weights"]


@pytest.mark.parametrize("method", ["fedavg", "fedweit", "fedcurv", "fedprox+apd"])
def test_the_limits_of_a_site_change_no_honest_run(method):
    given = tiny(method=method)
    honest, guarded = Run(given).go(), Run(given, runtime=CachedRuntime(given, largest_jump=Policy().largest_jump)).go()
    assert differences(honest.bits(), guarded.bits()) == []


# ---- 5: sizes --------------------------------------------------------------------------------------------------------

HEAD = 'clients = 2\ntasks = 2\nmethod = "fedavg"\nnetwork = "mlp"\nscenario = "glyphs"\n'


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "[network_options]\nhidden = 65536\n",
        'clients = 2\ntasks = 2\nmethod = "fedavg"\n[network]\nname = "mlp"\nhidden = 65536\n',
        HEAD + '"network.hidden" = 65536\n',
        HEAD + "[network_options]\nfeatures = 65536\n",
        HEAD + "[scenario_options]\ntrain = 1000000\n",
        HEAD + '"scenario.train" = 1000000\n',
        HEAD.replace("2", "9999"),
        HEAD.replace("tasks = 2", "tasks = 99999"),
    ],
)
def test_no_spelling_of_a_plan_asks_for_gigabytes(text):
    with pytest.raises(WeftError, match="at most"):
        read_plan(text)


@pytest.mark.parametrize(
    "line",
    [
        'method = "/tmp/x.py:Evil"',
        'network = "os:path"',
        'method = {name = "a.py:B"}',
        "[for.fedavg]\nseed = 1",
        'loss = "os:system"',
        'metrics = "balanced,os:system"',
        'scenario = "os:system"',
        'scenario = {name = "folders", path = "/etc"}',
        'scenario = {name = "sites", folder = "/etc"}',
    ],
)
def test_a_plan_that_names_code_or_folders_is_rejected_before_it_is_loaded(line, monkeypatch):
    def load(_: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(Plan, "merge", load)
    base = {"method": 'method = "fedweit"', "network": 'network = "mlp"'}
    text = "\n".join([*(row for key, row in base.items() if key != line.split(" ")[0]), line])
    with pytest.raises(WeftError, match="rejects the hub's plan"):
        read_plan(text)


# ---- 13: ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["../../x", "", "0.0.1", "x" * 10_000, "0.0.0\n", "0.0.0 ", "\x1b[2J", "01.0.0"])
def test_an_id_is_task_round_and_client(tmp_path, request_id):
    assert "its id is" not in ask(tmp_path, plan(), "begin").error
    reply = SiteState(tmp_path, plan(), 0).answer(request("train", request_id=request_id))
    assert "MessageError" in decode(reply).error
    assert {path.name.split("-")[0].split("@")[0] for path in tmp_path.iterdir()} <= {
        *("client", "reply", "manifest.json", "plan.toml", ".lock")
    }


# ---- the policy itself -----------------------------------------------------------------------------------------------


def test_a_policy_is_strict(tmp_path):
    assert read_policy(tmp_path) == Policy()
    assert change_policy(tmp_path, ["share=20", "least_steps=8"]) == Policy(share=20, least_steps=8)
    assert change_policy(tmp_path, ["share=nothing"]).least_steps == 8
    for word in ("share=some", "share=0", "least_step=3", "largest_jump=nan", "heads=always", "x"):
        with pytest.raises(WeftError):
            change_policy(tmp_path, [word])
    assert read_policy(tmp_path).share == "nothing"
    (tmp_path / site_policy.POLICY_FILE).write_text("/srv/secret")
    with pytest.raises(WeftError, match="damaged"):
        read_policy(tmp_path)
