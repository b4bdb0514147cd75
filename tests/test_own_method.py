"""A method that somebody wrote: named by its file, run like any other, refused with a clear line where it is none."""

from pathlib import Path

import pytest
import torch
from helpers import Run, differences, run, tiny

import weft
from weft.methods.method import Method, Options
from weft.runs.run import new_path

ROOT = Path(__file__).resolve().parent.parent
FILE = str(ROOT / "examples" / "add_a_method.py")
ANCHORED = f"{FILE}:Anchored"


class OwnHere(Method):
    """Defined in a module that can be imported."""

    citation = "this test"


def thetas(finished):
    return {(client, step): finished.theta(client, step).tolist() for client in range(3) for step in range(2)}


def test_the_example_holds_weights_where_the_last_task_left_them():
    assert thetas(run(method=ANCHORED, method__strength=0)) == thetas(run(method="local"))
    moved = {}
    for strength in (0, 3.0):
        running = Run(tiny(method=ANCHORED, method__strength=strength, rounds_per_task=4)).go_to(1)
        before = running.clients[0].weights.clone()
        moved[strength] = (running.go().clients[0].weights - before).norm().item()
    assert moved[3.0] < 0.7 * moved[0]


def test_it_is_short():
    """Thirty lines of code, besides the words about it."""
    text = Path(FILE).read_text()
    code = [
        line for line in text.split('"""', 2)[2].splitlines() if line.strip() and not line.startswith(("from", "#"))
    ]
    assert len(code) <= 30


def test_it_survives_and_combines(tmp_path):
    name = f"fedavg+{ANCHORED}"
    whole = run(method=name, method__strength=1.0)
    assert not torch.equal(whole.theta(0, 1), run(method="fedavg").theta(0, 1))
    again = Run(tiny(method=name, method__strength=1.0), folder=tmp_path).go_with_interruptions()
    assert differences(whole.bits(), again.bits()) == []


@pytest.mark.slow
@pytest.mark.parametrize("talking", ["fedavg", "fedprox", "scaffold", "fedcurv"])
def test_it_combines_with_whatever_talks_to_a_server(talking):
    name = f"{talking}+{ANCHORED}"
    off = run(method=name, method__strength=0)
    assert thetas(off) == thetas(run(method=talking))
    assert thetas(run(method=name, method__strength=1.0)) != thetas(off)


class Listens(Method):
    """No options, and a part in what a client receives and sends."""

    citation = "this test"

    def receive(self, client, message, lesson):
        super().receive(client, message, lesson)
        client.numbers["heard"] = client.numbers.get("heard", 0) + 1


class Decays(Method):
    class Own(Options):
        decay: float = 0.3

    Options = Own


class Composes(Method):
    composes = True


def test_the_smallest_method_combines_and_its_hooks_are_called():
    finished = run(method="fedavg+test_own_method:Listens")
    assert finished.clients[0].numbers["heard"] == 4


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("stable-sgd+test_own_method:Decays", "each have an option 'decay'"),
        ("apd+test_own_method:Composes", "each make theta of parts of their own"),
    ],
)
def test_what_would_get_in_each_others_way_is_refused(name, why):
    with pytest.raises(weft.WeftError, match=why):
        tiny(method=name)


@pytest.mark.slow
def test_workers_find_it(tmp_path):
    plan = tiny(method=ANCHORED)
    found = [weft.run(plan, tmp_path / str(count), workers=count).accuracy_matrix.tolist() for count in (1, 2)]
    assert str(found[0]) == str(found[1])
    resumed = weft.resume(tmp_path / "1")
    assert str(resumed.accuracy_matrix.tolist()) == str(found[0])


def test_a_class_will_do_in_python():
    plan = weft.Plan(method={"name": OwnHere, "biases": "private"})
    assert plan.method == "test_own_method:OwnHere"
    assert plan.method_options == {"biases": "private"}
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
def test_what_is_no_method_is_refused(name, why):
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


def test_whose_option_it_is():
    with pytest.raises(weft.WeftError, match=r"unknown key method\.mu; .*method\.keep.*is an option of fedprox"):
        tiny(method="fedavg", method__mu=1.0)


def test_apd_needs_adam():
    with pytest.raises(weft.WeftError, match="requires Adam"):
        tiny(method="apd", optimizer="sgd")


def test_its_options_are_checked():
    with pytest.raises(weft.WeftError, match=r"did you mean method\.strength"):
        tiny(method=ANCHORED, method__strenght=1)


FAULTY = """
from weft.methods.method import Method, Options


class Faulty(Method):
    def finish(self, client, lesson):
        raise KeyError("a slip of mine")
"""


@pytest.mark.slow
def test_a_fault_in_it_is_told_by_a_worker_too(tmp_path, capfd):
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    with pytest.raises(weft.WeftError, match="KeyError: 'a slip of mine'; its traceback stands above"):
        weft.run(tiny(method=f"{file}:Faulty"), tmp_path / "run", workers=2)
    assert 'raise KeyError("a slip of mine")' in capfd.readouterr().err
