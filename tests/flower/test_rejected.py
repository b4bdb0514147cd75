"""What is rejected: unregistered sites, missing keys, plaintext, Control from outside, replays, shipped code."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from federation import TINY, Federation, events, free_port, outcome, wait_until

from weft.flower.hub.keys import make_certificates, make_site_key
from weft.flower.hub.programs import environment, program, write_secret
from weft.plan import Plan

pytestmark = pytest.mark.attack
GIVES_UP = 150  # seconds within which a SuperNode gives up


def address(federation: Federation) -> str:
    return f"127.0.0.1:{federation.public if federation.nginx else federation.port}"


@pytest.fixture(scope="module")
def strangers(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stranger]]:
    """SuperNodes to reject, all at once, because each tries for a while before it gives up."""
    folder: Path = tmp_path_factory.mktemp("strangers")
    write_secret(folder / "key", make_site_key()[0].encode())
    make_certificates(folder, "127.0.0.1")
    trusted = ["--root-certificates", str(federation.folder / "hub" / "ca.crt")]
    of_ada = ["--auth-supernode-private-key", str(federation.folder / "ada" / "key")]
    options = {
        "not registered": [*trusted, "--auth-supernode-private-key", "key"],
        "without a key": trusted,
        "plaintext": ["--insecure"],
        "another authority": ["--root-certificates", "ca.crt", *of_ada],
    }
    found = {name: Stranger(federation, folder, name, *more) for name, more in options.items()}
    yield found
    for stranger in found.values():
        stranger.end()


class Stranger:
    def __init__(self, federation: Federation, folder: Path, name: str, *words: str):
        command = [program("flower-supernode"), "--superlink", address(federation), "--port", str(free_port()), *words]
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--max-retries", "2"],
                cwd=folder,
                env=environment(folder),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def last_output(self) -> str:
        """Its log after it has ended, without a number from the hub."""
        assert self._process.wait(GIVES_UP) != 0
        log = self._log.read_text(encoding="utf-8")
        assert "SuperNode ID" not in log
        return log

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and its children


def online(federation: Federation) -> list[str]:
    sites = json.loads(federation.weft("hub", "status", "--json"))["sites"]
    return [site["site"] for site in sites if site["online"]]


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("not registered", "[code: 2004] Failed to activate SuperNode"),
        ("without a key", "[code: 2001] SuperNode authentication is enabled"),
        ("plaintext", "400 Bad Request"),
        ("another authority", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_site_is_rejected(federation: Federation, strangers: dict[str, Stranger], who: str, why: str) -> None:
    """Without nginx the SuperLink closes a plaintext connection without a reason."""
    log = strangers[who].last_output()
    assert why in log or (who == "plaintext" and not federation.nginx and "disconnected" in log)


def ask(federation: Federation, port: int, path: str) -> int:
    trust = ssl.create_default_context(cafile=str(federation.folder / "hub" / "ca.crt"))
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=20)) as connection:
        connection.request("POST", path, body=b"", headers={"Content-Type": "application/x-protobuf"})
        with connection.getresponse() as response:
            response.read()
            return response.status


def test_only_the_fleet_path_is_reachable_from_outside(federation: Federation) -> None:
    """nginx passes only the fleet path; on loopback Control replies."""
    if not federation.nginx:
        warnings.warn("no nginx on this machine: NOT tested that it hides Control", stacklevel=1)
        pytest.skip("no nginx on this machine (Debian: apt-get install nginx-light)")
    assert ask(federation, federation.port, "/v1/control/list-runs") not in (403, 404)  # it rejects the body
    for path in ("/v1/control/list-runs", "/v1/runtime/get-nodes", "/", "/v1/", "/v1/fleet/../control/list-runs"):
        assert ask(federation, federation.public, path) == 403, path
    assert ask(federation, federation.public, "/v1/fleet/pull-messages") != 403


# ---- one run with a malicious site and a malicious hub ---------------------------------------------------------------

MALICIOUS = """#!{python}
import json
from pathlib import Path
from flwr.app import Array
from weft.flower import client_app, site_state

