"""The benchmark as tables: the same rows in the terminal and in results/bench.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from weft.errors import WeftError
from weft.files import write_text
from weft.report.text import duration, markdown_table, percent, size

from .bars import POINTS_ALLOWED
from .figure import check_matplotlib, draw

Results = Mapping[str, Any]
TITLES = {  # of the parts
    "steps": "training steps",
    "wire": "encoding and decoding",
    "server": "server work",
    "start": "command to first step",
    "workers": "one and two workers",
    "memory": "few and many clients",
    "engine": "default FedWeIT plan",
    "paired": "the same with all rows of B",
    "peers": "FedAvg on Flower",
}


class Table(NamedTuple):
    """A title, headings, rows, and a note on how it was measured."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def tables(results: Results) -> Iterator[Table]:
    yield bars_table(results)
    yield steps_table(results["steps"])
    engine, server = results["engine"], results["server"]
    note = (
        f"The default FedWeIT plan: {engine['clients']} clients, {engine['tasks']} tasks of "
        f"{engine['rounds_per_task']} rounds, one worker; {engine['rounds_per_second']:.2f} rounds and "
        f"{engine['images_per_second']:.0f} images per second. Finished tasks are tested only at the end of a task."
    )
    shares = [(category, percent(share)) for category, share in engine["shares"].items()]
    yield Table("Time of a round", ("category", "share"), shares, note)
    yield runs_table(results)
    yield traffic_table(engine)
    if "paired" in results:
        yield paired_table(results["paired"])
    rates = [f"{act}_megabytes_per_second" for act in ("encode", "decode", "copy")]
    rows = [(form, size(one["bytes"]), *(f"{one[key]:,.0f}" for key in rates)) for form, one in results["wire"].items()]
    yield Table("Encoding, MB/s", ("LeNet as", "encoded size", "encode", "decode", "plain copy"), rows)
    merged = [
        (f"{int(count):,}", f"{one['seconds']['median']:.3f}", f"{one['milliseconds_per_message']:.2f}")
        for count, one in server["aggregation"].items()
    ]
    note = f"{server['different_replies']} different replies, repeated."
    yield Table("Server: merging the replies of a round", ("replies", "seconds", "ms per reply"), merged, note)
    yield knowledge_table(server)
    if "peers" in results:
        yield peers_table(results["peers"])


def bars_table(results: Results) -> Table:
    yes_no = {True: "yes", False: "no", None: "-"}
    rows = [
        (
            bar["what"],
            *(number(bar[key]) for key in ("value", "bar", "aim")),
            yes_no[bar["met"]],
            yes_no[bar["aim_met"]],
        )
        for bar in results["bars"]
    ]
    note = f"The bytes are of a run with an accuracy of {percent(results['engine']['accuracy'])}."
    if "paired" in results:
        note += f" They count as saved only if at most {POINTS_ALLOWED} points of accuracy are lost (table below)."
    else:
        note += " With --quick the bars on bytes ignore accuracy, which is not compared with all rows in float32."
    if not results["memory"]["clients"]["1000"]["complete"]:
        limit = results["memory"]["limit_seconds"]
        note += f" The run of 1,000 clients was stopped after {limit:.0f} s, with its rounds done."
    return Table("Bars", ("what", "measured", "bar", "aim", "bar met", "aim met"), rows, note)


def steps_table(steps: Results) -> Table:
    rows = []
    for name, one in steps["contenders"].items():
        seconds, overhead = one["step_seconds"], one.get("round_seconds")
        rows.append(
            (
                name,
                f"{1e3 * seconds['median']:.1f}",
                f"{1e3 * seconds['low']:.1f} to {1e3 * seconds['high']:.1f}",
                f"{one['images_per_second']:.0f}",
                percent(one["share_of_peak"]),
                "-" if overhead is None else f"{1e3 * overhead['median']:.1f}",
            )
        )
    noise = steps["noise"]
    note = (
        f"One thread, batches of {steps['batch_size']}; {steps['operations_per_image'] / 1e6:.1f} million operations "
        f"per image; the peak is {steps['peak_operations_per_second'] / 1e9:.1f} billion per second. Low to high: "
        "quartiles. Finished tasks of FedWeIT are built by its hooks from random numbers, not trained. "
        f"Two equal contenders (task 2, 5 foreign A's) differed by a factor of {noise['median']:.3f}, quartiles "
        f"{noise['low']:.2f} to {noise['high']:.2f}: no ratio is more precise than that."
    )
    headings = ("training step", "ms", "low to high", "images per second", "of peak", "ms to start and end a round")
    return Table("Training step of one client", headings, rows, note)


def runs_table(results: Results) -> Table:
    workers, memory, start = results["workers"], results["memory"], results["start"]["seconds"]
    rows = [
        (f"{workers['clients']} equal clients, workers: {count}", f"{rate:.2f}", "-", "yes")
        for count, rate in workers["rounds_per_second"].items()
    ]
    for count, one in memory["clients"].items():
        run = f"{int(count):,} clients, {min(int(count), memory['asked_per_round'])} per round"
        complete = "yes" if one["complete"] else "no"
        rows.append((run, f"{one['rounds_per_second']:.2f}", size(one["peak_bytes"]), complete))
    note = (
        f"Real `weft run` processes. First step after {start['median']:.2f} s "
        f"({start['low']:.2f} to {start['high']:.2f}). Memory: of all processes, shared pages counted once. "
        f"Not complete: stopped after {memory['limit_seconds']:.0f} s."
    )
    return Table("Whole runs", ("run", "rounds per second", "peak memory", "complete"), rows, note)


