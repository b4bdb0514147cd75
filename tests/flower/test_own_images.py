"""Sites with their own images: checked, announced, waited for; the A of a site that leaves is removed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from federation import WEFT, Federation, events, outcome, wait_until
from PIL import Image
from test_many_machines_page import blocks

import weft
from weft.runs.folder import read_rows


def draw(folder: Path, seed: int) -> Path:
    """Two classes that differ in brightness."""
    rng = np.random.default_rng(seed)
    for place, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for count in range(20):
            pixels = rng.integers(120 * place, 120 * place + 100, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{count}.png")
    return folder


def test_own_images_waiting_and_leaving(federation: Federation, tmp_path: Path) -> None:
    for seed, name in enumerate(federation.sites):
        data = str(draw(tmp_path / name, seed))
        assert "it can be a task" in federation.weft("site", "check", data)
        federation.weft("site", "task", "add", "--name", "first", "--data", data, "--folder", name)
        if name != "cleo":
            federation.weft("site", "task", "add", "--name", "second", "--data", data, "--folder", name)
    (plan,) = blocks("toml")
    (federation.folder / "own.toml").write_text(plan, encoding="utf-8")
    words = ["clients=3", "tasks=2", "rounds_per_task=1", "network=mlp", "learning_rate=3e-3", "metrics=recall"]
    command = federation.start("own", [*WEFT, "hub", "run", "own.toml", *words, "--out", "own"])
    run = federation.folder / "own"

    def waits() -> bool:
        return (run / "journal.jsonl").exists() and "waiting" in [event["event"] for event in events(run)]

    wait_until(lambda: waits() or command.poll() is not None, 240)
    assert command.poll() is None, federation.log("own")
    assert [event["site"] for event in events(run) if event["event"] == "waiting"] == ["cleo"]
    wait_until(lambda: "waiting for cleo: it has no task 1 yet" in federation.log("own"), 20)
    assert "waiting for cleo: it has no task 1 yet" in federation.weft("hub", "status")
    assert "A 2.0" in outcome(run)
    federation.weft("site", "leave", "--folder", "cleo")
    assert command.wait(120) == 0, federation.log("own")
    assert federation.log("own").count("waiting for cleo: it has no task") == 1
    assert [event["site"] for event in events(run) if event["event"] == "left"] == ["cleo"]
    assert "incident" not in [event["event"] for event in events(run)]
    assert json.loads(federation.weft("site", "status", "--folder", "cleo", "--json"))["leave_notices"]
    assert "weft hub remove cleo" in federation.weft("hub", "status")
    assert [key for key in outcome(run) if key.startswith("A ")] == ["A 0.0", "A 0.1", "A 1.0", "A 1.1"]
    result = weft.Result(run)
    assert result.accuracy > 0.9
    output = federation.weft(
        "site", "export", "own", "--format", "safetensors", "--out", "ada.safetensors", "--folder", "ada"
    )
    assert "first (dark, light)" in output
    (run_id,) = re.findall(r"at sites: (own-\w{12})", federation.log("own"))
    assert f"run {run_id}: finished tasks: 2" in output
    assert "weft site export at the site" in federation.weft("export", "own", code=2)
    assert {row[4] for row in read_rows(run, "metrics.csv")} == {"class 0", "class 1"}
    contents = (run / "contents.json").read_text() + (run / "journal.jsonl").read_text()
    assert "dark" not in contents
    assert "second" not in contents.replace("seconds", "")


def test_a_folder_that_cannot_be_a_task(federation: Federation, tmp_path: Path) -> None:
    assert "error" in federation.weft("site", "check", str(tmp_path), code=2)
    words = ["site", "task", "add", "--name", "bad", "--data", str(tmp_path), "--folder", "ada"]
    assert "has no images" in federation.weft(*words, code=2)
