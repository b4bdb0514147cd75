"""From the original files of a dataset to the arrays that the cache holds; cache.py says what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data import cache, pictures, readers
from weft.data.readers import Damaged, Images, Labels

PEOPLE = 100  # of FaceScrub: those with the most pictures


Arrays = dict[str, NDArray[Any]]


class Packed(NamedTuple):
    arrays: Arrays
    note: str = ""  # what a person should know about it


def pack(name: str, files: Mapping[str, Path]) -> Packed:
    """The arrays of a dataset, from its original files by their names."""
    return READ[name](files)


def pack_people(folder: Path, most: int = PEOPLE) -> Packed:
    images, labels, names, broken = pictures.read_people(folder, most)
    arrays: Arrays = {"x": images, "y": labels, "split": _every_tenth(labels), "names": np.array(names)}
    arrays["mean"], arrays["deviation"] = map(np.array, cache.measure(images[arrays["split"] == 0]))
    notes = [f"{len(names)} people"]
    notes += [f"{broken} broken pictures left out"] if broken else []
    notes += [f"fewer than {most}, which the scenarios may need"] if len(names) < most else []
    return Packed(arrays, "; ".join(notes))


def _cifar10(files: Mapping[str, Path]) -> Packed:
    path, folder = files["cifar-10-binary.tar.gz"], "cifar-10-batches-bin"
    train = readers.read_cifar(path, [f"{folder}/data_batch_{part}.bin" for part in range(1, 6)], 1)
    test = readers.read_cifar(path, [f"{folder}/test_batch.bin"], 1)
    names = readers.read_lines(path, f"{folder}/batches.meta.txt")
    return Packed({**_both(train, test), "names": np.array(names)})


def _cifar100(files: Mapping[str, Path]) -> Packed:
    path, folder = files["cifar-100-binary.tar.gz"], "cifar-100-binary"
    train, test = (readers.read_cifar(path, [f"{folder}/{part}.bin"], 2) for part in ("train", "test"))
    arrays = _both(train, test)
    arrays["names"] = np.array(readers.read_lines(path, f"{folder}/fine_label_names.txt"))
    arrays["coarse_of_fine"] = readers.read_cifar_coarse(path, f"{folder}/train.bin")
    arrays["coarse_names"] = np.array(readers.read_lines(path, f"{folder}/coarse_label_names.txt"))
    return Packed(arrays)


def _idx(files: Mapping[str, Path]) -> Packed:
    parts = []
    for part in ("train", "t10k"):
        images = readers.read_idx(files[f"{part}-images-idx3-ubyte.gz"])
        labels = readers.read_idx(files[f"{part}-labels-idx1-ubyte.gz"])
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise Damaged(f"{part}: images are {images.shape} and labels {labels.shape}")
        parts.append((images, labels.astype(np.int16)))
    return Packed(_both(*parts))


def _svhn(files: Mapping[str, Path]) -> Packed:
    return Packed(_both(readers.read_mat(files["train_32x32.mat"]), readers.read_mat(files["test_32x32.mat"])))


def _notmnist(files: Mapping[str, Path]) -> Packed:
    images, labels, names, broken = pictures.read_letters(files["notMNIST_small.tar.gz"])
    arrays: Arrays = {"x": images, "y": labels, "split": _every_tenth(labels), "names": np.array(names)}
    return Packed(arrays, f"{broken} broken pictures left out" if broken else "")


def _signs(files: Mapping[str, Path]) -> Packed:
    images, labels, tracks = pictures.read_signs(files["GTSRB_Final_Training_Images.zip"])
    test = pictures.read_test_signs(files["GTSRB_Final_Test_Images.zip"], files["GTSRB_Final_Test_GT.zip"])
    arrays = _both((images, labels), test)
    arrays["track"] = np.concatenate([tracks, np.full(len(test[1]), -1, dtype=np.int16)])
    return Packed(arrays)


READ: dict[str, Callable[[Mapping[str, Path]], Packed]] = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "mnist": _idx,
    "fashion_mnist": _idx,
    "svhn": _svhn,
    "notmnist": _notmnist,
    "traffic_signs": _signs,
}


def _both(train: tuple[Images, Labels], test: tuple[Images, Labels]) -> Arrays:
    split = np.repeat(np.array([0, 1], dtype=np.uint8), [len(train[1]), len(test[1])])
    return {"x": np.concatenate([train[0], test[0]]), "y": np.concatenate([train[1], test[1]]), "split": split}


def _every_tenth(labels: Labels) -> NDArray[np.uint8]:
    """A test split for the sets that have none: every tenth image."""
    split = np.zeros(len(labels), dtype=np.uint8)
    split[9::10] = 1
    return split
