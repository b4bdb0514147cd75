"""APD, additive parameter decomposition: theta = B * m + A, with nothing sent (Yoon et al., ICLR 2020).

    theta = B * m + A
    loss(theta) + lambda_1 * (|m|_1 + |A|_1) + lambda_2 * sum over past tasks i of |dB * m_i + dA_i|^2

B (`weights`) is shared by tasks, m (`mask`) has one number for each output unit, A (`adaptive`) is the task's sparse
parameters. The last term protects past tasks while B changes. It is the local half of FedWeIT, which adds the server
and foreign A's (fedweit.py). APD's hierarchical consolidation of old A's is left out, as in the FedWeIT paper's use.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field

from weft.lazy import torch
from weft.methods.context import LocalTraining, TaskContext, initial_body
from weft.methods.fedweit import formulas
from weft.methods.fedweit.formulas import Foreign
from weft.methods.method import Method, MethodInfo, MethodOptions, Traits
from weft.methods.state import ClientState, Size, Table, TaskState, empty
from weft.randomness import generator
from weft.wire import tensors
from weft.wire.tensors import Payload, Sparse

if TYPE_CHECKING:
    from weft.networks.flat import Network

Part = Literal["a", "m", "l1", "l2"]
RECOUNTED = 40  # batches: with torch's momentum of 0.1 they leave 0.9^40 = 1.5 % of what was counted before


def comma_separated(value: Any) -> Any:
    """Split text such as `a,m`, which `ablate=a,m` on the command line gives."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    return tuple(value) if isinstance(value, list) else value


class APDOptions(MethodOptions):
    biases: Literal["shared", "private"] = "private"  # released code: a set for each task
    lambda_sparsity: float = Field(0.1, ge=0, le=1e6)  # lambda_1 on A; [0.1, 0.4] in appendix A
    lambda_mask: float = Field(0.0, ge=0, le=1e6)  # lambda_1 on m
    sparsify: Literal["proximal", "gradient"] = "proximal"  # l1 as a step of rate * lambda_1 towards 0, or as gradient
    prune_below: float = Field(0.0, ge=0)  # smaller values of A are 0 when evaluated, sent and stored
    adaptive_keep: float = Field(0.1, gt=0, le=1)  # share of A's values that is kept at the end of a task
    # which values these are: the largest, or those whose loss would cost most, a^2 * E[g^2] (optimal brain damage)
    adaptive_rank: Literal["saliency", "size"] = "saliency"
    lambda_drift: float = Field(100.0, ge=0, le=1e9)  # lambda_2, appendix A
    weight_decay: float = Field(0.0, ge=0, le=1e6)  # on A and the mask, and on B in a client's first task
    mask: Literal["sigmoid", "linear"] = "sigmoid"  # m = sigmoid(v), or m itself is learned and may reach 0
    mask_start: float = 0.0  # initial value of what is learned: v for sigmoid, m for linear
    mask_spread: float = Field(0.0, ge=0)  # deviation of a random start
    mask_trained: bool = True  # by the task loss, as the paper says
    mask_rate: float = Field(1.0, ge=0, le=1e4)  # factor of the learning rate for the mask
    adaptive_rate: float = Field(2.0, ge=0, le=1e4)  # and for A; docs/experiments.md
    past: Literal["frozen", "closed", "joint"] = "frozen"  # A of past tasks: fixed, solved once a round, or trained on
    adaptive_start: float = 1 / 3  # A starts at this share of the initial weights
    # what A is sparse around: 0, or its start, which every client draws from the seed, so it is not sent
    adaptive_origin: Literal["start", "zero"] = "start"
    ablate: Annotated[tuple[Part, ...], BeforeValidator(comma_separated)] = ()  # the paper's ablations


@dataclass
class APDTask(TaskState):
    mask: torch.Tensor = field(default_factory=empty)
    adaptive: Payload = field(default_factory=empty)  # sparse
    attention: torch.Tensor = field(default_factory=empty)  # FedWeIT: alpha, for the A's of `foreign`
    foreign: list[str] = field(default_factory=list)

    def density(self) -> float:
        return tensors.nonzeros(self.adaptive) / tensors.size(self.adaptive)


