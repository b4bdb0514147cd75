"""Downloads from a local server: mirrors, checksums, incomplete files, no network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import socket

import pytest
from data_helpers import mnist_files, serving

from weft.data import cache, download, sources
from weft.data.sources import SOURCES, File
from weft.errors import WeftError

pytest_plugins = ["data_helpers"]


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """MNIST's four small files at a local server: a function that sets their mirrors, the requests, and the folder."""
    monkeypatch.setattr(download, "RETRIES", 0)
    folder = tmp_path / "upstream"
    folder.mkdir()
    mnist_files(folder)
    with serving(folder) as (address, requests):

        def point(*bases: str, checksums: bool = True) -> None:
            mirrors = [base if "//" in base else address + base for base in bases]
            files = []
            for name in (file.name for file in SOURCES["mnist"].files):
                md5 = hashlib.md5((folder / name).read_bytes()).hexdigest() if checksums else None
                files.append(File(name, tuple(mirror + name for mirror in mirrors), md5))
            monkeypatch.setitem(sources.SOURCES, "mnist", dataclasses.replace(SOURCES["mnist"], files=tuple(files)))

        yield point, requests, folder


def closed() -> str:
    """An address without a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def test_a_download_is_packed_and_deleted(tmp_path, upstream):
    point, requests, _ = upstream
    point("")
    download.get("mnist", tmp_path / "cache")
    assert len(requests) == 4
    assert cache.load("mnist", tmp_path / "cache").x.shape == (30, 28, 28)
    assert [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()] == ["mnist.npz"]


def test_mirrors_are_tried_in_order(tmp_path, upstream):
    point, requests, _ = upstream
    point(closed(), "missing/", "half/", "")
    download.get("mnist", tmp_path / "cache")
    assert len(requests) == 4 * 3
    assert cache.verify("mnist", tmp_path / "cache") is None


@pytest.mark.parametrize(
    ("base", "reason"), [("missing/", "404"), ("half/", "incomplete"), ("closed", "no connection")]
)
def test_a_failed_download_is_one_line(tmp_path, upstream, base, reason):
    point, _, _ = upstream
    point(closed() if base == "closed" else base)
    with pytest.raises(WeftError) as caught:
        download.get("mnist", tmp_path / "cache")
    assert (SOURCES["mnist"].files[0].urls[0] in str(caught.value)) == (base == "closed")
    for text in ("train-images-idx3-ubyte.gz", "127.0.0.1", reason, "weft data get mnist"):
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_a_wrong_checksum(tmp_path, upstream):
    point, _, folder = upstream
    point("")
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(b"something else")
    with pytest.raises(WeftError, match=r"t10k-images-idx3-ubyte\.gz of mnist .*wrong checksum.*weft data get mnist"):
        download.get("mnist", tmp_path / "cache")
    left = {file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()}
    assert left == {"train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"}  # complete, and not downloaded again


def test_an_unknown_checksum_is_recorded_and_then_checked(tmp_path, upstream):
    point, _, folder = upstream
    point("", checksums=False)
    download.get("mnist", tmp_path / "cache")
    recorded = json.loads((tmp_path / "cache" / "checksums.json").read_text())
    blob = (folder / "train-labels-idx1-ubyte.gz").read_bytes()
    assert recorded["mnist/train-labels-idx1-ubyte.gz"] == f"sha256:{hashlib.sha256(blob).hexdigest()}"
    download.get("mnist", tmp_path / "cache")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(blob + b"!")
    with pytest.raises(WeftError, match=r"wrong checksum.*first download, in .*checksums\.json"):
        download.get("mnist", tmp_path / "cache")


def test_a_file_of_the_user_is_not_downloaded(tmp_path, upstream):
    point, requests, folder = upstream
    point("")
    waiting = download.downloads("mnist", tmp_path / "cache")
    waiting.mkdir(parents=True)
    name = "train-images-idx3-ubyte.gz"
    (waiting / name).write_bytes((folder / name).read_bytes())
    download.get("mnist", tmp_path / "cache")
    assert f"/{name}" not in requests
    assert len(requests) == 3


def test_original_files_from_a_folder(tmp_path, upstream):
    point, requests, folder = upstream
    point("")
    download.get("mnist", tmp_path / "cache", folder=folder)
    assert not requests
    assert len(list(folder.iterdir())) == 4  # files of the user are kept
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(b"")
    with pytest.raises(WeftError, match=r"t10k-labels-idx1-ubyte\.gz has a wrong checksum"):
        download.get("mnist", tmp_path / "cache", folder=folder)
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(WeftError, match=r"t10k-labels-idx1-ubyte\.gz does not exist.*--from"):
        download.get("mnist", tmp_path / "cache", folder=folder)


def test_a_damaged_file_names_its_folder(tmp_path, upstream):
    point, _, folder = upstream
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"no gzip")
    point("")
    with pytest.raises(WeftError, match=r"mnist in .*cannot be read: .*weft data get mnist"):
        download.get("mnist", tmp_path / "cache")


def test_a_checksum_is_recorded_only_of_files_that_were_read(tmp_path, upstream):
    """The checksum of an error page with status 200 must not block the file itself."""
    point, _, folder = upstream
    point("", checksums=False)
    good = (folder / "train-images-idx3-ubyte.gz").read_bytes()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"<html>sorry</html>")
    with pytest.raises(WeftError, match="cannot be read"):
        download.get("mnist", tmp_path / "cache")
    assert not (tmp_path / "cache" / "checksums.json").exists()
    (folder / "train-images-idx3-ubyte.gz").write_bytes(good)
    (download.downloads("mnist", tmp_path / "cache") / "train-images-idx3-ubyte.gz").unlink()
    download.get("mnist", tmp_path / "cache")
    assert len(json.loads((tmp_path / "cache" / "checksums.json").read_text())) == 4


def test_a_wrong_file_of_the_user_is_reported_without_a_network(tmp_path, upstream):
    point, _, _ = upstream
    point(closed())
    folder = download.downloads("mnist", tmp_path / "cache")
    folder.mkdir(parents=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"half")
    with pytest.raises(WeftError, match=r"no connection.*has a wrong checksum"):
        download.get("mnist", tmp_path / "cache")
    (folder / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(WeftError) as caught:
        download.get("mnist", tmp_path / "cache")
    assert "wrong checksum" not in str(caught.value)
