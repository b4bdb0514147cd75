"""A hub without processes: its folder is real, Flower's output is not."""

from __future__ import annotations

import contextlib
import datetime
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from federation import TINY, free_port
from site_helpers import journal

import weft
from weft.cli import hub as cli_hub
from weft.errors import WeftError
from weft.files import write_text
from weft.flower import server_app
from weft.flower.hub import keys, programs, runs, supervisor
from weft.flower.hub.hub import Hub
from weft.flower.hub.site import Site
from weft.flower.hub.status import SERVER_LOG, Waiting
from weft.runs.folder import SITES, RunFolder, write_manifest

NO_TASK = {"client": 1, "site": "ben", "reason": "it has no task 1 yet (weft site task add)"}


@pytest.fixture
def hub(tmp_path) -> Hub:
    made = Hub.create(tmp_path / "hub", None, free_port())
    write_text(made.folder / "sites.json", '["ada", "ben"]\n')
    return made


@pytest.fixture
def run(tmp_path, hub) -> Path:
    folder: Path = tmp_path / "run"
    RunFolder.create(folder, weft.Plan.merge(TINY)).close()
    write_text(folder / SITES, '{"names": ["ada", "ben"], "run": "run-1"}\n')
    hub.add_run(folder)
    return folder


@pytest.fixture
def up(hub):
    """A supervisor holds the folder; its SuperLink has died, and the real `flwr` finds nobody on its port."""
    processes = {"supervisor": 7, "processes": {"superlink": {"pid": 8, "starts": 3}}}
    write_text(hub.folder / supervisor.FILE, json.dumps(processes))
    with supervisor.hold(hub.folder):
        yield hub


def status(hub: Hub, capsys: pytest.CaptureFixture[str]) -> str:
    cli_hub.status_command(hub.folder)
    return capsys.readouterr().out


def status_json(hub: Hub, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    cli_hub.status_command(hub.folder, as_json=True)
    return json.loads(capsys.readouterr().out)


# ---- its folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("days_left", "warning"), [(61, ""), (59, "expire in 58 days"), (-2, "expired")])
def test_status_warns_before_certificates_expire(hub, days_left, warning, monkeypatch, capsys):
    end = datetime.datetime.fromisoformat(str(status_json(hub, capsys)["certificates_expire"]))
    assert abs((end - datetime.datetime.now(datetime.UTC)).days - 365 * keys.YEARS) <= 1
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=365 * keys.YEARS - days_left)
    monkeypatch.setattr(cli_hub, "time", SimpleNamespace(time=later.timestamp))
    text = status(hub, capsys)
    assert bool(warning) == ("certificates" in text)
    assert warning in text


def test_status_names_damaged_files_and_shows_the_rest(hub, run, capsys):
    damaged = [hub.folder / "server.pem", run / "checkpoints" / "manifest.json"]
    for path in damaged:
        path.write_text("{")
    text = status(hub, capsys)
    assert all(str(path) in text for path in damaged)
    assert "client 1: ben" in text


