"""FedWeIT: federated weighted inter-client transfer (Yoon et al., ICML 2021).

    Eq. 1    theta = B * m + A + sum over foreign (i, j) of alpha[i, j] * A[i, j]
    Eq. 2    loss(theta) + lambda_1 * (|m|_1 + |A|_1) + lambda_2 * sum over past tasks i of |dB * m_i + dA_i|^2

B (`base`) is the client's shared weights, m (`mask`) one number for each output unit, A (`adaptive`) the task's own
sparse weights, alpha (`attention`) one number for each layer and foreign A. A round sends the rows of B with the
strongest mask (Alg. 1 line 8) and gets theta_G, their mean, back (lines 9 and 6); a task's A goes to the server's
knowledge base once (line 11), from which other clients are given a sample when they start a task (line 3).

Where paper and released code part, both ways are options; FIDELITY.md lists them and says what chose the defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from weft.errors import Problem
from weft.lazy import lazy
from weft.methods import base
from weft.methods.base import Briefing, Lesson, Method, Size, Work, dense_tensors, mean, reply_weights
from weft.methods.formulas import (
    Foreign,
    compose,
    drift_gradient,
    drift_gradient_adaptive,
    largest,
    pull_back,
    retroactive,
    soft_threshold,
    strongest_rows,
)
from weft.randomness import generator

if TYPE_CHECKING:
    import torch

    from weft import tensors
    from weft.message import Message
    from weft.networks.flat import Layout
    from weft.plan import Plan
    from weft.state import State
    from weft.tensors import Payload
else:
    torch = lazy("torch")
    tensors = lazy("weft.tensors")

Part = Literal["b_comm", "a_comm", "a", "m", "l1", "l2"]


def _words(value: Any) -> Any:
    """`without=a,m` on the command line is the list of two words."""
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",") if word.strip()]
    return tuple(value) if isinstance(value, list) else value


class Options(base.Options):
    biases: Literal["shared", "private"] = "private"  # released code: a set for each task
    keep: float = Field(0.3, gt=0, le=1)  # the share of each layer's rows that is sent; 30 % in the paper
    lambda_sparsity: float = Field(0.2, ge=0, le=1e6)  # lambda_1 on A; [0.1, 0.4] in appendix A
    lambda_mask: float = Field(0.0, ge=0, le=1e6)  # lambda_1 on m
    sparsify: Literal["proximal", "gradient"] = "proximal"  # l1 as a step of rate * lambda_1 towards 0, or as gradient
    prune_below: float = Field(0.0, ge=0)  # smaller values of A are 0 when tested, sent and stored
    adaptive_keep: float = Field(0.1, gt=0, le=1)  # of A at a task's end only this share stays, the largest values
    lambda_drift: float = Field(100.0, ge=0, le=1e9)  # lambda_2, appendix A
    weight_decay: float = Field(0.0, ge=0, le=1e6)  # on A and the mask, and on B in a client's first task
    mask: Literal["sigmoid", "linear"] = "sigmoid"  # m = sigmoid(v), or m itself is learned and may reach 0
    mask_start: float = 0.0  # the learned number's start: v for sigmoid, m for linear
    mask_spread: float = Field(0.0, ge=0)  # deviation of a random start
    mask_trained: bool = True  # by the task loss, as the paper says
    send: Literal["base", "product"] = "base"  # the kept rows of B, or of B * m
    divide: Literal["senders", "clients"] = "senders"  # a row's sum by how many sent it, or by all that took part
    average: Literal["equal", "examples"] = "equal"  # Alg. 1 line 9
    kb_size: Annotated[int, Field(ge=0)] | Literal["all"] = 5  # foreign A's that a client is given for a task
    kb_from: Literal["all", "last"] = "all"  # out of all past tasks (3.3), or the last one's alone (3.4)
    kb_own: bool = False  # may a client's own past A be among them?
    kb_givers: Literal["all", "chosen"] = "all"  # every client gives its A (line 11), or those of the last round
    attention_start: Literal["even", "random"] = "even"  # 1/n, appendix A
    past: Literal["frozen", "closed", "joint"] = "frozen"  # A of past tasks: put, solved once a round, or learned on
    drift_from: Literal["own", "received"] = "own"  # B(t-1): before theta_G first overwrites it, or after
    adaptive_start: float = 1 / 3  # A starts at this share of the initial weights
    without: Annotated[tuple[Part, ...], BeforeValidator(_words)] = ()  # the paper's ablations


@dataclass
class FedWeITWork(Work):
    """Besides the variables: what stays put during a round."""

    layout: Layout = None  # type: ignore[assignment]
    foreign: list[Foreign] = field(default_factory=list)
    reference: torch.Tensor | None = None  # B(t-1)
    past_masks: list[torch.Tensor] = field(default_factory=list)
    past_start: list[torch.Tensor] = field(default_factory=list)  # past A at the end of task t-1, for `joint`
    mask_squares: torch.Tensor | None = None  # sum over past tasks of m_i^2, (rows,)
    masked_changes: torch.Tensor | None = None  # sum over past tasks of m_i * dA_i, for `closed`
    first_task: bool = False


class FedWeIT(Method):
    options_class: ClassVar[type[base.Options]] = Options
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # the paper read to the letter: its lambda_1 as a gradient, m itself, B * m, divided by all clients, A from 0
        "paper": {
            "method.lambda_sparsity": 0.1,
            "method.lambda_mask": 0.1,
            "method.sparsify": "gradient",
            "method.prune_below": 1e-4,
            "method.adaptive_keep": 1.0,
            "method.mask": "linear",
            "method.mask_start": 1.0,
            "method.send": "product",
            "method.divide": "clients",
            "method.past": "joint",
            "method.adaptive_start": 0.0,
        },
        # the authors' code, as it runs
        "released": {
            "method.keep": 0.7,
            "method.lambda_sparsity": 1e-3,
            "method.sparsify": "gradient",
            "method.prune_below": 1e-3,
            "method.adaptive_keep": 1.0,
            "method.lambda_drift": 50.0,  # half of the squared norm
            "method.weight_decay": 1e-4,
            "method.mask_spread": 0.05,
            "method.mask_trained": False,
            "method.kb_size": "all",
            "method.kb_from": "last",
            "method.kb_own": True,
            "method.kb_givers": "chosen",
            "method.attention_start": "random",
            "patience": 3,
            "rate_floor": 1e-10,
            "stop_at_floor": False,
            "optimizer_memory": "round",
            "shuffle": False,
            "train_unchosen": True,
        },
    }
    citation: ClassVar[str] = "Yoon et al., Federated continual learning with weighted inter-client transfer, ICML 2021"
    sends: ClassVar[tuple[str, str]] = (
        "the strongest rows of B; sparse A once a task",
        "the mean of the rows sent; a sample of A's once a task",
    )
    talks: ClassVar[bool] = True
    options: Options

    # ---- server half -------------------------------------------------------------------------------------------------

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout) -> None:
        everything = torch.ones(layout.rows, dtype=torch.bool)
        server.tensors["global"] = tensors.Rows.of(initial[: layout.weights], layout.segments, everything)
        if self.options.biases == "shared":
            server.tensors["biases"] = initial[layout.weights :].clone()
        server.numbers["held"] = {}  # which foreign A's a client has been sent: none is sent twice

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        """Alg. 1 line 6: theta_G, and kb^(t) with it if the client meets it first."""
        sent: dict[str, Payload] = {} if "b_comm" in self.options.without else dict(server.tensors)
        if not first:
            return sent, {}
        if not self._shares_adaptive:
            return sent, {"foreign": []}
        chosen = self._sample(sorted(server.archive), client, step, plan.seed)
        held = set(server.numbers["held"].setdefault(str(client), []))
        server.numbers["held"][str(client)] = sorted(held | set(chosen))
        return sent | {f"foreign/{key}": server.archive[key] for key in chosen if key not in held}, {"foreign": chosen}

    def _sample(self, stored: list[str], client: int, step: int, seed: int) -> list[str]:
        """Alg. 1 line 3: kb^(t) ~ kb, the receiver's own A excluded."""
        origins = {key: tuple(map(int, key.split("."))) for key in stored}  # (client, step)
        past = [key for key in stored if origins[key][1] < step]
        if self.options.kb_from == "last":
            past = [key for key in past if origins[key][1] == step - 1]
        if not self.options.kb_own:
            past = [key for key in past if origins[key][0] != client]
        if self.options.kb_size == "all" or len(past) <= self.options.kb_size:
            return past
        rng = generator(seed, "kb", client, step)
        return sorted(past[place] for place in rng.permutation(len(past))[: self.options.kb_size])

    def aggregate(self, server: State, replies: list[Message]) -> None:
        """Alg. 1 line 9: theta_G is the mean of what was sent; where nobody sent anything there is nothing."""
        replies = [reply for reply in replies if "base" in reply.tensors]
        if not replies:
            return
        weights = reply_weights(replies, self.options.average)
        parts = [_rows(reply) for reply in replies]
        segments = parts[0].segments
        total = torch.zeros(parts[0].size)
        share = torch.zeros(len(parts[0].kept))  # for each row the weight of those that sent it
        for part, weight in zip(parts, weights, strict=True):
            total.add_(part.dense(), alpha=weight)
            share.add_(part.kept, alpha=weight)
        kept = share > 0
        divisor = share.where(kept, 1.0) if self.options.divide == "senders" else torch.full_like(share, sum(weights))
        widths = torch.tensor([width for rows, width in segments for _ in range(rows)])
        total.div_(divisor.repeat_interleave(widths))
        server.tensors["global"] = tensors.Rows.of(total, segments, kept)
        if self.options.biases == "shared":
            server.tensors["biases"] = mean(dense_tensors(replies, "biases"), weights)

    def wants_gift(self, chosen_last: bool) -> bool:
        return self._shares_adaptive and (chosen_last or self.options.kb_givers == "all")

    def collect(self, server: State, client: int, step: int, reply: Message) -> None:
        """Alg. 1 line 11: kb <- kb + {A^(t)_j}."""
        if (adaptive := reply.tensors.get("adaptive")) is not None:
            server.archive[f"{client}.{step}"] = adaptive

    # ---- client half -------------------------------------------------------------------------------------------------

    def begin(self, client: State, lesson: Lesson) -> None:
        super().begin(client, lesson)
        layout, options = lesson.layout, self.options
        rng = generator(lesson.plan.seed, "mask", lesson.client, lesson.step)
        start = options.mask_start + options.mask_spread * torch.from_numpy(rng.standard_normal(layout.rows))
        client.tensors["mask"] = start.float().clone()
        share = 0.0 if "a" in options.without else options.adaptive_start
        client.tensors["adaptive"] = lesson.initial()[: layout.weights] * share
        client.tensors.pop("attention", None)
        client.numbers["foreign"] = []
        if lesson.step > 0:
            client.tensors["reference"] = client.tensor("base").clone()  # B(t-1)
        if options.past != "frozen":
            for step in range(lesson.step):  # A_i at the end of task t-1, from which dA_i is counted
                client.archive[f"adaptive_before/{step}"] = client.archive[f"adaptive/{step}"]

    def store(self, client: State, message: Message) -> None:
        for name, payload in message.tensors.items():
            if name.startswith("foreign/"):
                client.archive[name] = payload  # each foreign A once, however many tasks use it

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        self.store(client, message)
        if (received := message.tensors.get("global")) is not None:
            assert isinstance(received, tensors.Rows)
            value = received.dense()  # B(n) = theta_G(n) where theta_G is not 0, section 3.4
            client.tensors["base"] = torch.where(value != 0, value, client.tensor("base"))
            self.receive_biases(client, message)
            if self.options.drift_from == "received" and "foreign" in message.numbers and lesson.step > 0:
                client.tensors["reference"] = client.tensor("base").clone()
        if (chosen := message.numbers.get("foreign")) is not None:
            client.numbers["foreign"] = chosen
            client.tensors["attention"] = self._first_attention(len(chosen), lesson)

    def _first_attention(self, count: int, lesson: Lesson) -> torch.Tensor:
        layers = len(lesson.layout.layers)
        if self.options.attention_start == "even":
            return torch.full((layers * count,), 1.0 / max(count, 1))
        rng = generator(lesson.plan.seed, "attention", lesson.client, lesson.step)
        return torch.from_numpy(rng.standard_normal(layers * count) / math.sqrt(max(count, 1))).float().clone()

    def open(self, client: State, lesson: Lesson) -> FedWeITWork:
        network, layout, without = lesson.network, lesson.layout, self.options.without
        device, weights = network.vector.device, lesson.layout.weights
        network.vector[weights:] = client.tensor("private")
        work = FedWeITWork(network, {}, {}, layout=layout, first_task=lesson.step == 0)
        trained = ["base", *(["mask"] if "m" not in without else []), *(["adaptive"] if "a" not in without else [])]
        for name in trained:
            work.variables[name] = client.tensor(name).to(device, copy=True)
        work.foreign = self._foreign(client, client.numbers["foreign"], lesson)
        if work.foreign:
            work.variables["attention"] = client.tensor("attention").to(device, copy=True)
        work.variables["private"] = network.vector[weights:]
        work.gradients["private"] = network.gradient[weights:]
        if "adaptive" in work.variables:
            work.gradients["adaptive"] = network.gradient[:weights]  # d theta / d A = 1
        for name in work.variables.keys() - work.gradients.keys():
            work.gradients[name] = torch.zeros_like(work.variables[name])
        if lesson.step > 0 and self._lambda_drift:
            self._open_drift(client, lesson, work)
        return work

    def _open_drift(self, client: State, lesson: Lesson, work: FedWeITWork) -> None:
        """The sums over past tasks that the drift term needs: while past A stays put they cost the same at any task."""
        device = work.network.vector.device
        work.reference = client.tensor("reference").to(device)
        work.past_masks = [self._archived(client, f"mask/{step}").to(device) for step in range(lesson.step)]
        work.mask_squares = torch.stack(work.past_masks).square().sum(dim=0)
        if self.options.past == "frozen" or "a" in self.options.without:
            return
        past = [self._archived(client, f"adaptive/{step}").to(device) for step in range(lesson.step)]
        before = [self._archived(client, f"adaptive_before/{step}").to(device) for step in range(lesson.step)]
        if self.options.past == "closed":
            work.masked_changes = torch.zeros_like(work.reference)
            for mask, new, old in zip(work.past_masks, past, before, strict=True):
                for layer, rows in work.layout.by_layer(work.masked_changes):
                    rows += mask[layer.row_span, None] * (new - old)[layer.span].view_as(rows)
            return
        work.past_start = before
        for step, value in enumerate(past):
            work.variables[f"adaptive/{step}"] = value.clone()
            work.gradients[f"adaptive/{step}"] = torch.zeros_like(value)

    def compose(self, work: Work, tested: bool = False) -> None:
        assert isinstance(work, FedWeITWork)
        v = work.variables
        adaptive = v.get("adaptive")
        if tested and adaptive is not None:
            adaptive = self._pruned(adaptive)
        out = work.network.vector[: work.layout.weights]
        compose(work.layout, v["base"], self._mask(v.get("mask")), adaptive, v.get("attention"), work.foreign, out)

    def pull_back(self, work: Work) -> None:
        assert isinstance(work, FedWeITWork)
        v, g = work.variables, work.gradients
        by_theta = work.network.gradient[: work.layout.weights]
        mask = self._mask(v.get("mask"))
        pull_back(work.layout, by_theta, v["base"], mask, work.foreign, g["base"], g.get("mask"), g.get("attention"))
        if mask is not None and not self.options.mask_trained:
            g["mask"].zero_()
        elif mask is not None and self.options.mask == "sigmoid":
            g["mask"].mul_(mask).mul_(1 - mask)

    def penalise(self, work: Work) -> None:
        """The gradients of Eq. 2's regularisers; l1 on A is left to `constrain` where it is proximal."""
        assert isinstance(work, FedWeITWork)
        v, g, options = work.variables, work.gradients, self.options
        if options.sparsify == "gradient" and "l1" not in options.without:
            for name in v:
                if name.startswith("adaptive"):
                    g[name].add_(v[name].sign(), alpha=options.lambda_sparsity)
        if options.lambda_mask and "l1" not in options.without and "mask" in v:
            m = v["mask"]  # what is learned; the slope of |m| by it:
            slope = m.sign() if options.mask == "linear" else m.sigmoid() * (1 - m.sigmoid())
            g["mask"].add_(slope, alpha=options.lambda_mask)
        if options.weight_decay:
            for name in ("adaptive", "mask", *(("base",) if work.first_task else ())):
                if name in v:
                    g[name].add_(v[name], alpha=2 * options.weight_decay)
        if work.reference is not None and work.mask_squares is not None:
            self._penalise_drift(work, work.reference, work.mask_squares)

    def _penalise_drift(self, work: FedWeITWork, reference: torch.Tensor, mask_squares: torch.Tensor) -> None:
        v, g, weight = work.variables, work.gradients, self._lambda_drift
        change = v["base"] - reference  # dB
        masked = work.masked_changes
        if work.past_start:
            masked = torch.zeros_like(reference)
            for step, (mask, before) in enumerate(zip(work.past_masks, work.past_start, strict=True)):
                name = f"adaptive/{step}"
                moved = v[name] - before  # dA_i
                drift_gradient_adaptive(work.layout, change, mask, moved, weight, g[name], masked)
        drift_gradient(work.layout, change, mask_squares, masked, weight, g["base"])

    def constrain(self, work: Work, rate: float) -> None:
        if self.options.sparsify == "proximal" and "l1" not in self.options.without:
            for name, value in work.variables.items():
                if name.startswith("adaptive"):
                    soft_threshold(value, rate * self.options.lambda_sparsity)
        for name, value in work.gradients.items():
            if name.startswith("adaptive/"):
                value.zero_()

    def close(self, client: State, work: Work) -> None:
        assert isinstance(work, FedWeITWork)
        for name, value in work.variables.items():
            if name.startswith("adaptive/"):
                client.archive[name] = tensors.Sparse.of(self._pruned(value).cpu())
            else:
                client.tensors[name] = value.detach().cpu().clone()
        if self.options.past == "closed" and work.reference is not None and "a" not in self.options.without:
            change = work.variables["base"] - work.reference
            threshold = 0.0 if "l1" in self.options.without else self.options.lambda_sparsity / (2 * self._lambda_drift)
            for step, mask in enumerate(work.past_masks):
                before = self._archived(client, f"adaptive_before/{step}").to(change.device)
                best = retroactive(work.layout, before, change, mask, threshold)
                client.archive[f"adaptive/{step}"] = tensors.Sparse.of(self._pruned(best).cpu())

    def contribute(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        """Alg. 1 line 8: the strongest rows of B, or of B * m."""
        if "b_comm" in self.options.without:
            return {}
        layout, mask = lesson.layout, self._mask(client.tensor("mask"))
        value = client.tensor("base")
        kept = torch.ones(layout.rows, dtype=torch.bool)
        if "m" not in self.options.without and mask is not None:
            kept = strongest_rows(layout, mask, self.options.keep)
            if self.options.send == "product":
                out = torch.empty_like(value)
                compose(layout, value, mask, None, None, [], out)
                value = out
        return {"base": tensors.Rows.of(value, layout.segments, kept), **self.shared_biases(client, lesson)}

    def finish(self, client: State, lesson: Lesson) -> None:
        super().finish(client, lesson)
        step = lesson.step
        mask = self._mask(client.tensor("mask"))
        client.archive[f"mask/{step}"] = torch.ones(lesson.layout.rows) if mask is None else mask
        learned = client.numbers["schedule"]["epochs"] > 0
        adaptive = self._pruned(client.tensor("adaptive")) if learned else torch.zeros(lesson.layout.weights)
        client.archive[f"adaptive/{step}"] = tensors.Sparse.of(largest(adaptive, self.options.adaptive_keep))
        if client.numbers["foreign"]:
            client.archive[f"attention/{step}"] = client.tensor("attention")
        client.numbers[f"foreign/{step}"] = client.numbers["foreign"]

    def give(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        return {"adaptive": client.archive[f"adaptive/{lesson.step}"]}

    def answer_for(self, client: State, step: int, lesson: Lesson) -> None:
        network, weights, device = lesson.network, lesson.layout.weights, lesson.network.vector.device
        network.vector[weights:] = self.private_part(client, step, lesson)
        if finished := f"adaptive/{step}" in client.archive:
            mask: torch.Tensor | None = self._archived(client, f"mask/{step}")
            adaptive = self._archived(client, f"adaptive/{step}")
        else:
            mask, adaptive = self._mask(client.tensor("mask")), self._pruned(client.tensor("adaptive"))
        keys = client.numbers[f"foreign/{step}" if finished else "foreign"]
        attention = None
        if keys:
            attention = self._archived(client, f"attention/{step}") if finished else client.tensor("attention")
            attention = attention.to(device)
        mask = None if mask is None else mask.to(device)
        foreign = self._foreign(client, keys, lesson)
        own_base, out = client.tensor("base").to(device), network.vector[:weights]
        compose(lesson.layout, own_base, mask, adaptive.to(device), attention, foreign, out)

    def size(self, client: State) -> Size:
        """B, and of every task m, A, alpha, biases and head; and each foreign A that any of them uses, once."""
        needed = [value for key, value in client.archive.items() if not key.startswith("adaptive_before/")]
        own = [value for key, value in client.archive.items() if key.startswith("adaptive/")]
        b = client.tensor("base")
        values = int(b.count_nonzero()) + sum(tensors.nonzeros(value) for value in own)
        return Size(b.nbytes + sum(map(tensors.nbytes, needed)), 4 * values)

    # ---- small parts -------------------------------------------------------------------------------------------------

    @property
    def _shares_adaptive(self) -> bool:
        return not {"a", "a_comm"} & set(self.options.without)

    @property
    def _lambda_drift(self) -> float:
        return 0.0 if "l2" in self.options.without else self.options.lambda_drift

    def _mask(self, learned: torch.Tensor | None) -> torch.Tensor | None:
        """m from what is learned; None stands for m = 1."""
        if learned is None or "m" in self.options.without:
            return None
        return learned.sigmoid() if self.options.mask == "sigmoid" else learned

    def _pruned(self, adaptive: torch.Tensor) -> torch.Tensor:
        if not self.options.prune_below:
            return adaptive
        return torch.where(adaptive.abs() >= self.options.prune_below, adaptive, 0.0)

    @staticmethod
    def _archived(client: State, key: str) -> torch.Tensor:
        return tensors.dense(client.archive[key])

    @staticmethod
    def _foreign(client: State, keys: list[str], lesson: Lesson) -> list[Foreign]:
        device, found = lesson.network.vector.device, []
        for key in keys:
            adaptive = client.archive[f"foreign/{key}"]
            assert isinstance(adaptive, tensors.Sparse)
            found.append(Foreign.of(adaptive, lesson.layout, device))
        return found


def _rows(reply: Message) -> tensors.Rows:
    part = reply.tensors["base"]
    if not isinstance(part, tensors.Rows):
        raise Problem(f"{reply.sender} did not answer with rows of its base, as FedWeIT expects")
    return part
