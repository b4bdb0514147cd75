"""What was skipped for want of a package or a browser is said aloud, at the end and in red: a skip is easily missed."""

from __future__ import annotations

from typing import Any

from skips import LOUD


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ()) if report.longrepr]
    for reason in sorted({reason.partition(LOUD)[2] for reason in reasons if LOUD in reason}):
        count = sum(LOUD + reason in each for each in reasons)
        terminalreporter.write_sep("!", f"NOT TESTED ({count}): {reason}", red=True, bold=True)
