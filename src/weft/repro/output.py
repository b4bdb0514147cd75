"""What is written about an experiment: Markdown, LaTeX, pictures, JSON and the table in the terminal."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import RenderableType
from rich.table import Table

from weft.metrics import Spread, spread
from weft.plan import COMPONENTS, Plan
from weft.report.text import markdown_table, share_of_dense, spread_text
from weft.repro import Experiment, Measure, Published, Row
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
COLUMNS: dict[Measure, tuple[str, int, int]] = {  # heading, digits of ours and of the paper's numbers
    "accuracy": ("accuracy (%)", 2, 2),
    "forgetting": ("forgetting", 3, 2),
    "backward_transfer": ("backward transfer", 4, 4),
    "up": ("up (MB/task)", 2, 0),
    "up_of_dense": ("of dense", 2, 2),
    "down": ("down (MB/task)", 2, 0),
    "down_of_dense": ("of dense", 2, 2),
    "model": ("model (MB)", 2, 0),
}


def render(results: Results, more_to_come: bool) -> Mapping[str, str | bytes]:
    """The files of an experiment besides its csv, by suffix; pictures take a second each and are drawn at the end."""
    if not results.experiment.figure:
        return {".md": page(results), ".tex": latex(results)}
    if more_to_come:
        return {}
    pictures: dict[str, bytes] = {}
    if panels := results.panels():
        from weft.report.matplotlib import render as drawn

        pictures = dict(drawn(FIGURES[results.experiment.figure](results.experiment).charts(panels), "png", "svg"))
    return {".md": page(results, [name for name in pictures if name.endswith(".svg")]), **pictures}


def as_object(results: Results) -> dict[str, Any]:
    """The results as JSON."""
    experiment = results.experiment
    failed = [{"row": label, "seed": seed, "problem": why} for (label, seed), why in sorted(results.failures.items())]
    shared = {"title": experiment.title, "commands": commands(results), "failed": failed}
    if experiment.figure:
        panels = {
            panel: {series: [[x, *found] for x, found in curve] for series, curve in curves.items()}
            for panel, curves in results.panels().items()
        }
        return {"figure": experiment.name, **shared, "panels": panels}

    def pairs(values: Mapping[Measure, Spread | Published | None]) -> dict[str, Any]:
        return {key: found and dict(zip(Spread._fields, found, strict=True)) for key, found in values.items()}

    entries = entries_of(results)
    rows = [
        {"row": row.label, "method": row.method, "seeds": seeds, **pairs(measured), "published": pairs(row.paper)}
        for row, seeds, measured in entries
    ]
    order = ranking(entries)
    return {"table": experiment.name, **shared, "rows": rows, "kendall_tau": order and order[2]}


def for_terminal(results: Results, sign: str) -> RenderableType:
    """The table in 80 columns, with `sign` for plus or minus, or the text of the figure."""
    if results.experiment.figure:
        return "\n\n".join(figure_text(results))
    entries = entries_of(results)
    paper = ["paper"] if any("accuracy" in entry.row.paper for entry in entries) else []
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("row", overflow="fold")
    for heading in ("accuracy (%)", *paper, "forgetting", "up (MB)", "down (MB)", "model", "seeds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row, seeds, measured in entries:
        means = {key: found and (found.mean, None) for key, found in measured.items()}
        published = row.paper.get("accuracy")
        table.add_row(
            row.label,
            spread_text(measured["accuracy"], 1, sign),
            *(spread_text(published and (published[0], None), 2, sign) for _ in paper),  # as printed
            spread_text(means.get("forgetting"), 3, sign),
            *(spread_text(means.get(key), 1, sign) for key in ("up", "down", "model")),
            str(seeds),
        )
    return table


# ---- pages -----------------------------------------------------------------------------------------------------------


def page(results: Results, pictures: Sequence[str] = ()) -> str:
    """The page in Markdown."""
    experiment, order = results.experiment, None
    common, differing = plan_keys(experiment)
    text = [f"# {experiment.title}", f"Made by {' and '.join(f'`{one}`' for one in commands(results))}."]
    if experiment.scale == "small":
        text.append("This is a smaller experiment than the paper's; the paper's numbers are those of its full size.")
    text.append(f"Plan `{experiment.plan}`: {_words(common)}.")
    if differing:
        text.append(f"Differences by row: {'; '.join(f'{label} {_words(keys)}' for label, keys in differing.items())}.")
    if experiment.figure:
        text += [f"![{experiment.title}]({experiment.stem}{name})" for name in pictures]
        text += figure_text(results)
        if seeds := {record.seed for record in results.current()}:
            text.append("Means over seeds, bands: ± sample standard deviation." if len(seeds) > 1 else "One seed.")
    else:
        entries = entries_of(results)
        headings, *lines = cells(entries)
        text += [markdown_table(headings, lines), LEGEND]
        order = ranking(entries)
    text += [experiment.note] if experiment.note else []
    if mixed := results.mixed_images():
        text.append(f"Some runs used different images of {', '.join(mixed)} than others: they cannot be compared.")
    if results.failures:
        failures = [f"- {label} s{seed}: {error}" for (label, seed), error in sorted(results.failures.items())]
        text += ["Failed:", "\n".join(failures)]
    if order:
        ours, paper, tau = order
        text.append(
            f"By accuracy, best first: {', '.join(ours)}; in the paper: {', '.join(paper)}. "
            f"Kendall's tau of the two orders of {len(ours)} rows: {'undefined' if tau is None else f'{tau:.2f}'} "
            "(1: the same, -1: the reverse)."
        )
    return "\n\n".join(text) + "\n"


def figure_text(results: Results) -> list[str]:
    assert results.experiment.figure
    figure, panels = FIGURES[results.experiment.figure](results.experiment), results.panels()
    return figure.text(panels) if panels else ["Nothing has been run yet."]


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


def plan_keys(experiment: Experiment) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Keys of the plan with the value of most rows, and for each row the keys that it sets or that differ."""
    plans = {row.label: _shown_keys(experiment.plan_of(row, experiment.first_seed)) for row in experiment.rows}
    common: dict[str, Any] = {}
    for key in dict.fromkeys(key for keys in plans.values() for key in keys):
        most = Counter(repr(keys.get(key)) for keys in plans.values()).most_common(1)[0][0]
        common |= next(({key: keys[key]} for keys in plans.values() if key in keys and repr(keys[key]) == most), {})
    differing = {
        row.label: {key: value for key, value in plans[row.label].items() if repr(common.get(key)) != repr(value)}
        | row.set
        for row in experiment.rows
    }
    return common, {label: keys for label, keys in differing.items() if keys}


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


