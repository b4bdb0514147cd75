"""The figures: the points that are read from a run, the charts of their means over seeds, and the text.

An experiment names its figure by the key `figure`; the figure draws whatever rows the experiment has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from weft.errors import WeftError
from weft.metrics import Spread
from weft.report.charts import Axis, Chart, HeatMap, Series, percents
from weft.report.reading import Run, read_run
from weft.report.text import markdown_table, share_of_dense
from weft.repro import Experiment, Row
from weft.runs.folder import read_plan, read_summary
from weft.runs.journal import read_journal

Curve = list[tuple[float, Spread]]  # by x, over seeds
Panels = Mapping[str, Mapping[str, Curve]]  # panel -> series -> curve, in the order of the experiment's rows
Point = tuple[str, str, float, float]  # panel, series, x, y


class Figure:
    """One kind of figure; unless it says otherwise, a row of panels with lines and a table for each panel."""

    columns: ClassVar[tuple[str, str, str, str]]  # names of panel, series, x and y in the csv
    x = Axis("round")
    y = Axis("validation accuracy (%)", "%")
    clients: ClassVar[Collection[int] | None] = None  # whose accuracy is read; None: all

    def __init__(self, experiment: Experiment):
        self.names, self.reference = experiment.names, experiment.reference

    def points(self, row: Row, folder: Path) -> list[Point]:
        """Read the points of a finished run; here of each round, as the mean over all tasks but the first."""
        later = [values for task, values in by_round(whole_run(folder), self.clients).items() if task > 0]
        means = [fmean(values) for values in zip(*later, strict=True)]
        return [(row.panel, row.series or row.label, number, value) for number, value in enumerate(means, start=1)]

    def charts(self, panels: Panels) -> list[Chart]:
        """Each with the suffix of its file name as its figure."""
        return self.lines(panels, list(panels))

    def text(self, panels: Panels) -> list[str]:
        """The numbers in paragraphs of Markdown."""
        return [paragraph for title, curves in panels.items() for paragraph in self._panel_text(title, curves)]

    def lines(self, panels: Panels, shown: Sequence[str], suffix: str = "") -> list[Chart]:
        order = series_of(panels)

        def line(series: str, curve: Curve) -> Series:
            xs, ys = [x for x, _ in curve], [y for _, y in curve]
            deviations = percents(y.deviation for y in ys)
            label, index, means = self.name(series), order.index(series), percents(y.mean for y in ys)
            return Series(label, xs, means, (), index, deviations=deviations, bold=label == "FedWeIT")

        def chart(title: str) -> Chart:
            series = [line(*one) for one in panels[title].items()]
            return Chart(title, title, "", series, self.x, self.y, figure=suffix)

        return [chart(title) for title in shown]

    def name(self, series: str) -> str:
        return self.names.get(series, series)

    def _panel_text(self, title: str, curves: Mapping[str, Curve]) -> Iterator[str]:
        """A table of some points, and a comparison with the reference at all of them."""
        means = {series: {x: 100 * found.mean for x, found in curve} for series, curve in curves.items()}
        xs = sorted({x for found in means.values() for x in found})
        shown = xs if len(xs) < 8 else [x for x in xs if x in (1, 2, 5, 10, 20, xs[-1])]
        lines = [
            [self.name(series), *(f"{found[x]:.1f}" if x in found else "-" for x in shown)]
            for series, found in means.items()
        ]
        yield markdown_table([f"{title}: {self.y.title}, {self.x.title}", *(f"{x:g}" for x in shown)], lines)
        reference, compared = means.pop(self.reference, {}), []
        for series, found in means.items():
            if gaps := [found[x] - reference[x] for x in xs if x in found and x in reference]:
                above = f"above it at {sum(gap > 0 for gap in gaps)} of {len(gaps)} points"
                ends = f"{gaps[0]:+.1f} at the start, {gaps[-1]:+.1f} at the end"
                compared.append(f"{self.name(series)} {ends}, {above}, {min(gaps):+.1f} at the worst")
        if compared:
            yield f"Accuracy in points compared with {self.name(self.reference)}: {'; '.join(compared)}."


class Interference(Figure):
    """Validation accuracy of client 0 in its second task, round by round."""

    columns = ("panel", "sender", "round", "validation_accuracy")
    clients = (0,)


class Adaptation(Figure):
    """Validation accuracy of the last five tasks, round by round, by the number of clients."""

    columns = ("clients_and_task", "curve", "round", "validation_accuracy")
    y = replace(Figure.y, shared=True)

    def points(self, row: Row, folder: Path) -> list[Point]:
        run = whole_run(folder)
        return [
            (f"{run.clients} clients, task {task + 1}", row.series or row.method, number, value)
            for task, values in sorted(by_round(run).items())[-5:]
            for number, value in enumerate(values, start=1)
        ]

    def charts(self, panels: Panels) -> list[Chart]:
        few, *more = self._by_clients(panels).values()
        charts = self.lines(panels, few[-2:] + (more[-1][-2:] if more else []))
        chosen = [panel for row in more for panel in row]
        everywhere = [name for name in series_of(panels) if all(name in panels[one] for one in chosen)]
        common = {one: {name: panels[one][name] for name in everywhere} for one in chosen}
        return charts + self.lines(common, chosen, "-clients")

    def text(self, panels: Panels) -> list[str]:
        lines = []
        for count, names in self._by_clients(panels).items():
            for series in series_of({name: panels[name] for name in names}):
                curves = [panels[name][series] for name in names if series in panels[name]]
                ends = [f"{100 * fmean(curve[position][1].mean for curve in curves):.1f}" for position in (0, -1)]
                lines.append([f"{count} clients, {self.name(series)}", *ends, str(len(curves))])
        head = ["accuracy (%), mean of the last tasks", "after the first round", "after the last", "tasks"]
        return [markdown_table(head, lines)]

    def _by_clients(self, panels: Panels) -> dict[int, list[str]]:
        """Panels by number of clients, both and the tasks in increasing order."""
        groups: dict[int, list[str]] = {}
        for panel in sorted(panels, key=lambda panel: [int(number) for number in re.findall(r"\d+", panel)]):
            groups.setdefault(int(panel.split()[0]), []).append(panel)
        return groups


class Forgetting(Figure):
    """Test accuracy of each task at its end and at the end of each later task."""

    columns = ("task", "curve", "after_task", "accuracy")
    x, y = Axis("after learning task"), Axis("accuracy (%)", "%", shared=True)

    def points(self, row: Row, folder: Path) -> list[Point]:
        matrices = list(whole_run(folder).matrices.values())
        tasks = max(map(len, matrices))
        return [
            (f"task {task + 1}", row.series or row.method, after + 1, fmean(matrix[after][task] for matrix in matrices))
            for task in range(tasks - 1)
            for after in range(task, tasks)
        ]

    def charts(self, panels: Panels) -> list[Chart]:
        tasks = list(panels)
        numbers = (round(share * (len(tasks) + 1)) for share in (0.3, 0.6, 0.8))  # tasks 3, 6 and 8 of the paper's 10
        chosen = list(dict.fromkeys(tasks[min(max(number, 1), len(tasks)) - 1] for number in numbers))
        return self.lines(panels, chosen) + self.lines(panels, tasks, "-all")

    def text(self, panels: Panels) -> list[str]:
        lines = []
        for series in series_of(panels):
            curves = [of_task.get(series, []) for of_task in panels.values()]
            changes = [100 * (curve[-1][1].mean - curve[0][1].mean) if curve else None for curve in curves]
            mean = fmean(change for change in changes if change is not None)
            cells = ["-" if one is None else f"{one:+.1f}" for one in (*changes, mean)]
            lines.append([self.name(series), *cells])
        return [markdown_table(["points from the end of a task to the end of the last", *panels, "mean"], lines)]


class Cost(Figure):
    """Accuracy over the values that clients sent, for several values of method.keep."""

    columns = ("measure", "curve", "keep", "value")
    x = Axis("sent by clients, of dense (%)", ticks=[(x, str(x)) for x in (3, 10, 30, 100)], log=True)
    y = Axis("accuracy (%)", "%")

    def points(self, row: Row, folder: Path) -> list[Point]:
        summary, keep = read_summary(folder) or {}, read_plan(folder).method_options["keep"]
        measures = {"accuracy": summary["accuracy"], "sent_of_dense": share_of_dense(summary["traffic"]["c2s"])}
        if None in measures.values():
            raise WeftError(f"{row.label} sends nothing, so it has no place in a figure of costs; remove the row")
        return [(measure, row.series or row.method, keep, value) for measure, value in measures.items()]

    def charts(self, panels: Panels) -> list[Chart]:
        sent = {series: dict(curve) for series, curve in panels["sent_of_dense"].items()}
        curves = {
            series: sorted((100 * sent[series][keep].mean, found) for keep, found in curve)
            for series, curve in panels["accuracy"].items()
        }
        return self.lines({"": curves}, [""])

    def text(self, panels: Panels) -> list[str]:
        accuracy, sent = panels["accuracy"], panels["sent_of_dense"]
        keeps = sorted({x for curve in accuracy.values() for x, _ in curve})
        lines = []
        for name, curve in accuracy.items():
            of_dense = dict(sent[name])
            cells = {x: f"{100 * found.mean:.1f} ({of_dense[x].mean:.3f})" for x, found in curve}
            lines.append([self.name(name), *(cells.get(x, "-") for x in keeps)])
        head = ["accuracy (%), in brackets: sent, of dense", *(f"keep={x:g}" for x in keeps)]
        return [markdown_table(head, lines)]


class Async(Figure):
    """Accuracy of the finished tasks over the share of all training images processed so far."""

    columns = ("scenario", "async", "work", "accuracy")
    x, y = Axis("work done (%)"), Axis("accuracy of the tasks so far (%)", "%")

    def points(self, row: Row, folder: Path) -> list[Point]:
        """One point for each task, at equal distances: the last test of each client until then."""
        plan = read_plan(folder)
        events = [event.facts for event in read_journal(folder) if event.kind == "tested"]
        tests = {(event["client"], event["task"]): event for event in events}  # a resumed run repeats some
        in_order = sorted(tests.values(), key=lambda test: (test["images"], test["client"]))
        points = []
        for work in (number / plan.tasks for number in range(1, plan.tasks + 1)):
            done = [test for test in in_order if test["images"] <= work * in_order[-1]["images"]]
            newest = {test["client"]: fmean(test["accuracy"]) for test in done}
            if newest:
                points.append((plan.scenario, row.series or plan.asynchronous, work, fmean(newest.values())))
        return points

    def charts(self, panels: Panels) -> list[Chart]:
        return super().charts(self._in_percent(panels))

    def text(self, panels: Panels) -> list[str]:
        return super().text(self._in_percent(panels))

    def _in_percent(self, panels: Panels) -> Panels:
        return {title: {name: [(100 * x, y) for x, y in c] for name, c in panels[title].items()} for title in panels}


class Transfer(Figure):
    """Validation accuracy round by round, as the mean over all tasks but the first."""

    columns = ("tasks", "foreign", "round", "validation_accuracy")


PAPER_TASKS = {"mnist": "mnist-0", "cifar100": "cifar100-10"}  # split 0 of MNIST, 10 of CIFAR-100


class Attention(Figure):
    """Attention of each task to each foreign A that it received, at the first fully connected layer."""

    columns = ("task", "foreign_task", "foreign_count", "attention")

    def points(self, row: Row, folder: Path) -> list[Point]:
        run = whole_run(folder)
        layer = first_connected([one.shape for one in run.layers])
        points: list[Point] = []
        for one in run.attention:
            task, foreign = run.task_name(one.client, one.task), run.task_name(one.sender, one.sender_task)
            points.append((task, foreign, one.count, one.alphas[layer]))
        return points

    def charts(self, panels: Panels) -> list[Chart]:
        pairs = by_dataset(panels)
        known = [*self.names, *sorted({one for pair in pairs for one in pair} - {*self.names})]
        rows, columns = ([name for name in known if any(pair[side] == name for pair in pairs)] for side in (0, 1))
        cells = [[pairs.get((row, column), (None, 0))[0] for column in columns] for row in rows]
        reach = max([0.05, *(abs(value - 1) for value, _ in pairs.values())])
        limits = (1 - reach, 1 + reach)
        body = HeatMap("", [*map(self.name, rows)], [*map(self.name, columns)], cells, limits, 2, diverging=True)
        title, x, y = "attention, times n", Axis("dataset of the foreign A"), Axis("dataset of the task")
        return [
            *(self._bars(task, panels[task], known) for task in shown_tasks(panels)),
            Chart(title, title, "", body, x, y, figure="-datasets"),
        ]

    def _bars(self, task: str, foreign: Mapping[str, Curve], datasets: Sequence[str]) -> Chart:
        """Bars from the equal weight at the start, 1/n; one scale: twice as far from the start is twice as long."""
        bars = []
        for name in by_attention(foreign):
            dataset = name.rpartition("-")[0]
            moved = fmean(found.mean - 1 / count for count, found in foreign[name])
            bars.append(Series(self.name(dataset), [self.task(name)], [moved], (), datasets.index(dataset), kind="bar"))
        return Chart(task, f"learning {self.task(task)}", "", bars, y=Axis("attention, minus 1/n", shared=True))

    def text(self, panels: Panels) -> list[str]:
        paragraphs = []
        for task in shown_tasks(panels):
            means = by_attention(panels[task])
            listed = ", ".join(f"{self.task(name)} {mean:.4f}" for name, mean in means.items())
            paragraphs.append(f"{self.task(task)}, from the largest: {listed}.")
        pairs = by_dataset(panels)
        same, other = (
            [value for (own, foreign), (value, _) in pairs.items() if (own == foreign) == equal]
            for equal in (True, False)
        )
        if same and other:
            paragraphs.append(
                "Over all tasks, as a multiple of the uniform start, the mean of the pairs of datasets is "
                f"{fmean(same):.3f} where the foreign A comes from the dataset of the task, {fmean(other):.3f} where "
                "it comes from another."
            )
        lines = [
            [*(self.name(one) for one in pair), f"{value:.3f}", str(count)]
            for pair, (value, count) in sorted(pairs.items(), key=lambda item: -item[1][0])
        ]
        return [*paragraphs, markdown_table(["task of", "foreign A of", "attention, times n", "pairs"], lines)]

    def task(self, name: str) -> str:
        """The name of a split of a dataset, such as "Traffic Sign (3)"."""
        dataset, _, split = name.rpartition("-")
        return f"{self.name(dataset)} ({split})"


FIGURES: dict[str, type[Figure]] = {one.__name__.lower(): one for one in Figure.__subclasses__()}


# ---- what the figures share ------------------------------------------------------------------------------------------


def whole_run(folder: Path) -> Run:
    run = read_run(folder)
    if run.notes:
        raise WeftError(f"{run.notes[0]}; run again in a new folder")
    return run


def by_round(run: Run, clients: Collection[int] | None = None) -> dict[int, list[float]]:
    """For each task, the validation accuracy of the local models after each round, as the mean over clients.

    A client that has stopped early, or that was not selected, counts with its last value.
    """
    values: dict[int, dict[int, dict[int, float]]] = {}  # task -> round -> client
    for item in run.rounds:
        if item.valid_accuracy is not None and (clients is None or item.client in clients):
            values.setdefault(item.task, {}).setdefault(item.round, {})[item.client] = item.valid_accuracy
    means: dict[int, list[float]] = {}
    for task, rounds in sorted(values.items()):
        last: dict[int, float] = {}
        for number in range(run.rounds_per_task):
            last |= rounds.get(number, {})
            if last:
                means.setdefault(task, []).append(fmean(last.values()))
    return means


def series_of(panels: Panels) -> list[str]:
    """Every series once."""
    return list(dict.fromkeys(series for curves in panels.values() for series in curves))


def first_connected(shapes: Sequence[Sequence[int]]) -> int:
    """The index of the first fully connected layer; of the last layer where there is none, as in a ResNet.

    >>> first_connected([(20, 3, 5, 5), (50, 20, 5, 5), (800, 3200), (500, 800)])
    2
    """
    return next((index for index, shape in enumerate(shapes) if len(shape) == 2), len(shapes) - 1)


def shown_tasks(panels: Panels) -> list[str]:
    """The paper's two tasks; where one received no foreign A, the task of its dataset that received the most."""
    shown = []
    for dataset, wanted in PAPER_TASKS.items():
        tasks = sorted((task for task in panels if task.startswith(f"{dataset}-")), key=lambda task: -len(panels[task]))
        if tasks:
            shown.append(wanted if wanted in tasks else tasks[0])
    return shown or list(panels)[:2]


def by_attention(foreign: Mapping[str, Curve]) -> dict[str, float]:
    """Mean attention to each foreign A, from the largest."""
    means = {name: fmean(found.mean for _, found in curve) for name, curve in foreign.items()}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def by_dataset(panels: Panels) -> dict[tuple[str, str], tuple[float, int]]:
    """For each dataset of a task and of a foreign A: mean attention as a multiple of 1/n, and the number of pairs."""
    values: dict[tuple[str, str], list[float]] = {}
    for task, foreign in panels.items():
        for name, curve in foreign.items():
            pair = task.rpartition("-")[0], name.rpartition("-")[0]
            values.setdefault(pair, []).extend(count * found.mean for count, found in curve)
    return {pair: (fmean(found), len(found)) for pair, found in values.items()}
