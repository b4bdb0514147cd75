"""Plans: three ways to write them, who wins over whom, and one line for every mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft import Plan, WeftError
from weft.plan import flat_keys, ready_plans

EXAMPLE = """
scenario = "glyphs"
clients = 3
tasks = 2
[method]
name = "fedweit"
keep = 0.5
"""


def write(folder: Path, text: str, name: str = "mine.toml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


# ---- the ways to write a plan ----------------------------------------------------------------------------------------


def test_a_plan_without_words_is_the_papers():
    plan = Plan()
    assert (plan.scenario, plan.network, plan.method) == ("glyphs", "lenet", "fedweit")
    assert (plan.clients, plan.tasks, plan.rounds_per_task, plan.epochs_per_round) == (5, 10, 20, 1)
    assert (plan.clients_per_round, plan.batch_size, plan.seed, plan.device) == ("all", 100, 0, "auto")
    for option in ("keep", "lambda_sparsity", "lambda_drift", "kb_size", "kb_from", "past", "ablate"):
        assert option in plan.method_options


def test_file_words_and_python_say_the_same(tmp_path):
    keys = {"clients": 3, "tasks": 2, "method": "fedavg", "learning_rate": 0.01, "shuffle": False, "seed": 7}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
    words = ["clients=3", "tasks=2", "method=fedavg", "learning_rate=0.01", "shuffle=false", "seed=7"]
    from_file = Plan.load(write(tmp_path, lines))
    from_words = Plan.load(write(tmp_path, "", "empty.toml"), words, name="mine")
    assert from_file == from_words == Plan(name="mine", **keys)
    assert from_file.learning_rate == 0.01
    assert from_file.shuffle is False


@pytest.mark.parametrize(
    "text",
    [
        '[method]\nname = "fedweit"\nkeep = 0.5\npast = "closed"',
        'method.name = "fedweit"\nmethod.keep = 0.5\nmethod.past = "closed"',
        'method.keep = 0.5\nmethod.past = "closed"',  # fedweit is the default
    ],
)
def test_every_way_to_write_options_in_a_file(tmp_path, text):
    plan = Plan.load(write(tmp_path, text))
    assert plan.method == "fedweit"
    assert (plan.method_options["keep"], plan.method_options["past"]) == (0.5, "closed")
    assert plan == Plan(name="mine", method={"name": "fedweit", "keep": 0.5, "past": "closed"})


def test_every_way_to_write_options_in_python():
    one = Plan(method={"name": "fedweit", "keep": 0.5}, network={"name": "mlp", "hidden": 8}, scenario={"train": 9})
    two = Plan(method="fedweit", network="mlp", **{"method.keep": 0.5, "network.hidden": 8, "scenario.train": 9})
    three = Plan(
        network="mlp", method_options={"keep": 0.5}, network_options={"hidden": 8}, scenario_options={"train": 9}
    )
    assert one == two == three
    assert (one.network_options["hidden"], one.scenario_options["train"]) == (8, 9)
    assert one.network_options["features"] == 32  # completed with its default


def test_values_of_words():
    def one(word: str) -> Any:
        return Plan.merge({}, [word])

    assert one("clients_per_round=all").clients_per_round == "all"
    assert one("clients_per_round=2").clients_per_round == 2
    assert one('device="cpu"').device == "cpu"
    assert one("learning_rate=1e-4").learning_rate == 1e-4
    assert one("learning_rate=1").learning_rate == 1.0
    assert one("seed = 3").seed == 3
    assert one("method.kb_size=all").method_options["kb_size"] == "all"
    assert one("method.kb_size=3").method_options["kb_size"] == 3
    assert one("method.kb_size=0").method_options["kb_size"] == 0
    assert Plan.merge({}, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        *((word, ["a", "m"]) for word in ("a,m", "a, m", '["a","m"]', '"a,m"')),
        ("", []),
        ("b_comm,a_comm,a,m,l1,l2", ["b_comm", "a_comm", "a", "m", "l1", "l2"]),
    ],
)
def test_ablate_is_a_list_of_words(word, parts):
    assert list(Plan.merge({}, [f"method.ablate={word}"]).method_options["ablate"]) == parts


def test_a_plan_by_name_and_by_run_folder(tmp_path):
    assert "demo" in ready_plans()
    demo = Plan.load("demo")
    assert demo.name == "demo"
    assert demo == Plan.load(ready_plans()["demo"])
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", demo.toml(), "plan.toml")
    assert Plan.load(tmp_path / "run") == demo


def test_every_ready_plan_begins_with_the_command_that_runs_it():
    for name, file in ready_plans().items():
        assert file.read_text().splitlines()[0].startswith(f"# weft run {name}")
        Plan.load(file)


def test_flat_keys_reads_a_plan_without_importing_what_it_names():
    plan = Plan(method={"name": "fedavg", "keep": 0.5}, clock={"late": 2.0})
    keys = flat_keys(plan.toml())
    assert (keys["method"], keys["method.keep"], keys["clock.late"], keys["seed"]) == ("fedavg", 0.5, 2.0, 0)
    assert Plan.merge(keys) == plan
    assert flat_keys('method = "no/such/file.py:Method"')["method"] == "no/such/file.py:Method"


def test_a_plan_does_not_change():
    with pytest.raises(ValueError, match="frozen"):
        Plan().seed = 1


# ---- who wins --------------------------------------------------------------------------------------------------------


def test_each_layer_wins_over_the_one_below(tmp_path):
    """defaults < preset < the plan's keys < [for.METHOD] < the command line; the preset sets patience and keep."""
    plain, preset = Plan(), Plan.merge({"method": "fedweit@released"})
    assert (plain.patience, preset.patience) == (5, 3)
    assert (plain.method_options["keep"], preset.method_options["keep"]) == (0.3, 0.7)

    text = 'patience = 4\n[method]\nname = "fedweit@released"\nkeep = 0.4\n'
    plan = Plan.load(write(tmp_path, text))
    assert (plan.patience, plan.method_options["keep"]) == (4, 0.4)
    assert plan.method_options["lambda_drift"] == 50.0  # what the plan does not say stays the preset's

    text += "[for.fedweit]\npatience = 6\nmethod.keep = 0.6\n[for.fedavg]\npatience = 66\n"
    file = write(tmp_path, text)
    plan = Plan.load(file)
    assert (plan.patience, plan.method_options["keep"]) == (6, 0.6)

    plan = Plan.load(file, ["patience=7", "method.keep=0.8"])
    assert (plan.patience, plan.method_options["keep"]) == (7, 0.8)
    assert Plan.load(file, ["patience=7"], patience=8).patience == 8


