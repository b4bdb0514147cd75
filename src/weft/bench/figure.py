"""The figure of growth: what becomes slower or larger with tasks, clients and messages, and what stays flat."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "the figure of growth needs matplotlib: pip install 'weft[figures]', or leave out --out"


def check() -> None:
    """A missing library is told before twenty minutes of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WeftError(MISSING) from None


def draw(found: Mapping[str, Any], file: Path) -> None:
    check()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    by_task, by_client, by_message = figure.subplots(1, 3)
    _tasks(by_task, found["steps"])
    _clients(by_client, found["memory"])
    _messages(by_message, found["server"])
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _tasks(axes: Axes, steps: Mapping[str, Any]) -> None:
    contenders = steps["contenders"]
    lines: dict[int, list[tuple[int, float]]] = {}
    for one in contenders.values():
        if one.get("past") == "frozen":
            lines.setdefault(one["foreign"], []).append((one["task"], one["images_per_second"]))
    for foreign, points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"FedWeIT, {foreign} foreign A's")
    for name, label in (("lenet", "our LeNet alone"), ("plain", "plain LeNet")):
        style = "--" if name == "lenet" else ":"
        axes.axhline(contenders[name]["images_per_second"], linestyle=style, color="grey", label=label)
    _by_size(axes, {task for points in lines.values() for task, _ in points})
    axes.set(xlabel="task", ylabel="images a second", title="a client's step, one thread", ylim=(0, None))
    axes.legend(fontsize=7)


def _clients(axes: Axes, memory: Mapping[str, Any]) -> None:
    points = sorted((int(count), one) for count, one in memory["clients"].items())
    counts = [count for count, _ in points]
    axes.plot(counts, [one["peak_bytes"] / 1e9 for _, one in points], marker="o", label="peak memory, GB")
    axes.plot(counts, [one["round_seconds"]["median"] for _, one in points], marker="s", label="seconds a round")
    title = f"whole runs, {memory['asked_per_round']} clients asked a round"
    _by_size(axes, set(counts))
    axes.set(xlabel="clients", title=title, ylim=(0, None))
    axes.legend(fontsize=7)


def _messages(axes: Axes, server: Mapping[str, Any]) -> None:
    merged = sorted((int(count), one["milliseconds_per_message"]) for count, one in server["aggregation"].items())
    stored = sorted(
        (one["entries"], one["sample_milliseconds"])
        for one in list(server["knowledge_base"].values())[1:]  # the first one's entries have another size
    )
    axes.plot(*zip(*merged, strict=True), marker="o", label="merging, ms a message")
    axes.plot(*zip(*stored, strict=True), marker="s", label="sampling the knowledge base, ms")
    _by_size(axes, {count for count, _ in [*merged, *stored]})
    axes.set(yscale="log", xlabel="messages, or entries", title="the server alone")
    axes.legend(fontsize=7)


def _by_size(axes: Axes, counts: set[int]) -> None:
    """A logarithmic axis that names what was measured, and nothing between."""
    axes.set_xscale("log")
    axes.set_xticks(sorted(counts), [f"{count:,}" for count in sorted(counts)])
    axes.set_xticks([], minor=True)
