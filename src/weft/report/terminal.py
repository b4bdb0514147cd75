"""Runs in a terminal of 80 columns, as rich tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weft.metrics import Measure, at_the_end, average_accuracy, forgetting, spread
from weft.registry import short
from weft.report import facts
from weft.report.reading import Run
from weft.report.text import decimals, percent, share_of_dense, size
from weft.runs.journal import SITE_EVENTS

SPLITS = ("train", "test", "valid")
MAX_COLUMNS = 10  # tasks or clients
MAX_TASKS = 60  # rows of a scenario


def table(title: str, left: Sequence[str], right: Sequence[str] = (), wide: int = 1) -> Table:
    """A table with text columns first and columns of numbers after them, which are never cut; `wide`: padding."""
    found = Table(
        title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, wide, 0, 0), min_width=len(title)
    )
    for heading in left:
        found.add_column(heading, overflow="fold")
    for heading in right:
        found.add_column(heading, justify="right", no_wrap=True)
    return found


def plus_minus(console: Console) -> str:
    """The sign before a standard deviation, in ASCII if the terminal has no other."""
    return "±" if console.encoding.startswith("utf") else "+-"


# ---- results ---------------------------------------------------------------------------------------------------------


def comparison(
    summaries: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None, mean: str | None = None
) -> Group:
    """One row for each run: accuracy, bytes, size of the model. `names` tell runs with equal labels apart.

    With `mean`, the sign before a deviation, the runs are seeds of one plan and two last rows sum them up.
    """
    models = {"own": "the client's, after its last epoch", "global": "after the next global weights"}
    measured = " / ".join(models[which] for which in sorted({summary["measured_model"] for summary in summaries}))
    labels = [short(str(summary["method"])) for summary in summaries]
    if len(set(labels)) < len(labels):
        labels = [f"{label} s{summary['seed']}" for label, summary in zip(labels, summaries, strict=True)]
    if len(set(labels)) < len(labels) and names is not None:
        labels = list(names)
    columns = ("accuracy", "forgets", "up", "down", "model", "paper's", "time")
    shown_left = ["run" if labels == names else "method"]
    shown = table("", shown_left, columns, wide=0)
    shown.pad_edge = False
    for label, summary in zip(labels, summaries, strict=True):
        sign = "+" if "+" in label else "-"
        name = label if len(label) <= 10 else label.replace(sign, f"{sign}\n")  # break there, not within a word
        shown.add_row(name, *_result([summary]))
    if mean is not None and len(summaries) > 1:
        shown.add_section()
        shown.add_row("mean", *_result(summaries))
        found = (spread(summary[key] for summary in summaries) for key in ("accuracy", "forgetting"))
        accuracy, forgets = (each and each.deviation for each in found)
        shown.add_row(f"{mean} sd", percent(accuracy), decimals(forgets))
    choose = table("on validation images, by which to choose", shown_left, ("accuracy", "forgets"), wide=0)
    choose.pad_edge = False
    for label, summary in zip(labels, summaries, strict=True):
        choose.add_row(label, *_validation([summary]))
    if mean is not None and len(summaries) > 1:
        choose.add_section()
        choose.add_row("mean", *_validation(summaries))
    return Group(
        shown,
        f" accuracy  on test images; tested model: {measured}",
        " up, down  bytes; in parentheses nonzero values (with A) as a share of dense",
        " model     everything needed for all tasks; paper's: nonzero values of B and A",
        choose,
    )


def _validation(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Accuracy and forgetting on validation images, of one run or as means of several."""
    found = [summary.get("validation", {}) for summary in summaries]
    accuracy, forgets = (spread(each.get(key) for each in found) for key in ("accuracy", "forgetting"))
    return [percent(accuracy and accuracy.mean), decimals(forgets and forgets.mean)]


