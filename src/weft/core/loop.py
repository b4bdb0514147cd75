"""Algorithm 1 of the paper, for any method, in synchronous rounds.

Line 1, B_c = theta_G, is `ClientState.start`; lines 3, 6 and 8 are a method's `configure`, `receive` and `upload`. The
loop knows no method and no engine. It can stop after any round and resume from a checkpoint with the same bits: nothing
is remembered but `Progress` and the server's state, and everything random is drawn anew from the plan's seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.exchange import Exchange
from weft.core.schedule import Schedule
from weft.core.task_end import TaskEnd


@dataclass
class Federation:
    """A server and its clients, ready to run; core/loop_async.py runs it without rounds."""

    schedule: Schedule
    exchange: Exchange
    task_end: TaskEnd

    def run(self) -> None:
        exchange, progress, plan = self.exchange, self.exchange.progress, self.exchange.plan
        method, server = exchange.method, exchange.server
        for round_index in range(progress.round, self.schedule.rounds):  # lines 2 and 4
            assignments = self.schedule.assignments(round_index, progress.clients)  # line 5
            assignments, replies = exchange.available(assignments)
            self.task_end.before_round(assignments)  # what these clients missed while they were away
            replies += exchange.collect(assignments, plan.quorum)  # lines 3, 6, 7 and 8
            exchange.check_round(replies)
            method.aggregate(server, exchange.updates(replies), exchange.ctx)  # lines 9 and 11
            self.task_end.after_round(self.schedule.ending(round_index))  # tests, and line 11 where a reply was lost
            progress.task, progress.round = self.schedule.lowest_task(round_index + 1), round_index + 1
            exchange.events.round_done(progress)  # tables and checkpoint
        self.task_end.after_run()
