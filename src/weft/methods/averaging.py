"""Updates of clients and their means: dense vectors, some rows, or some single values.

    theta_G = sum over c of w_c * theta_c / sum over c of w_c

Of rows and single values only the senders count. A value that no client sent is absent from theta_G: a client that
receives it keeps its local value there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from weft.lazy import np, torch
from weft.wire import tensors
from weft.wire.tensors import Payload

# Of what a hub and its sites receive from one another, in norms of what they have; honest rounds moved by 0.21 at most
LARGEST_JUMP = 0.5
Average = Literal["equal", "examples"]
Tensors: TypeAlias = dict[str, Payload]
Fields: TypeAlias = dict[str, Any]  # JSON


@dataclass(frozen=True)
class Update:
    """An accepted reply of one client."""

    client: int
    task: int
    tensors: Tensors  # to merge; empty if a newer reply of this client is merged, or training has stopped
    task_tensors: Tensors  # uploaded once per task (line 11)
    fields: Fields  # what the client reports, such as `examples`
    sent: Fields | None  # fields of the request that is confirmed by it
    received: bool  # the client took in what was sent: its training had not stopped
    classes: tuple[str, ...] = ()  # identifiers of the task's classes, as announced


@dataclass
class Updates:
    """The updates of one round, sorted by client; or a single one, with `mix`, if asynchronous."""

    updates: list[Update]
    equal: bool = False  # all votes count the same, whatever a client claims
    mix: float | None = None  # weight of a single update; 1 puts it in place of what is known
    most: float = math.inf  # how far a tensor may be from what is known, in norms of that; at a hub LARGEST_JUMP

    def __iter__(self) -> Iterator[Update]:
        return iter(self.updates)

    def senders(self, name: str) -> list[Update]:
        """The updates that have this tensor."""
        return [update for update in self.updates if name in update.tensors]

    def parts(self, name: str) -> list[Payload]:
        return [update.tensors[name] for update in self.senders(name)]

    def weights(self, name: str, by: Average) -> list[float]:
        """The weight of each sender."""
        equal = self.equal or by == "equal"
        return [1.0 if equal else float(update.fields["examples"]) for update in self.senders(name)]

    def merge(self, name: str, known: Payload, by: Average, divide: Literal["senders", "all"] = "senders") -> Payload:
        """The weighted mean of what was sent; `known` if no client sent it; mixed into `known` if asynchronous."""
        if not (parts := self.parts(name)):
            return known
        if name in ("weights", "biases") and isinstance(known, torch.Tensor):
            parts = self.near(name, known).parts(name)
        if self.mix is not None:
            return mix(known, parts[0], self.mix)
        return average(parts, self.weights(name, by), divide)

    def near(self, name: str, base: torch.Tensor) -> Updates:
        """With one tensor of each sender moved back to within `most` of `base`, if it is farther."""
        limit = jump(name, self.most) * float(base.norm())
        if not limit < math.inf or not limit:  # nothing is known
            return self
        found = []
        for update in self.updates:
            if name in update.tensors:
                near = limited(update.tensors[name], base, [(slice(None), limit)])
                update = replace(update, tensors={**update.tensors, name: near})
            found.append(update)
        return replace(self, updates=found)

    def sum(self, name: str) -> torch.Tensor:
        parts = self.parts(name)
        return weighted_sum(parts, [1.0] * len(parts))


def limited(received: Payload, base: torch.Tensor, limits: Iterable[tuple[slice, float]]) -> Payload:
    """What was received, with each span that is farther from `base` than its limit moved back to that distance.

    >>> limited(torch.tensor([3.0, 4.0]), torch.zeros(2), [(slice(0, 2), 1.0)])
    tensor([0.6000, 0.8000])
    """
    value, sent, changed = tensors.dense(received).clone(), tensors.present(received), False
    for span, limit in limits:
        move = (value[span] - base[span]) * sent[span]
        if (distance := float(move.norm())) > limit:
            value[span], changed = torch.where(sent[span], base[span] + move * (limit / distance), value[span]), True
    return tensors.with_values(received, value) if changed else received


def jump(name: str, most: float) -> float:
    """Biases start close to 0: honest ones move by their own norm in a round."""
    return 4 * most if name.endswith("biases") else most


def weighted_sum(parts: list[Payload], weights: list[float]) -> torch.Tensor:
    total = torch.zeros(tensors.size(parts[0]))
    for part, weight in zip(parts, weights, strict=True):
        if isinstance(part, tensors.Rows):
            part.add_to(total, weight)
        else:
            total.add_(tensors.dense(part), alpha=weight)
    return total


def average(parts: list[Payload], weights: list[float], divide: Literal["senders", "all"] = "senders") -> Payload:
    """The weighted mean, summed in the given order, so that equal updates give equal bits.

    `divide`: each value's sum by the weight of its senders, or by the weight of all.
    """
    total = weighted_sum(parts, weights)
    if isinstance(parts[0], torch.Tensor):
        return total.div_(sum(weights))
    share = torch.zeros(len(_sent_units(parts[0])))  # for each row or value the weight of its senders
    for part, weight in zip(parts, weights, strict=True):
        share.add_(_sent_units(part), alpha=weight)
    sent = share > 0
    divisor = share.where(sent, 1.0) if divide == "senders" else torch.full_like(share, sum(weights))
    if isinstance(parts[0], tensors.Sparse):
        return tensors.Sparse.of(total.div_(divisor))
    return tensors.Rows.of(total.div_(tensors.by_value(divisor, parts[0].segments)), parts[0].segments, sent)


def mix(known: Payload, update: Payload, weight: float) -> Payload:
    """One update mixed into what is known, in the rows or values that it has: (1 - w) * known + w * update.

    Where nothing was known the update stands as it is.
    """
    if isinstance(known, torch.Tensor) and isinstance(update, torch.Tensor):
        return torch.lerp(known, update, weight)
    in_update, in_known = tensors.present(update), tensors.present(known)
    value, new = tensors.dense(known), tensors.dense(update)
    value = torch.where(in_update, torch.where(in_known, torch.lerp(value, new, weight), new), value)
    if isinstance(known, torch.Tensor):
        return value
    if isinstance(update, tensors.Rows):
        return tensors.Rows.of(value, update.segments, _sent_units(known) | update.kept)
    return tensors.Sparse.of(value)


def _sent_units(part: Payload) -> torch.Tensor:
    """Which rows, or which single values, are present."""
    return part.kept if isinstance(part, tensors.Rows) else tensors.present(part)


def merge(received: Payload, weights: torch.Tensor) -> torch.Tensor:
    """B(n) = theta_G(n) where theta_G(n) is not 0 (section 3.4), and the client's value elsewhere.

    Of rows all sent values count, including those that the wire rounded to 0.
    """
    if isinstance(received, torch.Tensor):
        return received
    if isinstance(received, tensors.Rows):
        return received.over(weights.clone())
    value = received.dense()
    return torch.where(value != 0, value, weights)


def largest_places(sizes: torch.Tensor, count: int) -> torch.Tensor:
    """Which places hold the `count` largest numbers, as booleans; of equals the first, on every machine."""
    if count >= len(sizes):
        return torch.ones(len(sizes), dtype=torch.bool)
    goes = len(sizes) - count - 1
    # the largest that goes; by numpy, since torch's kthvalue takes ten times as long
    bound = float(np.partition(sizes.cpu().numpy(), goes)[goes])
    chosen = sizes > bound
    equals = torch.nonzero(sizes == bound).view(-1)[: count - int(chosen.sum())]
    chosen[equals] = True
    return chosen
