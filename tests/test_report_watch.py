"""`weft watch`: the status of a run that waits, works, was killed or is finished; and which requests are accepted."""

from __future__ import annotations

import http.client
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import ANSWERS, TINY, assert_one_line, copy, tiny, until
from report_helpers import data_of

import weft
from weft.files import is_held
from weft.report.reading import Reader
from weft.report.watch import Server, Watcher, rounds_planned, status, time_left
from weft.runs.folder import RunFolder

pytest_plugins = ["cli_helpers"]


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    with Server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: Server, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def updates(server: Server, since: str = "") -> dict[str, Any]:
    code, body, _ = get(server, f"/updates?since={since}")
    assert code == 200
    return dict(json.loads(body))


def status_of(content: dict[str, Any]) -> str:
    return str(content["html"]["status"])


# ---- the status ------------------------------------------------------------------------------------------------------


def test_a_folder_that_does_not_exist_or_is_empty_yet(tmp_path, finished):
    assert "holds no run yet" in status_of(Watcher(tmp_path).content())
    watcher = Watcher(tmp_path / "later")
    assert "does not exist yet" in status_of(watcher.content())
    assert "Nothing to show yet" in watcher.page()
    copy(finished, tmp_path / "later")
    assert "The run is finished" in status_of(watcher.content())


def test_a_killed_run_differs_from_one_that_works(stopped):
    run = Reader(stopped).read()
    last = max(item.at for item in run.rounds)
    late = status(stopped, [run], last + 3600)
    assert late["kind"] == "stopped"
    assert "Nothing has been written for 1 h 0 min" in late["text"]
    assert f"weft resume {stopped}" in late["text"]
    assert (late["done"], late["total"]) == (len(run.rounds), ANSWERS)
    times = [item.at for item in run.rounds]
    pace = (max(times) - min(times)) / (len(times) - 1)
    assert time_left(run) == pytest.approx(pace * (ANSWERS - len(times)))


def test_a_run_that_holds_its_lock_is_working(stopped, tmp_path):
    folder = copy(stopped, tmp_path / "run")
    assert is_held(folder / ".lock") is False
    record = RunFolder.open(folder)
    try:
        run = Reader(folder).read()
        assert run.held
        found = status(folder, [run], time.time() + 3600)
    finally:
        record.close()
    assert found["kind"] == "running"
    assert re.search(r"Running: task 1 of 2, round . of 2; \d+ of 12 client rounds done, about .* left", found["text"])


def test_clients_that_are_not_selected_are_not_waited_for(tmp_path):
    run = Reader(weft.run(tiny(clients_per_round=2), tmp_path / "run").folder).read()
    assert rounds_planned(run) == len(run.rounds) == 2 * TINY["tasks"] * TINY["rounds_per_task"]


def test_a_half_written_line_is_waited_for(stopped, tmp_path):
    folder = copy(stopped, tmp_path / "run")
    watcher = Watcher(folder)
    before = watcher.content()
    for name, half in (("journal.jsonl", '{"at": 1'), ("accuracy.csv", "0,1"), ("ledger.csv", "c2s,0,1")):
        with (folder / name).open("a") as file:
            file.write(half)
    fresh = Watcher(folder).content()
    assert fresh["figures"] == before["figures"]


def test_a_damaged_folder_is_named_and_watched_on(finished, tmp_path):
    folder = copy(finished, tmp_path / "run")
    table = folder / "accuracy.csv"
    whole = table.read_text()
    table.write_text(whole + "x,y\n")
    watcher = Watcher(folder)
    assert "damaged" in status_of(watcher.content())
    table.write_text(whole)
    watcher._signature, watcher._cost = [], 0.0
    assert "The run is finished" in status_of(watcher.content())


# ---- by http ---------------------------------------------------------------------------------------------------------


def test_the_page_and_its_updates(finished):
    with serving(finished) as server:
        code, text, headers = get(server, "/")
        assert code == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert 'data-live="yes"' in text
        assert "connect-src 'self'" in text
        content = updates(server)
        assert content["over"]
        assert content["figures"] == data_of(text)["figures"]
        assert get(server, f"/updates?since={content['version']}")[:2] == (204, "")
        assert get(server, "/plan.toml")[0] == 404
        assert get(server, "/../plan.toml")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_name_is_rejected(finished, host):
    """Another page may point its name at this machine: its requests then carry that name."""
    with serving(finished) as server:
        code, body, _ = get(server, "/updates", host.format(port=server.server_port))
        assert code == 403
        assert "figures" not in body
        assert get(server, "/", f"localhost:{server.server_port}")[0] == 200


def test_it_is_served_on_this_machine_alone_and_a_taken_port_is_one_line(finished, command):
    with serving(finished) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.url == f"http://127.0.0.1:{server.server_port}/"
        done = command("watch", finished, "--port", str(server.server_port))
        assert_one_line(done, f"port {server.server_port} cannot be used", "--port")


def test_the_command_says_where_and_ends_with_ctrl_c(command, finished):
    running = command.start("watch", finished, "--port", "0")
    line = until(lambda: running._out.exists() and running._out.read_text())
    assert line.startswith("http://127.0.0.1:")
    running.send(signal.SIGINT)
    done = running.wait()
    assert done.code == 0
    assert "the run continues" in done.err


@pytest.mark.slow
def test_updates_of_a_run_that_is_killed_and_resumed(command, plan_file, tmp_path):
    folder = tmp_path / "run"
    words = ("run", plan_file, "rounds_per_task=15", "scenario.train=200")
    with serving(folder) as server:
        assert "does not exist yet" in status_of(updates(server))
        running = command.start(*words, "--out", folder, "--workers", "1", "--save-every", "0", save_always=True)
        seen = set()

        def rounds_shown() -> int:
            content = updates(server)
            seen.add(re.sub(r"\d+|, .*", "", status_of(content))[:40])
            lines = content["figures"].get("adaptation-rounds", {"traces": []})["traces"]
            return max((len(one["y"]) for one in lines), default=0)

        few = until(rounds_shown, pause=0.1)
        until(lambda: rounds_shown() > few, pause=0.1)  # without a reload of the page
        assert any("Running" in each for each in seen)
        running.kill()
        until(lambda: "weft resume" in status_of(updates(server)), seconds=60, pause=0.3)
        again = command.start("resume", folder, "--workers", "1", "--save-every", "0", save_always=True)
        assert again.wait().code == 0
        content = until(lambda: (found := updates(server))["over"] and found, pause=0.3)
        assert "The run is finished" in status_of(content)
        assert len(content["figures"]["accuracy-after"]["traces"][-1]["y"]) == TINY["tasks"]
