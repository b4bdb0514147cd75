"""Who is not let in: a site that nobody registered, one without a key, plaintext, Control from outside, a replay."""

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
from federation import Federation, events, free_port, outcome, wait_until

from weft.flower.hub.keys import make_certificates, make_site_key, write_secret
from weft.flower.hub.programs import program, surroundings

AGAIN = """
clients = 3
tasks = 1
network = "mlp"
rounds_per_task = 2
batch_size = 10
[scenario]
train = 20
valid = 10
test = 10
"""
REFUSED = 150  # seconds within which a SuperNode gives up


def address(federation: Federation) -> str:
    return f"127.0.0.1:{federation.public if federation.nginx else federation.port}"


@pytest.fixture(scope="module")
def strangers(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Stranger]]:
    """SuperNodes that should not be let in, all at once, since each tries for a while before it gives up."""
    folder: Path = tmp_path_factory.mktemp("strangers")
    write_secret(folder / "key", make_site_key()[0].encode())
    make_certificates(folder, "127.0.0.1")
    trusted = ["--root-certificates", str(federation.folder / "hub" / "ca.crt")]
    of_ada = ["--auth-supernode-private-key", str(federation.folder / "ada" / "key")]
    words = {
        "nobody registered it": [*trusted, "--auth-supernode-private-key", "key"],
        "without a key": trusted,
        "plaintext": ["--insecure"],
        "another authority": ["--root-certificates", "ca.crt", *of_ada],
    }
    found = {name: Stranger(federation, folder, name, *more) for name, more in words.items()}
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
                env=surroundings(folder),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def last_words(self) -> str:
        """What it says when it has ended by itself, with no number from the hub."""
        assert self._process.wait(REFUSED) != 0
        said = self._log.read_text(encoding="utf-8")
        assert "SuperNode ID" not in said
        return said

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it had started


def there(federation: Federation) -> list[str]:
    sites = json.loads(federation.weft("hub", "status", "--json"))["sites"]
    return [site["site"] for site in sites if site["there"]]


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("nobody registered it", "[code: 2004] Failed to activate SuperNode"),
        ("without a key", "[code: 2001] SuperNode authentication is enabled"),
        ("plaintext", "400 Bad Request"),
        ("another authority", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_site_that_may_not_come_in(
    federation: Federation, strangers: dict[str, Stranger], who: str, why: str
) -> None:
    """Without nginx, which says what was wrong with it, the SuperLink just hangs up on plaintext."""
    said = strangers[who].last_words()
    assert why in said or (who == "plaintext" and not federation.nginx and "disconnected" in said)


def ask(federation: Federation, port: int, path: str) -> int:
    trust = ssl.create_default_context(cafile=str(federation.folder / "hub" / "ca.crt"))
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, context=trust, timeout=20)) as connection:
        connection.request("POST", path, body=b"", headers={"Content-Type": "application/x-protobuf"})
        with connection.getresponse() as response:
            response.read()
            return response.status


def test_control_from_outside(federation: Federation) -> None:
    """Behind nginx only the fleet's path is there; on loopback, which is the hub's own, Control answers."""
    if not federation.nginx:
        warnings.warn("there is no nginx here: that it hides Control was NOT tested", stacklevel=1)
        pytest.skip("there is no nginx here (Debian: apt-get install nginx-light)")
    assert ask(federation, federation.port, "/v1/control/list-runs") not in (403, 404)  # it does not like the body
    for path in ("/v1/control/list-runs", "/v1/runtime/get-nodes", "/", "/v1/", "/v1/fleet/../control/list-runs"):
        assert ask(federation, federation.public, path) == 403, path
    assert ask(federation, federation.public, "/v1/fleet/pull-messages") != 403


# ---- one run with a site that is up to no good, and a hub too --------------------------------------------------------

