"""FedWeIT: federated weighted inter-client transfer (Yoon et al., ICML 2021).

    Eq. 1    theta = B * m + A + sum over foreign (i, j) of alpha[i, j] * A[i, j]
    Eq. 2    loss(theta) + lambda_1 * (|m|_1 + |A|_1) + lambda_2 * sum over past tasks i of |dB * m_i + dA_i|^2

B (`weights`), m (`mask`), A (`adaptive`) and their training are in apd.py, the same method without a server; alpha
(`attention`) has one number for each layer and foreign A. A round uploads a share of the rows of B (Alg. 1 line 8) and
downloads theta_G, their mean (lines 9 and 6). A task's A goes to the server's knowledge base once (line 11); other
clients receive a sample of it when they start a task (line 3).

Where paper and released code differ, both ways are options; FIDELITY.md lists them and says what chose the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from weft.lazy import torch
from weft.methods.averaging import Average, Tensors, Update, Updates, average, merge
from weft.methods.context import Download, LocalTraining, RoundContext, ServerContext, TaskContext, TensorSpec
from weft.methods.fedweit import formulas
from weft.methods.fedweit.apd import APD, APDClient, APDOptions, comma_separated
from weft.methods.fedweit.formulas import Foreign
from weft.methods.method import MethodInfo, MethodOptions, Traits
from weft.methods.state import SharedServer, Table, empty, shared_of
from weft.randomness import generator
from weft.wire import tensors
from weft.wire.message import MessageError
from weft.wire.tensors import Payload, Rows, Sparse

if TYPE_CHECKING:
    from weft.networks.flat import Layout

MAX_TURN = 2**53
Part = Literal["b_comm", "a_comm", "a", "m", "l1", "l2"]


class FedWeITOptions(APDOptions):
    keep: float = Field(0.3, gt=0, le=1)  # the share of each layer's rows that is sent; 30 % in the paper
    # row selection: round-robin, the same rows for all clients in a round (docs/experiments.md), or those with the
    # strongest mask, as the sources have it
    rows: Literal["round_robin", "strongest"] = "round_robin"
    send: Literal["base", "product"] = "base"  # the kept rows of B, or of B * m
    # a row's sum by its senders, or by all clients of the round; anchored: by all, the others counted as theta_G
    divide: Literal["senders", "clients", "anchored"] = "senders"
    average: Average = "equal"  # Alg. 1 line 9
    kb_size: Annotated[int, Field(ge=0)] | Literal["all"] = 5  # foreign A's that a client receives for a task
    kb_from: Literal["all", "last"] = "all"  # out of all past tasks (3.3), or the last one's alone (3.4)
    kb_own: bool = False  # whether a client's own past A may be among them
    kb_clients: Literal["all", "chosen"] = "all"  # every client uploads its A (line 11), or those of the last round
    share: Annotated[int, Field(ge=1)] | Literal["all", "nothing"] = "all"  # of A: all, its strongest rows, or nothing
    attention_start: Literal["even", "random"] = "even"  # 1/n, appendix A
    attention_rate: float = Field(1.0, ge=0, le=1e4)  # factor of the learning rate for alpha
    drift_from: Literal["own", "received"] = "own"  # B(t-1): before theta_G first overwrites it, or after
    ablate: Annotated[tuple[Part, ...], BeforeValidator(comma_separated)] = ()  # type: ignore[assignment] # more than APD has


@dataclass
class FedWeITServer(SharedServer):
    """`weights` are the rows that the last merge changed; `whole` is theta_G with all rows."""

    whole: torch.Tensor = field(default_factory=empty)
    changed: torch.Tensor = field(default_factory=empty)  # (rows,): the version that last changed a row
    version: int = 0  # merges so far
    knowledge: Table[str, Sparse] = field(default_factory=Table)  # kb, by "client.task"
    has_version: dict[int, int] = field(default_factory=dict)  # by client: the version it is known to have received
    has_foreign: dict[int, list[str]] = field(default_factory=dict)  # and the A's: none is sent twice

    def start(self, ctx: ServerContext, options: MethodOptions) -> None:
        super().start(ctx, options)
        layout = ctx.layout
        self.whole = ctx.initial[: layout.weights].clone()
        self.weights = Rows.of(self.whole, layout.segments, torch.ones(layout.rows, dtype=torch.bool))
        self.changed = torch.zeros(layout.rows)

    def remove_client(self, client: int) -> None:
        for key in [key for key in self.knowledge if key.split(".")[0] == str(client)]:
            del self.knowledge[key]
        self.has_version.pop(client, None)
        self.has_foreign.pop(client, None)

    def rows_since(self, version: int) -> Payload:
        """The rows of theta_G that changed since this version."""
        assert isinstance(self.weights, Rows)
        if 0 < self.version == version + 1:
            return self.weights  # the very object, so that it is encoded once for all clients
        return Rows.of(self.whole, self.weights.segments, self.changed > version)

    def replace_rows(self, rows: Payload) -> None:
        """Rows of theta_G are new."""
        assert isinstance(rows, Rows)
        self.weights = rows
        self.version += 1
        rows.over(self.whole)
        self.changed[rows.kept] = self.version


@dataclass
class FedWeITClient(APDClient):
    foreign: list[str] | None = None  # the A's that `attention` is for; None: the task has not received them yet
    turn: int = 0  # round-robin: which rows are next


class FedWeIT(APD[FedWeITClient]):
    Options = FedWeITOptions
    Server = FedWeITServer
    Client = FedWeITClient
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
            "method.rows": "strongest",
            "method.send": "product",
            "method.divide": "clients",
            "method.past": "joint",
            "method.adaptive_start": 0.0,
            "method.adaptive_origin": "zero",
            "method.adaptive_rate": 1.0,
            "method.adaptive_rank": "size",
            "precision": "float32",
        },
        # the authors' code, as it runs
        "released": {
            "method.keep": 0.7,
            "method.rows": "strongest",
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
            "method.kb_clients": "chosen",
            "method.adaptive_origin": "zero",
            "method.adaptive_rate": 1.0,
            "method.adaptive_rank": "size",
            "precision": "float32",
            "method.attention_start": "random",
            "patience": 3,
            "rate_floor": 1e-10,
            "stop_at_floor": False,
            "optimizer_memory": "round",
            "shuffle": False,
            "train_unchosen": True,
        },
    }
    info = MethodInfo(
        citation="Yoon et al., Federated continual learning with weighted inter-client transfer, ICML 2021",
        kind="federated",
        uploads="some rows of B, in turn; sparse A once a task",
        downloads="the mean of the rows sent; a sample of A's once a task",
        verified="tests/test_golden.py, against examples/fedweit_in_one_file.py",
    )
    traits = Traits(
        federated=True,
        composes_theta=True,
        precision="int8",  # docs/experiments.md has what it costs
        shares_tasks="all",
        asynchronous=True,
        not_combinable="it has both a server half and a local half; use fedavg+apd or fedprox+apd",
    )
    options: FedWeITOptions

    def __init__(self, options: FedWeITOptions):
        super().__init__(options)
        if options.divide != "senders":
            why = f"method.divide={options.divide} divides by the clients of a round"
            self.traits = replace(self.traits, asynchronous=False, why_not_asynchronous=why)
        if {"a", "a_comm"} & set(options.ablate):
            self.traits = replace(self.traits, shares_tasks="no")
        elif options.kb_clients == "chosen":
            self.traits = replace(self.traits, shares_tasks="selected")

    # ---- server half -------------------------------------------------------------------------------------------------

    def configure(self, server: FedWeITServer, client: int, ctx: RoundContext) -> Download:
        """Alg. 1 line 6: theta_G, and kb^(t) with the first download of a task (line 3)."""
        download = Download()
        if "b_comm" not in self.options.ablate:
            download.tensors = server.shared(self.options)
            if self.options.rows == "round_robin":
                download.tensors["weights"] = server.rows_since(server.has_version.get(client, 0))
                turn = server.version
                if ctx.plan.asynchronous == "updates":  # as many updates as there are clients make a turn
                    turn //= ctx.plan.clients
                download.fields = {"turn": turn, "version": server.version}
        if ctx.first:
            keys: list[str] = []
            if self.traits.shares_tasks != "no":
                # a repeated request repeats its sample, or a late reply would confirm what only the second one brought
                keys = ctx.repeats["foreign"] if "foreign" in ctx.repeats else self.sample(server, client, ctx)
                keys = [key for key in keys if key in server.knowledge]  # of clients that have not left
            download.fields["foreign"] = keys
            held = server.has_foreign.get(client, [])
            download.once = {key: server.knowledge[key] for key in keys if key not in held}
        return download

    def sample(self, server: FedWeITServer, client: int, ctx: RoundContext) -> list[str]:
        """Alg. 1 line 3: kb^(t) ~ kb without the receiver's own A; of earlier tasks, unless clients have own clocks."""
        synchronous = ctx.plan.asynchronous == "none"
        origins = {key: (int(key.split(".")[0]), int(key.split(".")[1])) for key in server.knowledge}  # (client, task)
        past = [key for key, (_, task) in origins.items() if not synchronous or task < ctx.task]
        if self.options.kb_from == "last":
            newest = dict(sorted(origins[key] for key in past))  # the last task of each client
            if synchronous:
                newest = dict.fromkeys(newest, ctx.task - 1)
            past = [key for key in past if origins[key][1] == newest[origins[key][0]]]
        if not self.options.kb_own:
            past = [key for key in past if origins[key][0] != client]
        if self.options.kb_size == "all" or len(past) <= self.options.kb_size:
            return past
        rng = generator(ctx.plan.seed, "kb", client, ctx.task)
        return sorted(past[index] for index in rng.permutation(len(past))[: self.options.kb_size])

    def upload_spec(self, layout: Layout, sent: Mapping[str, Any]) -> dict[str, TensorSpec]:
        spec: dict[str, TensorSpec] = {}
        if "b_comm" not in self.options.ablate:
            # a row with one sender becomes what it sent: rows that were not requested are rejected
            rows = most = None
            if "m" in self.options.ablate:
                rows = torch.ones(layout.rows, dtype=torch.bool)
            elif self.options.rows == "round_robin":
                rows = formulas.rows_in_turn(layout, sent.get("turn", 0), self.options.keep)
            else:  # which rows is the client's choice, how many is not
                most = tuple(formulas.rows_kept(layer, self.options.keep) for layer in layout.layers)
            weights = TensorSpec("rows", layout.weights, rows=rows, most_rows=most)
            spec = shared_of(self.options, weights, TensorSpec("dense", layout.biases))
        if self.traits.shares_tasks != "no":
            spec["adaptive"] = TensorSpec("sparse", layout.weights, once=True)
        return spec

    def aggregate(self, server: FedWeITServer, updates: Updates, ctx: ServerContext) -> None:
        """Alg. 1 line 9: theta_G is the mean of what was sent; line 11: kb <- kb + {A}."""
        for update in updates:
            self._note(server, update)
        updates = updates.near("weights", server.whole)
        options, parts = self.options, updates.parts("weights")
        if not parts:
            return
        if updates.mix is not None:
            rows = parts[0]
            if options.rows == "round_robin" and isinstance(rows, Rows):  # theta_G where the update brings rows
                server.weights = Rows.of(server.whole, rows.segments, rows.kept)
            merged = updates.merge("weights", server.weights, options.average)
        elif options.divide == "anchored":
            merged = anchored(server.whole, parts, updates.weights("weights", options.average))
        else:
            divide: Literal["senders", "all"] = "senders" if options.divide == "senders" else "all"
            merged = updates.merge("weights", server.weights, options.average, divide)
            if options.rows == "round_robin":
                merged = tempered(merged, server.whole, parts)
        server.replace_rows(merged)
        server.biases = tensors.dense(updates.merge("biases", server.biases, options.average))

    def _note(self, server: FedWeITServer, update: Update) -> None:
        """What the client is known to have, and its A. An A without values is that of a task that was never trained."""
        client, sent = update.client, update.sent or {}
        if "foreign" in sent:  # of the request that is answered: by now another task's may have been sent
            server.has_foreign[client] = sorted({*server.has_foreign.get(client, []), *sent["foreign"]})
        if "version" in sent and update.received:  # a client that has stopped takes nothing
            server.has_version[client] = max(sent["version"], server.has_version.get(client, 0))  # it may be late
        adaptive = update.task_tensors.get("adaptive")
        if isinstance(adaptive, Sparse) and adaptive.values.numel():
            server.knowledge[f"{client}.{update.task}"] = adaptive

    # ---- client half -------------------------------------------------------------------------------------------------

    def begin_task(self, client: FedWeITClient, ctx: TaskContext) -> None:
        super().begin_task(client, ctx)
        client.attention, client.foreign = empty(), None

    def receive(self, client: FedWeITClient, download: Download, ctx: TaskContext) -> None:
        turn = download.fields.get("turn", 0)
        if type(turn) is not int or not 0 <= turn <= MAX_TURN:
            raise MessageError(f"message rejected: its turn cannot be {turn!r:.60}")
        client.turn = turn
        first = "foreign" in download.fields and client.foreign is None
        if (received := download.tensors.get("weights")) is not None:
            client.weights = merge(received, client.weights)
            client.receive_biases(download.tensors.get("biases"))
            if self.options.drift_from == "received" and first and ctx.task > 0:
                client.reference = client.weights.clone()
        if first:
            client.foreign = list(download.fields["foreign"])
            client.attention = self._first_attention(len(client.foreign), ctx)

    def _first_attention(self, count: int, ctx: TaskContext) -> torch.Tensor:
        layers = len(ctx.layout.layers)
        if self.options.attention_start == "even":
            return torch.full((layers * count,), 1.0 / max(count, 1))
        rng = generator(ctx.plan.seed, "attention", ctx.client, ctx.task)
        return torch.from_numpy(rng.standard_normal(layers * count) / math.sqrt(max(count, 1))).float().clone()

    def prepare(self, training: LocalTraining, client: FedWeITClient, ctx: TaskContext) -> None:
        super().prepare(training, client, ctx)
        training.rates["attention"] = self.options.attention_rate

    def foreign(self, client: FedWeITClient, task: int, ctx: TaskContext) -> list[Foreign]:
        keys = client.tasks[task].foreign if task in client.tasks else client.foreign or []
        return [Foreign.of(client.knowledge[key], ctx.layout, ctx.device) for key in keys]

    def upload(self, client: FedWeITClient, ctx: TaskContext) -> Tensors:
        """Alg. 1 line 8: some rows of B, or of B * m."""
        if "b_comm" in self.options.ablate:
            return {}
        layout, mask, value = ctx.layout, self._mask(client.mask), client.weights
        if mask is None:
            kept = torch.ones(layout.rows, dtype=torch.bool)
        elif self.options.rows == "round_robin":
            kept = formulas.rows_in_turn(layout, client.turn, self.options.keep)
        else:
            kept = formulas.strongest_rows(layout, mask, self.options.keep)
        if mask is not None and self.options.send == "product":
            value = torch.empty_like(client.weights)
            formulas.compose(layout, client.weights, mask, None, None, [], value)
        rows, biases = Rows.of(value, layout.segments, kept), client.private[: layout.biases].clone()
        return {**shared_of(self.options, rows, biases)}

    def end_task(self, client: FedWeITClient, ctx: TaskContext) -> None:
        if client.foreign:
            finished = replace(client.tasks[ctx.task], attention=client.attention, foreign=client.foreign)
            client.tasks[ctx.task] = finished
        super().end_task(client, ctx)

    def share_task(self, client: FedWeITClient, ctx: TaskContext) -> Tensors:
        """Of A what the client shares: its choice, made at the client before anything is encoded; docs/trust.md."""
        adaptive, share = client.tasks[ctx.task].adaptive, self.options.share
        if share == "nothing":
            return {}
        if share == "all":
            return {"adaptive": adaptive}
        value = tensors.dense(adaptive)
        strength = torch.cat([rows.square().sum(dim=1) for _, rows in ctx.layout.by_layer(value)])  # (total rows,)
        kept = torch.zeros(ctx.layout.rows, dtype=torch.bool)
        kept[strength.topk(min(share, ctx.layout.rows)).indices] = True
        return {"adaptive": Sparse.of(value * tensors.by_value(kept, ctx.layout.segments))}