kept = Path({kept!r})
first = not kept.with_name("started").exists()
kept.with_name("started").touch()
answer, deflate = site_state.SiteState.answer, Array.deflate

def replay(self, wire):
    reply = answer(self, wire)
    if first:
        return reply
    if not kept.exists():
        kept.write_bytes(reply)
    elif not kept.with_name("sent").exists():
        kept.with_name("sent").touch()
        return kept.read_bytes()
    return reply

def unreadable(self):
    head, _, body = deflate(self).partition(b"\\0")
    body = json.dumps(json.loads(body) | dict(arraychunk_ids=[99])).encode()
    return b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\\0" + body

site_state.SiteState.answer = replay
if first:
    Array.deflate = unreadable
client_app.main()
"""
SPY = """
import os
from pathlib import Path
from weft.flower import client_app

app = client_app.app
Path({folder!r}, str(os.getpid())).touch()
"""


@pytest.fixture(scope="module")
def malicious(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ben's first reply is unreadable; later he replays an old one. The hub ships a client app that leaves a mark."""
    wait_until(lambda: "ben serves" in federation.log("ben"), 60)  # then its program is written
    folder = tmp_path_factory.mktemp("malicious")
    program, app = federation.folder / "ben" / "bin" / "flwr-clientapp", federation.folder / "hub" / "app"
    honest, shipped = program.read_text(encoding="utf-8"), (app / "pyproject.toml").read_text(encoding="utf-8")
    program.write_text(MALICIOUS.format(python=sys.executable, kept=str(folder / "kept")), encoding="utf-8")
    (folder / "marks").mkdir()
    (app / "spy.py").write_text(SPY.format(folder=str(folder / "marks")), encoding="utf-8")
    changed = shipped.replace("weft.flower.client_app:app", "spy:app")
    assert changed != shipped
    (app / "pyproject.toml").write_text(changed, encoding="utf-8")
    (federation.folder / "again.toml").write_text(Plan.merge({**TINY, "clients": 3, "tasks": 1}).toml())
    try:
        federation.weft("hub", "run", "again.toml", "--out", "again", timeout=400)
    finally:
        program.write_text(honest, encoding="utf-8")
        (app / "pyproject.toml").write_text(shipped, encoding="utf-8")
        (app / "spy.py").unlink()
    return folder


def events_of_ben(federation: Federation) -> list[dict[str, Any]]:
    return [event for event in events(federation.folder / "again") if event.get("client") == 1]


def test_a_replayed_reply_counts_once(federation: Federation, malicious: Path) -> None:
    found = events_of_ben(federation)
    assert len([event for event in found if "rejected" in event.get("reason", "")]) == 1
    replies = [event for event in found if event["event"] == "reply"]
    assert [event["round"] for event in replies][:1] == [0]
    assert 1 not in [event["round"] for event in replies]
    knowledge = [key for key in outcome(federation.folder / "again") if key.startswith("A ")]
    assert {"A 0.0", "A 1.0"} <= set(knowledge)  # requested again


def test_an_unreadable_reply_is_retried(federation: Federation, malicious: Path) -> None:
    """And the server app survives it."""
    assert (malicious / "started").exists()
    again = [event for event in events_of_ben(federation) if event["event"] == "retry"]
    assert [(event["site"], event["request"]) for event in again] == [("ben", "0.0.1")]
    assert "IndexError" in again[0]["reason"]
    assert "resumed" not in [event["event"] for event in events(federation.folder / "again")]


def test_no_site_runs_or_stores_code_of_the_hub(federation: Federation, malicious: Path) -> None:
    assert [mark.name for mark in (malicious / "marks").iterdir()] == []
    assert list((federation.folder / "hub").rglob("spy.py")), "nothing was shipped"
    for site in federation.sites:
        assert list((federation.folder / site).rglob("spy.py")) == []


def test_all_sites_are_still_online(federation: Federation) -> None:
    wait_until(lambda: len(online(federation)) == 3, 90)
    assert online(federation) == ["ada", "ben", "cleo"]
