"""The server's mean of what clients sent: dense, some rows, or some single values.

    theta_G = sum over c of w_c * theta_c / sum over c of w_c

With rows or single values only those count who sent the row or the value, and where nobody sent anything there is
nothing: a client that receives such a theta_G keeps its own values there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from weft.errors import WeftError
from weft.lazy import torch
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.wire.message import Message
    from weft.wire.tensors import Payload

Average = Literal["equal", "examples"]


def reply_weights(replies: list[Message], average: Average) -> list[float]:
    """What each client's answer counts: all the same, or by its number of training examples."""
    return [1.0 if average == "equal" else float(reply.fields["examples"]) for reply in replies]


def sent(replies: list[Message], name: str) -> list[Payload]:
    """The same tensor out of every reply; a reply without it, or with one of another size or shape, is refused."""
    found: list[Payload] = []
    for reply in replies:
        value = reply.tensors.get(name)
        if value is None or (found and _form(value) != _form(found[0])):
            raise WeftError(f"{reply.sender} did not answer with {name!r} as this method expects it")
        found.append(value)
    return found


def _form(part: Payload) -> tuple[type, int]:
    return type(part), tensors.size(part)


def weighted_sum(parts: list[Payload], weights: list[float]) -> torch.Tensor:
    total = torch.zeros(tensors.size(parts[0]))
    for part, weight in zip(parts, weights, strict=True):
        if isinstance(part, tensors.Rows):
            part.add_to(total, weight)
        else:
            total.add_(tensors.dense(part), alpha=weight)
    return total


def average(parts: list[Payload], weights: list[float], divide: Literal["senders", "all"] = "senders") -> Payload:
    """The weighted mean, added up in the order given, so that equal replies give equal bits.

    `divide`: a value's sum by the weight of those that sent it, or by that of all.
    """
    total = weighted_sum(parts, weights)
    if isinstance(parts[0], torch.Tensor):
        return total.div_(sum(weights))
    share = torch.zeros(len(_sent_units(parts[0])))  # for each row or value the weight of those that sent it
    for part, weight in zip(parts, weights, strict=True):
        share.add_(_sent_units(part), alpha=weight)
    anybody = share > 0
    divisor = share.where(anybody, 1.0) if divide == "senders" else torch.full_like(share, sum(weights))
    if isinstance(parts[0], tensors.Sparse):
        return tensors.Sparse.of(total.div_(divisor))
    return tensors.Rows.of(total.div_(tensors.by_value(divisor, parts[0].segments)), parts[0].segments, anybody)


def absorb(server: State, reply: Message, weight: float) -> None:
    """One answer's weights and biases merged into theta_G; a client that has stopped sends none."""
    for name, key in (("base", "global"), ("biases", "biases")):
        if name in reply.tensors:
            server.tensors[key] = blend(server.tensors[key], reply.tensors[name], weight)


def blend(known: Payload, answer: Payload, weight: float) -> Payload:
    """One answer merged into what is known, in the rows or values that it brings: (1 - w) * known + w * answer.

    Where nothing was known the answer stands as it is.
    """
    if isinstance(known, torch.Tensor) and isinstance(answer, torch.Tensor):
        return torch.lerp(known, answer, weight)
    brought, there = tensors.present(answer), tensors.present(known)
    value, new = tensors.dense(known), tensors.dense(answer)
    value = torch.where(brought, torch.where(there, torch.lerp(value, new, weight), new), value)
    if isinstance(known, torch.Tensor):
        return value
    if isinstance(answer, tensors.Rows):
        return tensors.Rows.of(value, answer.segments, _sent_units(known) | answer.kept)
    return tensors.Sparse.of(value)


def _sent_units(part: Payload) -> torch.Tensor:
    """Which rows, or which single values, are there."""
    if isinstance(part, tensors.Rows):
        return part.kept
    return tensors.present(part)


def merge(received: Payload, own: torch.Tensor) -> torch.Tensor:
    """B(n) = theta_G(n) where theta_G(n) is not 0 (section 3.4), and the client's own value elsewhere.

    Of rows all values count that were sent: one that the wire rounded to 0 was sent too.
    """
    if isinstance(received, torch.Tensor):
        return received
    if isinstance(received, tensors.Rows):
        return received.over(own.clone())
    value = received.dense()
    return torch.where(value != 0, value, own)


def compact(vector: Payload) -> Payload:
    """A vector with many zeros as its nonzeros, which travel with an index of at most a byte each."""
    if isinstance(vector, torch.Tensor) and 2 * int(vector.count_nonzero()) < len(vector):
        return tensors.Sparse.of(vector)
    return vector
