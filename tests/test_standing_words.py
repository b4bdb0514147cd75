"""What `weft site status` and `weft hub status` say when something is not well, without Flower."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import proxy_bypass_environment

import filelock
import pytest
from site_helpers import FIRST, OTHER, answer, status

from weft.cli import hub as cli_hub
from weft.cli import site as cli_site
from weft.errors import WeftError
from weft.flower import remembered
from weft.flower.hub import programs
from weft.flower.hub import supervisor as supervision

pytest_plugins = ["site_helpers"]

# ---- the site and its hub --------------------------------------------------------------------------------------------

# as flwr 1.41.0 wrote it: of a site that was let in, of one whose clock was a minute ahead, and of one whose hub had a
# certificate of another authority
START = "INFO :      Starting Flower SuperNode\nINFO:     Started server process [22970]\n"
LET_IN = START + "INFO :      SuperNode ID: 2058310501161292068\n"
ENDED = "INFO :      SuperNode terminated gracefully.\nINFO:     Finished server process [22970]\n"
UNTRUSTED = (
    START
    + """ERROR :     SSL/TLS handshake error detected.
ERROR :     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate (_ssl.c:1006)
"""
)
SILENT = "without having been let in since 2001-09-09 01:46:40 UTC, and Flower does not say why"


@pytest.mark.parametrize(
    ("log", "failing", "said", "word"),
    [
        (START + ENDED, 1e9, SILENT, "silent"),
        (START + ENDED + START, 1e9, SILENT, "silent"),
        (LET_IN + ENDED + START + ENDED, 1e9, SILENT, "silent"),  # an earlier start was let in
        (LET_IN + ENDED + START + ENDED + START, 1e9, SILENT, "silent"),
        (UNTRUSTED + START + ENDED, 1e9, SILENT, "silent"),
        (START + ENDED + START, 0.0, "", ""),  # stopped before it was let in, and started again by a person
        (LET_IN + ENDED + START, 1e9, "", ""),  # on its way up again: not in, and nothing is known to be wrong
        (START + ENDED + LET_IN, 1e9, "", "in"),  # the clock was set right
        (UNTRUSTED, 1e9, "certificate is not accepted since 2001-09-09 01:46:40 UTC: it has expired", "untrusted"),
        (UNTRUSTED + START, 1e9, "ask the hub for a new invitation", "untrusted"),
    ],
)
def test_a_site_that_is_not_let_in_says_why(site, log, failing, said, word, capsys):
    (site / "logs" / "supernode.log").write_text(log)
    processes = {"supernode": {"pid": 1, "starts": 5, "failing": failing}}
    (site / supervision.FILE).write_text(json.dumps({"supervisor": 1, "processes": processes}))
    with supervision.hold(site):
        told = status(site, capsys)
        cli_site.status_command(site, as_json=True)
    assert said in told
    assert bool(said) == ("the hub" in told)
    assert "cannot be reached" not in told
    assert json.loads(capsys.readouterr().out)["link"] == word
    assert ("clock is more than 5 s ahead" in told, "not invited any more" in told) == (2 * (word == "silent",))


# ---- a supervisor that was killed ------------------------------------------------------------------------------------

KEEPER = """
import sys
from pathlib import Path
from weft.flower.hub.supervisor import Supervisor
command = lambda: [sys.executable, "-c", "import time; time.sleep(60)"]
Supervisor(Path(sys.argv[1]), {sys.argv[2]: command}, {}, lambda line: None).run()
"""


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    folder: Path = tmp_path / "hub"
    folder.mkdir()
    for name, words in {"hub": {"address": "127.0.0.1:9092", "port": 9092}, "sites": [], "runs": []}.items():
        (folder / f"{name}.json").write_text(json.dumps(words))
    monkeypatch.setattr(cli_hub, "check_flower", lambda: None)
    return folder


def left_alone(folder: Path, name: str) -> int:
    """A process of a supervisor that was killed with -9."""
    keeper = subprocess.Popen([sys.executable, "-c", KEEPER, str(folder), name])
    try:
        while not (folder / supervision.FILE).exists():
            assert keeper.poll() is None
            time.sleep(0.05)
    finally:
        keeper.kill()
        keeper.wait()
    pid: int = json.loads((folder / supervision.FILE).read_text())["processes"][name]["pid"]
    return pid


@pytest.fixture
def orphan(site) -> Iterator[int]:
    yield left_alone(site, "supernode")
    supervision.end_leftovers(site)


def test_a_supernode_without_its_supervisor_is_not_down(site, orphan, capsys):
    (site / "logs" / "supernode.log").write_text(UNTRUSTED)
    said = status(site, capsys)
    assert f"its supervisor, which was killed; supernode (process {orphan}) still serves" in said
    assert "weft site stop ends it" in said
    assert "certificate is not accepted" in said  # what it says of the hub is of today
    cli_site.status_command(site, as_json=True)
    assert json.loads(capsys.readouterr().out)["left behind"]["supernode"]["pid"] == orphan
    cli_site.stop_command(site)
    assert "is stopped" in capsys.readouterr().out
    assert "ada of 127.0.0.1:9092 is down" in status(site, capsys)


def test_a_hub_without_its_supervisor_is_not_down(hub, capsys):
    pid = left_alone(hub, "superexec")
    try:
        cli_hub.status_command(hub)
    finally:
        supervision.end_leftovers(hub)
    said = capsys.readouterr().out
    assert f"superexec (process {pid}) still serves" in said
    assert "weft hub stop ends it" in said


# ---- proxies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({}, False),
        ({"NO_PROXY": "hub.example.org"}, True),
        ({"no_proxy": "hub.example.org"}, True),
        ({"NO_PROXY": "hub.example.org", "no_proxy": " near.example.org, "}, True),
        ({"NO_PROXY": "*"}, True),
    ],
)
def test_no_proxy_stands_between_processes_of_one_machine(given, other, tmp_path, monkeypatch):
    """Whether one stands between a site and its hub is as the environment says; Python's own reading of it decides."""
    for key in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {**given, "HTTPS_PROXY": "http://proxy.example.org:3128"}.items():
        monkeypatch.setenv(key, value)
    env = programs.surroundings(tmp_path)
    assert env["HTTPS_PROXY"] == "http://proxy.example.org:3128"
    for key in ("no_proxy", "NO_PROXY"):
        names = {"no": env[key]}
        assert all(proxy_bypass_environment(host, names) for host in ("127.0.0.1", "127.0.0.1:9092", "localhost"))
        assert bool(proxy_bypass_environment("hub.example.org", names)) == other


