"""One client's training step, one thread: a plain LeNet, ours alone, and FedWeIT after any number of tasks.

A client at its 50th task is not trained for 49 tasks. Its past is put together by the method's own hooks (begin,
finish, receive) out of drawn numbers of the right shape and density; a step does the same work on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import registry
from weft.bench.places import file_of
from weft.bench.timing import Tell, interleave, ratio, seconds_of, spread
from weft.core.client import World
from weft.core.optimizers import forget_optimizer, make_optimizer
from weft.core.storage import Archive, State
from weft.core.training import begin_schedule, train_step
from weft.methods.method import Lesson
from weft.plan import Plan
from weft.randomness import generator
from weft.wire.message import Message, decode, encode
from weft.wire.tensors import Payload

TASKS = (1, 2, 5, 10, 20, 50)
FOREIGN = (0, 5, 20)
SIDE = 2048  # of the matrix product whose speed counts as the machine's peak
NEXT = 7919  # places by which noise is turned from task to task
STEPS = 2  # timed at each turn, after one that brings the contender's memory back into the caches


class Place(NamedTuple):
    """Where a client of FedWeIT stands: at which task, with how many foreign A's, and its way with past A's."""

    task: int
    foreign: int
    past: str = "frozen"

    @property
    def name(self) -> str:
        """
        >>> Place(10, 5).name, Place(2, 0, "closed").name
        ('fedweit task 10 foreign 5', 'fedweit task 2 foreign 0 past=closed')
        """
        words = f"fedweit task {self.task} foreign {self.foreign}"
        return words if self.past == "frozen" else f"{words} past={self.past}"


EARLY, MIDDLE, LATE = COMPARED = (Place(2, 5), Place(10, 5), Place(50, 5))  # in ratios
WHOLE = (
    *(Place(task, foreign) for task in TASKS for foreign in FOREIGN),
    Place(2, 5, "closed"),
    Place(50, 5, "closed"),
)
QUICK = (Place(1, 0), EARLY, Place(10, 0), MIDDLE, Place(10, 20), LATE)
TWIN = "twin"  # the same as EARLY: how far two equal ones are apart is what noise can do


def measure(plan: dict[str, Any], quick: bool, passes: int, tell: Tell) -> dict[str, Any]:
    size: dict[str, Any] = {**plan, "tasks": max(TASKS), "clients": 2, "device": "cpu"}
    places = QUICK if quick else WHOLE
    turns = contenders(size, places)
    compared = {"peak", "plain", "lenet", TWIN, *(place.name for place in COMPARED)}
    groups = [{name: turns[name] for name in turns if (name in compared) == close} for close in (True, False)]
    found = interleave(groups, passes, tell)
    batch = Plan(**size).batch_size
    work = batch * operations_per_image(PlainTurn.network())
    table: dict[str, Any] = {}
    for name in ("plain", "lenet", *(place.name for place in places)):
        middle = spread(found[name])["median"]
        table[name] = {
            "step_seconds": spread(found[name]),
            "images_per_second": batch / middle,
            "share_of_peak": work / Product.operations * ratio(found["peak"], found[name])["median"],
        }
        if isinstance(turn := turns[name], Turn):
            table[name]["round_seconds"] = spread(turn.around)
    for place in places:
        table[place.name] |= place._asdict()
    return {
        "batch_size": batch,
        "operations_per_image": work // batch,
        "peak_operations_per_second": Product.operations / spread(found["peak"])["median"],
        "contenders": table,
        "ratios": {
            "lenet_speedup_over_plain": ratio(found["plain"], found["lenet"]),
            "fedweit_task10_over_lenet": ratio(found[MIDDLE.name], found["lenet"]),
            "fedweit_task50_over_task2": ratio(found[LATE.name], found[EARLY.name]),
        },
        "noise": ratio(found[TWIN], found[EARLY.name]),
    }


def contenders(size: dict[str, Any], places: Sequence[Place]) -> dict[str, Turn | PlainTurn | Product]:
    """All that takes turns, by name."""
    worlds = {
        past: World(Plan(**size, method={"name": "fedweit", "past": past}))
        for past in sorted({place.past for place in places})
    }
    usual = worlds[EARLY.past]
    gifts = given_away(usual, client=1, count=max(FOREIGN))
    states = past_states(usual, client=0, wanted={place.task for place in places})

    def at(place: Place) -> Turn:
        client = Client(worlds[place.past], place.task - 1, lambda *_: copy_of(states[place.task]))
        client.meet(gifts[: place.foreign])
        return Turn(client)

    alone = Client(World(Plan(**size, method="local")), 0, _joined)
    return {
        "peak": Product(),
        "plain": PlainTurn(Plan(**size)),
        "lenet": Turn(alone),
        **{place.name: at(place) for place in places},
        TWIN: at(EARLY),
    }


# ---- clients with a past ---------------------------------------------------------------------------------------------


class Client:
    """A client that has just begun a task."""

    def __init__(self, world: World, step: int, make: Callable[[World, Lesson], State]):
        self.world, self.lesson = world, world.learning(0, step)
        self.state = make(world, self.lesson)
        world.method.begin(self.state, self.lesson)
        self.state.numbers["schedule"] = begin_schedule(world.method.first_rate(world.plan, step))

    def meet(self, gifts: list[Payload]) -> None:
        """Foreign A's arrive as they do in a run: over the wire, in the first message of a task."""
        keys = [f"1.{place}" for place in range(len(gifts))]
        tensors = {f"foreign/{key}": gift for key, gift in zip(keys, gifts, strict=True)}
        message = Message("server", "client-0", "bench", ("receive",), self.lesson.step, 0, tensors, {"foreign": keys})
        received = decode(encode(message, self.world.plan.wire))
        self.world.method.receive(self.state, received, self.lesson)


