"""Figures of what was learned: accuracy after each task, matrices, forgetting, adaptation, alone or together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from weft import metrics
from weft.metrics import Spread
from weft.report.facts import MEAN, Curve, Group, Measure, matrix, over_rounds, over_tasks
from weft.report.figures import (
    COLOURS,
    SYMBOLS,
    Figure,
    Section,
    Trace,
    curve_traces,
    grid_layout,
    heatmap,
    percents,
    plain,
    round_axis,
    task_axis,
    task_borders,
    when,
)
from weft.report.helping import Help, helps
from weft.report.screens import percent


def everybody(group: Group) -> list[int | None]:
    """The mean of all clients, then each of them; one client alone is its own mean."""
    return [None, *group.clients]


def accuracy_section(groups: Sequence[Group]) -> Section:
    about = (
        "After each task a client answers for every task it has learned so far. A point is the mean accuracy over "
        "those tasks, on test images; with several seeds, the veil is one deviation."
    )
    words = _trend_words(groups)
    figures = _over_tasks("accuracy-after", groups, metrics.average_accuracy, "accuracy (%)", words)
    return Section("accuracy", "Accuracy after each task", words, about, figures)


def forgetting_section(groups: Sequence[Group]) -> Section:
    about = (
        "How far a task has dropped from its best accuracy, the mean over the earlier tasks. Zero is nothing lost; "
        "below zero, later tasks helped earlier ones."
    )
    words = _forgetting_words(groups)
    figures = _over_tasks("forgetting-after", groups, metrics.forgetting, "forgetting (points)", words)
    return Section("forgetting", "Forgetting", words, about, figures)


def _over_tasks(name: str, groups: Sequence[Group], measure: Measure, axis: str, words: str) -> list[Figure]:
    """One figure, or none while there is nothing to draw."""
    if not _finals(groups, measure):
        return []
    traces: list[Trace] = []
    for place, group in enumerate(groups):
        hover = [f"after task {step}" for step in range(group.steps)]
        for client in everybody(group):
            curve = over_tasks(group, measure, client)
            traces += curve_traces(place, group, client, list(range(group.steps)), curve, hover)
    steps = max((group.steps for group in groups), default=0)
    layout = {"xaxis": task_axis(steps), "yaxis": {"title": {"text": axis}, "zeroline": measure is metrics.forgetting}}
    title = {"accuracy-after": "Mean accuracy of the tasks so far", "forgetting-after": "Mean drop from the best"}[name]
    return [Figure(name, title, words, traces, layout)]


def _finals(groups: Sequence[Group], measure: Measure) -> list[tuple[str, Spread]]:
    found = [(group.label, (over_tasks(group, measure) or [None])[-1]) for group in groups]
    return [(label, value) for label, value in found if value is not None]


def accuracy_words(groups: Sequence[Group]) -> str:
    finals = sorted(_finals(groups, metrics.average_accuracy), key=lambda pair: -pair[1].mean)
    if not finals:
        return "No task has been learned yet."
    best, value = finals[0]
    words = f"{best} stands at {percent(value.mean)}"
    if len(finals) == 1:
        return f"{words} over all tasks learned so far."
    second, next_value = finals[1]
    lead = 100 * (value.mean - next_value.mean)
    words += f", {lead:.1f} points ahead of {second}" if lead >= 0.05 else f", level with {second}"
    if len(finals) > 2:
        worst, low = finals[-1]
        words += f"; {worst} is last with {percent(low.mean)}"
    noise = max((each.deviation or 0.0) for _, each in finals[:2])
    if 0 < lead < 100 * noise:
        words += f". The lead is smaller than one deviation over seeds ({100 * noise:.1f} points)"
    return f"{words}."


def _trend_words(groups: Sequence[Group]) -> str:
    parts = []
    for group in groups:
        points = [point.mean for point in over_tasks(group, metrics.average_accuracy) if point is not None]
        if len(points) > 1:
            parts.append(f"{group.label} from {percent(points[0])} to {percent(points[-1])}")
    if not parts:
        return "No task has been learned yet." if not any(group.steps for group in groups) else accuracy_words(groups)
    if len(parts) > 6:
        parts = [*parts[:5], f"and {len(parts) - 5} more"]
    return f"From the first task to the last: {', '.join(parts)}."


def _forgetting_words(groups: Sequence[Group]) -> str:
    finals = sorted(_finals(groups, metrics.forgetting), key=lambda pair: pair[1].mean)
    if not finals:
        return "Forgetting can be measured once a client has learned two tasks."
    parts = [f"{label} {100 * value.mean + 0.0:.1f}" for label, value in finals]
    if len(parts) > 6:
        parts = [*parts[:3], "...", *parts[-2:]]
    return f"Points lost on earlier tasks, from least to most: {', '.join(parts)}."


def matrix_section(groups: Sequence[Group]) -> Section:
    lowest = _lowest(groups)
    figures = [
        _matrix_figure(place, group, client, lowest)
        for place, group in enumerate(groups)
        for client in everybody(group)
        if group.steps
    ]
    about = (
        "Each row is a moment, after learning that task; each column a task. Read down a column to see what later "
        "tasks did to it. Pick clients above to see their own."
    )
    return Section("matrix", "Accuracy matrix of each client", _matrix_words(groups), about, figures, small=True)


def _lowest(groups: Sequence[Group]) -> int:
    """Where the colours of all matrices begin, in percent: full tens, so that differences are seen and agree."""
    values = [
        value
        for group in groups
        for run in group.runs
        for rows in run.matrices.values()
        for row in rows
        for value in row
        if not math.isnan(value)
    ]
    return 10 * int(10 * min(values, default=0.0))


def _matrix_figure(place: int, group: Group, client: int | None, lowest: int) -> Figure:
    cells = matrix(group, client)
    steps = [str(step) for step in range(group.steps)]
    tasks = [_task(group, client, step) for step in range(group.steps)]
    who = MEAN if client is None else str(client)
    shown = [percents(row) for row in cells]
    hover = plain(group.label) + ": %{x} after task %{y}: %{z:.1f} %<extra></extra>"
    layout = grid_layout("task", "after task")
    layout["xaxis"] |= {"tickvals": tasks, "ticktext": steps}
    title = f"{group.label}, {'mean of clients' if client is None else f'client {client}'}"
    last = [value for value in cells[-1] if value is not None]
    words = f"{title}: at the end " + ", ".join(f"task {i} {percent(value)}" for i, value in enumerate(last))
    trace = heatmap(tasks, steps, shown, hover, zmin=lowest, zmax=100)
    return Figure(
        f"matrix-{place}-{who}",
        title,
        words,
        [trace],
        layout,
        height=230 + 14 * max(0, group.steps - 4),
        group=place,
        client=who,
    )


def _task(group: Group, client: int | None, step: int) -> str:
    if client is None or len(group.runs) > 1:  # other seeds have other tasks
        return f"task {step}"
    name = group.runs[0].task_name(client, step)
    return name if name == f"task {step}" else f"task {step} ({name})"


def _matrix_words(groups: Sequence[Group]) -> str:
    drops = []
    for group in groups:
        for client in group.clients:
            cells = matrix(group, client)
            for task in range(len(cells) - 1):
                own, last = cells[task][task], cells[-1][task]
                if own is not None and last is not None:
                    drops.append((own - last, group.label, client, task, own, last))
    if not drops:
        return "There is nothing to compare until a client has learned two tasks."
    drop, label, client, task, own, last = max(drops)
    if drop <= 0:
        return "No task of any client has lost accuracy since it was learned."
    return (
        f"The largest loss: task {task} of client {client} with {label}, from {percent(own)} when it was learned to "
        f"{percent(last)} at the end."
    )


def adaptation_section(groups: Sequence[Group]) -> Section:
    about = (
        "Validation accuracy of the task being learned, after each round of training; the line starts anew with each "
        "task. The sooner it rises, the more a client could build upon."
    )
    traces: list[Trace] = []
    for place, group in enumerate(groups):
        for client in everybody(group):
            xs, curve, hover = _round_points(group, client)
            traces += curve_traces(place, group, client, xs, curve, hover) if xs else []
    steps = max((group.runs[0].steps for group in groups), default=0)
    words = _adaptation_words(groups)
    layout = {
        "xaxis": round_axis(steps),
        "yaxis": {"title": {"text": "validation accuracy (%)"}},
        "shapes": task_borders(steps),
    }
    figure = Figure("adaptation-rounds", "Validation accuracy, round by round", words, traces, layout)
    return Section("adaptation", "Adaptation within a task", words, about, [figure])


def _round_points(group: Group, client: int | None) -> tuple[list[float], Curve, list[str]]:
    """Where each round stands, what it gave, and what it is called; with a gap between two tasks."""
    xs: list[float] = []
    curve: Curve = []
    hover: list[str] = []
    before = 0
    for (step, number), value in over_rounds(group, client).items():
        if step != before and xs:
            xs.append(float(step))
            curve.append(None)
            hover.append("")
        before = step
        xs.append(when((step, number), group))
        curve.append(value)
        hover.append(f"task {step}, round {number}")
    return xs, curve, hover


def _adaptation_words(groups: Sequence[Group]) -> str:
    first: list[tuple[float, str]] = []
    for group in groups:
        later = [value.mean for (step, number), value in over_rounds(group).items() if step > 0 and number == 0]
        if later:
            first.append((fmean(later), group.label))
    if not first:
        return "No later task has been begun yet."
    (best, label), *others = sorted(first, reverse=True)
    words = f"After the first round of a later task, {label} is furthest: {percent(best)} on average"
    rest = [f"{name} {percent(mean)}" for mean, name in others[:3]]
    return f"{words} ({', '.join(rest)})." if rest else f"{words}."


def alone_section(groups: Sequence[Group]) -> Section:
    found = helps(groups)
    title = "Does federation help me?"
    if not found:
        words = (
            "This needs two finished runs on the same tasks and seed, with the same network and as much training: one "
            "that is federated, and one in which each client works alone, such as stl, local or apd. They are not both "
            "here."
        )
        return Section("alone", title, words)
    compared = ", ".join(
        f"{one.together.label} with {one.alone.label} (seed{'s' if len(one.seeds) > 1 else ''} "
        f"{', '.join(map(str, one.seeds))})"
        for one in found
    )
    about = (
        "For each client: accuracy at the end, together minus alone, in points. A bar is the mean over the client's "
        "tasks, a mark one task. Alone stands for the strongest of the runs here in which nothing is sent. "
        f"Compared are {compared}."
    )
    caveats = ["A difference of a few points on some hundred test images can be chance; more seeds tell."]
    words = " ".join(map(_help_words, found))
    traces: list[Trace] = []
    for one in found:
        traces += _help_traces(groups.index(one.together), one)
    layout = {
        "barmode": "group",
        "scattermode": "group",
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "gain (points)"}, "zeroline": True},
    }
    figure = Figure("alone-gain", "Gain over working alone", words, traces, layout)
    return Section("alone", title, words, about, [figure], caveats)


def _help_words(one: Help) -> str:
    worst = min(one.gains, key=lambda gain: gain.mean)
    words = (
        f"With {one.together.label}, {len(one.helped)} of {len(one.gains)} clients end better than alone "
        f"({one.alone.label}); the mean gain is {_signed(one.mean)} points"
    )
    if worst.mean < 0:
        words += f", and client {worst.client} loses most ({_signed(worst.mean)})"
    return f"{words}."


def _signed(fraction: float) -> str:
    """In points, with a sign.

    >>> _signed(-0.1112), _signed(0.006)
    ('−11.1', '+0.6')
    """
    return f"{100 * fraction:+.1f}".replace("-", "\N{MINUS SIGN}")


def _help_traces(place: int, one: Help) -> list[Trace]:
    names = [f"client {gain.client}" for gain in one.gains]
    label = plain(one.together.label)
    dots = [
        (name, step, value)
        for name, gain in zip(names, one.gains, strict=True)
        for step, value in enumerate(gain.by_task)
    ]
    shared = {"legendgroup": str(place), "offsetgroup": str(place), "meta": {"group": place, "client": None}}
    return [
        {
            "type": "bar",
            "name": one.together.label,
            "x": names,
            "y": percents(gain.mean for gain in one.gains),
            "marker": {"color": f"@{place % COLOURS}"},
            "opacity": 0.85,
            "hovertemplate": "%{x}: %{y:+.1f} points<extra>" + label + "</extra>",
            **shared,
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{one.together.label}, each task",
            "x": [name for name, _, _ in dots],
            "y": percents(value for _, _, value in dots),
            "text": [f"task {step}" for _, step, _ in dots],
            "marker": {"color": "@ink", "size": 6, "symbol": f"{SYMBOLS[place % len(SYMBOLS)]}-open"},
            "hovertemplate": "%{x}, %{text}: %{y:+.1f} points<extra>" + label + "</extra>",
            **shared,
        },
    ]
