"""Run folders as event files for TensorBoard, written with the tensorboard package (an extra)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from weft import metrics
from weft.errors import WeftError
from weft.report import facts
from weft.report.reading import Run

Point = tuple[str, int, float, float]  # tag, step, seconds since 1970, value


def write_events(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write a folder of event files for each run."""
    names = [run.folder.resolve().name for run in runs]
    if len(set(names)) < len(names):  # seeds of several plans: runs/a/s0 and runs/b/s0
        names = [f"{run.folder.resolve().parent.name}-{name}" for run, name in zip(runs, names, strict=True)]
    targets = [folder / name for name in names]
    for target in targets:
        if target.exists() and any(target.iterdir()):
            raise WeftError(f"{target} is not empty, and event files can only grow; choose another --out")
    for run, target in zip(runs, targets, strict=True):
        try:
            writer = EventFileWriter(str(target))
        except OSError as error:
            raise WeftError(f"{target} cannot be written ({error.strerror}); choose another --out") from None
        for tag, step, at, value in points(run):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=at, summary=summary))
        writer.close()
    return targets


def points(run: Run) -> Iterator[Point]:
    """Rounds are counted through all tasks; what is measured after a task is at its last round."""
    starts = list(itertools.accumulate((run.rounds_of(task) for task in range(run.tasks)), initial=0))
    ends: dict[int, float] = {}
    for item in run.rounds:
        ends[item.task] = max(item.at, ends.get(item.task, 0.0))
        for name in ("valid_accuracy", "valid_loss", "train_loss"):
            value = getattr(item, name)
            if value is not None:
                yield f"{name}/client {item.client}", starts[item.task] + item.round, item.at, value
    (one,) = facts.group([run])
    for name, measure in (("accuracy", metrics.average_accuracy), ("forgetting", metrics.forgetting)):
        for task, value in enumerate(facts.over_tasks(one, measure)):
            if value is not None:
                yield f"after a task/{name}", starts[task + 1] - 1, ends.get(task, 0.0), value.mean
    sizes = facts.collect(
        ((min(starts[sent.task] + sent.round, starts[sent.task + 1] - 1), sent.task, sent.direction), sent.bytes)
        for sent in run.sent
    )
    for (at, task, direction), total in sorted(sizes.items()):
        yield f"bytes/{'up' if direction == 'c2s' else 'down'}", at, ends.get(task, 0.0), float(sum(total))
