"""FedWeIT (Yoon et al., ICML 2021) in one file: plain loops over clients, every gradient by autograd, nothing but torch.

    Eq. 1    theta = B * m + A + sum over foreign (i, j) of alpha[i, j] * A[i, j]
    Eq. 2    loss(theta) + lambda_1 * |A|_1 + lambda_2 * sum over past tasks i of |dB * m_i + dA_i|^2

`python examples/fedweit_in_one_file.py` learns a toy problem in seconds. Algorithm 1 is read as the library reads it by
default: m = sigmoid(v); the rows of B with the strongest m are sent; a row of theta_G is the mean over those that sent it;
past A and m stay put, so dA = 0; l1 on A is a proximal step. A test holds the library to this file, value by value.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]  # by layer or name; a row of a weight matrix is an output unit
Split = tuple[Tensor, Tensor]  # inputs and labels
Key = tuple[int, int]  # (client, step): whose A it is, and of which task
Network = Callable[[Weights, Weights, Tensor], Tensor]  # theta, biases and head, inputs -> logits


class Options(NamedTuple):
    rounds: int = 20  # for each task; appendix A, as all the others down to lambda_drift
    epochs: int = 1  # for each round
    batch_size: int = 100
    rate: float = 1e-3 / 3
    patience: int = 5  # so many epochs without a lower validation loss divide the rate by 3
    floor: float = 1e-7  # a client whose rate gets here is done with its task
    lambda_drift: float = 100.0  # lambda_2
    lambda_sparsity: float = 0.3  # lambda_1; [0.1, 0.4] in appendix A
    keep: float = 0.3  # the share of each layer's rows that is sent
    kb_size: int = 5  # foreign A's that a client is given for a task


@dataclass
class Learned:
    """What a client has for one of its tasks alone."""

    score: Weights  # v, (rows,) for each layer
    adaptive: Weights  # A, (rows, ...)
    attention: Weights  # alpha, (foreign,): one number for each layer and foreign A
    foreign: list[Weights]  # kb^(t), which is not trained
    private: Weights  # biases and head
    rate: float
    lowest: float = math.inf  # validation loss so far
    waited: int = 0  # epochs since then

    def mask(self, layer: str) -> Tensor:
        return self.score[layer].sigmoid().view(-1, *[1] * (self.adaptive[layer].dim() - 1))  # m, (rows, 1, ...)

    def trained(self) -> list[Tensor]:
        return [value for part in (self.score, self.adaptive, self.attention, self.private) for value in part.values()]


@dataclass
class Client:
    base: Weights  # B, shared by its tasks
    before: Weights = field(default_factory=dict)  # B(t-1); empty in the first task
    learned: list[Learned] = field(default_factory=list)


class Outcome(NamedTuple):
    theta_g: Weights  # 0 in the rows that nobody sent
    clients: list[Client]
    kb: dict[Key, Weights]
    accuracy: list[list[list[float]]]  # [client][t][i]: on task i after learning task t
    sent: dict[str, int]  # values, "up" to the server and "down" from it


def compose(base: Weights, task: Learned) -> Weights:
    """Eq. 1."""
    theta = {layer: base[layer] * task.mask(layer) + task.adaptive[layer] for layer in base}
    for layer, alphas in task.attention.items():
        for alpha, foreign in zip(alphas, task.foreign, strict=True):
            theta[layer] = theta[layer] + alpha * foreign[layer]
    return theta


def drift(client: Client) -> Tensor:
    """Eq. 2, last term without its weight; dA = 0."""
    changes = [(layer, client.base[layer] - before) for layer, before in client.before.items()]  # dB
    return torch.stack([(c * past.mask(layer)).square().sum() for past in client.learned[:-1] for layer, c in changes]).sum()


def begin(client: Client, start: Weights, private: Weights, foreign: list[Weights], rate: float) -> torch.optim.Adam:
    """A task of its own parameters, and an optimiser whose moments last as long as the task."""
    if client.learned:
        client.before = copy(client.base)  # here, since the next theta_G overwrites B
    score = {layer: value.new_zeros(len(value)) for layer, value in start.items()}
    adaptive = {layer: value / 3 for layer, value in start.items()}
    attention = {layer: value.new_full((len(foreign),), 1 / len(foreign)) for layer, value in start.items() if foreign}
    client.learned.append(Learned(score, adaptive, attention, foreign, copy(private), rate))
    return torch.optim.Adam([value.requires_grad_() for value in [*client.base.values(), *client.learned[-1].trained()]])


def minimise(client: Client, optimizer: torch.optim.Adam, network: Network, train: Split, order: Tensor, options: Options) -> None:
    """One epoch of Eq. 2."""
    task = client.learned[-1]
    optimizer.param_groups[0]["lr"] = task.rate
    for batch in order.split(options.batch_size):
        loss = functional.cross_entropy(network(compose(client.base, task), task.private, train[0][batch]), train[1][batch])
        if client.before:
            loss = loss + options.lambda_drift * drift(client)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        with torch.no_grad():
            for value in task.adaptive.values():  # lambda_1 * |A|_1: nearer to 0 by rate * lambda_1, but not past it
                value.copy_(functional.softshrink(value, task.rate * options.lambda_sparsity))


@torch.no_grad()
def measure(client: Client, step: int, network: Network, data: Split) -> tuple[float, float]:
    """Accuracy and cross entropy of a client's task."""
    task = client.learned[step]
    logits = network(compose(client.base, task), task.private, data[0])
    return float((logits.argmax(dim=1) == data[1]).float().mean()), float(functional.cross_entropy(logits, data[1]))


