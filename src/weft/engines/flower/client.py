"""The client app: what runs at a site, once for each message, in a process that Flower starts and that then ends.

A site runs the code that is installed there (runner.py), on data that is there, and says only what `memory` answers.
The plan comes from the hub, so it is read with suspicion: it may not name code by a file or module.
"""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from weft.engines.flower import left
from weft.engines.flower.envelope import Answered, BadEnvelope, reply, unpack
from weft.engines.flower.memory import Memory, NotYet
from weft.errors import Problem
from weft.plan import Plan

RUN_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z.@+-]{0,127}")  # it becomes the name of a folder

OWN_NAME = re.compile(r"[0-9a-z][0-9a-z@+-]*")  # of a method or network: neither a file nor a module


def on_message(message: Message, context: Context) -> Message:
    began = time.perf_counter()
    site = Path(str(context.node_config["site"]))
    if (site / "leaving").exists():
        return reply(Answered(left=True), message)
    try:
        asked = unpack(message)
        if not RUN_NAME.fullmatch(asked.run):
            raise Problem("the run has a name that is no name for a folder")
        plan = read_plan(asked.plan)
        if not 0 <= asked.client < plan.clients:
            raise Problem(f"there is no client {asked.client} in a plan of {plan.clients}")
        wire = Memory(site / "state" / asked.run, plan, asked.client).answer(asked.wire)
    except NotYet as why:
        return reply(Answered(waiting=str(why)), message)
    except BadEnvelope as fault:
        raise Problem(f"a message of the hub was refused: {fault}") from None
    left.note(site, str(context.node_config.get("hub", "")), asked.run, wire)
    return reply(Answered(wire, time.perf_counter() - began), message)


def read_plan(text: str) -> Plan:
    """A plan that the hub sent. What it names must be weft's own: to check a plan loads the code that it names."""
    given = tomllib.loads(text)
    for part in ("method", "network"):
        named = given.get(part)
        if not isinstance(named, str) or not OWN_NAME.fullmatch(named):
            raise Problem(f"the hub's plan has {part}={named!r}; a site runs only what comes with weft")
    if "for" in given:
        raise Problem("the hub's plan has sections for other methods; it should be whole")
    return Plan.merge(given)


app = ClientApp()
app.train("weft")(on_message)
