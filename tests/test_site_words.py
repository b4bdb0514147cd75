"""What `weft site` says, without Flower: a site's folder, and what it remembers of runs, are real."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from weft import cli_site
from weft.engines.flower import leaving
from weft.engines.flower.memory import Memory
from weft.errors import Problem
from weft.hub import remembered, runs
from weft.message import Message, encode
from weft.plan import Plan

TINY = {
    "name": "own",
    "clients": 2,
    "tasks": 2,
    "network": "mlp",
    "rounds_per_task": 1,
    "batch_size": 10,
    "scenario.train": 20,
    "scenario.valid": 10,
    "scenario.test": 10,
}
FIRST, SECOND, OTHER = "study-0aaaaaaaaaaa", "study-0bbbbbbbbbbb", "trial-1ccccccccccc"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """As `weft site join` makes it, without keys."""
    folder: Path = tmp_path / "ada"
    for name in ("state", "logs", "tasks"):
        (folder / name).mkdir(parents=True)
    (folder / "site.json").write_text(json.dumps({"name": "ada", "hub": "127.0.0.1:9092"}))
    (folder / "tasks.json").write_text("[]\n")
    monkeypatch.setattr(cli_site, "check_flower", lambda: None)
    return folder


def answer(site: Path, run: str, day: int, *ops: str, plan: str = "own") -> None:
    """What the client app does, on a day of its own."""
    request = Message("server", "client-1", "0.0.1", ops, 0, 0)
    Memory(site / "state" / run, Plan.merge({**TINY, "name": plan}), 1).answer(encode(request))
    moment = 86400 * day + 3600
    os.utime(site / "state" / run / "manifest.json", (moment, moment))


@pytest.fixture
def three(site) -> Path:
    answer(site, FIRST, 3, "begin", "train", "finish")
    answer(site, SECOND, 5, "begin", "train")
    answer(site, OTHER, 4, "begin", "train")
    return site


def status(site: Path, capsys: pytest.CaptureFixture[str]) -> str:
    cli_site.status_command(site)
    return capsys.readouterr().out


# ---- which run -------------------------------------------------------------------------------------------------------


def test_status_lists_runs_by_id_with_their_day_and_tasks(three, capsys):
    said = status(three, capsys)
    assert f"run {FIRST}: 1 task learned, 1 answer, the last on 1970-01-04 01:00:00 UTC" in said
    assert f"run {SECOND}: 0 tasks learned, 1 answer, the last on 1970-01-06 01:00:00 UTC" in said
    assert said.index(FIRST) < said.index(OTHER) < said.index(SECOND)  # in the order of their last answers
    cli_site.status_command(three, as_json=True)
    told = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["id"], run["tasks"]) for run in told] == [(FIRST, 1), (OTHER, 0), (SECOND, 0)]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (FIRST, FIRST),
        ("study-0a", FIRST),
        ("tri", OTHER),
        ("study", SECOND),  # two of the hub's folders were called so: the latest
        ("own", SECOND),  # all are of a plan of that name
    ],
)
def test_a_run_is_found_by_what_a_person_types(three, typed, meant):
    assert remembered.run_called(typed, remembered.known(three)).id == meant


def test_a_beginning_of_several_is_one_line_that_says_what_to_type(three):
    with pytest.raises(Problem, match=f"say which: {FIRST}, {SECOND}"):
        remembered.run_called("study-0", remembered.known(three))
    with pytest.raises(Problem, match=f"no run nothing here; there are {FIRST}"):
        remembered.run_called("nothing", remembered.known(three))
    with pytest.raises(Problem, match="answered in none yet"):
        remembered.run_called("own", [])


def test_export_says_which_run_it_took(three, tmp_path, capsys):
    cli_site.export_command("study-0a", 0, cli_site.Kind.safetensors, tmp_path / "it.safetensors", three)
    assert f"run {FIRST}" in capsys.readouterr().out
    assert (tmp_path / "it.safetensors").is_file()


def test_sites_know_a_run_by_the_name_of_its_folder():
    names = [runs.name_for_sites(Path("/some/where/my study_2")) for _ in range(2)]
    assert names[0] != names[1]
    assert all(name.startswith("my-study-2-") for name in names)
    assert runs.name_for_sites(Path("/some/where/...")).startswith("run-")


# ---- leaving ---------------------------------------------------------------------------------------------------------


def test_status_says_whether_the_hub_knows_that_a_site_leaves(site, capsys):
    assert "leave" not in status(site, capsys)
    cli_site.leave_command(site)
    assert "until weft site status says that the hub was told" in capsys.readouterr().out
    assert "it leaves, and the hub does not know yet" in status(site, capsys)
    leaving.note(site, FIRST)
    leaving.note(site, FIRST)  # it asked again
    leaving.note(site, OTHER)
    said = status(site, capsys)
    assert "does not know yet" not in said
    assert [line.split()[-1] for line in said.splitlines() if "the hub was told on 2" in line] == [FIRST, OTHER]
    cli_site.leave_command(site)
    assert len(leaving.told(site)) == 2  # to say it again forgets nothing
