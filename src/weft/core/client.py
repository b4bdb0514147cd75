"""A client: `answer` moves its state on and gives the reply. It sees its own data and the server's words, no more.

What a message can ask for, in this order:

    begin     a new task: its head, its own parameters, a fresh learning rate
    receive   take in the tensors that came along
    train     one round on the task's training images
    send      answer with the method's contribution to theta_G
    finish    the task is over: put away what it needs later
    give      answer with what is given once a task
    test      accuracy of every task so far, on test images (of the model as it is, or as theta_G would make it)

The same request twice gives the same reply and does not train twice. A server that has lost an answer asks once more
for a task to begin or to finish: what was done is not done again. A client that was out of reach for whole tasks makes
up for it when it begins the next one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from weft import methods, metrics, networks, scenarios
from weft.core.checks import request_fault
from weft.core.optimizers import forget_optimizer
from weft.core.storage import State
from weft.core.training import begin_schedule, train_round
from weft.errors import WeftError
from weft.methods.method import Lesson, Method
from weft.networks.batches import Batches
from weft.plan import Plan
from weft.scenarios import Scenario, SplitName, Task
from weft.wire.message import Message, MessageError, decode, encode, failure
from weft.wire.tensors import Payload, nonzeros

SETS_KEPT = 16  # of the tasks being learned
TEST_SETS_KEPT = 256  # small uint8 images: some hundred kilobytes each


class World:
    """What all clients of a process share: the plan and what was built from it. No client's memory is in here."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.scenario: Scenario = scenarios.of(plan)
        self.method: Method = methods.load(plan.method, plan.method_options)
        self.device = pick_device(plan.device)
        # training images are asked for again in every round of a task, test images after every later task
        self._learning = functools.lru_cache(maxsize=2 * SETS_KEPT)(self._load)
        self._testing = functools.lru_cache(maxsize=TEST_SETS_KEPT)(self._load)

    def task(self, client: int, step: int) -> Task:
        return self.scenario.sequences[client][step]

    def lesson(self, client: int, step: int) -> Lesson:
        """A lesson without data, for answering; whoever learns gets `learning`."""
        plan, heads = self.plan, self._heads(client, step)
        network = networks.build(plan.network, plan.network_options, heads, self.device, plan.loss)
        return Lesson(client, step, plan, network)

    def learning(self, client: int, step: int) -> Lesson:
        """The lesson of the task that is being learned: its images are there to see, those of other tasks are not."""
        load = functools.partial(self.pooled if self.method.sees_all else self.batches, client, step)
        return dataclasses.replace(self.lesson(client, step), load=load)

    def _heads(self, client: int, step: int) -> tuple[int, ...]:
        """How many classes each head has: one head for the task, or those of all tasks where all are seen at once."""
        tasks = self.scenario.sequences[client] if self.method.sees_all else (self.task(client, step),)
        return tuple(len(task.classes) for task in tasks)

    def batches(self, client: int, step: int, part: SplitName) -> Batches:
        return (self._testing if part == "test" else self._learning)(client, step, part)

    def pooled(self, client: int, step: int, part: SplitName) -> Batches:
        """The images of all tasks of a client; an epoch takes as many of them as the current task has."""
        parts = [self.batches(client, each, part) for each in range(len(self.scenario.sequences[client]))]
        return Batches.pool(parts, epoch=len(parts[step]))

    def _load(self, client: int, step: int, part: SplitName) -> Batches:
        task = self.task(client, step)
        return Batches(task.load(part), task.mean, task.deviation, self.device, self._first_label(client, step))

    def own_head(self, client: int, step: int) -> tuple[int, int]:
        """Where a task's classes begin among those of all heads, and how many they are."""
        return self._first_label(client, step), len(self.task(client, step).classes)

    def _first_label(self, client: int, step: int) -> int:
        """Labels count through all heads."""
        return sum(self._heads(client, step)[:step]) if self.method.sees_all else 0


def pick_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[wanted]:
        raise WeftError(f"device={wanted} is not there on this machine; choose auto or cpu")
    return wanted


def answer(world: World, client: int, state: State, wire: bytes) -> bytes:
    """The reply to an encoded request, encoded; `state` is moved on in place."""
    request = decode(wire)
    if state.reply and state.numbers["answered"] == request.request_id:
        return state.reply
    lesson = _lesson(world, client, request)
    if "train" in request.ops and _is_past(state, request.task):
        return encode(failure(request, "that task is over here"))
    tensors, numbers = _act(world, state, request, lesson)
    reply = Message(
        request.receiver, request.sender, request.request_id, (), request.task, request.round, tensors, numbers
    )
    state.numbers["answered"] = request.request_id
    state.reply = encode(reply, world.plan.wire)
    return state.reply


