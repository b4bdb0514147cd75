"""The page: groups of runs as one HTML file that opens without a network.

Templates are in assets/. Jinja2 escapes every text that comes from a file, or it is JSON. A content security policy
allows the two scripts in the page and nothing else, and no request.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from weft.metrics import Spread
from weft.report import charts, facts, plotly, text
from weft.report.charts import learning
from weft.report.facts import Group
from weft.report.reading import USUAL, Run

MODELS = {
    "own": "the client's model after its last epoch",
    "global": "the client's model after the next global weights",
}
SYMBOLS = "●■◆▲✚★✖▼⬟⬢"  # as plotly.SYMBOLS


def page(groups: Sequence[Group], live: Mapping[str, Any] | None = None) -> str:
    """The whole page; `live` is the status of a run in progress, which the page then polls."""
    content = contents(groups, live)
    scripts = [asset("plotly-cartesian.min.js"), asset("page.js")]
    data = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return (
        _templates()
        .get_template("page.html")
        .render(
            policy=policy(scripts, live is not None),
            content=content,
            style=asset("page.css"),
            live=live is not None,
            data=data,
            scripts=scripts,
            version=importlib.metadata.version("weft"),
        )
    )


def contents(groups: Sequence[Group], live: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that differs between pages, as JSON; a live page replaces it piece by piece."""
    parts: Any = _templates().get_template("parts.html").module
    html = {"head": parts.head(groups), "bar": parts.bar(groups)}
    if live is not None:
        html["status"] = parts.status(live)
    shown = charts.sections(groups)
    if groups:
        html["overview"] = parts.overview(groups, _meaning(groups))
        html["measures"] = parts.measures(groups, [facts.other_metrics(group) for group in groups])
        html |= {section.name: parts.section(section) for section in shown}
        html["setup"] = parts.setup(groups, **_setup(groups))
    html = {name: str(piece).strip() for name, piece in html.items()}
    return {
        "title": ", ".join([*dict.fromkeys(group.method for group in groups)]) + (" - weft" if groups else "weft"),
        "sections": [name for name, piece in html.items() if piece and name not in ("head", "bar", "status")],
        "html": html,
        "figures": {chart.name: plotly.spec(chart) for section in shown for chart in section.charts},
        "groups": [{"label": group.label, "color": index % plotly.COLORS} for index, group in enumerate(groups)],
        "over": bool(live and live.get("over")),
    }


def asset(name: str) -> str:
    return resources.files("weft.report").joinpath("assets", name).read_text(encoding="utf-8")


def policy(scripts: Sequence[str], live: bool) -> str:
    """Load nothing and run only these scripts; a live page may poll its own server."""
    digests = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    source = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {source}; base-uri 'none'; form-action 'none'"
    )


@functools.cache
def _templates() -> jinja2.Environment:
    loader = jinja2.FunctionLoader(asset)
    found = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    found.filters |= {
        "percent": _percent,
        "size": lambda value: "-" if value is None else text.size(value),
        "duration": lambda value: "-" if value is None else text.duration(value),
        "spread": lambda value: text.spread_text(value, 3, "±"),
        "plain": text.plain,
        "sentence": lambda value: value.replace(" %", "\N{NO-BREAK SPACE}%"),  # number and sign on one line
        "symbol": lambda index: SYMBOLS[index % len(SYMBOLS)],
        "color": lambda index: f"--own: var(--s{index % plotly.COLORS})",
        "row": facts.row,
        "plural": text.plural,
    }
    found.globals |= {"ranking": learning.ranking, "warnings": learning.warnings}
    return found


def _percent(value: Spread | None) -> str:
    if value is None:
        return "-"
    scaled = (100 * value.mean, None if value.deviation is None else 100 * value.deviation)
    return f"{text.spread_text(scaled, 1, '±')} %"


def _meaning(groups: Sequence[Group]) -> str:
    names = dict.fromkeys(str(group.plan.get("measured_model", "own")) for group in groups)
    models = " / ".join(MODELS.get(name, name) for name in names)
    several = "; with several seeds the mean ± one standard deviation" if any(len(g.runs) > 1 for g in groups) else ""
    return (
        f"Accuracy: on the test images of every task learned, at the end{several}. The tested model is {models}. "
        "Up and down: bytes, and the nonzero values sent as a share of dense weights. Model: everything needed for all "
        "tasks; paper's: nonzero values of B and A only. Bytes and sizes are of all clients, the mean over seeds."
    )


def _setup(groups: Sequence[Group]) -> dict[str, Any]:
    """The plans, the environments and the incidents of the journals."""
    runs = [run for group in groups for run in group.runs]
    events = sorted(
        (event.at, run.folder.name, event.text) for run in runs for event in run.events if event.kind not in USUAL
    )
    dated = [(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)), name, line) for at, name, line in events]
    notes = [("-", run.folder.name, note) for run in runs for note in run.notes]
    notes += [("-", group.label, note) for group in groups for note in group.notes]
    environments: dict[str, list[str]] = {}
    for run in runs:
        environments.setdefault(json.dumps(run.environment, indent=2), []).append(run.folder.name)
    differing = facts.differences(groups)
    return {
        "summary": _incidents(runs),
        "incidents": dated + notes,
        # an option that only one method has is no difference in setup: it is in its plan
        "differing": {key: values for key, values in differing.items() if values.count(None) < len(values) - 1},
        "environments": environments,
    }


def _incidents(runs: Sequence[Run]) -> str:
    kinds = [event.kind for run in runs for event in run.events if event.is_incident]
    resumed, unread = kinds.count("resumed"), sum(len(run.notes) for run in runs)
    parts = [f"resumed {text.plural(resumed, 'time')}"] if resumed else []
    parts += [text.plural(len(kinds) - resumed, "other incident")] if len(kinds) > resumed else []
    parts += [f"{text.plural(unread, 'item')} could not be read"] if unread else []
    return f"{', '.join(parts).capitalize()}." if parts else f"No incidents in {text.plural(len(runs), 'run')}."
