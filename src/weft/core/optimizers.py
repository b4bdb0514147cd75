"""The two optimisers, each one pass over every variable of a method.

Adam calls the kernel of torch.optim.Adam(fused=True) itself: torch.optim takes seconds to load for what is one call.
"""

from __future__ import annotations

import torch

from weft.core.storage import State
from weft.methods.method import Work
from weft.plan import Plan


def make_optimizer(plan: Plan, work: Work, client: State | None) -> Adam | SGD:
    """The optimiser of one round, with what it remembers of the last one at this client, if it is to."""
    if plan.optimizer == "sgd":
        return SGD(work)
    return Adam(work, client if plan.optimizer_memory == "task" else None)


class SGD:
    """Plain gradient descent, which remembers nothing."""

    def __init__(self, work: Work):
        self._work = work

    def step(self, rate: float) -> None:
        for name, variable in self._work.variables.items():
            variable.add_(self._work.gradients[name], alpha=-rate * self._work.rates.get(name, 1.0))

    def remember(self, memory: State) -> None:
        pass


class Adam:
    """Adam over a method's variables (Kingma and Ba, 2015)."""

    FIRST_DECAY, SECOND_DECAY, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, work: Work, memory: State | None):
        """With the moments of the last round, if they are kept in `memory`."""
        self._work = work
        kept = memory.tensors if memory is not None else {}
        steps = memory.numbers.get("adam", {}) if memory is not None else {}
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        for name, variable in work.variables.items():
            # taken over, not copied: they are most of a client's state, and `remember` puts them back
            found = (kept.pop(f"adam/{name}/first", None), kept.pop(f"adam/{name}/second", None))
            moments = [
                moment.to(variable.device) if isinstance(moment, torch.Tensor) else torch.zeros_like(variable)
                for moment in found
            ]
            self._moments[name] = (
                moments[0],
                moments[1],
                torch.tensor(float(steps.get(name, 0)), device=variable.device),
            )

    def step(self, rate: float) -> None:
        for name, (first, second, steps) in self._moments.items():
            steps += 1
            torch._fused_adam_(
                [self._work.variables[name]],
                [self._work.gradients[name]],
                [first],
                [second],
                [],
                [steps],
                lr=rate * self._work.rates.get(name, 1.0),
                beta1=self.FIRST_DECAY,
                beta2=self.SECOND_DECAY,
                weight_decay=0.0,
                eps=self.EPSILON,
                amsgrad=False,
                maximize=False,
            )

    def remember(self, memory: State) -> None:
        for name, (first, second, _) in self._moments.items():
            memory.tensors[f"adam/{name}/first"] = first.cpu()
            memory.tensors[f"adam/{name}/second"] = second.cpu()
        memory.numbers["adam"] = {name: steps.item() for name, (_, _, steps) in self._moments.items()}


def forget_optimizer(client: State) -> None:
    """A task is over: its moments go."""
    client.numbers.pop("adam", None)
    for key in [key for key in client.tensors if key.startswith("adam/")]:
        del client.tensors[key]
