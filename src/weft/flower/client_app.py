"""The client app: what runs at a site, once for each message, in a process that Flower starts and that then ends.

A site runs the code that is installed there (runner.py), on data that is there, and says only what `memory` answers.
The plan comes from the hub, so it is read with suspicion: it may not name code by a file or module.
"""

from __future__ import annotations

import contextlib
import re
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from weft.errors import WeftError
from weft.flower import audit_log, leaving
from weft.flower.envelope import Answered, BadEnvelope, reply, unpack
from weft.flower.sharing import shared_at
from weft.flower.site_policy import fault
from weft.flower.site_state import FAILED, Memory, NotYet
from weft.plan import Plan, flat_keys
from weft.scenarios import sites

RUN_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z.@+-]{0,127}")  # it becomes the name of a folder


def on_message(message: Message, context: Context) -> Message:
    began = time.perf_counter()
    site = Path(str(context.node_config["site"]))
    with at_home():
        if leaving.has_left(site):
            leaving.note(site, _run_of(message))
            return reply(Answered(left=True), message)
    try:
        asked = unpack(message)
    except BadEnvelope as bad:
        raise WeftError(f"a message of the hub was refused: {bad}") from None
    if not RUN_NAME.fullmatch(asked.run):
        raise WeftError("the run has a name that is no name for a folder")
    if not asked.wire:  # only whether the site is still a member
        return reply(Answered(), message)
    plan = sites.at_site(read_plan(asked.plan), site)
    if not 0 <= asked.client < plan.clients:
        raise WeftError(f"there is no client {asked.client} in a plan of {plan.clients}")
    with at_home():
        try:
            wire = Memory(site / "state" / asked.run, with_share(plan, site), asked.client).answer(asked.wire)
        except NotYet as why:
            return reply(Answered(waiting=str(why)), message)
        audit_log.note(site, str(context.node_config.get("hub", "")), asked.run, wire)
    return reply(Answered(wire, time.perf_counter() - began), message)


@contextlib.contextmanager
def at_home() -> Iterator[None]:
    """What goes wrong here stands in the site's log alone: it may name files, tasks and classes."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        raise WeftError(FAILED) from None


def _run_of(message: Message) -> str:
    """The name of the run that a message belongs to, if it says one that can be written down."""
    try:
        name = unpack(message).run
    except BadEnvelope:
        return ""
    return name if RUN_NAME.fullmatch(name) else ""


def with_share(plan: Plan, site: Path) -> Plan:
    """The plan with what the site shares of A, where it shares less than the plan asks for."""
    own, asked = shared_at(site), plan.method_options.get("share")
    if asked is None or own == "all" or asked == "nothing":
        return plan
    less = own if own == "nothing" or asked == "all" else min(int(own), int(asked))
    return plan.model_copy(update={"method_options": {**plan.method_options, "share": less}})


def read_plan(text: str) -> Plan:
    """A plan that the hub sent. What it names must be weft's own: to check a plan loads the code that it names."""
    given = flat_keys(text)
    if why := fault(given):
        raise WeftError(f"the hub's plan was refused: {why}")
    return Plan.merge(given)


app = ClientApp()
app.train("weft")(on_message)