def test_simultaneous_invitations_are_all_kept(hub, tmp_path):
    names = [f"site-{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: hub.invite(name, tmp_path / f"{name}.json"), names))
    assert set(names) <= set(hub.sites())


@pytest.mark.parametrize(
    "change", [{"name": "../../evil"}, {"name": "a\x1b[31m"}, {"hub": "nowhere"}, {"hub": "a b:1"}]
)
def test_an_invitation_with_invalid_names_is_rejected(hub, tmp_path, change):
    hub.invite("eva", tmp_path / "eva.json")
    invitation = json.loads((tmp_path / "eva.json").read_text())
    (tmp_path / "eva.json").write_text(json.dumps(invitation | change))
    with pytest.raises(WeftError, match="weft hub invite"):
        Site.join(tmp_path / "eva.json", tmp_path / "eva")
    assert not (tmp_path / "eva").exists()


def test_a_site_uses_the_programs_of_the_environment_that_starts_it(hub, tmp_path, monkeypatch):
    hub.invite("cleo", tmp_path / "cleo.json")
    site = Site.join(tmp_path / "cleo.json", tmp_path / "cleo")
    link = site.folder / "bin" / "flower-superexec"
    link.unlink(missing_ok=True)
    link.symlink_to("/an/environment/that/was/moved")
    monkeypatch.setattr(supervisor.Supervisor, "run", lambda *_: None)
    site.start(print)
    assert link.readlink() == Path(programs.program("flower-superexec"))
    assert link.exists()
    assert (site.folder / "bin" / "flwr-clientapp").stat().st_mode & 0o777 == 0o700


def test_a_taken_port_is_named(hub):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        hub.port = other.getsockname()[1]
        with pytest.raises(WeftError, match=rf"port {hub.port} .*--port"):
            hub.start(print)


# ---- a server app that dies ------------------------------------------------------------------------------------------


def test_watching_a_run_does_not_take_its_lock(hub, run, monkeypatch):
    monkeypatch.setattr(runs, "LOOK", 0.0)
    monkeypatch.setattr(runs, "ASK", 1e9)
    watcher = threading.Thread(target=runs.watch, args=(hub, run, "1", Waiting(run), print))
    watcher.start()
    try:
        for _ in range(300):  # each fails if another process holds the lock
            journal(run, ("resumed", {}))
        assert watcher.is_alive()
    finally:
        write_text(run / "summary.json", "{}\n")
        watcher.join()
    assert (run / "journal.jsonl").read_text().count('"resumed"') == 300


@pytest.fixture
def dying(hub, run, monkeypatch):
    """Run a server app that dies of these errors in turn; the output of `weft hub run`, and the number of starts."""
    monkeypatch.setattr(runs, "active_run", lambda *_: "")
    monkeypatch.setattr(runs, "wait_for_sites", lambda *_: {"ada", "ben"})
    monkeypatch.setattr(runs, "watch", lambda *_: None)

    def work(*errors: BaseException) -> tuple[list[str], int]:
        left, output = list(errors), []

        def submit(*_: object) -> str:
            error = left.pop(0)

            def resume(*_: object, **__: object) -> None:
                raise error

            monkeypatch.setattr(server_app, "resume", resume)
            with contextlib.suppress(BaseException):
                server_app.work(None, run)  # type: ignore[arg-type]
            return "1"

        monkeypatch.setattr(runs, "submit", submit)
        with pytest.raises((WeftError, IndexError)) as stopped:
            runs.work(hub, run, output.append, 0.0)
        return [*output, str(stopped.value)], len(errors) - len(left)

    return work


def test_the_cause_of_a_death_is_shown_and_restarts_are_limited(dying, run):
    output, starts = dying(*[IndexError("list index out of range")] * 20)
    deaths = [line for line in output if "died" in line]
    assert starts == len(deaths) == runs.SAME_CAUSE
    assert all("IndexError: list index" in line and str(run / SERVER_LOG) in line for line in deaths)
    assert "round 0" in deaths[-1]
    log = (run / SERVER_LOG).read_text()
    assert log.count("Traceback") == runs.SAME_CAUSE
    assert "in resume" in log


def test_a_server_app_that_dies_of_other_causes_or_is_killed_is_restarted(dying):
    output, starts = dying(*[ValueError(str(count)) for count in range(5)], *[SystemExit(9)] * 5)
    assert starts == 10
    assert "killed" in output[-2]


# ---- sites that are offline ------------------------------------------------------------------------------------------


@pytest.fixture
def started(up, run, monkeypatch):
    """`weft hub run` with these sites online: its output, and the absent sites if the server app starts."""
    monkeypatch.setattr(runs, "active_run", lambda *_: "")

    def work(*online: str) -> tuple[str, list[str] | None]:
        output: list[str] = []
        monkeypatch.setattr(Hub, "online", lambda _: list(online))
        monkeypatch.setattr(runs, "submit", lambda *_: write_text(run / "error.txt", "the end\n") or "1")
        monkeypatch.setattr(runs, "watch", lambda *_: None)
        with pytest.raises(WeftError) as end:
            runs.work(up, run, output.append, 0.0)
        return "\n".join([*output, str(end.value)]), runs.absent(run) if str(end.value) == "the end" else None

    return work


def checkpoint(run: Path, left: list[int]) -> None:
    write_manifest(run / "checkpoints", {"progress": {"round": 3}, "transit": {"left": left}})


def change_plan(run: Path, **keys: object) -> None:
    write_text(run / "plan.toml", weft.Plan.merge({**TINY, **keys}).toml())


def test_a_new_run_needs_all_sites(started, run):
    output, absent = started("ada")
    assert absent is None
    for part in ("ben", "weft site start", f"run {run}", "weft hub remove"):
        assert part in output


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        (lambda _, run: change_plan(run, deadline=60.0), True),
        (lambda _, run: change_plan(run, quorum=1), True),
        (lambda _, run: checkpoint(run, left=[]), True),
        (lambda _, run: checkpoint(run, left=[1]), False),
        (lambda hub, _: write_text(hub.folder / "sites.json", '["ada"]\n'), False),
    ],
    ids=["deadline", "quorum", "started", "left", "no longer invited"],
)
def test_a_run_starts_without_a_site_that_it_does_not_need(started, hub, run, given, warns):
    given(hub, run)
    output, absent = started("ada")
    assert absent == ["ben"]
    assert ("WARNING" in output) == warns


