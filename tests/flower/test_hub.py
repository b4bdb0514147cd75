"""What a hub shows and watches, without processes: its folder is real, what Flower says is not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest
from federation import free_port

import weft
from weft.cli import hub as cli_hub
from weft.errors import WeftError
from weft.files import write_text
from weft.flower import server_app as server
from weft.flower.hub import programs, runs
from weft.flower.hub import supervisor as supervision
from weft.flower.hub.hub import Hub
from weft.flower.hub.site import Site
from weft.flower.hub.waiting import Waiting
from weft.runs.folder import Record, write_manifest

PLAN = {"clients": 2, "tasks": 2, "network": "mlp", "rounds_per_task": 2}


@pytest.fixture
def hub(tmp_path) -> Hub:
    made = Hub.create(tmp_path / "hub", None, free_port())
    write_text(made.folder / "sites.json", '["ada", "ben"]\n')
    return made


@pytest.fixture
def run(tmp_path, hub) -> Path:
    folder: Path = tmp_path / "run"
    Record.create(folder, weft.Plan.merge(PLAN)).close()
    hub.note(folder)
    return folder


@pytest.fixture
def up(hub):
    """A supervisor holds the folder; its SuperLink has died, and real `flwr` finds nobody on its port."""
    words = {"supervisor": 7, "processes": {"superlink": {"pid": 8, "starts": 3}}}
    write_text(hub.folder / supervision.FILE, json.dumps(words))
    with supervision.hold(hub.folder):
        yield hub


def test_whoever_watches_a_run_does_not_keep_its_server_app_from_working(hub, run, monkeypatch):
    monkeypatch.setattr(runs, "LOOK", 0.0)
    monkeypatch.setattr(runs, "ASK", 1e9)
    watcher = threading.Thread(target=runs.watch, args=(hub, run, "1", Waiting(run), print))
    watcher.start()
    try:
        for _ in range(300):  # each is refused if somebody else holds the lock
            with contextlib.closing(Record.open(run)) as record:
                record.journal("resumed")
        assert watcher.is_alive()
    finally:
        write_text(run / "summary.json", "{}\n")
        watcher.join()
    assert (run / "journal.jsonl").read_text().count('"resumed"') == 300


# ---- a server app that dies ------------------------------------------------------------------------------------------


@pytest.fixture
def dying(hub, run, monkeypatch):
    """Runs of which each ends as the next of these functions does; what `weft hub run` says meanwhile."""
    write_text(run / "sites.json", '{"names": ["ada", "ben"], "run": "run-1"}\n')
    monkeypatch.setattr(runs, "at_work", lambda *_: "")
    monkeypatch.setattr(runs, "wait_for_sites", lambda *_: {"ada", "ben"})
    monkeypatch.setattr(runs, "watch", lambda *_: None)

    def work(*fates: object) -> tuple[list[str], int]:
        left, said = list(fates), []

        def submit(*_: object) -> str:
            fate = left.pop(0)
            monkeypatch.setattr(server, "resume", fate)
            with contextlib.suppress(BaseException):
                server.work(None, run)  # type: ignore[arg-type]
            return "1"

        monkeypatch.setattr(runs, "submit", submit)
        with pytest.raises((WeftError, IndexError)) as stopped:
            runs.work(hub, run, said.append, 0.0)
        return [*said, str(stopped.value)], len(fates) - len(left)

    return work


def fails(error: BaseException):
    def fate(*_: object, **__: object) -> None:
        raise error

    return fate


def test_why_a_server_app_died_is_said_and_it_is_not_started_for_ever(dying, run):
    said, starts = dying(*[fails(IndexError("list index out of range"))] * 20)
    assert starts == runs.SAME
    deaths = [line for line in said if line.startswith("the server app died:")]
    assert deaths == [
        f"the server app died: IndexError: list index out of range ({run / 'server.log'} has all of it); "
        "it is started again from its last checkpoint"
    ] * (runs.SAME - 1)
    assert said[-1].startswith("the server app died 3 times after round 0: IndexError: list index out of range")
    log = (run / "server.log").read_text()
    assert log.count("Traceback") == runs.SAME
    assert "in fate" in log


def test_other_causes_and_kills_are_started_again(dying):
    causes = [fails(ValueError(str(count))) for count in range(5)]
    said, starts = dying(*causes, *[fails(SystemExit(9))] * 5)
    assert starts == 10
    assert said[-2].startswith("the server app died without a word, as if it was killed; it is started again")


# ---- sites that are not there ----------------------------------------------------------------------------------------


@pytest.fixture
def asked(up, run, monkeypatch):
    """`weft hub run` for the folder, with these sites online: what it said, and without whom the server app began."""
    write_text(run / "sites.json", '{"names": ["ada", "ben"], "run": "run-1"}\n')
    monkeypatch.setattr(runs, "at_work", lambda *_: "")

    def work(*online: str) -> tuple[list[str], list[str] | None]:
        said: list[str] = []
        monkeypatch.setattr(Hub, "online", lambda _: list(online))
        monkeypatch.setattr(runs, "submit", lambda *_: write_text(run / "problem.txt", "the end\n") or "1")
        monkeypatch.setattr(runs, "watch", lambda *_: None)
        with pytest.raises(WeftError) as end:
            runs.work(up, run, said.append, 0.0)
        began = str(end.value) == "the end"
        return [*said, str(end.value)], runs.absent(run) if began else None

    return work


def checkpoint(run: Path, left: list[int]) -> None:
    write_manifest(run / "checkpoints", {"progress": {"round": 3}, "clock": {"left": left}})


def test_a_new_run_waits_for_all_and_says_what_a_hub_can_do(asked, run):
    said, absent = asked("ada")
    assert absent is None
    assert f"not there after 0 s: ben; ask there for weft site start, then weft hub run {run} goes on" in said[-1]
    assert "weft hub remove NAME" in said[-1]


@pytest.mark.parametrize("how", [{"deadline": 60.0}, {"quorum": 1}], ids=str)
def test_with_a_deadline_or_a_quorum_it_begins_with_those_who_are_there(asked, run, how):
    write_text(run / "plan.toml", weft.Plan.merge({**PLAN, **how}).toml())
    said, absent = asked("ada")
    assert absent == ["ben"]
    assert any(line.startswith("WARNING: not there after 0 s: ben; the run goes on without") for line in said)


def test_a_run_that_began_goes_on_without_a_site_that_is_lost(asked, run):
    checkpoint(run, left=[])
    said, absent = asked("ada")
    assert absent == ["ben"]
    assert any(line.startswith("WARNING") for line in said)


def test_nobody_waits_for_a_site_that_has_left_the_run(asked, run):
    checkpoint(run, left=[1])
    said, absent = asked("ada")
    assert absent == ["ben"]
    assert not any("waiting" in line or "WARNING" in line for line in said)


def test_nobody_waits_for_a_site_that_is_no_member_any_more(asked, hub):
    write_text(hub.folder / "sites.json", '["ada"]\n')
    said, absent = asked("ada")
    assert absent == ["ben"]
    assert not any("waiting" in line or "WARNING" in line for line in said)


def test_a_site_that_is_removed_is_out_of_the_runs_that_go_on(asked, hub, run):
    """Also if one of its name is invited later: that is another one."""
    runs.note_removed(run, "ben")
    runs.note_removed(run, "nobody")
    runs.note_removed(run.parent / "no-run", "ben")
    (run.parent / "damaged").mkdir()
    write_text(run.parent / "damaged" / "sites.json", '{"names": ["ben"], "run": "run-2"}\n')
    runs.note_removed(run.parent / "damaged", "ben")
    assert runs.removed(run) == ["ben"]
    said, absent = asked("ada", "ben")
    assert absent == ["ben"]
    assert not any("waiting" in line or "WARNING" in line for line in said)


def test_with_nobody_there_it_does_not_go_on(asked, run):
    checkpoint(run, left=[1])
    said, absent = asked()
    assert absent is None
    assert "not there after 0 s: ada" in said[-1]
    checkpoint(run, left=[0, 1])
    assert "every site of" in asked("ada")[0][-1]


# ---- weft hub status -------------------------------------------------------------------------------------------------


def status(hub: Hub, capsys: pytest.CaptureFixture[str], as_json: bool = False) -> str:
    cli_hub.status_command(hub.folder, as_json)
    return capsys.readouterr().out


def test_status_is_shown_while_the_superlink_is_down(up, run, capsys):
    said = status(up, capsys)
    assert "superlink: process 8, started 3 times" in said
    assert "which sites are there is not known" in said
    assert "client 1: ben, not known whether it is there" in said
    assert f"stopped; weft hub run {os.path.relpath(run)} goes on, 0 rounds done, no incidents" in said


def test_a_run_whose_sites_are_waited_for_is_not_stopped(up, run, capsys, monkeypatch):
    said = []

    def wait(*_: object) -> set[str]:
        said.append(status(up, capsys))
        with pytest.raises(WeftError, match="another weft hub run waits for the sites"):
            runs.work(up, run, print, 0.0)
        raise WeftError("not there")

    monkeypatch.setattr(runs, "wait_for_sites", wait)
    with pytest.raises(WeftError, match="not there"):
        runs.work(up, run, print, 0.0)
    assert "weft hub run waits until its sites are there, 0 rounds done, no incidents" in said[0]
    assert "stopped; weft hub run" in status(up, capsys)


def test_status_as_json_is_shown_too(up, run, capsys):
    said = json.loads(status(up, capsys, as_json=True))
    assert [site["there"] for site in said["sites"]] == [None, None]
    assert said["processes"]["processes"]["superlink"]["starts"] == 3


def test_status_shows_a_run_whose_checkpoint_is_damaged(hub, run, capsys):
    (run / "checkpoints" / "manifest.json").write_text("{")
    assert "the checkpoint is corrupt" in status(hub, capsys)


def test_flower_that_says_nothing_is_one_line(hub, monkeypatch):
    monkeypatch.setattr(programs, "PATIENCE", 0.01)
    with pytest.raises(WeftError, match="flwr supernode list said nothing"):
        hub.online()


# ---- a site without a task -------------------------------------------------------------------------------------------

WAITS = {"client": 1, "site": "ben", "reason": "it has no task 1 yet (weft site task add)"}


def told(run: Path, *events: tuple[str, dict[str, object]]) -> None:
    with contextlib.closing(Record.open(run)) as record:
        for event, facts in events:
            record.journal(event, **facts)


def test_a_run_that_waits_for_a_task_says_so_once(hub, run, monkeypatch):
    """For each site and task: the server app may die meanwhile and write it again."""
    monkeypatch.setattr(runs, "LOOK", 0.0)
    said: list[str] = []
    waiting = Waiting(run)
    turns = iter([("waiting", WAITS), ("waiting", WAITS), ("reply", {"client": 0}), ("waiting", WAITS)])

    def is_taken(_: Path) -> bool:
        for event in turns:
            told(run, event)
            return True
        write_text(run / "summary.json", "{}\n")
        return True

    monkeypatch.setattr(runs, "is_taken", is_taken)
    runs.watch(hub, run, "1", waiting, said.append)
    assert said == ["waiting for ben: it has no task 1 yet (weft site task add)"]
    told(run, ("reply", {"client": 1}), ("waiting", {**WAITS, "reason": "it has no task 2 yet"}))
    assert waiting.new() == ["waiting for ben: it has no task 2 yet"]


def test_whoever_looks_later_hears_of_what_is_waited_for_now(run):
    told(run, ("waiting", {**WAITS, "client": 0, "site": "ada"}), ("reply", {"client": 0}), ("waiting", WAITS))
    assert Waiting(run).new() == ["waiting for ben: it has no task 1 yet (weft site task add)"]
    told(run, ("left", {"client": 1, "site": "ben"}))
    assert Waiting(run).new() == []


def test_progress_is_told_task_by_task(run):
    waiting = Waiting(run)
    told(run, ("tested", {"client": 0, "task": 0, "accuracy": [0.5]}))
    assert waiting.new() == ["task 0: learned by 1 site"]
    told(run, ("tested", {"client": 1, "task": 0, "accuracy": [0.5]}))
    assert waiting.new() == ["task 0: learned by 2 sites"]
    assert waiting.new() == []


def test_a_line_that_is_being_written_is_read_when_it_is_whole(run):
    waiting, line = Waiting(run), json.dumps({"event": "waiting", **WAITS}) + "\n"
    for part in (line[:9], line[9:]):
        assert waiting.now() == []
        with (run / "journal.jsonl").open("a") as file:
            file.write(part)
    assert len(waiting.now()) == 1


def test_a_sites_words_do_nothing_to_a_terminal(run):
    told(run, ("waiting", {**WAITS, "reason": "\x1b]0;title\x07\r"}))
    assert Waiting(run).now() == ["ben:  ]0;title  "]


def test_status_names_who_is_waited_for(hub, run, capsys):
    with filelock.FileLock(run / runs.WATCHED):
        assert "waiting for" not in status(hub, capsys)
        told(run, ("waiting", WAITS))
        assert "waiting for ben: it has no task 1 yet" in status(hub, capsys)
        write_text(run / "summary.json", "{}\n")
        assert "waiting for" not in status(hub, capsys)


# ---- a site whose environment was moved ------------------------------------------------------------------------------


def test_a_site_finds_the_programs_of_the_environment_that_starts_it(hub, tmp_path, monkeypatch):
    hub.invite("cleo", tmp_path / "cleo.json")
    site = Site.join(tmp_path / "cleo.json", tmp_path / "cleo")
    link = site.folder / "bin" / "flower-superexec"
    link.unlink(missing_ok=True)
    link.symlink_to("/an/environment/that/was/moved")
    monkeypatch.setattr(supervision.Supervisor, "run", lambda *_: None)
    site.start(print)
    assert link.readlink() == Path(programs.program("flower-superexec"))
    assert link.exists()
    assert (site.folder / "bin" / "flwr-clientapp").stat().st_mode & 0o777 == 0o700


def test_invitations_at_the_same_time_are_all_kept(hub, tmp_path):
    names = [f"site-{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: hub.invite(name, tmp_path / f"{name}.json"), names))
    assert set(names) <= set(hub.sites())


def test_a_hub_whose_port_is_taken_says_so(hub):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        hub.port = other.getsockname()[1]
        with pytest.raises(
            WeftError, match=rf"port {hub.port} of this machine is taken by another program; end that one"
        ):
            hub.start(print)


@pytest.mark.parametrize(
    "change", [{"name": "../../evil"}, {"name": "a\x1b[31m"}, {"hub": "nowhere"}, {"hub": "a b:1"}]
)
def test_an_invitation_with_names_that_are_none(hub, tmp_path, change):
    hub.invite("eva", tmp_path / "eva.json")
    words = json.loads((tmp_path / "eva.json").read_text())
    (tmp_path / "eva.json").write_text(json.dumps(words | change))
    with pytest.raises(WeftError, match="is not an invitation"):
        Site.join(tmp_path / "eva.json", tmp_path / "eva")
    assert not (tmp_path / "eva").exists()
