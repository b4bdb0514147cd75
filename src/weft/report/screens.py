"""Tables of runs for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from weft.metrics import Spread, at_the_end, spread
from weft.registry import short
from weft.runs.folder import Measured

TRAFFIC = ("bytes", "nonzeros", "dense_bytes")
SIZES = ("train", "test", "valid")
MOST_LINES = 60  # of a scenario's tasks


def duration(seconds: float) -> str:
    """
    >>> duration(8.2), duration(95), duration(7300)
    ('8 s', '1 min 35 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float) -> str:
    """
    >>> size(999), size(60_258_400), size(1.22e9)
    ('999 B', '60.3 MB', '1.22 GB')
    """
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= step:
            return f"{count / step:.3g} {unit}"
    return f"{count:.0f} B"


def share_of_dense(traffic: Mapping[str, float]) -> float | None:
    """The values sent, A included, as a share of what the same messages would hold with the whole body in them."""
    return 4 * traffic["nonzeros"] / traffic["dense_bytes"] if traffic["dense_bytes"] else None


def comparison(
    summaries: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None, mean: str | None = None
) -> Group:
    """One row a run: how well it learned, what it sent, what it keeps. `names` tell runs apart that look alike.

    With `mean`, the sign before a deviation, the runs are seeds of one plan and two last rows sum them up.
    """
    models = {"own": "the client's own after its last epoch", "global": "after the next theta_G"}
    measured = " / ".join(models[which] for which in sorted({summary["measured_model"] for summary in summaries}))
    labels = [short(str(summary["method"])) for summary in summaries]
    if len(set(labels)) < len(labels):
        labels = [f"{short(str(summary['method']))} s{summary['seed']}" for summary in summaries]
    if len(set(labels)) < len(labels) and names is not None:
        labels = list(names)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("run" if labels == names else "method", overflow="fold")  # two lines, before any number is cut
    for heading in ("accuracy", "forgets", "up", "down", "model", "paper's", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for label, summary in zip(labels, summaries, strict=True):
        table.add_row(
            label if len(label) <= 10 else label.replace("+", "+\n"),  # rather there than within a name
            percent(summary["accuracy"]),
            decimals(summary["forgetting"]),
            *(_sent(summary["traffic"][direction]) for direction in ("c2s", "s2c")),
            size(summary["model_size_bytes"]),
            size(summary["model_size_paper_bytes"]),
            f"{summary['seconds']:.1f}",
        )
    if mean is not None and len(summaries) > 1:
        table.add_section()
        for row in _mean_rows(summaries, mean):
            table.add_row(*row)
    return Group(
        table,
        f" accuracy  of test images; model measured: {measured}",
        " up, down  bytes; in brackets the nonzeros sent, A included, as a share of dense",
        " model     all that answers for all tasks; paper's: nonzeros of B and A only",
    )


def _mean_rows(summaries: Sequence[Mapping[str, Any]], sign: str) -> list[list[str]]:
    """The means, and below them the sample deviations of what chance decides: side by side they need 90 columns."""

    def mean(key: str) -> float:
        return fmean(summary[key] for summary in summaries)

    accuracy, forgetting = (spread(summary[key] for summary in summaries) for key in ("accuracy", "forgetting"))
    sent = [
        {key: fmean(summary["traffic"][direction][key] for summary in summaries) for key in TRAFFIC}
        for direction in ("c2s", "s2c")
    ]
    kept = [size(mean("model_size_bytes")), size(mean("model_size_paper_bytes"))]
    means, deviations = (
        [percent(accuracy and accuracy[place]), decimals(forgetting and forgetting[place])] for place in (0, 1)
    )
    return [
        ["mean", *means, *map(_sent, sent), *kept, f"{mean('seconds'):.1f}"],
        [f"{sign} sd", *deviations],
    ]


def spread_text(found: Spread | tuple[float, float | None] | None, digits: int, sign: str, nothing: str = "-") -> str:
    """
    >>> spread_text((75.16, 1.25), 1, "±"), spread_text((-0.0001, None), 2, "±"), spread_text(None, 2, "±")
    ('75.2 ± 1.2', '0.00', '-')
    """
    if found is None:
        return nothing
    mean = f"{round(found[0], digits) + 0.0:.{digits}f}"  # + 0.0: no -0.00
    return mean if found[1] is None else f"{mean} {sign} {found[1]:.{digits}f}"


def plus_minus(console: Console) -> str:
    """The sign between a mean and its deviation, as far as the terminal can show it."""
    return "±" if console.encoding.startswith("utf") else "+-"


def _sent(traffic: Mapping[str, float]) -> str:
    share = share_of_dense(traffic)
    return "-" if share is None else f"{size(traffic['bytes'])} ({share:.2f})"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def matrix(client: int, rows: Sequence[Sequence[float]]) -> Table:
    """One client's accuracy matrix."""
    title = f"client {client}: accuracy (%) of each task after each task"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, min_width=len(title))
    table.add_column("after", no_wrap=True)
    for task in range(len(rows)):
        table.add_column(str(task), justify="right", no_wrap=True)
    for after, row in enumerate(rows):
        table.add_row(str(after), *(f"{100 * value:.1f}" for value in row))
    return table


def measures(lines: Sequence[Measured]) -> Table:
    """What was measured beside accuracy, of each task at the end; of one by class the lowest, and of which."""
    ending = at_the_end(lines)
    names = list(dict.fromkeys(line.metric for line in ending))
    title = "measured at the end, beside accuracy"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), min_width=len(title))
    for heading in ("client", "task"):
        table.add_column(heading, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for client, task in sorted({(line.client, line.task) for line in ending}):
        own = [line for line in ending if (line.client, line.task) == (client, task)]
        table.add_row(
            str(client), str(task), *(_measured([one for one in own if one.metric == name]) for name in names)
        )
    return table


def _measured(lines: Sequence[Measured]) -> Text:
    """
    >>> _measured([Measured(0, 0, 0, "recall", "cat", 0.5), Measured(0, 0, 0, "recall", "dog", 0.25)]).plain
    'lowest 0.250 (dog)'
    """
    there = [line for line in lines if line.value is not None]
    if not there:
        return Text("-")
    lowest = min(there, key=lambda line: line.value or 0.0)
    words = decimals(lowest.value)
    return Text(f"lowest {words} ({lowest.label})" if lowest.label else words)


def traffic(sums: Mapping[tuple[str | int, ...], Any]) -> Table | str:
    """Bytes and nonzeros by direction and part."""
    if not sums:
        return "nothing crossed the wire"
    table = Table(title="what crossed the wire", title_justify="left")
    for heading in ("direction", "tensor", "bytes", "nonzeros"):
        table.add_column(heading, justify="left" if heading in ("direction", "tensor") else "right")
    for (direction, part), total in sums.items():
        table.add_row(str(direction), str(part), f"{total.bytes:,}", f"{total.nonzeros:,}")
    return table


def scenario(contents: Mapping[str, Any]) -> Group:
    """What each client learns in which order: a line a task, of as many clients as fit in some screens."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("client", "task", "name", "classes"):
        table.add_column(heading, overflow="fold")
    for heading in SIZES:
        table.add_column(heading, justify="right", no_wrap=True)
    sequences = contents["sequences"]
    shown = max(1, MOST_LINES // contents["tasks"])
    for client, sequence in enumerate(sequences[:shown]):
        for step, task in enumerate(sequence):
            counts = [f"{task['sizes'][part]:,}" for part in SIZES]
            table.add_row(str(client), str(step), task["name"], ", ".join(task["classes"]), *counts)
        table.add_section()
    total = {part: sum(task["sizes"][part] for own in sequences for task in own) for part in SIZES}
    lines = [f" {contents['scenario']}: {len(sequences)} clients x {contents['tasks']} tasks"]
    lines.append(" images, all together: " + ", ".join(f"{count:,} {part}" for part, count in total.items()))
    if len(sequences) > shown:
        lines.append(f" the first {shown} clients are shown; --json has all of them")
    told = [Text(f" note: {line}") for line in contents.get("warnings", ())]
    return Group(table, *lines, *told)


def listing(entries: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for entry in entries:
        values = (entry[column] for column in columns)
        table.add_row(*(", ".join(value) if isinstance(value, list) else str(value) for value in values))
    return table
