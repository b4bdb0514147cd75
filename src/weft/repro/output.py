"""What is written about an experiment: Markdown, LaTeX, pictures, JSON and the table in the terminal."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table

from weft.metrics import Spread, spread
from weft.plan import COMPONENTS, Plan
from weft.report.text import share_of_dense, spread_text
from weft.repro import Experiment, Measure, Published, Row, drawing
from weft.repro.curves import Panels, grid, panels_of
from weft.repro.figures import FIGURES
from weft.repro.store import Results

LEGEND = (
    "Mean ± sample standard deviation over seeds. Accuracy: on the test images of all tasks at the end. Up and down: "
    "bytes of all messages, of all clients together, per task; FedWeIT quantizes values to int8 unless the plan says "
    "otherwise, the other methods and the paper use float32. Of dense: values sent, whatever their size in bytes, as a "
    "share of the whole body in each message with weights. Model: nonzeros of B and A, of all clients together, as the "
    "paper counts; neither the initial A, which is drawn from the seed, nor foreign A's count (model_size_bytes in the "
    "csv includes everything that is stored)."
)
SHOWN = (
    *("scenario", "clients", "tasks", "network", "rounds_per_task", "epochs_per_round", "clients_per_round"),
    *("batch_size", "optimizer", "learning_rate", "sgd_rate", "measured_model", "train_unchosen"),
)  # keys of a plan on the page


def render(results: Results, more_to_come: bool) -> Mapping[str, str | bytes]:
    """The files of an experiment besides its csv, by suffix; pictures take a second each and are drawn at the end."""
    if not results.experiment.figure:
        return {".md": table_page(results), ".tex": latex(results)}
    if more_to_come:
        return {}
    panels = panels_from(results)
    charts = FIGURES[results.experiment.figure].charts(panels) if panels else {}
    pictures = [drawing.files(chart, suffix) for suffix, chart in charts.items()]
    return {
        ".md": figure_page(results, list(charts)),
        **{name: file for some in pictures for name, file in some.items()},
    }


def as_object(results: Results) -> dict[str, Any]:
    """The results as JSON."""
    experiment = results.experiment
    failed = [
        {"row": label, "seed": seed, "problem": error} for (label, seed), error in sorted(results.failures.items())
    ]
    shared = {"title": experiment.title, "commands": commands(results), "failed": failed}
    if experiment.figure:
        panels = {
            panel: {series: [[x, *found] for x, found in curve] for series, curve in curves.items()}
            for panel, curves in panels_from(results).items()
        }
        return {"figure": experiment.name, **shared, "panels": panels}
    entries = entries_of(results)
    rows = [
        {
            "row": entry.row.label,
            "method": entry.row.method,
            "seeds": entry.seeds,
            **{key: _pair(found) for key, found in entry.measured.items()},
            "published": {key: _pair(found) for key, found in entry.row.paper.items()},
        }
        for entry in entries
    ]
    order = ranking(entries)
    return {"table": experiment.name, **shared, "rows": rows, "kendall_tau": order.tau if order else None}


def _pair(found: Spread | Published | None) -> dict[str, float | None] | None:
    return None if found is None else {"mean": found[0], "deviation": found[1]}


def for_terminal(results: Results, sign: str) -> RenderableType:
    """The table in 80 columns, with `sign` for plus or minus, or the text of the figure."""
    if results.experiment.figure:
        return "\n\n".join(figure_text(results))
    entries = entries_of(results)
    with_paper = any("accuracy" in entry.row.paper for entry in entries)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("row", overflow="fold")
    paper = ["paper"] if with_paper else []
    for heading in ("accuracy (%)", *paper, "forgetting", "up (MB)", "down (MB)", "model", "seeds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        means = {key: found and (found.mean, None) for key, found in entry.measured.items()}
        published = entry.row.paper.get("accuracy")
        table.add_row(
            entry.row.label,
            spread_text(entry.measured["accuracy"], 1, sign),
            *([spread_text(published and (published[0], None), 2, sign)] if with_paper else []),  # as printed
            spread_text(means.get("forgetting"), 3, sign),
            *(spread_text(means.get(key), 1, sign) for key in ("up", "down", "model")),
            str(entry.seeds),
        )
    return table


# ---- pages -----------------------------------------------------------------------------------------------------------


def table_page(results: Results) -> str:
    entries = entries_of(results)
    headings, *lines = cells(entries)
    text = [*_heading(results), grid(headings, lines), "", LEGEND, *_ending(results)]
    if (order := ranking(entries)) is not None:
        tau = "undefined" if order.tau is None else f"{order.tau:.2f}"
        text += [
            "",
            f"By accuracy, best first: {', '.join(order.ours)}; in the paper: {', '.join(order.paper)}. "
            f"Kendall's tau of the two orders of {len(order.ours)} rows: {tau} (1: the same, -1: the reverse).",
        ]
    return "\n".join(text) + "\n"


def figure_page(results: Results, suffixes: Sequence[str]) -> str:
    experiment = results.experiment
    text = _heading(results)
    for suffix in suffixes:
        text += [f"![{experiment.title}]({experiment.stem}{suffix}.svg)", ""]
    text += ["\n\n".join(figure_text(results))]
    if seeds := {record.seed for record in results.current()}:
        text += ["", "Means over seeds, bands: ± sample standard deviation." if len(seeds) > 1 else "One seed."]
    return "\n".join([*text, *_ending(results)]) + "\n"


def figure_text(results: Results) -> list[str]:
    assert results.experiment.figure
    panels = panels_from(results)
    return FIGURES[results.experiment.figure].text(panels) if panels else ["Nothing has been run yet."]


def panels_from(results: Results) -> Panels:
    assert results.experiment.figure
    return panels_of(results.experiment.rows, FIGURES[results.experiment.figure].columns, results.current())


def commands(results: Results) -> list[str]:
    """The commands that produce what is shown, one for each range of seeds; before the first run, the requested one."""
    experiment = results.experiment
    seeds: dict[str, list[int]] = {}
    for record in results.current():
        seeds.setdefault(record.row, []).append(record.seed)
    seeds = seeds or {row.label: [*results.seeds] for row in results.rows}
    rows: dict[tuple[int, int], list[str]] = {}
    for row in experiment.rows:
        if row.label in seeds:
            rows.setdefault((min(seeds[row.label]), max(seeds[row.label])), []).append(row.label)
    found = []
    for (first, last), only in rows.items():
        words = ["weft", "repro", str(experiment.file or experiment.name), "--seeds", str(last - first + 1)]
        words += ["--scale", "small"] if experiment.scale == "small" else []
        words += ["--first-seed", str(first)] if first != experiment.first_seed else []
        words += ["--only", ",".join(only)] if len(only) < len(experiment.rows) else []
        found.append(shlex.join(words))
    return found


def _heading(results: Results) -> list[str]:
    experiment = results.experiment
    common, differing = plan_keys(experiment)
    text = [f"# {experiment.title}", "", f"Made by {' and '.join(f'`{one}`' for one in commands(results))}.", ""]
    if experiment.scale == "small":
        text += ["This is a smaller experiment than the paper's; the paper's numbers are those of its full size.", ""]
    text += [f"Plan `{experiment.plan}`: {_words(common)}.", ""]
    if differing:
        rows = "; ".join(f"{label} {_words(keys)}" for label, keys in differing.items())
        text += [f"Differences by row: {rows}.", ""]
    return text


def _ending(results: Results) -> list[str]:
    text = ["", results.experiment.note] if results.experiment.note else []
    if mixed := results.mixed_images():
        text += ["", f"Some runs used different images of {', '.join(mixed)} than others: they cannot be compared."]
    if results.failures:
        text += ["", "Failed:", ""]
        text += [f"- {label} s{seed}: {error}" for (label, seed), error in sorted(results.failures.items())]
    return text


def plan_keys(experiment: Experiment) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Keys of the plan with the value of most rows, and for each row the keys that it sets or that differ."""
    plans = {row.label: _shown_keys(experiment.plan_of(row, experiment.first_seed)) for row in experiment.rows}
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for keys in plans.values() for key in keys):
        most = Counter(repr(keys.get(key)) for keys in plans.values()).most_common(1)[0][0]
        common |= next(({key: keys[key]} for keys in plans.values() if key in keys and repr(keys[key]) == most), {})
    differing: dict[str, dict[str, Any]] = {}
    for row in experiment.rows:
        keys = plans[row.label]
        own = {key: value for key, value in keys.items() if key not in common or repr(common[key]) != repr(value)}
        if own or row.set:
            differing[row.label] = {**own, **row.set}
    return common, differing


