"""The benchmark as tables: the same rows in the terminal and in results/bench.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from weft.bench.bars import POINTS_ALLOWED
from weft.files import write_text
from weft.report.screens import duration, size


class Sheet(NamedTuple):
    """One table: a title, headings, rows, and a line below on how it was measured."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def sheets(found: Mapping[str, Any]) -> Iterator[Sheet]:
    yield bars_sheet(found)
    yield steps_sheet(found["steps"])
    yield engine_sheet(found["engine"])
    yield runs_sheet(found)
    yield traffic_sheet(found["engine"])
    if "paired" in found:
        yield paired_sheet(found["paired"])
    yield wire_sheet(found["wire"])
    yield aggregation_sheet(found["server"])
    yield knowledge_sheet(found["server"])
    if "peers" in found:
        yield peers_sheet(found["peers"])


def bars_sheet(found: Mapping[str, Any]) -> Sheet:
    words = {True: "yes", False: "no", None: "-"}
    rows = [
        (
            bar["what"],
            number(bar["value"]),
            number(bar["bar"]),
            number(bar["aim"]),
            words[bar["met"]],
            words[bar["aim_met"]],
        )
        for bar in found["bars"]
    ]
    engine, limited = found["engine"], found["memory"]["clients"]["1000"]
    note = f"The bytes are those of a run that reached an accuracy of {100 * engine['accuracy']:.1f} %."
    if "paired" in found:
        note += f" They count as saved only if no more than {POINTS_ALLOWED} points are lost (a table below)."
    else:
        note += (
            " Whether all rows in float32 would have reached more was not asked: with --quick the bars on bytes are "
            "judged by bytes alone."
        )
    if not limited["complete"]:
        note += (
            f" The run of 1,000 clients was stopped after {found['memory']['limit_seconds']:.0f} s, its rounds done."
        )
    return Sheet("Bars", ("what", "measured", "bar", "aim", "bar met", "aim met"), rows, note)


def steps_sheet(steps: Mapping[str, Any]) -> Sheet:
    rows = []
    for name, one in steps["contenders"].items():
        seconds, around = one["step_seconds"], one.get("round_seconds")
        rows.append(
            (
                name,
                f"{1e3 * seconds['median']:.1f}",
                f"{1e3 * seconds['low']:.1f} to {1e3 * seconds['high']:.1f}",
                f"{one['images_per_second']:.0f}",
                f"{100 * one['share_of_peak']:.1f} %",
                "-" if around is None else f"{1e3 * around['median']:.1f}",
            )
        )
    noise = steps["noise"]
    note = (
        f"One thread, batches of {steps['batch_size']}; {steps['operations_per_image'] / 1e6:.1f} million operations "
        f"an image; the peak is {steps['peak_operations_per_second'] / 1e9:.1f} billion a second. Low to high: the "
        "middle half of the turns. Pasts of FedWeIT are put together by its hooks out of drawn numbers, not trained. "
        f"Two equal contenders (task 2, 5 foreign A's) came out {noise['median']:.3f} apart, single passes "
        f"{noise['low']:.2f} to {noise['high']:.2f}: no ratio is known better than that."
    )
    headings = ("training step", "ms", "low to high", "images a second", "of peak", "ms to open and close a round")
    return Sheet("One client's training step", headings, rows, note)


def engine_sheet(engine: Mapping[str, Any]) -> Sheet:
    rows = [(part, f"{100 * share:.1f} %") for part, share in engine["shares"].items()]
    note = (
        f"The default FedWeIT plan: {engine['clients']} clients, {engine['tasks']} tasks of "
        f"{engine['rounds_per_task']} rounds, one worker; {engine['rounds_per_second']:.2f} rounds and "
        f"{engine['images_per_second']:.0f} images a second. Past tasks are tested at task ends only."
    )
    return Sheet("Where the time of a round goes", ("part", "share"), rows, note)


def runs_sheet(found: Mapping[str, Any]) -> Sheet:
    workers = found["workers"]
    rows = [
        (f"{workers['clients']} equal clients, workers: {count}", f"{rate:.2f}", "-", "yes")
        for count, rate in workers["rounds_per_second"].items()
    ]
    for count, one in found["memory"]["clients"].items():
        asked = min(int(count), found["memory"]["asked_per_round"])
        words = f"{int(count):,} clients, {asked} asked a round"
        rows.append(
            (words, f"{one['rounds_per_second']:.2f}", size(one["peak_bytes"]), "yes" if one["complete"] else "no")
        )
    start = found["start"]["seconds"]
    note = (
        f"Real `weft run` processes. First step after {start['median']:.2f} s "
        f"({start['low']:.2f} to {start['high']:.2f}). "
        "Memory: of all processes, what they share counted once. Not run to its end: stopped after "
        f"{found['memory']['limit_seconds']:.0f} s."
    )
    return Sheet("Whole runs", ("run", "rounds a second", "peak memory", "run to its end"), rows, note)


