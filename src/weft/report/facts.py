"""Numbers from runs: seeds of one plan grouped, means over clients, deviations over seeds, attention, gain.

A curve has one point for each task or round: the mean and standard deviation over seeds of what weft.metrics computes
for one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from weft import metrics
from weft.metrics import Matrix, Spread, spread
from weft.registry import short
from weft.report.reading import Attention, Run
from weft.report.text import share_of_dense
from weft.wire.ledger import DIRECTIONS, Sums, by

IGNORED = ("seed", "name", "device")  # plan keys that do not make two plans different
# plan keys, beside the options of scenario and network, that must agree before results can be compared
COMPARABLE = (
    *("scenario", "clients", "tasks"),
    *("network", "loss", "rounds_per_task", "epochs_per_round", "batch_size"),
)
BUDGET = ("rounds_per_task", "epochs_per_round")

Measure = Callable[[Matrix], float | None]
Curve = list[Spread | None]
RoundKey = tuple[int, int]  # task, round
Key = TypeVar("Key")
Value = TypeVar("Value")


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

    def position(self, key: RoundKey, part: float = 0.5) -> float:
        """A round on an axis of tasks; messages after the last round are at the end of their task."""
        task, number = key
        return min(task + (number + part) / self.rounds_of(task), task + 1.0)

    @property
    def clients(self) -> list[int]:
        return sorted({client for run in self.runs for client in run.matrices} or range(self.runs[0].clients))

    def title(self, client: int | None) -> str:
        return f"{self.label}, {'mean of clients' if client is None else f'client {client}'}"

    @property
    def mean_and_clients(self) -> list[int | None]:
        """What can be selected: None, the mean over clients, then each client."""
        return [None, *self.clients]

    @property
    def is_finished(self) -> bool:
        return all(run.summary is not None for run in self.runs)

    @property
    def is_local(self) -> bool:
        """Nothing was sent. `joint` sees all tasks at once: an upper bound, not local training."""
        return self.tasks_learned > 0 and not any(run.sent for run in self.runs) and self.method != "joint"


def group(runs: Iterable[Run]) -> list[Group]:
    """Group the seeds of each plan, in the order given; labels tell the groups apart."""
    plans = collect(
        (repr(sorted((name, value) for name, value in run.plan.items() if name not in IGNORED)), run) for run in runs
    )
    labels = label([same[0].plan for same in plans.values()])
    groups = []
    for name, same in zip(labels, plans.values(), strict=True):
        by_seed = {run.seed: run for run in reversed(same)}  # the first of each seed
        twice = [run for run in same if run is not by_seed[run.seed]]
        notes = tuple(f"{run.folder} has the plan and seed of another run; left out" for run in twice)
        groups.append(Group(name, tuple(by_seed[seed] for seed in sorted(by_seed)), notes))
    return groups


def collect(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """
    >>> collect([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def spreads(pairs: Iterable[tuple[Key, float | None]]) -> dict[Key, Spread]:
    """Mean and deviation of the values of each key, without keys that have none."""
    found = {key: spread(values) for key, values in collect(pairs).items()}
    return {key: value for key, value in found.items() if value is not None}


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
    cells = collect(
        ((after, task), value)
        for run in one.runs
        for who, rows in run.matrices.items()
        for after, row in enumerate(rows if client in (None, who) else ())
        for task, value in enumerate(row)
        if not math.isnan(value)
    )
    tasks = range(one.tasks_learned)
    return [[fmean(cells[after, task]) if (after, task) in cells else None for task in tasks] for after in tasks]


def other_metrics(one: Group) -> dict[tuple[str, str], Spread]:
    """Metrics other than accuracy, by metric and class ("": all classes), of every task when it was last tested: the
    mean over a client's tasks, then over clients, then over seeds."""
    found = []
    for run in one.runs:
        ending = [item for item in metrics.at_the_end(run.measures) if item.value is not None]
        by_client = collect(((item.metric, item.label, item.client), item.value or 0.0) for item in ending)
        means = collect(((metric, label), fmean(values)) for (metric, label, _), values in by_client.items())
        found += [(key, fmean(values)) for key, values in means.items()]
    return spreads(sorted(found))


def over_rounds(one: Group, client: int | None = None) -> dict[RoundKey, Spread]:
    """Validation accuracy of the task being learned, by task and round."""
    found = []
    for run in one.runs:
        rounds = [item for item in run.rounds if client in (None, item.client)]
        values = collect(
            ((item.task, item.round), item.valid_accuracy) for item in rounds if item.valid_accuracy is not None
        )
        found += [(key, fmean(each)) for key, each in values.items()]
    return spreads(sorted(found))


# ---- communication ---------------------------------------------------------------------------------------------------


def sent_by_round(one: Group, direction: str, client: int | None = None) -> dict[str, dict[RoundKey, float]]:
    """Bytes by tensor, then by task and round: the mean over the seeds that reached the round."""
    seeds = collect(sorted({((item.task, item.round), run.seed) for run in one.runs for item in run.sent}))
    found = collect(
        ((item.tensor.partition("/")[0], (item.task, item.round)), item.bytes)  # all foreign A's together
        for run in one.runs
        for item in run.sent
        if item.direction == direction and client in (None, item.client)
    )
    means: dict[str, dict[RoundKey, float]] = {}
    for (tensor, key), sizes in sorted(found.items()):
        means.setdefault(tensor, {})[key] = sum(sizes) / len(seeds[key])
    return means


def rounds_sent(one: Group) -> list[RoundKey]:
    return sorted({(item.task, item.round) for run in one.runs for item in run.sent})


def row(one: Group) -> dict[str, Any]:
    """One group in the table of results; bytes and sizes are means over seeds."""
    finished, runs = [run.summary for run in one.runs if run.summary is not None], len(one.runs)
    keys = ("model_size_bytes", "model_size_paper_bytes", "seconds")
    found: dict[str, Any] = {key: fmean(summary[key] for summary in finished) if finished else None for key in keys}
    for direction in DIRECTIONS:  # bytes, and nonzeros as a share of dense
        total = by(item for run in one.runs for item in run.sent if item.direction == direction).get((), Sums())
        found[direction] = (total.bytes / runs, share_of_dense(total._asdict()))
    state = f"{len(finished)} of {runs} finished" if finished else "not finished"
    return found | {
        "label": one.label,
        "seeds": one.seeds,
        "accuracy": final(one, metrics.average_accuracy),
        "forgetting": final(one, metrics.forgetting),
        "state": "finished" if one.is_finished else state,
    }


# ---- who helped whom -------------------------------------------------------------------------------------------------
# Eq. 1 adds alpha[l, f] * A_f to a client's weights, layer by layer. The sum of |alpha| over tasks and layers that
# belongs to a client's A's is its contribution in the paper's sense. Two other measures put it into perspective: the
# same sum if every A had the same weight, which random sampling decides, and the sum of |alpha| * |A_f|, the size of
# what was added.

Pair = tuple[int, int]  # sender, receiver
CONTRIBUTION: dict[str, Callable[[Attention], float]] = {
    "attention": lambda item: sum(map(abs, item.alphas)),
    "equal": lambda item: len(item.alphas) / item.count,
    "added": lambda item: sum(abs(alpha) * norm for alpha, norm in zip(item.alphas, item.norms, strict=True)),
}
CAVEATS = (
    "Attention is a weight, not a proof of help: it starts equal for all A's, and training may hardly change it.",
    "Which client can help which is random: a client receives a sample of all A's. Compare with equal weights.",
    "A large alpha on a small A adds little; |alpha| times the norm of A is the size of what was added.",
    "Alpha may be negative: an A that is subtracted counts by its size, as if it had helped.",
    "What clients share through the base weights B is not included.",
)


def contributions(one: Group, measure: str = "attention") -> dict[Pair, float]:
    """Sums over the receiver's tasks and the layers, by sender and receiver, as the mean over seeds."""
    runs = [run for run in one.runs if run.attention]
    found = collect(((item.sender, item.client), CONTRIBUTION[measure](item)) for run in runs for item in run.attention)
    return {pair: sum(values) / len(runs) for pair, values in sorted(found.items())}


def shares(one: Group, measure: str = "attention") -> dict[int, Spread]:
    """Each sender's share of all contributions, mean and deviation over seeds."""
    found = []
    for run in one.runs:
        given = collect((item.sender, CONTRIBUTION[measure](item)) for item in run.attention)
        total = sum(map(sum, given.values()))
        for client in one.clients if run.attention else ():
            found.append((client, sum(given.get(client, ())) / total if total else 0.0))
    return spreads(found)


def largest_change(one: Group) -> float | None:
    """The largest change of an alpha by training, as a share of its equal start; None if it did not start equal."""
    if any(run.plan.get("method.attention_start", "even") != "even" for run in one.runs):
        return None
    changes = [abs(alpha * item.count - 1) for run in one.runs for item in run.attention for alpha in item.alphas]
    return max(changes, default=None)


# ---- does federation help --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A federated plan and local training on the same tasks with the same seeds."""

    federated: Group
    local: Group
    seeds: tuple[int, ...]
    gains: dict[int, tuple[float, ...]]  # by client and task: final accuracy, federated minus local, mean over seeds

    @property
    def means(self) -> dict[int, float]:
        return {client: fmean(by_task) for client, by_task in self.gains.items()}

    @property
    def mean(self) -> float:
        return fmean(self.means.values())


def comparisons(groups: Sequence[Group]) -> list[Comparison]:
    """Every federated group against the strongest comparable local one, judged by the seeds that both have.

    Comparable: on the same tasks, and with no fewer local epochs.
    """
    found = []
    for federated in groups:
        if federated.is_local or federated.method == "joint":
            continue
        local = [one for one in groups if one.is_local and {*incomparable([one, federated])} <= {*BUDGET}]
        local = [one for one in local if epochs(one.plan) >= epochs(federated.plan, federated=True)]
        if compared := [one for one in (compare(federated, rival) for rival in local) if one is not None]:
            found.append(min(compared, key=lambda one: one.mean))
    return found


def epochs(plan: Mapping[str, Any], federated: bool = False) -> float:
    """Epochs that a client trains a task, in the mean."""
    of_all = plan.get("clients_per_round", "all") == "all" or plan.get("train_unchosen", False) or not federated
    share = 1.0 if of_all else min(1.0, plan["clients_per_round"] / plan["clients"])
    return float(plan["rounds_per_task"] * plan["epochs_per_round"] * share)


def compare(federated: Group, local: Group) -> Comparison | None:
    """None if the two have no finished seed in common; a seed counts if both used the same images."""
    ours, theirs = ({run.seed: run for run in one.runs if run.summary is not None} for one in (federated, local))
    seeds = sorted(
        seed
        for seed in ours.keys() & theirs.keys()
        if ours[seed].environment.get("images") == theirs[seed].environment.get("images")
    )
    gains = {}
    for client in federated.clients:
        differences = []
        for seed in seeds:
            one, other = ours[seed].matrices.get(client), theirs[seed].matrices.get(client)
            if one and other and len(one) == len(other) and not math.isnan(one[-1][0] + other[-1][0]):
                differences.append([a - b for a, b in zip(one[-1], other[-1], strict=True)])
        if differences:
            gains[client] = tuple(fmean(values) for values in zip(*differences, strict=True))
    return Comparison(federated, local, tuple(seeds), gains) if gains else None
