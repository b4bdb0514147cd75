"""APD, additive parameter decomposition: theta = B * m + A, with nothing sent (Yoon et al., ICLR 2020).

    theta = B * m + A
    loss(theta) + lambda_1 * (|m|_1 + |A|_1) + lambda_2 * sum over past tasks i of |dB * m_i + dA_i|^2

B (`base`) is the weights that tasks share, m (`mask`) one number for each output unit, A (`adaptive`) the task's own
sparse weights. The last term holds what past tasks answer with while B changes. It is the learning half of FedWeIT,
which adds the server and foreign A's (fedweit.py); APD's hierarchical consolidation of old A's is left out, as in the
FedWeIT paper's use of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from weft.lazy import torch
from weft.methods import method
from weft.methods.fedweit.formulas import (
    Foreign,
    add_masked,
    compose,
    drift_gradient,
    drift_gradient_adaptive,
    largest,
    pull_back,
    retroactive,
    soft_threshold,
)
from weft.methods.method import Lesson, Method, Size, Work, initial_body
from weft.randomness import generator
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.networks.flat import Layout, Network

Part = Literal["a", "m", "l1", "l2"]
RECOUNTED = 40  # batches: with torch's momentum of 0.1 they leave 0.9^40 = 1.5 % of what was counted before


def words(value: Any) -> Any:
    """`ablate=a,m` on the command line is the list of two words."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    return tuple(value) if isinstance(value, list) else value


class Options(method.Options):
    biases: Literal["shared", "private"] = "private"  # released code: a set for each task
    lambda_sparsity: float = Field(0.1, ge=0, le=1e6)  # lambda_1 on A; [0.1, 0.4] in appendix A
    lambda_mask: float = Field(0.0, ge=0, le=1e6)  # lambda_1 on m
    sparsify: Literal["proximal", "gradient"] = "proximal"  # l1 as a step of rate * lambda_1 towards 0, or as gradient
    prune_below: float = Field(0.0, ge=0)  # smaller values of A are 0 when tested, sent and stored
    adaptive_keep: float = Field(0.1, gt=0, le=1)  # of A's values only this share stays at a task's end
    # which these are: the largest, or those without which the loss would rise most, a^2 * E[g^2] (optimal brain damage)
    adaptive_rank: Literal["saliency", "size"] = "saliency"
    lambda_drift: float = Field(100.0, ge=0, le=1e9)  # lambda_2, appendix A
    weight_decay: float = Field(0.0, ge=0, le=1e6)  # on A and the mask, and on B in a client's first task
    mask: Literal["sigmoid", "linear"] = "sigmoid"  # m = sigmoid(v), or m itself is learned and may reach 0
    mask_start: float = 0.0  # the learned number's start: v for sigmoid, m for linear
    mask_spread: float = Field(0.0, ge=0)  # deviation of a random start
    mask_trained: bool = True  # by the task loss, as the paper says
    mask_rate: float = Field(1.0, ge=0, le=1e4)  # how many times faster the mask is learned than B
    adaptive_rate: float = Field(2.0, ge=0, le=1e4)  # and A; docs/experiments.md
    past: Literal["frozen", "closed", "joint"] = "frozen"  # A of past tasks: put, solved once a round, or learned on
    adaptive_start: float = 1 / 3  # A starts at this share of the initial weights
    # what A is sparse around: 0, or its start, which everybody draws from the seed and nobody has to send
    adaptive_origin: Literal["start", "zero"] = "start"
    ablate: Annotated[tuple[Part, ...], BeforeValidator(words)] = ()  # the paper's ablations


@dataclass
class DecomposedWork(Work):
    """Besides the variables: what stays put during a round."""

    layout: Layout = None  # type: ignore[assignment]
    origin: torch.Tensor | None = None  # what A is counted from, if not from 0
    foreign: list[Foreign] = field(default_factory=list)
    reference: torch.Tensor | None = None  # B(t-1)
    past_steps: list[int] = field(default_factory=list)  # which past tasks the drift term guards
    past_masks: list[torch.Tensor] = field(default_factory=list)
    past_start: list[torch.Tensor] = field(default_factory=list)  # past A at the end of task t-1, for `joint`
    mask_squares: torch.Tensor | None = None  # sum over past tasks of m_i^2, (rows,)
    masked_changes: torch.Tensor | None = None  # sum over past tasks of m_i * dA_i, for `closed`
    first_task: bool = False