def test_sections_hold_for_the_method_that_is_chosen(tmp_path):
    text = EXAMPLE + '[for.fedavg]\nlearning_rate = 0.5\nmethod.average = "equal"\n'
    file = write(tmp_path, text)
    assert Plan.load(file).learning_rate == Plan().learning_rate
    fedavg = Plan.load(file, ["method=fedavg"])
    assert fedavg.learning_rate == 0.5
    assert fedavg.method_options["average"] == "equal"
    assert fedavg.method_options["keep"] == 1.0  # an option of the plan's own method means nothing to another
    assert Plan.load(file, ["method=fedavg", "learning_rate=0.25"]).learning_rate == 0.25
    file = write(tmp_path, EXAMPLE + "[for.fedweit.method]\nkeep = 0.9\n")  # a table of options
    assert Plan.load(file).method_options["keep"] == 0.9


def test_naming_the_method_that_it_is_anyway_changes_nothing(tmp_path):
    file = write(tmp_path, EXAMPLE)
    assert Plan.load(file, ["method=fedweit"]) == Plan.load(file)
    unnamed = write(tmp_path, "method.keep = 0.5\n")  # fedweit is the default
    assert Plan.load(unnamed, ["method=fedweit"]).method_options["keep"] == 0.5


def test_a_preset_stays_below_the_plans_keys(tmp_path):
    from_words = Plan.load(write(tmp_path, EXAMPLE), ["method=fedweit@released"])
    assert from_words.method == "fedweit@released"
    for plan in (from_words, Plan(method={"name": "fedweit@released", "keep": 0.5})):
        assert plan.method_options["keep"] == 0.5  # the plan's
        assert (plan.method_options["kb_from"], plan.patience) == ("last", 3)  # the preset's


