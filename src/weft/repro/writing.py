"""From the lines of a table to NAME.csv, NAME.md and NAME.tex: means over seeds, the paper's numbers beside them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.metrics import Spread, spread
from weft.report.text import share_of_dense, spread_text
from weft.repro import Published, Row, Table
from weft.repro.describing import commands_of, endings, grid, heading
from weft.repro.desk import Desk
from weft.repro.store import Key, Line, Results, csv_text, read_csv, read_line

SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}
LEGEND = (
    "Mean ± sample deviation over seeds. Accuracy: of test images of all tasks at the end. Up and down: all bytes that "
    "crossed the wire, of all clients together, for each task; FedWeIT's values travel as a byte each unless the plan "
    "says otherwise, those of the others and of the paper as four. Of dense: how many values were sent, whatever their "
    "bytes, as a share of the network's body once in each message that brings any. Model: nonzeros of B and A only, of "
    "all clients together, as the paper counts; what A is counted from is drawn from the seed and not counted, nor are "
    "foreign A's (model_size_bytes in the csv has all that is kept)."
)


@dataclass(frozen=True)
class Measure:
    key: str  # under which a table has the paper's number
    heading: str
    digits: int
    paper_digits: int
    of: Callable[[Line, int], float | None]  # of a run with so many tasks


def _sent(direction: str) -> Callable[[Line, int], float | None]:
    def megabytes_a_task(line: Line, tasks: int) -> float | None:
        traffic = line.traffic(direction)
        return traffic["bytes"] / tasks / 1e6 if traffic["dense_bytes"] else None

    return megabytes_a_task


MEASURES = (
    Measure("accuracy", "accuracy (%)", 2, 2, lambda line, _: None if line.accuracy is None else 100 * line.accuracy),
    Measure("forgetting", "forgetting", 3, 2, lambda line, _: line.forgetting),
    Measure("backward_transfer", "backward transfer", 4, 4, lambda line, _: line.backward_transfer),
    Measure("up", "up (MB/task)", 2, 0, _sent("c2s")),
    Measure("up_of_dense", "of dense", 2, 2, lambda line, _: share_of_dense(line.traffic("c2s"))),
    Measure("down", "down (MB/task)", 2, 0, _sent("s2c")),
    Measure("down_of_dense", "of dense", 2, 2, lambda line, _: share_of_dense(line.traffic("s2c"))),
    Measure("model", "model (MB)", 2, 0, lambda line, _: line.model_size_paper_bytes / 1e6),
)


@dataclass(frozen=True)
class Entry:
    """A row of the table as it is shown."""

    row: Row
    seeds: int
    found: Mapping[str, Spread | None]  # by measure
    published: Mapping[str, Published]


def entries_of(results: Results[Line]) -> list[Entry]:
    """All rows in the table's order, also those of which nothing is known yet."""
    table, entries = table_of(results), []
    for row in table.rows:
        lines = results.of(row)
        tasks = table.plan_of(row, table.first_seed).tasks
        found = {
            one.key: spread(one.of(line, tasks) for line in lines) for one in MEASURES if one.key in table.measures
        }
        entries.append(Entry(row, len(lines), found, table.published.get(row.label, {})))
    return entries


def table_of(results: Results[Line]) -> Table:
    assert isinstance(results.experiment, Table)
    return results.experiment


def cells(entries: Sequence[Entry], sign: str = "±", nothing: str = "-") -> list[list[str]]:
    """Headings, then a line a row; a measure that the paper has for some row gets a second column."""
    shown = [one for one in MEASURES if one.key in entries[0].found]
    with_paper = {one.key for one in shown if any(one.key in entry.published for entry in entries)}
    headings = ["row"]
    for one in shown:
        headings += [one.heading, "paper's"] if one.key in with_paper else [one.heading]
    lines = [[*headings, "seeds"]]
    for entry in entries:
        line = [entry.row.label]
        for one in shown:
            line.append(spread_text(entry.found[one.key], one.digits, sign, nothing))
            if one.key in with_paper:
                published = entry.published.get(one.key)
                line.append(spread_text(published, _printed_digits(one, published), sign, nothing))
        lines.append([*line, str(entry.seeds)])
    return lines


def _printed_digits(measure: Measure, published: Published | None) -> int:
    """The paper prints some sizes with two digits and most with none."""
    whole = published is None or float(published[0]).is_integer()
    return measure.paper_digits if whole else max(measure.paper_digits, 2)


@dataclass(frozen=True)
class Ranking:
    """Rows that both we and the paper have an accuracy for, best first."""

    ours: tuple[str, ...]
    papers: tuple[str, ...]
    tau: float | None


