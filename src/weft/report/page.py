"""One page from groups of runs: HTML that opens without a network, with everything in it that it needs.

All words that come from files pass `escape`, or are JSON; a content security policy lets nothing run but the two
scripts that stand in the page, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from weft.report.facts import Group
from weft.report.figures import COLOURS, SYMBOLS, Figure, Section
from weft.report.learning_figures import (
    accuracy_section,
    accuracy_words,
    adaptation_section,
    alone_section,
    forgetting_section,
    matrix_section,
)
from weft.report.sharing_figures import density_section, helping_section, traffic_section
from weft.report.tables import measures_html, overview_html, overview_words, terms_html

SECTIONS = (
    accuracy_section,
    matrix_section,
    forgetting_section,
    adaptation_section,
    alone_section,
    helping_section,
    traffic_section,
    density_section,
)
MARKS = dict(zip(SYMBOLS, "●■◆▲✚★✖▼⬟⬢", strict=True))


def page(groups: Sequence[Group], live: Mapping[str, Any] | None = None) -> str:
    """The whole page; with `live`, the status of a run that it will go on asking for."""
    content = contents(groups, live)
    plotly, program = asset("plotly-cartesian.min.js"), asset("page.js")
    return asset("page.html").format(
        policy=policy([plotly, program], live is not None),
        title=escape(content["title"]),
        style=asset("page.css"),
        live="yes" if live is not None else "no",
        head=content["html"]["head"],
        bar=content["html"]["bar"],
        status=content["html"].get("status", ""),
        main="\n".join(f'<section id="{name}">{content["html"][name]}</section>' for name in content["sections"]),
        data=json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        plotly=plotly,
        program=program,
        version=escape(importlib.metadata.version("weft")),
    )


def contents(groups: Sequence[Group], live: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """All that changes from page to page, as JSON: the same for a page at rest and for a live one."""
    sections = [make(groups) for make in SECTIONS] if groups else []
    html = {"head": _head(groups), "bar": _bar(groups)}
    if live is not None:
        html["status"] = _status(live)
    if groups:
        html["overview"] = _overview(groups)
        if beside := measures_html(groups):
            html["measures"] = beside
        html |= {section.name: _section(section) for section in sections}
        html["terms"] = terms_html(groups)
    figures = {figure.name: _spec(figure) for section in sections for figure in section.figures}
    names = [name for name in html if name not in ("head", "bar", "status")]
    return {
        "title": _title(groups),
        "sections": names,
        "html": html,
        "figures": figures,
        "groups": [{"label": group.label, "colour": place % COLOURS} for place, group in enumerate(groups)],
        "over": bool(live and live.get("over")),
    }


def _spec(figure: Figure) -> dict[str, Any]:
    return {
        "traces": markup_free(figure.traces),
        "layout": markup_free(figure.layout),
        "height": figure.height,
        "group": figure.group,
        "client": figure.client,
    }


def markup_free(value: Any, key: str = "") -> Any:
    """Every word that Plotly shows, without markup; templates are written here and have passed `plain`."""
    if isinstance(value, str) and key not in ("hovertemplate", "texttemplate"):
        return value.replace("&", "&amp;").replace("<", "&lt;")
    if isinstance(value, Mapping):
        return {name: markup_free(item, name) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [markup_free(item, key) for item in value]
    return value


def asset(name: str) -> str:
    return resources.files("weft.report").joinpath("assets", name).read_text(encoding="utf-8")


def policy(scripts: Sequence[str], live: bool) -> str:
    """Nothing is loaded from anywhere, and no script runs but these; a live page asks its own server for news."""
    digests = (base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _title(groups: Sequence[Group]) -> str:
    names = ", ".join(dict.fromkeys(group.method for group in groups))
    return f"{names} - weft" if names else "weft"


def _head(groups: Sequence[Group]) -> str:
    if not groups:
        return "<h1>Nothing to show yet</h1>"
    methods = list(dict.fromkeys(group.method for group in groups))
    title = methods[0] if len(methods) == 1 else f"{', '.join(methods[:-1])} and {methods[-1]}"
    first, runs = groups[0].plan, sum(len(group.runs) for group in groups)
    facts = [
        f"{first['clients']} clients, {first['tasks']} tasks each, {first['rounds_per_task']} rounds a task",
        f"{first['scenario']} with {first['network']}",
        f"{runs} run{'s' if runs > 1 else ''}",
    ]
    return f"<h1>{escape(title)}</h1><p class=facts>{' · '.join(map(escape, facts))}</p>"


def _bar(groups: Sequence[Group]) -> str:
    if not groups:
        return ""
    chip = "<button type=button class=chip"
    methods = "".join(
        f'{chip} data-group="{place}" aria-pressed=true style="--own: var(--s{place % COLOURS})">'
        f"<i aria-hidden=true>{MARKS[SYMBOLS[place % len(SYMBOLS)]]}</i> {escape(group.label)}</button>"
        for place, group in enumerate(groups)
    )
    clients = sorted({client for group in groups for client in group.clients})
    people = "".join(f'{chip} data-client="{client}" aria-pressed=false>{client}</button>' for client in clients)
    return (
        f'<div role=group aria-label="Methods that are shown"><span class=of>Methods</span>{methods}</div>'
        f'<div role=group aria-label="Clients that are shown"><span class=of>Clients</span>'
        f"{chip} data-client=mean aria-pressed=true>mean</button>{people}</div>"
    )


def _status(live: Mapping[str, Any]) -> str:
    done, total = live.get("done", 0), live.get("total", 0)
    bar = f'<progress max="{total}" value="{done}" aria-label="progress"></progress>' if total else ""
    return f'<p class="state {escape(str(live["kind"]))}">{escape(str(live["words"]))}</p>{bar}'


def _overview(groups: Sequence[Group]) -> str:
    words = overview_words(groups, accuracy_words(groups))
    return f"<h2>Results</h2>{_words(words)}{overview_html(groups)}"


def _words(text: str) -> str:
    """A sentence in which no number loses its sign of percent at the end of a line."""
    return f"<p class=words>{escape(text).replace(' %', '&nbsp;%')}</p>"


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>{_words(section.words)}"]
    if section.about:
        parts.append(f"<p class=about>{escape(section.about)}</p>")
    if section.figures:
        kind = "figures small" if section.small else "figures"
        parts.append(f'<div class="{kind}">{"".join(map(_figure, section.figures))}</div>')
    if section.caveats:
        lines = "".join(f"<li>{escape(line)}</li>" for line in section.caveats)
        parts.append(f"<div class=caveats><h3>Read with care</h3><ul>{lines}</ul></div>")
    return "".join(parts)


def _figure(figure: Figure) -> str:
    words = escape(figure.words)
    return (
        f'<figure id="fig-{figure.name}" data-name="{figure.name}"><figcaption>{escape(figure.title)}</figcaption>'
        f'<div class=plot role=img aria-label="{words}" style="height:{figure.height}px"></div>'
        "<details class=numbers><summary>The numbers</summary>"
        '<button type=button class="chip save">Save as SVG</button></details></figure>'
    )