def traffic_sheet(engine: Mapping[str, Any]) -> Sheet:
    rows = []
    for direction, words in (("c2s", "up"), ("s2c", "down")):
        one = engine["traffic"][direction]
        kinds = [one[f"{kind}bytes_per_round"] for kind in ("dense_", "paper_", "")]
        rows.append((words, *map(size, kinds), f"{one['over_dense']:.3f}"))
    note = (
        f"Of that same run, accuracy {100 * engine['accuracy']:.1f} %, forgetting {engine['forgetting']:.3f}; a value "
        f"of a sparse A takes {engine['bits_per_adaptive_value']:.1f} bits. The paper's measure: 4 bytes a nonzero."
    )
    return Sheet("Bytes a round, all clients", ("", "dense", "paper's measure", "real", "real over dense"), rows, note)


def paired_sheet(paired: Mapping[str, Any]) -> Sheet:
    columns = zip(paired["seeds"], *paired["accuracy"].values(), strict=True)
    rows: list[tuple[str, ...]] = [
        (str(seed), f"{100 * ours:.1f} %", f"{100 * dense:.1f} %", f"{100 * (ours - dense):+.1f}")
        for seed, ours, dense in columns
    ]
    rows.append(
        (
            "mean",
            *(f"{100 * fmean(each):.1f} %" for each in paired["accuracy"].values()),
            f"{-paired['points_lost']:+.1f}",
        )
    )
    headings = ("seed", "as it is", "all rows of B, float32", "points, as it is over all rows")
    note = f"The same plan with {paired['tasks']} tasks. The mean is what counts."
    return Sheet("What the bytes saved cost: accuracy", headings, rows, note)


def wire_sheet(wire: Mapping[str, Any]) -> Sheet:
    rows = [
        (
            kind,
            size(one["bytes"]),
            *(f"{one[f'{act}_megabytes_per_second']:,.0f}" for act in ("encode", "decode", "copy")),
        )
        for kind, one in wire.items()
    ]
    return Sheet("The wire, MB/s", ("LeNet as", "on the wire", "encode", "decode", "plain copy"), rows)


def aggregation_sheet(server: Mapping[str, Any]) -> Sheet:
    rows = [
        (f"{int(count):,}", f"{one['seconds']['median']:.3f}", f"{one['milliseconds_per_message']:.2f}")
        for count, one in server["aggregation"].items()
    ]
    note = f"{server['different_replies']} different replies take turns."
    return Sheet("Server: merging replies of a round", ("messages", "seconds", "ms a message"), rows, note)


def knowledge_sheet(server: Mapping[str, Any]) -> Sheet:
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
    headings = ("entries", "size of one", "ms to store one", "ms to sample", "values in memory", "on disk")
    return Sheet("Server: knowledge base", headings, rows, note)


def peers_sheet(peers: Mapping[str, Any]) -> Sheet:
    rows = [
        (
            label,
            f"{one['round_seconds']['median']:.2f}",
            f"{one['seconds']:.1f}",
            f"{100 * one['accuracy']:.1f} %",
        )
        for label, one in (("Flower's simulation, plain LeNet", peers["flower"]), ("weft", peers["weft"]))
    ]
    note = (
        f"{peers['clients']} clients, {peers['rounds']} rounds, batches of {peers['batch_size']}, {peers['workers']} "
        f"processes; each {peers['turns']} times, in turns; seconds of the whole include starting. "
        "Flower's clients average the head too, weft's keep theirs."
    )
    return Sheet("FedAvg", ("", "seconds a round", "seconds in all", "accuracy"), rows, note)


def number(value: float | None) -> str:
    """
    >>> number(2.4), number(0.0971), number(24), number(None)
    ('2.4', '0.097', '24', '-')
    """
    return (
        "-" if value is None else f"{value:.2f}".rstrip("0").rstrip(".") if value >= 1 else f"{value:.3f}".rstrip("0")
    )


def in_terminal(sheet: Sheet) -> Group:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return Group(Text(sheet.title, style="bold"), table, Text(f"{sheet.note}\n"))


def in_markdown(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    command = " ".join(
        ["weft bench", *(["--quick"] if found["quick"] else []), *(["--peers"] if "peers" in found else [])]
    )
    lines = [
        "# What this machine gives",
        "",
        f"Made by `{command} --out results` in {duration(found['seconds'])} on {machine['processor']}, "
        f"{machine['cores']} cores, torch {machine['torch']}, Python {machine['python']}, weft {machine['weft']}. "
        "[docs/performance.md](../docs/performance.md) says how it is measured.",
        "",
    ]
    for sheet in sheets(found):
        lines += [f"## {sheet.title}", "", f"| {' | '.join(sheet.headings)} |"]
        lines.append(f"| {' | '.join(['---', *['---:'] * (len(sheet.headings) - 1)])} |")
        lines += [f"| {' | '.join(row)} |" for row in sheet.rows]
        lines += ["", sheet.note, ""] if sheet.note else [""]
    return "\n".join(lines)


def write(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """bench.json and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"bench.json": json.dumps(found, indent=2) + "\n", "bench.md": in_markdown(found)}
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]