def _result(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """The cells of one run, or the means of several."""

    def mean(key: str) -> float | None:
        found = spread(summary[key] for summary in summaries)
        return found and found.mean

    cells = [percent(mean("accuracy")), decimals(mean("forgetting"))]
    for direction in ("c2s", "s2c"):
        keys = ("bytes", "nonzeros", "dense_bytes")
        sent = {key: fmean(summary["traffic"][direction][key] for summary in summaries) for key in keys}
        share = share_of_dense(sent)
        cells.append("-" if share is None else f"{size(sent['bytes'])} ({share:.2f})")
    sizes = [size(mean(key) or 0.0) for key in ("model_size_bytes", "model_size_paper_bytes")]
    return [*cells, *sizes, f"{mean('seconds') or 0.0:.1f}"]


def matrix(client: int, rows: Sequence[Sequence[float]], images: str = "test") -> Table:
    """The accuracy matrix of one client."""
    title = f"client {client}: accuracy (%) of each task after each task, on {images} images"
    shown = table(title, ["after"], [str(task) for task in range(len(rows))], wide=0)
    for after, row in enumerate(rows):
        shown.add_row(str(after), *(f"{100 * value:.1f}" for value in row))
    return shown


def measures(lines: Sequence[Measure]) -> Table:
    """Metrics other than accuracy, of each task at the end; of a metric by class the lowest value and its class."""
    ending = at_the_end(lines)
    names = list(dict.fromkeys(line.metric for line in ending))
    shown = table("other metrics, at the end", ["client", "task", *names])
    for client, task in sorted({(line.client, line.task) for line in ending}):
        own = [line for line in ending if (line.client, line.task) == (client, task)]
        shown.add_row(str(client), str(task), *(_lowest([one for one in own if one.metric == name]) for name in names))
    return shown


def _lowest(lines: Sequence[Measure]) -> Text:
    """
    >>> _lowest([Measure(0, 0, 0, "recall", "cat", 0.5), Measure(0, 0, 0, "recall", "dog", 0.25)]).plain
    'lowest 0.250 (dog)'
    """
    defined = [line for line in lines if line.value is not None]
    if not defined:
        return Text("-")
    lowest = min(defined, key=lambda line: line.value or 0.0)
    value = decimals(lowest.value)
    return Text(f"lowest {value} ({lowest.label})" if lowest.label else value)


def traffic(sums: Mapping[tuple[str | int, ...], Any]) -> Table | str:
    """Bytes and nonzero values by direction and tensor."""
    if not sums:
        return "nothing was sent"
    shown = table("bytes sent", ["direction", "tensor"], ["bytes", "nonzeros"])
    for (direction, tensor), total in sums.items():
        shown.add_row(str(direction), str(tensor), f"{total.bytes:,}", f"{total.nonzeros:,}")
    return shown


# ---- more about one run ----------------------------------------------------------------------------------------------


def details(run: Run) -> list[RenderableType]:
    """What the page shows of one run beside results, matrices and bytes."""
    shown: list[RenderableType] = [_by_client(run)] if run.matrices else []
    shown += [_density(run)] if run.densities else []
    shown += _helping(*facts.group([run])) if run.attention else []
    return [*shown, *map(Text, _untested(run)), *map(Text, _events(run))]


def _by_client(run: Run) -> Table:
    shown = table("accuracy and forgetting at the end", ["client"], ["accuracy", "forgets"])
    for client, rows in run.matrices.items():
        shown.add_row(str(client), percent(average_accuracy(rows)), decimals(forgetting(rows)))
    return shown


def _density(run: Run) -> Table:
    tasks = sorted({item.task for item in run.densities})[-MAX_COLUMNS:]
    title = "density (%) of A after each task, by layer, and the mean of m"
    shown = table(title, ["layer"], [*(f"A {task}" for task in tasks), "m"])
    for level, layer in enumerate(run.layers):
        cells = [fmean(item.adaptive[level] for item in run.densities if item.task == task) for task in tasks]
        mask = fmean(item.mask_mean[level] for item in run.densities)
        shown.add_row(Text(layer.name), *(f"{100 * value:.1f}" for value in cells), f"{mask:.3f}")
    return shown


def _helping(one: facts.Group) -> list[RenderableType]:
    found, given, equal = facts.contributions(one), facts.shares(one), facts.shares(one, "equal")
    receivers = one.clients[:MAX_COLUMNS]
    title = "who helped whom: the sum of |alpha| over tasks and layers"
    shown = table(title, ["sender"], [*(f"to {client}" for client in receivers), "share", "if equal"])
    for sender in one.clients:
        cells = (found.get((sender, receiver)) for receiver in receivers)
        texts = ("-" if value is None else f"{value:.2f}" for value in cells)
        shown.add_row(str(sender), *texts, percent(given[sender].mean), percent(equal[sender].mean))
    change = facts.largest_change(one)
    lines = [] if change is None else [f" training changed an alpha by at most {percent(change)} of its start"]
    return [shown, *lines, Padding(Text(facts.CAVEATS[0]), (0, 0, 0, 1))]


def _untested(run: Run) -> list[str]:
    """Clients that were not tested after their last task, because they left or were not available."""
    counts = {client: len(names) for client, names in enumerate(run.task_names)}
    return [
        f" client {client} was tested after {len(rows)} of its {counts[client]} tasks; means use its last test"
        for client, rows in run.matrices.items()
        if run.summary is not None and len(rows) < counts.get(client, 0)
    ]


def _events(run: Run) -> list[str]:
    incidents = [f" {event.when} {event.text}" for event in run.events if event.is_incident]
    incidents += [f" {note}" for note in run.notes]
    of_sites = [f" {event.when} {event.text}" for event in run.events if event.kind in SITE_EVENTS]
    shown = ["\nincidents", *incidents] if incidents else []
    return [*shown, "\nevents of sites", *of_sites] if of_sites else shown


# ---- lists -----------------------------------------------------------------------------------------------------------


def scenario(contents: Mapping[str, Any]) -> Group:
    """The tasks of each client in order, of as many clients as fit on a few screens."""
    shown = table("", ["client", "task", "name", "classes"], SPLITS)
    shown.pad_edge = False
    sequences = contents["sequences"]
    clients = max(1, MAX_TASKS // contents["tasks"])
    for client, sequence in enumerate(sequences[:clients]):
        for index, task in enumerate(sequence):
            counts = [f"{task['sizes'][split]:,}" for split in SPLITS]
            shown.add_row(str(client), str(index), task["name"], ", ".join(task["classes"]), *counts)
        shown.add_section()
    total = {split: sum(task["sizes"][split] for own in sequences for task in own) for split in SPLITS}
    lines = [
        f" {contents['scenario']}: {len(sequences)} clients x {contents['tasks']} tasks",
        " images in total: " + ", ".join(f"{count:,} {split}" for split, count in total.items()),
    ]
    if len(sequences) > clients:
        lines.append(f" the first {clients} clients are shown; --json has all of them")
    return Group(shown, *lines, *(Text(f" note: {line}") for line in contents.get("warnings", ())))


def listing(entries: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    shown = Table()
    for column in columns:
        shown.add_column(column.replace("_", " "), overflow="fold")
    for entry in entries:
        values = (entry[column] for column in columns)
        shown.add_row(*(", ".join(value) if isinstance(value, list) else str(value) for value in values))
    return shown