def test_a_removed_site_is_removed_from_active_runs(started, run):
    """Also if a site of this name is invited later: that is another one."""
    (run.parent / "damaged").mkdir()
    write_text(run.parent / "damaged" / "sites.json", '{"names": ["ben"], "run": "run-2"}\n')
    for folder in (run, run.parent / "no-run", run.parent / "damaged"):
        runs.write_removed(folder, "ben")
    runs.write_removed(run, "nobody")
    assert runs.removed(run) == ["ben"]
    output, absent = started("ada", "ben")
    assert absent == ["ben"]
    assert "WARNING" not in output


def test_a_run_does_not_continue_without_any_site(started, run):
    checkpoint(run, left=[1])
    output, absent = started()
    assert absent is None
    assert "ada" in output
    checkpoint(run, left=[0, 1])
    assert "every site" in started("ada")[0]


# ---- weft hub status -------------------------------------------------------------------------------------------------


def test_status_works_while_the_superlink_is_down(up, run, capsys):
    text = status(up, capsys)
    assert "superlink: process 8, starts: 3" in text
    assert "client 1: ben, unknown" in text
    found = status_json(up, capsys)
    assert [site["online"] for site in found["sites"]] == [None, None]
    assert found["processes"]["processes"]["superlink"]["starts"] == 3
    assert [found["state"] for found in found["runs"]] == ["stopped"]


def test_a_run_that_waits_for_sites_is_not_stopped(up, run, capsys, monkeypatch):
    def wait(*_: object) -> set[str]:
        assert [found["state"] for found in status_json(up, capsys)["runs"]] == ["waiting for sites"]
        with pytest.raises(WeftError, match="another weft hub run"):
            runs.work(up, run, print, 0.0)
        raise WeftError("the end")

    monkeypatch.setattr(runs, "wait_for_sites", wait)
    with pytest.raises(WeftError, match="the end"):
        runs.work(up, run, print, 0.0)
    assert [found["state"] for found in status_json(up, capsys)["runs"]] == ["stopped"]


def test_a_timeout_of_flower_is_an_error(hub, monkeypatch):
    monkeypatch.setattr(programs, "TIMEOUT", 0.01)
    with pytest.raises(WeftError, match="flwr supernode list"):
        hub.online()


# ---- a site without a task -------------------------------------------------------------------------------------------


def test_a_site_without_a_task_is_reported_once(hub, run, monkeypatch):
    """Per site and task: a restarted server app writes the event again."""
    monkeypatch.setattr(runs, "LOOK", 0.0)
    output: list[str] = []
    waiting = Waiting(run)
    turns = iter([("waiting", NO_TASK), ("waiting", NO_TASK), ("reply", {"client": 0}), ("waiting", NO_TASK)])

    def is_taken(_: Path) -> bool:
        for event in turns:
            journal(run, event)
            return True
        write_text(run / "summary.json", "{}\n")
        return True

    monkeypatch.setattr(runs, "is_taken", is_taken)
    runs.watch(hub, run, "1", waiting, output.append)
    assert output == ["waiting for ben: it has no task 1 yet (weft site task add)"]
    journal(run, ("reply", {"client": 1}), ("waiting", {**NO_TASK, "reason": "it has no task 2 yet"}))
    assert waiting.new() == ["waiting for ben: it has no task 2 yet"]


def test_what_is_waiting_now_and_progress_by_task(run):
    waiting = Waiting(run)
    journal(run, ("waiting", {**NO_TASK, "client": 0, "site": "ada"}), ("reply", {"client": 0}))
    assert waiting.now() == []
    journal(run, ("waiting", {**NO_TASK, "reason": "\x1b]0;title\x07\r"}))
    assert waiting.now() == ["ben:  ]0;title  "]  # no control characters of a site reach the terminal
    journal(run, ("left", {"client": 1, "site": "ben"}))
    for client in (0, 1):
        journal(run, ("tested", {"client": client, "task": 0, "accuracy": [0.5]}))
        assert waiting.new() == [f"task 0: sites that have finished: {client + 1}"]
    assert waiting.new() == []


def test_a_half_written_line_is_read_when_it_is_complete(run):
    waiting, line = Waiting(run), json.dumps({"at": 1.0, "event": "waiting", **NO_TASK}) + "\n"
    for part in (line[:9], line[9:]):
        assert waiting.now() == []
        with (run / "journal.jsonl").open("a") as file:
            file.write(part)
    assert len(waiting.now()) == 1