def _joined(world: World, lesson: Lesson) -> State:
    state = State()
    world.method.join(state, lesson)
    return state


def finished_tasks(world: World, client: int, count: int) -> Iterator[tuple[State, Lesson]]:
    """A client's state after each of its tasks, `finish` included; what training would have made is drawn."""
    method = world.method
    state = _joined(world, world.lesson(client, 0))
    drawn = generator(world.plan.seed, "bench", client).standard_normal(state.tensor("base").numel(), dtype="float32")
    noise = torch.from_numpy(drawn)
    for step in range(count):
        lesson = world.lesson(client, step)
        method.begin(state, lesson)
        state.numbers["schedule"] = {**begin_schedule(method.first_rate(world.plan, step)), "epochs": 1}  # it learned
        for name, deviation in (("mask", 1.0), ("adaptive", 1e-2)):
            moved = noise[: state.tensor(name).numel()].roll(NEXT * step)  # drawn once: it costs more than all the rest
            state.tensors[name] = state.tensor(name) + deviation * moved
        method.finish(state, lesson)
        forget_optimizer(state)
        yield state, lesson


def past_states(world: World, client: int, wanted: set[int]) -> dict[int, State]:
    """The state of a client about to begin its n-th task, for each n that is wanted."""
    found = {1: _joined(world, world.lesson(client, 0))} if 1 in wanted else {}
    for state, lesson in finished_tasks(world, client, max(wanted) - 1):
        if lesson.step + 2 in wanted:
            found[lesson.step + 2] = copy_of(state)
    return found


def given_away(world: World, client: int, count: int) -> list[Payload]:
    """The A's that a client gives at the end of its first tasks."""
    return [world.method.give(state, lesson)["adaptive"] for state, lesson in finished_tasks(world, client, count)]


def copy_of(state: State) -> State:
    """A state that can move on by itself; what lies in the archive is never changed and is shared."""
    archive = Archive()
    archive.update(state.archive)
    own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.tensors.items()}
    return State(own, dict(state.numbers), archive)


# ---- contenders ------------------------------------------------------------------------------------------------------


class Turn:
    """Some steps of a client, between opening and closing a round as the engine does; gives the seconds of a step."""

    def __init__(self, client: Client):
        self._client = client
        self._batches = client.world.batches(0, 0, "train")  # the same images for all
        self._turns = 0
        self.around: list[float] = []  # seconds for opening and closing

    def __call__(self) -> float:
        world, state, lesson = self._client.world, self._client.state, self._client.lesson
        began = time.perf_counter()
        work = world.method.open(state, lesson)
        optimizer = make_optimizer(world.plan, work, state)
        opened = time.perf_counter() - began
        rate = state.numbers["schedule"]["rate"]

        def step(chosen: torch.Tensor) -> None:
            train_step(world.method, work, optimizer, *self._batches.take(chosen), rate)

        seconds = _timed(step, self._turns, len(self._batches), world.plan.batch_size)
        self._turns += 1
        began = time.perf_counter()
        world.method.close(state, work)
        optimizer.remember(state)
        self.around.append(opened + time.perf_counter() - began)
        return seconds


class PlainTurn:
    """Some steps of the plain LeNet with torch's own Adam."""

    def __init__(self, plan: Plan):
        task = World(plan).task(0, 0)
        split = task.load("train")
        self._images = torch.from_numpy(split.images).permute(0, 3, 1, 2).contiguous()  # uint8 (count, 3, 32, 32)
        self._labels = torch.from_numpy(split.labels)
        self._batch, self._turns = plan.batch_size, 0
        trainer = registry.find(f"{file_of('plain_lenet.py')}:PlainTrainer")
        self._trainer = trainer(self.network(), task.mean, task.deviation, plan.learning_rate)

    @staticmethod
    def network() -> nn.Module:
        network: nn.Module = registry.find(f"{file_of('plain_lenet.py')}:PlainLeNet")()
        return network

    def __call__(self) -> float:
        def step(chosen: torch.Tensor) -> None:
            self._trainer.step(self._images[chosen], self._labels[chosen])

        seconds = _timed(step, self._turns, len(self._labels), self._batch)
        self._turns += 1
        return seconds


def _timed(step: Callable[[torch.Tensor], None], turn: int, images: int, batch: int) -> float:
    """Seconds of one step: the first of a turn is not counted."""
    rng = generator(0, "bench", "order", turn)
    chosen = [torch.from_numpy(rng.permutation(images)[:batch]) for _ in range(STEPS + 1)]
    step(chosen[0])
    return sum(seconds_of(step, each) for each in chosen[1:]) / STEPS


class Product:
    """A large matrix product: what the machine can do at most, on one thread."""

    operations = 2 * SIDE**3

    def __init__(self) -> None:
        self._left, self._right = torch.ones(SIDE, SIDE), torch.ones(SIDE, SIDE)
        self._out = torch.empty(SIDE, SIDE)

    def __call__(self) -> float:
        return seconds_of(lambda: torch.mm(self._left, self._right, out=self._out))


def operations_per_image(network: nn.Module) -> int:
    """Additions and multiplications of the convolution and linear layers, forward and backward, from their shapes.

    Backward is two products of the forward's size, by the weights and by the input; the first layer has no need of
    the second, as nobody asks for a gradient of the images. What is not a product (ReLU, pooling, normalisation, Adam)
    is not counted.
    """
    forward: list[int] = []

    def count(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        weight = layer.get_parameter("weight")
        forward.append(2 * out.numel() * weight[0].numel())  # an output is a sum over one row of the weights

    layers = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        network(torch.zeros(1, 3, 32, 32))
    for hook in hooks:
        hook.remove()
    return 3 * sum(forward) - forward[0]