class APD(Method):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "Yoon et al., Scalable and order-robust continual learning with APD, ICLR 2020"
    verified: ClassVar[str] = "tests/test_fedweit.py: test_the_gradients_of_a_step_are_those_of_eq_2"
    composes: ClassVar[bool] = True
    options: Options

    def begin(self, client: State, lesson: Lesson) -> None:
        super().begin(client, lesson)
        layout, options = lesson.layout, self.options
        rng = generator(lesson.plan.seed, "mask", lesson.client, lesson.step)
        mask = options.mask_start + options.mask_spread * torch.from_numpy(rng.standard_normal(layout.rows))
        client.tensors["mask"] = mask.float().clone()
        start = self._start(lesson)
        client.tensors["adaptive"] = start.clone() if options.adaptive_origin == "zero" else torch.zeros_like(start)
        if lesson.step > 0:
            client.tensors["reference"] = client.tensor("base").clone()  # B(t-1)
        if options.past != "frozen":
            for step in range(lesson.step):  # A_i at the end of task t-1, from which dA_i is counted
                client.archive[f"adaptive_before/{step}"] = client.archive[f"adaptive/{step}"]

    def open(self, client: State, lesson: Lesson) -> DecomposedWork:
        network, layout, ablate = lesson.network, lesson.layout, self.options.ablate
        device, weights = network.vector.device, lesson.layout.weights
        network.vector[weights:] = client.tensor("private")
        work = DecomposedWork(network, {}, {}, layout=layout, first_task=lesson.step == 0)
        work.origin = self._origin(lesson)
        trained = ["base", *(["mask"] if "m" not in ablate else []), *(["adaptive"] if "a" not in ablate else [])]
        for name in trained:
            work.variables[name] = client.tensor(name).to(device)  # the client's own memory: learned in place
        work.foreign = self.foreign(client, None, lesson)
        work.rates |= {"mask": self.options.mask_rate, "adaptive": self.options.adaptive_rate}
        if work.foreign:
            work.variables["attention"] = client.tensor("attention").to(device)
        work.variables["private"] = network.vector[weights:]
        work.gradients["private"] = network.gradient[weights:]
        if "adaptive" in work.variables:
            work.gradients["adaptive"] = network.gradient[:weights]  # d theta / d A = 1
        for name in work.variables.keys() - work.gradients.keys():
            work.gradients[name] = torch.empty_like(work.variables[name])  # `pull_back` writes all of it
        if self._lambda_drift and (past := learned_before(client, lesson)):
            self._open_drift(client, past, work)
        return work

    def foreign(self, client: State, step: int | None, lesson: Lesson) -> list[Foreign]:
        """The A's of other clients that a task of this client uses (None: the current one). Here there are none."""
        return []

    def _open_drift(self, client: State, past_steps: list[int], work: DecomposedWork) -> None:
        """The sums over past tasks that the drift term needs: while past A stays put they cost the same at any task."""
        device = work.network.vector.device
        work.past_steps = past_steps
        work.reference = client.tensor("reference").to(device)
        work.past_masks = [self._archived(client, f"mask/{step}").to(device) for step in past_steps]
        work.mask_squares = torch.stack(work.past_masks).square().sum(dim=0)
        if self.options.past == "frozen" or "a" in self.options.ablate:
            return
        past = [self._archived(client, f"adaptive/{step}").to(device) for step in past_steps]
        before = [self._archived(client, f"adaptive_before/{step}").to(device) for step in past_steps]
        if self.options.past == "closed":
            work.masked_changes = torch.zeros_like(work.reference)
            for mask, new, old in zip(work.past_masks, past, before, strict=True):
                add_masked(work.layout, new - old, mask, work.masked_changes)
            return
        work.past_start = before
        for step, value in zip(past_steps, past, strict=True):
            work.variables[f"adaptive/{step}"] = value.clone()
            work.gradients[f"adaptive/{step}"] = torch.zeros_like(value)

    def compose(self, work: Work, tested: bool = False) -> None:
        assert isinstance(work, DecomposedWork)
        v = work.variables
        adaptive = v.get("adaptive")
        if tested and adaptive is not None:
            adaptive = self._pruned(adaptive)
        out = work.network.vector[: work.layout.weights]
        mask, attention = self._mask(v.get("mask")), v.get("attention")
        compose(work.layout, v["base"], mask, adaptive, attention, work.foreign, out, work.origin)

    def pull_back(self, work: Work) -> None:
        assert isinstance(work, DecomposedWork)
        v, g = work.variables, work.gradients
        by_theta = work.network.gradient[: work.layout.weights]
        mask = self._mask(v.get("mask"))
        pull_back(work.layout, by_theta, v["base"], mask, work.foreign, g["base"], g.get("mask"), g.get("attention"))
        if mask is not None and not self.options.mask_trained:
            g["mask"].zero_()
        elif mask is not None:
            g["mask"].mul_(self._mask_slope(mask))

    def penalise(self, work: Work) -> None:
        """The gradients of Eq. 2's regularisers; l1 on A is left to `constrain` where it is proximal."""
        assert isinstance(work, DecomposedWork)
        v, g, options = work.variables, work.gradients, self.options
        if options.sparsify == "gradient" and "l1" not in options.ablate:
            for name in v:
                if name.startswith("adaptive"):
                    g[name].add_(v[name].sign(), alpha=options.lambda_sparsity)
        if options.lambda_mask and "l1" not in options.ablate and "mask" in v:
            mask = self._mask(v["mask"])
            assert mask is not None
            g["mask"].add_(mask.sign() * self._mask_slope(mask), alpha=options.lambda_mask)
        if options.weight_decay:
            for name in ("adaptive", "mask", *(("base",) if work.first_task else ())):
                if name in v:
                    g[name].add_(v[name], alpha=2 * options.weight_decay)
        if work.reference is not None and work.mask_squares is not None:
            self._penalise_drift(work, work.reference, work.mask_squares)

    def _penalise_drift(self, work: DecomposedWork, reference: torch.Tensor, mask_squares: torch.Tensor) -> None:
        v, g, weight = work.variables, work.gradients, self._lambda_drift
        change = v["base"] - reference  # dB
        masked = work.masked_changes
        if work.past_start:
            masked = torch.zeros_like(reference)
            for step, mask, before in zip(work.past_steps, work.past_masks, work.past_start, strict=True):
                name = f"adaptive/{step}"
                moved = v[name] - before  # dA_i
                drift_gradient_adaptive(work.layout, change, mask, moved, weight, g[name], masked)
        drift_gradient(work.layout, change, mask_squares, masked, weight, g["base"])

    def constrain(self, work: Work, rate: float) -> None:
        if self.options.sparsify == "proximal" and "l1" not in self.options.ablate:
            for name, value in work.variables.items():
                if name.startswith("adaptive"):
                    soft_threshold(value, rate * work.rates.get(name, 1.0) * self.options.lambda_sparsity)
        for name, value in work.gradients.items():
            if name.startswith("adaptive/"):
                value.zero_()

    def close(self, client: State, work: Work) -> None:
        assert isinstance(work, DecomposedWork)
        for name, value in work.variables.items():
            if name.startswith("adaptive/"):
                client.archive[name] = tensors.Sparse.of(self._pruned(value).cpu())
            else:
                # copied only if it lies in the network, which serves others next; the rest is this round's own
                client.tensors[name] = value.detach().clone().cpu() if name == "private" else value.detach().cpu()
        if self.options.past == "closed" and work.reference is not None and "a" not in self.options.ablate:
            change = work.variables["base"] - work.reference
            threshold = 0.0 if "l1" in self.options.ablate else self.options.lambda_sparsity / (2 * self._lambda_drift)
            for step, mask in zip(work.past_steps, work.past_masks, strict=True):
                before = self._archived(client, f"adaptive_before/{step}").to(change.device)
                best = retroactive(work.layout, before, change, mask, threshold)
                client.archive[f"adaptive/{step}"] = tensors.Sparse.of(self._pruned(best).cpu())

    def finish(self, client: State, lesson: Lesson) -> None:
        super().finish(client, lesson)
        step = lesson.step
        mask = self._mask(client.tensor("mask"))
        client.archive[f"mask/{step}"] = torch.ones(lesson.layout.rows) if mask is None else mask
        learned = client.numbers["schedule"]["epochs"] > 0
        client.numbers["learned"] = [*client.numbers.get("learned", []), *([step] if learned else [])]
        adaptive = self._pruned(client.tensor("adaptive")) if learned else torch.zeros(lesson.layout.weights)
        client.archive[f"adaptive/{step}"] = tensors.Sparse.of(self._cut(client, adaptive))
        for key in [key for key in client.archive if key.startswith("adaptive_before/")]:
            del client.archive[key]
        begin, end = lesson.layout.statistics
        if learned and begin < end:
            self._recount(client, lesson)
        for name in ("adaptive", "reference"):  # whole vectors that only a task under way needs
            client.tensors.pop(name, None)

    def _recount(self, client: State, lesson: Lesson) -> None:
        """Batch norm's statistics belong to theta with all of A; cut to its largest values it needs others.

        Without this a ResNet-18 fell from .97 to chance at a task's end.
        """
        network, step, train = lesson.network, lesson.step, lesson.load("train")
        self.answer_for(client, step, lesson)
        batches = -(-len(train) // lesson.plan.batch_size)
        for _ in range(-(-RECOUNTED // batches)):
            network.recount(train.in_order(lesson.plan.batch_size))
        own = network.vector[lesson.layout.weights :].cpu().clone()
        client.archive[f"private/{step}"] = own[int(client.numbers["shared_biases"]) :]

    def answer_for(self, client: State, step: int, lesson: Lesson) -> None:
        network, weights, device = lesson.network, lesson.layout.weights, lesson.network.vector.device
        network.vector[weights:] = self.private_part(client, step, lesson)
        if finished := f"adaptive/{step}" in client.archive:
            mask: torch.Tensor | None = self._archived(client, f"mask/{step}")
            adaptive = client.archive[f"adaptive/{step}"]
        else:
            mask, adaptive = self._mask(client.tensor("mask")), self._pruned(client.tensor("adaptive"))
        attention = None
        if foreign := self.foreign(client, step if finished else None, lesson):
            attention = self._archived(client, f"attention/{step}") if finished else client.tensor("attention")
            attention = attention.to(device)
        mask = None if mask is None else mask.to(device)
        own_base, out, origin = client.tensor("base").to(device), network.vector[:weights], self._origin(lesson)
        if isinstance(adaptive, tensors.Sparse) and origin is not None:  # a tenth of A is left: no need of the whole
            compose(lesson.layout, own_base, mask, origin, attention, foreign, out)
            out.index_add_(0, adaptive.indices.to(device), adaptive.values.to(device))
        else:
            compose(lesson.layout, own_base, mask, tensors.dense(adaptive).to(device), attention, foreign, out, origin)

    def size(self, client: State) -> Size:
        """B, and of every task m, A, alpha, biases and head; and each foreign A that any of them uses, once."""
        own = [value for key, value in client.archive.items() if key.startswith("adaptive/")]
        b = client.tensor("base")
        values = int(b.count_nonzero()) + sum(tensors.nonzeros(value) for value in own)
        kept = sum(map(tensors.nbytes, client.archive.values())) + self.biases_size(client)
        return Size(b.nbytes + kept, 4 * values)

    # ---- small parts -------------------------------------------------------------------------------------------------

    def _start(self, lesson: Lesson) -> torch.Tensor:
        share = 0.0 if "a" in self.options.ablate else self.options.adaptive_start
        return start_of_adaptive(lesson.network, lesson.plan.seed, share)

    def _origin(self, lesson: Lesson) -> torch.Tensor | None:
        """What A is counted from, where that is not 0."""
        if self.options.adaptive_origin == "zero":
            return None
        return self._start(lesson).to(lesson.network.vector.device)

    def _cut(self, client: State, adaptive: torch.Tensor) -> torch.Tensor:
        """A with the share of its values that is kept when a task ends."""
        squares = client.tensors.get("adam/adaptive/second")  # Adam's mean of g^2; none if it forgets every round
        if squares is None or self.options.adaptive_rank == "size":
            return largest(adaptive, self.options.adaptive_keep)
        return largest(adaptive, self.options.adaptive_keep, adaptive.square() * tensors.dense(squares))

    @property
    def _lambda_drift(self) -> float:
        return 0.0 if "l2" in self.options.ablate else self.options.lambda_drift

    def _mask(self, learned: torch.Tensor | None) -> torch.Tensor | None:
        """m from what is learned; None stands for m = 1."""
        if learned is None or "m" in self.options.ablate:
            return None
        return learned.sigmoid() if self.options.mask == "sigmoid" else learned

    def _mask_slope(self, mask: torch.Tensor) -> torch.Tensor:
        """dm / dv: that of the sigmoid, or 1."""
        return mask * (1 - mask) if self.options.mask == "sigmoid" else torch.ones_like(mask)

    def _pruned(self, adaptive: torch.Tensor) -> torch.Tensor:
        if not self.options.prune_below:
            return adaptive
        return torch.where(adaptive.abs() >= self.options.prune_below, adaptive, 0.0)

    @staticmethod
    def _archived(client: State, key: str) -> torch.Tensor:
        return tensors.dense(client.archive[key])


@functools.lru_cache(maxsize=2)
def start_of_adaptive(network: Network, seed: int, share: float) -> torch.Tensor:
    """Where A starts, the same for every task and client; computed once, so whoever wants to change it copies it."""
    return initial_body(network, seed)[: network.layout.weights] * share


def learned_before(client: State, lesson: Lesson) -> list[int]:
    """The past tasks that were really trained: one that no round reached answers with what it started from."""
    return [step for step in client.numbers.get("learned", []) if step < lesson.step]