@dataclass
class APDClient(ClientState):
    tasks: Table[int, APDTask] = field(default_factory=Table)
    mask: torch.Tensor = field(default_factory=empty)  # what is learned, of the current task
    adaptive: torch.Tensor = field(default_factory=empty)
    attention: torch.Tensor = field(default_factory=empty)  # FedWeIT: alpha, (layers * foreign,)
    reference: torch.Tensor = field(default_factory=empty)  # B(t-1)
    past_masks: dict[int, torch.Tensor] = field(default_factory=dict)  # m_i of the tasks that were trained
    past_adaptive: dict[int, Payload] = field(default_factory=dict)  # A_i(t-1), where past A changes

    def size(self) -> Size:
        """B, and of every task m, A, alpha, biases and head; and each foreign A that any of them uses, once."""
        kept, values = self.weights.nbytes + 4 * self.shared_biases, int(self.weights.count_nonzero())
        for task in self.tasks.values():
            kept += sum(map(tensors.nbytes, (task.private, task.mask, task.adaptive, task.attention)))
            values += tensors.nonzeros(task.adaptive)
        kept += sum(map(tensors.nbytes, self.knowledge.values()))
        return Size(kept, 4 * values)


C = TypeVar("C", bound=APDClient)


class APD(Method, Generic[C]):
    Options: ClassVar[type[MethodOptions]] = APDOptions
    Client = APDClient
    Task = APDTask
    info = MethodInfo(
        citation="Yoon et al., Scalable and order-robust continual learning with APD, ICLR 2020",
        verified="tests/test_fedweit.py: test_the_gradients_of_a_step_are_those_of_eq_2",
    )
    traits = Traits(composes_theta=True)
    options: APDOptions

    def begin_task(self, client: C, ctx: TaskContext) -> None:
        layout, options = ctx.layout, self.options
        rng = generator(ctx.plan.seed, "mask", ctx.client, ctx.task)
        mask = options.mask_start + options.mask_spread * torch.from_numpy(rng.standard_normal(layout.rows))
        client.mask = mask.float().clone()
        start = self._start(ctx)
        client.adaptive = start.clone() if options.adaptive_origin == "zero" else torch.zeros_like(start)
        if ctx.task > 0:
            client.reference = client.weights.clone()  # B(t-1)
        if options.past != "frozen":
            client.past_adaptive = {task: client.tasks[task].adaptive for task in range(ctx.task)}

    def prepare(self, training: LocalTraining, client: C, ctx: TaskContext) -> None:
        """Train B, m, A and alpha in place of theta (Eq. 1 and 2)."""
        network, layout, options = ctx.network, ctx.layout, self.options
        foreign, origin = self.foreign(client, ctx.task, ctx), self._origin(ctx)
        v = {"weights": client.weights.to(ctx.device)}  # the client's memory: trained in place
        if "m" not in options.ablate:
            v["mask"] = client.mask.to(ctx.device)
        if "a" not in options.ablate:
            v["adaptive"] = client.adaptive.to(ctx.device)
        if foreign:
            v["attention"] = client.attention.to(ctx.device)
        v["private"] = network.vector[layout.weights :]
        g = {"private": network.gradient[layout.weights :]}
        if "adaptive" in v:
            g["adaptive"] = network.gradient[: layout.weights]  # d theta / d A = 1
        g |= {name: torch.empty_like(v[name]) for name in v.keys() - g.keys()}  # `backward` writes all of it
        training.variables, training.gradients = v, g
        training.rates |= {"mask": options.mask_rate, "adaptive": options.adaptive_rate}

        def compose_theta(evaluated: bool) -> None:
            adaptive = v.get("adaptive")
            if evaluated and adaptive is not None:
                adaptive = self._pruned(adaptive)
            out, mask = network.vector[: layout.weights], self._mask(v.get("mask"))
            formulas.compose(layout, v["weights"], mask, adaptive, v.get("attention"), foreign, out, origin)

        def backward() -> None:
            by_theta, mask = network.gradient[: layout.weights], self._mask(v.get("mask"))
            by = g["weights"], g.get("mask"), g.get("attention")
            formulas.pull_back(layout, by_theta, v["weights"], mask, foreign, *by)
            if mask is not None and not options.mask_trained:
                g["mask"].zero_()
            elif mask is not None:
                g["mask"].mul_(self._mask_slope(mask))

        def store() -> None:
            for name in v.keys() - {"private"}:
                if not name.startswith("adaptive/"):  # of a past task
                    setattr(client, name, v[name].detach().cpu())
            client.private = v["private"].detach().clone().cpu()  # it is in the network, which serves others next

        training.compose, training.backward, training.on_end = compose_theta, backward, [store]
        training.penalties.append(functools.partial(self._add_regularizers, v, g, ctx))
        training.after_step.append(functools.partial(self._sparsify, training))
        if options.lambda_drift and "l2" not in options.ablate and client.past_masks:
            self._add_drift(training, client, ctx)

    def foreign(self, client: C, task: int, ctx: TaskContext) -> list[Foreign]:
        """The A's of other clients that a task of this client uses. Here there are none."""
        return []

    def _add_regularizers(self, v: dict[str, torch.Tensor], g: dict[str, torch.Tensor], ctx: TaskContext) -> None:
        """The gradients of Eq. 2's first regularizers; l1 on A is left to `_sparsify` where it is proximal."""
        options = self.options
        if options.sparsify == "gradient" and "l1" not in options.ablate:
            for name in v:
                if name.startswith("adaptive"):
                    g[name].add_(v[name].sign(), alpha=options.lambda_sparsity)
        mask = self._mask(v.get("mask"))
        if options.lambda_mask and "l1" not in options.ablate and mask is not None:
            g["mask"].add_(mask.sign() * self._mask_slope(mask), alpha=options.lambda_mask)
        if options.weight_decay:
            for name in ("adaptive", "mask", *(("weights",) if ctx.task == 0 else ())):
                if name in v:
                    g[name].add_(v[name], alpha=2 * options.weight_decay)

    def _sparsify(self, training: LocalTraining, rate: float) -> None:
        if self.options.sparsify == "proximal" and "l1" not in self.options.ablate:
            for name, value in training.variables.items():
                if name.startswith("adaptive"):
                    formulas.soft_threshold(value, rate * training.rates.get(name, 1.0) * self.options.lambda_sparsity)
        for name, value in training.gradients.items():
            if name.startswith("adaptive/"):
                value.zero_()

    def _add_drift(self, training: LocalTraining, client: C, ctx: TaskContext) -> None:
        """Eq. 2's last term. While past A is fixed, its cost does not depend on the number of tasks: two sums do."""
        layout, weight, v, g = ctx.layout, self.options.lambda_drift, training.variables, training.gradients
        reference, past = client.reference.to(ctx.device), list(client.past_masks)
        masks = [mask.to(ctx.device) for mask in client.past_masks.values()]
        mask_squares = torch.stack(masks).square().sum(dim=0)
        frozen = self.options.past == "frozen" or "a" in self.options.ablate
        before = [] if frozen else [tensors.dense(client.past_adaptive[task]).to(ctx.device) for task in past]
        now = [] if frozen else [tensors.dense(client.tasks[task].adaptive).to(ctx.device) for task in past]
        masked_changes: torch.Tensor | None = None  # sum over past tasks of m_i * dA_i
        if before and self.options.past == "closed":
            masked_changes = torch.zeros_like(reference)
            for mask, new, old in zip(masks, now, before, strict=True):
                formulas.add_masked(layout, new - old, mask, masked_changes)
        joint = bool(before) and self.options.past == "joint"
        if joint:
            for task, value in zip(past, now, strict=True):
                v[f"adaptive/{task}"], g[f"adaptive/{task}"] = value.clone(), torch.zeros_like(value)

        def add_drift() -> None:
            change, masked = v["weights"] - reference, masked_changes  # dB
            if joint:
                masked = torch.zeros_like(reference)
                for task, mask, old in zip(past, masks, before, strict=True):
                    moved = v[f"adaptive/{task}"] - old  # dA_i
                    formulas.drift_gradient_adaptive(layout, change, mask, moved, weight, g[f"adaptive/{task}"], masked)
            formulas.drift_gradient(layout, change, mask_squares, masked, weight, g["weights"])

        def store_past() -> None:
            change, threshold = v["weights"] - reference, 0.0
            if "l1" not in self.options.ablate:
                threshold = self.options.lambda_sparsity / (2 * weight)
            for task, mask, old in zip(past, masks, before, strict=True):
                new = v[f"adaptive/{task}"] if joint else formulas.retroactive(layout, old, change, mask, threshold)
                client.tasks[task] = replace(client.tasks[task], adaptive=Sparse.of(self._pruned(new).cpu()))

        training.penalties.append(add_drift)
        if before:
            training.on_end.append(store_past)

    def end_task(self, client: C, ctx: TaskContext) -> None:
        layout, trained = ctx.layout, client.rate.epochs > 0
        mask = self._mask(client.mask)
        mask = torch.ones(layout.rows) if mask is None else mask
        adaptive = self._pruned(client.adaptive) if trained else torch.zeros(layout.weights)
        adaptive = self._cut(client, adaptive)
        client.tasks[ctx.task] = replace(client.tasks[ctx.task], mask=mask, adaptive=Sparse.of(adaptive))
        if trained:  # a task that no round reached answers with what it started from: nothing to protect
            client.past_masks = {**client.past_masks, ctx.task: mask}
        begin, end = layout.statistics
        if trained and begin < end:
            self._recount_statistics(client, ctx)
        client.adaptive, client.reference, client.past_adaptive = empty(), empty(), {}  # only a current task needs them

    def _recount_statistics(self, client: C, ctx: TaskContext) -> None:
        """Batch norm's statistics belong to theta with all of A; cut to its largest values it needs others.

        Without this a ResNet-18 fell from .97 to chance at the end of a task.
        """
        network, task, train = ctx.network, ctx.task, ctx.load("train")
        self.load_task(client, task, ctx)
        batches = -(-len(train) // ctx.plan.batch_size)
        for _ in range(-(-RECOUNTED // batches)):
            network.recount(train.in_order(ctx.plan.batch_size))
        private = network.vector[ctx.layout.weights :].cpu().clone()
        client.tasks[task] = replace(client.tasks[task], private=private[client.shared_biases :])

    def load_task(self, client: C, task: int, ctx: TaskContext) -> None:
        layout, device, origin = ctx.layout, ctx.device, self._origin(ctx)
        adaptive: Payload = self._pruned(client.adaptive)
        mask, attention, foreign = self._mask(client.mask), client.attention, self.foreign(client, task, ctx)
        if task in client.tasks:
            finished = client.tasks[task]
            mask, adaptive, attention = finished.mask, finished.adaptive, finished.attention
        base, attention = client.weights.to(device), attention.to(device)
        mask = None if mask is None else mask.to(device)
        out, ctx.network.vector[layout.weights :] = ctx.network.vector[: layout.weights], client.private_of(task)
        if isinstance(adaptive, Sparse) and origin is not None:  # a tenth of A is left: no need of the whole
            formulas.compose(layout, base, mask, origin, attention, foreign, out)
            out.index_add_(0, adaptive.indices.to(device), adaptive.values.to(device))
        else:
            dense = tensors.dense(adaptive).to(device)
            formulas.compose(layout, base, mask, dense, attention, foreign, out, origin)

    # ---- small parts -------------------------------------------------------------------------------------------------

    def _start(self, ctx: TaskContext) -> torch.Tensor:
        share = 0.0 if "a" in self.options.ablate else self.options.adaptive_start
        return start_of_adaptive(ctx.network, ctx.plan.seed, share)

    def _origin(self, ctx: TaskContext) -> torch.Tensor | None:
        """What A is counted from, where that is not 0."""
        return None if self.options.adaptive_origin == "zero" else self._start(ctx).to(ctx.device)

    def _cut(self, client: C, adaptive: torch.Tensor) -> torch.Tensor:
        """A with the share of its values that is kept when a task ends."""
        squares = client.optimizer.second.get("adaptive")  # Adam's mean of g^2; none if it forgets every round
        if squares is None or self.options.adaptive_rank == "size":
            return formulas.largest(adaptive, self.options.adaptive_keep)
        return formulas.largest(adaptive, self.options.adaptive_keep, adaptive.square() * squares)

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


@functools.lru_cache(maxsize=2)
def start_of_adaptive(network: Network, seed: int, share: float) -> torch.Tensor:
    """Where A starts, the same for every task and client; computed once, so copy it before changing it."""
    return initial_body(network, seed)[: network.layout.weights] * share
