"""The server's work: merging the replies of a round, and a growing knowledge base."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from weft.plan import Plan
from weft.randomness import generator
from weft.wire.tensors import Sparse, nbytes

from .internals import BenchServer, Runtime, layout_of, make_updates
from .timing import Progress, quartiles, seconds_of

DIFFERENT = 16  # distinct replies: 60 MB, more than the caches hold; a thousand replies repeat them
SMALL = 3_000  # nonzeros of an A in large knowledge bases: ten thousand of full size would fill 24 GB of disk


def measure(
    plan: dict[str, Any], messages: list[int], entries: list[int], repeats: int, progress: Progress
) -> dict[str, Any]:
    runtime = Runtime(Plan(**plan, device="cpu"))
    results: dict[str, Any] = {"aggregation": {}, "knowledge_base": {}, "different_replies": DIFFERENT}
    total, done = len(messages) + len(entries) + 1, 0
    distinct = make_updates(runtime, DIFFERENT)
    server = BenchServer(runtime)
    for count in messages:
        replies = [distinct[index % DIFFERENT] for index in range(count)]
        seconds = quartiles([seconds_of(server.aggregate, replies) for _ in range(repeats)])
        milliseconds = 1e3 * seconds["median"] / count
        results["aggregation"][str(count)] = {"seconds": seconds, "milliseconds_per_message": milliseconds}
        progress(done := done + 1, total)
    full = int(runtime.plan.method_options["adaptive_keep"] * layout_of(runtime).weights)
    for count, nonzeros in [(10, full), *((count, SMALL) for count in entries)]:
        name = f"{count} of {nonzeros} values"
        results["knowledge_base"][name] = {"entries": count} | knowledge_base(runtime, count, nonzeros, repeats)
        progress(done := done + 1, total)
    return results


def knowledge_base(runtime: Runtime, count: int, nonzeros: int, repeats: int) -> dict[str, Any]:
    """Store `count` A's and sample from them, as the loop does."""
    size = layout_of(runtime).weights
    rng = generator(runtime.plan.seed, "bench", "kb")
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        server = BenchServer(runtime, Path(folder))
        indices = torch.from_numpy(rng.permutation(size)[:nonzeros]).sort().values.int()
        entry = Sparse(size, indices, torch.from_numpy(rng.standard_normal(nonzeros, dtype="float32")))

        def store(task: int) -> None:
            server.store(task, Sparse(size, entry.indices.clone(), entry.values.clone()))  # memory for each entry

        stored = sum(seconds_of(store, task) for task in range(count))
        sampled = [seconds_of(server.sample, client, count) for client in range(2, 2 + max(3, repeats))]
        return {
            "bytes_per_entry": nbytes(entry),
            "store_milliseconds_per_entry": 1e3 * stored / count,
            "sample_milliseconds": 1e3 * quartiles(sampled)["median"],
            "memory_bytes": server.memory_bytes,
            "disk_bytes": sum(file.stat().st_size for file in Path(folder).iterdir()),
        }
