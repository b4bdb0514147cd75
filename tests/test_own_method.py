"""User-defined methods: named by their file, run like any other, rejected with a clear line if they are none."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from helpers import Run, differences, run, tiny

import weft
from weft.methods.method import Method, MethodOptions, Traits
from weft.methods.state import ClientState
from weft.runs.run import new_path

ROOT = Path(__file__).resolve().parent.parent
FILE = str(ROOT / "examples" / "add_a_method.py")
ANCHORED = f"{FILE}:Anchored"


class OwnHere(Method):
    """Defined in a module that can be imported."""


def thetas(finished):
    return {(client, task): finished.theta(client, task).tolist() for client in range(3) for task in range(2)}


def test_the_example_holds_weights_where_the_last_task_left_them():
    assert thetas(run(method=ANCHORED, method__strength=0)) == thetas(run(method="local"))
    moved = {}
    for strength in (0, 3.0):
        running = Run(tiny(method=ANCHORED, method__strength=strength, rounds_per_task=4)).go_to(1)
        before = running.clients[0].weights.clone()
        moved[strength] = (running.go().clients[0].weights - before).norm().item()
    assert moved[3.0] < 0.7 * moved[0]


def test_it_is_short():
    """Thirty lines of code, without docstring and imports."""
    lines = Path(FILE).read_text().split('"""', 2)[2].splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith(("from", "#"))]) <= 30


def test_it_resumes_and_combines(tmp_path):
    name = f"fedavg+{ANCHORED}"
    whole = run(method=name, method__strength=1.0)
    assert not torch.equal(whole.theta(0, 1), run(method="fedavg").theta(0, 1))
    again = Run(tiny(method=name, method__strength=1.0), folder=tmp_path).go_with_interruptions()
    assert differences(whole.bits(), again.bits()) == []


@pytest.mark.slow
@pytest.mark.parametrize("federated", ["fedavg", "fedprox", "scaffold", "fedcurv"])
def test_it_combines_with_every_server_half(federated):
    name = f"{federated}+{ANCHORED}"
    off = run(method=name, method__strength=0)
    assert thetas(off) == thetas(run(method=federated))
    assert thetas(run(method=name, method__strength=1.0)) != thetas(off)


@dataclass
class CountingClient(ClientState):
    downloads: int = 0


class Counts(Method):
    """No options, and one hook."""

    Client = CountingClient

    def receive(self, client, download, ctx):
        client.downloads += 1


class DecaysOptions(MethodOptions):
    decay: float = 0.3


class Decays(Method):
    Options = DecaysOptions


@dataclass
class ReceivedClient(ClientState):
    received: int = 0


class Receives(Method):
    Client = ReceivedClient


class Composes(Method):
    traits = Traits(composes_theta=True)


def test_the_smallest_method_combines_and_its_hooks_are_called():
    assert run(method="ewc+fedavg+test_own_method:Counts").clients[0].downloads == 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stable-sgd+test_own_method:Decays", "both have an option 'decay'"),
        ("apd+test_own_method:Composes", "each compose theta"),
        ("fedprox+test_own_method:Receives", "both have a state field 'received'; rename one"),
    ],
)
def test_methods_that_conflict_are_not_combined(name, why):
    with pytest.raises(weft.WeftError, match=why):
        tiny(method=name)


@pytest.mark.slow
def test_workers_find_it(tmp_path):
    plan = tiny(method=ANCHORED)
    found = [weft.run(plan, tmp_path / str(count), workers=count).accuracy_matrix.tolist() for count in (1, 2)]
    assert str(found[0]) == str(found[1])
    assert str(weft.resume(tmp_path / "1").accuracy_matrix.tolist()) == str(found[0])


def test_a_plan_takes_a_class():
    plan = weft.Plan(method={"name": OwnHere, "biases": "private"})
    assert plan.method == "test_own_method:OwnHere"
    assert plan.method_options == {"biases": "private", "heads": "private", "dropout": 0.0}
    assert weft.Plan(method=OwnHere).method == plan.method
    assert weft.Plan.merge({}, method=OwnHere).method == plan.method


