"""From the lines of a table to NAME.csv, NAME.md and NAME.tex: means over seeds, the paper's numbers beside them."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import Problem
from weft.metrics import Spread, spread
from weft.plan import PARTS, Plan
from weft.record import write_text
from weft.repro import Published, Row, Table
from weft.repro.results import Line, Results, csv_text, read_csv
from weft.screens import share_of_dense, spread_text

PAPER_DIGITS = 2
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
    "crossed the wire, of all clients together, for each task; of dense: the values sent as a share of what the same "
    "messages would hold with the whole body in them. Model: nonzeros of B and A only, of all clients together, as the "
    "paper counts."
)


@dataclass(frozen=True)
class Measure:
    key: str  # under which a table has the paper's number
    heading: str
    digits: int
    of: Callable[[Line, int], float | None]  # of a run with so many tasks


def _sent(direction: str) -> Callable[[Line, int], float | None]:
    def megabytes_a_task(line: Line, tasks: int) -> float | None:
        traffic = line.traffic(direction)
        return traffic["bytes"] / tasks / 1e6 if traffic["dense_bytes"] else None

    return megabytes_a_task


MEASURES = (
    Measure("accuracy", "accuracy (%)", 2, lambda line, _: None if line.accuracy is None else 100 * line.accuracy),
    Measure("forgetting", "forgetting", 3, lambda line, _: line.forgetting),
    Measure("up", "up (MB/task)", 2, _sent("c2s")),
    Measure("up_of_dense", "of dense", 2, lambda line, _: share_of_dense(line.traffic("c2s"))),
    Measure("down", "down (MB/task)", 2, _sent("s2c")),
    Measure("down_of_dense", "of dense", 2, lambda line, _: share_of_dense(line.traffic("s2c"))),
    Measure("model", "model (MB)", 2, lambda line, _: line.model_size_paper_bytes / 1e6),
)


@dataclass(frozen=True)
class Entry:
    """A row of the table as it is shown."""

    row: Row
    seeds: int
    found: Mapping[str, Spread | None]  # by measure
    published: Mapping[str, Published]


def entries_of(results: Results) -> list[Entry]:
    """All rows in the table's order, also those of which nothing is known yet."""
    table, entries = results.table, []
    for row in table.rows:
        lines = results.of(row)
        tasks = table.plan_of(row, table.first_seed).tasks
        found = {one.key: spread(one.of(line, tasks) for line in lines) for one in MEASURES}
        entries.append(Entry(row, len(lines), found, table.published.get(row.label, {})))
    return entries


def cells(entries: Sequence[Entry], sign: str = "±", nothing: str = "-") -> list[list[str]]:
    """Headings, then a line a row; a measure that the paper has for some row gets a second column."""
    with_paper = {one.key for one in MEASURES if any(one.key in entry.published for entry in entries)}
    heading = ["row"]
    for one in MEASURES:
        heading += [one.heading, "paper's"] if one.key in with_paper else [one.heading]
    lines = [[*heading, "seeds"]]
    for entry in entries:
        line = [entry.row.label]
        for one in MEASURES:
            line.append(spread_text(entry.found[one.key], one.digits, sign, nothing))
            if one.key in with_paper:
                line.append(spread_text(entry.published.get(one.key), PAPER_DIGITS, sign, nothing))
        lines.append([*line, str(entry.seeds)])
    return lines


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


def command_of(results: Results) -> str:
    """The command that makes all that is shown: what was asked for now, and what was there already."""
    table, lines = results.table, results.current()
    there = {row.label for row in results.rows} | {line.row for line in lines}
    numbers = [*results.seeds, *(line.seed for line in lines)]
    words = ["weft", "repro", table.name, "--seeds", str(max(numbers) - min(numbers) + 1)]
    if table.scale == "small":
        words += ["--scale", "small"]
    if min(numbers) != table.first_seed:
        words += ["--first-seed", str(min(numbers))]
    if len(there) < len(table.rows):
        words += ["--only", ",".join(row.label for row in table.rows if row.label in there)]
    return shlex.join(words)


