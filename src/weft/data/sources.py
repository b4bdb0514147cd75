"""The eight public datasets: their files, addresses, checksums and normalization.

A checksum is listed only if the authors published it or a widely used library checks it. Where it is None, the
checksum of the first download is stored in the cache and checked from then on.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import WeftError, nearest


@dataclass(frozen=True)
class File:
    name: str
    urls: tuple[str, ...]  # tried in this order
    md5: str | None = None


@dataclass(frozen=True)
class Source:
    name: str
    title: str
    classes: int
    images: int | None  # of the complete dataset, train and test; a cache may hold fewer
    files: tuple[File, ...]  # empty: no public source


def _mirrored(mirrors: tuple[str, ...], checksums: dict[str, str | None]) -> tuple[File, ...]:
    return tuple(File(name, tuple(mirror + name for mirror in mirrors), md5) for name, md5 in checksums.items())


CIFAR = ("https://www.cs.toronto.edu/~kriz/",)
CIFAR_10 = (*CIFAR, "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/")
MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
FASHION = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
SVHN = ("http://ufldl.stanford.edu/housenumbers/",)
NOTMNIST = ("http://yaroslavvb.com/upload/notMNIST/", "https://commondatastorage.googleapis.com/books1000/")
SIGNS = (
    "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/",
    "http://benchmark.ini.rub.de/Dataset/",
)

CIFAR_10_FILES: dict[str, str | None] = {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
CIFAR_100_FILES: dict[str, str | None] = {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}
MNIST_FILES: dict[str, str | None] = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
FASHION_FILES: dict[str, str | None] = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
SVHN_FILES: dict[str, str | None] = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
SIGNS_FILES: dict[str, str | None] = {
    "GTSRB_Final_Training_Images.zip": None,
    "GTSRB_Final_Test_Images.zip": "c7e4e6327067d32654124b0fe9e82185",
    "GTSRB_Final_Test_GT.zip": "fe31e9c9270bbcd7b84b7f21a9d9d9e5",
}

SOURCES = {
    source.name: source
    for source in (
        Source("cifar10", "CIFAR-10", 10, 60_000, _mirrored(CIFAR_10, CIFAR_10_FILES)),
        Source("cifar100", "CIFAR-100", 100, 60_000, _mirrored(CIFAR, CIFAR_100_FILES)),
        Source("mnist", "MNIST", 10, 70_000, _mirrored(MNIST, MNIST_FILES)),
        Source("fashion_mnist", "Fashion-MNIST", 10, 70_000, _mirrored(FASHION, FASHION_FILES)),
        Source("svhn", "SVHN, cropped digits", 10, 99_289, _mirrored(SVHN, SVHN_FILES)),
        Source("notmnist", "notMNIST, small", 10, 18_724, _mirrored(NOTMNIST, {"notMNIST_small.tar.gz": None})),
        Source("traffic_signs", "GTSRB traffic signs", 43, 51_839, _mirrored(SIGNS, SIGNS_FILES)),
        Source("facescrub", "FaceScrub, 100 people", 100, None, ()),
    )
}

Channels = tuple[float, ...]
# Mean and deviation of each dataset per channel, in 0..255. CIFAR: the constants of the released code (and of HAT
# before it) for both datasets. Others: measured on the train split of the images used for our results, grayscale
# images after padding to 32x32; a test marked `data` checks them. FaceScrub is measured when it is packed.
NORMALIZATION: dict[str, tuple[Channels, Channels]] = {
    "cifar10": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "cifar100": ((125.3, 123.0, 113.9), (63.0, 62.1, 66.7)),
    "mnist": ((25.7, 25.7, 25.7), (70.3, 70.3, 70.3)),
    "fashion_mnist": ((55.7, 55.7, 55.7), (84.4, 84.4, 84.4)),
    "svhn": ((111.3, 112.7, 120.1), (50.5, 51.3, 50.3)),
    "notmnist": ((83.1, 83.1, 83.1), (112.2, 112.2, 112.2)),
    "traffic_signs": ((86.7, 80.5, 83.2), (68.7, 66.2, 68.2)),
}


def source_of(name: str) -> Source:
    if name not in SOURCES:
        raise WeftError(f"there is no dataset {name!r}; {nearest(name, SOURCES)} (weft data list shows all)")
    return SOURCES[name]