# ---- there and back --------------------------------------------------------------------------------------------------

positive = st.floats(1e-12, 1e6)
fraction = st.floats(0, 1, exclude_min=True)
parts = st.lists(st.sampled_from(["b_comm", "a_comm", "a", "m", "l1", "l2"]), max_size=6)
OPTIONS = {
    "fedweit": st.fixed_dictionaries(
        {},
        optional={
            "keep": fraction,
            "lambda_sparsity": st.floats(0, 1e6),
            "lambda_drift": st.floats(0, 1e9),
            "kb_size": st.integers(0, 10**6) | st.just("all"),
            "kb_from": st.sampled_from(["all", "last"]),
            "past": st.sampled_from(["frozen", "closed", "joint"]),
            "mask_start": st.floats(-1e300, 1e300),
            "mask_trained": st.booleans(),
            "ablate": parts | parts.map(",".join),
        },
    ),
    "fedavg": st.fixed_dictionaries({}, optional={"average": st.sampled_from(["equal", "examples"])}),
    "stl": st.just({}),
}


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    clients = draw(st.integers(1, 10**6))
    method = draw(st.sampled_from(sorted(OPTIONS)))
    preset = draw(st.sampled_from(["", "@paper", "@released"])) if method == "fedweit" else ""
    keys = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "name": st.text("aZ9_\u00e9\u65e5.+@-", min_size=1),
                "tasks": st.integers(1, 10**6),
                "clients_per_round": st.integers(1, clients) | st.just("all"),
                "train_unchosen": st.booleans(),
                "batch_size": st.integers(1, 10**6),
                "learning_rate": positive,
                "rate_decay": st.floats(1, 1e6, exclude_min=True),
                "rate_floor": st.floats(0, 1),
                "optimizer_memory": st.sampled_from(["task", "round"]),
                "measured_model": st.sampled_from(["own", "global"]),
                "precision": st.sampled_from(["float32", "half"]),
                "seed": st.integers(0, 2**70),
                "device": st.sampled_from(["auto", "cpu", "cuda", "mps"]),
                "network": st.fixed_dictionaries({"name": st.just("mlp"), "hidden": st.integers(1, 65536)}),
                "scenario.pool": st.integers(1, 100),
                "async": st.sampled_from(["none", "task_clocks"]),
                "clock.spread": st.floats(1, 1000),
                "faults": st.fixed_dictionaries({"drop": st.floats(0, 0.9)}),
                "scenario.sharing": st.sampled_from(["disjoint", "overlapping"]),
            },
        )
    )
    return Plan.merge({**keys, "clients": clients, "method": method + preset, "method_options": draw(OPTIONS[method])})


@given(plans())
@settings(max_examples=150, deadline=None)
def test_a_written_plan_reads_as_itself(tmp_path_factory, plan):
    file = tmp_path_factory.getbasetemp() / "there_and_back.toml"
    file.write_text(plan.toml(), encoding="utf-8")
    again = Plan.load(file)
    assert again == plan
    assert again.toml() == plan.toml()
    assert again.model_dump() == plan.model_dump()
    assert Plan(**json.loads(json.dumps(plan.model_dump()))) == plan  # the way to a worker


def test_a_written_plan_is_complete():
    text = Plan(**{"method.ablate": ["a", "m"]}).toml()
    for line in ("clients = 5", 'clients_per_round = "all"', 'device = "auto"', "keep = 0.3", "[method]"):
        assert line in text.splitlines()
    assert 'ablate = ["a", "m"]' in text
    assert '[network]\nname = "lenet"\npool = 3\n' in text


# ---- mistakes --------------------------------------------------------------------------------------------------------


