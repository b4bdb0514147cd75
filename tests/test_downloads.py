"""Downloads from a local server: mirrors, checksums, half files, no network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket

import pytest
from data_helpers import mnist_files, serving

from weft.data import cache, fetching, sources
from weft.data.sources import SOURCES, File
from weft.errors import WeftError

pytest_plugins = ["data_helpers"]


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """MNIST's four small files at a local server: a way to point at it, what it was asked for, and its folder."""
    monkeypatch.setattr(fetching, "RETRIES", 0)
    folder = tmp_path / "upstream"
    folder.mkdir()
    mnist_files(folder)
    with serving(folder) as (address, asked):

        def point(*bases: str, checksums: bool = True) -> None:
            files = tuple(
                File(
                    file.name,
                    tuple((address + base if "//" not in base else base) + file.name for base in bases),
                    hashlib.md5((folder / file.name).read_bytes()).hexdigest() if checksums else None,
                )
                for file in SOURCES["mnist"].files
            )
            monkeypatch.setitem(sources.SOURCES, "mnist", dataclasses.replace(SOURCES["mnist"], files=files))

        yield point, asked, folder


def closed() -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def test_a_download_is_packed_and_let_go(tmp_path, upstream):
    point, asked, _ = upstream
    point("")
    fetching.get("mnist", tmp_path / "cache")
    assert len(asked) == 4
    assert cache.load("mnist", tmp_path / "cache").x.shape == (30, 28, 28)
    assert [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()] == ["mnist.npz"]


def test_mirrors_are_tried_in_turn(tmp_path, upstream):
    point, asked, _ = upstream
    point(closed(), "missing/", "half/", "")
    fetching.get("mnist", tmp_path / "cache")
    assert len(asked) == 4 * 3
    assert cache.verify("mnist", tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("missing/", "answered 404"),
        ("half/", "stopped halfway"),
        ("closed", "no connection"),
    ],
)
def test_a_download_that_fails_is_one_clear_line(tmp_path, upstream, base, said):
    point, _, _ = upstream
    point(closed() if base == "closed" else base)
    with pytest.raises(WeftError) as caught:
        fetching.get("mnist", tmp_path / "cache")
    assert (f"{SOURCES['mnist'].files[0].urls[0]} has" in str(caught.value)) == (base == "closed")
    for word in ("train-images-idx3-ubyte.gz", "127.0.0.1", said, "weft data get mnist"):
        assert word in str(caught.value)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_a_wrong_checksum(tmp_path, upstream):
    point, _, folder = upstream
    point("")
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(WeftError, match=r"t10k-images-idx3-ubyte\.gz of mnist .*wrong checksum.*weft data get mnist"):
        fetching.get("mnist", tmp_path / "cache")
    left = {file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    assert left == {"train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"}  # whole, and not fetched again


def test_an_unknown_checksum_is_recorded_and_holds_from_then_on(tmp_path, upstream):
    point, _, folder = upstream
    point("", checksums=False)
    fetching.get("mnist", tmp_path / "cache")
    recorded = json.loads((tmp_path / "cache" / "checksums.json").read_text())
    blob = (folder / "train-labels-idx1-ubyte.gz").read_bytes()
    assert recorded["mnist/train-labels-idx1-ubyte.gz"] == f"sha256:{hashlib.sha256(blob).hexdigest()}"
    fetching.get("mnist", tmp_path / "cache")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(blob + b"!")
    with pytest.raises(WeftError, match=r"wrong checksum.*first download, in .*checksums\.json"):
        fetching.get("mnist", tmp_path / "cache")


def test_a_file_that_a_user_brought_is_not_downloaded(tmp_path, upstream):
    point, asked, folder = upstream
    point("")
    waiting = fetching.downloads("mnist", tmp_path / "cache")
    waiting.mkdir(parents=True)
    name = "train-images-idx3-ubyte.gz"
    (waiting / name).write_bytes((folder / name).read_bytes())
    fetching.get("mnist", tmp_path / "cache")
    assert f"/{name}" not in asked
    assert len(asked) == 3


def test_original_files_from_a_folder(tmp_path, upstream):
    point, asked, folder = upstream
    point("")
    fetching.get("mnist", tmp_path / "cache", folder=folder)
    assert not asked
    assert len(list(folder.iterdir())) == 4  # the user's own files stay
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    with pytest.raises(WeftError, match=r"t10k-labels-idx1-ubyte\.gz has a wrong checksum"):
        fetching.get("mnist", tmp_path / "cache", folder=folder)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(WeftError, match=r"t10k-labels-idx1-ubyte\.gz is not there"):
        fetching.get("mnist", tmp_path / "cache", folder=folder)


def test_a_damaged_original_names_its_place(tmp_path, upstream):
    point, _, folder = upstream
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    point("")
    with pytest.raises(WeftError, match=r"the files of mnist in .*cannot be read.*weft data get mnist"):
        fetching.get("mnist", tmp_path / "cache")


def test_a_checksum_is_recorded_only_of_what_could_be_read(tmp_path, upstream):
    """A page that says sorry, with status 200, must not stand in the way of the file itself."""
    point, _, folder = upstream
    point("", checksums=False)
    good = (folder / "train-images-idx3-ubyte.gz").read_bytes()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"<html>sorry</html>")
    with pytest.raises(WeftError, match="cannot be read"):
        fetching.get("mnist", tmp_path / "cache")
    assert not (tmp_path / "cache" / "checksums.json").exists()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(good)
    (fetching.downloads("mnist", tmp_path / "cache") / "train-images-idx3-ubyte.gz").unlink()
    fetching.get("mnist", tmp_path / "cache")
    assert len(json.loads((tmp_path / "cache" / "checksums.json").read_text())) == 4


def test_a_wrong_file_that_lies_there_is_told_without_a_network(tmp_path, upstream):
    point, _, _ = upstream
    point(closed())
    folder = fetching.downloads("mnist", tmp_path / "cache")
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"half")
    with pytest.raises(WeftError, match=r"no connection.*has a wrong checksum"):
        fetching.get("mnist", tmp_path / "cache")
    (folder / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(WeftError) as caught:
        fetching.get("mnist", tmp_path / "cache")
    assert "wrong checksum" not in str(caught.value)
