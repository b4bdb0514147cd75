"""Combinations of methods: both of their parts in every bit, their options, and the pairs that make no sense."""

import pytest
import torch
from helpers import assert_other, assert_same, run, tiny

import weft
from weft.methods import COMBINATIONS

# ---- combinations

OFF = {  # a part that is turned off
    "ewc": {"method__lambda_ewc": 0},
    "stable-sgd": {"method__decay": 1.0, "method__dropout": 0.0},
    "apd": {"method__ablate": "a,m,l1,l2"},
    "fedprox": {"method__mu": 0},
    "fedcurv": {"method__lambda_fedcurv": 0},
    "scaffold": {"method__variates": False},
}
LEFT = {  # what it leaves of the other one even so
    "stable-sgd": {"optimizer": "sgd", "sgd_rate": 0.05},
    "apd": {"method__biases": "private"},
    "scaffold": {"optimizer": "sgd", "sgd_rate": 0.02, "method__average": "equal"},
}
STRONG = {
    "ewc": {"method__lambda_ewc": 1e3},
    "fedprox": {"method__mu": 1.0},
    "fedcurv": {"method__lambda_fedcurv": 0.01},
}


def strong(*parts):
    return {key: value for part in parts for key, value in STRONG.get(part, {}).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMBINATIONS, "scaffold+ewc", "fedcurv+stable-sgd", "scaffold+stable-sgd"])
def test_a_combination_is_both_of_its_parts(name):
    """With the learning part off it is the talking one, in every bit; with the talking one's own term off it is
    FedAvg and the learning part; and with both it is neither."""
    first, second = name.split("+")
    same = {"sgd_rate": 0.05} if name == "scaffold+stable-sgd" else {}  # their own differ
    whole = run(method=name, **strong(first, second), **same)
    talking = run(method=name, **strong(first), **OFF[second], **same)
    assert_same(talking, run(method=first, **strong(first), **LEFT.get(second, {}) | same))
    assert_other(talking, whole)
    if first == "fedavg":  # one client alone: its mean is its own
        alone = run(method=name, clients=1, method__average="equal", **strong(second))
        assert_same(alone, run(method=second, clients=1, **strong(second)))
        assert_other(run(method=second, **strong(second)), whole)
    else:
        learning = run(method=name, **OFF[first], **strong(second), **same)
        assert_same(learning, run(method=f"fedavg+{second}", **strong(second), **LEFT.get(first, {}) | same))
        assert_other(learning, whole)


def test_the_order_of_a_combinations_parts_does_not_matter():
    assert tiny(method="ewc+fedprox").method == tiny(method="fedprox+ewc").method == "fedprox+ewc"
    assert tiny(method="apd+fedavg").toml() == tiny(method="fedavg+apd").toml()


def test_three_parts_work_too():
    """Each of them matters."""
    name = "fedprox+ewc+stable-sgd"
    whole = run(method=name, **strong("fedprox", "ewc"))
    for part in name.split("+"):
        kept = [other for other in ("fedprox", "ewc") if other != part]
        assert_other(run(method=name, **strong(*kept), **OFF[part]), whole)


def test_options_of_a_combination_are_those_of_its_parts():
    plan = tiny(method="fedprox+ewc", method__mu=0.25, **{"method.ewc.lambda_ewc": 0.5})
    assert plan.method_options["mu"] == 0.25
    assert plan.method_options["lambda_ewc"] == 0.5
    assert tiny(method="fedprox+apd").method_options["biases"] == "private"  # apd's way
    assert tiny(method="fedprox+ewc").method_options["biases"] == "shared"
    with pytest.raises(weft.WeftError, match=r"unknown key method\.muu"):
        tiny(method="fedprox+ewc", method__muu=1)
    with pytest.raises(weft.WeftError, match=r"unknown key method\.ewc\.mu"):
        tiny(method="fedprox+ewc", **{"method.ewc.mu": 1.0})
    with pytest.raises(weft.WeftError, match="is given twice"):
        tiny(method="fedprox+apd", **{"method.fedprox.biases": "shared", "method.apd.biases": "private"})


def test_a_plans_options_hold_however_its_combination_is_written():
    given = {"method": "fedprox+ewc", "method.mu": 0.5}
    assert weft.Plan.merge(given, ["method=ewc+fedprox"]).method_options["mu"] == 0.5
    assert weft.Plan.merge(given, ["method=fedprox"]).method_options["mu"] == 5e-3


@pytest.mark.parametrize(("name", "key"), [("scaffold", "learning_rate"), ("fedavg", "sgd_rate")])
def test_a_rate_that_would_do_nothing_is_refused(name, key):
    with pytest.raises(weft.WeftError, match=f"{key} has no effect"):
        weft.Plan.merge({}, [f"method={name}", f"{key}=0.5"])
    assert weft.Plan.merge({key: 0.5}, [f"method={name}"]).method == name  # of a plan's file other methods may need it


@pytest.mark.slow
def test_half_precision_remembers_what_was_said():
    finished = run(method="scaffold", precision="half", tasks=2)
    own = [state.variate["weights"] for state in finished.clients.values()]
    torch.testing.assert_close(finished.server.variate["weights"], sum(own) / 3, rtol=1e-5, atol=1e-7)
    curved = run(method="fedcurv", precision="half", tasks=2)
    assert all((state.others["fisher/weights"] >= 0).all() for state in curved.clients.values())


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedcurv"])
def test_with_keep_what_comes_down_is_small_too(name):
    few, whole = (run(method=name, method__keep=keep).ledger.totals()["s2c"]["bytes"] for keep in (0.1, 1.0))
    assert few < 0.65 * whole  # the first message is whole; three clients send other places


def test_the_size_counts_shared_biases_once():
    finished = run(method="local", tasks=3)
    layout = finished.layout
    head = layout.size - layout.body
    assert finished.progress.clients[0].size["bytes"] == 4 * (layout.body + 3 * head)


def test_sections_of_a_plan_hold_for_the_parts_of_a_combination():
    given = {"for": {"fedprox": {"learning_rate": 0.5, "seed": 1}, "ewc+fedprox": {"seed": 2}, "ewc": {"patience": 9}}}
    plan = weft.Plan.merge(given, ["method=fedprox+ewc"])
    assert (plan.learning_rate, plan.seed, plan.patience) == (0.5, 2, 9)
    assert weft.Plan.merge(given, ["method=fedprox"]).seed == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fedavg+fedprox", "each have a server half"),
        ("scaffold+fedcurv", "each have a server half"),
        ("stl+fedavg", "separate network"),
        ("joint+fedavg", "sees all tasks at once"),
        ("fedweit+ewc", "use fedavg\\+apd or fedprox\\+apd"),
        ("fedavg+local", "cannot be combined"),
        ("ewc+apd", "composes theta"),
        ("fedcurv+apd", "composes theta"),
        ("ewc+ewc", "names a method twice"),
        ("stable-sgd+apd", "diverges"),
        ("scaffold+apd", "diverges"),
        ("fedprox+ewcc", "there is no method 'ewcc'; did you mean ewc"),
        ("fedprox+ewc@paper", "has no preset 'paper'"),
        ("+ewc", "the name of a method is missing"),
        ("fedweit@paper+ewc", "a preset stands alone"),
    ],
)
def test_a_pair_that_makes_no_sense_is_told_why(name, why):
    with pytest.raises(weft.WeftError, match=why) as caught:
        tiny(method=name)
    assert "\n" not in str(caught.value)
