"""A site that lies to its hub: one reply that would become theta_G, escape codes, headers that eat the memory."""

from __future__ import annotations

import io
import json
import resource
import time
from pathlib import Path

import cli_helpers
import pytest
import torch
from helpers import Run, tiny
from message_helpers import framed

import weft
from weft.cli import app, common
from weft.engines.simulated import SimulatedEngine
from weft.errors import WeftError
from weft.methods.averaging import LARGEST_JUMP
from weft.methods.robust import coordinate_median
from weft.report import terminal
from weft.report.reading import read_run
from weft.wire.message import LONGEST_HEADER, MOST_ITEMS, MessageError, decode, encode
from weft.wire.tensors import Rows, dense, with_values

pytestmark = pytest.mark.attack

# ---- 4: one reply and theta_G ----------------------------------------------------------------------------------------


class Liar(Run):
    """The last client uploads weights of nearly the largest norm that passes the checks."""

    liar = 2

    def replies(self):
        for reply in super().replies():
            message = decode(reply.wire)
            if reply.client == self.liar and (weights := message.tensors.get("weights")) is not None:
                value = torch.ones_like(dense(weights))
                value *= 0.99 * self.checks.max_norm / float(value.norm())
                message.tensors["weights"] = with_values(weights, value)
                reply = reply._replace(wire=encode(message, "float32"))
            yield reply

    def theta_g(self) -> torch.Tensor:
        return getattr(self.server, "whole", None) if hasattr(self.server, "whole") else dense(self.server.weights)


@pytest.mark.parametrize("method", ["fedavg", "fedweit"])
@pytest.mark.parametrize("mode", ["updates", "none"])
def test_one_reply_does_not_become_theta_g(method, mode, monkeypatch):
    """At a hub: it counts for one of all clients, and as no farther from theta_G than LARGEST_JUMP."""
    monkeypatch.setattr(SimulatedEngine, "remote", True)
    given = tiny(method=method, tasks=1, rounds_per_task=1, **{"async": mode}, epochs_per_round=1)
    lying = Liar(given).go()
    assert not lying.incidents  # it passes the checks: 99 times the norm of the initial network
    moved = float((lying.theta_g() - lying.ctx.initial[: lying.layout.weights]).norm())
    norm = float(lying.ctx.initial[: lying.layout.weights].norm())
    honest = Run(given).go()
    own = float((Liar.theta_g(honest) - honest.ctx.initial[: honest.layout.weights]).norm())
    assert moved <= LARGEST_JUMP * norm * 1.2 + own
    assert lying.checks.max_norm > 90 * norm


@pytest.mark.parametrize("method", ["fedavg", "fedweit", "fedcurv", "fedprox+apd"])
def test_the_limits_of_a_hub_change_no_honest_run(method, monkeypatch):
    honest = Run(tiny(method=method)).go()
    monkeypatch.setattr(SimulatedEngine, "remote", True)
    guarded = Run(tiny(method=method)).go()
    assert torch.equal(dense(honest.server.weights), dense(guarded.server.weights))
    assert honest.matrices == guarded.matrices


# ---- 9: escape codes -------------------------------------------------------------------------------------------------

NASTY = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202eline\x00"


def test_no_escape_code_reaches_a_terminal(tmp_path, monkeypatch):
    folder = weft.run(cli_helpers.tiny(tasks=1), tmp_path / "run").folder
    line = {"at": 1.0, "event": "incident", "client": 0, "task": 0, "round": 0, "time": 0.0, "reason": NASTY}
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write(json.dumps(line) + "\n")
    contents = json.loads((folder / "contents.json").read_text())
    contents = json.loads(json.dumps(contents).replace('"name": "', '"name": "\\u001b[2J'))
    (folder / "contents.json").write_text(json.dumps(contents))
    seen = io.StringIO()
    console = common.SafeConsole(file=seen, force_terminal=False, width=200)
    for table in terminal.details(read_run(folder)):
        console.print(table)
    console.print(NASTY, markup=False, highlight=False)
    assert "owned" in seen.getvalue()
    assert all(letter.isprintable() or letter == "\n" for letter in seen.getvalue())


def test_an_error_of_a_site_is_one_printable_line_in_the_journal(monkeypatch):
    running = Run(tiny(tasks=1, rounds_per_task=1))

    class Shouting(Run):
        def replies(self):
            for reply in super().replies():
                message = decode(reply.wire)
                text = f"x\n{NASTY}"
                error = type(message)(
                    message.sender, message.receiver, message.request_id, (), message.task, message.round, error=text
                )
                yield reply._replace(wire=encode(error))

    with pytest.raises(WeftError) as ended:
        Shouting(running.plan).go()
    assert str(ended.value).isprintable()
    monkeypatch.setattr(SimulatedEngine, "remote", True)
    shouting = Shouting(running.plan).go()
    assert shouting.incidents
    assert shouting.warnings
    assert all(text.isprintable() for text in [*shouting.warnings, *(reason for *_, reason in shouting.incidents)])


def test_errors_of_the_command_line_are_printable(capsys):
    with pytest.raises(SystemExit):
        app._fail(NASTY)
    assert all(letter.isprintable() or letter == "\n" for letter in capsys.readouterr().err)


# ---- 10: headers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [MOST_ITEMS + 1, 80_000])
def test_many_segments_are_refused_quickly(count):
    """690,000 segments took 5.9 s and 791 MB to refuse."""
    header = {
        "sender": "client-0", "receiver": "server", "request_id": "0.0.0", "ops": [], "task": 0, "round": 0,
        "fields": {}, "error": "", "precision": "float32",
        "tensors": [{"encoding": "rows", "name": "weights", "segments": [[1, 1]] * count}],
    }  # fmt: skip
    raw = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    assert len(raw) <= LONGEST_HEADER
    wire = framed(raw)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(MessageError):
        decode(wire)
    assert time.perf_counter() - began < 2  # seconds, on a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


# ---- what robust rules do against one of three, and do not against one of two ----------------------------------------


def test_a_median_needs_three_senders():
    honest, lie = torch.ones(4), torch.full((4,), 99.0)
    assert torch.equal(coordinate_median([honest, honest + 0.1, lie]), honest + 0.1)
    assert float(coordinate_median([honest, lie]).max()) == 50.0  # docs/trust.md says so
    rows = torch.ones(1, dtype=torch.bool)
    assert isinstance(with_values(Rows(((1, 4),), rows, honest), lie), Rows)


def test_the_folder_of_a_run_is_for_its_owner(tmp_path):
    folder = weft.run(cli_helpers.tiny(tasks=1), tmp_path / "run").folder
    assert Path(folder).stat().st_mode & 0o077 == 0
