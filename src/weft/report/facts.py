"""Numbers from runs: seeds of one plan put together, means over clients, deviations over seeds.

A curve has one point for each task or round; each point is the mean over seeds of what weft.metrics gives for one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from weft import metrics
from weft.metrics import Matrix, Spread, spread
from weft.registry import short
from weft.report.reading import Run

APART = ("seed", "name", "device")  # keys of a plan that do not tell two plans apart
# keys of a plan, beside the options of scenario and network, in which runs agree whose figures compare
SAME_TERMS = (
    *("scenario", "clients", "tasks"),
    *("network", "loss", "rounds_per_task", "epochs_per_round", "batch_size", "measured_model"),
)
SUMS = ("bytes", "nonzeros", "dense_bytes")
MEAN = "mean"  # in place of a client's number

Measure = Callable[[Matrix], float | None]
Curve = list[Spread | None]


@dataclass(frozen=True)
class Group:
    """The seeds of one plan."""

    label: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()

    @property
    def plan(self) -> dict[str, Any]:
        return self.runs[0].plan

    @property
    def method(self) -> str:
        return short(str(self.plan["method"]))

    @property
    def seeds(self) -> list[int]:
        return [run.seed for run in self.runs]

    @property
    def steps(self) -> int:
        """Tasks learned so far, by the client that is furthest."""
        return max((len(matrix) for run in self.runs for matrix in run.matrices.values()), default=0)

    def rounds_of(self, step: int) -> int:
        return max(run.rounds_of(step) for run in self.runs)

    @property
    def clients(self) -> list[int]:
        return sorted({client for run in self.runs for client in run.matrices} or range(self.runs[0].clients))

    @property
    def is_over(self) -> bool:
        return all(run.summary is not None for run in self.runs)

    @property
    def alone(self) -> bool:
        """Nothing crossed the wire. `joint` sees all tasks at once: it is a bound, and no way to work alone."""
        return self.steps > 0 and not any(run.sent for run in self.runs) and self.method != "joint"


def group(runs: Iterable[Run]) -> list[Group]:
    """Seeds of one plan together, in the order in which they were given; labels that tell the groups apart."""
    found: dict[str, dict[int, Run]] = {}
    notes: dict[str, list[str]] = {}
    for run in runs:
        key = repr(sorted((name, value) for name, value in run.plan.items() if name not in APART))
        seeds = found.setdefault(key, {})
        if run.seed in seeds:
            notes.setdefault(key, []).append(f"{run.folder} repeats a plan and seed that is here already; left out")
        else:
            seeds[run.seed] = run
    together = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in found.values()]
    labels = label([runs[0].plan for runs in together])
    return [
        Group(name, runs, tuple(notes.get(key, ()))) for name, runs, key in zip(labels, together, found, strict=True)
    ]


def label(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """The method's name, and what tells plans of one method apart.

    >>> label([{"method": "fedweit", "method.keep": 0.3}, {"method": "fedweit", "method.keep": 0.1}, {"method": "stl"}])
    ['fedweit keep=0.3', 'fedweit keep=0.1', 'stl']
    """
    names = []
    for plan in plans:
        alike = [other for other in plans if other["method"] == plan["method"]]
        differing = [key for key in plan if key not in APART and any(other.get(key) != plan[key] for other in alike)]
        words = [f"{key.rpartition('.')[2]}={plan[key]}" for key in differing]
        names.append(" ".join([short(str(plan["method"])), *words]))
    return names


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The plan keys in which groups differ, with the value of each group (None: it has no such key)."""
    keys = dict.fromkeys(key for one in groups for key in one.plan if key not in APART)
    table = {key: [one.plan.get(key) for one in groups] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def unlike(groups: Sequence[Group]) -> list[str]:
    """In what the groups differ that makes their figures hard to compare: no word of the method's own."""
    return [key for key in differences(groups) if key in SAME_TERMS or key.startswith(("scenario.", "network."))]


# ---- what was learned ------------------------------------------------------------------------------------------------


def over_tasks(one: Group, measure: Measure, client: int | None = None) -> Curve:
    """A measure after each task, of one client or the mean over clients; one that has ended stays where it is."""
    curve: Curve = []
    for step in range(one.steps):
        values = []
        for run in one.runs:
            chosen = [matrix[: step + 1] for who, matrix in run.matrices.items() if client in (None, who)]
            learned = any(len(matrix) > step for matrix in chosen)
            values.append(metrics.over_clients(measure, chosen) if learned else None)
        curve.append(spread(values))
    return curve


def matrix(one: Group, client: int | None = None) -> list[list[float | None]]:
    """Row t, column i: accuracy of task i after task t, the mean over seeds, and over clients if none is named."""
    found: list[list[float | None]] = []
    for after in range(one.steps):
        row: list[float | None] = []
        for task in range(one.steps):
            cells = [
                rows[after][task]
                for run in one.runs
                for who, rows in run.matrices.items()
                if client in (None, who) and after < len(rows) and task <= after and not math.isnan(rows[after][task])
            ]
            row.append(fmean(cells) if cells else None)
        found.append(row)
    return found


def measured(one: Group) -> dict[tuple[str, str], Spread]:
    """What was measured beside accuracy, by metric and class ("": one number a task), of every task as it was last
    tested: the mean over a client's tasks, then over clients as accuracy is, and over seeds."""
    keys = dict.fromkeys((item.metric, item.label) for run in one.runs for item in run.measures)
    found = {key: spread(_measured(run, *key) for run in one.runs) for key in sorted(keys)}
    return {key: value for key, value in found.items() if value is not None}


def _measured(run: Run, metric: str, label: str) -> float | None:
    by_client: dict[int, list[float]] = {}
    for item in metrics.at_the_end(run.measures):
        if (item.metric, item.label) == (metric, label) and item.value is not None:
            by_client.setdefault(item.client, []).append(item.value)
    return fmean(map(fmean, by_client.values())) if by_client else None


def over_rounds(one: Group, client: int | None = None) -> dict[tuple[int, int], Spread]:
    """Validation accuracy by (step, round), of the task that is being learned."""
    values: dict[tuple[int, int], dict[int, list[float]]] = {}
    for place, run in enumerate(one.runs):
        for item in run.rounds:
            if client in (None, item.client) and item.valid_accuracy is not None:
                by_run = values.setdefault((item.step, item.round), {})
                by_run.setdefault(place, []).append(item.valid_accuracy)
    found = {key: spread(fmean(each) for each in by_run.values()) for key, by_run in sorted(values.items())}
    return {key: value for key, value in found.items() if value is not None}


# ---- what was sent ---------------------------------------------------------------------------------------------------


def sent_by_round(one: Group, direction: str, client: int | None = None) -> dict[str, dict[tuple[int, int], float]]:
    """Bytes by part and (step, round): the mean over the seeds that got so far."""
    sums: dict[str, dict[tuple[int, int], float]] = {}
    reached: dict[tuple[int, int], set[int]] = {}
    for place, run in enumerate(one.runs):
        for item in run.sent:
            key = (item.step, item.round)
            reached.setdefault(key, set()).add(place)
            if item.direction == direction and client in (None, item.client):
                of_part = sums.setdefault(item.part, {})
                of_part[key] = of_part.get(key, 0.0) + item.bytes
    return {
        part: {key: value / len(reached[key]) for key, value in sorted(of_part.items())}
        for part, of_part in sorted(sums.items())
    }


def rounds_sent(one: Group) -> list[tuple[int, int]]:
    return sorted({(item.step, item.round) for run in one.runs for item in run.sent})


# ---- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One group in the table of results."""

    label: str
    seeds: tuple[int, ...]
    accuracy: Spread | None
    forgetting: Spread | None
    up: float  # bytes, the mean over seeds
    down: float
    up_share: float | None  # nonzeros as a share of dense
    down_share: float | None
    model: float | None
    model_paper: float | None
    seconds: float | None
    state: str


def rows(groups: Sequence[Group]) -> list[Row]:
    return [_row(one) for one in groups]


def _row(one: Group) -> Row:
    def last(measure: Measure) -> Spread | None:
        return spread(metrics.over_clients(measure, run.matrices.values()) for run in one.runs)

    def kept(key: str) -> float | None:
        values = [run.summary[key] for run in one.runs if run.summary is not None]
        return fmean(values) if values else None

    totals = {}
    for direction in ("c2s", "s2c"):
        items = [item for run in one.runs for item in run.sent if item.direction == direction]
        size, nonzeros, dense = (sum(getattr(item, key) for item in items) for key in SUMS)
        totals[direction] = (size / len(one.runs), 4 * nonzeros / dense if dense else None)
    over = sum(run.summary is not None for run in one.runs)
    return Row(
        label=one.label,
        seeds=tuple(one.seeds),
        accuracy=last(metrics.average_accuracy),
        forgetting=last(metrics.forgetting),
        up=totals["c2s"][0],
        down=totals["s2c"][0],
        up_share=totals["c2s"][1],
        down_share=totals["s2c"][1],
        model=kept("model_size_bytes"),
        model_paper=kept("model_size_paper_bytes"),
        seconds=kept("seconds"),
        state="finished"
        if over == len(one.runs)
        else "not over"
        if not over
        else f"{over} of {len(one.runs)} finished",
    )
