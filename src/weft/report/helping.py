"""Who helped whom, and whether federation helps a client: from attention, and from runs alone and together.

Attention is read with care. Eq. 1 adds alpha[l, f] * A_f to a client's weights, layer by layer; the sum of |alpha| over
tasks and layers that went to a client's A's is its contribution in the paper's sense. Beside it stand two yardsticks:
what the same sum would be if every A that was given counted alike, which chance alone decides, and the sum of
|alpha| * |A_f|, the size of what was really added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from weft.metrics import Spread, spread
from weft.report.facts import Group, unlike
from weft.report.reading import Run

Pair = tuple[int, int]  # giver, receiver

CAVEATS = (
    "Attention is a weight, not a proof of help: it starts alike for all A's and training may hardly move it.",
    "Who can help whom is drawn by lot: a client is given a sample of the A's there are. Compare with the even share.",
    "A large alpha on a small A adds little; |alpha| times the norm of A says how much was really added.",
    "Alpha may be negative: an A that is pushed away is counted by its size, as if it had helped.",
    "What comes through the shared base B is in none of these numbers.",
)
MEASURES = ("attention", "even", "added")


def contributions(run: Run, measure: str) -> dict[Pair, float]:
    """Sums over the receiver's tasks and the layers, by giver and receiver."""
    found: dict[Pair, float] = {}
    for one in run.attention:
        if measure == "attention":
            value = sum(abs(alpha) for alpha in one.alphas)
        elif measure == "even":
            value = len(one.alphas) / one.among
        else:
            value = sum(abs(alpha) * norm for alpha, norm in zip(one.alphas, one.norms, strict=True))
        pair = (one.giver, one.client)
        found[pair] = found.get(pair, 0.0) + value
    return found


def mean_contributions(group: Group, measure: str = "attention") -> dict[Pair, float]:
    """The same, as the mean over seeds."""
    runs = [run for run in group.runs if run.attention]
    found: dict[Pair, float] = {}
    for run in runs:
        for pair, value in contributions(run, measure).items():
            found[pair] = found.get(pair, 0.0) + value / len(runs)
    return dict(sorted(found.items()))


def shares(group: Group, measure: str = "attention") -> dict[int, Spread]:
    """Each giver's share of everything that was taken, mean and deviation over seeds."""
    by_client: dict[int, list[float]] = {client: [] for client in group.clients}
    for run in group.runs:
        if not run.attention:
            continue
        found = contributions(run, measure)
        total = sum(found.values())
        for client, values in by_client.items():
            given = sum(value for (giver, _), value in found.items() if giver == client)
            values.append(given / total if total else 0.0)
    means = {client: spread(values) for client, values in by_client.items()}
    return {client: value for client, value in means.items() if value is not None}


def largest_move(group: Group) -> float | None:
    """How far training moved an alpha from an even start, at most, as a share of that start."""
    if any(run.plan.get("method.attention_start", "even") != "even" for run in group.runs):
        return None  # it did not start even
    moves = [abs(alpha * one.among - 1) for run in group.runs for one in run.attention for alpha in one.alphas]
    return max(moves) if moves else None


@dataclass(frozen=True)
class Gain:
    """What a client's tasks gained by federation: accuracy together minus alone, at the end."""

    client: int
    mean: float
    by_task: tuple[float, ...]  # the mean over seeds


@dataclass(frozen=True)
class Help:
    """One federated plan beside one of clients that work alone, on the same tasks with the same seeds."""

    together: Group
    alone: Group
    seeds: tuple[int, ...]
    gains: tuple[Gain, ...]

    @property
    def mean(self) -> float:
        return fmean(gain.mean for gain in self.gains)

    @property
    def helped(self) -> list[int]:
        return [gain.client for gain in self.gains if gain.mean > 0]


def helps(groups: Sequence[Group]) -> list[Help]:
    """Every federated group beside the strongest one that works alone: whoever wins against that has won.

    Both learned the same tasks on the same terms; strongest is judged by the seeds that both have.
    """
    found = []
    for together in groups:
        if together.alone or together.method == "joint":
            continue
        rivals = [compare(together, one) for one in groups if one.alone and not unlike([one, together])]
        if compared := [one for one in rivals if one is not None]:
            found.append(min(compared, key=lambda one: one.mean))
    return found


def common_seeds(one: Group, other: Group) -> list[int]:
    """Seeds of which both runs have learned all tasks, from the same images: the tasks are drawn by the seed."""
    finished = [{run.seed: run for run in group.runs if run.summary is not None} for group in (one, other)]
    return sorted(
        seed
        for seed in finished[0].keys() & finished[1].keys()
        if finished[0][seed].environment.get("images") == finished[1][seed].environment.get("images")
    )


def compare(together: Group, alone: Group) -> Help | None:
    seeds = common_seeds(together, alone)
    by_seed = [{run.seed: run for run in group.runs} for group in (together, alone)]
    gains = []
    for client in together.clients:
        drops = []
        for seed in seeds:
            rows = [runs[seed].matrices.get(client) for runs in by_seed]
            tested = all(row and not math.isnan(row[-1][0]) for row in rows)
            if rows[0] and rows[1] and tested and len(rows[0]) == len(rows[1]):
                drops.append([ours - own for ours, own in zip(rows[0][-1], rows[1][-1], strict=True)])
        if drops:
            by_task = tuple(fmean(values) for values in zip(*drops, strict=True))
            gains.append(Gain(client, fmean(by_task), by_task))
    return Help(together, alone, tuple(seeds), tuple(gains)) if gains else None
