"""Mutated replies and requests: each is rejected, fast and in little memory, before anything is used or changed."""

import copy
import json
import random
import resource
import struct
import time

import pytest
import torch
from helpers import Run, differences, state_bits, tiny
from message_helpers import framed

from weft.core.checks import RejectedReply, request_fault
from weft.core.client import answer
from weft.core.progress import Pending
from weft.core.schedule import Assignment
from weft.wire.codec import BLOCK, HIGHEST
from weft.wire.message import CHECKSUM, PREFIX, Message, MessageError, decode, encode
from weft.wire.tensors import LARGEST, Rows, Sparse, dense, size

pytestmark = pytest.mark.attack

QUICK, STRUCTURED, RANDOM = 2_000, 10_000, 100_000  # mutations
GROWTH = 200 << 10  # kilobytes that all mutations together may take
SMALL = {"network__hidden": 4, "network__features": 4, "clients": 2, "rounds_per_task": 1}
HUGE = [-1, 2**31 - 1, 2**31, 2**40, 2**62, 10**30, 0.5, "9", None, [], True, 1e308]


class Target:
    """A valid message, and what accepts it."""

    def __init__(self, wire):
        self.wire = wire
        _, _, length, _ = PREFIX.unpack_from(wire)
        self.header = json.loads(wire[PREFIX.size : PREFIX.size + length])
        self.payload = wire[PREFIX.size + length : -CHECKSUM.size]
        self.open(wire)

    def is_rejected(self, wire):
        """Whether the message is rejected with a reason of one line, and in no other way."""
        try:
            self.open(wire)
        except (RejectedReply, MessageError) as reason:
            return "\n" not in str(reason) and len(str(reason)) < 400
        return False


def with_header(target, header, payload=None):
    return framed(header, target.payload if payload is None else payload)


# ---- random mutations ------------------------------------------------------------------------------------------------


def mutated(wire, dice):
    kind, place = dice.randrange(6), dice.randrange(len(wire))
    if kind == 0:
        return wire[:place]
    if kind == 1:
        return wire + dice.randbytes(dice.randrange(1, 20))
    if kind == 2:
        return wire[:place] + dice.randbytes(dice.randrange(1, 9)) + wire[place:]
    if kind == 3:
        return wire[:place] + wire[place + dice.randrange(1, 40) :]
    changed = bytearray(wire)
    for _ in range(dice.randrange(1, 5) if kind == 4 else 1):
        changed[dice.randrange(len(wire) if kind == 4 else 60)] ^= dice.randrange(1, 256)
    return bytes(changed)


