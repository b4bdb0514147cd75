"""Run folders as TensorBoard's event files, by the writer of the tensorboard package itself (an extra)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from weft import metrics
from weft.errors import WeftError
from weft.report.reading import Run

Point = tuple[str, int, float, float]  # tag, step, seconds since 1970, value


def write_events(runs: Sequence[Run], folder: Path) -> list[Path]:
    """A folder of event files for each run."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):  # seeds of several plans: runs/a/s0 and runs/b/s0
        names = [f"{run.folder.resolve().parent.name}-{name}" for run, name in zip(runs, names, strict=True)]
    places = [folder / name for name in names]
    for place in places:
        if place.exists() and any(place.iterdir()):
            raise WeftError(f"{place} is not empty, and events can only be added; choose another --out")
    for run, place in zip(runs, places, strict=True):
        try:
            writer = EventFileWriter(str(place))
        except OSError as error:
            raise WeftError(f"{place} cannot be written ({error.strerror}); choose another --out") from None
        for tag, step, at, value in points(run):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=at, summary=summary))
        writer.close()
    return places


def points(run: Run) -> Iterator[Point]:
    """Rounds count through all tasks; what is measured after a task stands at its last round."""
    starts = starts_of(run)
    ends: dict[int, float] = {}
    for item in run.rounds:
        step = starts[item.step] + item.round
        ends[item.step] = max(item.at, ends.get(item.step, 0.0))
        for name in ("valid_accuracy", "valid_loss", "train_loss"):
            value = getattr(item, name)
            if value is not None:
                yield f"{name}/client {item.client}", step, item.at, value
    steps = max((len(matrix) for matrix in run.matrices.values()), default=0)
    for task in range(steps):
        at, step = ends.get(task, 0.0), starts[task + 1] - 1
        so_far = [matrix[: task + 1] for matrix in run.matrices.values()]
        for name, measure in (("accuracy", metrics.average_accuracy), ("forgetting", metrics.forgetting)):
            value = metrics.over_clients(measure, so_far)
            if value is not None:
                yield f"after a task/{name}", step, at, value
    yield from _bytes(run, starts, ends)


def starts_of(run: Run) -> list[int]:
    """The number of each task's first round, counted through all tasks; and of what would come after them."""
    return list(itertools.accumulate((run.rounds_of(step) for step in range(run.steps)), initial=0))


def _bytes(run: Run, starts: list[int], ends: dict[int, float]) -> Iterator[Point]:
    sums: dict[tuple[int, int, str], int] = {}
    for item in run.sent:
        step = min(starts[item.step] + item.round, starts[item.step + 1] - 1)
        sums[step, item.step, item.direction] = sums.get((step, item.step, item.direction), 0) + item.bytes
    for (step, task, direction), value in sorted(sums.items()):
        yield f"bytes/{'up' if direction == 'c2s' else 'down'}", step, ends.get(task, 0.0), float(value)
