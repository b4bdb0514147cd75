"""The figure of growth: speed and memory by number of tasks, clients and messages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_matplotlib() -> None:
    """Raise an error before twenty minutes of measuring, not after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise WeftError("bench-growth.png needs matplotlib: pip install 'weft[figures]', or omit --out") from None


def draw(results: Mapping[str, Any], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    by_task, by_client, by_message = figure.subplots(1, 3)
    _draw_steps(by_task, results["steps"]["contenders"])
    _draw_clients(by_client, results["memory"])
    _draw_server(by_message, results["server"])
    for axes in (by_task, by_client, by_message):
        axes.legend(fontsize=7)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _draw_steps(axes: Axes, contenders: Mapping[str, Any]) -> None:
    lines: dict[int, list[tuple[int, float]]] = {}
    for one in contenders.values():
        if one.get("past") == "frozen":
            lines.setdefault(one["foreign"], []).append((one["task"], one["images_per_second"]))
    for foreign, points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"FedWeIT, {foreign} foreign A's")
    for name, label, style in (("lenet", "our LeNet alone", "--"), ("plain", "plain LeNet", ":")):
        axes.axhline(contenders[name]["images_per_second"], linestyle=style, color="grey", label=label)
    _log_axis(axes, {task for points in lines.values() for task, _ in points})
    axes.set(xlabel="task", ylabel="images per second", title="training step of a client, one thread", ylim=(0, None))


def _draw_clients(axes: Axes, memory: Mapping[str, Any]) -> None:
    points = sorted((int(count), one) for count, one in memory["clients"].items())
    counts = [count for count, _ in points]
    axes.plot(counts, [one["peak_bytes"] / 1e9 for _, one in points], marker="o", label="peak memory, GB")
    axes.plot(counts, [one["round_seconds"]["median"] for _, one in points], marker="s", label="seconds per round")
    _log_axis(axes, set(counts))
    axes.set(xlabel="clients", title=f"whole runs, {memory['asked_per_round']} clients per round", ylim=(0, None))


def _draw_server(axes: Axes, server: Mapping[str, Any]) -> None:
    merged = sorted((int(count), one["milliseconds_per_message"]) for count, one in server["aggregation"].items())
    same_size = list(server["knowledge_base"].values())[1:]  # entries of the first one are larger
    sampled = sorted((one["entries"], one["sample_milliseconds"]) for one in same_size)
    axes.plot(*zip(*merged, strict=True), marker="o", label="merging, ms per reply")
    axes.plot(*zip(*sampled, strict=True), marker="s", label="sampling the knowledge base, ms")
    _log_axis(axes, {count for count, _ in [*merged, *sampled]})
    axes.set(yscale="log", xlabel="replies, or entries", title="the server")


def _log_axis(axes: Axes, counts: set[int]) -> None:
    """A logarithmic axis with ticks at the measured values only."""
    axes.set_xscale("log")
    axes.set_xticks(sorted(counts), [f"{count:,}" for count in sorted(counts)])
    axes.set_xticks([], minor=True)
