"""Charts of learning: accuracy, matrices, forgetting, adaptation, gain."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from weft import metrics
from weft.metrics import Spread
from weft.report import charts, facts
from weft.report.charts import Axis, Chart, Groups, HeatMap, Section, Series, curve_line, key_of, percents
from weft.report.facts import Comparison, Group, Measure
from weft.report.text import percent, plural, points, shorten

# ---- accuracy and forgetting after each task -------------------------------------------------------------------------


def accuracy(groups: Groups) -> Section:
    trends = []
    for group in groups:
        means = [point.mean for point in facts.over_tasks(group, metrics.average_accuracy) if point]
        if len(means) > 1:
            trends.append(f"{group.label} from {percent(means[0])} to {percent(means[-1])}")
    if len(trends) > 6:
        trends = [*trends[:5], f"and {len(trends) - 5} more"]
    sentence = f"From the first task to the last: {', '.join(trends)}." if trends else ranking(groups)
    y = Axis("accuracy (%)", "%")
    shown = _over_tasks("accuracy", "Mean accuracy of the tasks so far", groups, metrics.average_accuracy, y, sentence)
    return Section("accuracy", "Accuracy after each task", sentence, shown)


def ranking(groups: Groups) -> str:
    """Which group has the best final accuracy, and by how much."""
    finals = sorted(_finals(groups, metrics.average_accuracy), key=lambda pair: -pair[1].mean)
    if not finals:
        return "No task has been learned yet."
    best, value = finals[0]
    if len(finals) == 1:
        return f"{best} reaches {percent(value.mean)} over all tasks learned so far."
    second, next_value = finals[1]
    lead = 100 * (value.mean - next_value.mean)
    distance = f"{lead:.1f} points ahead of {second}" if lead >= 0.05 else f"level with {second}"
    sentence = f"{best} reaches {percent(value.mean)}, {distance}"
    if len(finals) > 2:
        sentence += f"; {finals[-1][0]} is last with {percent(finals[-1][1].mean)}"
    noise = max((each.deviation or 0.0) for _, each in finals[:2])
    if 0 < lead < 100 * noise:
        sentence += f". The lead is smaller than one standard deviation over seeds ({100 * noise:.1f} points)"
    return f"{sentence}."


def warnings(groups: Groups) -> str:
    """What a reader must know before comparing the groups."""
    sentences = []
    if waiting := [group.label for group in groups if not group.is_finished]:
        sentences.append(f"Not finished: {', '.join(waiting)}.")
    if keys := facts.incomparable(groups):
        sentences.append(f"These runs differ in {', '.join(keys)}: compare them with care.")
    return " ".join(sentences)


def forgetting(groups: Groups) -> Section:
    finals = sorted(_finals(groups, metrics.forgetting), key=lambda pair: pair[1].mean)
    ordered = [f"{label} {100 * value.mean + 0.0:.1f}" for label, value in finals]
    sentence = "Forgetting can be measured once a client has learned two tasks."
    if ordered:
        sentence = f"Points lost on earlier tasks, from least to most: {', '.join(shorten(ordered))}."
    y = Axis("forgetting (points)", "points")
    shown = _over_tasks("forgetting", "Mean drop from the best", groups, metrics.forgetting, y, sentence)
    return Section("forgetting", "Forgetting", sentence, shown)


def _finals(groups: Groups, measure: Measure) -> list[tuple[str, Spread]]:
    found = [(group.label, facts.final(group, measure)) for group in groups]
    return [(label, value) for label, value in found if value is not None]


def _over_tasks(name: str, title: str, groups: Groups, measure: Measure, y: Axis, sentence: str) -> list[Chart]:
    if not _finals(groups, measure):
        return []
    lines = []
    for index, group in enumerate(groups):
        xs = [float(task) for task in range(group.tasks_learned)]
        names = [f"after task {task:.0f}" for task in xs]
        for client in group.mean_and_clients:
            lines.append(curve_line(index, group, client, xs, facts.over_tasks(group, measure, client), names))
    tasks = max(group.tasks_learned for group in groups)
    x = Axis(ticks=charts.task_ticks(tasks), range=(-0.15, tasks - 0.85))
    return [Chart(f"{name}-after", title, sentence, lines, x, y, figure=name)]


# ---- the accuracy matrix of each client ------------------------------------------------------------------------------


def matrices(groups: Groups) -> Section:
    cells = {
        (i, client): facts.matrix(group, client) for i, group in enumerate(groups) for client in group.mean_and_clients
    }
    values = [value for rows in cells.values() for row in rows for value in row if value is not None]
    lowest = 10 * int(10 * min(values, default=0.0))  # one color scale for all matrices
    shown = [_matrix(i, groups[i], client, rows, lowest) for (i, client), rows in cells.items() if rows]
    return Section("matrix", "Accuracy matrix of each client", _largest_loss(groups), shown, small=True)


def _matrix(index: int, group: Group, client: int | None, rows: list[list[float | None]], lowest: int) -> Chart:
    title = group.title(client)
    ticks = [str(task) for task in range(len(rows))]
    names = [f"after task {task}" for task in ticks]
    tasks = [_task_name(group, client, task) for task in range(len(rows))]
    limits, cells = (lowest, 100.0), [percents(row) for row in rows]
    last = ", ".join(f"task {task} {percent(value)}" for task, value in enumerate(rows[-1]) if value is not None)
    body = HeatMap(group.label, names, tasks, cells, limits, unit="%", row_ticks=ticks, column_ticks=ticks)
    sentence, key = f"{title}: at the end {last}", key_of(client)
    chart = Chart(f"matrix-{index}-{key}", title, sentence, body, Axis("task"), Axis("after task"))
    height, figure = 230 + 14 * max(0, len(rows) - 4), "matrices" if client is None else ""
    return replace(chart, height=height, group=index, client=key, figure=figure)


def _task_name(group: Group, client: int | None, task: int) -> str:
    if client is None or len(group.runs) > 1:  # other seeds have other tasks
        return f"task {task}"
    name = group.runs[0].task_name(client, task)
    return name if name == f"task {task}" else f"task {task} ({name})"


def _largest_loss(groups: Groups) -> str:
    losses = []
    for group in groups:
        for client in group.clients:
            cells = facts.matrix(group, client)
            for task in range(len(cells) - 1):
                first, last = cells[task][task], cells[-1][task]
                if first is not None and last is not None:
                    losses.append((first - last, group.label, client, task, first, last))
    if not losses:
        return "There is nothing to compare until a client has learned two tasks."
    loss, label, client, task, first, last = max(losses)
    if loss <= 0:
        return "No task of any client has lost accuracy since it was learned."
    return (
        f"The largest loss: task {task} of client {client} with {label}, from {percent(first)} when it was learned to "
        f"{percent(last)} at the end."
    )


# ---- adaptation within a task ----------------------------------------------------------------------------------------


def adaptation(groups: Groups) -> Section:
    first = []
    for group in groups:
        later = [value.mean for (task, number), value in facts.over_rounds(group).items() if task > 0 and number == 0]
        first += [(fmean(later), group.label)] if later else []
    sentence = "No second task has been started yet."
    if first:
        (best, label), *others = sorted(first, reverse=True)
        rest = ", ".join(f"{name} {percent(mean)}" for mean, name in others[:3])
        sentence = f"After the first round of a later task, {label} is best: {percent(best)} on average"
        sentence += f" ({rest})." if rest else "."
    lines = [
        _rounds_line(index, group, client) for index, group in enumerate(groups) for client in group.mean_and_clients
    ]
    shown = [line for line in lines if line.x]
    title, y = "Validation accuracy, round by round", Axis("validation accuracy (%)", "%")
    figure = "adaptation" if shown else ""
    chart = Chart("adaptation-rounds", title, sentence, shown, charts.round_axis(groups), y, figure=figure)
    return Section("adaptation", "Adaptation within a task", sentence, [chart])


def _rounds_line(index: int, group: Group, client: int | None) -> Series:
    """Validation accuracy by round, with a gap between two tasks."""
    points: list[tuple[float, Spread | None, str]] = []
    previous = 0
    for (task, number), value in facts.over_rounds(group, client).items():
        if task != previous and points:
            points.append((float(task), None, ""))
        previous = task
        points.append((group.position((task, number)), value, f"task {task}, round {number}"))
    xs, curve, names = map(list, zip(*points, strict=True)) if points else ([], [], [])
    return curve_line(index, group, client, xs, curve, names)


# ---- does federation help --------------------------------------------------------------------------------------------


def gain(groups: Groups) -> Section:
    title, found = "Does federation help me?", facts.comparisons(groups)
    if not found:
        sentence = (
            "This needs two finished runs on the same tasks and seed, with the same network and the same amount of "
            "training: a federated one, and a local one such as stl, local or apd. At least one of them is missing."
        )
        return Section("gain", title, sentence)
    compared = ", ".join(
        f"{one.federated.label} with {one.local.label} ({'seeds' if one.seeds[1:] else 'seed'} "
        f"{', '.join(map(str, one.seeds))})"
        for one in found
    )
    bars = [series for one in found for series in _gain_series(groups.index(one.federated), one)]
    sentence = " ".join(map(_gain_sentence, found))
    y = Axis("gain over local (points)", "points")
    chart = Chart("gain", "Gain over local training", sentence, bars, Axis(), y, figure="gain")
    caveats = ["A few points on some hundred test images can be noise; use more seeds."]
    return Section("gain", title, sentence, [chart], caveats, about=f"Compared: {compared}.")


def _gain_series(index: int, one: Comparison) -> list[Series]:
    label, key = one.federated.label, str(index)
    clients = [f"client {client}" for client in one.gains]
    tasks = [
        (f"client {client}", f"task {task}{_kept(one, client, task)}", value)
        for client, by_task in one.gains.items()
        for task, value in enumerate(by_task)
    ]
    dots_x, names, values = zip(*tasks, strict=True)
    return [
        Series(label, clients, percents(one.means.values()), (), index, kind="bar", key=key),
        Series(f"{label}, each task", dots_x, percents(values), names, index, kind="dots", color="ink", key=key),
    ]


def _kept(one: Comparison, client: int, task: int) -> str:
    """Whose result a task is answered with, if the method chose and there is one seed."""
    kept = one.federated.runs[0].kept.get(client, ()) if len(one.federated.runs) == 1 else ()
    return f", {kept[task]} result" if task < len(kept) else ""


def _gain_sentence(one: Comparison) -> str:
    means, kept = one.means, [each for run in one.federated.runs for by_task in run.kept.values() for each in by_task]
    better, worst = sum(mean > 0 for mean in means.values()), min(means, key=lambda client: means[client])
    verdict = "Yes" if one.mean > 0 and means[worst] >= 0 else "For most" if one.mean > 0 else "No"
    chose = f" Of {len(kept)} tasks, {kept.count('own')} kept the client's own result." if kept else ""
    return (
        f"{verdict}: with {one.federated.label}, {better} of {plural(len(means), 'client')} end better than with local "
        f"training ({one.local.label}). The mean gain is {points(one.mean)} points; client {worst}, the worst, has "
        f"{points(means[worst])}.{chose}"
    )
