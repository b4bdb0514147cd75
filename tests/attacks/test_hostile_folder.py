"""A received folder: runs that name code, images that are programs, tables and plans of random bytes."""

from __future__ import annotations

import io
import random
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import cli_helpers
import pytest
from PIL import Image

import weft
from weft.cli import show, tools
from weft.data import cache, images
from weft.errors import WeftError
from weft.flower.site_policy import read_plan
from weft.plan import Plan, named_code
from weft.report.reading import read_runs
from weft.runs.folder import accuracy_matrices, read_measures, read_summary

pytestmark = pytest.mark.attack

# ---- 6: code in a run folder -----------------------------------------------------------------------------------------


@pytest.fixture
def evil(tmp_path, monkeypatch) -> Path:
    """A finished run whose plan was changed to name a file that leaves a mark when it is loaded."""
    monkeypatch.chdir(tmp_path)
    folder = Path(weft.run(cli_helpers.tiny(tasks=1, rounds_per_task=1), tmp_path / "run").folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    text = (folder / "plan.toml").read_text()
    name = Plan.load(folder).method
    assert f'name = "{name}"' in text
    (folder / "plan.toml").write_text(text.replace(f'name = "{name}"', f'name = "{folder / "evil.py"}:Evil"'))
    return folder


def test_showing_comparing_and_reporting_a_folder_runs_no_code_of_it(evil, tmp_path):
    assert named_code(evil / "plan.toml") == [f"{evil / 'evil.py'}:Evil"]
    assert read_summary(evil) is not None
    show.show_command(evil)
    show.compare_command([evil])
    assert read_runs([evil])
    assert not (tmp_path / "ran").exists()


def test_exporting_a_folder_with_code_needs_trust(evil, tmp_path):
    with pytest.raises(WeftError, match="--trust"):
        tools.export_command(evil, file=tmp_path / "model.safetensors", kind=tools.ModelFormat.safetensors)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(WeftError):  # trusted, its code runs, and is no method
        tools.export_command(evil, file=tmp_path / "m.safetensors", kind=tools.ModelFormat.safetensors, trust=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("line", ['loss = "a.py:L"', 'metrics = "auroc,os:path"', '[network]\nname = "a.py:N"'])
def test_code_is_found_in_any_key(tmp_path, line):
    (tmp_path / "plan.toml").write_text(line + "\n")
    assert len(named_code(tmp_path / "plan.toml")) == 1


# ---- 7: images -------------------------------------------------------------------------------------------------------

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n(x) print showpage\n%%EOF\n"


@pytest.mark.parametrize(
    "blob", [EPS, b"\xc5\xd0\xd3\xc6" + EPS, b"%PDF-1.4\n", b"<svg/>", b"II*\x00", b"P6", b"GIF89a", b""]
)
def test_only_known_decoders_run(tmp_path, monkeypatch, blob):
    def started(*arguments: object, **_: object) -> None:
        raise AssertionError(f"a program was started: {arguments}")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(subprocess, "check_call", started)
    with pytest.raises(images.ImageError):
        images.decode(blob, 32, 16)
    (tmp_path / "a.png").write_bytes(blob)
    with pytest.raises(WeftError, match="cannot be read"):
        images.read_image(tmp_path / "a.png", 32, 16)


# ---- 11: who may read ------------------------------------------------------------------------------------------------


def test_packed_images_and_runs_are_for_their_owner(tmp_path):
    import numpy as np

    cache.write(tmp_path, "tasks/0", {"x": np.zeros(3)}, private=True)
    assert (tmp_path / "tasks" / "0.npz").stat().st_mode & 0o077 == 0
    folder = Path(weft.run(cli_helpers.tiny(tasks=1, rounds_per_task=1), tmp_path / "run").folder)
    assert folder.stat().st_mode & 0o077 == 0


# ---- random damage ---------------------------------------------------------------------------------------------------

QUICK, LONG = 500, 100_000
GROWTH = 200 << 10  # kilobytes


def damaged(blob: bytes, dice: random.Random) -> bytes:
    kind, place = dice.randrange(5), dice.randrange(len(blob))
    if kind == 0:
        return blob[:place]
    if kind == 1:
        return blob[:place] + dice.randbytes(dice.randrange(1, 9)) + blob[place:]
    if kind == 2:
        return blob[:place] + blob[place + dice.randrange(1, 40) :]
    if kind == 3:
        return blob[:place] + blob[place : place + dice.randrange(1, 60)] * dice.randrange(2, 20) + blob[place:]
    changed = bytearray(blob)
    for _ in range(dice.randrange(1, 5)):
        changed[dice.randrange(len(blob))] ^= dice.randrange(1, 256)
    return bytes(changed)


def throw(count: int, blobs: list[bytes], read: Callable[[bytes], object]) -> None:
    """Each is read or refused with one line; nothing else, and memory stays flat."""
    dice, before = random.Random(count), 0
    for number in range(count):
        blob = damaged(blobs[number % len(blobs)], dice)
        reason = ""
        try:
            read(blob)
        except (WeftError, images.ImageError) as error:
            reason = str(error)
        assert "\n" not in reason, blob
        if number == 100:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


COUNTS = [QUICK, pytest.param(LONG, marks=pytest.mark.long)]


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_images(count):
    blobs = []
    for kind in ("PNG", "JPEG", "PPM", "BMP", "GIF", "WEBP", "TIFF"):
        file = io.BytesIO()
        Image.effect_noise((24, 20), 60).convert("RGB").save(file, kind)
        blobs.append(file.getvalue())
    throw(count, blobs, lambda blob: images.decode(blob, 32, 16))


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_plans(count, tmp_path):
    def read(blob: bytes) -> None:
        (tmp_path / "plan.toml").write_bytes(blob)
        named_code(tmp_path / "plan.toml")
        try:
            text = blob.decode()
        except UnicodeDecodeError:
            return
        read_plan(text)

    throw(count, [Plan.merge({"method": name}).toml().encode() for name in ("fedweit", "fedavg")], read)


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_tables(count, tmp_path):
    """A table of images, and the tables of a run."""
    pictures = "path,client,task,label,group,split\n" + "".join(
        f"{index}.png,a,t{index % 2},c{index % 3},g{index},train\n" for index in range(12)
    )
    matrix = "client,after_task,task,accuracy\n" + "".join(
        f"0,{row},{column},0.5\n" for row in range(3) for column in range(row + 1)
    )
    metrics = "client,after_task,task,metric,class,value\n0,0,0,auroc,1,0.5\n0,1,0,auroc,,0.25\n"

    def read(blob: bytes) -> None:
        if blob.startswith(b"p"):
            (tmp_path / "table.csv").write_bytes(blob)
            images.find(tmp_path / "table.csv")
        for name, reader in (("accuracy.csv", accuracy_matrices), ("metrics.csv", read_measures)):
            (tmp_path / name).write_bytes(blob)
            reader(tmp_path)

    throw(count, [text.encode() for text in (pictures, matrix, metrics)], read)


def test_deeply_nested_files_are_refused(tmp_path):
    (tmp_path / "plan.toml").write_text("x = " + "[" * 100_000)
    with pytest.raises(WeftError, match="TOML"):
        named_code(tmp_path / "plan.toml")
    with pytest.raises(WeftError, match="TOML"):
        read_plan("x = " + "[" * 100_000)