def strongest(mask: Tensor, keep: float) -> Tensor:
    """Which rows to send, (rows, 1, ...): the share with the largest m, rounded up; the first of equals."""
    kept = torch.zeros_like(mask, dtype=torch.bool)
    kept[mask.flatten().argsort(descending=True, stable=True)[: math.ceil(keep * len(mask) - 1e-9)]] = True
    return kept


def shuffled(client: int, step: int, round_index: int, epoch: int, count: int) -> Tensor:
    return torch.tensor(random.Random(f"order {client} {step} {round_index} {epoch}").sample(range(count), count))


def drawn(client: int, step: int, stored: list[Key], count: int) -> list[Key]:
    return random.Random(f"kb {client} {step}").sample(stored, min(count, len(stored)))


def run(
    tasks: list[list[dict[str, Split]]],  # [client][step]["train" | "valid" | "test"]
    network: Network,
    start: Weights,  # initial theta_G
    private: Callable[[int, int], Weights],  # (client, step) -> initial biases and head
    options: Options,
    order: Callable[[int, int, int, int, int], Tensor] = shuffled,
    sample: Callable[[int, int, list[Key], int], list[Key]] = drawn,
) -> Outcome:
    """Algorithm 1."""
    theta_g, kb, sent = copy(start), dict[Key, Weights](), {"up": 0, "down": 0}
    clients = [Client(copy(theta_g)) for _ in tasks]  # line 1
    accuracy: list[list[list[float]]] = [[] for _ in tasks]
    for step in range(len(tasks[0])):  # line 2
        optimizers = []
        for c, client in enumerate(clients):  # line 3: kb^(t) ~ kb, for each client without its own
            foreign = [kb[key] for key in sample(c, step, sorted(key for key in kb if key[0] != c), options.kb_size)]
            optimizers.append(begin(client, start, private(c, step), foreign, options.rate))
            sent["down"] += sum(map(nonzeros, foreign))
        for round_index in range(options.rounds):  # line 4
            total = {layer: torch.zeros_like(value) for layer, value in theta_g.items()}
            senders = {layer: torch.zeros_like(value) for layer, value in theta_g.items()}
            for c, client in enumerate(clients):  # line 5: all of them
                task = client.learned[-1]
                if task.rate <= options.floor:
                    continue
                for layer, value in theta_g.items():  # line 6, and section 3.4: B(n) = theta_G(n) where that is not 0
                    client.base[layer].data = torch.where(value != 0, value, client.base[layer].data)
                sent["down"] += nonzeros(theta_g)
                for epoch in range(options.epochs):  # line 7
                    train = tasks[c][step]["train"]
                    minimise(client, optimizers[c], network, train, order(c, step, round_index, epoch, len(train[1])), options)
                    loss = measure(client, step, network, tasks[c][step]["valid"])[1]
                    task.lowest, task.waited = min(loss, task.lowest), 0 if loss < task.lowest else task.waited + 1
                    if task.waited == options.patience:
                        task.rate, task.waited = max(task.rate / 3, options.floor), 0
                    if task.rate <= options.floor:
                        break
                for layer, value in client.base.items():  # line 8: B of the rows that this task uses most
                    kept = strongest(task.mask(layer).detach(), options.keep)
                    total[layer] += value.detach() * kept
                    senders[layer] += kept
                    sent["up"] += int(kept.sum()) * value[0].numel()
            if any(bool(value.any()) for value in senders.values()):
                theta_g = {layer: total[layer] / senders[layer].clamp(min=1) for layer in total}  # line 9, by count
        for c, client in enumerate(clients):  # line 11
            for value in client.learned[-1].trained():
                value.requires_grad_(False)
            kb[c, step] = client.learned[-1].adaptive
            sent["up"] += nonzeros(kb[c, step])
            accuracy[c].append([measure(client, past, network, tasks[c][past]["test"])[0] for past in range(step + 1)])
    return Outcome(theta_g, clients, kb, accuracy, sent)


