"""Numbers from runs: seeds of one plan grouped, means over clients, deviations over seeds, attention, gain.

A curve has one point for each task or round: the mean and standard deviation over seeds of what weft.metrics computes
for one run.
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
from weft.report.text import share_of_dense
from weft.wire.ledger import DIRECTIONS

IGNORED = ("seed", "name", "device")  # plan keys that do not make two plans different
# plan keys, beside the options of scenario and network, that must agree before results can be compared
COMPARABLE = (
    *("scenario", "clients", "tasks"),
    *("network", "loss", "rounds_per_task", "epochs_per_round", "batch_size", "measured_model"),
)

Measure = Callable[[Matrix], float | None]
Curve = list[Spread | None]
RoundKey = tuple[int, int]  # task, round


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
    def tasks(self) -> int:
        return self.runs[0].tasks

    @property
    def tasks_learned(self) -> int:
        """Finished tasks of the client that is furthest."""
        return max((len(matrix) for run in self.runs for matrix in run.matrices.values()), default=0)

    def rounds_of(self, task: int) -> int:
        return max(run.rounds_of(task) for run in self.runs)

    @property
    def clients(self) -> list[int]:
        return sorted({client for run in self.runs for client in run.matrices} or range(self.runs[0].clients))

    @property
    def is_finished(self) -> bool:
        return all(run.summary is not None for run in self.runs)

    @property
    def is_local(self) -> bool:
        """Nothing was sent. `joint` sees all tasks at once: an upper bound, not local training."""
        return self.tasks_learned > 0 and not any(run.sent for run in self.runs) and self.method != "joint"


def group(runs: Iterable[Run]) -> list[Group]:
    """Group the seeds of each plan, in the order given; labels tell the groups apart."""
    seeds: dict[str, dict[int, Run]] = {}
    notes: dict[str, list[str]] = {}
    for run in runs:
        key = repr(sorted((name, value) for name, value in run.plan.items() if name not in IGNORED))
        of_plan = seeds.setdefault(key, {})
        if run.seed in of_plan:
            notes.setdefault(key, []).append(f"{run.folder} has the plan and seed of another run; left out")
        else:
            of_plan[run.seed] = run
    grouped = {key: tuple(of_plan[seed] for seed in sorted(of_plan)) for key, of_plan in seeds.items()}
    labels = label([runs[0].plan for runs in grouped.values()])
    return [Group(name, grouped[key], tuple(notes.get(key, ()))) for name, key in zip(labels, grouped, strict=True)]


def label(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    """The name of the method, and the options in which plans of the same method differ.

    >>> label([{"method": "fedweit", "method.keep": 0.3}, {"method": "fedweit", "method.keep": 0.1}, {"method": "stl"}])
    ['fedweit keep=0.3', 'fedweit keep=0.1', 'stl']
    """
    names = []
    for plan in plans:
        alike = [other for other in plans if other["method"] == plan["method"]]
        differing = [key for key in plan if key not in IGNORED and any(other.get(key) != plan[key] for other in alike)]
        options = [f"{key.rpartition('.')[2]}={plan[key]}" for key in differing]
        names.append(" ".join([short(str(plan["method"])), *options]))
    return names


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Plan keys in which groups differ, with the value of each group (None: the key does not exist there)."""
    keys = dict.fromkeys(key for one in groups for key in one.plan if key not in IGNORED)
    table = {key: [one.plan.get(key) for one in groups] for key in keys}
    return {key: values for key, values in table.items() if any(value != values[0] for value in values)}


def incomparable(groups: Sequence[Group]) -> list[str]:
    """Plan keys in which groups differ that make their results hard to compare."""
    return [key for key in differences(groups) if key in COMPARABLE or key.startswith(("scenario.", "network."))]


# ---- learning --------------------------------------------------------------------------------------------------------


def over_tasks(one: Group, measure: Measure, client: int | None = None) -> Curve:
    """A measure after each task, of one client or as the mean over clients; a client that is done keeps its value."""
    curve: Curve = []
    for task in range(one.tasks_learned):
        values = []
        for run in one.runs:
            selected = [matrix[: task + 1] for who, matrix in run.matrices.items() if client in (None, who)]
            learned = any(len(matrix) > task for matrix in selected)
            values.append(metrics.over_clients(measure, selected) if learned else None)
        curve.append(spread(values))
    return curve


def final(one: Group, measure: Measure) -> Spread | None:
    return spread(metrics.over_clients(measure, run.matrices.values()) for run in one.runs)


