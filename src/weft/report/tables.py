"""What a page says in tables: the results, and the terms on which they came about (plan, environment, incidents)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from weft.metrics import Spread
from weft.report.facts import Group, differences, measured, rows, unlike
from weft.report.figures import COLOURS
from weft.report.reading import USUAL, Event, Run
from weft.report.screens import duration, size, spread_text

MODELS = {"own": "the client's own after its last epoch", "global": "after the next theta_G"}


def table(headings: Sequence[str], lines: Iterable[Sequence[str]], numbers_from: int = 1) -> str:
    """Cells are HTML already; the first is the row's name."""
    head = "".join(f"<th scope=col>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        "<tr>" + "".join(_cell(place, cell, place >= numbers_from) for place, cell in enumerate(line)) + "</tr>"
        for line in lines
    )
    return f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(place: int, cell: str, number: bool) -> str:
    if place == 0:
        return f"<th scope=row>{cell}</th>"
    return f"<td class=number>{cell}</td>" if number else f"<td>{cell}</td>"


def overview_words(groups: Sequence[Group], lead: str) -> str:
    words = lead
    if waiting := [group.label for group in groups if not group.is_over]:
        words += f" Not over yet: {', '.join(waiting)}."
    if odd := unlike(groups):
        words += f" These runs differ in {', '.join(odd)}: compare them with care."
    return words


def overview_html(groups: Sequence[Group]) -> str:
    found = rows(groups)
    best = max((row.accuracy.mean for row in found if row.accuracy is not None), default=0.0) or 1.0
    lines = []
    for place, row in enumerate(found):
        width = 100 * row.accuracy.mean / best if row.accuracy is not None else 0.0
        own = f"--own: var(--s{place % COLOURS})"
        lines.append(
            [
                f'<span class=swatch style="{own}"></span>{escape(row.label)}',
                f'<span class=meter style="--part: {width:.1f}%; {own}">{_percent(row.accuracy)}</span>',
                spread_text(row.forgetting, 3, "±"),
                _sent(row.up, row.up_share),
                _sent(row.down, row.down_share),
                "-" if row.model is None else size(row.model),
                "-" if row.model_paper is None else size(row.model_paper),
                "-" if row.seconds is None else duration(row.seconds),
                escape(", ".join(map(str, row.seeds))),
                escape(row.state),
            ]
        )
    headings = ("method", "accuracy", "forgetting", "up", "down", "model", "paper's", "time", "seed", "state")
    return table(headings, lines) + f"<p class=about>{escape(_meaning(groups))}</p>"


def _meaning(groups: Sequence[Group]) -> str:
    measured = dict.fromkeys(str(group.plan.get("measured_model", "own")) for group in groups)
    models = " / ".join(MODELS.get(name, name) for name in measured)
    several = (
        "; with several seeds the mean ± one sample deviation" if any(len(group.runs) > 1 for group in groups) else ""
    )
    return (
        f"Accuracy: of test images of every task learned, at the end{several}. The model measured is {models}. Up and "
        "down: bytes, and the nonzeros sent as a share of dense weights. Model: all that answers for all tasks; "
        "paper's: nonzeros of B and A only. Bytes and sizes are of all clients together, the mean over seeds."
    )


def _percent(value: Spread | None) -> str:
    if value is None:
        return "-"
    scaled = (100 * value.mean, None if value.deviation is None else 100 * value.deviation)
    return f"{spread_text(scaled, 1, '±')} %"


def _sent(count: float, share: float | None) -> str:
    return "-" if share is None else f"{size(count)} <small>{share:.2f}</small>"


def measures_html(groups: Sequence[Group]) -> str:
    """What was measured beside accuracy; nothing if no plan asked for any."""
    found = [measured(group) for group in groups]
    keys = list(dict.fromkeys(key for of_group in found for key in of_group))
    if not keys:
        return ""
    lines = [
        [
            escape(f"{metric}, {label}" if label else metric),
            *(spread_text(of_group.get((metric, label)), 3, "±") for of_group in found),
        ]
        for metric, label in keys
    ]
    about = "Of every task at the end: the mean over tasks and clients; a class's, over the tasks that have it."
    shown = table(("measure", *(group.label for group in groups)), lines)
    return f"<h2>Beside accuracy</h2>{shown}<p class=about>{about}</p>"


# ---- on which terms --------------------------------------------------------------------------------------------------


def terms_html(groups: Sequence[Group]) -> str:
    """The plan, the environment and the journal's incidents."""
    runs = [run for group in groups for run in group.runs]
    parts = ["<h2>Plan, environment, incidents</h2>", f"<p class=words>{escape(_incident_words(runs))}</p>"]
    left_out = [["-", escape(group.label), escape(note)] for group in groups for note in group.notes]
    if lines := _incidents(runs) + left_out:
        parts.append(table(("when (UTC)", "run", "what"), lines, numbers_from=3))
    # a key that only one method has is no difference in terms: it stands in its plan
    differing = {key: values for key, values in differences(groups).items() if values.count(None) < len(values) - 1}
    if differing:
        shown = [[escape(key), *(escape(_value(value)) for value in values)] for key, values in differing.items()]
        parts.append("<h3>In what the plans differ</h3>")
        parts.append(table(("key", *(group.label for group in groups)), shown, numbers_from=99))
    for group in groups:
        text = "\n".join(f"{key} = {_value(value)}" for key, value in group.plan.items() if key != "seed")
        parts.append(
            f"<details><summary>The plan of {escape(group.label)}</summary><pre>{escape(text)}</pre></details>"
        )
    parts.append(_environment_html(runs))
    places = "".join(f"<li>{escape(str(run.folder))}: seed {run.seed}</li>" for run in runs)
    parts.append(f"<details><summary>The run folders</summary><ul>{places}</ul></details>")
    return "".join(parts)


def _incident_words(runs: Sequence[Run]) -> str:
    found = _all_incidents(runs)
    resumed = sum(event == "resumed" for _, event, _ in found)
    notes = sum(len(run.notes) for run in runs)
    if not found and not notes:
        return f"{'The run' if len(runs) == 1 else f'All {len(runs)} runs'} went through without an incident."
    words = [f"{resumed} time{'s' if resumed > 1 else ''} a run went on after a stop"] if resumed else []
    other = len(found) - resumed
    words += [f"{other} other incident{'s' if other > 1 else ''}"] if other else []
    words += [f"{notes} thing{'s' if notes > 1 else ''} could not be read"] if notes else []
    return f"{', '.join(words)}."


def _all_incidents(runs: Sequence[Run]) -> list[tuple[float, str, Run]]:
    found = [(event.at, event.event, run) for run in runs for event in run.events if event.is_incident]
    return sorted(found, key=lambda item: item[0])


def _incidents(runs: Sequence[Run]) -> list[list[str]]:
    told: list[tuple[float, Run, Event]] = [
        (event.at, run, event) for run in runs for event in run.events if event.event not in USUAL
    ]
    lines = []
    for at, run, event in sorted(told, key=lambda item: item[0]):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
        lines.append([when, escape(run.folder.name), escape(event.words)])
    return lines + [["-", escape(run.folder.name), escape(note)] for run in runs for note in run.notes]


def _environment_html(runs: Sequence[Run]) -> str:
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(json.dumps(run.environment, indent=2), []).append(run.folder.name)
    blocks = "".join(f"<p>{escape(', '.join(names))}</p><pre>{escape(text)}</pre>" for text, names in found.items())
    kinds = "one for all runs" if len(found) == 1 else f"{len(found)} different ones"
    return f"<details><summary>The environment ({kinds})</summary>{blocks}</details>"


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
