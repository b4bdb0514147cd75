"""Small files in the original formats of the public datasets, a small cache of all eight, and a file server.

Used as a plugin (`pytest_plugins = ["data_helpers"]`) and imported before that, hence PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.server
import io
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from weft.data import cache
from weft.data.sources import SOURCES

PER_CLASS = 30  # train and test images of a class in the small cache
GRAYSCALE = ("mnist", "fashion_mnist", "notmnist")


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size=(count, *shape), dtype=np.uint8)


# ---- original formats ------------------------------------------------------------------------------------------------


def idx(path: Path, values: np.ndarray) -> Path:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))
    return path


def mnist_files(folder: Path) -> dict[str, np.ndarray]:
    """Write the four files of MNIST; returns their arrays."""
    arrays = {}
    for split, count, seed in (("train", 20, 1), ("t10k", 10, 2)):
        arrays[f"{split}-images-idx3-ubyte.gz"] = random_images(count, 28, 28, seed=seed)
        arrays[f"{split}-labels-idx1-ubyte.gz"] = (np.arange(count) % 10).astype(np.uint8)
    for name, values in arrays.items():
        idx(folder / name, values)
    return arrays


def tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, blob in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            archive.addfile(info, io.BytesIO(blob))
    return path


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, blob in members.items():
            archive.writestr(name, blob)
    return path


def cifar_records(images: np.ndarray, *labels: np.ndarray) -> bytes:
    """Records of labels, then channels."""
    flat = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.concatenate([*(each.astype(np.uint8)[:, None] for each in labels), flat], axis=1).tobytes()


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format=kind)
    return file.getvalue()


# ---- a small cache ---------------------------------------------------------------------------------------------------


def small_dataset(name: str) -> dict[str, np.ndarray]:
    """Arrays with the structure of the real dataset. The first pixels of an image encode its index."""
    classes = SOURCES[name].classes
    rng = np.random.default_rng(len(name))
    y = rng.permutation(np.repeat(np.arange(classes), PER_CLASS)).astype(np.int16)
    numbers = np.arange(len(y))
    x = np.zeros((len(y), 28, 28) if name in GRAYSCALE else (len(y), 32, 32, 3), dtype=np.uint8)
    x[..., :, :] = rng.integers(0, 256, size=(len(y), *(1,) * (x.ndim - 1)), dtype=np.uint8)
    flat = x.reshape(len(y), -1)
    flat[:, 0], flat[:, 3] = numbers % 256, numbers // 256
    arrays = {"x": x, "y": y, "split": (numbers % 6 == 5).astype(np.uint8)}
    if name == "cifar100":
        arrays["coarse_of_fine"] = (rng.permutation(100) % 20).astype(np.int16)
        arrays["coarse_names"] = np.array([f"kind {index}" for index in range(20)])
        arrays["names"] = np.array([f"thing {index}" for index in range(100)])
    if name == "traffic_signs":  # tracks of 5 frames, counted within a class; test images have none
        place = np.array([np.flatnonzero(np.flatnonzero(y == label) == at)[0] for at, label in enumerate(y)])
        arrays["track"] = np.where(arrays["split"] == 1, -1, place // 5).astype(np.int16)
    if name == "facescrub":
        arrays["mean"], arrays["deviation"] = np.array([100.0, 90, 80]), np.array([50.0, 51, 52])
    return arrays


def index_of(images: np.ndarray) -> np.ndarray:
    """The index of each image within its dataset, decoded from images of a task."""
    corner = images[:, 0, :2] if images[:, 0, :].any() else images[:, 2, 2:6]
    if corner.shape[1] == 2:  # color: values 0 and 3 are channel 0 of the first two pixels
        return corner[:, 0, 0].astype(int) + 256 * corner[:, 1, 0].astype(int)
    return corner[:, 0, 0].astype(int) + 256 * corner[:, 3, 0].astype(int)


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for name in SOURCES:
        cache.write(folder, name, small_dataset(name))
    return folder


@pytest.fixture
def small_data(small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_DATA", str(small_cache))
    return small_cache


# ---- a server --------------------------------------------------------------------------------------------------------


class Handler(http.server.SimpleHTTPRequestHandler):
    requests: list[str]

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.requests.append(self.path)
        if "/half/" in self.path:  # sends less than its header says
            blob = (Path(self.directory) / Path(self.path).name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(blob)))
            self.end_headers()
            self.wfile.write(blob[: len(blob) // 2])
            return
        super().do_GET()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of a folder by HTTP; yields the address and the list of requests."""
    requests: list[str] = []
    handler = type("Here", (Handler,), {"requests": requests})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
