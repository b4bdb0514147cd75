"""Phases of local training: which variables learn in which epoch; and the file that `weft new method` writes."""

import re
import types
from pathlib import Path

import pytest
import test_methods as contract
import torch
from helpers import Run, run, tiny
from methods_helpers import begun

from weft import registry
from weft.core import training as training_module
from weft.core.training import train_round
from weft.methods.federated.fedavg import FedAvg

pytest_plugins = ["cli_helpers"]
DOCS = Path(__file__).parent.parent / "docs" / "add-a-method.md"


def documented(name):
    """A class of the page, as a reader would copy it to a file."""
    (text,) = (
        block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if f"class {name}(" in block
    )
    return text


@pytest.fixture
def fedrep(tmp_path):
    (tmp_path / "fedrep.py").write_text(documented("FedRep"))
    return f"{tmp_path / 'fedrep.py'}:FedRep"


def test_fedrep_trains_the_head_first_and_then_the_body(fedrep, monkeypatch):
    """Written by hand: Adam of its own for each part, which rests while the other one learns."""
    running = Run(tiny(method=fedrep, epochs_per_round=3, clients=1)).go_to(1)
    state, ctx, training = begun(running)
    layout, seen = ctx.layout, []
    assert [*training.variables] == ["weights", "biases", "head"]
    assert len(training.variables["head"]) == 2 * (layout.features + 1)
    step = training_module.train_step

    def watched(training, optimizer, *batch):
        before = {name: value.clone() for name, value in training.variables.items()}
        steps = {name: moments[2].item() for name, moments in optimizer._moments.items()}
        loss = step(training, optimizer, *batch)
        moved = {name for name, value in training.variables.items() if not torch.equal(value, before[name])}
        counted = {name for name, moments in optimizer._moments.items() if moments[2].item() > steps[name]}
        assert moved <= counted
        seen.append((training.epoch, frozenset(counted)))
        return loss

    monkeypatch.setattr(training_module, "train_step", watched)
    train_round(state, running.method, ctx, 0)
    batches = -(-len(ctx.load("train")) // ctx.plan.batch_size)
    head, body = frozenset({"head"}), frozenset({"weights", "biases"})
    assert seen == [(epoch, head if epoch < 2 else body) for epoch in range(3) for _ in range(batches)]
    assert state.optimizer.steps == {"weights": batches, "biases": batches, "head": 2 * batches}


def test_a_head_apart_changes_nothing_by_itself():
    found, plain = run(method="test_phases:Apart"), run(method="fedavg")
    torch.testing.assert_close(found.server.weights, plain.server.weights)
    assert found.matrices == plain.matrices


class Apart(FedAvg):
    def prepare(self, training, client, ctx):
        training.split_head()


class Curious(FedAvg):
    def configure(self, server, client, ctx):
        download = super().configure(server, client, ctx)
        download.fields["at"] = ctx.round
        return download

    def receive(self, client, download, ctx):
        super().receive(client, download, ctx)
        assert download.fields["at"] == ctx.round
        assert len(ctx.class_names) == len(ctx.classes) == 2

    def prepare(self, training, client, ctx):
        training.dropout = 0.1 * ctx.round


def test_the_context_has_round_and_class_names(monkeypatch):
    rounds = []
    train = train_round

    def noted(client, method, ctx, round_index):
        rounds.append((ctx.round, ctx.class_names))
        return train(client, method, ctx, round_index)

    monkeypatch.setattr("weft.core.client.train_round", noted)
    running = Run(tiny(method=registry.reference(Curious), clients=1, tasks=1)).go()
    assert rounds == [(index, tuple(running.scenario.sequences[0][0].classes)) for index in range(2)]


CONTRACT = [
    name
    for name, value in vars(contract).items()
    if isinstance(value, types.FunctionType)
    and name.startswith("test_")
    and value.__code__.co_varnames[: value.__code__.co_argcount] in (("name",), ("name", "tmp_path"))
    and any("parametrize" in mark.name and mark.args[0] == "name" for mark in getattr(value, "pytestmark", ()))
]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    from typer.testing import CliRunner

    from weft.cli.app import app

    file = tmp_path_factory.mktemp("new") / "mine.py"
    assert CliRunner().invoke(app, ["new", "method", "Mine", "--out", str(file)]).exit_code == 0
    assert CliRunner().invoke(app, ["new", "method", "Mine", "--out", str(file)]).exit_code != 0
    return f"{file}:Mine"


@pytest.mark.parametrize("check", CONTRACT)
def test_the_file_to_fill_in_meets_the_contract_as_it_is(check, template, tmp_path):
    function = getattr(contract, check)
    wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
    function(**{key: value for key, value in {"name": template, "tmp_path": tmp_path}.items() if key in wanted})