class Entry(NamedTuple):
    """A row of the table with its means over seeds."""

    row: Row
    seeds: int
    measured: Mapping[Measure, Spread | None]


def entries_of(results: Results) -> list[Entry]:
    """All rows in the order of the table, finished or not."""
    experiment, entries = results.experiment, []
    for row in experiment.rows:
        tasks = experiment.plan_of(row, experiment.first_seed).tasks
        found = [
            measures(line, tasks) for record in results.current() if record.row == row.label for line in record.lines
        ]
        means = {key: spread(one[key] for one in found) for key in COLUMNS if key in experiment.measures}
        entries.append(Entry(row, len(found), means))
    return entries


def measures(line: Mapping[str, Any], tasks: int) -> dict[Measure, float | None]:
    """The measures of a line of the csv."""
    up, down = (
        {what: line[f"{way}_{what}"] for what in ("bytes", "nonzeros", "dense_bytes")} for way in ("c2s", "s2c")
    )
    return {
        "accuracy": line["accuracy"] and 100 * line["accuracy"],
        "forgetting": line["forgetting"],
        "backward_transfer": line["backward_transfer"],
        "up": up["bytes"] / tasks / 1e6 if up["dense_bytes"] else None,
        "up_of_dense": share_of_dense(up),
        "down": down["bytes"] / tasks / 1e6 if down["dense_bytes"] else None,
        "down_of_dense": share_of_dense(down),
        "model": line["model_size_paper_bytes"] / 1e6,
    }