def traffic_table(engine: Results) -> Table:
    rows = []
    for direction, label in (("c2s", "upload"), ("s2c", "download")):
        one = engine["traffic"][direction]
        kinds = [one[f"{kind}bytes_per_round"] for kind in ("dense_", "paper_", "")]
        rows.append((label, *map(size, kinds), f"{one['over_dense']:.3f}"))
    note = (
        f"Of the same run, accuracy {percent(engine['accuracy'])}, forgetting {engine['forgetting']:.3f}; a value of "
        f"a sparse A takes {engine['bits_per_adaptive_value']:.1f} bits. The paper's measure: 4 bytes per nonzero."
    )
    headings = ("", "dense", "paper's measure", "measured", "measured over dense")
    return Table("Bytes per round, all clients", headings, rows, note)


def paired_table(paired: Results) -> Table:
    columns = list(paired["accuracy"].values())
    rows: list[tuple[str, ...]] = [
        (str(seed), percent(default), percent(dense), f"{100 * (default - dense):+.1f}")
        for seed, default, dense in zip(paired["seeds"], *columns, strict=True)
    ]
    rows.append(("mean", *(percent(fmean(column)) for column in columns), f"{-paired['points_lost']:+.1f}"))
    headings = ("seed", "default", "all rows of B, float32", "points, default over all rows")
    return Table("Accuracy cost of the saved bytes", headings, rows, f"The same plan with {paired['tasks']} tasks.")


def knowledge_table(server: Results) -> Table:
    rows = [
        (
            f"{one['entries']:,}",
            size(one["bytes_per_entry"]),
            f"{one['store_milliseconds_per_entry']:.2f}",
            f"{one['sample_milliseconds']:.2f}",
            size(one["memory_bytes"]),
            size(one["disk_bytes"]),
        )
        for one in server["knowledge_base"].values()
    ]
    note = "The first row has A's of LeNet's full size, the others small ones."
    headings = ("entries", "size of one", "ms to store one", "ms to sample", "in memory", "on disk")
    return Table("Server: knowledge base", headings, rows, note)


def peers_table(peers: Results) -> Table:
    rows = [
        (label, f"{one['round_seconds']['median']:.2f}", f"{one['seconds']:.1f}", percent(one["accuracy"]))
        for label, one in (("Flower's simulation, plain LeNet", peers["flower"]), ("weft", peers["weft"]))
    ]
    note = (
        f"{peers['clients']} clients, {peers['rounds']} rounds, batches of {peers['batch_size']}, {peers['workers']} "
        f"processes; {peers['turns']} runs each, in turns; total seconds include the start. "
        "Flower's clients also average the head; weft's keep theirs."
    )
    return Table("FedAvg", ("", "seconds per round", "seconds in total", "accuracy"), rows, note)


def number(value: float | None) -> str:
    """
    >>> number(2.4), number(0.0971), number(24), number(None)
    ('2.4', '0.097', '24', '-')
    """
    if value is None:
        return "-"
    return f"{value:.2f}".rstrip("0").rstrip(".") if value >= 1 else f"{value:.3f}".rstrip("0")


def to_terminal(table: Table) -> Group:
    rich = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(table.headings):
        rich.add_column(heading, justify="right" if index else "left", overflow="fold")
    for row in table.rows:
        rich.add_row(*row)
    return Group(Text(table.title, style="bold"), rich, Text(f"{table.note}\n"))


def to_markdown(results: Results) -> str:
    machine = results["machine"]
    options = f"{' --quick' if results['quick'] else ''}{' --peers' if 'peers' in results else ''}"
    lines = [
        "# Benchmark of one machine",
        "",
        f"Made by `weft bench{options} --out results` in {duration(results['seconds'])} on {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}, weft {machine['weft']}. "
        "[docs/performance.md](../docs/performance.md) explains the measurements.",
        "",
    ]
    for table in tables(results):
        lines += [f"## {table.title}", "", markdown_table(table.headings, table.rows), ""]
        lines += [table.note, ""] if table.note else []
    return "\n".join(lines)


class Files:
    """The files of a benchmark in a folder, if there is one: bench-parts.json until all parts are measured."""

    def __init__(self, folder: Path | None):
        """Fail before anything is measured if something would be missing at the end."""
        self._folder = folder
        self.parts: list[str] = []  # that are saved
        if folder is None:
            return
        check_matplotlib()
        self._partial = folder / "bench-parts.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._partial.touch()
            self._partial.unlink()
        except OSError as error:
            raise WeftError(f"cannot write to {folder} ({error.strerror}); choose another --out") from None

    def save_partial(self, found: Results) -> None:
        if self._folder is not None:
            write_text(self._partial, json.dumps(found, indent=2) + "\n")
            self.parts = list(found["part_seconds"])

    def describe_partial(self) -> str:
        if not self.parts:
            return "nothing was written"
        return f"the parts measured so far ({', '.join(self.parts)}) are in {self._partial}"

    def write(self, results: Results) -> list[Path]:
        """Write bench.json, bench.md and the figure; return their paths."""
        if self._folder is None:
            return []
        files = {"bench.json": json.dumps(results, indent=2) + "\n", "bench.md": to_markdown(results)}
        for name, text in files.items():
            write_text(self._folder / name, text)
        self._partial.unlink(missing_ok=True)
        picture = self._folder / "bench-growth.png"
        draw(results, picture)
        return [*(self._folder / name for name in files), picture]