def throw(targets, count, make):
    dice = random.Random(count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    longest = 0.0
    for number in range(count):
        target = targets[number % len(targets)]
        wire = make(target, dice)
        began = time.perf_counter()
        assert wire == target.wire or target.is_rejected(wire), wire[:400]
        longest = max(longest, time.perf_counter() - began)
    assert longest < 5  # seconds, on a busy machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < GROWTH


# ---- mutations with a valid checksum ---------------------------------------------------------------------------------


def wrong_field(target, dice):
    """One key more or less, or an unknown one."""
    header = copy.deepcopy(target.header)
    holder = dice.choice([header, *header["tensors"]])
    if dice.random() < 0.5:
        del holder[dice.choice(sorted(holder))]
    else:
        holder[dice.choice(["__class__", "dtype", "x", "header"])] = dice.choice(HUGE)
    return with_header(target, header)


def wrong_size(target, dice):
    """A tensor that claims a different size, count or rows."""
    header = copy.deepcopy(target.header)
    described = dice.choice(header["tensors"])
    key = dice.choice(sorted(set(described) - {"name", "encoding"}))
    if key == "segments":
        old = copy.deepcopy(described[key])
        segment = dice.choice(described[key])
        segment[dice.randrange(2)] = dice.choice([*HUGE, 0, segment[0] + 1, segment[1] + 1])
        if described[key] == old:
            described[key] = old[:-1]
    else:
        described[key] = dice.choice([*HUGE, described[key] + 1, described[key] - 1, 2 * described[key] + 1])
    return with_header(target, header)


def wrong_length(target, dice):
    """Too many or too few bytes, or a prefix that claims more than there is."""
    kind, some = dice.randrange(3), dice.randrange(1, 9)
    if kind == 0:
        return with_header(target, target.header, target.payload + dice.randbytes(some))
    if kind == 1:
        return with_header(target, target.header, target.payload[:-some])
    lengths = (dice.choice([0, 2**31, 2**32 - 1]), dice.choice([0, 2**40, 2**63]))
    return framed(json.dumps(target.header).encode(), target.payload, lengths)


def not_a_header(target, dice):
    """Headers that are not JSON, or not in canonical form."""
    text = json.dumps(target.header, sort_keys=True, separators=(",", ":"))
    raw = dice.choice(
        [
            b"",
            b"null",
            b"[" * 100_000,
            text.encode()[: dice.randrange(1, len(text))],
            text.replace(":", ": ", 1).encode(),
            text.replace("{", '{"error":"",', 1).encode(),
            text.encode("utf-16"),
            text.replace('"round":', '"round":1e999,"x":', 1).encode(),
            b"\xff" * dice.randrange(1, 5000),
            dice.randbytes(dice.randrange(1, 400)),
        ]
    )
    return framed(raw, target.payload)


# ---- replies ---------------------------------------------------------------------------------------------------------


class ReplyTarget(Target):
    """A valid reply, its request, and the checks."""

    def __init__(self, checks, wire, request):
        client = int(request.receiver.removeprefix("client-"))
        assignment = Assignment(client, request.task, request.round, request.ops, exchanges=True)
        self.checks, self.client = checks, client
        self.pending = {assignment.request_id: Pending(assignment, 0, 0, 0.0, request.fields)}
        super().__init__(wire)

    def open(self, wire):
        return self.checks.open(wire, self.client, self.pending)[0]


@pytest.fixture(scope="module")
def targets():
    found = []
    for words in (
        {"method": "fedweit"},
        {"method": "fedweit", "precision": "half"},
        {"method": "fedweit", "precision": "int8"},
        {"method": "fedavg"},
        {"method": "fedavg", "method__keep": 0.05},
    ):
        finished = Run(tiny(**SMALL, tasks=1, metrics="recall,balanced", **words)).go()
        found.append(ReplyTarget(finished.checks, finished.wires[1], finished.requests[0]))
    return found


@pytest.mark.parametrize("count", [QUICK, pytest.param(RANDOM, marks=pytest.mark.long)])
def test_random_mutations(targets, count):
    throw(targets, count, lambda target, dice: mutated(target.wire, dice))


def wrong_key(target, dice):
    """A key of the header with a different value."""
    header = copy.deepcopy(target.header)
    key = dice.choice(["sender", "receiver", "request_id", "task", "round", "ops", "precision", "fields", "tensors"])
    header[key] = dice.choice([value for value in [*HUGE, "x", {}, ["train"]] if value != header[key]])
    if header["tensors"] == []:  # a client that has stopped may send none, but then there are no bytes
        return with_header(target, header)
    if header["fields"] == {}:
        header["task"] += 1
    return with_header(target, header)


def wrong_kind(target, dice):
    """Another encoding, another name, a tensor twice, or one too many."""
    header = copy.deepcopy(target.header)
    place = dice.randrange(len(header["tensors"]))
    described = header["tensors"][place]
    kind = dice.randrange(4)
    if kind == 0:
        others = {"dense", "rows", "sparse-gaps", "sparse-mask", "pickle", ""} - {described["encoding"]}
        described["encoding"] = dice.choice(sorted(others))
    elif kind == 1:
        described["name"] = dice.choice(["", "theta", "header", "base\n", "x" * 300, "base" * (place + 2)])
    elif kind == 2:
        header["tensors"].append(copy.deepcopy(described))
    else:
        header["tensors"].reverse()
        if len(header["tensors"]) == 1:
            header["tensors"] = []
    return with_header(target, header)


def wrong_values(target, dice):
    """NaN, an infinity, or values beyond any training, in the last tensor of the payload."""
    if target.header["precision"] == "int8":
        return wrong_bytes(target, dice)
    width, form = (2, "<e") if target.header["precision"] == "half" else (4, "<f")
    payload = bytearray(target.payload)
    kind = dice.randrange(4)
    value = [float("nan"), float("inf"), float("-inf"), 60_000.0 if width == 2 else 3e38][kind]
    count = 1 if kind < 3 else 3
    for place in range(count):
        payload[len(payload) - (place + 1) * width : len(payload) - place * width] = struct.pack(form, value)
    return with_header(target, target.header, bytes(payload))


def wrong_bytes(target, dice):
    """The same for int8, which has no NaN: the largest exponent, one beyond it, or an unused byte."""
    *_, last = decode(target.wire).tensors.values()
    count = len(last if isinstance(last, torch.Tensor) else last.values)
    blocks = -(-count // BLOCK)
    payload = bytearray(target.payload)
    block, kind = dice.randrange(blocks), dice.randrange(3)
    exponent = len(payload) - count - blocks + block
    begin = len(payload) - count + BLOCK * block
    end = min(begin + BLOCK, len(payload))
    payload[exponent] = HIGHEST + (kind == 1)
    payload[begin:end] = bytes([127]) * (end - begin)
    if kind == 2:
        payload[dice.randrange(begin, end)] = 128  # -128
    return with_header(target, target.header, bytes(payload))


def wrong_index(target, dice):
    """Bytes of an index, or of a mask of rows, that point elsewhere."""
    payload = bytearray(target.payload)
    for place in range(dice.randrange(4, 12)):  # the first tensor's index, or in a dense tensor its first values
        payload[place] = 255
    if target.header["tensors"][0]["encoding"] == "dense":
        payload[:8] = b"\xff" * 8  # NaN
    return with_header(target, target.header, bytes(payload))


def wrong_reply_field(target, dice):
    """A field that a client reports."""
    header = copy.deepcopy(target.header)
    name = dice.choice(sorted(header["fields"]))
    wrong = ["9", "<b>x", [2.0], [1.0] * 50, [None], {}, {"bytes": -1}]
    if name in ("examples", "accuracy", "size", "images", "density", "metrics", "stopped"):
        wrong += [-1, 0.5, None, 10**17]
    header["fields"][name] = dice.choice(wrong)
    if dice.random() < 0.2:
        deep = 0
        for _ in range(dice.choice([40, 500])):
            deep = [deep]
        header["fields"]["deep"] = deep
    return with_header(target, header)


WAYS = [wrong_key, wrong_field, wrong_size, wrong_kind, wrong_values, wrong_index, wrong_length, wrong_reply_field]
WAYS += [not_a_header]


@pytest.mark.parametrize("count", [QUICK, pytest.param(STRUCTURED, marks=pytest.mark.long)])
def test_structured_mutations(targets, count):
    throw(targets, count, lambda target, dice: dice.choice(WAYS)(target, dice))


def test_every_field_of_a_reply_is_checked(targets):
    for target in targets:
        assert {"valid_accuracy", "valid_loss", "train_loss", "rate", "metrics"} <= target.header["fields"].keys()
        for name in target.header["fields"]:
            header = {**target.header, "fields": {**target.header["fields"], name: "high"}}
            with pytest.raises(RejectedReply, match=name):
                target.open(with_header(target, header))


def test_impossible_values_are_rejected_for_what_they_are(targets):
    """In every precision, and not because a length is wrong."""
    dice, said = random.Random(1), {target.header["precision"]: set() for target in targets}
    for number in range(200):
        target = targets[number % len(targets)]
        with pytest.raises(RejectedReply) as caught:
            target.open(wrong_values(target, dice))
        text = str(caught.value)
        said[target.header["precision"]] |= {word for word in ("max_update_norm", "finite", "int8") if word in text}
    assert said == {
        "float32": {"max_update_norm", "finite"},
        "half": {"max_update_norm", "finite"},
        "int8": {"max_update_norm", "int8"},
    }


def test_an_unchanged_message_with_a_new_checksum_passes(targets):
    """Otherwise the tests above would pass because of a wrong checksum."""
    for target in targets:
        assert with_header(target, target.header) == target.wire
        target.open(with_header(target, target.header))


def test_an_error_reply_has_nothing_else(targets):
    """Its tensors would be counted and kept."""
    target = targets[0]
    ids = (f"client-{target.client}", "server", next(iter(target.pending)), (), 0, 0)
    assert target.open(encode(Message(*ids, error="disk full"))).error == "disk full"
    many = {f"=x{number}": torch.ones(1) for number in range(100)}
    for more in ({"tensors": many}, {"fields": {"images": 3}}):
        with pytest.raises(RejectedReply, match="failure"):
            target.open(encode(Message(*ids, error="disk full", **more)))


# ---- requests --------------------------------------------------------------------------------------------------------


class RequestTarget(Target):
    """A valid request, and the client that receives it."""

    def __init__(self, runtime, state, wire):
        self.runtime, self.client = runtime, int(decode(wire).receiver.removeprefix("client-"))
        self.state = copy.deepcopy(state)
        super().__init__(wire)
        self.state, self.bits = state, state_bits(state)

    def open(self, wire):
        answer(self.runtime, self.client, self.state, wire)


@pytest.fixture(scope="module")
def requests():
    """The first request of each method's second task, which has all tensors that a client can receive."""
    found = []
    for words in (
        {"method": "fedweit", "method__biases": "shared"},
        {"method": "fedweit", "precision": "int8"},
        {"method": "fedavg", "precision": "half"},
        {"method": "scaffold", "method__keep": 0.05},
        {"method": "fedcurv"},
    ):
        running = Run(tiny(**SMALL, tasks=2, **words)).go_to(1)
        states, before = copy.deepcopy(running.clients), len(running.wires)
        wire = running.go().wires[before]
        client = int(decode(wire).receiver.removeprefix("client-"))
        found.append(RequestTarget(running.runtime, states[client], wire))
    assert {name.partition("/")[0] for target in found for name in decode(target.wire).tensors} == {
        *("weights", "biases", "foreign", "variate", "fisher", "fisher_theta")
    }
    return found


def wrong_shape(target, dice):
    """Well-formed tensors of another network, or one that is unknown and larger than the network."""
    asked = decode(target.wire)
    name = dice.choice(sorted(asked.tensors))
    true = size(asked.tensors[name])
    nothing = (torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    if dice.random() < 0.2:
        name, others = dice.choice(["theta", "foreign/9.9", "a/b"]), [Sparse(2**30, *nothing)]
    else:
        others = [
            *(Sparse(count, *nothing) for count in (LARGEST, true - 1, true + 1, 2 * true, 0)),
            *(torch.zeros(count) for count in (true - 1, true + 1, 0)),
            Rows(((1, LARGEST),), torch.zeros(1, dtype=torch.bool), torch.zeros(0)),
            Rows(((1, true),), torch.zeros(1, dtype=torch.bool), torch.zeros(0)),
            Rows(((true, 1),), torch.ones(true, dtype=torch.bool), dense(asked.tensors[name])),
            Rows((), torch.zeros(0, dtype=torch.bool), torch.zeros(0)),
        ]
    asked.tensors[name] = dice.choice(others)
    return encode(asked, target.header["precision"])


def strange_request(target, dice):
    """For another client, about an unknown task, or with an unknown operation."""
    header = copy.deepcopy(target.header)
    key, values = dice.choice(
        [
            ("sender", ["x", "client-0", "", 5]),
            ("receiver", ["client-9", "server", "client-", None]),
            ("task", [-1, 2, 99, 2**31 - 1, 2**40, "1", 0.5]),
            ("ops", [["rm"], ["train", "train"], ["begin", "__class__"], "train", [5], {}]),
            ("precision", ["pickle", None, 8]),
            ("tensors", [[], {}, None]),
            ("fields", [[], None, "x"]),
        ]
    )
    header[key] = dice.choice(values)
    return with_header(target, header)


ASKING = [wrong_shape, strange_request, wrong_field, wrong_size, wrong_length, not_a_header]


@pytest.mark.parametrize("count", [QUICK, pytest.param(STRUCTURED, marks=pytest.mark.long)])
def test_requests(requests, count):
    """Rejected before the state of the client changes."""
    throw(requests, count, lambda target, dice: dice.choice(ASKING)(target, dice))
    throw(requests, count, lambda target, dice: mutated(target.wire, dice))
    for target in requests:
        assert differences(state_bits(target.state), target.bits) == []


@pytest.mark.parametrize("name", ["weights", "foreign/1.0", "theta"])
def test_a_small_request_that_claims_gigabytes(requests, name):
    target = requests[0]
    huge = Sparse(LARGEST, torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    words = ("server", f"client-{target.client}", "1.0.0", ("begin", "receive"), 1, 0)
    wire = encode(Message(*words, {name: huge}, {"foreign": []}))
    assert len(wire) < 300
    with pytest.raises(MessageError, match=r"has 2,147,483,647 values|is not one of this method"):
        target.open(wire)


def test_checking_a_request_is_fast(requests):
    target = requests[0]
    asked, runtime = decode(target.wire), target.runtime
    layout, classes = runtime.context(0, 0).layout, [list(runtime.class_ids(target.client, 0))]
    began = time.perf_counter()
    for _ in range(100):
        assert request_fault(asked, target.client, runtime.method, layout, classes) == ""
    assert time.perf_counter() - began < 0.1  # a millisecond each, and it takes a tenth of one