def facts_of(table: Table) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The plan's keys as most rows have them, and for each row that differs what it has instead."""
    flat = {row.label: _flat(table.plan_of(row, table.first_seed)) for row in table.rows}
    keys = dict.fromkeys(key for keys in flat.values() for key in keys)
    common = {key: Counter(repr(keys.get(key)) for keys in flat.values()).most_common(1)[0][0] for key in keys}
    facts: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for label, values in flat.items():
        for key, value in values.items():
            if repr(value) == common[key]:
                facts[key] = value
            else:
                own.setdefault(label, {})[key] = value
    for row in table.rows:
        own.setdefault(row.label, {}).update(row.keys)
    return facts, {label: keys for label, keys in own.items() if keys}


def _flat(plan: Plan) -> dict[str, Any]:
    """What a reader wants to know of a plan, besides method and seed."""
    shown = ("scenario", "clients", "tasks", "network", "rounds_per_task", "epochs_per_round", "clients_per_round")
    training = (
        "batch_size",
        "optimizer",
        "learning_rate" if plan.optimizer == "adam" else "sgd_rate",
        "measured_model",
    )
    flat = {key: getattr(plan, key) for key in (*shown, *training)}
    for part in PARTS:
        if part != "method":
            options = getattr(plan, f"{part}_options")
            flat |= {f"{part}.{key}": value for key, value in options.items() if value is not None}
    return flat


def markdown(results: Results) -> str:
    table, entries = results.table, entries_of(results)
    facts, own = facts_of(table)
    headings, *lines = [[cell.replace("|", r"\|") for cell in line] for line in cells(entries)]
    text = [f"# {table.title}", "", f"Made by `{command_of(results)}`.", ""]
    text += [f"Plan `{table.file.stem}`: {_words(facts)}.", ""]
    if own:
        text += ["Of their own: " + "; ".join(f"{label} {_words(keys)}" for label, keys in own.items()) + ".", ""]
    text += [_line(headings), _line(["---"] + ["---:"] * (len(headings) - 1)), *map(_line, lines), "", LEGEND]
    if table.note:
        text += ["", table.note]
    if (order := ranking(entries)) is not None:
        tau = "undefined" if order.tau is None else f"{order.tau:.2f}"
        text += [
            "",
            f"By accuracy, best first, ours: {', '.join(order.ours)}; the paper's: {', '.join(order.papers)}. "
            f"Kendall's tau of the two orders of {len(order.ours)} rows: {tau} (1: the same, -1: the reverse).",
        ]
    failures = [f"- {label} s{seed}: {said}" for (label, seed), said in sorted(results.failures.items())]
    if failures:
        text += ["", "Failed:", "", *failures]
    return "\n".join(text) + "\n"


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in keys.items())


def _line(row: Sequence[str]) -> str:
    return f"| {' | '.join(row)} |"


def latex(results: Results) -> str:
    """The same table for a paper that loads booktabs."""
    table = results.table
    headings, *lines = [
        " & ".join(escape(cell) for cell in line) + r" \\" for line in cells(entries_of(results), nothing="--")
    ]
    columns = headings.count(" & ")
    caption = " ".join(filter(None, [f"{table.title.rstrip('.')}.", LEGEND, table.note]))
    return "\n".join(
        [
            f"% made by {command_of(results)}",
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


def as_object(results: Results) -> dict[str, Any]:
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
        "table": results.table.name,
        "title": results.table.title,
        "command": command_of(results),
        "rows": rows,
        "kendall_tau": None if order is None else order.tau,
        "failed": [
            {"row": label, "seed": seed, "problem": said} for (label, seed), said in sorted(results.failures.items())
        ],
    }


def _pair(found: Spread | Published | None) -> dict[str, float | None] | None:
    return None if found is None else {"mean": found[0], "deviation": found[1]}


def files_of(table: Table, folder: Path) -> list[Path]:
    return [folder / f"{table.stem}.{kind}" for kind in ("csv", "md", "tex")]


def write(results: Results, folder: Path) -> None:
    """All three files, each whole; lines that another process has written meanwhile are kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Problem(f"the folder {folder} cannot be made ({error.strerror}); choose another --out") from None
    csv, text, tex = files_of(results.table, folder)
    results.merge(read_csv(csv))
    write_text(csv, csv_text(results.lines.values()))
    write_text(text, markdown(results))
    write_text(tex, latex(results))
