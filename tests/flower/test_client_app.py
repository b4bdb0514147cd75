"""The client app without processes: errors stay at the site, and a reply is in the audit log before it is sent."""

from __future__ import annotations

from pathlib import Path

import pytest
from federation import TINY
from flwr.app import Context, RecordDict
from loop_grid import request

from weft.errors import WeftError
from weft.flower import audit_log, client_app, site_policy
from weft.flower.envelope import SiteReply, SiteRequest, pack, unpack_reply
from weft.flower.site_state import FAILED
from weft.plan import Plan

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path


def ask(site: Path) -> SiteReply:
    message = pack(SiteRequest(request(0).wire, "run-0", Plan.merge(TINY).toml(), 0), 7, 60.0)
    context = Context(0, 7, {"site": str(site), "hub": "hub:1"}, RecordDict(), {})
    return unpack_reply(client_app.on_message(message, context))


@pytest.mark.parametrize(
    "damage",
    [
        lambda site: (site / audit_log.FILE).mkdir(),  # cannot be written
        lambda site: (site / site_policy.LEAVE_FILE).mkdir(),
        lambda site: (site / site_policy.POLICY_FILE).mkdir(),
    ],
    ids=["audit", "leaving", "policy"],
)
def test_an_error_at_a_site_is_only_in_its_log(site, damage, capsys):
    damage(site)
    with pytest.raises(WeftError) as error:
        ask(site)
    assert str(error.value) == FAILED
    assert str(site) in capsys.readouterr().err


def test_a_reply_is_recorded_and_a_site_that_left_sends_none(site):
    assert ask(site).wire
    assert {row["run"] for row in audit_log.read(site)[0]} == {"run-0"}
    site_policy.leave(site)
    assert ask(site) == SiteReply(left=True)
    assert [notice["run"] for notice in site_policy.leave_notices(site)] == ["run-0"]
