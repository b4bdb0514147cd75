"""Numbers as text, for every output: terminal, page, tables of `weft repro`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from weft.metrics import Spread


def utc(moment: float | None = None) -> str:
    """A time in seconds since 1970; by default now.

    >>> utc(0)
    '1970-01-01 00:00:00'
    """
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))


def duration(seconds: float | None) -> str:
    """
    >>> duration(8.2), duration(95), duration(7300)
    ('8 s', '1 min 35 s', '2 h 1 min')
    """
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float | None) -> str:
    """
    >>> size(999), size(60_258_400), size(1.22e9)
    ('999 B', '60.3 MB', '1.22 GB')
    """
    if count is None:
        return "-"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def points(fraction: float) -> str:
    """A difference in percentage points, with its sign.

    >>> points(-0.1112), points(0.006)
    ('−11.1', '+0.6')
    """
    return f"{100 * fraction:+.1f}".replace("-", "\N{MINUS SIGN}")


def spread_text(value: Spread | tuple[float, float | None] | None, digits: int, sign: str, missing: str = "-") -> str:
    """A mean with its standard deviation.

    >>> spread_text((75.16, 1.25), 1, "±"), spread_text((-0.0001, None), 2, "±"), spread_text(None, 2, "±")
    ('75.2 ± 1.2', '0.00', '-')
    """
    if value is None:
        return missing
    mean = f"{round(value[0], digits) + 0.0:.{digits}f}"  # + 0.0: no -0.00
    return mean if value[1] is None else f"{mean} {sign} {value[1]:.{digits}f}"


def share_of_dense(traffic: Mapping[str, float]) -> float | None:
    """Nonzero values sent (A included) as a share of the same messages with all weights, dense."""
    return 4 * traffic["nonzeros"] / traffic["dense_bytes"] if traffic["dense_bytes"] else None


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first hold numbers."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    rows = [[cell.replace("|", r"\|") for cell in line] for line in (head, rule, *lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shorten(items: list[str]) -> list[str]:
    return [*items[:3], "...", *items[-2:]] if len(items) > 6 else items


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "run"), plural(3, "run")
    ('1 run', '3 runs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
