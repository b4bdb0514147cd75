"""`weft site status` and `weft hub status` when something is wrong, without Flower."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import proxy_bypass_environment

import pytest
from site_helpers import FIRST, OTHER, answer, status, status_json

from weft.cli import hub as cli_hub
from weft.cli import site as cli_site
from weft.errors import WeftError
from weft.flower import site_state
from weft.flower.hub import programs, supervisor

pytest_plugins = ["site_helpers"]

# ---- the connection, by logs of flwr 1.41.0 --------------------------------------------------------------------------

START = "INFO :      Starting Flower SuperNode\nINFO:     Started server process [22970]\n"
CONNECTED = START + "INFO :      SuperNode ID: 2058310501161292068\n"
ENDED = "INFO :      SuperNode terminated gracefully.\nINFO:     Finished server process [22970]\n"
RETRYING = "WARNING :   Connection attempt failed, retrying in 15.35 seconds\n"
BACK = "INFO :      Connection successful after 52.63 seconds and 9 tries.\n"
REJECTED = """ERROR :     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[code: 2004] Failed to activate SuperNode.
The SuperNode could not establish a connection to the SuperLink.
INFO:     Finished server process [31538]
INFO :      Starting Flower SuperNode
"""
UNTRUSTED = (
    START
    + """ERROR :     SSL/TLS handshake error detected.
ERROR :     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate (_ssl.c:1006)
"""
)
REMEDIES = {"silent": "NTP", "untrusted": "new invitation", "rejected": "removed", "unreachable": "cannot be reached"}


@pytest.mark.parametrize(
    ("log", "failing", "connection"),
    [
        (CONNECTED, 0.0, "connected"),
        (CONNECTED + RETRYING + REJECTED, 1e9, "rejected"),
        (CONNECTED + RETRYING, 0.0, "unreachable"),
        (CONNECTED + RETRYING + BACK, 0.0, "connected"),
        (CONNECTED + REJECTED + CONNECTED, 0.0, "connected"),
        (START + ENDED, 1e9, "silent"),
        (START + ENDED + START, 1e9, "silent"),
        (CONNECTED + ENDED + START + ENDED, 1e9, "silent"),  # an earlier start was connected
        (CONNECTED + ENDED + START + ENDED + START, 1e9, "silent"),
        (UNTRUSTED + START + ENDED, 1e9, "silent"),
        (START + ENDED + START, 0.0, ""),  # stopped before it was connected, and started again by a person
        (CONNECTED + ENDED + START, 1e9, ""),  # just restarted, nothing is known to be wrong
        (START + ENDED + CONNECTED, 1e9, "connected"),  # the clock was corrected
        (UNTRUSTED, 1e9, "untrusted"),
        (UNTRUSTED + START, 1e9, "untrusted"),
    ],
)
def test_status_shows_why_a_site_is_not_connected(site, log, failing, connection, capsys):
    (site / "logs" / "supernode.log").write_text(log)
    processes = {"supernode": {"pid": 1, "starts": 5, "failing": failing}}
    (site / supervisor.FILE).write_text(json.dumps({"supervisor": 1, "processes": processes}))
    assert "supernode.log" not in status(site, capsys)  # it is stopped: its log describes the past
    with supervisor.hold(site):
        text, facts = status(site, capsys), status_json(site, capsys)
    assert facts["connection"] == connection
    lines = [line for line in text.splitlines() if "the hub" in line]
    assert len(lines) == (connection in REMEDIES)
    for line in lines:
        assert REMEDIES[connection] in line
        assert str(site / "logs" / "supernode.log") in line
        assert ("since 2001-09-09" in line) == bool(failing)


# ---- a supervisor that was killed ------------------------------------------------------------------------------------

SUPERVISOR = """
import sys
from pathlib import Path
from weft.flower.hub.supervisor import Supervisor
command = lambda: [sys.executable, "-c", "import time; time.sleep(60)"]
Supervisor(Path(sys.argv[1]), {sys.argv[2]: command}, {}, lambda line: None).run()
"""


def start_orphan(folder: Path, name: str) -> int:
    """A process whose supervisor was killed."""
    process = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(folder), name])
    try:
        while not (folder / supervisor.FILE).exists():
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    pid: int = json.loads((folder / supervisor.FILE).read_text())["processes"][name]["pid"]
    return pid


def test_a_supernode_without_its_supervisor_is_not_stopped(site, capsys):
    orphan = start_orphan(site, "supernode")
    (site / "logs" / "supernode.log").write_text(UNTRUSTED)
    text = status(site, capsys)
    assert f"supernode (process {orphan})" in text
    assert "weft site stop" in text
    facts = status_json(site, capsys)
    assert (facts["orphans"]["supernode"]["pid"], facts["connection"]) == (orphan, "untrusted")
    cli_site.stop_command(site)
    capsys.readouterr()
    facts = status_json(site, capsys)
    assert (facts["orphans"], facts["processes"]) == ({}, None)


def test_a_hub_without_its_supervisor_is_not_stopped(hub, capsys):
    pid = start_orphan(hub, "superexec")
    try:
        cli_hub.status_command(hub)
    finally:
        supervisor.kill_orphans(hub)
    text = capsys.readouterr().out
    assert f"superexec (process {pid})" in text
    assert "weft hub stop" in text


# ---- proxies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "hub_without_proxy"),
    [
        ({}, False),
        ({"NO_PROXY": "hub.example.org"}, True),
        ({"no_proxy": "hub.example.org"}, True),
        ({"NO_PROXY": "hub.example.org", "no_proxy": " near.example.org, "}, True),
        ({"NO_PROXY": "*"}, True),
    ],
)
def test_no_proxy_between_processes_of_one_machine(given, hub_without_proxy, tmp_path, monkeypatch):
    """Between a site and its hub the environment decides, as Python reads it."""
    for key in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {**given, "HTTPS_PROXY": "http://proxy.example.org:3128"}.items():
        monkeypatch.setenv(key, value)
    env = programs.environment(tmp_path)
    assert env["HTTPS_PROXY"] == "http://proxy.example.org:3128"
    for key in ("no_proxy", "NO_PROXY"):
        names = {"no": env[key]}
        assert all(proxy_bypass_environment(host, names) for host in ("127.0.0.1", "127.0.0.1:9092", "localhost"))
        assert bool(proxy_bypass_environment("hub.example.org", names)) == hub_without_proxy


# ---- runs of a site --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["manifest", "state"])
def test_a_damaged_run_does_not_hide_the_others(site, what, capsys):
    answer(site, FIRST, 3, "begin", "train", "end")
    answer(site, OTHER, 4, "begin", "train")
    manifest = site / "state" / FIRST / "manifest.json"
    path = manifest if what == "manifest" else next(manifest.parent.glob("client-*"))
    path.write_text('{"half')
    text = status(site, capsys)
    assert str(path) in text
    assert f"run {OTHER}: finished tasks: 0, replies: 1" in text
    runs = {run["id"]: run for run in status_json(site, capsys)["runs"]}
    assert (str(path) in runs[FIRST]["damage"], runs[OTHER]["damage"]) == (True, "")
    with pytest.raises(WeftError, match=FIRST):
        site_state.run_that_started(site, 0)
