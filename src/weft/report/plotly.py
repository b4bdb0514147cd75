"""A chart as Plotly's traces and layout, ready for JSON.

Colors are names that the page replaces by those of its theme: "@0" is the first group's, "@0~" the same but
transparent, "@ink" that of text; "@sequential" and "@diverging" are color scales. `meta` says to which group and client
a trace belongs, so that the page can switch it on and off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.report.charts import Axis, Chart, HeatMap, Series

Trace = dict[str, Any]
COLORS = 8  # series colors of each theme; further groups repeat them with another symbol and dash
DASHES = ("dot", "dash", "longdash", "dashdot", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "x", "triangle-down", "pentagon", "hexagon")
MAX_COLUMNS = 12  # of a heat map with numbers in its cells
FORMATS = {"": ":.2f}", "%": ":.1f} %", "points": ":+.1f} points", "B": ":.3s}B"}


def spec(chart: Chart) -> dict[str, Any]:
    """What the page needs to draw a chart; no text in it can be read as markup."""
    if isinstance(chart.body, HeatMap):
        traces = [_heat_map(chart.body)]
        layout = _grid(chart)
    else:
        traces = [trace for series in chart.body for trace in _traces(series, chart)]
        layout = _layout(chart)
    shown = {"traces": traces, "layout": layout, "height": chart.height, "group": chart.group, "client": chart.client}
    return {key: clean(value) for key, value in shown.items()}


def clean(value: Any, key: str = "") -> Any:
    """Text without markup, floats with seven digits: a screen shows no more, and the page is half as large."""
    if isinstance(value, str):
        return value if key in ("hovertemplate", "texttemplate") else escape(value)
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {name: clean(item, name) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [clean(item, key) for item in value]
    return value


def escape(text: str) -> str:
    """Plotly reads some HTML tags in every text."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def in_template(text: str) -> str:
    """In a template, Plotly also reads %{...}."""
    return escape(text).replace("%{", "%\u200b{")


def _color(series: Series) -> str:
    color = series.group if series.color is None else series.color
    return f"@{color % COLORS}" if isinstance(color, int) else f"@{color}"


def _traces(series: Series, chart: Chart) -> Iterator[Trace]:
    client = "mean" if series.client is None else str(series.client)
    meta = {"group": series.group, "client": client, "key": series.key}
    trace: Trace = {"name": series.label, "x": series.x, "y": series.y, "text": series.names, "meta": meta}
    value = "%{y" + FORMATS[chart.y.unit]
    if series.kind in ("bar", "dots"):
        meta["client"] = None  # shown for any selection of clients
        trace |= _bars(series, chart)
    else:
        yield from _bands(series, meta)
        trace |= _line(series)
        if any(series.deviations):
            trace["customdata"] = ["" if each is None else f" ± {each:.1f}" for each in series.deviations]
            value += "%{customdata}"
    names = ["%{x}"] if _has_categories(series) else []
    names += ["%{text}"] if series.names else []
    trace["hovertemplate"] = f"{', '.join(names)}: {value}<extra>{in_template(series.label)}</extra>"
    yield trace


def _bars(series: Series, chart: Chart) -> Trace:
    color, symbol = _color(series), SYMBOLS[series.group % len(SYMBOLS)]
    first = next(other for other in _series(chart) if other.key == series.key)
    trace: Trace = {"showlegend": first is series}
    if series.kind == "dots":
        marker = {"color": color, "size": 6, "symbol": f"{symbol}-open"}
        return trace | {"type": "scatter", "mode": "markers", "marker": marker, "offsetgroup": series.key}
    trace |= {"type": "bar", "textposition": "none", "marker": {"color": color}}
    trace |= {"legendgroup": series.key} if chart.stacked else {"offsetgroup": series.key}
    trace |= {"width": series.widths} if series.widths else {}
    if any(series.deviations):
        trace["error_y"] = {"array": series.deviations, "color": "@ink", "thickness": 1}
    return trace


def _line(series: Series) -> Trace:
    thin = series.client is not None
    line: Trace = {"color": _color(series), "width": 1.2 if thin else 2.5}
    trace = {"type": "scatter", "mode": "lines", "connectgaps": False, "line": line}
    if series.kind == "steps":
        line |= {"shape": "hv", "dash": "dash" if series.dashed else "solid"}
        return trace
    if series.client is not None:
        line["dash"] = DASHES[series.client % len(DASHES)]
    elif series.group >= COLORS:
        line["dash"] = "dash"  # another group has the same color
    marker = {"symbol": SYMBOLS[series.group % len(SYMBOLS)], "size": 5 if thin else 8}
    return trace | {"mode": "lines+markers", "marker": marker}


