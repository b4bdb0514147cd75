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
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from weft.metrics import Spread
from weft.report import charts, facts, learning, sharing, text
from weft.report.facts import Group
from weft.report.reading import Run
from weft.runs.journal import USUAL, plain

SYMBOLS = "●■◆▲✚★✖▼⬟⬢"  # as charts.SYMBOLS


def sections(groups: Sequence[Group]) -> list[charts.Section]:
    """The sections of the page, in order."""
    builders = (
        *(learning.gain, learning.accuracy, learning.matrices, learning.forgetting, learning.adaptation),
        *(sharing.helping, sharing.traffic, sharing.density),
    )
    return [build(groups) for build in builders] if groups else []


def page(groups: Sequence[Group], live: Mapping[str, Any] | None = None) -> str:
    """The whole page; `live` is the status of a run in progress, which the page then polls."""
    content = contents(groups, live)
    scripts = [asset("plotly-cartesian.min.js"), asset("page.js")]
    data = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    facts = {"content": content, "data": data, "live": live is not None, "version": importlib.metadata.version("weft")}
    parts = {"policy": policy(scripts, live is not None), "style": asset("page.css"), "scripts": scripts}
    return _templates().get_template("page.html").render(facts | parts)


def contents(groups: Sequence[Group], live: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that differs between pages, as JSON; a live page replaces it piece by piece."""
    parts: Any = _templates().get_template("parts.html").module
    html = {"head": parts.head(groups), "bar": parts.bar(groups)}
    if live is not None:
        html["status"] = parts.status(live)
    shown = sections(groups)
    if groups:
        html["overview"] = parts.overview(groups)
        html["measures"] = parts.measures(groups, [facts.other_metrics(group) for group in groups])
        html |= {section.name: parts.section(section) for section in shown}
        html["setup"] = parts.setup(groups, **_setup(groups))
    html = {name: str(piece).strip() for name, piece in html.items()}
    return {
        "title": ", ".join([*dict.fromkeys(group.method for group in groups)]) + (" - weft" if groups else "weft"),
        "sections": [name for name, piece in html.items() if piece and name not in ("head", "bar", "status")],
        "html": html,
        "figures": {chart.name: charts.spec(chart) for section in shown for chart in section.charts},
        "groups": [{"label": group.label, "color": index % charts.COLORS} for index, group in enumerate(groups)],
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
        "plain": plain,
        **{name: getattr(text, name) for name in ("size", "duration", "plural")},
        "percent": _percent,
        "spread": lambda value: text.spread_text(value, 3, "±"),
        "sentence": lambda value: value.replace(" %", "\N{NO-BREAK SPACE}%"),  # number and sign on one line
        "symbol": lambda index: SYMBOLS[index % len(SYMBOLS)],
        "color": lambda index: f"--own: var(--s{index % charts.COLORS})",
        "row": facts.row,
    }
    found.globals |= {"ranking": learning.ranking, "warnings": learning.warnings}
    return found


def _percent(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{text.spread_text((100 * value.mean, value.deviation and 100 * value.deviation), 1, '±')} %"


def _setup(groups: Sequence[Group]) -> dict[str, Any]:
    """The plans, the environments and the incidents of the journals."""
    runs = [run for group in groups for run in group.runs]
    events = [(event, run.folder.name) for run in runs for event in run.events if event.kind not in USUAL]
    rows = [(event.when, name, event.text) for event, name in sorted(events, key=lambda pair: (pair[0].at, pair[1]))]
    rows += [("-", run.folder.name, note) for run in runs for note in run.notes]
    rows += [("-", group.label, note) for group in groups for note in group.notes]
    differing = facts.differences(groups)
    return {
        "summary": _incidents(runs),
        "incidents": rows,
        # an option that only one method has is no difference in setup: it is in its plan
        "differing": {key: values for key, values in differing.items() if values.count(None) < len(values) - 1},
        "environments": facts.collect((json.dumps(run.environment, indent=2), run.folder.name) for run in runs),
    }


def _incidents(runs: Sequence[Run]) -> str:
    kinds = [event.kind for run in runs for event in run.events if event.is_incident]
    resumed, unread = kinds.count("resumed"), sum(len(run.notes) for run in runs)
    parts = [f"resumed {text.plural(resumed, 'time')}"] if resumed else []
    parts += [text.plural(len(kinds) - resumed, "other incident")] if len(kinds) > resumed else []
    parts += [f"{text.plural(unread, 'item')} could not be read"] if unread else []
    return f"{', '.join(parts).capitalize()}." if parts else f"No incidents in {text.plural(len(runs), 'run')}."
