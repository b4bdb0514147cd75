"""The figures: the points that are read from a run, the charts of their means over seeds, and the text.

An experiment names its figure by the key `figure`; the figure draws whatever rows the experiment has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from weft.errors import WeftError
from weft.report.reading import read_journal
from weft.report.text import share_of_dense
from weft.repro import FigureName, Row
from weft.repro.attention import Attention
from weft.repro.curves import (
    Curve,
    Figure,
    Panels,
    Point,
    by_round,
    grid,
    lines_of,
    mean_at,
    name_of,
    series_of,
    whole_run,
)
from weft.repro.drawing import Chart
from weft.runs.folder import read_plan, read_summary


class Interference(Figure):
    """Validation accuracy of client 0 in its second task, round by round."""

    columns = ("panel", "sender", "round", "validation_accuracy")

    def points(self, row: Row, folder: Path) -> list[Point]:
        values = by_round(whole_run(folder), {0})[1]
        return [(row.panel, row.series or row.label, number, value) for number, value in enumerate(values, start=1)]

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        lines = [lines_of(panels[one], "", "round", f"validation accuracy on {one} (%)") for one in panels]
        return {"": Chart([lines], (3.5 * len(lines), 2.6), legend="lower right")}

    def text(self, panels: Panels) -> list[str]:
        return [paragraph for curves in panels.values() for paragraph in self._panel_text(curves)]

    def _panel_text(self, curves: Mapping[str, Curve]) -> Iterable[str]:
        rounds = sorted({x for curve in curves.values() for x, _ in curve})
        shown = sorted({x for x in rounds if x in (1, 2, 5, 10, 20)} | {rounds[-1]})
        lines = [
            [name_of(series), *(f"{100 * mean_at(curve, x):.1f}" for x in shown)] for series, curve in curves.items()
        ]
        yield grid(["accuracy (%) after round", *(f"{x:g}" for x in shown)], lines)
        sentences = []
        for series, name, side in (("svhn", "SVHN", "above"), ("cifar10", "CIFAR-10", "below")):
            if {series, "nobody"} <= curves.keys():
                gaps = [100 * (mean_at(curves[series], x) - mean_at(curves["nobody"], x)) for x in rounds]
                above = sum(gap > 0 for gap in gaps)
                sentences.append(
                    f"{name}: {gaps[0]:+.1f} points compared with nobody after the first round, {gaps[-1]:+.1f} after "
                    f"the last, above it after {above} of {len(gaps)} rounds, {min(gaps):+.1f} in the worst; in the "
                    f"paper's figure it stays {side} that line."
                )
        if sentences:
            yield " ".join(sentences)


class Adaptation(Figure):
    """Validation accuracy of the last five tasks, round by round, by the number of clients."""

    columns = ("clients_and_task", "curve", "round", "validation_accuracy")

    def points(self, row: Row, folder: Path) -> list[Point]:
        run = whole_run(folder)
        return [
            (f"{run.clients} clients, task {task + 1}", row.series or row.method, number, value)
            for task, values in sorted(by_round(run).items())[-5:]
            for number, value in enumerate(values, start=1)
        ]

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        groups = list(self._by_clients(panels).values())
        few_and_many = groups[0][-2:] + (groups[-1][-2:] if groups[1:] else [])
        charts = {"": self._chart([few_and_many], panels)}
        if more := groups[1:]:
            chosen = [panel for row in more for panel in row]
            everywhere = [name for name in series_of(panels.values()) if all(name in panels[one] for one in chosen)]
            common = {one: {name: panels[one][name] for name in everywhere} for one in chosen}
            charts["-clients"] = self._chart(more, common)
        return charts

    def _chart(self, rows: Sequence[Sequence[str]], panels: Panels) -> Chart:
        lines = [[lines_of(panels[one], one, "round", "validation accuracy (%)") for one in row] for row in rows]
        return Chart(lines, (1.75 * max(map(len, rows)), 1.75 * len(rows) + 0.5), share_y="row")

    def text(self, panels: Panels) -> list[str]:
        lines = []
        for count, names in self._by_clients(panels).items():
            for series in series_of(panels[name] for name in names):
                curves = [panels[name][series] for name in names if series in panels[name]]
                ends = [f"{100 * fmean(curve[position][1].mean for curve in curves):.1f}" for position in (0, -1)]
                lines.append([f"{count} clients, {name_of(series)}", *ends, str(len(curves))])
        head = ["accuracy (%), mean of the last tasks", "after the first round", "after the last", "tasks"]
        return [grid(head, lines)]

    def _by_clients(self, panels: Panels) -> dict[int, list[str]]:
        """Panels by number of clients, both and the tasks in increasing order."""
        groups: dict[int, list[str]] = {}
        for panel in sorted(panels, key=lambda panel: [int(number) for number in re.findall(r"\d+", panel)]):
            groups.setdefault(int(panel.split()[0]), []).append(panel)
        return groups


class Forgetting(Figure):
    """Test accuracy of each task at its end and at the end of each later task."""

    columns = ("task", "curve", "after_task", "accuracy")

    def points(self, row: Row, folder: Path) -> list[Point]:
        matrices = list(whole_run(folder).matrices.values())
        tasks = max(map(len, matrices))
        return [
            (f"task {task + 1}", row.series or row.method, after + 1, fmean(matrix[after][task] for matrix in matrices))
            for task in range(tasks - 1)
            for after in range(task, tasks)
        ]

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        tasks = list(panels)
        numbers = (round(share * (len(tasks) + 1)) for share in (0.3, 0.6, 0.8))  # tasks 3, 6 and 8 of the paper's 10
        chosen = list(dict.fromkeys(tasks[min(max(number, 1), len(tasks)) - 1] for number in numbers))
        return {"": self._chart(panels, chosen), "-all": self._chart(panels, tasks)}

    def _chart(self, panels: Panels, tasks: Sequence[str]) -> Chart:
        lines = [lines_of(panels[task], task, "after learning task", "accuracy (%)") for task in tasks]
        rows = [lines[start : start + 3] for start in range(0, len(lines), 3)]
        return Chart(rows, (2.3 * len(rows[0]), 1.8 * len(rows) + 0.6), share_y="all")

    def text(self, panels: Panels) -> list[str]:
        lines = []
        for series in series_of(panels.values()):
            curves = [of_task.get(series, []) for of_task in panels.values()]
            changes = [100 * (curve[-1][1].mean - curve[0][1].mean) if curve else None for curve in curves]
            mean = fmean(change for change in changes if change is not None)
            lines.append([name_of(series), *("-" if one is None else f"{one:+.1f}" for one in changes), f"{mean:+.1f}"])
        return [grid(["points from the end of a task to the end of the last", *panels, "mean"], lines)]


class Cost(Figure):
    """Accuracy over the values that clients sent, for several values of method.keep."""

    columns = ("measure", "curve", "keep", "value")

    def points(self, row: Row, folder: Path) -> list[Point]:
        summary, keep = read_summary(folder) or {}, read_plan(folder).method_options["keep"]
        measures = {"accuracy": summary["accuracy"], "sent_of_dense": share_of_dense(summary["traffic"]["c2s"])}
        if None in measures.values():
            raise WeftError(f"{row.label} sends nothing, so it has no place in a figure of costs; remove the row")
        return [(measure, row.series or row.method, keep, value) for measure, value in measures.items()]

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        curves = {
            series: sorted((mean_at(panels["sent_of_dense"][series], keep), found) for keep, found in curve)
            for series, curve in panels["accuracy"].items()
        }
        lines = lines_of(curves, "", "sent by clients, of dense (%)", "accuracy (%)", log_ticks=(0.03, 0.1, 0.3, 1.0))
        return {"": Chart([[lines]], (3.8, 2.9), legend="best")}

    def text(self, panels: Panels) -> list[str]:
        accuracy, sent = panels["accuracy"], panels["sent_of_dense"]
        keeps = sorted({x for curve in accuracy.values() for x, _ in curve})
        lines = []
        for name, curve in accuracy.items():
            cells = {x: f"{100 * found.mean:.1f} ({mean_at(sent[name], x):.3f})" for x, found in curve}
            lines.append([name_of(name), *(cells.get(x, "-") for x in keeps)])
        return [grid(["accuracy (%), in brackets: sent, of dense", *(f"keep={x:g}" for x in keeps)], lines)]


class Async(Figure):
    """Accuracy of the finished tasks over the share of all training images processed so far."""

    columns = ("scenario", "async", "work", "accuracy")

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

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        percent = {panel: {name: [(100 * x, y) for x, y in c] for name, c in panels[panel].items()} for panel in panels}
        y = "accuracy of the tasks so far (%)"
        lines = [lines_of(curves, title, "work done (%)", y, whole=False) for title, curves in percent.items()]
        return {"": Chart([lines], (2.9 * len(lines), 2.6))}

    def text(self, panels: Panels) -> list[str]:
        modes = series_of(panels.values())
        others = [mode for mode in modes if mode != "none"]
        lines = []
        for scenario, curves in panels.items():
            ends = {mode: 100 * curve[-1][1].mean for mode, curve in curves.items()}
            gains = [f"{ends[mode] - ends['none']:+.1f}" if {mode, "none"} <= ends.keys() else "-" for mode in others]
            lines.append([scenario, *(f"{ends[mode]:.1f}" if mode in ends else "-" for mode in modes), *gains])
        head = ["accuracy (%) when all work is done", *map(name_of, modes)]
        return [grid([*head, *(f"{name_of(mode)}, gained" for mode in others)], lines)]


class Transfer(Figure):
    """Validation accuracy round by round, as the mean over all tasks but the first."""

    columns = ("tasks", "foreign", "round", "validation_accuracy")

    def points(self, row: Row, folder: Path) -> list[Point]:
        later = [values for task, values in by_round(whole_run(folder)).items() if task > 0]
        means = [fmean(values) for values in zip(*later, strict=True)]
        return [(row.panel, row.series or row.label, number, value) for number, value in enumerate(means, start=1)]

    def charts(self, panels: Panels) -> Mapping[str, Chart]:
        lines = [lines_of(curves, title, "round", "validation accuracy (%)") for title, curves in panels.items()]
        return {"": Chart([lines], (2.4 * len(lines), 2.5))}

    def text(self, panels: Panels) -> list[str]:
        names = series_of(panels.values())
        lines = []
        for title, curves in panels.items():
            for which, position in (("first", 0), ("last", -1)):
                found = {name: 100 * curve[position][1].mean for name, curve in curves.items()}
                gain = f"{found['with'] - found['without']:+.1f}" if {"with", "without"} <= found.keys() else "-"
                cells = [f"{found[name]:.1f}" if name in found else "-" for name in names]
                lines.append([f"{title}, after the {which} round", *cells, gain])
        return [grid(["accuracy (%)", *map(name_of, names), "gained"], lines)]


FIGURES: dict[FigureName, Figure] = {
    "interference": Interference(),
    "adaptation": Adaptation(),
    "forgetting": Forgetting(),
    "cost": Cost(),
    "attention": Attention(),
    "async": Async(),
    "transfer": Transfer(),
}