def _bands(series: Series, meta: Trace) -> Iterator[Trace]:
    """One standard deviation around the mean of clients; a gap in the line is a gap in the band."""
    if series.client is not None or not any(series.deviations):
        return
    stretch: list[tuple[float, float, float]] = []
    for x, y, deviation in [*zip(map(float, series.x), series.y, series.deviations, strict=True), (0.0, None, None)]:
        if y is not None and deviation is not None:
            stretch.append((x, y - deviation, y + deviation))
        elif stretch:
            trace: Trace = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
            trace |= {"fill": "toself", "fillcolor": f"{_color(series)}~", "showlegend": False}
            trace["x"] = [x for x, _, _ in stretch] + [x for x, _, _ in reversed(stretch)]
            trace["y"] = [high for _, _, high in stretch] + [low for _, low, _ in reversed(stretch)]
            yield trace | {"meta": {**meta, "band": True}}
            stretch = []


def _series(chart: Chart) -> Sequence[Series]:
    return () if isinstance(chart.body, HeatMap) else chart.body


def _has_categories(series: Series) -> bool:
    return bool(series.x) and isinstance(series.x[0], str)


def _layout(chart: Chart) -> dict[str, Any]:
    bars = any(series.kind == "bar" for series in _series(chart))
    categories = any(map(_has_categories, _series(chart)))
    y: dict[str, Any] = {"title": {"text": chart.y.title}, "zeroline": chart.y.unit == "points" or chart.stacked}
    if chart.y.unit == "B":
        y |= {"tickformat": "~s", "ticksuffix": "B"}
    if not chart.stacked and (chart.y.unit == "B" or (bars and chart.y.unit == "%")):
        y["rangemode"] = "tozero"
    layout: dict[str, Any] = {
        "xaxis": {"type": "category", "showgrid": False} if categories else _x(chart.x),
        "yaxis": y,
    }
    if bars:
        layout |= {"barmode": "relative" if chart.stacked else "group", "scattermode": "group"}
    layout |= {"showlegend": True} if chart.legend else {}
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"color": "@grid", "width": 1}}
    return layout | {"shapes": [{**line, "x0": at, "x1": at} for at in chart.x.borders]}


def _x(axis: Axis) -> dict[str, Any]:
    ticks = {"tickvals": [at for at, _ in axis.ticks], "ticktext": [text for _, text in axis.ticks]}
    return {**ticks, "range": axis.range, "showgrid": not axis.borders}


def _heat_map(body: HeatMap) -> Trace:
    number = f":.{body.digits}f}}"
    value = f"%{{z{number} {body.unit}".rstrip() + (", %{customdata}" if body.notes else "")
    trace = {
        "type": "heatmap",
        "x": body.columns,
        "y": body.rows,
        "z": body.cells,
        "hovertemplate": f"{in_template(body.label)}: %{{y}}, %{{x}}: {value}<extra></extra>",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "colorscale": "@diverging" if body.diverging else "@sequential",
        "showscale": False,
    }
    if body.notes:
        trace["customdata"] = body.notes
    if body.limits is not None:
        trace |= {"zmin": body.limits[0], "zmax": body.limits[1]}
    if len(body.columns) <= MAX_COLUMNS - 2 * body.digits:
        trace["texttemplate"] = "%{z" + number
    return trace


def _grid(chart: Chart) -> dict[str, Any]:
    """Of a heat map: the first row at the top, every row and column named."""
    assert isinstance(chart.body, HeatMap)
    axes = {}
    for key, axis, names, ticks in (
        ("xaxis", chart.x, chart.body.columns, chart.body.column_ticks),
        ("yaxis", chart.y, chart.body.rows, chart.body.row_ticks),
    ):
        axes[key] = {"title": {"text": axis.title}, "type": "category", "showgrid": False, "ticks": ""}
        axes[key] |= {"tickvals": names, "ticktext": ticks} if ticks else {}
    axes["yaxis"] |= {"autorange": "reversed", "automargin": True}
    return axes