def matrix(one: Group, client: int | None = None) -> list[list[float | None]]:
    """Row t, column i: accuracy of task i after task t, the mean over seeds and, without `client`, over clients."""
    size = one.tasks_learned
    values: list[list[list[float]]] = [[[] for _ in range(size)] for _ in range(size)]
    for run in one.runs:
        for who, rows in run.matrices.items():
            for after, row in enumerate(rows if client in (None, who) else ()):
                for task, value in enumerate(row):
                    values[after][task] += [] if math.isnan(value) else [value]
    return [[fmean(cell) if cell else None for cell in row] for row in values]


def other_metrics(one: Group) -> dict[tuple[str, str], Spread]:
    """Metrics other than accuracy, by metric and class ("": all classes), of every task when it was last tested: the
    mean over a client's tasks, then over clients, then over seeds."""
    keys = dict.fromkeys((item.metric, item.label) for run in one.runs for item in run.measures)
    found = {key: spread(_metric(run, *key) for run in one.runs) for key in sorted(keys)}
    return {key: value for key, value in found.items() if value is not None}


def _metric(run: Run, metric: str, label: str) -> float | None:
    by_client: dict[int, list[float]] = {}
    for item in metrics.at_the_end(run.measures):
        if (item.metric, item.label) == (metric, label) and item.value is not None:
            by_client.setdefault(item.client, []).append(item.value)
    return fmean(map(fmean, by_client.values())) if by_client else None


def over_rounds(one: Group, client: int | None = None) -> dict[RoundKey, Spread]:
    """Validation accuracy of the task being learned, by task and round."""
    values: dict[RoundKey, dict[int, list[float]]] = {}
    for run in one.runs:
        for item in run.rounds:
            if client in (None, item.client) and item.valid_accuracy is not None:
                by_seed = values.setdefault((item.task, item.round), {})
                by_seed.setdefault(run.seed, []).append(item.valid_accuracy)
    found = {key: spread(map(fmean, by_seed.values())) for key, by_seed in sorted(values.items())}
    return {key: value for key, value in found.items() if value is not None}


# ---- communication ---------------------------------------------------------------------------------------------------


def sent_by_round(one: Group, direction: str, client: int | None = None) -> dict[str, dict[RoundKey, float]]:
    """Bytes by tensor, then by task and round: the mean over the seeds that reached the round."""
    sums: dict[str, dict[RoundKey, float]] = {}
    reached: dict[RoundKey, set[int]] = {}
    for run in one.runs:
        for item in run.sent:
            key = (item.task, item.round)
            reached.setdefault(key, set()).add(run.seed)
            if item.direction == direction and client in (None, item.client):
                by_round = sums.setdefault(item.tensor.partition("/")[0], {})  # all foreign A's together
                by_round[key] = by_round.get(key, 0.0) + item.bytes
    return {
        tensor: {key: value / len(reached[key]) for key, value in sorted(by_round.items())}
        for tensor, by_round in sorted(sums.items())
    }


def rounds_sent(one: Group) -> list[RoundKey]:
    return sorted({(item.task, item.round) for run in one.runs for item in run.sent})


@dataclass(frozen=True)
class Row:
    """One group in the table of results; bytes and sizes are means over seeds."""

    label: str
    seeds: tuple[int, ...]
    accuracy: Spread | None
    forgetting: Spread | None
    sent: dict[str, tuple[float, float | None]]  # by direction: bytes, nonzeros as a share of dense
    model: float | None
    model_paper: float | None
    seconds: float | None
    state: str


def row(one: Group) -> Row:
    def mean(key: str) -> float | None:
        values = [run.summary[key] for run in one.runs if run.summary is not None]
        return fmean(values) if values else None

    sent: dict[str, tuple[float, float | None]] = {}
    for direction in DIRECTIONS:
        items = [item for run in one.runs for item in run.sent if item.direction == direction]
        sums = {key: sum(getattr(item, key) for item in items) for key in ("bytes", "nonzeros", "dense_bytes")}
        sent[direction] = (sums["bytes"] / len(one.runs), share_of_dense(sums))
    finished, runs = sum(run.summary is not None for run in one.runs), len(one.runs)
    return Row(
        label=one.label,
        seeds=tuple(one.seeds),
        accuracy=final(one, metrics.average_accuracy),
        forgetting=final(one, metrics.forgetting),
        sent=sent,
        model=mean("model_size_bytes"),
        model_paper=mean("model_size_paper_bytes"),
        seconds=mean("seconds"),
        state="finished" if finished == runs else f"{finished} of {runs} finished" if finished else "not finished",
    )


