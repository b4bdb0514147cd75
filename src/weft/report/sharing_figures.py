"""Figures of what was shared: bytes on the wire, the density of A and m, and attention: who helped whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from weft.report.facts import MEAN, Group, rounds_sent, sent_by_round
from weft.report.figures import (
    COLOURS,
    Figure,
    Section,
    Trace,
    grid_layout,
    heatmap,
    percents,
    plain,
    round_axis,
    task_borders,
    tidy,
    when,
)
from weft.report.helping import CAVEATS, largest_move, mean_contributions, shares
from weft.report.learning_figures import everybody
from weft.report.screens import size
from weft.report.states import Attention, Density

DIRECTIONS = {"c2s": "up", "s2c": "down"}
PARTS = {  # what the ledger's names of parts mean, and a colour for each
    "base": ("weights of the client", 0),
    "global": ("weights of the server", 7),
    "adaptive": ("A, once a task", 1),
    "foreign": ("foreign A's, once a task", 3),
    "biases": ("biases", 5),
    "header": ("headers", 6),
}


def traffic_section(groups: Sequence[Group]) -> Section:
    about = (
        "Every byte that crossed the wire, headers and indices included. Above: the running total of each method, up "
        "from clients to server and down from it. Below: each round by part, up above the line and down below it."
    )
    talking = [(place, group) for place, group in enumerate(groups) if any(run.sent for run in group.runs)]
    if not talking:
        return Section("traffic", "Bytes each way", "Nothing crossed the wire in these runs.")
    words = _traffic_words([group for _, group in talking])
    figures = [_total_figure(groups, words)]
    figures += [_parts_figure(place, group) for place, group in talking]
    return Section("traffic", "Bytes each way", words, about, figures, _precisions([group for _, group in talking]))


def _precisions(groups: Sequence[Group]) -> list[str]:
    """Where values are written differently, bytes alone do not say who sends fewer of them."""
    written = {group.label: str(group.plan.get("precision", "float32")) for group in groups}
    if len(set(written.values())) < 2:
        return []
    each = ", ".join(f"{label} as {precision}" for label, precision in written.items())
    return [
        f"Part of the difference is how a value is written: {each}. The table has the share of values that are sent."
    ]


def _traffic_words(groups: Sequence[Group]) -> str:
    totals = []
    for group in groups:
        up, down = (
            sum(sum(of_part.values()) for of_part in sent_by_round(group, direction).values())
            for direction in DIRECTIONS
        )
        totals.append((up + down, f"{group.label} {size(up)} up and {size(down)} down"))
    totals.sort()
    quiet = [words for _, words in totals]
    if len(quiet) > 5:
        quiet = [*quiet[:3], "...", quiet[-1]]
    return f"From least to most: {'; '.join(quiet)}."


def _total_figure(groups: Sequence[Group], words: str) -> Figure:
    traces: list[Trace] = []
    for place, group in enumerate(groups):
        rounds = rounds_sent(group)
        for client in everybody(group) if rounds else []:
            for direction, way in DIRECTIONS.items():
                by_part = sent_by_round(group, direction, client)
                sums = accumulate(sum(of_part.get(key, 0.0) for of_part in by_part.values()) for key in rounds)
                who = f"{group.label} {way}" if client is None else f"{group.label} {way}, client {client}"
                traces.append(
                    {
                        "type": "scatter",
                        "mode": "lines",
                        "name": who,
                        "x": [0, *(when(key, group, 1.0) for key in rounds)],
                        "y": [0, *(tidy(value) for value in sums)],
                        "text": ["at the start", *(f"task {step}, round {number}" for step, number in rounds)],
                        "hovertemplate": "%{text}: %{y:.3s}B<extra>" + plain(who) + "</extra>",
                        "line": {
                            "color": f"@{place % COLOURS}",
                            "dash": "solid" if way == "up" else "dash",
                            "width": 2.5 if client is None else 1,
                            "shape": "hv",
                        },
                        "meta": {"group": place, "client": MEAN if client is None else str(client)},
                    }
                )
    steps = max((group.runs[0].steps for group in groups), default=0)
    layout = {
        "xaxis": round_axis(steps),
        "yaxis": {"title": {"text": "bytes so far"}, "tickformat": "~s", "ticksuffix": "B", "rangemode": "tozero"},
        "shapes": task_borders(steps),
    }
    return Figure("traffic-total", "Bytes so far: solid up, dashed down; all clients together", words, traces, layout)


def _parts_figure(place: int, group: Group) -> Figure:
    steps = group.runs[0].steps
    traces: list[Trace] = []
    largest = ("", 0.0)
    shown: set[str] = set()
    for direction, way in DIRECTIONS.items():
        for part, of_part in sent_by_round(group, direction).items():
            sign = 1 if way == "up" else -1
            meaning, colour = PARTS.get(part, (part, len(part)))
            if sum(of_part.values()) > largest[1]:
                largest = (f"{meaning}, {way}", sum(of_part.values()))
            traces.append(
                {
                    "type": "bar",
                    "name": meaning,
                    "legendgroup": part,
                    "showlegend": part not in shown,
                    "x": [when(key, group) for key in of_part],
                    "y": [tidy(sign * value) for value in of_part.values()],
                    "width": [0.8 / group.rounds_of(step) for step, _ in of_part],
                    "text": [
                        f"task {step}, round {number}: {size(value)}" for (step, number), value in of_part.items()
                    ],
                    "textposition": "none",
                    "hovertemplate": "%{text}<extra>" + plain(f"{meaning}, {way}") + "</extra>",
                    "marker": {"color": f"@{colour % COLOURS}"},
                    "meta": {"group": place, "client": None, "part": part, "direction": direction},
                }
            )
            shown.add(part)
    layout = {
        "barmode": "relative",
        "showlegend": True,
        "xaxis": round_axis(steps),
        "yaxis": {"title": {"text": "down | up, a round"}, "tickformat": "~s", "ticksuffix": "B", "zeroline": True},
        "shapes": task_borders(steps),
    }
    words = f"{group.label}: most bytes went into {largest[0]} ({size(largest[1])} in all)."
    return Figure(f"traffic-parts-{place}", f"{group.label}: each round, by part", words, traces, layout, 300, place)


# ---- density ---------------------------------------------------------------------------------------------------------


def density_section(groups: Sequence[Group]) -> Section:
    title = "Density of A and m, layer by layer"
    having = [(place, group) for place, group in enumerate(groups) if any(run.densities for run in group.runs)]
    if not having:
        words = (
            "Only methods that split weights into B, m and A have this, such as fedweit and apd; none is here (yet)."
        )
        return Section("density", title, words)
    about = (
        "Left: of the values of each task's A, how many are not zero, in percent. Right: the mean of the mask m; its "
        "share of values that are not zero stands in the hover text and in the numbers."
    )
    figures = []
    for place, group in having:
        for client in everybody(group):
            figures += _density_figures(place, group, client)
    words = " ".join(_density_words(group) for _, group in having)
    return Section("density", title, words, about, figures, small=True)


def _density_words(group: Group) -> str:
    layers = [layer.name for layer in group.runs[0].layers]
    found = [item for run in group.runs for item in run.densities]
    by_layer = [fmean(item.adaptive[place] for item in found) for place in range(len(layers))]
    full, thin = by_layer.index(max(by_layer)), by_layer.index(min(by_layer))
    masks = [value for item in found for value in item.mask]
    words = (
        f"{group.label}: A is fullest in {layers[full]} ({100 * by_layer[full]:.1f} %) and sparsest in {layers[thin]} "
        f"({100 * by_layer[thin]:.1f} %); "
    )
    if min(masks) == 1:
        return words + "no value of m is zero."
    return words + f"of m, {100 * fmean(masks):.1f} % are not zero."


def _density_figures(place: int, group: Group, client: int | None) -> list[Figure]:
    found = [item for run in group.runs for item in run.densities if client in (None, item.client)]
    steps = sorted({item.step for item in found})
    layers = [layer.name for layer in group.runs[0].layers]
    if not found:
        return []
    who = MEAN if client is None else str(client)
    title = f"{group.label}, {'mean of clients' if client is None else f'client {client}'}"

    def table(what: str) -> list[list[float]]:
        return [[fmean(_of(found, step, what, level)) for step in steps] for level in range(len(layers))]

    adaptive, mask, mean = table("adaptive"), table("mask"), table("mask_mean")
    columns = [str(step) for step in steps]
    rows = [name.removesuffix(".weight") for name in layers]
    hover_a = "A, %{y}, task %{x}: %{z:.2f} % not zero<extra></extra>"
    hover_m = "m, %{y}, task %{x}: mean %{z:.3f}, %{customdata:.1%} not zero<extra></extra>"
    height = 150 + 26 * len(layers)
    shared: dict[str, Any] = {"layout": grid_layout("task", ""), "height": height, "group": place, "client": who}
    number, decimals = ({"texttemplate": f"%{{z:.{digits}f}}"} if len(columns) <= 6 else {} for digits in (1, 3))
    top = max(1.0, *map(max, mean))
    of_a = heatmap(columns, rows, [percents(row) for row in adaptive], hover_a, zmin=0, zmax=100, **number)
    of_m = heatmap(columns, rows, mean, hover_m, customdata=mask, zmin=0, zmax=top, **decimals)
    said = f"density of A from {100 * min(map(min, adaptive)):.1f} % to {100 * max(map(max, adaptive)):.1f} %"
    means = f"mean of m from {min(map(min, mean)):.3f} to {max(map(max, mean)):.3f}"
    return [
        Figure(f"density-a-{place}-{who}", f"A: {title}", f"{title}: {said}.", [of_a], **shared),
        Figure(f"density-m-{place}-{who}", f"m: {title}", f"{title}: {means}.", [of_m], **shared),
    ]


def _of(found: Sequence[Density], step: int, what: str, level: int) -> list[float]:
    return [getattr(item, what)[level] for item in found if item.step == step]


# ---- who helped whom -------------------------------------------------------------------------------------------------


def helping_section(groups: Sequence[Group]) -> Section:
    title = "Who helped whom"
    having = [(place, group) for place, group in enumerate(groups) if any(run.attention for run in group.runs)]
    if not having:
        words = "No task here has used another client's A: that is fedweit's way, from a client's second task on."
        return Section("helping", title, words)
    about = (
        "FedWeIT lets a task use A's of other clients, each weighed by an attention alpha, a number for each layer. "
        "Summed over tasks and layers, the attention that went to a client's A's is its contribution: the paper's idea "
        "of what could be rewarded. Pick clients above to see every alpha of theirs: in it, 'task 2 from 0.1' is how "
        "their task 2 uses what client 0 left after its task 1."
    )
    figures: list[Figure | None] = []
    for place, group in having:
        figures += [_pairs_figure(place, group), _shares_figure(place, group)]
        figures += [_detail_figure(place, group, client) for client in group.clients]
    words = " ".join(_helping_words(group) for _, group in having)
    shown = [figure for figure in figures if figure is not None]
    return Section("helping", title, words, about, shown, CAVEATS, small=True)


def _helping_words(group: Group) -> str:
    found, even = shares(group), shares(group, "even")
    most = max(found, key=lambda client: found[client].mean)
    words = (
        f"{group.label}: client {most} gave most, {100 * found[most].mean:.1f} % of all attention; if every A counted "
        f"alike it would be {100 * even[most].mean:.1f} %."
    )
    move = largest_move(group)
    if move is not None:
        words += f" Training moved an alpha by {100 * move:.1f} % of its start at most"
        words += ", so chance decided nearly all of it." if move < 0.1 else "."
    return words


def _pairs_figure(place: int, group: Group) -> Figure:
    found, added = mean_contributions(group), mean_contributions(group, "added")
    clients = group.clients
    names = [f"client {client}" for client in clients]
    cells = [[found.get((giver, taker)) for taker in clients] for giver in clients]
    hover = [
        [
            f"client {giver} to client {taker}: attention {found.get((giver, taker), 0.0):.3f}, "
            f"added {added.get((giver, taker), 0.0):.3f}"
            for taker in clients
        ]
        for giver in clients
    ]
    text = {"texttemplate": "%{z:.2f}"} if len(clients) <= 10 else {}
    trace = heatmap(names, names, cells, hover, **text)
    words = f"{group.label}: the sum of |alpha| over tasks and layers, from giver (row) to receiver (column)."
    layout = grid_layout("receiver", "giver")
    height = 190 + 34 * len(clients)
    return Figure(f"helping-pairs-{place}", f"{group.label}: attention given", words, [trace], layout, height, place)


def _shares_figure(place: int, group: Group) -> Figure:
    kinds = {"attention": "attention", "even": "if every A counted alike", "added": "attention times the norm of A"}
    traces: list[Trace] = []
    for number, (measure, name) in enumerate(kinds.items()):
        found = shares(group, measure)
        errors = [value.deviation or 0.0 for value in found.values()]
        traces.append(
            {
                "type": "bar",
                "name": name,
                "x": [f"client {client}" for client in found],
                "y": percents(value.mean for value in found.values()),
                "marker": {"color": ("@0", "@faint", "@1")[number]},
                "hovertemplate": "%{x}: %{y:.1f} %<extra>" + name + "</extra>",
                "meta": {"group": place, "client": None, "measure": measure},
                **({"error_y": {"array": percents(errors), "color": "@ink", "thickness": 1}} if any(errors) else {}),
            }
        )
    layout = {
        "barmode": "group",
        "showlegend": True,
        "xaxis": {"type": "category", "showgrid": False},
        "yaxis": {"title": {"text": "share (%)"}, "rangemode": "tozero"},
    }
    words = f"{group.label}: each client's share of what was taken, by three measures."
    height = 190 + 34 * len(group.clients)
    return Figure(f"helping-shares-{place}", f"{group.label}: contribution", words, traces, layout, height, place)


def _detail_figure(place: int, group: Group, client: int) -> Figure | None:
    """Alpha of every foreign A, of the first seed: other seeds have other tasks."""
    run = next(run for run in group.runs if run.attention)
    found = [item for item in run.attention if item.client == client]
    if not found:
        return None
    layers = [layer.name.removesuffix(".weight") for layer in run.layers]
    rows = [f"task {item.step} from {item.giver}.{item.given_step}" for item in found]
    cells = [[alpha * item.among for alpha in item.alphas] for item in found]
    widest = max(abs(value - 1) for row in cells for value in row) or 1e-6
    hover = [[_attention_words(run.layers[level].name, item, level) for level in range(len(layers))] for item in found]
    trace = heatmap(
        layers,
        rows,
        cells,
        hover,
        colorscale="@diverging",
        zmin=1 - widest,
        zmax=1 + widest,
        customdata=[list(item.alphas) for item in found],
        texttemplate="%{z:.2f}",
    )
    words = (
        f"{group.label}, client {client}, seed {run.seed}: alpha of each foreign A and layer, as a multiple of an even "
        f"share; it is off by {100 * widest:.1f} % at most."
    )
    title = f"{group.label}: alpha of client {client}, times how many A's it had (seed {run.seed})"
    height = 170 + 24 * len(rows)
    layout = grid_layout("layer", "")
    return Figure(f"helping-alpha-{place}-{client}", title, words, [trace], layout, height, place, str(client))


def _attention_words(layer: str, item: Attention, level: int) -> str:
    return (
        f"task {item.step} of client {item.client}, A of client {item.giver}, task {item.given_step}, {layer}: "
        f"alpha {item.alphas[level]:.4f}, norm of A {item.norms[level]:.3f}"
    )
