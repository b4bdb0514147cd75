"""Charts of sharing: attention between clients, bytes sent, density of A and m."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from statistics import fmean

from weft.report import facts
from weft.report.charts import Axis, Chart, Groups, HeatMap, Section, Series, key_of, percents, round_axis
from weft.report.facts import Group
from weft.report.text import percent, shorten, size

DIRECTIONS = {"c2s": "up", "s2c": "down"}
TENSORS = {  # meaning and color of the tensors in the ledger
    "weights up": ("weights of the client", 0),
    "weights down": ("weights of the server", 7),
    "adaptive": ("A, once a task", 1),
    "foreign": ("foreign A's, once a task", 3),
    "biases": ("biases", 5),
    "header": ("headers", 6),
}
SHARES = (  # measure, label, color
    ("attention", "attention", 0),
    ("equal", "with equal weights", "faint"),
    ("added", "attention times norm of A", 1),
)

# ---- who helped whom -------------------------------------------------------------------------------------------------


def helping(groups: Groups) -> Section:
    title = "Who helped whom"
    having = [(index, group) for index, group in enumerate(groups) if any(run.attention for run in group.runs)]
    if not having:
        sentence = "No task here has used another client's A. FedWeIT does, from a client's second task on."
        return Section("helping", title, sentence)
    shown = [chart for one in having for chart in (_pairs(*one), _shares(*one), *_alphas(*one))]
    sentence = " ".join(_helping_sentence(group) for _, group in having)
    return Section("helping", title, sentence, shown, facts.CAVEATS, small=True)


def _helping_sentence(group: Group) -> str:
    found, equal = facts.shares(group), facts.shares(group, "equal")
    most = max(found, key=lambda client: found[client].mean)
    sentence = (
        f"{group.label}: client {most} contributed most, {percent(found[most].mean)} of all attention; with equal "
        f"weights it would be {percent(equal[most].mean)}."
    )
    change = facts.largest_change(group)
    if change is not None:
        sentence += f" Training changed an alpha by at most {percent(change)} of its start"
        sentence += ", so random sampling decided nearly all of it." if change < 0.1 else "."
    return sentence


def _pairs(index: int, group: Group) -> Chart:
    found, added = facts.contributions(group), facts.contributions(group, "added")
    names = [f"client {client}" for client in group.clients]
    pairs = [[(sender, receiver) for receiver in group.clients] for sender in group.clients]
    cells = [[found.get(pair) for pair in row] for row in pairs]
    notes = [[f"added {added.get(pair, 0.0):.3f}" for pair in row] for row in pairs]
    body = HeatMap(f"{group.label}, attention", names, names, cells, (0.0, max(found.values())), 2, notes=notes)
    title = f"{group.label}: attention by sender and receiver"
    sentence = f"{group.label}: the sum of |alpha| over tasks and layers, from sender (row) to receiver (column)."
    chart = Chart(f"helping-pairs-{index}", title, sentence, body, Axis("receiver"), Axis("sender"))
    return replace(chart, height=190 + 34 * len(names), group=index, figure="helping")


def _shares(index: int, group: Group) -> Chart:
    bars = []
    for measure, label, color in SHARES:
        found = facts.shares(group, measure)
        clients = [f"client {client}" for client in found]
        means, deviations = (percents(values) for values in zip(*found.values(), strict=True))
        bars.append(Series(label, clients, means, (), index, None, "bar", deviations, color=color, key=measure))
    sentence = f"{group.label}: each client's share of all contributions, by three measures."
    chart = Chart(f"helping-shares-{index}", f"{group.label}: contribution", sentence, bars, y=Axis("share (%)", "%"))
    return replace(chart, height=190 + 34 * len(group.clients), group=index, legend=True)


def _alphas(index: int, group: Group) -> Iterator[Chart]:
    """Every alpha of the first seed, one chart for each client: other seeds have other tasks."""
    run = next(run for run in group.runs if run.attention)
    layers = [layer.name.removesuffix(".weight") for layer in run.layers]
    for client, found in sorted(facts.collect((item.client, item) for item in run.attention).items()):
        rows = [f"task {item.task} from {item.sender}.{item.sender_task}" for item in found]
        cells = [[alpha * item.count for alpha in item.alphas] for item in found]
        reach = max(abs(value - 1) for row in cells for value in row) or 1e-6
        pairs = [zip(item.alphas, item.norms, strict=True) for item in found]
        notes = [[f"alpha {alpha:.4f}, norm of A {norm:.3f}" for alpha, norm in row] for row in pairs]
        limits = (1 - reach, 1 + reach)
        body = HeatMap(group.title(client), rows, layers, cells, limits, 2, notes=notes, diverging=True)
        title = f"{group.label}: alpha of client {client} times its number of A's (seed {run.seed})"
        sentence = (
            f"{group.title(client)}, seed {run.seed}: alpha of each foreign A and layer, as a multiple of an equal "
            f"weight; the largest difference is {percent(reach)}."
        )
        chart = Chart(f"helping-alpha-{index}-{client}", title, sentence, body, Axis("layer"))
        yield replace(chart, height=170 + 24 * len(rows), group=index, client=str(client))


# ---- communication ---------------------------------------------------------------------------------------------------


def traffic(groups: Groups) -> Section:
    title = "Bytes each way"
    sending = [(index, group) for index, group in enumerate(groups) if facts.rounds_sent(group)]
    if not sending:
        return Section("traffic", title, "Nothing was sent in these runs.")
    totals = []
    for _, group in sending:
        up, down = (sum(sum(each.values()) for each in facts.sent_by_round(group, way).values()) for way in DIRECTIONS)
        totals.append((up + down, f"{group.label} {size(up)} up and {size(down)} down"))
    sentence = f"From least to most: {'; '.join(shorten([text for _, text in sorted(totals)]))}."
    lines = [
        _total_line(index, group, client, direction)
        for index, group in sending
        for client in group.mean_and_clients
        for direction in DIRECTIONS
    ]
    name, y = "Bytes so far: solid up, dashed down; all clients together", Axis("bytes so far", "B")
    total = Chart("traffic-total", name, sentence, lines, round_axis(groups), y, figure="traffic")
    precisions = {group.label: str(group.plan.get("precision", "float32")) for _, group in sending}
    caveats = []
    if len(set(precisions.values())) > 1:
        each = ", ".join(f"{label} as {precision}" for label, precision in precisions.items())
        caveats = [f"Part of the difference is the encoding: {each}. The table has the share of values that are sent."]
    return Section("traffic", title, sentence, [total, *(_tensors(*one) for one in sending)], caveats)


def _total_line(index: int, group: Group, client: int | None, direction: str) -> Series:
    rounds, by_tensor = facts.rounds_sent(group), facts.sent_by_round(group, direction, client)
    sums = accumulate(sum(by_round.get(key, 0.0) for by_round in by_tensor.values()) for key in rounds)
    label = f"{group.label} {DIRECTIONS[direction]}" + ("" if client is None else f", client {client}")
    names = ["at the start", *(f"task {task}, round {number}" for task, number in rounds)]
    xs = [0.0, *(group.position(key, 1.0) for key in rounds)]
    return Series(label, xs, [0.0, *sums], names, index, client, "steps", dashed=direction == "s2c")


def _tensors(index: int, group: Group) -> Chart:
    bars = []
    largest = (0.0, "")
    for direction, way in DIRECTIONS.items():
        for tensor, by_round in facts.sent_by_round(group, direction).items():
            label, color = TENSORS.get(f"{tensor} {way}") or TENSORS.get(tensor, (tensor, len(tensor)))
            largest = max(largest, (sum(by_round.values()), f"{label}, {way}"))
            names = [f"task {task}, round {number}, {way}" for task, number in by_round]
            values = [value if way == "up" else -value for value in by_round.values()]
            widths = [0.8 / group.rounds_of(task) for task, _ in by_round]
            xs = [group.position(key) for key in by_round]
            bars.append(Series(label, xs, values, names, index, None, "bar", (), widths, color, key=label))
    sentence = f"{group.label}: most bytes are {largest[1]} ({size(largest[0])} in total)."
    title, y = f"{group.label}: each round, by tensor", Axis("down | up, per round", "B")
    chart = Chart(f"traffic-tensors-{index}", title, sentence, bars, round_axis([group]), y)
    return replace(chart, height=300, group=index, legend=True, stacked=True)


# ---- density ---------------------------------------------------------------------------------------------------------


def density(groups: Groups) -> Section:
    title = "Density of A and m, layer by layer"
    having = [(index, group) for index, group in enumerate(groups) if any(run.densities for run in group.runs)]
    if not having:
        sentence = "Only methods that decompose weights into B, m and A have this, such as fedweit and apd."
        return Section("density", title, f"{sentence} There is no finished task of such a run here.")
    shown = [chart for one in having for client in one[1].mean_and_clients for chart in _densities(*one, client)]
    sentence = " ".join(_density_sentence(group) for _, group in having)
    return Section("density", title, sentence, shown, small=True)


def _density_sentence(group: Group) -> str:
    found = [item for run in group.runs for item in run.densities]
    layers = [layer.name for layer in group.runs[0].layers]
    by_layer = [(fmean(values), name) for *values, name in zip(*(item.adaptive for item in found), layers, strict=True)]
    (high, dense), (low, sparse) = max(by_layer), min(by_layer)
    masks = [value for item in found for value in item.mask]
    mask = "no value of m is zero" if min(masks) == 1 else f"{percent(fmean(masks))} of m is nonzero"
    return (
        f"{group.label}: A is densest in {dense} ({percent(high)}) and sparsest in {sparse} ({percent(low)}); {mask}."
    )


def _densities(index: int, group: Group, client: int | None) -> list[Chart]:
    found = [item for run in group.runs for item in run.densities if client in (None, item.client)]
    if not found:
        return []
    tasks = sorted({item.task for item in found})
    layers = [layer.name.removesuffix(".weight") for layer in group.runs[0].layers]

    def table(what: str) -> list[list[float]]:
        by_task = [[getattr(item, what) for item in found if item.task == task] for task in tasks]
        return [[fmean(values[level] for values in items) for items in by_task] for level in range(len(layers))]

    mean = table("mask_mean")
    notes = [[f"{percent(value)} nonzero" for value in row] for row in table("mask")]
    shown = (
        ("A", [[100 * value for value in row] for row in table("adaptive")], 100.0, 1, "%", ()),
        ("m", mean, max(1.0, *map(max, mean)), 3, "", notes),
    )
    title, ticks = group.title(client), [str(task) for task in tasks]
    names = [f"task {task}" for task in tasks]
    charts = []
    for label, cells, top, digits, unit, more in shown:
        low, high = (f"{value:.{digits}f}" for value in (min(map(min, cells)), max(map(max, cells))))
        sentence = f"{title}: {label} from {low} to {high} {unit}".rstrip()
        body = HeatMap(label, layers, names, cells, (0.0, top), digits, unit, more, column_ticks=ticks)
        name, height = f"density-{label.lower()}-{index}-{key_of(client)}", 150 + 26 * len(layers)
        chart = Chart(name, f"{label}: {title}", sentence, body, Axis("task"), height=height, group=index)
        figure = "density" if client is None and label == "A" else ""
        charts.append(replace(chart, client=key_of(client), figure=figure))
    return charts