def _is_past(state: State, step: int) -> bool:
    """Has the client put this task away? A request that was long on its way would train a later one with its images."""
    return bool(state.numbers.get("finished", -1) >= step or state.numbers.get("begun", -1) > step)


def _lesson(world: World, client: int, request: Message) -> Lesson:
    """What is to be learned, if the request is one that a server would send: nothing was changed by it yet."""
    tasks = len(world.scenario.sequences[client])
    if not 0 <= request.task < tasks:
        raise MessageError(f"message rejected: it is about task {request.task}, of {tasks}")
    lesson = world.learning(client, request.task)
    if fault := request_fault(request, client, world.method, lesson.layout):
        raise MessageError(f"message rejected: {fault}")
    return lesson


def _act(world: World, state: State, request: Message, lesson: Lesson) -> tuple[dict[str, Payload], dict[str, Any]]:
    method, client, step = world.method, lesson.client, lesson.step
    tensors: dict[str, Payload] = {}
    numbers: dict[str, Any] = {}
    if "base" not in state.tensors:
        method.join(state, lesson)
    if "begin" in request.ops and state.numbers.get("begun", -1) < step:
        for missed in range(state.numbers.get("finished", -1) + 1, step):  # so that every task can be answered for
            _begin(world, state, world.learning(client, missed))
            _finish(world, state, world.learning(client, missed))
        _begin(world, state, lesson)
    stopped = state.numbers["schedule"]["stopped"]  # its rate has reached the floor: it keeps what it has and waits
    if "receive" in request.ops:
        if stopped:
            method.store(state, request)
        else:
            method.receive(state, request, lesson)
    if "train" in request.ops:
        numbers |= train_round(state, method, lesson, request.round)
    if "send" in request.ops and not stopped:
        tensors |= method.contribute(state, lesson)
    if "finish" in request.ops:
        _finish(world, state, lesson)
        if state.numbers["schedule"]["epochs"]:  # of the model as it is put away
            method.answer_for(state, step, lesson)
            numbers["task_valid_accuracy"] = lesson.network.measure(world.batches(client, step, "valid"))[0]
        numbers["size"] = method.size(state)._asdict()
        numbers["density"] = density(state, lesson)
    if "give" in request.ops:
        tensors |= method.give(state, lesson)
    if "test" in request.ops:
        numbers |= test(world, state, request, lesson)
    return tensors, numbers


def _begin(world: World, state: State, lesson: Lesson) -> None:
    if state.numbers.get("begun", -1) < lesson.step:
        world.method.begin(state, lesson)
        state.numbers["schedule"] = begin_schedule(world.method.first_rate(world.plan, lesson.step))
        state.numbers["begun"] = lesson.step


def _finish(world: World, state: State, lesson: Lesson) -> None:
    if state.numbers.get("finished", -1) < lesson.step:
        world.method.finish(state, lesson)
        forget_optimizer(state)
        state.numbers["finished"] = lesson.step


def test(world: World, state: State, request: Message, lesson: Lesson) -> dict[str, list[Any]]:
    """Accuracy of every task up to this one. With measured_model=global theta_G comes along, is tried on and not kept.

    And other measures, if the plan wants some.
    """
    tried = state
    if world.plan.measured_model == "global" and request.tensors and "train" not in request.ops:
        tried = State(dict(state.tensors), dict(state.numbers), state.archive)
        world.method.receive(tried, request, lesson)
    found: dict[str, list[Any]] = {"accuracy": []}
    for step in range(lesson.step + 1):
        here = world.lesson(lesson.client, step)
        world.method.answer_for(tried, step, here)
        batches = world.batches(lesson.client, step, "test")
        found["accuracy"].append(here.network.measure(batches)[0])
        if world.plan.metrics is not None:
            first, classes = world.own_head(lesson.client, step)
            answers = here.network.predictions(batches)[:, first : first + classes].double().cpu().numpy()
            labels = batches.labels.cpu().numpy() - first
            measured = metrics.measure_all(world.plan.metrics.split(","), labels, answers)
            found.setdefault("metrics", []).append(measured)
    return found


def density(state: State, lesson: Lesson) -> list[float]:
    """The share of nonzeros in the A of each task so far; empty for methods that have none."""
    found = (state.archive.get(f"adaptive/{step}") for step in range(lesson.step + 1))
    return [nonzeros(adaptive) / lesson.layout.weights for adaptive in found if adaptive is not None]
