"""The public datasets: readers of small files in the original formats, and the cache."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from data_helpers import cifar_records, encoded, idx, mnist_files, random_images, small_dataset, tar, zipped

from weft.data import cache, download, formats
from weft.data.formats import FormatError
from weft.data.sources import NORMALIZATION, SOURCES
from weft.errors import WeftError

pytest_plugins = ["data_helpers"]

# ---- original formats ------------------------------------------------------------------------------------------------


def pack(*paths: Path) -> dict[str, np.ndarray]:
    """Pack the dataset whose first file has the name of the first path."""
    (name,) = [name for name, source in SOURCES.items() if paths[0].name in [file.name for file in source.files[:1]]]
    return formats.pack(name, {path.name: path for path in paths}).arrays


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
def test_an_invalid_idx_file(tmp_path, blob):
    arrays = mnist_files(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(blob)
    with pytest.raises(FormatError):
        formats.pack("mnist", {name: tmp_path / name for name in arrays})


def test_mnist(tmp_path):
    arrays = mnist_files(tmp_path)
    files = {name: tmp_path / name for name in arrays}
    packed = formats.pack("mnist", files).arrays
    assert packed["x"].shape == (30, 28, 28)
    assert packed["split"].tolist() == [0] * 20 + [1] * 10
    assert np.array_equal(packed["x"][20:], arrays["t10k-images-idx3-ubyte.gz"])
    assert packed["y"].dtype == np.int16
    idx(tmp_path / "t10k-labels-idx1-ubyte.gz", np.zeros(9, dtype=np.uint8))
    with pytest.raises(FormatError, match="t10k"):
        formats.pack("mnist", files)


def test_cifar10(tmp_path):
    images, labels = random_images(12, 32, 32, 3), np.arange(12) % 10
    folder = "cifar-10-batches-bin"
    members = {
        f"{folder}/data_batch_{batch + 1}.bin": cifar_records(images[2 * batch :][:2], labels[2 * batch :][:2])
        for batch in range(5)
    }
    members[f"{folder}/test_batch.bin"] = cifar_records(images[10:], labels[10:])
    members[f"{folder}/batches.meta.txt"] = b"airplane\nautomobile\n\n"
    packed = pack(tar(tmp_path / "cifar-10-binary.tar.gz", members))
    assert np.array_equal(packed["x"], images)
    assert packed["y"].tolist() == labels.tolist()
    assert packed["split"].sum() == 2
    assert packed["names"].tolist() == ["airplane", "automobile"]


def cifar100(path: Path, coarse: list[int]) -> np.ndarray:
    images, fine = random_images(8, 32, 32, 3), np.array([0, 1, 2, 3, 3, 2, 1, 0])
    folder, first = "cifar-100-binary", np.array(coarse)
    members = {
        f"{folder}/train.bin": cifar_records(images[:6], first[:6], fine[:6]),
        f"{folder}/test.bin": cifar_records(images[6:], first[6:], fine[6:]),
        f"{folder}/fine_label_names.txt": b"a\nb\nc\nd\n",
        f"{folder}/coarse_label_names.txt": b"first\nsecond\n",
    }
    tar(path, members)
    return images


def test_cifar100(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    images = cifar100(path, [1, 0, 1, 0, 0, 1, 0, 1])
    packed = pack(path)
    assert np.array_equal(packed["x"], images)
    assert packed["y"].tolist() == [0, 1, 2, 3, 3, 2, 1, 0]  # the fine label, which comes second
    assert packed["coarse_of_fine"].tolist() == [1, 0, 1, 0]
    assert packed["coarse_names"].tolist() == ["first", "second"]


def test_an_invalid_cifar_archive(tmp_path):
    path = tmp_path / "cifar-100-binary.tar.gz"
    cifar100(path, [1, 0, 1, 0, 1, 1, 0, 1])
    with pytest.raises(FormatError, match="two superclasses"):
        pack(path)
    for members, why in (({"cifar-100-binary/train.bin": b"12345"}, "3074"), ({"other": b""}, r"train\.bin")):
        tar(path, members)
        with pytest.raises(FormatError, match=why):
            pack(path)
    path.write_bytes(path.read_bytes()[:30])
    with pytest.raises(FormatError):
        pack(path)


def test_svhn(tmp_path):
    savemat = pytest.importorskip("scipy.io").savemat
    images, labels = random_images(10, 32, 32, 3), np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    paths = [tmp_path / file.name for file in SOURCES["svhn"].files]
    for path in paths:
        savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": labels[:, None].astype(np.uint8)})
    packed = pack(*paths)
    assert np.array_equal(packed["x"][:10], images)
    assert packed["y"].tolist()[:10] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]  # 10 stands for the digit 0
    (tmp_path / "test_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file" + bytes(200))
    with pytest.raises(FormatError, match=r"test_32x32\.mat"):
        pack(*paths)


def test_svhn_without_scipy_names_the_extra_before_any_download(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    monkeypatch.setattr(download, "_download", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(WeftError, match=r'pip install "weft\[data\]"'):
        download.get("svhn", tmp_path)
    with pytest.raises(WeftError, match=r'pip install "weft\[data\]"'):
        formats.read_mat(tmp_path / "train_32x32.mat")


def test_notmnist_skips_broken_images(tmp_path):
    images = random_images(20, 28, 28)
    members = {f"notMNIST_small/{'ABCDEFGHIJ'[index % 10]}/{index}.png": encoded(images[index]) for index in range(20)}
    members["notMNIST_small/A/broken.png"] = b""
    members["notMNIST_small/F/also broken.png"] = b"\x89PNG\r\n"
    members["../../A/outside.png"] = encoded(images[0])  # read like any other, and written nowhere
    members["notMNIST_small/K/other.png"] = encoded(images[0])
    path = tar(tmp_path / "notMNIST_small.tar.gz", members)
    before = sorted(tmp_path.parent.rglob("*"))
    packed = formats.pack("notmnist", {path.name: path})
    assert packed.note.startswith("2 broken")
    assert np.array_equal(packed.arrays["x"][:20], images)
    assert packed.arrays["y"].tolist() == [*range(10), *range(10), 0]
    assert sorted(tmp_path.parent.rglob("*")) == before


def test_traffic_signs(tmp_path):
    images = random_images(5, 40, 36, 3)
    train = {
        f"GTSRB/Final_Training/Images/{label:05d}/{track:05d}_{frame:05d}.ppm": encoded(images[index], "PPM")
        for index, (label, track, frame) in enumerate([(0, 0, 0), (0, 0, 1), (0, 1, 0), (42, 0, 0)])
    }
    train["GTSRB/Final_Training/Images/00000/GT-00000.csv"] = b"Filename;Width"
    paths = [
        zipped(tmp_path / "GTSRB_Final_Training_Images.zip", train),
        zipped(
            tmp_path / "GTSRB_Final_Test_Images.zip", {"GTSRB/Final_Test/Images/00007.ppm": encoded(images[4], "PPM")}
        ),
        zipped(
            tmp_path / "GTSRB_Final_Test_GT.zip",
            {"GT-final_test.csv": b"Filename;Width;ClassId\r\n00007.ppm;36;16\r\n"},
        ),
    ]
    packed = pack(*paths)
    assert packed["x"].shape == (5, 32, 32, 3)
    assert packed["y"].tolist() == [0, 0, 0, 42, 16]
    assert packed["track"].tolist() == [0, 0, 1, 0, -1]
    assert packed["split"].tolist() == [0, 0, 0, 0, 1]
    for table, why in ((b"Filename;Width;ClassId\r\n", r"00007\.ppm"), (b"Filename;Width\r\n", "ClassId")):
        zipped(paths[2], {"GT-final_test.csv": table})
        with pytest.raises(FormatError, match=why):
            pack(*paths)


def people(folder: Path, counts: dict[str, int], broken: int = 0) -> Path:
    for place, (person, count) in enumerate(counts.items()):
        (folder / person).mkdir(parents=True)
        for number in range(count):
            image = random_images(1, 40, 50, 3, seed=100 * place + number)[0]
            (folder / person / f"{number}.jpg").write_bytes(encoded(image, "JPEG"))
        for number in range(broken):
            (folder / person / f"broken{number}.png").write_bytes(b"no image")
    return folder


def test_faces_of_the_people_with_the_most_images(tmp_path):
    folder = people(tmp_path / "faces", {"Zoe": 3, "Ann": 2, "Bob": 2, "Cid": 2, "Eve": 4, "Nil": 0}, broken=1)
    (folder / "readme.txt").write_text("not a person")
    packed = formats.pack_people(folder, most=3)
    assert packed.arrays["names"].tolist() == ["Ann", "Eve", "Zoe"]  # of the three with two, the first by name
    assert np.bincount(packed.arrays["y"]).tolist() == [2, 4, 3]
    assert packed.arrays["x"].shape == (9, 32, 32, 3)
    assert packed.arrays["mean"].shape == packed.arrays["deviation"].shape == (3,)
    assert "broken" in packed.note
    assert "fewer than 9" in formats.pack_people(folder, most=9).note


def test_a_folder_without_people(tmp_path):
    with pytest.raises(WeftError, match=r"nothing is not a folder.*--from"):
        formats.pack_people(tmp_path / "nothing")
    with pytest.raises(WeftError, match=r"no subfolders.*one per person"):
        formats.pack_people(tmp_path)
    deeper = people(tmp_path / "all" / "actors", {"Ann": 1, "Bob": 1})
    with pytest.raises(WeftError, match=f"only one subfolder.*{deeper}"):
        formats.pack_people(tmp_path / "all")
    assert formats.pack_people(deeper).note.startswith("2 people")


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_write_and_load(tmp_path):
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
    assert cache.available(tmp_path) == ["cifar100"]


def test_a_replaced_dataset_is_loaded_again(tmp_path):
    arrays = small_dataset("mnist")
    cache.write(tmp_path, "mnist", arrays)
    before = cache.load("mnist", tmp_path)
    np.savez_compressed(tmp_path / "new.npz", **{**arrays, "x": 255 - arrays["x"]})  # can be read, but not mapped
    os.utime((tmp_path / "new.npz").replace(tmp_path / "mnist.npz"), ns=(0, 5))
    assert np.array_equal(cache.load("mnist", tmp_path).x, 255 - before.x)


def test_private_files_are_readable_by_the_user_only(tmp_path):
    old = os.umask(0)
    try:
        path = cache.write(tmp_path, "own/key", {"x": np.zeros(1)}, private=True)
        public = cache.write(tmp_path, "mnist", {"x": np.zeros(1)})
    finally:
        os.umask(old)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert public.stat().st_mode & 0o777 == 0o666


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("key", ["x", "y", "names"])
def test_pickle_is_refused(tmp_path, key, save):
    save(tmp_path / "mnist.npz", **{**small_dataset("mnist"), key: np.array([{"a": 1}], dtype=object)})
    with pytest.raises(WeftError, match=r"mnist\.npz is damaged .*Object arrays.*weft data get mnist --force"):
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
def test_an_inconsistent_cache_is_refused(tmp_path, change):
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
    assert "checksum" in str(cache.verify("mnist", tmp_path))
    path.write_bytes(blob[:-100])
    assert "is damaged" in str(cache.verify("mnist", tmp_path))
    np.savez(path, y=np.zeros(1))
    os.utime(path, ns=(0, 7))
    with pytest.raises(WeftError, match=r"is damaged.*no item named 'x"):
        cache.load("mnist", tmp_path)


def test_a_missing_dataset_names_file_and_command(tmp_path):
    with pytest.raises(WeftError, match=rf"{tmp_path}/svhn\.npz.*weft data get svhn"):
        cache.load("svhn", tmp_path)
    with pytest.raises(WeftError, match="weft data get facescrub --from FOLDER"):
        cache.load("facescrub", tmp_path)
    with pytest.raises(WeftError, match=r"did you mean cifar100\?"):
        cache.load("cifar-100", tmp_path)


def test_the_folder_of_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_DATA", str(tmp_path))
    assert cache.folder() == tmp_path
    assert cache.folder(tmp_path / "other") == tmp_path / "other"
    monkeypatch.delenv("WEFT_DATA")
    assert cache.folder().name == "weft"


def test_grayscale_images_are_padded_and_repeated():
    images = random_images(2, 28, 28)
    color = cache.to_color(images)
    assert color.shape == (2, 32, 32, 3)
    assert np.array_equal(color[:, 2:30, 2:30, 1], images)
    assert not color[:, :2].any()
    assert not color[:, :, 30:].any()


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
    with pytest.raises(WeftError, match=r"mnist\.npz.*No space left on device.*--data-dir"):
        cache.write(tmp_path, "mnist", {})
    assert not list(tmp_path.iterdir())


# ---- the table of sources --------------------------------------------------------------------------------------------


def test_the_table_of_sources():
    assert len(SOURCES) == 8
    assert set(NORMALIZATION) == set(formats.PACKERS) == set(SOURCES) - {"facescrub"}
    for source in SOURCES.values():
        for file in source.files:
            assert file.md5 is None or len(file.md5) == 32
            assert file.urls
            assert all(url.endswith("/" + file.name) for url in file.urls)


@pytest.mark.data
@pytest.mark.skipif("WEFT_DATA" not in os.environ, reason="WEFT_DATA does not name the unpacked datasets")
@pytest.mark.parametrize("name", [name for name in NORMALIZATION if not name.startswith("cifar")])
def test_normalization_is_that_of_the_data(name):
    dataset = cache.load(name)
    for found, listed in zip(cache.measure(dataset.x[dataset.split == 0]), NORMALIZATION[name], strict=True):
        assert [round(value, 1) for value in found] == pytest.approx(listed, abs=0.051)