def _shown_keys(plan: Plan) -> dict[str, Any]:
    hidden = ["sgd_rate" if plan.optimizer == "adam" else "learning_rate"]
    hidden += ["train_unchosen"] if plan.clients_per_round == "all" else []
    keys = {key: getattr(plan, key) for key in SHOWN if key not in hidden}
    for part in COMPONENTS:
        if part != "method":
            options = getattr(plan, f"{part}_options")
            keys |= {f"{part}.{key}": value for key, value in options.items() if value is not None}
    return keys


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in keys.items())


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    heading: str
    digits: int
    paper_digits: int
    value: Callable[[Mapping[str, Any], int], float | None]  # from a line of the csv and the number of tasks


def _traffic(line: Mapping[str, Any], way: str) -> dict[str, float]:
    return {what: line[f"{way}_{what}"] for what in ("bytes", "nonzeros", "dense_bytes")}


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _megabytes(line: Mapping[str, Any], way: str, tasks: int) -> float | None:
    return line[f"{way}_bytes"] / tasks / 1e6 if line[f"{way}_dense_bytes"] else None


COLUMNS: dict[Measure, Column] = {
    "accuracy": Column("accuracy (%)", 2, 2, lambda line, _: _percent(line["accuracy"])),
    "forgetting": Column("forgetting", 3, 2, lambda line, _: line["forgetting"]),
    "backward_transfer": Column("backward transfer", 4, 4, lambda line, _: line["backward_transfer"]),
    "up": Column("up (MB/task)", 2, 0, lambda line, tasks: _megabytes(line, "c2s", tasks)),
    "up_of_dense": Column("of dense", 2, 2, lambda line, _: share_of_dense(_traffic(line, "c2s"))),
    "down": Column("down (MB/task)", 2, 0, lambda line, tasks: _megabytes(line, "s2c", tasks)),
    "down_of_dense": Column("of dense", 2, 2, lambda line, _: share_of_dense(_traffic(line, "s2c"))),
    "model": Column("model (MB)", 2, 0, lambda line, _: line["model_size_paper_bytes"] / 1e6),
}