def ranking(entries: Sequence[Entry]) -> Ranking | None:
    pairs = {
        entry.row.label: (found.mean, entry.published["accuracy"][0])
        for entry in entries
        if (found := entry.found["accuracy"]) is not None and "accuracy" in entry.published
    }
    if len(pairs) < 2:
        return None
    ours, papers = (tuple(sorted(pairs, key=lambda label: -pairs[label][side])) for side in (0, 1))
    tau = kendall_tau([pair[0] for pair in pairs.values()], [pair[1] for pair in pairs.values()])
    return Ranking(ours, papers, tau)


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b: pairs in the same order less pairs in the other, over all pairs, with ties allowed for.

    >>> kendall_tau([1, 2, 3], [10, 20, 30]), kendall_tau([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    >>> kendall_tau([1, 2, 3], [1, 3, 2])   # 2 pairs agree, 1 does not: (2 - 1) / 3
    0.3333333333333333
    >>> kendall_tau([1, 1], [1, 2]) is None   # no order at all
    True
    """
    signs = [
        (_sign(a - c), _sign(b - d)) for (a, b), (c, d) in itertools.combinations(zip(first, second, strict=True), 2)
    ]
    untied = sum(one != 0 for one, _ in signs) * sum(other != 0 for _, other in signs)
    return sum(one * other for one, other in signs) / math.sqrt(untied) if untied else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def markdown(results: Results[Line]) -> str:
    entries = entries_of(results)
    headings, *lines = cells(entries)
    text = [*heading(results), *grid(headings, lines), "", LEGEND, *endings(results)]
    if (order := ranking(entries)) is not None:
        tau = "undefined" if order.tau is None else f"{order.tau:.2f}"
        text += [
            "",
            f"By accuracy, best first, ours: {', '.join(order.ours)}; the paper's: {', '.join(order.papers)}. "
            f"Kendall's tau of the two orders of {len(order.ours)} rows: {tau} (1: the same, -1: the reverse).",
        ]
    return "\n".join(text) + "\n"


def latex(results: Results[Line]) -> str:
    """The same table for a paper that loads booktabs."""
    table = table_of(results)
    headings, *lines = [
        " & ".join(escape(cell) for cell in line) + r" \\" for line in cells(entries_of(results), nothing="--")
    ]
    columns = headings.count(" & ")
    caption = " ".join(filter(None, [f"{table.title.rstrip('.')}.", LEGEND, table.note]))
    return "\n".join(
        [
            *(f"% made by {command}" for command in commands_of(results)),
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escape(caption)}}}",
            rf"\label{{tab:{table.stem}}}",
            rf"\begin{{tabular}}{{l{'r' * columns}}}",
            r"\toprule",
            headings,
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def escape(text: str) -> str:
    r"""A text that LaTeX prints as it stands; a minus before a digit becomes one.

    >>> print(escape("a_b & 5 % of $x^2$ {~} \\ # -0.1"))
    a\_b \& 5 \% of \$x\textasciicircum{}2\$ \{\textasciitilde{}\} \textbackslash{} \# $-$0.1
    """
    escaped = "".join(SPECIAL.get(sign, sign) for sign in text)
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)


def as_object(results: Results[Line]) -> dict[str, Any]:
    """The table for a program."""
    entries = entries_of(results)
    order = ranking(entries)
    rows = [
        {
            "row": entry.row.label,
            "method": entry.row.method,
            "seeds": entry.seeds,
            **{key: _pair(found) for key, found in entry.found.items()},
            "published": {key: _pair(found) for key, found in entry.published.items()},
        }
        for entry in entries
    ]
    return {
        "table": results.experiment.name,
        "title": results.experiment.title,
        "commands": commands_of(results),
        "rows": rows,
        "kendall_tau": None if order is None else order.tau,
        "failed": [
            {"row": label, "seed": seed, "problem": said} for (label, seed), said in sorted(results.failures.items())
        ],
    }


def _pair(found: Spread | Published | None) -> dict[str, float | None] | None:
    return None if found is None else {"mean": found[0], "deviation": found[1]}


class TableDesk(Desk[Line]):
    """A line for each run in NAME.csv, and the table in Markdown and LaTeX."""

    def read(self, row: Row, seed: int, folder: Path) -> Line:
        return read_line(row, seed, folder)

    def read_csv(self, path: Path) -> dict[Key, Line]:
        return read_csv(path)

    def csv_text(self, results: Results[Line]) -> str:
        return csv_text(results.lines.values())

    def others(self, results: Results[Line], more_to_come: bool) -> Mapping[str, str | bytes]:
        return {".md": markdown(results), ".tex": latex(results)}
