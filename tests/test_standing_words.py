"""What `weft site status` and `weft hub status` say when something is not well, without Flower."""

from __future__ import annotations

import json

import pytest
from site_helpers import status

from weft import cli_site
from weft.hub import supervision

pytest_plugins = ["site_helpers"]

# ---- the site and its hub --------------------------------------------------------------------------------------------

# as flwr 1.41.0 wrote it: of a site that was let in, of one whose clock was a minute ahead, and of one whose hub had a
# certificate of another authority
START = "INFO :      Starting Flower SuperNode\nINFO:     Started server process [22970]\n"
LET_IN = START + "INFO :      SuperNode ID: 2058310501161292068\n"
ENDED = "INFO :      SuperNode terminated gracefully.\nINFO:     Finished server process [22970]\n"
UNTRUSTED = (
    START
    + """ERROR :     SSL/TLS handshake error detected.
ERROR :     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate (_ssl.c:1006)
"""
)
SILENT = "without having been let in since 2001-09-09 01:46:40 UTC, and Flower does not say why"


@pytest.mark.parametrize(
    ("log", "failing", "said", "word"),
    [
        (START + ENDED, 1e9, SILENT, "silent"),
        (START + ENDED + START, 1e9, SILENT, "silent"),
        (LET_IN + ENDED + START + ENDED, 1e9, SILENT, "silent"),  # an earlier start was let in
        (LET_IN + ENDED + START + ENDED + START, 1e9, SILENT, "silent"),
        (UNTRUSTED + START + ENDED, 1e9, SILENT, "silent"),
        (START + ENDED + START, 0.0, "", ""),  # stopped before it was let in, and started again by a person
        (LET_IN + ENDED + START, 1e9, "", ""),  # on its way up again: not in, and nothing is known to be wrong
        (START + ENDED + LET_IN, 1e9, "", "in"),  # the clock was set right
        (UNTRUSTED, 1e9, "certificate is not accepted since 2001-09-09 01:46:40 UTC: it has expired", "untrusted"),
        (UNTRUSTED + START, 1e9, "ask the hub for a new invitation", "untrusted"),
    ],
)
def test_a_site_that_is_not_let_in_says_why(site, log, failing, said, word, capsys):
    (site / "logs" / "supernode.log").write_text(log)
    processes = {"supernode": {"pid": 1, "starts": 5, "failing": failing}}
    (site / supervision.FILE).write_text(json.dumps({"supervisor": 1, "processes": processes}))
    with supervision.hold(site):
        told = status(site, capsys)
        cli_site.status_command(site, as_json=True)
    assert said in told
    assert bool(said) == ("the hub" in told)
    assert "cannot be reached" not in told
    assert json.loads(capsys.readouterr().out)["link"] == word
    assert ("clock is more than 5 s ahead" in told, "not invited any more" in told) == (2 * (word == "silent",))
