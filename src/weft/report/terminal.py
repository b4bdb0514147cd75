"""What a run did, for a terminal of 80 columns: the facts of the page as tables and small charts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from weft import metrics
from weft.report.facts import Group, group, over_rounds, over_tasks
from weft.report.helping import CAVEATS, largest_move, mean_contributions, shares
from weft.report.reading import ORDERLY, Event, Run
from weft.report.screens import decimals, percent

BLOCKS, LETTERS = "▁▂▃▄▅▆▇█", ".:-=+*#@"  # for terminals that can show blocks, and for those that cannot
MOST_COLUMNS = 10  # of tasks or clients
MOST_ROUNDS = 24  # columns of a chart


def spark(values: Sequence[float | None], low: float, high: float, signs: str = BLOCKS) -> str:
    """A line of small bars; a gap where there is nothing.

    >>> spark([0.0, 0.5, None, 1.0], 0, 1)
    '▁▅ █'
    >>> spark([0.5, 0.5], 0.5, 0.5, LETTERS)
    '@@'
    """
    reach = high - low

    def sign(value: float) -> str:
        part = (value - low) / reach if reach > 0 else 1.0
        return signs[min(len(signs) - 1, max(0, round(part * (len(signs) - 1) + 1e-9)))]

    return "".join(" " if value is None else sign(value) for value in values)


def more_about(run: Run, console: Console) -> list[RenderableType]:
    """Beside the table of results, the matrices and the bytes: all else that the page shows of one run."""
    one = group([run])[0]
    signs = BLOCKS if console.encoding.startswith("utf") else LETTERS
    found: list[RenderableType] = []
    if one.steps:
        found.append(_learning(one, signs))
    if run.densities:
        found.append(_density(run))
    if run.attention:
        found += _helping(one)
    return [*found, *_unfinished(run), *_incidents(run)]


def _unfinished(run: Run) -> list[RenderableType]:
    """Who was not tested after its last task, as it has left or was away: means count it as it was then."""
    if run.summary is None:
        return []
    tasks = {client: len(run.tasks[client]) if client < len(run.tasks) else 0 for client in run.matrices}
    early = [(client, len(matrix)) for client, matrix in run.matrices.items() if len(matrix) < tasks[client]]
    return [
        Text(f" client {client} was tested after {count} of its {tasks[client]} tasks; means count it as it was then")
        for client, count in early
    ]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), min_width=len(title))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=place > 0, overflow="fold")
    return table


def _learning(one: Group, signs: str) -> Table:
    """Each client: accuracy and forgetting after each task as a chart with its last value, and its rounds."""
    table = _table("how it went: after each task, and round by round", ["client", "accuracy", "", "forgets", "rounds"])
    curves = {client: over_tasks(one, metrics.average_accuracy, client) for client in one.clients}
    every = [point.mean for curve in curves.values() for point in curve if point is not None]
    rounds = {client: [value.mean for value in over_rounds(one, client).values()] for client in one.clients}
    learned = [value for values in rounds.values() for value in values]
    for client, curve in curves.items():
        means = [None if point is None else point.mean for point in curve]
        forgetting = over_tasks(one, metrics.forgetting, client)[-1]
        table.add_row(
            str(client),
            spark(means, min(every), max(every), signs),
            percent(means[-1]),
            decimals(None if forgetting is None else forgetting.mean),
            spark(_fewer(rounds[client]), min(learned), max(learned), signs) if learned else "",
        )
    low, high = percent(min(every)), percent(max(every))
    table.caption = f"charts: accuracy from {low} to {high}; rounds are validation accuracy of the task being learned"
    table.caption_justify = "left"
    return table


def _fewer(values: Sequence[float]) -> list[float]:
    """Means of neighbours, so many that they fit.

    >>> _fewer([1.0, 2.0])
    [1.0, 2.0]
    >>> len(_fewer([0.0] * 100)) <= MOST_ROUNDS
    True
    """
    together = -(-len(values) // MOST_ROUNDS)
    return [fmean(values[place : place + together]) for place in range(0, len(values), max(1, together))]


def _density(run: Run) -> Table:
    steps = sorted({item.step for item in run.densities})[-MOST_COLUMNS:]
    columns = ["layer", *(f"A {step}" for step in steps), "m"]
    table = _table("density (%) of A after each task, by layer; and the mean of m", columns)
    for level, layer in enumerate(run.layers):
        cells = [fmean(item.adaptive[level] for item in run.densities if item.step == step) for step in steps]
        mask = fmean(item.mask_mean[level] for item in run.densities)
        table.add_row(Text(layer.name), *(f"{100 * value:.1f}" for value in cells), f"{mask:.3f}")
    return table


def _helping(one: Group) -> list[RenderableType]:
    found, given, even = mean_contributions(one), shares(one), shares(one, "even")
    takers = one.clients[:MOST_COLUMNS]
    columns = ["giver", *(f"to {client}" for client in takers), "share", "if even"]
    table = _table("who helped whom: the sum of |alpha| over tasks and layers", columns)
    for giver in one.clients:
        cells = (found.get((giver, taker)) for taker in takers)
        told = ("-" if value is None else f"{value:.2f}" for value in cells)
        table.add_row(str(giver), *told, percent(given[giver].mean), percent(even[giver].mean))
    lines: list[RenderableType] = [table]
    if (move := largest_move(one)) is not None:
        lines.append(f" training moved an alpha by {percent(move)} of its even start at most")
    return [*lines, Padding(Text(CAVEATS[0]), (0, 0, 0, 1))]


def _incidents(run: Run) -> list[RenderableType]:
    lines = [_line(event) for event in run.events if event.is_incident]
    lines += [Text(f" {note}") for note in run.notes]
    orderly = [_line(event) for event in run.events if event.event in ORDERLY]
    found: list[RenderableType] = [Text("\nincidents"), *lines] if lines else []
    return [*found, Text("\nwhat sites did"), *orderly] if orderly else found


def _line(event: Event) -> Text:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(event.at))
    return Text(f" {when} {event.words}")
