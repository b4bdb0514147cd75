"""The client app: the code that runs at a site, in a new process for each message.

Flower ships an app, which is Python code, from the hub to every site and runs it there. `main`, which a site runs in
place of `flwr-clientapp`, ignores the shipped code and runs the installed client app below, on data of the site. So an
attacker who controls a hub can send bad parameters but cannot run code at a site. The plan comes from the hub too: it
is checked before it is loaded, because it may name code.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from weft.errors import WeftError
from weft.flower import audit_log, site_policy, size_guard
from weft.flower.envelope import EnvelopeError, SiteReply, pack_reply, unpack
from weft.flower.site_state import FAILED, SiteState, TaskNotAvailableError
from weft.scenarios import sites


def main() -> None:
    """Flower's client app program with the installed app instead of the shipped one."""
    size_guard.patch(
        run_clientapp,
        install_from_fab=lambda *_, **__: None,
        install_app_dependencies=lambda *_, **__: None,
        get_load_client_app_fn=lambda *_, **__: lambda *_: app,
    )
    size_guard.install()
    flwr_clientapp()


def on_message(message: Message, context: Context) -> Message:
    start = time.perf_counter()
    site = Path(str(context.node_config["site"]))
    with errors_stay_here():
        if site_policy.has_left(site):
            run = ""
            with contextlib.suppress(EnvelopeError):
                run = unpack(message).run
            site_policy.record_leave_notice(site, run)
            return pack_reply(SiteReply(left=True), message)
    try:
        request = unpack(message)
    except EnvelopeError as error:
        raise WeftError(f"the site rejects the message: {error}") from None
    if not request.wire:  # the hub only asks whether the site is still a member
        return pack_reply(SiteReply(), message)
    plan = sites.at_site(site_policy.read_plan(request.plan), site)
    if not 0 <= request.client < plan.clients:
        raise WeftError(f"the site rejects the message: client {request.client} of {plan.clients}")
    with errors_stay_here():
        policy = site_policy.read_policy(site)
    if reason := policy.plan_fault(plan):
        raise WeftError(f"the site rejects the hub's plan: {reason}")
    with errors_stay_here():
        state = SiteState(site / "state" / request.run, plan, request.client, policy)
        try:
            wire = state.answer(request.wire)
        except TaskNotAvailableError as reason:
            return pack_reply(SiteReply(waiting=str(reason)), message)
        audit_log.record(site, str(context.node_config.get("hub", "")), request.run, wire)
    return pack_reply(SiteReply(wire, time.perf_counter() - start), message)


@contextlib.contextmanager
def errors_stay_here() -> Iterator[None]:
    """Write an error to the site's log only: it may name files, tasks and classes."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise WeftError(FAILED) from None


app = ClientApp()
app.train("weft")(on_message)
