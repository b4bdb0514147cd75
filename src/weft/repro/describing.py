"""What texts about tables and figures share: the command that makes them again, and what their plans say."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Any

from weft.plan import COMPONENTS, Plan
from weft.repro import Experiment
from weft.repro.store import F, Results


def commands_of(results: Results[F]) -> list[str]:
    """The commands that make all that is shown, one for each number of seeds; if nothing is, the one that was given."""
    seeds: dict[str, list[int]] = {}
    for line in results.current():
        seeds.setdefault(line.row, []).append(line.seed)
    if not seeds:
        seeds = {row.label: [*results.seeds] for row in results.rows}
    rows: dict[tuple[int, int], list[str]] = {}
    for row in results.experiment.rows:
        if row.label in seeds:
            rows.setdefault((min(seeds[row.label]), max(seeds[row.label])), []).append(row.label)
    return [_command(results.experiment, *span, only) for span, only in rows.items()]


def _command(experiment: Experiment, first: int, last: int, only: list[str]) -> str:
    words = ["weft", "repro", experiment.name, "--seeds", str(last - first + 1)]
    if experiment.scale == "small":
        words += ["--scale", "small"]
    if first != experiment.first_seed:
        words += ["--first-seed", str(first)]
    if len(only) < len(experiment.rows):
        words += ["--only", ",".join(only)]
    return shlex.join(words)


def facts_of(experiment: Experiment) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The plan's keys as most rows have them, and for each row that differs what it has instead."""
    flat = {row.label: _flat(experiment.plan_of(row, experiment.first_seed)) for row in experiment.rows}
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
    for row in experiment.rows:
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
    if plan.clients_per_round != "all":
        flat["train_unchosen"] = plan.train_unchosen  # whether the others learn too decides what comes out
    for part in COMPONENTS:
        if part != "method":
            options = getattr(plan, f"{part}_options")
            flat |= {f"{part}.{key}": value for key, value in options.items() if value is not None}
    return flat


def heading(results: Results[F]) -> list[str]:
    """The first lines of a Markdown page: title, command, plan."""
    experiment = results.experiment
    facts, own = facts_of(experiment)
    text = [
        f"# {experiment.title}",
        "",
        f"Made by {' and '.join(f'`{command}`' for command in commands_of(results))}.",
        "",
    ]
    if experiment.scale == "small":
        text += ["At a smaller scale than the paper's, whose numbers are of its own: the next line has ours.", ""]
    text += [f"Plan `{experiment.file.stem}`: {_words(facts)}.", ""]
    if own:
        text += ["Of their own: " + "; ".join(f"{label} {_words(keys)}" for label, keys in own.items()) + ".", ""]
    return text


def endings(results: Results[F]) -> list[str]:
    """The last lines of a Markdown page: what a reader must know, which images, what failed."""
    text = ["", results.experiment.note] if results.experiment.note else []
    if mixed := results.mixed_images():
        text += ["", f"Some runs used other images of {', '.join(mixed)} than others: they do not compare."]
    if results.failures:
        text += ["", "Failed:", ""]
        text += [f"- {label} s{seed}: {said}" for (label, seed), said in sorted(results.failures.items())]
    return text


def grid(headings: list[str], lines: list[list[str]]) -> list[str]:
    """A Markdown table; all columns but the first hold numbers."""
    rule = ["---", *["---:"] * (len(headings) - 1)]
    rows = [[cell.replace("|", r"\|") for cell in line] for line in (headings, rule, *lines)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _words(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in keys.items())