def error_of(act: Any, *arguments: Any, **keys: Any) -> str:
    """The line that a mistake gives."""
    with pytest.raises(WeftError) as caught:
        act(*arguments, **keys)
    line = str(caught.value)
    assert "\n" not in line
    assert 10 < len(line) < 500
    assert "pydantic" not in line
    return line


MISTAKES = [
    # unknown keys and names: the nearest one is suggested
    ("round_per_task=3", "unknown key round_per_task; did you mean rounds_per_task?"),
    ("Clients=3", "did you mean clients?"),
    ("learning-rate=0.1", "did you mean learning_rate?"),
    ("xyzzy=1", "unknown key xyzzy; docs/plans.md has all keys"),
    ("method.kep=0.3", "unknown key method.kep; did you mean method.keep?"),
    ("network.pol=3", "did you mean network.pool?"),
    ("network.hidden=2", "unknown key network.hidden"),  # lenet has no such option
    ("scenario.trian=3", "did you mean scenario.train?"),
    ("clock.sprad=2", "unknown key clock.sprad; did you mean clock.spread?"),
    ("method=fedwiet", "there is no method 'fedwiet'; did you mean fedweit?"),
    ("scenario=glyph", "there is no scenario 'glyph'; did you mean glyphs?"),
    ("network=lenett", "there is no network 'lenett'; did you mean lenet?"),
    ("method=fedweit@papper", "fedweit has no preset 'papper'; did you mean paper?"),
    ("method=stl@paper", "stl has no preset 'paper'"),
    ("method=", "there is no method"),
    # what is possible
    ("tasks=0", "tasks: .*greater than or equal to 1"),
    ("clients_per_round=8", "clients_per_round is 8 with 5 clients; choose 1 to 5"),
    ("clients_per_round=0", "clients_per_round is 0 with 5 clients; choose 1 to 5"),
    ("clients_per_round=some", "clients_per_round: .*all"),
    ("device=tpu", "device: .*'auto', 'cpu', 'cuda' or 'mps'"),
    ("async=never", "async: .*'none'"),
    ("quorum=9", "quorum is 9 .* choose 1 to 5"),
    ("method.kb_size=most", "method.kb_size: .*all"),
    ("method.past=future", "method.past: .*'frozen', 'closed' or 'joint'"),
    ("method.ablate=b", "method.ablate.*'b_comm'"),
    # form
    ("seed", "'seed' is not of the form key=value"),
    ("=5", "'=5' is not of the form key=value"),
]

# types and ranges, as strict for options: true is no number, and "3" is a text
BAD_VALUES = """
clients=three clients=2.5 clients=true clients=0 shuffle=1 learning_rate=fast learning_rate=0 learning_rate=inf
learning_rate=nan seed= seed=[1,2] seed=-1 method=3 network=3 scenario=[1] rounds_per_task=-1 batch_size=0 rate_decay=1
measured_model=best name=a/b method.keep=lots method.keep=0 method.keep=1.5 method.keep=nan method.keep=true
method.mask_trained=perhaps method.lambda_drift=-1 method.lambda_drift=inf method.mask_start=nan method.kb_size=-1
method.kb_size=true method.ablate=3 scenario.classes_per_task=1 scenario.train=0 scenario.train="30" scenario.train=true
clock.away=0 faults.crash=1
"""


@pytest.mark.parametrize("word", BAD_VALUES.split())
def test_a_bad_value_is_one_line_with_its_key(word):
    assert error_of(Plan.merge, {}, [word]).startswith(f"{word.partition('=')[0]}: ")


