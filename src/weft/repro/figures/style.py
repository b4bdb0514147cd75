"""How all figures look: one palette that the colour-blind can tell apart, one face for each method, one way to save."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.errors import WeftError
from weft.repro.figures.points import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Picture

# Okabe and Ito's palette, without the yellow that is lost on white
BLACK, ORANGE, SKY, GREEN, BLUE, RED, PINK = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
GREY = "#767676"
SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same picture on any machine
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "legend.frameon": False,
    "svg.hashsalt": "weft",  # equal numbers give an equal file
}
DOTS_PER_INCH = 200


class Face(NamedTuple):
    name: str
    colour: str
    marker: str
    line: str = "-"


FACES = {
    "fedweit": Face("FedWeIT", RED, "o"),
    "apd": Face("APD (local)", SKY, "s"),
    "fedprox+apd": Face("FedProx-APD", BLUE, "^"),
    "fedavg+apd": Face("FedAvg-APD", GREEN, "v"),
    "ewc": Face("EWC (local)", GREY, "s", "--"),
    "fedprox+ewc": Face("FedProx-EWC", ORANGE, "X", "--"),
    "fedavg+ewc": Face("FedAvg-EWC", PINK, "v", "--"),
    "fedprox": Face("FedProx", BLACK, "D", ":"),
    "fedavg": Face("FedAvg", BLACK, "x", ":"),
    "fedcurv": Face("FedCurv", PINK, "P", "-."),
    "svhn": Face("receiving from SVHN", GREEN, "o"),
    "cifar10": Face("receiving from CIFAR-10", RED, "s"),
    "nobody": Face("receiving from nobody", BLACK, "D", ":"),
    "none": Face("in step", BLACK, "D", ":"),
    "task_clocks": Face("own task clocks", BLUE, "^"),
    "updates": Face("as answers arrive", RED, "o"),
    "with": Face("with foreign A's", RED, "o"),
    "without": Face("without", BLACK, "D", ":"),
}
DATASETS = {
    "cifar100": ("CIFAR-100", RED),
    "cifar10": ("CIFAR-10", ORANGE),
    "traffic_signs": ("Traffic Sign", GREEN),
    "svhn": ("SVHN", SKY),
    "mnist": ("MNIST", BLUE),
    "fashion_mnist": ("Fashion-MNIST", PINK),
    "notmnist": ("notMNIST", GREY),
    "facescrub": ("FaceScrub", BLACK),
}


def name_of(series: str) -> str:
    return FACES[series].name if series in FACES else series


def dataset_name(dataset: str) -> str:
    return DATASETS[dataset][0] if dataset in DATASETS else dataset


def check() -> None:
    """Told before anything is run: without matplotlib there are no pictures."""
    if find_spec("matplotlib") is None:
        raise WeftError('figures are drawn with matplotlib, which is not there: pip install "weft[figures]"')


@contextmanager
def drawing() -> Iterator[None]:
    """All that is drawn and saved within looks as it should, whatever a user's own settings are."""
    import matplotlib

    settings: Any = SETTINGS  # its type lists every key that there is
    with matplotlib.rc_context(settings):
        yield


def new(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Picture, list[list[Axes]]]:
    """A picture of so many inches with a grid of axes; share_y=True and the like as matplotlib's subplots has them."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False, **options)
    return picture, [list(row) for row in axes]


def plot(axes: Axes, series: str, curve: Curve, scale: float = 1.0) -> None:
    """A curve with its deviation over seeds as a band, where there is one."""
    face = FACES.get(series, Face(series, GREY, "o"))
    xs = [x for x, _ in curve]
    ys = [scale * found.mean for _, found in curve]
    every = max(1, len(xs) // 10)  # markers that touch each other are no markers
    axes.plot(
        xs,
        ys,
        color=face.colour,
        linestyle=face.line,
        marker=face.marker,
        markevery=every,
        label=face.name,
        linewidth=1.9 if series == "fedweit" else 1.3,
        zorder=4 if series == "fedweit" else 3,
    )
    if any(found.deviation for _, found in curve):
        below, above = (
            [scale * min(max(found.mean + side * (found.deviation or 0.0), 0.0), 1.0) for _, found in curve]
            for side in (-1, 1)
        )  # all that has a band is a share
        axes.fill_between(xs, below, above, color=face.colour, alpha=0.15, linewidth=0)


def whole_numbers(axes: Axes) -> None:
    """Rounds and tasks have no halves."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def legend_below(picture: Picture, axes: list[list[Axes]], columns: int) -> None:
    """One legend for all panels, each series once, in the order of FACES."""
    found: dict[str, Any] = {}
    for row in axes:
        for one in row:
            found |= {str(label): handle for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    names = [face.name for face in FACES.values() if face.name in found]
    if names:
        picture.legend([found[name] for name in names], names, loc="outside lower center", ncols=columns)


def files(picture: Picture, suffix: str) -> Mapping[str, bytes]:
    """A picture as PNG and SVG, without the date and the program that made them."""
    found = {}
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        file = io.BytesIO()
        picture.savefig(file, format=kind, dpi=DOTS_PER_INCH, metadata=metadata)
        found[f"{suffix}.{kind}"] = file.getvalue()
    return found
