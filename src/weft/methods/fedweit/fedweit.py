"""FedWeIT: federated weighted inter-client transfer (Yoon et al., ICML 2021).

    Eq. 1    theta = B * m + A + sum over foreign (i, j) of alpha[i, j] * A[i, j]
    Eq. 2    loss(theta) + lambda_1 * (|m|_1 + |A|_1) + lambda_2 * sum over past tasks i of |dB * m_i + dA_i|^2

B (`base`), m (`mask`) and A (`adaptive`) and how they are learned stand in apd.py, whose method is the same without a
server; alpha (`attention`) is one number for each layer and foreign A. A round sends a share of the rows of B (Alg. 1
line 8) and gets theta_G, their mean, back (lines 9 and 6); a task's A goes to the server's knowledge base once
(line 11), from which other clients are given a sample when they start a task (line 3).

Where paper and released code part, both ways are options; FIDELITY.md lists them and says what chose the defaults.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from weft.errors import WeftError
from weft.lazy import torch
from weft.methods import method
from weft.methods.averaging import Average, absorb, average, merge, reply_weights, sent
from weft.methods.fedweit import apd
from weft.methods.fedweit.apd import APD, DecomposedWork, words
from weft.methods.fedweit.formulas import Foreign, compose, rows_in_turn, strongest_rows
from weft.methods.fedweit.sharing import shared_adaptive
from weft.methods.method import Briefing, Form, Lesson
from weft.randomness import generator
from weft.wire import tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weft.core.storage import State
    from weft.networks.flat import Layout
    from weft.plan import Plan
    from weft.wire.message import Message
    from weft.wire.tensors import Payload

Part = Literal["b_comm", "a_comm", "a", "m", "l1", "l2"]


class Options(apd.Options):
    keep: float = Field(0.3, gt=0, le=1)  # the share of each layer's rows that is sent; 30 % in the paper
    # which rows these are: the next in turn, the same for all clients of a round (docs/experiments.md), or those with
    # the strongest mask, as the sources have it
    rows: Literal["round_robin", "strongest"] = "round_robin"
    send: Literal["base", "product"] = "base"  # the kept rows of B, or of B * m
    # a row's sum by how many sent it, or by all that took part; anchored: by all, those silent counted as theta_G's
    divide: Literal["senders", "clients", "anchored"] = "senders"
    average: Average = "equal"  # Alg. 1 line 9
    kb_size: Annotated[int, Field(ge=0)] | Literal["all"] = 5  # foreign A's that a client is given for a task
    kb_from: Literal["all", "last"] = "all"  # out of all past tasks (3.3), or the last one's alone (3.4)
    kb_own: bool = False  # may a client's own past A be among them?
    kb_clients: Literal["all", "chosen"] = "all"  # every client gives its A (line 11), or those of the last round
    share: Annotated[int, Field(ge=1)] | Literal["all", "nothing"] = "all"  # of A: all, its strongest rows, or nothing
    attention_start: Literal["even", "random"] = "even"  # 1/n, appendix A
    attention_rate: float = Field(1.0, ge=0, le=1e4)  # how many times faster alpha is learned than the weights
    drift_from: Literal["own", "received"] = "own"  # B(t-1): before theta_G first overwrites it, or after
    ablate: Annotated[tuple[Part, ...], BeforeValidator(words)] = ()  # type: ignore[assignment] # more than APD has


class FedWeIT(APD):
    options_class: ClassVar[type[method.Options]] = Options
    kind: ClassVar[Literal["local", "federated", "bound"]] = "federated"
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
    citation: ClassVar[str] = "Yoon et al., Federated continual learning with weighted inter-client transfer, ICML 2021"
    sends: ClassVar[tuple[str, str]] = (
        "some rows of B, in turn; sparse A once a task",
        "the mean of the rows sent; a sample of A's once a task",
    )
    talks: ClassVar[bool] = True
    precision: ClassVar[Literal["float32", "half", "int8"]] = "int8"  # docs/experiments.md has what it costs
    verified: ClassVar[str] = "tests/test_golden.py, against examples/fedweit_in_one_file.py"
    alone: ClassVar[str] = "it has a server half and a way to learn of its own; take fedavg+apd or fedprox+apd"
    options: Options

    # ---- server half -------------------------------------------------------------------------------------------------

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout, plan: Plan) -> None:
        everything = torch.ones(layout.rows, dtype=torch.bool)
        server.tensors["global"] = tensors.Rows.of(initial[: layout.weights], layout.segments, everything)
        if self.options.divide == "anchored" or self.options.rows == "round_robin":
            server.tensors["anchor"] = initial[: layout.weights].clone()  # theta_G whole; changed rows are sent
        if self.options.rows == "round_robin":
            server.tensors["changed"] = torch.zeros(layout.rows)  # for each row, how many merges there were by then
            server.numbers |= {"merges": 0, "told": {}}  # and by client, of how many it has been told
        if self.options.biases == "shared":
            server.tensors["biases"] = initial[layout.weights :].clone()
        server.numbers["held"] = {}  # which foreign A's a client has been sent: none is sent twice

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        """Alg. 1 line 6: theta_G, and kb^(t) with it if the client meets it first."""
        sent: dict[str, Payload] = {}
        numbers: dict[str, Any] = {}
        if "b_comm" not in self.options.ablate:
            sent = {name: server.tensors[name] for name in ("global", "biases") if name in server.tensors}
            if self.options.rows == "round_robin":
                sent["global"] = self._news(server, client)
                numbers["turn"] = merges = server.numbers["merges"]
                if (
                    plan.asynchronous == "updates"
                ):  # as many as there are clients make a turn, since there are no rounds
                    numbers |= {"turn": merges // plan.clients, "merges": merges}
        if first:
            chosen = self._offer(server, client, step, plan) if self._shares_adaptive else []
            held = set(server.numbers["held"].get(str(client), []))
            sent |= {f"foreign/{key}": server.archive[key] for key in chosen if key not in held}
            numbers["foreign"] = chosen
        return sent, numbers

    def _news(self, server: State, client: int) -> tensors.Rows:
        """The rows of theta_G that have changed since those that this client is known to have got."""
        if "merges" not in server.numbers:
            raise WeftError("this run was begun by a weft that sent other rows (method.rows); begin it anew")
        merges, since = server.numbers["merges"], server.numbers["told"].get(str(client), 0)
        latest = server.tensors["global"]
        assert isinstance(latest, tensors.Rows)
        if 0 < merges == since + 1:
            return latest  # the very one, so that it is written once for all
        return tensors.Rows.of(server.tensor("anchor"), latest.segments, server.tensor("changed") > since)

    def _offer(self, server: State, client: int, step: int, plan: Plan) -> list[str]:
        """kb^(t), drawn once for a client and task and sent until the client has answered.

        Drawn anew for each request, a late answer to the first would confirm what only the second brought.
        """
        offered = server.numbers.setdefault("offered", {})  # held once the client has answered
        if str(client) not in offered or offered[str(client)]["step"] != step:
            in_step = plan.asynchronous == "none"  # else a client gets what is there by then, of any task
            keys = self._sample(sorted(server.archive), client, step, plan.seed, in_step)
            offered[str(client)] = {"step": step, "keys": keys}
        return list(offered[str(client)]["keys"])

    def confirm(self, server: State, client: int, reply: Message, told: Mapping[str, Any]) -> None:
        name = str(client)
        if "foreign" in told:  # those of the request that is answered: by now another task's may be offered
            server.numbers["held"][name] = sorted({*server.numbers["held"].get(name, []), *told["foreign"]})
        if "turn" in told and "base" in reply.tensors:  # who has stopped at the floor takes nothing, and sends nothing
            merges = told.get("merges", told["turn"])
            server.numbers["told"][name] = max(merges, server.numbers["told"].get(name, 0))  # it may be a late answer

    def _sample(self, stored: list[str], client: int, step: int, seed: int, in_step: bool = True) -> list[str]:
        """Alg. 1 line 3: kb^(t) ~ kb, the receiver's own A excluded; `in_step`: of the tasks before this one."""
        origins = {key: tuple(map(int, key.split("."))) for key in stored}  # (client, step)
        past = [key for key in stored if not in_step or origins[key][1] < step]
        if self.options.kb_from == "last":
            newest = {
                origins[key][0]: origins[key][1] for key in sorted(past, key=origins.__getitem__)
            }  # of each client
            past = [key for key in past if origins[key][1] == (step - 1 if in_step else newest[origins[key][0]])]
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
        parts = sent(replies, "base")
        if self.options.divide == "anchored":
            mean: Payload = anchored(server.tensor("anchor"), parts, weights)
        else:
            divide: Literal["senders", "all"] = "senders" if self.options.divide == "senders" else "all"
            mean = average(parts, weights, divide)
            if self.options.rows == "round_robin":
                mean = tempered(mean, server.tensor("anchor"), parts)
        self._note(server, mean)
        if self.options.biases == "shared":
            server.tensors["biases"] = average(sent(replies, "biases"), weights)

    def absorb(self, server: State, reply: Message, weight: float) -> None:
        part = reply.tensors.get("base")
        if self.options.rows == "round_robin" and isinstance(part, tensors.Rows):  # theta_G where the reply has rows
            server.tensors["global"] = tensors.Rows.of(server.tensor("anchor"), part.segments, part.kept)
        absorb(server, reply, weight)
        if isinstance(part, tensors.Rows):
            self._note(server, server.tensors["global"])

    def _note(self, server: State, merged: Payload) -> None:
        """Rows of theta_G are new."""
        assert isinstance(merged, tensors.Rows)
        server.tensors["global"] = merged
        if self.options.rows == "strongest":
            return
        server.numbers["merges"] += 1
        merged.over(server.tensor("anchor"))
        server.tensor("changed")[merged.kept] = server.numbers["merges"]

    def why_not_as_it_comes(self) -> str:
        divide = self.options.divide
        return "" if divide == "senders" else f"method.divide={divide} divides by the clients of a round"

    def expected(self, layout: Layout) -> dict[str, Form] | None:
        found = {} if "b_comm" in self.options.ablate else {"base": Form("rows", layout.weights)}
        if found and self.options.biases == "shared":
            found["biases"] = Form("dense", layout.body - layout.weights)
        return found | ({"adaptive": Form("sparse", layout.weights, once=True)} if self._shares_adaptive else {})

    def fault(self, sent: Mapping[str, Payload], told: Mapping[str, Any], layout: Layout) -> str:
        """A row that only one client sends is that client's alone: nobody may bring rows that were not asked for."""
        part = sent.get("base")
        if not isinstance(part, tensors.Rows):
            return ""
        if "m" in self.options.ablate:
            return "" if part.kept.all() else "has not all rows (method.ablate=m)"
        wanted = rows_in_turn(layout, told.get("turn", 0), self.options.keep)
        if self.options.rows == "round_robin":
            return "" if torch.equal(part.kept, wanted) else "has other rows than those that are in turn"
        for layer in layout.layers:  # which ones is the client's choice, how many is not
            if part.kept[layer.row_span].sum() > wanted[layer.row_span].sum():
                return f"has more rows of {layer.name} than the share of {self.options.keep:g} (method.keep)"
        return ""

    def wants_gift(self, chosen_last: bool) -> bool:
        return self._shares_adaptive and (chosen_last or self.options.kb_clients == "all")

    def collect(self, server: State, client: int, step: int, reply: Message) -> None:
        """Alg. 1 line 11: kb <- kb + {A^(t)_j}. An A without values is that of a task that was never learned."""
        adaptive = reply.tensors.get("adaptive")
        if isinstance(adaptive, tensors.Sparse) and adaptive.values.numel():
            server.archive[f"{client}.{step}"] = adaptive

    def part(self, server: State, client: int) -> None:
        gone = {key for key in server.archive if key.split(".")[0] == str(client)}
        for key in gone:
            del server.archive[key]
        for table in ("held", "offered", "told"):
            server.numbers.get(table, {}).pop(str(client), None)
        for offer in server.numbers.get("offered", {}).values():
            offer["keys"] = [key for key in offer["keys"] if key not in gone]

    # ---- client half -------------------------------------------------------------------------------------------------

    def begin(self, client: State, lesson: Lesson) -> None:
        super().begin(client, lesson)
        client.tensors.pop("attention", None)
        client.numbers["foreign"] = []

    def store(self, client: State, message: Message) -> None:
        for name, payload in message.tensors.items():
            if name.startswith("foreign/"):
                client.archive[name] = payload  # each foreign A once, however many tasks use it

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        self.store(client, message)
        client.numbers["turn"] = message.fields.get("turn", 0)
        meets = "foreign" in message.fields and "attention" not in client.tensors  # else it was told before
        if (received := message.tensors.get("global")) is not None:
            client.tensors["base"] = merge(received, client.tensor("base"))
            self.receive_biases(client, message)
            if self.options.drift_from == "received" and meets and lesson.step > 0:
                client.tensors["reference"] = client.tensor("base").clone()
        if meets:
            chosen = message.fields["foreign"]
            client.numbers["foreign"] = chosen
            client.tensors["attention"] = self._first_attention(len(chosen), lesson)

    def _first_attention(self, count: int, lesson: Lesson) -> torch.Tensor:
        layers = len(lesson.layout.layers)
        if self.options.attention_start == "even":
            return torch.full((layers * count,), 1.0 / max(count, 1))
        rng = generator(lesson.plan.seed, "attention", lesson.client, lesson.step)
        return torch.from_numpy(rng.standard_normal(layers * count) / math.sqrt(max(count, 1))).float().clone()

    def open(self, client: State, lesson: Lesson) -> DecomposedWork:
        work = super().open(client, lesson)
        work.rates["attention"] = self.options.attention_rate
        return work

    def foreign(self, client: State, step: int | None, lesson: Lesson) -> list[Foreign]:
        device, found = lesson.network.vector.device, []
        for key in client.numbers["foreign" if step is None else f"foreign/{step}"]:
            adaptive = client.archive[f"foreign/{key}"]
            assert isinstance(adaptive, tensors.Sparse)
            found.append(Foreign.of(adaptive, lesson.layout, device))
        return found

    def contribute(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        """Alg. 1 line 8: some rows of B, or of B * m."""
        if "b_comm" in self.options.ablate:
            return {}
        biases = {name: value.clone() for name, value in self.shared(client.tensors, lesson.layout).items()}
        del biases["base"]
        layout, mask = lesson.layout, self._mask(client.tensor("mask"))
        value = client.tensor("base")
        kept = torch.ones(layout.rows, dtype=torch.bool)
        if "m" not in self.options.ablate and mask is not None:
            if self.options.rows == "round_robin":
                kept = rows_in_turn(layout, client.numbers.get("turn", 0), self.options.keep)
            else:
                kept = strongest_rows(layout, mask, self.options.keep)
            if self.options.send == "product":
                out = torch.empty_like(value)
                compose(layout, value, mask, None, None, [], out)
                value = out
        return {"base": tensors.Rows.of(value, layout.segments, kept), **biases}

    def finish(self, client: State, lesson: Lesson) -> None:
        if client.numbers["foreign"]:
            client.archive[f"attention/{lesson.step}"] = client.tensor("attention")
        client.numbers[f"foreign/{lesson.step}"] = client.numbers["foreign"]
        super().finish(client, lesson)

    def give(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        return shared_adaptive(client.archive[f"adaptive/{lesson.step}"], lesson.layout, self.options.share)

    @property
    def _shares_adaptive(self) -> bool:
        return not {"a", "a_comm"} & set(self.options.ablate)


def tempered(mean: Payload, anchor: torch.Tensor, parts: list[Payload]) -> Payload:
    """Where fewer than half of the answers bring a row, theta_G moves towards their mean by their share alone.

    A late answer has rows that were in turn before: theta_G would be what one client has there.
    """
    assert isinstance(mean, tensors.Rows)
    senders = torch.stack([part.kept for part in parts if isinstance(part, tensors.Rows)]).sum(dim=0)  # (rows,)
    if not (2 * senders[mean.kept] < len(parts)).any():
        return mean
    share = torch.stack([tensors.present(part) for part in parts]).float().mean(dim=0)  # (weights,)
    moved = torch.lerp(anchor, mean.dense(), torch.where(share < 0.5, share, 1.0))
    return tensors.Rows.of(moved, mean.segments, mean.kept)


def anchored(anchor: torch.Tensor, parts: list[Payload], weights: list[float]) -> tensors.Rows:
    """theta_G moved towards what was sent; whoever did not send a row is counted as sending theta_G's.

    `anchor` is theta_G whole and is moved in place; the rows that somebody sent are returned.
    """
    moved: list[Payload] = []
    for part in parts:
        assert isinstance(part, tensors.Rows)
        before = tensors.Rows.of(anchor, part.segments, part.kept)
        moved.append(tensors.Rows(part.segments, part.kept, part.values - before.values))
    step = average(moved, weights, "all")
    assert isinstance(step, tensors.Rows)
    anchor.add_(step.dense())
    return tensors.Rows.of(anchor, step.segments, step.kept)