# ---- what a site remembers of runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["manifest", "state"])
def test_one_damaged_run_does_not_hide_the_others(site, what, capsys):
    answer(site, FIRST, 3, "begin", "train", "finish")
    answer(site, OTHER, 4, "begin", "train")
    manifest = site / "state" / FIRST / "manifest.json"
    state = manifest.with_name(json.loads(manifest.read_text())["states"]["1"]["file"][0])
    path = {"manifest": manifest, "state": state}[what]
    path.write_text('{"half')
    said = status(site, capsys)
    assert f"run {FIRST}: its memory is damaged" in said
    assert str(path) in said
    assert "run again in a new folder" not in said  # that is for the hub
    assert f"run {OTHER}: 0 tasks learned, 1 answer" in said
    cli_site.status_command(site, as_json=True)
    runs = {run["id"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert (bool(runs[FIRST]["damage"]), runs[OTHER]["damage"]) == (True, "")
    with pytest.raises(WeftError, match=f"whether {FIRST} has begun the task is not known: its memory is damaged"):
        remembered.who_began(site, 0)


def test_no_new_run_begins_while_a_task_is_being_removed(site):
    """It has no folder yet that could be locked."""
    begins = threading.Thread(target=answer, args=(site, FIRST, 3, "begin", "train"))
    with remembered.still(site):
        begins.start()
        time.sleep(1.0)
        assert not (site / "state" / FIRST / "manifest.json").exists()
        assert not list((site / "state" / FIRST).glob("client-*"))
        assert begins.is_alive()
    begins.join()
    assert (site / "state" / FIRST / "manifest.json").exists()


def test_a_run_that_is_at_work_keeps_nobody_else_out(site):
    """Another request of the same run waits for it; runs beside it do not."""
    answer(site, FIRST, 3, "begin", "train")
    waits = threading.Thread(target=answer, args=(site, FIRST, 3, "train"))
    with filelock.FileLock(site / "state" / FIRST / ".lock"):
        waits.start()
        answer(site, OTHER, 4, "begin", "train")
        assert waits.is_alive()
    waits.join()
    assert [run.id for run in remembered.known(site)] == [FIRST, OTHER]


def test_tasks_are_changed_by_one_command_at_a_time(site, tmp_path):
    with (
        remembered.one_by_one(site),
        pytest.raises(WeftError, match="another command changes the site's tasks"),
    ):
        cli_site.add_command("lungs", tmp_path, 16, site)
    with remembered.one_by_one(site), pytest.raises(WeftError, match="another command changes"):
        cli_site.remove_command("lungs", site)
