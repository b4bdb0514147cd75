"""FedWeIT (Yoon et al., ICML 2021) in one file: plain loops over clients, and every gradient by autograd.

    Eq. 1    theta = B * m + A + sum over foreign (i, j) of alpha[i, j] * A[i, j]
    Eq. 2    loss(theta) + lambda_1 * |A|_1 + lambda_2 * sum over past tasks i of |dB * m_i + dA_i|^2

`python examples/fedweit_in_one_file.py` learns a toy problem in seconds. It reads Algorithm 1 as the library does by
default: m = sigmoid(v). In each round all clients send the same rows of B, round-robin, and theta_G is their mean. Past
A and m are fixed, so dA = 0. A is measured from a third of the initial weights, which all clients know. l1 on A is a
proximal step, and at the end of a task A keeps only the values with the largest effect on the loss.
A test compares the library with this file, value by value. Left out: decay of the rate, selection of clients.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]  # by layer; a row is an output unit
Split = tuple[Tensor, Tensor]  # inputs and labels
Key = tuple[int, int]  # (client, task) of an A
Network = Callable[[Weights, Weights, Tensor], Tensor]  # theta, biases and head, inputs -> logits


class Options(NamedTuple):
    rounds: int = 20  # per task; appendix A
    epochs: int = 1  # per round; appendix A
    batch_size: int = 100  # appendix A
    rate: float = 1e-3 / 3  # appendix A
    adaptive_rate: float = 2.0  # factor of the learning rate of A
    lambda_sparsity: float = 0.1  # lambda_1; [0.1, 0.4] in appendix A
    lambda_drift: float = 100.0  # lambda_2; appendix A
    keep: float = 0.3  # share of each layer's rows that is sent
    adaptive_keep: float = 0.1  # share of A's values, over all layers, that remains at the end of a task
    kb_size: int = 5  # foreign A's that a client receives for a task


@dataclass
class Learned:
    """Task-specific parameters of a client."""

    score: Weights  # v, (rows,)
    adaptive: Weights  # A, (rows, ...), measured from `origin`
    origin: Weights  # a third of the initial theta_G, the same for every client and task
    attention: Weights  # alpha, (foreign,): one value per layer and foreign A
    private: Weights  # biases and head
    foreign: list[Weights]  # kb^(t), not trained

    def mask(self, layer: str) -> Tensor:
        return self.score[layer].sigmoid().view(-1, *[1] * (self.adaptive[layer].dim() - 1))  # m, (rows, 1, ...)


@dataclass
class Client:
    base: Weights  # B, shared by its tasks
    before: Weights = field(default_factory=dict)  # B(t-1); empty in the first task
    learned: list[Learned] = field(default_factory=list)  # by task, the current one last
    accuracy: list[list[float]] = field(default_factory=list)  # [t][i]: on task i after learning task t


def compose(base: Weights, task: Learned) -> Weights:
    """Eq. 1."""
    theta = {layer: value * task.mask(layer) + task.origin[layer] for layer, value in base.items()}
    for layer in theta:
        theta[layer] = theta[layer] + task.adaptive[layer]
        for alpha, foreign in zip(task.attention[layer], task.foreign, strict=True):
            theta[layer] = theta[layer] + alpha * foreign[layer]
    return theta


def drift(client: Client) -> Tensor:
    """Eq. 2, last term without lambda_2; dA = 0."""
    total = torch.zeros(())
    for past in client.learned[:-1]:
        for layer, before in client.before.items():
            total = total + ((client.base[layer] - before) * past.mask(layer).detach()).square().sum()
    return total


def begin(
    client: Client, start: Weights, private: Weights, foreign: list[Weights], options: Options
) -> torch.optim.Adam:
    """Start a task: create its parameters, and an optimizer whose moments last until its end."""
    if client.learned:
        client.before = copy(client.base)  # now, because the next theta_G overwrites B
    score = {layer: torch.zeros(len(value)) for layer, value in start.items()}
    adaptive = {layer: torch.zeros_like(value) for layer, value in start.items()}
    origin = {layer: value / 3 for layer, value in start.items()}
    attention = {layer: torch.full((len(foreign),), 1 / max(len(foreign), 1)) for layer in start}
    client.learned.append(Learned(score, adaptive, origin, attention, private, foreign))
    trained = [value for part in (client.base, score, attention, private) for value in part.values()]
    groups = [(trained, options.rate), (list(adaptive.values()), options.rate * options.adaptive_rate)]
    return torch.optim.Adam([{"params": [v.requires_grad_() for v in part], "lr": rate} for part, rate in groups])


def minimize(client: Client, adam: torch.optim.Adam, network: Network, batches: list[Split], options: Options) -> None:
    """Minimize Eq. 2 for one epoch."""
    task = client.learned[-1]
    for inputs, labels in batches:
        loss = functional.cross_entropy(network(compose(client.base, task), task.private, inputs), labels)
        adam.zero_grad()
        torch.autograd.backward(loss + options.lambda_drift * drift(client))
        adam.step()
        shrink = options.rate * options.adaptive_rate * options.lambda_sparsity
        for value in task.adaptive.values():  # lambda_1 * |A|_1: toward 0, but not past it
            value.data = functional.softshrink(value.data, shrink)


def prune(adaptive: Weights, adam: torch.optim.Adam, share: float) -> Weights:
    """Keep the values of A with the largest saliency, A^2 * E[g^2]; Adam has the mean of g^2."""
    saliency = {layer: value.detach() ** 2 * adam.state[value]["exp_avg_sq"] for layer, value in adaptive.items()}
    every = torch.cat([value.flatten() for value in saliency.values()])
    bound = every.sort(descending=True).values[int(share * len(every) + 1e-9) - 1]
    return {layer: value.detach() * (saliency[layer] >= bound) for layer, value in adaptive.items()}


def shuffled(client: int, task: int, round_index: int, epoch: int, count: int) -> Tensor:
    return torch.tensor(random.Random(f"order {client} {task} {round_index} {epoch}").sample(range(count), count))


def drawn(client: int, task: int, stored: list[Key], count: int) -> list[Key]:
    return random.Random(f"kb {client} {task}").sample(stored, min(count, len(stored)))


def run(
    tasks: list[list[dict[str, Split]]],  # [client][task]["train" or "test"]
    network: Network,
    start: Weights,  # the initial theta_G
    private: Callable[[int, int], Weights],  # (client, task) -> initial biases and head
    options: Options,
    order: Callable[[int, int, int, int, int], Tensor] = shuffled,
    sample: Callable[[int, int, list[Key], int], list[Key]] = drawn,
) -> tuple[Weights, list[Client], dict[Key, Weights], int]:
    """Run Algorithm 1. Return theta_G, the clients, kb, and the number of values sent to the server."""
    theta_g, kb, sent = start, dict[Key, Weights](), 0
    clients = [Client(copy(theta_g)) for _ in tasks]  # line 1
    for t in range(len(tasks[0])):  # line 2
        adams = []
        for c, client in enumerate(clients):  # line 3: kb^(t) ~ kb, without the client's own A's
            foreign = [kb[key] for key in sample(c, t, sorted(key for key in kb if key[0] != c), options.kb_size)]
            adams.append(begin(client, start, private(c, t), foreign, options))
        for round_index in range(options.rounds):  # line 4
            total, senders = ({layer: torch.zeros_like(value) for layer, value in start.items()} for _ in range(2))
            for c, client in enumerate(clients):  # line 5: all clients
                for layer, value in theta_g.items():  # line 6; section 3.4: B(n) = theta_G(n) where that is not 0
                    client.base[layer].data = torch.where(value != 0, value, client.base[layer].data)
                inputs, labels = tasks[c][t]["train"]
                for epoch in range(options.epochs):  # line 7
                    places = torch.split(order(c, t, round_index, epoch, len(labels)), options.batch_size)
                    minimize(client, adams[c], network, [(inputs[at], labels[at]) for at in places], options)
                for layer, value in client.base.items():  # line 8: rows of B, round-robin
                    count = math.ceil(options.keep * len(value) - 1e-9)
                    turn = t * options.rounds + round_index
                    rank = (torch.arange(len(value)) - turn * count) % len(value)
                    kept = (rank < count).view(-1, *[1] * (value.dim() - 1))  # (rows, 1, ...)
                    total[layer] += value.detach() * kept
                    senders[layer] += kept
                    sent += int(kept.sum()) * value[0].numel()
            theta_g = {layer: total[layer] / senders[layer].clamp(min=1) for layer in total}  # line 9
        for c, client in enumerate(clients):  # line 11
            kb[c, t] = prune(client.learned[-1].adaptive, adams[c], options.adaptive_keep)
            client.learned[-1].adaptive = kb[c, t]
            sent += nonzeros(kb[c, t])
            client.accuracy.append([])  # of the client's model, before the next theta_G
            for task, data in zip(client.learned, tasks[c][: t + 1], strict=True):
                guesses = network(compose(client.base, task), task.private, data["test"][0]).argmax(dim=1)
                client.accuracy[-1].append((guesses == data["test"][1]).float().mean().item())
    return theta_g, clients, kb, sent


def copy(weights: Weights) -> Weights:
    return {name: value.detach().clone() for name, value in weights.items()}


def nonzeros(weights: Weights) -> int:
    return sum(int(value.count_nonzero()) for value in weights.values())


def mlp(theta: Weights, private: Weights, inputs: Tensor) -> Tensor:
    x = functional.relu(functional.linear(inputs, theta["fc1"], private["fc1.bias"]))
    return functional.linear(x, private["head"], private["head.bias"])


def main() -> None:
    """Solve a toy problem: three tasks of noisy prototypes, in a different order for each of three clients."""
    torch.set_num_threads(1)  # a second thread slows down matrices this small
    rng, options = torch.Generator().manual_seed(0), Options(rounds=10, batch_size=10, rate=3e-3)
    kinds = torch.randn(3, 5, 32, generator=rng)  # (tasks, classes, inputs)
    start = {"fc1": torch.randn(48, 32, generator=rng) / math.sqrt(32)}  # (rows, width)
    private = {"fc1.bias": torch.zeros(48), "head": torch.randn(5, 48, generator=rng) / 7, "head.bias": torch.zeros(5)}

    def noisy(kind: int, count: int) -> Split:
        labels = torch.arange(count) % 5
        return kinds[kind][labels] + 1.3 * torch.randn(count, 32, generator=rng), labels

    tasks = [[{"train": noisy(t % 3, 60), "test": noisy(t % 3, 200)} for t in range(c, c + 3)] for c in range(3)]
    _, clients, _, sent = run(tasks, mlp, start, lambda client, task: copy(private), options)
    for c, client in enumerate(clients):
        print(f"client {c}      task 0  task 1  task 2")
        for t, row in enumerate(client.accuracy):
            print(f"after task {t} " + "".join(f"{value:8.3f}" for value in row))
    drops = [max(row[i] for row in c.accuracy[i:-1]) - c.accuracy[-1][i] for c in clients for i in range(2)]
    print(f"average accuracy {fmean(value for client in clients for value in client.accuracy[-1]):.3f}")
    print(f"forgetting       {fmean(drops):.3f}")
    dense = start["fc1"].numel() * 3 * 3 * options.rounds  # of 3 clients with 3 tasks
    print(f"values sent      {sent / dense:.1%} of all weights in every round")


if __name__ == "__main__":
    main()