@dataclass(frozen=True)
class Entry:
    """A row of the table with its means over seeds."""

    row: Row
    seeds: int
    measured: Mapping[Measure, Spread | None]


def entries_of(results: Results) -> list[Entry]:
    """All rows in the order of the table, finished or not."""
    experiment, entries = results.experiment, []
    measures = [measure for measure in COLUMNS if measure in experiment.measures]
    for row in experiment.rows:
        lines = [line for record in results.of(row) for line in record.lines]
        tasks = experiment.plan_of(row, experiment.first_seed).tasks
        measured = {key: spread(COLUMNS[key].value(line, tasks) for line in lines) for key in measures}
        entries.append(Entry(row, len(lines), measured))
    return entries


def cells(entries: Sequence[Entry], sign: str = "±", missing: str = "-") -> list[list[str]]:
    """Headings, then the rows; a measure that the paper has for some row gets a second column."""
    measures = list(entries[0].measured)
    with_paper = {key for entry in entries for key in entry.row.paper}
    table = [["row"], *([entry.row.label] for entry in entries)]
    for key in measures:
        column = COLUMNS[key]
        table[0] += [column.heading, "paper"] if key in with_paper else [column.heading]
        for line, entry in zip(table[1:], entries, strict=True):
            line.append(spread_text(entry.measured[key], column.digits, sign, missing))
            if key in with_paper:
                published = entry.row.paper.get(key)
                whole = published is None or published[0].is_integer()  # some sizes are printed with two digits
                digits = column.paper_digits if whole else max(column.paper_digits, 2)
                line.append(spread_text(published, digits, sign, missing))
    return [[*line, last] for line, last in zip(table, ["seeds", *(str(one.seeds) for one in entries)], strict=True)]


@dataclass(frozen=True)
class Ranking:
    """Rows with an accuracy here and in the paper, best first."""

    ours: tuple[str, ...]
    paper: tuple[str, ...]
    tau: float | None


def ranking(entries: Sequence[Entry]) -> Ranking | None:
    pairs = {
        entry.row.label: (found.mean, entry.row.paper["accuracy"][0])
        for entry in entries
        if (found := entry.measured["accuracy"]) is not None and "accuracy" in entry.row.paper
    }
    if len(pairs) < 2:
        return None
    ours, paper = (tuple(sorted(pairs, key=lambda label: -pairs[label][side])) for side in (0, 1))
    return Ranking(ours, paper, kendall_tau(*zip(*pairs.values(), strict=True)))


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b: pairs in the same order minus pairs in the opposite order, over all pairs without ties.

    >>> kendall_tau([1, 2, 3], [10, 20, 30]), kendall_tau([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    >>> kendall_tau([1, 2, 3], [1, 3, 2])   # 2 pairs agree, 1 does not: (2 - 1) / 3
    0.3333333333333333
    >>> kendall_tau([1, 1], [1, 2]) is None   # no order at all
    True
    """
    pairs = itertools.combinations(zip(first, second, strict=True), 2)
    signs = [(_sign(a - c), _sign(b - d)) for (a, b), (c, d) in pairs]
    untied = sum(one != 0 for one, _ in signs) * sum(other != 0 for _, other in signs)
    return sum(one * other for one, other in signs) / math.sqrt(untied) if untied else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


LATEX = r"""
\begin{{table}}
\centering
\caption{{{caption}}}
\label{{tab:{stem}}}
\begin{{tabular}}{{l{columns}}}
\toprule
{headings}
\midrule
{rows}
\bottomrule
\end{{tabular}}
\end{{table}}
"""
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


def latex(results: Results) -> str:
    """The table for LaTeX with booktabs."""
    experiment = results.experiment
    lines = cells(entries_of(results), missing="--")
    headings, *rows = (" & ".join(map(escape, line)) + r" \\" for line in lines)
    caption = " ".join(filter(None, [f"{experiment.title.rstrip('.')}.", LEGEND, experiment.note]))
    return "\n".join(f"% made by {command}" for command in commands(results)) + LATEX.format(
        caption=escape(caption),
        stem=experiment.stem,
        columns="r" * (len(lines[0]) - 1),
        headings=headings,
        rows="\n".join(rows),
    )


def escape(text: str) -> str:
    r"""Escape special characters of LaTeX; a minus before a digit becomes a minus sign.

    >>> print(escape("a_b & 5 % of $x^2$ {~} \\ # -0.1"))
    a\_b \& 5 \% of \$x\textasciicircum{}2\$ \{\textasciitilde{}\} \textbackslash{} \# $-$0.1
    """
    escaped = "".join(SPECIAL.get(sign, sign) for sign in text)
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)