@pytest.mark.parametrize(("word", "line"), MISTAKES, ids=[word for word, _ in MISTAKES])
def test_a_mistake_in_a_word_is_one_line(word, line):
    assert re.search(line, error_of(Plan.merge, {}, [word]))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"client": 3}, "unknown key client; did you mean clients?"),
        ({"clients": "3"}, "clients: .*'3'"),
        ({"clients": None}, "clients: "),
        ({"method": {"name": "fedweit", "kep": 1}}, "unknown key method.kep; did you mean method.keep?"),
        ({"method": {"name": "fedweit", "keep": 2}}, "method.keep: "),
        ({"method_options": 3}, "method_options: "),
        ({"network_options": {"poll": 3}}, "unknown key network.poll; did you mean network.pool?"),
    ],
)
def test_a_mistake_in_python_is_one_line(keys, line):
    assert re.search(line, error_of(Plan, **keys))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('"method.keep" = 0.3', r"write 'method\.keep' as a table: \[method\] with keep = "),
        ('[for.fedavg]\n"method.keep" = 0.3', r"\[method\] with keep = "),
        ("clients = 3\ntasks = = 2", r"mine\.toml is not valid TOML.*line 2"),
        ("seed = 1\nseed = 2", "not valid TOML"),
        (b"\x89PNG\xff\xfe", r"mine\.toml is not valid TOML"),
        ("client = 3", "unknown key client; did you mean clients?"),
        ("[for.fedwiet]\nseed = 1", "there is no method 'fedwiet'; did you mean fedweit?"),
        ("for = 3", "for.METHOD"),
        ("[for]\nfedavg = 3", "for.METHOD"),
        ("[for.fedweit]\nseeed = 1", "unknown key seeed; did you mean seed?"),
        ("[methods]\nkeep = 1", "unknown key methods; did you mean method?"),
        ("[clients]\nnumber = 3", "clients: "),
        ("seed = 2020-01-01", "seed: "),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path, text, line):
    file = write(tmp_path, "")
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert re.search(line, error_of(Plan.load, file))


def test_a_missing_plan_names_what_there_is(tmp_path):
    assert "there is no plan dmeo; did you mean demo?" in error_of(Plan.load, "dmeo")
    assert "demo" in error_of(Plan.load, tmp_path / "nothing.toml")
    assert "there is no plan" in error_of(Plan.load, tmp_path)  # a folder without a plan
    assert "there is no plan" in error_of(Plan.load, "")


def test_a_file_name_with_spaces_is_no_obstacle(tmp_path):
    """The plan's name becomes part of a folder's name, so it may not hold everything; the file's name may."""
    plan = Plan.load(write(tmp_path, "seed = 4", "my first plan.toml"))
    assert plan.seed == 4
    assert re.fullmatch(r"[\w.+@-]+", plan.name)


# ---- scale -----------------------------------------------------------------------------------------------------------


def test_small_lowers_what_is_larger():
    plan = Plan.merge({"clients": 20, "tasks": 3, "scale": "small"})
    assert (plan.clients, plan.tasks, plan.rounds_per_task) == (5, 3, 8)
    assert Plan(scale="small", clients=20).clients == 5
    assert Plan.merge({"clients": 20, "scale": "paper"}).clients == 20
    assert Plan.merge({"scale": "small"}, ["scale=paper"]).rounds_per_task == 20
    with pytest.raises(WeftError, match="clients: input should be a valid integer, not 'many'"):
        Plan.merge({"clients": "many", "scale": "small"})


def test_words_win_over_small_and_are_written(tmp_path):
    plan = Plan.merge({"clients": 20}, ["scale=small", "clients=7", "rounds_per_task=20"])
    assert (plan.clients, plan.tasks, plan.rounds_per_task) == (7, 5, 20)
    assert Plan.load(write(tmp_path, plan.toml())) == plan


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("lr", "did you mean learning_rate"),
        ("epochs", "did you mean epochs_per_round"),
        ("rounds", "did you mean rounds_per_task"),
        ("momentum", "Adam's.*FedAvgM"),
        ("nonsense", "docs/plans.md"),
    ],
)
def test_the_words_that_people_type_get_the_key_that_is_meant(word, meant):
    with pytest.raises(WeftError, match=rf"^unknown key {word}; .*{meant}") as caught:
        Plan.merge({}, [f"{word}=1"])
    assert len(str(caught.value)) < 160


def test_methods_that_people_ask_for_say_where_they_are():
    with pytest.raises(WeftError, match=r"no method 'fedrep'; .*weft new method FedRep"):
        Plan(method="fedrep")