UNRULY = """#!{python}
import json
from pathlib import Path
from flwr.app import Array
from weft.flower import runner, site_state as memory

kept = Path({kept!r})
first = not kept.with_name("begun").exists()
kept.with_name("begun").touch()
answer, deflate = memory.Memory.answer, Array.deflate

def replay(self, wire):
    said = answer(self, wire)
    if first:
        return said
    if not kept.exists():
        kept.write_bytes(said)
    elif not kept.with_name("sent").exists():
        kept.with_name("sent").touch()
        return kept.read_bytes()
    return said

def unreadable(self):
    head, _, body = deflate(self).partition(b"\\0")
    body = json.dumps(json.loads(body) | dict(arraychunk_ids=[99])).encode()
    return b" ".join([*head.split(b" ")[:2], str(len(body)).encode()]) + b"\\0" + body

memory.Memory.answer = replay
if first:
    Array.deflate = unreadable
runner.main()
"""
SPY = """
import os
from pathlib import Path
from weft.flower import client_app as client

app = client.app  # so that all would go well, but for the mark
Path({folder!r}, Path(os.environ.get("WEFT_SITE", "hub")).name).touch()
"""


@pytest.fixture(scope="module")
def unruly(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder. Ben's first answer cannot be put together; later he sends an old one in the place of a new one.

    The hub ships a client app of its own with the run, which would leave a mark wherever it is loaded.
    """
    wait_until(lambda: "ben serves" in federation.log("ben"), 60)  # which it does with a program that it writes first
    folder = tmp_path_factory.mktemp("unruly")
    program, app = federation.folder / "ben" / "bin" / "flwr-clientapp", federation.folder / "hub" / "app"
    honest, shipped = program.read_text(encoding="utf-8"), (app / "pyproject.toml").read_text(encoding="utf-8")
    program.write_text(UNRULY.format(python=sys.executable, kept=str(folder / "kept")), encoding="utf-8")
    (folder / "marks").mkdir()
    (app / "spy.py").write_text(SPY.format(folder=str(folder / "marks")), encoding="utf-8")
    changed = shipped.replace("weft.flower.client_app:app", "spy:app")
    assert changed != shipped
    (app / "pyproject.toml").write_text(changed, encoding="utf-8")
    (federation.folder / "again.toml").write_text(AGAIN, encoding="utf-8")
    try:
        federation.weft("hub", "run", "again.toml", "--out", "again", timeout=400)
    finally:
        program.write_text(honest, encoding="utf-8")
        (app / "pyproject.toml").write_text(shipped, encoding="utf-8")
        (app / "spy.py").unlink()
    return folder


def heard_of_ben(federation: Federation) -> list[dict[str, Any]]:
    return [event for event in events(federation.folder / "again") if event.get("client") == 1]


def test_a_message_that_is_replayed(federation: Federation, unruly: Path) -> None:
    """A site that sends its first answer once more, in the second round: it counts once, and the run goes on."""
    heard = heard_of_ben(federation)
    told = [event["reason"] for event in heard if event["event"] == "incident" and "refused" in event["reason"]]
    assert len(told) == 1
    answered = [event for event in heard if event["event"] == "reply"]
    assert [event["round"] for event in answered][:1] == [0]
    assert 1 not in [event["round"] for event in answered]
    given = [key for key in outcome(federation.folder / "again") if key.startswith("A ")]
    assert {"A 0.0", "A 1.0"} <= set(given)  # which it gave when it was asked once more


def test_a_message_that_cannot_be_put_together(federation: Federation, unruly: Path) -> None:
    """The server app lives on, the journal says whose it was, and the site is asked again."""
    assert (unruly / "begun").exists()
    again = [event for event in heard_of_ben(federation) if event["event"] == "retry"]
    assert [(event["site"], event["request"]) for event in again] == [("ben", "0.0.1")]
    assert again[0]["reason"].startswith("its answer cannot be read: IndexError")
    assert "resumed" not in [event["event"] for event in events(federation.folder / "again")]


def test_no_site_runs_what_the_hub_ships(federation: Federation, unruly: Path) -> None:
    """Nor keeps it: what answers is the weft that is installed there."""
    assert [mark.name for mark in (unruly / "marks").iterdir()] == []
    assert list((federation.folder / "hub").rglob("spy.py")), "nothing was shipped"
    for site in federation.sites:
        assert list((federation.folder / site).rglob("spy.py")) == []


def test_the_others_are_still_there(federation: Federation) -> None:
    wait_until(lambda: len(there(federation)) == 3, 90)
    assert there(federation) == ["ada", "ben", "cleo"]
