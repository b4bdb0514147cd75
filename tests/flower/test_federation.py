"""Real SuperLink, SuperNodes and apps on loopback with TLS and authentication, killed with SIGKILL."""

from __future__ import annotations

import json
import os
import socket
import threading
from pathlib import Path

import pytest
from federation import TINY, WEFT, Calls, Federation, called, descendants, events, is_busy, outcome, wait_until

import weft
from weft.flower.hub.status import finished_rounds

LONG = {"epochs_per_round": 40}  # seconds of training, long enough for a kill


def write_plan(folder: Path, name: str, more: dict[str, object]) -> weft.Plan:
    plan = weft.Plan.merge({**TINY, "clients": 3, "scenario.train": 40, "name": name, **more})
    (folder / f"{name}.toml").write_text(plan.toml(), encoding="utf-8")
    return plan


@pytest.fixture(scope="module")
def finished(federation: Federation) -> Path:
    """An undisturbed run, in which hub and sites connect only to loopback: no telemetry, update check or packages."""
    write_plan(federation.folder, "calm", {})
    calls = Calls(*(process.pid for process in federation.processes.values()))
    calls.start()
    federation.weft("hub", "run", "calm.toml", "--out", "calm", timeout=400)
    calls.end()
    assert calls.looks > 20
    assert calls.seen == {"127.0.0.1"}
    return federation.folder / "calm"


def test_the_result_equals_the_local_engine_to_the_bit(finished: Path, tmp_path: Path) -> None:
    local = weft.run(weft.Plan.load(finished), tmp_path / "local")
    assert outcome(finished) == outcome(local.folder)
    assert len([key for key in outcome(finished) if key.startswith("A ")]) == 6
    summary = weft.Result(finished).summary
    same = ("accuracy", "forgetting", "traffic", "model_size_bytes", "adaptive_density", "incidents")
    assert [summary[key] for key in same] == [local.summary[key] for key in same]


def test_a_connection_elsewhere_is_detected() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        assert "192.0.2.1" in called(descendants(os.getpid()))


def test_the_audit_log_equals_the_ledger(federation: Federation, finished: Path) -> None:
    rows = json.loads(federation.weft("site", "audit", "--folder", "ben", "--json"))
    assert {row["tensor"] for row in rows} == {"header", "weights", "adaptive"}
    assert {row["to"] for row in rows} == {json.loads((federation.folder / "ben" / "site.json").read_text())["hub"]}
    sent = [line.split(",") for line in (finished / "ledger.csv").read_text().splitlines()[1:]]
    of_ben = sum(int(row[5]) for row in sent if row[:2] == ["c2s", "1"])
    assert sum(int(row["bytes"]) for row in rows) == of_ben
    assert [row["request"] for row in rows if row["tensor"] == "adaptive"] == ["0.1.1", "1.1.1"]


def test_only_their_owner_can_read_keys(federation: Federation) -> None:
    for name in ("hub/ca.key", "hub/server.key", "hub/exec.secret", "ada/key", "ada.json"):
        assert (federation.folder / name).stat().st_mode & 0o777 == 0o600, name


def test_each_process_killed_once_during_training(federation: Federation, tmp_path: Path) -> None:
    """A site, the SuperLink, the server app: the run finishes with the same bits as without kills."""
    plan = write_plan(federation.folder, "rough", LONG)
    run = federation.folder / "rough"
    command = federation.start("run", [*WEFT, "hub", "run", "rough.toml", "--out", "rough"])
    kills = threading.Thread(target=strike, args=(federation, run), daemon=True)
    kills.start()
    local = weft.run(plan, tmp_path / "local")
    assert command.wait(420) == 0, federation.log("run")
    kills.join(5)
    assert not kills.is_alive()
    assert outcome(run) == outcome(local.folder)
    found = events(run)
    assert [event["site"] for event in found if event["event"] == "away"].count("ben") == 1
    assert "ben" in [event["site"] for event in found if event["event"] == "back"]
    assert [event["event"] for event in found].count("resumed") == 1  # the server app
    assert [event["event"] for event in found].count("finished") == 1
    assert "superlink ended with code -9" in federation.log("hub")
    assert "supernode ended with code -9" in federation.log("ben")
    assert "the server app died" in federation.log("run")


def strike(federation: Federation, run: Path) -> None:
    wait_until(lambda: is_busy(federation.folder / "ben"), 240)
    federation.process("ben", "supernode").kill()
    wait_until(lambda: finished_rounds(run) >= 2, 240)
    wait_until(lambda: is_busy(federation.folder / "ada"), 60)
    federation.process("hub", "superlink").kill()
    wait_until(lambda: finished_rounds(run) >= 3, 120)
    wait_until(lambda: is_busy(federation.folder / "cleo"), 60)
    below = federation.process("hub", "superexec").children(recursive=True)
    next(process for process in below if "flwr-serverapp" in " ".join(process.cmdline())).kill()