def tempered(mean: Payload, whole: torch.Tensor, parts: list[Payload]) -> Payload:
    """Where fewer than half of the updates have a row, theta_G moves towards their mean by their share alone.

    A late update has rows of an earlier turn: theta_G would become what one client has there.
    """
    assert isinstance(mean, Rows)
    senders = torch.stack([part.kept for part in parts if isinstance(part, Rows)]).sum(dim=0)  # (rows,)
    if not (2 * senders[mean.kept] < len(parts)).any():
        return mean
    share = torch.stack([tensors.present(part) for part in parts]).float().mean(dim=0)  # (weights,)
    moved = torch.lerp(whole, mean.dense(), torch.where(share < 0.5, share, 1.0))
    return Rows.of(moved, mean.segments, mean.kept)


def anchored(whole: torch.Tensor, parts: list[Payload], weights: list[float]) -> Rows:
    """theta_G moved towards what was sent; a client that did not send a row is counted as sending theta_G's."""
    moved: list[Payload] = []
    for part in parts:
        assert isinstance(part, Rows)
        before = Rows.of(whole, part.segments, part.kept)
        moved.append(Rows(part.segments, part.kept, part.values - before.values))
    step = average(moved, weights, "all")
    assert isinstance(step, Rows)
    return Rows.of(whole + step.dense(), step.segments, step.kept)
