"""The server's work alone: merging a round's replies, and a knowledge base that grows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from weft.bench.timing import Tell, seconds_of, spread
from weft.core.client import World
from weft.core.loop import SERVER_MEMORY
from weft.core.storage import Archive, State
from weft.methods.fedweit.formulas import rows_in_turn
from weft.methods.method import initial_body
from weft.plan import Plan
from weft.randomness import generator
from weft.wire.message import Message
from weft.wire.tensors import Rows, Sparse, nbytes

DIFFERENT = 16  # replies that are really there: 60 MB, more than the caches hold; a thousand of them take turns
SMALL = 3_000  # nonzeros of an A in the large knowledge bases: ten thousand of full size would fill 24 GB of disk


def measure(plan: dict[str, Any], messages: list[int], entries: list[int], repeats: int, tell: Tell) -> dict[str, Any]:
    world = World(Plan(**plan, device="cpu"))
    found: dict[str, Any] = {"aggregation": {}, "knowledge_base": {}, "different_replies": DIFFERENT}
    total, done = len(messages) + len(entries) + 1, 0
    replies = make_replies(world, DIFFERENT)
    server = opened(world)
    for count in messages:
        turns = [replies[place % DIFFERENT] for place in range(count)]
        seconds = [seconds_of(world.method.aggregate, server, turns) for _ in range(repeats)]
        found["aggregation"][str(count)] = {
            "seconds": spread(seconds),
            "milliseconds_per_message": 1e3 * spread(seconds)["median"] / count,
        }
        tell(done := done + 1, total)
    full = int(world.plan.method_options["adaptive_keep"] * world.lesson(0, 0).layout.weights)
    for count, nonzeros in [(10, full), *((count, SMALL) for count in entries)]:
        name = f"{count} of {nonzeros} values"
        found["knowledge_base"][name] = {"entries": count} | knowledge_base(world, count, nonzeros, repeats)
        tell(done := done + 1, total)
    return found


def opened(world: World, folder: Path | None = None) -> State:
    lesson = world.lesson(0, 0)
    server = State(archive=Archive(folder, owner="server"))
    world.method.open_server(server, initial_body(lesson.network, world.plan.seed), lesson.layout, world.plan)
    return server


def make_replies(world: World, count: int) -> list[Message]:
    """Replies as clients send them after a round: the same rows of bases that differ from client to client."""
    layout = world.lesson(0, 0).layout
    found = []
    for client in range(count):
        rng = generator(world.plan.seed, "bench", "reply", client)
        base = torch.from_numpy(rng.standard_normal(layout.weights, dtype="float32"))
        rows = Rows.of(base, layout.segments, rows_in_turn(layout, 0, world.plan.method_options["keep"]))
        found.append(Message(f"client-{client}", "server", "bench", (), 0, 0, {"base": rows}, {"examples": 200}))
    return found


def knowledge_base(world: World, count: int, nonzeros: int, repeats: int) -> dict[str, Any]:
    """Store `count` A's and sample from them, as the loop does: what goes beyond its share of memory goes to disk."""
    size = world.lesson(0, 0).layout.weights
    rng = generator(world.plan.seed, "bench", "kb")
    step = count  # of a task later than all that is stored
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        server = opened(world, Path(folder))
        places = torch.from_numpy(rng.permutation(size)[:nonzeros]).sort().values.int()
        entry = Sparse(size, places, torch.from_numpy(rng.standard_normal(nonzeros, dtype="float32")))

        def store(place: int) -> None:
            own = Sparse(size, entry.indices.clone(), entry.values.clone())  # each takes its own memory
            reply = Message("client-1", "server", "bench", (), place, 0, {"adaptive": own})
            world.method.collect(server, 1, place, reply)
            server.archive.spill(SERVER_MEMORY)

        def sample(client: int) -> None:
            world.method.brief(server, client, step, True, world.plan)
            server.archive.spill(SERVER_MEMORY)

        stored = sum(seconds_of(store, place) for place in range(count))
        sampled = [seconds_of(sample, client) for client in range(2, 2 + max(3, repeats))]
        return {
            "bytes_per_entry": nbytes(entry),
            "store_milliseconds_per_entry": 1e3 * stored / count,
            "sample_milliseconds": 1e3 * spread(sampled)["median"],
            "memory_bytes": server.archive.nbytes,
            "disk_bytes": sum(file.stat().st_size for file in Path(folder).iterdir()),
        }
