"""SCAFFOLD: FedAvg with control variates against client drift (Karimireddy et al., ICML 2020).

    step          y <- y - rate * (g(y) - c_i + c)                       c_i: the client's variate, c: the server's
    after K       c_i+ = c_i - c + (x - y) / (sum of the K rates)        option II; x: theta_G as received
    server        x <- x + server_rate * mean of (y_i - x)
                  c <- c + |S| / N * mean of (c_i+ - c_i)                S: those that answered, of N clients

Both ways it sends twice as much as FedAvg. The formulas take every step to be rate * gradient, so the optimiser is SGD.
A client's variate lives at the client and only its change travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from weft.lazy import torch
from weft.methods import method
from weft.methods.averaging import Average, compact, sent, weighted_sum
from weft.methods.federated import fedavg
from weft.methods.federated.fedavg import FedAvg
from weft.methods.method import Briefing, Form, Lesson, Work, in_parts
from weft.wire import tensors

if TYPE_CHECKING:
    from weft.core.storage import State
    from weft.networks.flat import Layout
    from weft.plan import Plan
    from weft.wire.message import Message
    from weft.wire.tensors import Payload


class Options(fedavg.Options):
    average: Average = "equal"  # Karimireddy et al. take the plain mean
    server_rate: float = Field(1.0, gt=0, le=100)  # the server's step size, 1 in their experiments
    variates: bool = True  # off: they stay 0, and with server_rate 1 it is FedAvg

    @model_validator(mode="after")
    def _whole_steps(self) -> Self:
        if self.keep < 1 and self.server_rate != 1:
            raise ValueError("server_rate needs keep=1, since a server that is sent parts does not hold all of x")
        return self


class Scaffold(FedAvg):
    options_class: ClassVar[type[method.Options]] = Options
    citation: ClassVar[str] = "Karimireddy et al., SCAFFOLD: stochastic controlled averaging, ICML 2020"
    sends: ClassVar[tuple[str, str]] = ("theta, change of c_i", "theta_G, c")
    verified: ClassVar[str] = "tests/test_baselines.py: test_scaffold_finds_the_optimum_that_fedavg_misses"
    optimizer: ClassVar[Literal["adam", "sgd"]] = "sgd"
    sgd_rate: ClassVar[float] = 0.02
    options: Options

    # ---- server half

    def open_server(self, server: State, initial: torch.Tensor, layout: Layout, plan: Plan) -> None:
        super().open_server(server, initial, layout, plan)
        server.numbers["clients"] = plan.clients
        for name, value in self.shared(in_parts(initial, layout), layout).items():
            server.tensors[f"variate/{name}"] = torch.zeros_like(value)

    def brief(self, server: State, client: int, step: int, first: bool, plan: Plan) -> Briefing:
        said, numbers = super().brief(server, client, step, first, plan)
        if self.options.keep < 1:
            said = {key: compact(value) if key.startswith("variate/") else value for key, value in said.items()}
        return said, numbers

    def merge_replies(self, server: State, replies: list[Message], weights: list[float]) -> None:
        before = self._shared_at(server)
        super().merge_replies(server, replies, weights)
        for name, old in before.items():
            key = {"base": "global"}.get(name, name)
            if self.options.server_rate != 1:
                server.tensors[key] = old + self.options.server_rate * (server.tensor(key) - old)
            changes = weighted_sum(sent(replies, f"variate/{name}"), [1.0] * len(replies))
            # |S| / N times their mean is their sum / N
            server.tensors[f"variate/{name}"] = server.tensor(f"variate/{name}") + changes / server.numbers["clients"]

    def why_not_as_it_comes(self) -> str:
        return "its variates are the mean over clients that started from one theta_G"

    def expected(self, layout: Layout) -> dict[str, Form] | None:
        found = super().expected(layout) or {}
        return found | {f"variate/{name}": form for name, form in found.items()}

    def _shared_at(self, server: State) -> dict[str, torch.Tensor]:
        found = {"base": tensors.dense(server.tensors["global"])}
        if self.options.biases == "shared":
            found["biases"] = server.tensor("biases")
        return found

    # ---- client half

    def join(self, client: State, lesson: Lesson) -> None:
        super().join(client, lesson)
        for name, part in self.shared(in_parts(lesson.initial(), lesson.layout), lesson.layout).items():
            client.tensors[f"own_variate/{name}"] = torch.zeros_like(part)
            client.tensors[f"server_variate/{name}"] = torch.zeros_like(part)

    def receive(self, client: State, message: Message, lesson: Lesson) -> None:
        super().receive(client, message, lesson)
        for name, value in message.tensors.items():
            if name.startswith("variate/"):
                client.tensors[f"server_{name}"] = tensors.dense(value)

    def open(self, client: State, lesson: Lesson) -> Work:
        work = super().open(client, lesson)
        names, device = self.shared(client.tensors, lesson.layout), lesson.network.vector.device
        work.constants["scaffold/correction"] = {  # c - c_i, the same at every step of the round
            name: (client.tensor(f"server_variate/{name}") - client.tensor(f"own_variate/{name}")).to(device)
            for name in names
        }
        work.constants["scaffold/start"] = {name: value.to(device, copy=True) for name, value in names.items()}
        work.constants["scaffold/rates"] = 0.0
        return work

    def penalise(self, work: Work) -> None:
        super().penalise(work)
        if self.options.variates:
            gradients = self.shared(work.gradients, work.network.layout)
            for name, correction in work.constants["scaffold/correction"].items():
                gradients[name].add_(correction)

    def constrain(self, work: Work, rate: float) -> None:
        super().constrain(work, rate)
        work.constants["scaffold/rates"] += rate

    def close(self, client: State, work: Work) -> None:
        super().close(client, work)
        rates = work.constants["scaffold/rates"]
        if not rates:  # nothing was trained
            return
        theta = self.shared(work.variables, work.network.layout)
        for name, start in work.constants["scaffold/start"].items():
            change = (start - theta[name]) / rates - tensors.dense(client.tensors[f"server_variate/{name}"]).to(start)
            if not self.options.variates:
                change = torch.zeros_like(change)
            if name == "biases":
                change[work.network.layout.shared_statistics] = 0  # counted and not learned
            client.tensors[f"change/{name}"] = change.cpu()

    def contribute(self, client: State, lesson: Lesson) -> dict[str, Payload]:
        names = self.shared(client.tensors, lesson.layout)
        said = self.cut({f"variate/{name}": client.tensor(f"change/{name}") for name in names}, client, lesson)
        for name in names:  # c_i moves by what was said of it and no more: c stays the mean of all c_i
            own = client.tensor(f"own_variate/{name}")
            client.tensors[f"own_variate/{name}"] = own + tensors.dense(said[f"variate/{name}"])
        return super().contribute(client, lesson) | said
