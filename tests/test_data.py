"""The public datasets: readers on small files in the original formats, the cache, and downloads from a local server."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import (
    cifar_records,
    encoded,
    idx,
    mnist_files,
    random_images,
    small_dataset,
    tar,
    zipped,
)

from weft.data import cache, fetching, packing, pictures, readers
from weft.data.readers import Damaged
from weft.data.sources import NORMALISATION, SOURCES
from weft.errors import WeftError

pytest_plugins = ["data_helpers"]

# ---- readers ---------------------------------------------------------------------------------------------------------


def test_idx(tmp_path):
    values = random_images(3, 4, 5)
    assert np.array_equal(readers.read_idx(idx(tmp_path / "a.gz", values)), values)


@pytest.mark.parametrize(
    "blob",
    [
        b"not gzip at all",
        gzip.compress(b""),
        gzip.compress(b"\0\0\x0d\1\0\0\0\1\0"),  # floats
        gzip.compress(b"\0\0\x08\3\0\0"),  # ends within the header
        gzip.compress(b"\0\0\x08\1\0\0\0\x05abc"),  # ends within the values
        gzip.compress(b"\0\0\x08\2\xff\xff\xff\xff\xff\xff\xff\xff"),  # claims 2^64 bytes
        gzip.compress(bytes(random_images(1, 100)))[:-20],
    ],
    ids=["plain", "empty", "floats", "header", "values", "claims", "cut"],  # gzip's bytes hold the time
)
def test_a_file_that_is_no_idx(tmp_path, blob):
    (tmp_path / "a.gz").write_bytes(blob)
    with pytest.raises(Damaged):
        readers.read_idx(tmp_path / "a.gz")


def test_mnist(tmp_path):
    arrays = mnist_files(tmp_path)
    packed = packing.pack("mnist", {name: tmp_path / name for name in arrays}).arrays
    assert packed["x"].shape == (30, 28, 28)
    assert packed["split"].tolist() == [0] * 20 + [1] * 10
    assert np.array_equal(packed["x"][20:], arrays["t10k-images-idx3-ubyte.gz"])
    assert packed["y"].dtype == np.int16


def test_cifar10(tmp_path):
    images, labels = random_images(12, 32, 32, 3), np.arange(12) % 10
    folder = "cifar-10-batches-bin"
    members = {
        f"{folder}/data_batch_{part + 1}.bin": cifar_records(images[2 * part :][:2], labels[2 * part :][:2])
        for part in range(5)
    }
    members[f"{folder}/test_batch.bin"] = cifar_records(images[10:], labels[10:])
    members[f"{folder}/batches.meta.txt"] = b"airplane\nautomobile\n\n"
    path = tar(tmp_path / "cifar-10-binary.tar.gz", members)
    packed = packing.pack("cifar10", {path.name: path}).arrays
    assert np.array_equal(packed["x"], images)
    assert packed["y"].tolist() == labels.tolist()
    assert packed["split"].sum() == 2
    assert packed["names"].tolist() == ["airplane", "automobile"]


def cifar100(path: Path, coarse: np.ndarray) -> np.ndarray:
    images, fine = random_images(8, 32, 32, 3), np.array([0, 1, 2, 3, 3, 2, 1, 0])
    folder = "cifar-100-binary"
    members = {
        f"{folder}/train.bin": cifar_records(images[:6], coarse[:6], fine[:6]),
        f"{folder}/test.bin": cifar_records(images[6:], coarse[6:], fine[6:]),
        f"{folder}/fine_label_names.txt": b"a\nb\nc\nd\n",
        f"{folder}/coarse_label_names.txt": b"first\nsecond\n",
    }
    tar(path, members)
    return images


def test_cifar100(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    images = cifar100(path, np.array([1, 0, 1, 0, 0, 1, 0, 1]))
    packed = packing.pack("cifar100", {path.name: path}).arrays
    assert np.array_equal(packed["x"], images)
    assert packed["y"].tolist() == [0, 1, 2, 3, 3, 2, 1, 0]  # the fine label, which comes second
    assert packed["coarse_of_fine"].tolist() == [1, 0, 1, 0]
    assert packed["coarse_names"].tolist() == ["first", "second"]


def test_cifar_with_a_class_of_two_superclasses_or_a_cut_record(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    cifar100(path, np.array([1, 0, 1, 0, 1, 1, 0, 1]))
    with pytest.raises(Damaged, match="two superclasses"):
        packing.pack("cifar100", {path.name: path})
    tar(path, {"cifar-100-binary/train.bin": b"12345"})
    with pytest.raises(Damaged, match="no multiple of 3074"):
        packing.pack("cifar100", {path.name: path})
    tar(path, {"other": b""})
    with pytest.raises(Damaged, match="not in it"):
        packing.pack("cifar100", {path.name: path})
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(Damaged):
        packing.pack("cifar100", {path.name: path})


def test_svhn(tmp_path):
    savemat = pytest.importorskip("scipy.io").savemat
    images, labels = random_images(10, 32, 32, 3), np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    for name in ("train_32x32.mat", "test_32x32.mat"):
        savemat(tmp_path / name, {"X": images.transpose(1, 2, 3, 0), "y": labels[:, None].astype(np.uint8)})
    packed = packing.pack("svhn", {file.name: tmp_path / file.name for file in SOURCES["svhn"].files}).arrays
    assert np.array_equal(packed["x"][:10], images)
    assert packed["y"].tolist()[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]  # the digit 0 is called 10 there
    (tmp_path / "test_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    with pytest.raises(Damaged, match="no MATLAB file"):
        readers.read_mat(tmp_path / "test_32x32.mat")


def test_svhn_without_scipy_names_the_extra_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    monkeypatch.setattr(fetching, "_download", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(WeftError, match=r'pip install "weft\[data\]"'):
        fetching.get("svhn", tmp_path)
    with pytest.raises(WeftError, match=r'pip install "weft\[data\]"'):
        readers.read_mat(tmp_path / "train_32x32.mat")


def test_notmnist_skips_what_is_broken(tmp_path):
    images = random_images(20, 28, 28)
    members = {f"notMNIST_small/{'ABCDEFGHIJ'[place % 10]}/{place}.png": encoded(images[place]) for place in range(20)}
    members["notMNIST_small/A/broken.png"] = b""
    members["notMNIST_small/F/also broken.png"] = b"\x89PNG\r\n"
    members["../../A/outside.png"] = encoded(images[0])  # read like any other, and written nowhere
    members["notMNIST_small/K/other.png"] = encoded(images[0])
    path = tar(tmp_path / "notMNIST_small.tar.gz", members)
    before = sorted(tmp_path.parent.rglob("*"))
    packed = packing.pack("notmnist", {path.name: path})
    assert packed.note == "2 broken pictures left out"
    assert np.array_equal(packed.arrays["x"][:20], images)
    assert packed.arrays["y"].tolist() == [*range(10), *range(10), 0]
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_traffic_signs(tmp_path):
    images = random_images(5, 40, 36, 3)
    train = {
        f"GTSRB/Final_Training/Images/{label:05d}/{track:05d}_{frame:05d}.ppm": encoded(images[place], "PPM")
        for place, (label, track, frame) in enumerate([(0, 0, 0), (0, 0, 1), (0, 1, 0), (42, 0, 0)])
    }
    train["GTSRB/Final_Training/Images/00000/GT-00000.csv"] = b"Filename;Width"
    files = {
        "GTSRB_Final_Training_Images.zip": zipped(tmp_path / "a.zip", train),
        "GTSRB_Final_Test_Images.zip": zipped(
            tmp_path / "b.zip", {"GTSRB/Final_Test/Images/00007.ppm": encoded(images[4], "PPM")}
        ),
        "GTSRB_Final_Test_GT.zip": zipped(
            tmp_path / "c.zip", {"GT-final_test.csv": b"Filename;Width;ClassId\r\n00007.ppm;36;16\r\n"}
        ),
    }
    packed = packing.pack("traffic_signs", files).arrays
    assert packed["x"].shape == (5, 32, 32, 3)
    assert packed["y"].tolist() == [0, 0, 0, 42, 16]
    assert packed["track"].tolist() == [0, 0, 1, 0, -1]
    assert packed["split"].tolist() == [0, 0, 0, 0, 1]
    zipped(tmp_path / "c.zip", {"GT-final_test.csv": b"Filename;Width;ClassId\r\n"})
    with pytest.raises(Damaged, match=r"does not name 00007\.ppm"):
        packing.pack("traffic_signs", files)


def people(folder: Path, counts: dict[str, int], broken: int = 0) -> Path:
    for place, (person, count) in enumerate(counts.items()):
        (folder / person).mkdir(parents=True)
        for number in range(count):
            image = random_images(1, 40, 50, 3, seed=100 * place + number)[0]
            (folder / person / f"{number}.jpg").write_bytes(encoded(image, "JPEG"))
        for number in range(broken):
            (folder / person / f"broken{number}.png").write_bytes(b"no picture")
    return folder


def test_faces_are_the_people_with_the_most_pictures(tmp_path):
    folder = people(tmp_path / "faces", {"Zoe": 3, "Ann": 2, "Bob": 2, "Cid": 2, "Eve": 4, "Nil": 0}, broken=1)
    (folder / "readme.txt").write_text("no person")
    packed = packing.pack_people(folder, most=3)
    assert packed.arrays["names"].tolist() == ["Ann", "Eve", "Zoe"]  # of the three with two, the first by name
    assert np.bincount(packed.arrays["y"]).tolist() == [2, 4, 3]
    assert packed.arrays["x"].shape == (9, 32, 32, 3)
    assert packed.arrays["mean"].shape == packed.arrays["deviation"].shape == (3,)
    assert "broken pictures left out" in packed.note
    assert "fewer than 9" in packing.pack_people(folder, most=9).note


def test_a_folder_without_people(tmp_path):
    with pytest.raises(WeftError, match="is no folder"):
        packing.pack_people(tmp_path / "nothing")
    with pytest.raises(WeftError, match="no subfolders with pictures"):
        packing.pack_people(tmp_path)
    deeper = people(tmp_path / "all" / "actors", {"Ann": 1, "Bob": 1})
    with pytest.raises(WeftError, match=f"one subfolder alone.*{deeper}"):
        packing.pack_people(tmp_path / "all")
    assert packing.pack_people(deeper).note.startswith("2 people")


def test_a_picture_that_would_fill_the_memory_is_refused(monkeypatch):
    blob = encoded(random_images(1, 40, 50, 3)[0])
    monkeypatch.setattr(pictures, "MOST_PIXELS", 1999)
    with pytest.raises(ValueError, match="too many"):
        pictures.picture(blob, 32, "RGB")


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    arrays = small_dataset("cifar100")
    path = cache.write(tmp_path, "cifar100", arrays)
    found = cache.load("cifar100", tmp_path)
    assert np.array_equal(found.x, arrays["x"])
    assert isinstance(found.x, np.memmap)  # shared by all workers of a machine
    assert np.array_equal(found.y, arrays["y"])
    assert found.class_name(3) == "thing 3"
    assert cache.load("cifar100", tmp_path) is found
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert cache.verify("cifar100", tmp_path) is None
    assert cache.there(tmp_path) == ["cifar100"]


def test_a_compressed_cache_is_read_too(tmp_path):
    arrays = small_dataset("mnist")
    np.savez_compressed(tmp_path / "mnist.npz", **arrays)
    assert np.array_equal(cache.load("mnist", tmp_path).x, arrays["x"])


def test_a_dataset_that_was_replaced_is_read_anew(tmp_path):
    arrays = small_dataset("mnist")
    path = cache.write(tmp_path, "mnist", arrays)
    before = cache.load("mnist", tmp_path)
    cache.write(tmp_path, "mnist", {**arrays, "x": 255 - arrays["x"]})
    os.utime(path, ns=(0, 5))
    assert not np.array_equal(cache.load("mnist", tmp_path).x, before.x)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("key", ["x", "y", "names"])
def test_pickle_is_refused(tmp_path, key, compressed):
    arrays = {**small_dataset("mnist"), key: np.array([{"a": 1}], dtype=object)}
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "mnist.npz", **arrays)
    with pytest.raises(WeftError, match=r"is damaged .*([Oo]bjects,|Object arrays).*weft data get mnist --force"):
        cache.load("mnist", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"x": np.zeros((4, 8, 8), dtype=np.uint8)},
        {"x": np.zeros((4, 28, 28), dtype=np.float32)},
        {"y": np.zeros(3, dtype=np.int16)},
        {"y": np.array([0, 1, 2, -1], dtype=np.int16)},
        {"split": np.zeros(5, dtype=np.uint8)},
        {"names": np.array(["only one"])},
    ],
)
def test_a_cache_that_does_not_fit_together_is_refused(tmp_path, change):
    good = {"x": np.zeros((4, 28, 28), np.uint8), "y": np.arange(4, dtype=np.int16), "split": np.zeros(4, np.uint8)}
    cache.write(tmp_path, "mnist", good)
    cache.load("mnist", tmp_path)
    np.savez(tmp_path / "mnist.npz", **{**good, **change})
    os.utime(tmp_path / "mnist.npz", ns=(0, 7))
    with pytest.raises(WeftError, match="is damaged"):
        cache.load("mnist", tmp_path)


def test_damage_is_found(tmp_path):
    path = cache.write(tmp_path, "mnist", small_dataset("mnist"))
    blob = bytearray(path.read_bytes())
    blob[5000] ^= 1
    path.write_bytes(blob)
    assert "fails its checksum" in str(cache.verify("mnist", tmp_path))
    path.write_bytes(blob[:-100])
    assert "is damaged" in str(cache.verify("mnist", tmp_path))
    with pytest.raises(WeftError, match="is damaged"):
        cache.load("mnist", tmp_path)


def test_a_missing_dataset_names_file_and_command(tmp_path):
    with pytest.raises(WeftError, match=rf"{tmp_path}/svhn\.npz.*weft data get svhn"):
        cache.load("svhn", tmp_path)
    with pytest.raises(WeftError, match="weft data get facescrub --from FOLDER"):
        cache.load("facescrub", tmp_path)
    with pytest.raises(WeftError, match=r"did you mean cifar100\?"):
        cache.load("cifar-100", tmp_path)


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    assert cache.folder() == tmp_path
    assert cache.folder(tmp_path / "other") == tmp_path / "other"
    monkeypatch.delenv("WEFT_DATA")
    assert cache.folder().name == "weft"


def test_grey_images_are_padded_and_repeated():
    images = random_images(2, 28, 28)
    colour = cache.in_colour(images)
    assert colour.shape == (2, 32, 32, 3)
    assert np.array_equal(colour[:, 2:30, 2:30, 1], images)
    assert not colour[:, :2].any()
    assert not colour[:, :, 30:].any()


@pytest.mark.slow
def test_mean_and_deviation():
    images = random_images(2500, 32, 32, 3)
    mean, deviation = cache.measure(images)
    assert np.allclose(mean, images.reshape(-1, 3).mean(0))
    assert np.allclose(deviation, images.reshape(-1, 3).std(0))


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(WeftError, match=r"cannot be written \(No space left on device\)"):
        cache.write(tmp_path, "mnist", {})
    assert not list(tmp_path.iterdir())


# ---- the table of sources --------------------------------------------------------------------------------------------


def test_the_table_of_sources():
    assert len(SOURCES) == 8
    assert set(NORMALISATION) == set(SOURCES) - {"facescrub"}
    assert set(packing.READ) == set(SOURCES) - {"facescrub"}
    for source in SOURCES.values():
        for file in source.files:
            assert file.md5 is None or len(file.md5) == 32
            assert file.urls
            assert all(url.endswith("/" + file.name) for url in file.urls)


@pytest.mark.data
@pytest.mark.skipif("WEFT_DATA" not in os.environ, reason="WEFT_DATA does not name the unpacked datasets")
@pytest.mark.parametrize("name", [name for name in NORMALISATION if not name.startswith("cifar")])
def test_means_and_deviations_are_those_of_the_data(name):
    dataset = cache.load(name)
    for found, listed in zip(cache.measure(dataset.x[dataset.split == 0]), NORMALISATION[name], strict=True):
        assert [round(value, 1) for value in found] == pytest.approx(listed, abs=0.051)