def cells(entries: Sequence[Entry], missing: str = "-") -> list[list[str]]:
    """Headings, then the rows; a measure that the paper has for some row gets a second column."""
    with_paper = {key for entry in entries for key in entry.row.paper}
    table = [["row"], *([entry.row.label] for entry in entries)]
    for key in entries[0].measured:
        heading, digits, paper_digits = COLUMNS[key]
        table[0] += [heading, "paper"] if key in with_paper else [heading]
        for line, entry in zip(table[1:], entries, strict=True):
            line.append(spread_text(entry.measured[key], digits, "±", missing))
            if key in with_paper:
                published = entry.row.paper.get(key)
                whole = published is None or published[0].is_integer()  # some sizes are printed with two digits
                line.append(spread_text(published, paper_digits if whole else max(paper_digits, 2), "±", missing))
    return [[*line, last] for line, last in zip(table, ["seeds", *(str(one.seeds) for one in entries)], strict=True)]


def ranking(entries: Sequence[Entry]) -> tuple[list[str], list[str], float | None] | None:
    """Rows with an accuracy here and in the paper: the order of each, best first, and Kendall's tau."""
    pairs = {
        row.label: (found.mean, row.paper["accuracy"][0])
        for row, _, measured in entries
        if (found := measured["accuracy"]) is not None and "accuracy" in row.paper
    }
    if len(pairs) < 2:
        return None
    ours, paper = (sorted(pairs, key=lambda label: -pairs[label][side]) for side in (0, 1))
    return ours, paper, kendall_tau(*zip(*pairs.values(), strict=True))


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b: pairs in the same order minus pairs in the opposite order, over all pairs without ties.

    >>> kendall_tau([1, 2, 3], [10, 20, 30]), kendall_tau([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    >>> kendall_tau([1, 2, 3], [1, 3, 2])   # 2 pairs agree, 1 does not: (2 - 1) / 3
    0.3333333333333333
    >>> kendall_tau([1, 1, 2], [1, 2, 3]) == 2 / math.sqrt(2 * 3)   # one pair tied on the left, two agree
    True
    >>> kendall_tau([1, 1], [1, 2]) is None   # no order at all
    True
    """
    pairs = itertools.combinations(zip(first, second, strict=True), 2)
    signs = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in pairs]
    untied = sum(one != 0 for one, _ in signs) * sum(other != 0 for _, other in signs)
    return sum(one * other for one, other in signs) / math.sqrt(untied) if untied else None


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
    text = [
        *(f"% made by {command}" for command in commands(results)),
        *(r"\begin{table}", r"\centering", rf"\caption{{{escape(caption)}}}", rf"\label{{tab:{experiment.stem}}}"),
        *(rf"\begin{{tabular}}{{l{'r' * (len(lines[0]) - 1)}}}", r"\toprule", headings, r"\midrule", *rows),
        *(r"\bottomrule", r"\end{tabular}", r"\end{table}"),
    ]
    return "\n".join(text) + "\n"


def escape(text: str) -> str:
    r"""Escape special characters of LaTeX; a minus before a digit becomes a minus sign.

    >>> print(escape("a_b & 5 % of $x^2$ {~} \\ # > -0.1 a-b 1-2"))
    a\_b \& 5 \% of \$x\textasciicircum{}2\$ \{\textasciitilde{}\} \textbackslash{} \# \textgreater{} $-$0.1 a-b 1-2
    """
    escaped = "".join(SPECIAL.get(sign, sign) for sign in text)
    return re.sub(r"(?<![\w.-])-(?=\d)", "$-$", escaped)
