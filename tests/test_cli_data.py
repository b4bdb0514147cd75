"""`weft data` and `weft show SCENARIO` as a person meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_helpers import assert_one_line, assert_readable, copy
from data_helpers import encoded, random_images
from PIL import Image

from weft import scenarios
from weft.data.sources import SOURCES

pytest_plugins = ["cli_helpers", "data_helpers"]


@pytest.mark.parametrize("name", ["list", "get", "verify", "path"])
def test_help(command, name):
    assert name in command("data", "--help").out
    outcome = command("data", name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    assert "--data-dir" in outcome.out


def test_list(command, small_cache, tmp_path):
    outcome = command("data", "list", "--data-dir", small_cache)
    assert (outcome.code, outcome.err) == (0, "")
    for name in SOURCES:
        assert re.search(rf"\b{name}\b.*yes", outcome.out)
    assert str(small_cache) in outcome.out
    listed = json.loads(command("data", "list", "--json", WEFT_DATA=str(tmp_path)).out)
    assert [entry["name"] for entry in listed] == list(SOURCES)
    assert {entry["cached"] for entry in listed} == {"no"}
    files = [file for entry in listed for file in entry["files"]]
    assert {file["checksum"].split()[0] for file in files} == {"published", "none"}


def test_path(command, tmp_path):
    assert command("data", "path", WEFT_DATA=str(tmp_path)).out == f"{tmp_path}\n"
    other = command("data", "path", "--json", "--data-dir", tmp_path / "other", WEFT_DATA=str(tmp_path)).out
    assert json.loads(other) == {"folder": str(tmp_path / "other"), "cached": []}


def test_verify(command, tmp_path, small_cache):
    folder = copy(small_cache, tmp_path / "cache")
    assert command("data", "verify", "--data-dir", folder).out.count("valid") == 8
    blob = bytearray((folder / "svhn.npz").read_bytes())
    blob[4000] ^= 1
    (folder / "svhn.npz").write_bytes(blob)
    assert command("data", "verify", "mnist", "notmnist", "--data-dir", folder).out == "mnist: valid\nnotmnist: valid\n"
    outcome = command("data", "verify", "--data-dir", folder)
    assert_one_line(outcome._replace(out=""), "svhn.npz", "weft data get svhn --force")
    listed = command("data", "verify", "--json", "--data-dir", folder)
    assert listed.code == 2
    assert [entry["name"] for entry in json.loads(listed.out) if not entry["valid"]] == ["svhn"]
    assert_one_line(command("data", "verify", "--data-dir", tmp_path / "none"), "none", "weft data get")
    assert_one_line(command("data", "verify", "mnits", "--data-dir", folder), "did you mean mnist?")


def test_a_cache_that_is_no_folder(command, tmp_path):
    (tmp_path / "file").touch()
    for words in (["data", "list"], ["data", "get", "mnist"], ["show", "noniid-35"]):
        assert_one_line(command(*words, WEFT_DATA=str(tmp_path / "file")), "file is not a folder", "WEFT_DATA")


def test_faces_of_ones_own(command, tmp_path):
    for person in ("Ann", "Bob"):
        (tmp_path / "faces" / person).mkdir(parents=True)
        for number in range(3):
            blob = encoded(random_images(1, 40, 40, 3)[0], "JPEG")
            (tmp_path / "faces" / person / f"{number}.jpg").write_bytes(blob)
    words = ("data", "get", "facescrub", "--from", tmp_path / "faces", "--data-dir", tmp_path / "cache")
    outcome = command(*words)
    assert outcome.code == 0, outcome
    assert "facescrub: 6 images" in outcome.out
    assert "2 people" in outcome.out
    assert "--force" in command(*words).out
    assert "6 images" in command(*words, "--force").out


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in scenarios.SCENARIOS if name != "folders"])  # that needs a folder
def test_show_a_scenario(command, small_cache, name):
    outcome = command("show", name, "--data-dir", small_cache)
    assert (outcome.code, outcome.err) == (0, "")
    assert_readable(outcome.out)
    clients = 2 if name == "interference" else 5
    assert f"{name}: {clients} clients" in outcome.out
    assert ("the first 3 clients are shown" in outcome.out) == (name == "tasks-20")
    found = json.loads(command("show", name, "seed=1", "--json", "--data-dir", small_cache).out)
    assert len(found["sequences"]) == found["clients"] == clients
    assert set(found["sequences"][0][0]) == {"name", "dataset", "classes", "sizes"}


@pytest.mark.slow
def test_a_picture_of_samples(command, tmp_path):
    picture = tmp_path / "glyphs.png"
    outcome = command("show", "glyphs", "clients=2", "tasks=3", "--picture", picture)
    assert outcome.code == 0, outcome
    assert outcome.out.splitlines()[-1] == str(picture)
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert image.width > 3 * 5 * 32
        assert len(image.getcolors(1 << 20)) > 1000
    assert_one_line(command("show", "glyphs", "tasks=1", "--picture", tmp_path / "no" / "a.png"), "cannot be written")


def test_a_folder_comes_before_a_scenario_of_its_name(command, tmp_path, finished):
    copy(finished, tmp_path / "glyphs")
    assert "bytes sent" in command("show", "glyphs", cwd=tmp_path).out
    Path(tmp_path / "noniid-35").mkdir()
    assert_one_line(command("show", "noniid-35", cwd=tmp_path), "noniid-35 is not a run folder")


def test_all_that_is_named_is_tried_and_each_failure_is_a_line(command, tmp_path, small_cache):
    """FaceScrub has no public source, with or without a network."""
    folder = copy(small_cache, tmp_path / "cache")
    (folder / "facescrub.npz").unlink()
    outcome = command("data", "get", "facescrub", "mnist", "--data-dir", folder)
    assert "mnist" in outcome.out
    assert_one_line(outcome._replace(out=""), "facescrub has no public source")
    shown = command("show", "noniid-50", "--data-dir", folder)
    assert_one_line(shown, "facescrub.npz", "scenario=noniid-35 tasks=7", "weft data get facescrub --from")