# ---- who helped whom -------------------------------------------------------------------------------------------------
# Eq. 1 adds alpha[l, f] * A_f to a client's weights, layer by layer. The sum of |alpha| over tasks and layers that
# belongs to a client's A's is its contribution in the paper's sense. Two other measures put it into perspective: the
# same sum if every A had the same weight, which random sampling decides, and the sum of |alpha| * |A_f|, the size of
# what was added.

Pair = tuple[int, int]  # sender, receiver
CAVEATS = (
    "Attention is a weight, not a proof of help: it starts equal for all A's, and training may hardly change it.",
    "Which client can help which is random: a client receives a sample of all A's. Compare with equal weights.",
    "A large alpha on a small A adds little; |alpha| times the norm of A is the size of what was added.",
    "Alpha may be negative: an A that is subtracted counts by its size, as if it had helped.",
    "What clients share through the base weights B is not included.",
)


def contributions(run: Run, measure: str = "attention") -> dict[Pair, float]:
    """Sums over the receiver's tasks and the layers, by sender and receiver."""
    found: dict[Pair, float] = {}
    for item in run.attention:
        if measure == "attention":
            value = sum(map(abs, item.alphas))
        elif measure == "equal":
            value = len(item.alphas) / item.count
        else:  # added
            value = sum(abs(alpha) * norm for alpha, norm in zip(item.alphas, item.norms, strict=True))
        pair = (item.sender, item.client)
        found[pair] = found.get(pair, 0.0) + value
    return found


def mean_contributions(one: Group, measure: str = "attention") -> dict[Pair, float]:
    """Contributions as the mean over seeds."""
    runs = [run for run in one.runs if run.attention]
    found: dict[Pair, float] = {}
    for run in runs:
        for pair, value in contributions(run, measure).items():
            found[pair] = found.get(pair, 0.0) + value / len(runs)
    return dict(sorted(found.items()))


def shares(one: Group, measure: str = "attention") -> dict[int, Spread]:
    """Each sender's share of all contributions, mean and deviation over seeds."""
    by_client: dict[int, list[float]] = {client: [] for client in one.clients}
    for run in one.runs:
        found = contributions(run, measure)
        total = sum(found.values())
        for client, values in by_client.items() if run.attention else ():
            given = sum(value for (sender, _), value in found.items() if sender == client)
            values.append(given / total if total else 0.0)
    means = {client: spread(values) for client, values in by_client.items()}
    return {client: value for client, value in means.items() if value is not None}


def largest_change(one: Group) -> float | None:
    """The largest change of an alpha by training, as a share of its equal start; None if it did not start equal."""
    if any(run.plan.get("method.attention_start", "even") != "even" for run in one.runs):
        return None
    changes = [abs(alpha * item.count - 1) for run in one.runs for item in run.attention for alpha in item.alphas]
    return max(changes, default=None)


# ---- does federation help --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gain:
    """Final accuracy of a client's tasks: federated minus local."""

    client: int
    mean: float
    by_task: tuple[float, ...]  # means over seeds


@dataclass(frozen=True)
class Comparison:
    """A federated plan and local training on the same tasks with the same seeds."""

    federated: Group
    local: Group
    seeds: tuple[int, ...]
    gains: tuple[Gain, ...]

    @property
    def mean(self) -> float:
        return fmean(gain.mean for gain in self.gains)


def comparisons(groups: Sequence[Group]) -> list[Comparison]:
    """Every federated group against the strongest comparable local one, judged by the seeds that both have."""
    found = []
    for federated in groups:
        if federated.is_local or federated.method == "joint":
            continue
        local = [one for one in groups if one.is_local and not incomparable([one, federated])]
        if compared := [one for one in (compare(federated, rival) for rival in local) if one is not None]:
            found.append(min(compared, key=lambda one: one.mean))
    return found


def compare(federated: Group, local: Group) -> Comparison | None:
    """None if the two have no finished seed in common; a seed counts if both used the same images."""
    ours, theirs = ({run.seed: run for run in one.runs if run.summary is not None} for one in (federated, local))
    seeds = sorted(
        seed
        for seed in ours.keys() & theirs.keys()
        if ours[seed].environment.get("images") == theirs[seed].environment.get("images")
    )
    gains = []
    for client in federated.clients:
        differences = []
        for seed in seeds:
            one, other = ours[seed].matrices.get(client), theirs[seed].matrices.get(client)
            if one and other and len(one) == len(other) and not math.isnan(one[-1][0] + other[-1][0]):
                differences.append([a - b for a, b in zip(one[-1], other[-1], strict=True)])
        if differences:
            by_task = tuple(fmean(values) for values in zip(*differences, strict=True))
            gains.append(Gain(client, fmean(by_task), by_task))
    return Comparison(federated, local, tuple(seeds), tuple(gains)) if gains else None