def copy(weights: Weights) -> Weights:
    return {name: value.detach().clone() for name, value in weights.items()}


def nonzeros(weights: Weights) -> int:
    return sum(int(value.count_nonzero()) for value in weights.values())


# ---- a toy problem: five noisy prototypes a task; clients share the tasks, in another order each -----------------------


def mlp(theta: Weights, private: Weights, inputs: Tensor) -> Tensor:
    x = functional.relu(functional.linear(inputs, theta["fc1"], private["fc1.bias"]))
    x = functional.relu(functional.linear(x, theta["fc2"], private["fc2.bias"]))
    return functional.linear(x, private["head"], private["head.bias"])


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    sizes = {"fc1": (48, 32), "fc2": (24, 48), "head": (5, 24)}  # (rows, width)

    def draw(*layers: str) -> Weights:
        return {layer: torch.randn(sizes[layer], generator=rng) / math.sqrt(sizes[layer][1]) for layer in layers}

    def private(client: int, step: int) -> Weights:
        return draw("head") | {f"{layer}.bias": torch.zeros(rows) for layer, (rows, _) in sizes.items()}

    def noisy(prototypes: Tensor, count: int) -> Split:
        labels = torch.arange(count) % len(prototypes)
        return prototypes[labels] + 1.2 * torch.randn(count, prototypes.shape[1], generator=rng), labels

    kinds = [torch.randn(5, 32, generator=rng) for _ in range(3)]
    parts = {"train": 60, "valid": 30, "test": 200}
    tasks = [
        [{part: noisy(kinds[(c + step) % 3], count) for part, count in parts.items()} for step in range(3)] for c in range(3)
    ]
    options = Options(rounds=8, batch_size=10, rate=3e-3)
    start = draw("fc1", "fc2")
    outcome = run(tasks, mlp, start, private, options)

    for c, matrix in enumerate(outcome.accuracy):
        print(f"client {c}       " + "".join(f"  task {i}" for i in range(len(matrix))))
        for t, row in enumerate(matrix):
            print(f"  after task {t} " + "".join(f"{value:8.3f}" for value in row))
    drops = [max(row[i] for row in m[i:-1]) - m[-1][i] for m in outcome.accuracy for i in range(len(m) - 1)]
    dense = nonzeros(start) * len(tasks) * len(tasks[0]) * options.rounds  # all weights, every round
    print(f"average accuracy {fmean(value for m in outcome.accuracy for value in m[-1]):8.3f}")
    print(f"forgetting       {fmean(drops):8.3f}")
    print(f"values sent      {outcome.sent['up'] / dense:8.1%} up, {outcome.sent['down'] / dense:.1%} down, of sending all")


if __name__ == "__main__":
    main()