def test_the_run_folder_has_a_short_name():
    assert new_path(tiny(method=ANCHORED)).name == "plan-Anchored-s0"
    assert new_path(tiny(method=f"fedavg+{ANCHORED}")).name == "plan-fedavg+Anchored-s0"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{FILE}:Anchord", "has no Anchord; did you mean Anchored"),
        (f"{FILE}:TaskContext.initial", "is no method"),
        ("nowhere.py:Anchored", "nowhere.py"),
        (FILE, "name the class in it too"),
        ("no_such_package:Anchored", "no_such_package"),
    ],
)
def test_a_name_that_is_no_method_is_rejected(name, why):
    with pytest.raises(weft.WeftError, match=why) as caught:
        tiny(method=name)
    assert "\n" not in str(caught.value)


def test_a_relative_file_is_found_again_from_another_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    plan = tiny(method="fedavg+examples/add_a_method.py:Anchored")
    assert plan.method == f"fedavg+{ANCHORED}"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(plan.toml())
    assert weft.Plan.load(tmp_path / "plan.toml").method == plan.method


def test_an_unknown_option_names_the_method_that_has_it():
    with pytest.raises(weft.WeftError, match=r"unknown key method\.mu; .*method\.keep.*is an option of fedprox"):
        tiny(method="fedavg", method__mu=1.0)


def test_apd_needs_adam():
    with pytest.raises(weft.WeftError, match="requires Adam"):
        tiny(method="apd", optimizer="sgd")


def test_options_are_checked():
    with pytest.raises(weft.WeftError, match=r"did you mean method\.strength"):
        tiny(method=ANCHORED, method__strenght=1)


FAULTY = """
from weft.methods.method import Method


class Faulty(Method):
    def end_task(self, client, ctx):
        raise KeyError("a slip of mine")
"""


@pytest.mark.slow
def test_a_worker_reports_an_error_in_a_method(tmp_path, capfd):
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    with pytest.raises(weft.WeftError, match="KeyError: 'a slip of mine'; its traceback is above"):
        weft.run(tiny(method=f"{file}:Faulty"), tmp_path / "run", workers=2)
    assert 'raise KeyError("a slip of mine")' in capfd.readouterr().err


# ---- what cannot be right is refused -----------------------------------------------------------------------------


class Misspelled(Method):
    def recieve(self, client, download, ctx):
        raise AssertionError


class Tools:
    def norm(self, tensor):
        return tensor.norm()


class UsesTools(Tools, Method):
    def _half(self, tensor):
        return tensor / 2


class Remembers(Method):
    rounds = 0
    seen: ClassVar[list[int]] = []

    def prepare(self, training, client, ctx):
        self.rounds += 1


class RemembersInItsClass(Method):
    _seen: ClassVar[list[int]] = []

    def prepare(self, training, client, ctx):
        self._seen.append(ctx.client)


class RemembersAtTheServer(weft.methods.class_of("fedavg")):  # type: ignore[misc]
    def aggregate(self, server, updates, ctx):
        self._last = len(list(updates))
        super().aggregate(server, updates, ctx)


def test_a_misspelled_hook_is_refused():
    with pytest.raises(weft.WeftError, match=r"Misspelled\.recieve is no hook of a method; did you mean receive"):
        tiny(method="test_own_method:Misspelled")
    with pytest.raises(weft.WeftError, match=r"Remembers\.rounds is no hook"):
        tiny(method="fedavg+test_own_method:Remembers")
    assert tiny(method="test_own_method:UsesTools").method.endswith("UsesTools")  # helpers have a place


@pytest.mark.parametrize("name", ["RemembersInItsClass", "fedavg+test_own_method:RemembersInItsClass"])
def test_state_in_a_method_is_refused_in_its_first_round(name):
    with pytest.raises(weft.WeftError, match=r"_seen changed: a method holds no state"):
        Run(tiny(method=name if "+" in name else f"test_own_method:{name}")).go()


def test_state_in_a_method_at_the_server_is_refused_too(tmp_path):
    with pytest.raises(weft.WeftError, match=r"_last changed: a method holds no state"):
        weft.run(tiny(method="test_own_method:RemembersAtTheServer"), tmp_path / "run")
